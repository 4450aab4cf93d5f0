"""How fast are the kernels on this GPU, and beside others'?

    python benchmarks/gpu_kernels.py [--tiny] [--minutes 7.5] [--output-dir DIR] [--tune]

Parts, each on random numbers in bfloat16, D 128, blocks of 16 that lie anywhere in a pool:

- copy: what the card's memory moves at best, by torch's copy. All fractions are of this.
- decode: one query a row, nothing shared. Bytes are keys and values, queries and outputs, once.
- shared: one query a row behind a common prefix. Beside our own kernel without sharing, and
  torch's scaled_dot_product_attention, flex_attention (at a few points, for it compiles anew for
  each) and FlashInfer. Of a rival's ways the fastest counts. Points below 1.0 are listed.
- prefill: new tokens behind a paged prefix, causal.
- moves: write_kv and copy_blocks.

A point that is timed is checked against float64 first. `--tune` times tiles around the committed
table instead, and writes what would be better as lines for `radixkv_kernels/tiles.py`. Without a
GPU all of it runs in Triton's interpreter, at tiny sizes.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gpu_rivals
import torch
from gpu import (
    DEVICE,
    HAS_GPU,
    Clock,
    Deadline,
    Report,
    copy_bandwidth,
    parsed,
    parser_of,
)
from gpu_moves import copying, writing
from gpu_scenes import Heads, Problem, blocks_of, make_pool, make_rows, never_sharing
from gpu_tune import tune
from measure import print_table

from radixkv.attention import TritonBackend

AIM = 0.85  # of the copy bandwidth, in decode
# A point that fails takes this long to set up and time, at most; no point begins with less left.
A_POINT, A_COMPILATION = 8.0, 60.0


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes
    ----------
    heads : sequence of Heads
    decode : sequence of (batch, context)
    shared : sequence of (batch, prefix), each row with `own` tokens more
    flex : the points of `shared` that flex_attention is compiled for
    prefill : sequence of (batch, cached tokens, new tokens)
    write, copy : sequence of int
        Tokens that are written, blocks that are copied.
    """

    heads: Sequence[Heads]
    decode: Sequence[tuple[int, int]]
    shared: Sequence[tuple[int, int]]
    own: int
    flex: Sequence[tuple[int, int]]
    prefill: Sequence[tuple[int, int, int]]
    write: Sequence[int]
    copy: Sequence[int]


FULL_SIZES = Sizes(
    heads=[Heads(32, 8, 128), Heads(64, 8, 128)],
    decode=[
        *((b, c) for b in (1, 4, 16, 64, 256) for c in (1024, 4096, 8192, 32768)),
        # Rows that fill the processors one and a bit times.
        *((b, 8192) for b in (24, 40, 96)),
    ],
    shared=[(b, p) for p in (128, 512, 2048, 8192, 16384) for b in (8, 32, 128, 256)],
    own=128,
    flex=[(32, 2048), (128, 2048), (32, 16384)],
    prefill=[(1, 0, 8192), (8, 0, 2048), (1, 8192, 2048), (1, 32768, 2048), (16, 8192, 256)],
    write=[64, 2048, 16384],
    copy=[64, 4096],
)
TINY_SIZES = Sizes(
    heads=[Heads(4, 1, 16)],
    decode=[(2, 40)],
    shared=[(4, 96)],
    own=9,
    flex=[(4, 96)],
    prefill=[(1, 32, 20)],
    write=[9],
    copy=[3],
)


class DoesNotFitError(Exception):
    """A point is too large for this card's memory."""


class Bench:
    """What every part needs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.sizes = TINY_SIZES if options.tiny else FULL_SIZES
        self.tiny: bool = options.tiny
        self.deadline = Deadline(options.minutes)
        self.report = Report(
            "gpu_kernels", options, name="gpu_kernels_tune" if options.tune else ""
        )
        self.clock = Clock()
        self.failures = 0
        self.copy_gb_s = 0.0

    def backends(self) -> Iterator[tuple[Heads, TritonBackend]]:
        """A backend for each number of heads, over a pool that the points fit into."""
        for heads in self.sizes.heads:
            yield heads, TritonBackend(make_pool(heads, self._pool_tokens(heads)))

    def _pool_tokens(self, heads: Heads) -> int:
        sizes = self.sizes
        needs = max(
            *(batch * (context + 16) for batch, context in sizes.decode),
            *(prefix + batch * (sizes.own + 16) for batch, prefix in sizes.shared),
            *(batch * (cached + new + 16) for batch, cached, new in sizes.prefill),
        )
        if not HAS_GPU:
            return needs
        # The rest is for rivals, which want keys and values in one piece.
        room = torch.cuda.mem_get_info(DEVICE)[0] * 0.35
        return min(needs, int(room / (4 * heads.kv * heads.dim)))

    def point(self, part: str, name: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> None:
        """Measure one point; what fails is recorded, and the rest goes on."""
        if self.deadline.passed(f"{part} {name}", 0 if self.tiny else A_POINT):
            self.report.add(part, name | {"left_out": "out of time"})
            return
        try:
            record = name | measure()
        except DoesNotFitError as error:
            record = name | {"left_out": str(error)}
        except Exception as error:  # of a compiler, a card's memory, or a kernel that is wrong
            self.failures += 1
            record = name | {"failed": _reason(error)}
        self.report.add(part, record)
        print(f"{part}: {_line(record)}", flush=True)
        if HAS_GPU:
            gc.collect()
            torch.cuda.empty_cache()

    def timed(self, problem: Problem) -> dict[str, Any]:
        """Our kernels on a problem, checked."""
        problem.out.fill_(torch.nan)
        problem.run()
        error = problem.check()
        time = self.clock.time(problem.run)
        gb_s = 1e-3 * problem.num_bytes / time.us
        return {
            "us": time.us,
            "time": time.record(),
            "bytes": problem.num_bytes,
            "gb_s": gb_s,
            "of_copy": gb_s / self.copy_gb_s,
            "error": error,
            "launches": problem.launches(),
        }

    def speedups(self, found: dict[str, Any]) -> dict[str, Any]:
        """How many times as long the others take; and who takes less time than we do."""
        others = dict(found.get("rivals", {}))
        if "unshared" in found:
            others["unshared"] = found["unshared"]
        ratios = {
            f"x_{name}": other["us"] / found["us"]
            for name, other in others.items()
            if "us" in other
        }
        if not HAS_GPU:
            return ratios
        return ratios | {"below": [name[2:] for name, ratio in ratios.items() if ratio < 1.0]}


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


def _line(record: dict[str, Any]) -> str:
    kept = {key: value for key, value in record.items() if not isinstance(value, dict)}
    return ", ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in kept.items()
    )


def copy(bench: Bench) -> None:
    found = copy_bandwidth(bench.clock, bench.tiny)
    bench.copy_gb_s = found["gb_s"]
    bench.report.set("copy", found)
    print(f"copy: {found['gb_s']:.0f} GB/s, read and written", flush=True)


def decode(bench: Bench, heads: Heads, backend: TritonBackend) -> None:
    for batch, context in bench.sizes.decode:

        def measure(batch: int = batch, context: int = context) -> dict[str, Any]:
            rows = _rows(backend, batch=batch, own=context)
            return bench.timed(Problem(backend, rows, heads))

        bench.point("decode", {"heads": str(heads), "batch": batch, "context": context}, measure)


def shared(bench: Bench, heads: Heads, backend: TritonBackend) -> None:
    alone = never_sharing(backend)
    for batch, prefix in bench.sizes.shared:

        def measure(batch: int = batch, prefix: int = prefix) -> dict[str, Any]:
            rows = _rows(backend, batch=batch, own=bench.sizes.own, prefix=prefix)
            problem, unshared = Problem(backend, rows, heads), Problem(alone, rows, heads)
            found = bench.timed(problem)
            read, without = problem.kv_tokens
            found |= {"kv_read": read / without, "unshared": bench.timed(unshared)}
            found["rivals"] = {
                "sdpa": rival(bench, problem, gpu_rivals.sdpa),
                "flashinfer": rival(bench, problem, lambda it: gpu_rivals.flashinfer(it, prefix)),
            }
            return found | bench.speedups(found)

        bench.point("shared", {"heads": str(heads), "batch": batch, "prefix": prefix}, measure)


def with_flex(bench: Bench, heads: Heads, backend: TritonBackend) -> None:
    """Apart, and last: a compilation for each point."""
    for batch, prefix in bench.sizes.flex:
        name = {"heads": str(heads), "batch": batch, "prefix": prefix}
        if bench.deadline.passed(f"flex {name}", 0 if bench.tiny else A_COMPILATION):
            bench.report.add("flex", name | {"left_out": "out of time"})
            continue

        def measure(batch: int = batch, prefix: int = prefix) -> dict[str, Any]:
            rows = _rows(backend, batch=batch, own=bench.sizes.own, prefix=prefix)
            problem = Problem(backend, rows, heads)
            found = bench.timed(problem)
            found["rivals"] = {"flex": rival(bench, problem, gpu_rivals.flex)}
            return found | bench.speedups(found)

        bench.point("flex", name, measure)


def prefill(bench: Bench, heads: Heads, backend: TritonBackend) -> None:
    for batch, cached, new in bench.sizes.prefill:

        def measure(batch: int = batch, cached: int = cached, new: int = new) -> dict[str, Any]:
            rows = _rows(backend, batch=batch, own=cached + new, queries=new)
            problem = Problem(backend, rows, heads)
            found = bench.timed(problem)
            found["tflop_s"] = 1e-6 * problem.flops / found["us"]
            found["rivals"] = {"sdpa": rival(bench, problem, gpu_rivals.sdpa_prefill)}
            return found | bench.speedups(found)

        name = {"heads": str(heads), "batch": batch, "cached": cached, "new": new}
        bench.point("prefill", name, measure)


def moves(bench: Bench, heads: Heads, backend: TritonBackend) -> None:
    most = backend.store.num_blocks
    problems = {f"write_kv, {n} tokens": (writing, n) for n in bench.sizes.write}
    problems |= {f"copy_blocks, {n} blocks": (copying, n) for n in bench.sizes.copy}
    for name, (make, count) in problems.items():

        def measure(make: Any = make, count: int = count) -> dict[str, Any]:
            move = make(backend.store, min(count, most // 2 if make is copying else most * 16))
            move.run()
            if not move.is_right():
                raise ArithmeticError("what was moved is not what is there")
            # Block ids are on the host, which a graph would keep.
            time = bench.clock.time(move.run, graph=make is writing)
            gb_s = 1e-3 * move.num_bytes / time.us
            figures = {"us": time.us, "time": time.record(), "bytes": move.num_bytes}
            return figures | {"gb_s": gb_s, "of_copy": gb_s / bench.copy_gb_s}

        bench.point("moves", {"heads": str(heads), "what": name}, measure)


def _rows(backend: TritonBackend, **asked: int) -> Any:
    needs = blocks_of(asked.get("prefix", 0), asked["batch"], asked["own"])
    if needs > backend.store.num_blocks:
        has = backend.store.num_blocks
        raise DoesNotFitError(f"{needs} blocks are needed, this card has room for {has}")
    return make_rows(backend.store, **asked)


def rival(
    bench: Bench, problem: Problem, ways_of: Callable[[Problem], dict[str, Callable[[], Any]]]
) -> dict[str, Any]:
    """The fastest of a rival's ways, or why there is none."""
    found: dict[str, Any] = {}
    try:
        ways = ways_of(problem)
    except gpu_rivals.NotThereError as error:
        return {"not_there": str(error)}
    except Exception as error:  # of code that is not ours, which must not end the benchmark
        return {"failed": _reason(error)}
    for name, run in ways.items():
        try:
            error_ = problem.check(run())
            time = bench.clock.time(run)
        except Exception as error:
            found[name] = {"failed": _reason(error)}
            continue
        found[name] = {"error": error_, **time.record()}
        if time.us < found.get("us", float("inf")):
            found |= {"us": time.us, "way": name}
    return found


PARTS = {"decode": decode, "shared": shared, "prefill": prefill, "moves": moves, "flex": with_flex}


def summary(bench: Bench) -> None:
    """Tables of what was measured."""
    results = bench.report.results
    heads = {
        "decode": ["heads", "batch", "context", "us", "gb_s", "of_copy", "launches"],
        "shared": [
            *("heads", "batch", "prefix", "us", "kv_read", "launches"),
            *("x_unshared", "x_sdpa", "x_flashinfer"),
        ],
        "flex": ["heads", "batch", "prefix", "us", "x_flex"],
        "prefill": ["heads", "batch", "cached", "new", "us", "tflop_s", "x_sdpa"],
        "moves": ["what", "us", "gb_s", "of_copy"],
    }
    for part, columns in heads.items():
        records = [record for record in results.get(part, []) if "us" in record]
        rows = [[_cell(column, record.get(column)) for column in columns] for record in records]
        if rows:
            print_table(part, columns, rows)
    timed = [record for part in heads for record in results.get(part, []) if "us" in record]
    below = [record for record in timed if record.get("below")]
    short = [record for record in results.get("decode", []) if record.get("of_copy", 1) < AIM]
    print(f"\n{len(timed)} points timed, all within tolerance; {bench.failures} failed")
    if not bench.tiny:
        print(f"decode points below {AIM:.0%} of the copy bandwidth: {len(short)}")
        print(f"points at which somebody is faster than we are: {len(below)}")
        for record in below:
            print(f"  {_line(record)}")


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    ratio = column.startswith("x_") or column in ("of_copy", "kv_read")
    return f"{value:.2f}" if ratio else f"{value:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 1 if any point failed."""
    parser = parser_of(__doc__ or "", minutes=7.5)
    parser.add_argument("--tune", action="store_true", help="time tiles, propose better ones")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parsed(parser, arguments)
    torch.manual_seed(0)
    bench = Bench(options)
    copy(bench)
    if options.tune:
        bench.failures += tune(bench.report, bench.clock, bench.deadline, bench.tiny)
    else:
        # What compiles for a minute comes after everything else.
        quick = [part for part in options.parts if part != "flex"]
        for parts in (quick, [part for part in options.parts if part == "flex"]):
            for heads, backend in bench.backends() if parts else ():
                for part in parts:
                    PARTS[part](bench, heads, backend)
        summary(bench)
    bench.report.finish()
    return int(bench.failures > 0)


if __name__ == "__main__":
    sys.exit(main())
