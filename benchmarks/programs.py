"""What do branches cost? Forking and joining a long context; no model.

    python benchmarks/programs.py [--tokens N] [--runs N] [--output FILE]

A context of 4,096 computed tokens is forked; a branch is handed back by `join`, and losers are
released. The cache's own part (`PrefixCache.fork`) is timed beside the whole call, and so is what
each call spends on holding Ctrl-C back. The engine stands on a runner that computes nothing.
Medians over all calls; the shortest too, for other programs share the machine.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from measure import print_head, print_table, write_json

from radixkv.cache import EPHEMERAL, PrefixCache
from radixkv.config import CacheConfig, EngineConfig
from radixkv.decoding import SamplingParams
from radixkv.engine import Engine, EngineCounters
from radixkv.engine.interrupts import DeferredInterrupts
from radixkv.engine.scheduler import Step
from radixkv.programs import Context, Host, run

VOCABULARY = 100


class NoModel:
    """Runs steps without computing: the likeliest token is always 7."""

    def __init__(self) -> None:
        self.counters = EngineCounters()

    def copy_blocks(self, step: Step) -> None:
        pass

    def run(self, step: Step) -> torch.Tensor:
        logits = torch.zeros(sum(row.num_logits for row in step.rows), VOCABULARY)
        logits[:, 7] = 5
        return logits


def open_context(tokens: int) -> Context:
    """A context all of whose tokens but the last are computed."""
    runner: Any = NoModel()
    engine = Engine(
        runner,
        PrefixCache(CacheConfig(num_blocks=4096)),
        EngineConfig(),
        vocab_size=VOCABULARY,
        max_model_len=2 * tokens,
    )
    loaded: Any = SimpleNamespace(name="none", tokenizer=None)
    context = Context(Host(engine, loaded))
    context.append([i * i % VOCABULARY for i in range(tokens - 1)])
    context.generate(max_tokens=1, temperature=0).result()
    return context


def hold_back() -> None:
    """What fork, join, rollback and close do once each, so that no interrupt halves them."""
    with DeferredInterrupts():
        pass


class Stopwatch:
    """Microseconds of each call, by what was called."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def note(self, name: str, call: Callable[[], Any], share: int = 1) -> Any:
        """Time a call that does one thing ``share`` times; its result."""
        begin = time.perf_counter()
        result = call()
        elapsed = (time.perf_counter() - begin) * 1e6
        self.times.setdefault(name, []).append(elapsed / share)
        return result


def one_round(watch: Stopwatch, context: Context) -> None:
    """Fork, join, go back and close once; the context is then as it was."""
    cache, sequence = context.host.engine.cache, context._hold.sequence
    assert sequence is not None
    note = watch.note
    forked = note("cache.fork, 16 in a row", lambda: [cache.fork(sequence) for _ in range(16)], 16)
    for each in forked:
        note("cache.release, ephemeral", partial(cache.release, each, EPHEMERAL))
    note("holding Ctrl-C back", hold_back)
    branches = note("context.fork(1)", lambda: context.fork(1))
    branches += note("context.fork(16), a branch", lambda: context.fork(16), 16)
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    run([branch.generate(params) for branch in branches[:4]])
    place = context.checkpoint()
    note('join("best") of 1', lambda: context.join(branches[:1]))
    note("rollback of 2 tokens", lambda: context.rollback(place))
    note('join("best") of 3', lambda: context.join(branches[1:4]))
    for branch in branches[4:]:
        note("close", branch.close)
    context.rollback(place)


def measure(tokens: int, runs: int) -> dict[str, list[float]]:
    """Microseconds of each call, by what was called."""
    context, watch = open_context(tokens), Stopwatch()
    gc.collect()
    gc.freeze()
    for _ in range(runs):
        one_round(watch, context)
    gc.unfreeze()
    context.close()
    return watch.times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--output", type=Path, help="write the results there, as JSON")
    arguments = parser.parse_args()
    print_head()
    times = measure(arguments.tokens, arguments.runs)
    rows = [[name, statistics.median(all_), min(all_)] for name, all_ in times.items()]
    print_table(f"A context of {arguments.tokens:,} tokens", ["microseconds", "p50", "best"], rows)
    results = {name: {"p50_us": median, "best_us": best} for name, median, best in rows}
    write_json(arguments.output, results)


if __name__ == "__main__":
    main()
