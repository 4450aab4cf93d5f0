"""Tiles timed around the committed table, and what `radixkv.attention.cost` says of a GPU.

The cost model's constants are derived from data sheets; here each is measured. Of the tiles, from
the table's entry one number at a time is changed, and what is faster is kept, until nothing
is. What a tile computes is checked against float64 before its time counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from gpu import DEVICE, Clock, Deadline, Report
from gpu_scenes import NEVER, Heads, Problem, make_pool, make_rows
from radixkv_kernels import Tile
from radixkv_kernels.launch import target_of
from radixkv_kernels.tiles import choose_tile, width_of

from radixkv.attention import KVStore, Row, TritonBackend
from radixkv.attention.cost import (
    GPU_PER_PROGRAM,
    GPU_PER_QUERY,
    PROGRAMS_A_PROCESSOR,
    on_a_gpu,
)

# What is tried beside the table's value of each.
CHOICES: dict[str, tuple[int, ...]] = {
    "tokens": (32, 64, 128),
    "warps": (4, 8),
    "stages": (2, 3, 4),
    "registers": (128, 168, 255),
    "rows": (32, 64, 128),
}
TINY_CHOICES: dict[str, tuple[int, ...]] = {"tokens": (16, 32)}
# A tile must be faster by this much to take the table's place: less is noise.
MARGIN = 1.02
PROGRAMS = (1, 2, 3, 4)
# From which prefix on sharing pays is looked for among these, for so many rows.
PREFIXES, SHARING_ROWS = (16, 32, 48, 64, 96, 128, 192, 256, 512), (2, 8, 32, 128)
TINY_PREFIXES, TINY_ROWS = (32, 64), (2,)


@dataclass(frozen=True)
class Entry:
    """A line of the table, and the problems that decide about it.

    Attributes
    ----------
    bytes_each : int
        Of a cached number: 1 for fp8.
    few_rows : bool
        Items of up to 16 rows, or more.
    heads : Heads
    problems : tuple of dict
        For `make_rows`; the geometric mean of their times counts.
    """

    bytes_each: int
    few_rows: bool
    heads: Heads
    problems: tuple[dict[str, int], ...]

    @property
    def name(self) -> str:
        return f"({self.bytes_each}, {self.few_rows}, {max(64, width_of(self.heads.dim))})"


DECODES = ({"batch": 64, "own": 4096}, {"batch": 4, "own": 16384})
MANY = ({"batch": 64, "own": 128, "prefix": 4096}, {"batch": 1, "own": 8192, "queries": 2048})
ENTRIES = [
    Entry(size, few, Heads(4 * kv_heads, kv_heads, dim), DECODES if few else MANY)
    for size, kv_heads, dim in ((2, 8, 128), (1, 8, 128), (2, 8, 64), (2, 4, 256))
    for few in (True, False)
]
TINY_ENTRIES = [Entry(2, True, Heads(2, 1, 16), ({"batch": 2, "own": 40},))]


def tune(report: Report, clock: Clock, deadline: Deadline, tiny: bool) -> int:
    """Go through the entries, as far as the time goes; how many failed."""
    report.set("target", target_of(DEVICE))
    failures = 0
    for name, measure in (
        ("sharing", _sharing),
        ("start", _start),
        ("programs_a_processor", _programs),
    ):
        try:
            report.add(name, measure(clock, deadline, tiny))
        except Exception as error:  # of a kernel that is wrong, or a card without the room
            failures += 1
            report.add(name, {"failed": f"{type(error).__name__}: {error}"[:300]})
            print(f"{name} failed: {error}", flush=True)
    for entry in TINY_ENTRIES if tiny else ENTRIES:
        if deadline.passed(f"entry {entry.name}", 0 if tiny else 20):
            break
        try:
            record = _tuned(entry, clock, deadline, TINY_CHOICES if tiny else CHOICES)
        except Exception as error:  # of a compiler, or a kernel that is wrong
            failures += 1
            record = {"entry": entry.name, "failed": f"{type(error).__name__}: {error}"[:300]}
        report.add("tiles", record)
        print(record.get("paste", record), flush=True)
        if "paste" in record:
            print(f"    x{record['speed_up']:.3f} over {record['table']}", flush=True)
    return failures


def _us(backend: TritonBackend, rows: list[Row], heads: Heads, clock: Clock) -> float:
    """Microseconds of a problem whose output was checked."""
    problem = Problem(backend, rows, heads)
    problem.run()
    problem.check()
    return clock.time(problem.run).us


def _sharing(clock: Clock, deadline: Deadline, tiny: bool) -> dict[str, Any]:
    """From which prefix on rows are read faster together: what `GPU_PER_QUERY` should be."""
    entry = (TINY_ENTRIES if tiny else ENTRIES)[0]
    store, own = _store(entry), 16 if tiny else 256
    base = TritonBackend(store).cost
    together = TritonBackend(store, cost=replace(base, per_item=0, per_query=0))
    apart = TritonBackend(store, cost=replace(base, per_item=NEVER))
    found: dict[str, Any] = {"now": GPU_PER_QUERY, "rows": {}}
    for count in TINY_ROWS if tiny else SHARING_ROWS:
        times = {}
        for prefix in TINY_PREFIXES if tiny else PREFIXES:
            if deadline.passed(f"sharing of {prefix} tokens by {count} rows"):
                break
            rows = make_rows(store, batch=count, own=own, prefix=prefix)
            pair = [_us(kind, rows, entry.heads, clock) for kind in (together, apart)]
            times[prefix] = {"together": pair[0], "apart": pair[1]}
        # Behind the longest that did not pay: noise must not decide.
        slower = [prefix for prefix, us in times.items() if us["together"] > us["apart"]]
        pays_from = next((p for p in times if p > max(slower, default=0)), None)
        each = None if pays_from is None else (count - 1) * pays_from / count
        found["rows"][str(count)] = {"pays_from": pays_from, "per_query": each, "us": times}
        print(f"{count} rows share from {pays_from} tokens on: GPU_PER_QUERY {each}", flush=True)
    return found


def _start(clock: Clock, deadline: Deadline, tiny: bool) -> dict[str, Any]:
    """How many keys a program could read while it starts: what `GPU_PER_PROGRAM` should be.

    A second round of programs costs their start and their keys; what keys cost is known from
    longer reads.
    """
    entry = (TINY_ENTRIES if tiny else ENTRIES)[0]
    store, heads = _store(entry), entry.heads
    base = TritonBackend(store).cost
    uncut = TritonBackend(store, cost=replace(base, programs=0))
    count = max(1, base.programs // heads.kv)
    short, long = (8, 24) if tiny else (256, 1280)
    if deadline.passed("the start of programs"):
        return {"now": GPU_PER_PROGRAM, "left_out": "out of time"}
    us = {
        name: _us(uncut, make_rows(store, batch=rows, own=own), heads, clock)
        for name, rows, own in (
            ("one round", count, short),
            ("two rounds", 2 * count, short),
            ("longer reads", count, long),
        )
    }
    a_key = (us["longer reads"] - us["one round"]) / (long - short)
    keys = (us["two rounds"] - us["one round"]) / a_key - short if a_key > 0 else None
    print(f"a program starts in the time of {keys} keys, now {GPU_PER_PROGRAM}", flush=True)
    return {"now": GPU_PER_PROGRAM, "us": us, "us_a_key": a_key, "keys": keys}


def _tuned(
    entry: Entry, clock: Clock, deadline: Deadline, choices: dict[str, tuple[int, ...]]
) -> dict[str, Any]:
    store = _store(entry)
    problems = [make_rows(store, **problem) for problem in entry.problems]
    width = width_of(entry.heads.dim)
    rows = 16 if entry.few_rows else 64
    table = choose_tile(target_of(DEVICE), rows, width, width, entry.bytes_each)
    tried = {table: _time(store, problems, entry.heads, table, clock)}
    best, refused = table, {}
    changed = True
    while changed:
        changed = False
        for candidate in _around(best, choices, entry.few_rows):
            if candidate in tried or candidate in refused or deadline.left <= 5:
                continue
            try:
                tried[candidate] = _time(store, problems, entry.heads, candidate, clock)
            except Exception as error:  # too much shared memory, say: then it is no candidate
                refused[candidate] = f"{type(error).__name__}: {error}"[:200]
                continue
            if tried[candidate] < tried[best]:
                best, changed = candidate, True
    if tried[table] < tried[best] * MARGIN:
        best = table
    return {
        "entry": entry.name,
        "table": _short(table),
        "best": asdict(best),
        "speed_up": tried[table] / tried[best],
        "paste": f"    {entry.name}: {_short(best)},",
        "tried_us": {_short(tile): us for tile, us in sorted(tried.items(), key=lambda it: it[1])},
        "refused": {_short(tile): reason for tile, reason in refused.items()},
    }


def _around(tile: Tile, choices: dict[str, tuple[int, ...]], few_rows: bool) -> Iterator[Tile]:
    for name, values in choices.items():
        if name == "rows" and few_rows:
            continue  # Sixteen is the least.
        for value in values:
            yield replace(tile, **{name: value})


def _store(entry: Entry) -> KVStore:
    needs = max(
        problem.get("prefix", 0) + problem["batch"] * (problem["own"] + 16)
        for problem in entry.problems
    )
    kept = torch.float8_e4m3fn if entry.bytes_each == 1 else None
    return make_pool(entry.heads, needs, kv_dtype=kept)


def _time(
    store: KVStore, problems: list[list[Row]], heads: Heads, tile: Tile, clock: Clock
) -> float:
    """The geometric mean of the problems' times, in microseconds, with this tile."""
    processors = 1
    if DEVICE.type == "cuda":
        processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    backend = TritonBackend(store, cost=on_a_gpu(processors, tile.tokens))
    product = 1.0
    for rows in problems:
        problem = Problem(backend, rows, heads, tile)
        problem.run()
        problem.check()
        product *= clock.time(problem.run).us
    return float(product ** (1 / len(problems)))


def _programs(clock: Clock, deadline: Deadline, tiny: bool) -> dict[str, Any]:
    """How finely reads should be cut: programs that a processor is thought to hold at one time."""
    entry = (TINY_ENTRIES if tiny else ENTRIES)[0]
    store = _store(entry)
    times: dict[str, list[float]] = {}
    for count in PROGRAMS[:2] if tiny else PROGRAMS:
        if deadline.passed(f"{count} programs a processor"):
            break
        base = TritonBackend(store).cost
        cost = replace(base, programs=base.programs // PROGRAMS_A_PROCESSOR * count)
        backend = TritonBackend(store, cost=cost)
        found = times[str(count)] = []
        for asked in entry.problems:
            problem = Problem(backend, make_rows(store, **asked), entry.heads)
            problem.run()
            problem.check()
            found.append(clock.time(problem.run).us)
    print(f"programs a processor, now {PROGRAMS_A_PROCESSOR}: {times}", flush=True)
    return {"now": PROGRAMS_A_PROCESSOR, "problems": entry.problems, "us": times}


def _short(tile: Tile) -> str:
    numbers = [tile.rows, tile.tokens, tile.warps, tile.stages]
    if tile.registers != 255:
        numbers.append(tile.registers)
    return f"Tile({', '.join(map(str, numbers))})"
