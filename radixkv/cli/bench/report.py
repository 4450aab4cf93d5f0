"""What a run's records say: percentiles, rates, errors; as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from radixkv.cli.bench.client import Record
from radixkv.cli.bench.driver import TURN_BEFORE_FAILED, Run

PERCENTILES = (50, 90, 95, 99)
# A driver that is later than this at its 99th percentile measures itself.
LATE_S = 0.05


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Those of `PERCENTILES`, linear between neighbours, and the mean; None without values."""
    if not len(values):
        return None
    found = np.percentile(values, PERCENTILES).tolist()
    named = {f"p{name}": value for name, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(np.mean(values)), **named}


@dataclass(frozen=True)
class Summary:
    """All that is reported of a run. Times are seconds.

    Attributes
    ----------
    completed, unfinished : int
        Requests that ended well, and that were under way when the run was interrupted.
    errors : dict
        How many requests failed, by kind, and what the server said about the first of each.
    seconds : float
        From the beginning to the last end.
    prompt_tokens, output_tokens : int or None
        Of completed requests, by the server's usage; None where one came without.
    cached_tokens : int or None
        None if no usage had them; else of those requests that had.
    hit_rate : float or None
        Cached share of the prompt tokens of those requests.
    without_cached : int
        Completed requests whose usage said nothing of cached tokens.
    tokens_per_chunk : float or None
    """

    completed: int
    unfinished: int
    errors: dict[str, tuple[int, str]]
    seconds: float
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    hit_rate: float | None
    without_cached: int
    tokens_per_chunk: float | None
    times: dict[str, dict[str, float] | None]

    @property
    def requests_per_s(self) -> float:
        return self.completed / self.seconds if self.seconds else 0.0

    @property
    def output_tokens_per_s(self) -> float | None:
        if self.output_tokens is None or not self.seconds:
            return None
        return self.output_tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "completed": self.completed,
            "unfinished": self.unfinished,
            "errors": {kind: count for kind, (count, _) in self.errors.items()},
            "seconds": self.seconds,
            "requests_per_s": self.requests_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "hit_rate": self.hit_rate,
            "without_cached_tokens": self.without_cached,
            "tokens_per_chunk": self.tokens_per_chunk,
            **self.times,
        }


def summarize(run: Run) -> Summary:
    """What a run's records say."""
    records = run.records
    done = [record for record in records if record.error is None]
    errors: dict[str, tuple[int, str]] = {}
    for kind, count in Counter(r.error for r in records if r.error is not None).most_common():
        errors[kind] = count, next(r.detail for r in records if r.error == kind)
    sent = [record for record in records if record.error != TURN_BEFORE_FAILED]
    told = [record for record in done if record.cached_tokens is not None]
    cached, prompts = _total(told, "cached_tokens"), _total(told, "prompt_tokens")
    output = _total(done, "output_tokens")
    chunks = sum(len(record.chunks) for record in done)
    brought = sum(len(record.chunks) * record.tokens_per_chunk for record in done)
    return Summary(
        completed=len(done),
        unfinished=run.started - len(sent),
        errors=errors,
        seconds=run.seconds,
        prompt_tokens=_total(done, "prompt_tokens"),
        output_tokens=output,
        cached_tokens=cached,
        hit_rate=cached / prompts if cached is not None and prompts else None,
        without_cached=len(done) - len(told),
        tokens_per_chunk=brought / chunks if output is not None and chunks else None,
        times={
            "ttft": percentiles([r.ttft for r in done if r.ttft is not None]),
            "itl": percentiles([gap for record in done for gap in record.gaps()]),
            "end_to_end": percentiles([record.end_to_end for record in done]),
            "held_back": percentiles([record.held for record in sent]),
            "driver_late": percentiles([record.late for record in sent]),
        },
    )


def _total(records: Sequence[Record], name: str) -> int | None:
    values = [getattr(record, name) for record in records]
    return sum(values) if values and None not in values else None


TIMES = (
    ("TTFT", "ttft"),
    ("ITL", "itl"),
    ("end-to-end", "end_to_end"),
    ("held back", "held_back"),
    ("driver late", "driver_late"),
)


def print_report(summary: Summary, console: Console) -> None:
    """The table that a person reads."""
    table = Table("ms", *(f"p{name}" for name in PERCENTILES), "mean", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for title, name in TIMES:
        found = summary.times[name]
        columns = [*(f"p{each}" for each in PERCENTILES), "mean"]
        cells = [f"{found[each] * 1e3:,.1f}" for each in columns] if found else ["-"] * 5
        table.add_row(title, *cells)
    console.print(table)
    for line in lines_of(summary):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def lines_of(summary: Summary) -> list[str]:
    """What stands below the table."""
    failed = sum(count for count, _ in summary.errors.values())
    ended = f"{summary.completed} completed, {failed} failed"
    if summary.unfinished:
        ended += f", {summary.unfinished} interrupted"
    rate = summary.output_tokens_per_s
    lines = [
        f"requests       {ended} in {summary.seconds:.2f} s: {summary.requests_per_s:.2f} a second",
        f"output tokens  {_number(summary.output_tokens)}"
        + (f": {rate:,.1f} a second" if rate is not None else ""),
        f"prompt tokens  {_number(summary.prompt_tokens)}",
        f"cached tokens  {_cached(summary)}",
    ]
    for kind, (count, detail) in summary.errors.items():
        lines.append(f"error          {count} x {kind}" + (f": {detail}" if detail else ""))
    per_chunk = summary.tokens_per_chunk
    if per_chunk is not None and not 0.95 <= per_chunk <= 1.05:
        lines.append(
            f"A chunk brought {per_chunk:.2f} tokens on average: a gap counts for each of them as "
            "an equal part."
        )
    late = summary.times["driver_late"]
    if late is not None and late["p99"] > LATE_S:
        lines.append(
            "The driver was behind its schedule: times are too long and the load was less than "
            "asked for. Give it a core of its own, or a lower rate."
        )
    return lines


def _number(value: int | None) -> str:
    return "unknown: not all answers had a usage" if value is None else f"{value:,}"


def _cached(summary: Summary) -> str:
    if summary.cached_tokens is None:
        return "unknown: the server's usage has no prompt_tokens_details.cached_tokens"
    rate = "" if summary.hit_rate is None else f": hit rate {summary.hit_rate:.1%}"
    more = f", {summary.without_cached} answers did not say" if summary.without_cached else ""
    return f"{summary.cached_tokens:,}{rate}{more}"
