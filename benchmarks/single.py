"""How long does one user wait: for the first token, and between tokens?

    python benchmarks/single.py [--short] [--prefix 1500] [--engines radixkv,vllm,llama] ...

One request at a time, greedy: cold, and with another question behind the then cached prefix. The
time between tokens is the mean over the answer, from its first token on.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import plots
import serving
from measure import print_table
from peers.engines import ENGINES, Field, Outcome
from serving import Reply, Report, Results, Run, Texts


def between_tokens(reply: Reply, new_tokens: int) -> float | None:
    """Mean seconds between tokens of the only prompt."""
    times = (reply.get("times") or [[]])[0]
    if len(times) > 1:
        return (times[-1] - times[0]) / (len(times) - 1)
    first = serving.first_token(reply)
    if first is None or new_tokens < 2:
        return None
    return (reply["wall_s"] - first) / (new_tokens - 1)


def latencies(outcome: Outcome, new_tokens: int) -> dict[str, Any]:
    """Medians over turns, in seconds, or why there are none."""
    if not outcome.replies:
        return {"failure": outcome.failure}
    found: dict[str, Any] = {}
    gaps = [between_tokens(reply, new_tokens) for reply in outcome.replies]
    firsts = [serving.first_token(reply) for reply in outcome.replies]
    for name, values in (("first_token_s", firsts), ("between_tokens_s", gaps)):
        known = [value for value in values if value is not None]
        found[name] = statistics.median(known) if known else None
    return found


def measure_case(field: Field, texts: Texts, report: Report, prefix: int, run: Run) -> None:
    """A question from an empty cache, then another one behind the same prefix."""
    options = report.options
    first, other = ([texts.prefix(prefix) + texts.question(number)] for number in (0, 1))
    serving.warm_up(field, first, run)
    outcomes = field.turns(
        {"cold": run.cold(first), "prefix cached": run.again(other)},
        options.turns,
        options.slow_turns,
    )
    title = f"one user, {prefix} + {len(first[0]) - prefix} tokens, {run.max_tokens} new"
    report.case(title, outcomes, {"cold": first, "prefix cached": other})
    rows: list[list[Any]] = []
    for phase, engines in report.results[title].items():
        for name, kept in engines.items():
            kept |= latencies(outcomes[name][phase], run.max_tokens)
            rows.append([f"{phase}: {ENGINES[name].title}", *map(in_ms, two_of(kept))])
    print_table("Latency of one user, ms", ["", "first token", "between tokens"], rows)


def two_of(kept: dict[str, Any]) -> tuple[float | None, float | None]:
    return kept.get("first_token_s"), kept.get("between_tokens_s")


def in_ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def draw(results: Results, path: Path) -> None:
    """Milliseconds between tokens of each engine."""
    (title, phases), *_ = results.items()
    phase = phases["prefix cached"]
    values = {}
    for name, kept in phase.items():
        gap = kept.get("between_tokens_s")
        values[ENGINES[name].title] = [None if gap is None else 1000 * gap]
    plots.bars(path, title, "ms between tokens", [""], values)


def main() -> None:
    parser = serving.parser_of(__doc__)
    parser.add_argument("--prefix", type=int, help="1,500 tokens, or 128 if short")
    parser.add_argument("--new-tokens", type=int, help="64, or 8 if short")
    options: argparse.Namespace = parser.parse_args()
    if options.short:
        options.turns = 1
    prefix = options.prefix if options.prefix is not None else (128 if options.short else 1500)
    run = Run(options.new_tokens or (8 if options.short else 64))

    def measure(field: Field, texts: Texts, report: Report) -> None:
        measure_case(field, texts, report, prefix, run)

    serving.run_benchmark(options, prefix + run.max_tokens + 200, 1, measure, draw)


if __name__ == "__main__":
    main()
