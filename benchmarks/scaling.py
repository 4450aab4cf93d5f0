"""How does a step's cost grow with the batch, with the context, and with what is shared?

    python benchmarks/scaling.py [--short] [--rows 1,4,16,64] [--contexts 256,1024,4096,8000]

The demo model decodes so many rows behind contexts of so many tokens, once behind one that all
rows share but for 16 tokens each, once behind contexts that have nothing in common. Those that do
not fit into `--kv-memory` are left out, and named. The contexts' keys and values are made up: what
is in them does not change what a step costs, and computing them would take an hour. Then chunks of
a prompt are computed behind such contexts.

The slopes are those of least relative squares over all decode steps, for

    step = a + b * rows + c * KV tokens read + d * (query, key) pairs

"KV tokens read" is what a layer reads, each shared run once; a pair is a query that meets a key,
shared or not. And over all chunks for: a token of a prompt = e + f * context. The largest deviation
of a measured time from the line says how well that describes this machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from measure import print_head, print_table, write_json

# Before torch: it says how long OpenMP's threads turn round.
from radixkv import LLM, SamplingParams  # isort: split

import torch

from radixkv.attention import AttentionBatch
from radixkv.errors import PromptTooLongError

OWN_TOKENS = 16
WARM_STEPS = 2
STEP_TERMS = ("a step", "a row", "a KV token read", "a pair")
PROMPT_TERMS = ("a token", "a token and a token before it")
CLOCKS = ("wall", "CPU")


@dataclass(frozen=True)
class Point:
    """One measured case: what it was, and milliseconds of wall and CPU time, medians."""

    rows: int
    context: int
    shared: bool
    kv_read: float
    pairs: float
    wall_ms: float
    cpu_ms: float

    def ms(self, clock: str) -> float:
        return self.wall_ms if clock == "wall" else self.cpu_ms


class Bench:
    """The demo model's engine, whose contexts need not be computed."""

    def __init__(self, dtype: str, kv_memory: str, longest: int) -> None:
        self.llm = LLM.demo(dtype=dtype, kv_memory=kv_memory, max_num_batched_tokens=longest)
        store = self.llm.engine.runner.backend.store
        for numbers in (*store.keys, *store.values):
            # Written to, or the system has one page of zeros for all of them.
            numbers.fill_(0.01)

    def fits(self, rows: int, context: int, shared: bool, more: int) -> bool:
        """Whether there is room for so many rows that grow by ``more`` tokens."""
        tokens = context + rows * (OWN_TOKENS + more) if shared else rows * (context + more)
        cache = self.llm.cache
        # The last block of each row, and of what they share, may be nearly empty.
        return tokens // cache.block_size + rows + 1 < cache.pool.num_blocks

    def tokens(self, first: int, length: int) -> list[int]:
        """A text whose beginning tells it from others."""
        vocabulary = self.llm.loaded.vocab_size
        return [first % vocabulary, *((7919 * i + first) % vocabulary for i in range(1, length))]

    def ready(self, rows: int, context: int, shared: bool, tokens: int) -> None:
        """Have so many rows decode; nothing of their contexts is computed."""
        engine = self.llm.engine
        engine.runner.forward = self._forward
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        common = self.tokens(1, context - OWN_TOKENS)
        for row in range(rows):
            own = self.tokens(2 + row, OWN_TOKENS if shared else context)
            engine.add_request(common + own if shared else own, params)
        while any(request.is_fresh for request in engine.requests.values()):
            engine.step()
        engine.runner.forward = None

    def _forward(
        self, batch: AttentionBatch, tokens: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        return torch.zeros(len(wanted), self.llm.loaded.vocab_size)

    def decode(self, rows: int, context: int, shared: bool, steps: int) -> Point:
        """Steps in which all rows decode."""
        self.ready(rows, context, shared, rows + WARM_STEPS + steps + 2)
        for _ in range(WARM_STEPS):
            self.llm.engine.step()
        before = self.llm.stats().engine
        wall, cpu = self._timed(steps)
        now = self.llm.stats().engine
        self.end()
        read = (now.kv_tokens_read - before.kv_tokens_read) / steps
        pairs = (now.kv_tokens_unshared - before.kv_tokens_unshared) / steps
        return Point(rows, context, shared, read, pairs, wall, cpu)

    def prefill(self, chunk: int, context: int, turns: int) -> Point:
        """A chunk of a prompt behind a context that is cached; the first turn does not count."""
        engine, walls, cpus = self.llm.engine, [], []
        for turn in range(turns + 1):
            if context:
                self.ready(1, context, shared=False, tokens=1)
                while engine.has_work:
                    engine.step()
            before = self.tokens(2, context) if context else []
            params = SamplingParams(max_tokens=1, temperature=0)
            engine.add_request(before + self.tokens(99 + turn, chunk), params)
            wall, cpu = self._timed(1)
            self.end()
            walls.append(wall)
            cpus.append(cpu)
        pairs = chunk * context + chunk * (chunk + 1) / 2
        wall, cpu = statistics.median(walls[1:]), statistics.median(cpus[1:])
        return Point(1, context, False, context + chunk, pairs, wall, cpu)

    def _timed(self, steps: int) -> tuple[float, float]:
        walls, cpus = [], []
        for _ in range(steps):
            wall, cpu = time.perf_counter(), time.process_time()
            self.llm.engine.step()
            walls.append(1e3 * (time.perf_counter() - wall))
            cpus.append(1e3 * (time.process_time() - cpu))
        return statistics.median(walls), statistics.median(cpus)

    def end(self) -> None:
        """Nobody runs, and nothing is cached."""
        for request in list(self.llm.engine.requests):
            self.llm.engine.abort(request)
        self.llm.cache.reset()


@dataclass(frozen=True)
class Fit:
    """A line through measured times: a slope for each term, and how far off it is at the worst."""

    slopes: tuple[float, ...]
    worst: float

    def as_dict(self, names: tuple[str, ...]) -> dict[str, float]:
        return dict(zip(names, self.slopes, strict=True)) | {"largest deviation": self.worst}


def fit(terms: npt.NDArray[np.float64], times: npt.NDArray[np.float64]) -> Fit:
    """The slopes with the least squares of relative errors.

    float64 (points, terms), (points,)
    """
    slopes, *_ = np.linalg.lstsq(terms / times[:, None], np.ones(len(times)), rcond=None)
    worst = np.max(np.abs(terms @ slopes / times - 1))
    return Fit(tuple(float(slope) for slope in slopes), float(worst))


def fit_steps(points: list[Point], clock: str) -> Fit:
    """Milliseconds by `STEP_TERMS`."""
    terms = np.array([[1.0, p.rows, p.kv_read, p.pairs] for p in points])
    return fit(terms, np.array([p.ms(clock) for p in points]))


def fit_prompts(points: list[Point], chunk: int, clock: str) -> Fit:
    """Milliseconds by `PROMPT_TERMS`."""
    terms = np.array([[float(chunk), p.pairs] for p in points])
    return fit(terms, np.array([p.ms(clock) for p in points]))


def show_points(decodes: list[Point], prefills: list[Point], chunk: int) -> None:
    rows: list[list[Any]] = [
        [f"{p.rows} rows, {'shared' if p.shared else 'own'}", p.context, f"{p.kv_read:.0f}",
         f"{p.pairs:.0f}", p.wall_ms, p.cpu_ms]
        for p in decodes
    ]  # fmt: skip
    head = ["", "context", "KV read", "pairs", "wall ms", "CPU ms"]
    print_table("A decode step", head, rows)
    rows = [[f"{chunk} tokens", p.context, p.wall_ms, p.cpu_ms] for p in prefills]
    print_table("A chunk of a prompt", ["", "context", "wall ms", "CPU ms"], rows)


def show_fits(fits: dict[str, dict[str, Fit]]) -> None:
    names = {"steps": STEP_TERMS, "prompts": PROMPT_TERMS}
    for part, by_clock in fits.items():
        rows = []
        for clock in CLOCKS:
            slopes = [f"{1e3 * slope:.4g}" for slope in by_clock[clock].slopes]
            rows.append([f"{clock}, us", *slopes, f"{100 * by_clock[clock].worst:.0f} %"])
        print_table(f"Slopes of {part}", ["", *names[part], "worst"], rows)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All points, the slopes, and what did not fit."""
    rows = [int(count) for count in options.rows.split(",")]
    contexts = [int(length) for length in options.contexts.split(",")]
    if min(contexts) <= OWN_TOKENS:
        raise SystemExit(f"a context has more than {OWN_TOKENS} tokens, its rows' own")
    bench = Bench(options.dtype, options.kv_memory, max(*contexts, options.chunk) + OWN_TOKENS)
    decodes, left_out, grows = [], [], max(rows) + WARM_STEPS + options.steps + 2
    for context in contexts:
        for count in rows:
            # One row shares with nobody.
            for shared in (True, False) if count > 1 else (False,):
                if bench.fits(count, context, shared, grows):
                    decodes.append(bench.decode(count, context, shared, options.steps))
                else:
                    left_out.append(f"{count} rows of {context} tokens of their own")
    turns = max(options.steps // 4, 1)
    lengths = [0, *(length for length in contexts if length + options.chunk < max(contexts))]
    try:
        prefills = [bench.prefill(options.chunk, length, turns) for length in lengths]
    except PromptTooLongError as error:
        raise SystemExit(f"a chunk is too long: {error}") from error
    bench.llm.close()
    show_points(decodes, prefills, options.chunk)
    fits = {
        "steps": {clock: fit_steps(decodes, clock) for clock in CLOCKS},
        "prompts": {clock: fit_prompts(prefills, options.chunk, clock) for clock in CLOCKS},
    }
    show_fits(fits)
    for case in left_out:
        print(f"no room for {case}")
    names = {"steps": STEP_TERMS, "prompts": PROMPT_TERMS}
    return {
        "decode": [vars(point) for point in decodes],
        "prefill": [vars(point) for point in prefills],
        "left out": left_out,
        "slopes, ms": {
            part: {clock: each.as_dict(names[part]) for clock, each in by_clock.items()}
            for part, by_clock in fits.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="up to 16 rows and 1,024 tokens")
    parser.add_argument("--rows", help="1,4,16,64, or 1,4,16 if short")
    parser.add_argument("--contexts", help="256,1024,4096,8000, or 256,512,1024 if short")
    parser.add_argument("--steps", type=int, help="of each case: 12, or 4 if short")
    parser.add_argument(
        "--chunk", type=int, help="tokens of a prompt's chunk: 512, or 128 if short"
    )
    parser.add_argument("--kv-memory", default="4GiB")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="write the results there, as JSON")
    options = parser.parse_args()
    usual = {"rows": "1,4,16,64", "contexts": "256,1024,4096,8000", "steps": 12, "chunk": 512}
    short = {"rows": "1,4,16", "contexts": "256,512,1024", "steps": 4, "chunk": 128}
    for name, value in (short if options.short else usual).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    torch.set_num_threads(options.threads)
    print_head()
    write_json(options.output, measure(options), threads=options.threads)


if __name__ == "__main__":
    main()
