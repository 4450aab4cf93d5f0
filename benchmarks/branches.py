"""How fast are requests with branches: beam search, and several samples of a prompt?

    python benchmarks/branches.py [--short] [--prefixes 0,1500] [--engines radixkv,vllm,hf] ...

Beam search (4 beams, 4 prompts, 32 tokens) and sampling (8 continuations of 8 prompts, 64 tokens),
from an empty cache at each turn, every continuation run to its full length; prompts of some 40
tokens, alone and behind a shared prefix of 1,500.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import plots
import serving
from peers.engines import ENGINES, Field
from serving import Report, Results, Run, Texts


@dataclass(frozen=True)
class Case:
    """One kind of branches: how many, of how many prompts, how long."""

    run: Run
    prompts: int

    def title(self, prefix: int) -> str:
        kind = "beam" if self.run.kind == "beam" else "n ="
        return (
            f"{kind} {self.run.width}, {self.prompts} prompts behind {prefix} shared tokens, "
            f"{self.run.max_tokens} tokens"
        )


FULL = (Case(Run(32, "beam", 4), 4), Case(Run(64, "sample", 8), 8))
SHORT = (Case(Run(4, "beam", 4), 2), Case(Run(8, "sample", 4), 2))


def measure_case(field: Field, texts: Texts, report: Report, case: Case, prefix: int) -> None:
    """Turns of all engines."""
    prompts = [texts.prefix(prefix) + texts.question(number) for number in range(case.prompts)]
    serving.warm_up(field, prompts, case.run)
    options = report.options
    outcomes = field.turns({"cold": case.run.cold(prompts)}, options.turns, options.slow_turns)
    # Two searches may break a tie in another way; samples are of different random numbers.
    report.case(case.title(prefix), outcomes, {"cold": prompts}, case.run.kind == "beam")


def draw(results: Results, path: Path) -> None:
    """Tokens/s of each engine, a group a case."""
    names = list(next(iter(results.values()))["cold"])
    series = {
        ENGINES[name].title: [
            serving.tokens_per_second(case["cold"][name]) for case in results.values()
        ]
        for name in names
    }
    labels = [title.replace(" behind", "\nbehind") for title in results]
    plots.bars(path, "Branches, from an empty cache", "tokens/s", labels, series)


def main() -> None:
    parser = serving.parser_of(__doc__)
    parser.add_argument("--prefixes", type=serving.numbers, help="0,1500, or 64 if short")
    options = parser.parse_args()
    if options.short:
        options.turns = 1
    prefixes = options.prefixes or ([64] if options.short else [0, 1500])
    wanted = SHORT if options.short else FULL

    def measure(field: Field, texts: Texts, report: Report) -> None:
        for prefix in prefixes:
            for case in wanted:
                measure_case(field, texts, report, case, prefix)

    branches = max(case.prompts * case.run.width for case in wanted)
    serving.run_benchmark(options, max(prefixes) + 300, branches, measure, draw)


if __name__ == "__main__":
    main()
