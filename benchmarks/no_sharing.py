"""Do we lose where nothing is shared? 64 prompts of 256 tokens, 64 new ones each.

    python benchmarks/no_sharing.py [--short] [--engines radixkv,vllm,...] [--turns 5]

Greedy, all prompts at once, no two with the same first token, from an empty cache at each turn.
"""

from __future__ import annotations

from pathlib import Path

import plots
import serving
from peers.engines import ENGINES, Field
from serving import Report, Results, Run, Texts


def draw(results: Results, path: Path) -> None:
    """Output tokens/s of each engine."""
    (title, phases), *_ = results.items()
    values = {
        ENGINES[name].title: [serving.tokens_per_second(kept)]
        for name, kept in phases["cold"].items()
    }
    plots.bars(path, f"Nothing shared: {title}", "tokens/s", [""], values)


def main() -> None:
    parser = serving.parser_of(__doc__)
    parser.add_argument("--prompts", type=int, help="64, or 4 if short")
    parser.add_argument("--length", type=int, help="256 tokens, or 32 if short")
    parser.add_argument("--new-tokens", type=int, help="64, or 8 if short")
    options = parser.parse_args()
    if options.short:
        options.turns = 1
    number = options.prompts or (4 if options.short else 64)
    length = options.length or (32 if options.short else 256)
    run = Run(options.new_tokens or (8 if options.short else 64))

    def measure(field: Field, texts: Texts, report: Report) -> None:
        prompts = [texts.alone(place, length) for place in range(number)]
        serving.warm_up(field, prompts, run)
        outcomes = field.turns({"cold": run.cold(prompts)}, options.turns, options.slow_turns)
        title = f"{number} prompts of {length} tokens, {run.max_tokens} new"
        report.case(title, outcomes, {"cold": prompts})

    serving.run_benchmark(options, length + run.max_tokens + 8, number, measure, draw)


if __name__ == "__main__":
    main()
