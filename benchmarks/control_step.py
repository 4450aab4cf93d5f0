"""What does a step cost beside the model? The real engine over a model that answers at once.

    python benchmarks/control_step.py [--short] [--rows 1,16,64,256] [--profile N] [--output FILE]

Chats behind a shared prefix decode over the real scheduler, cache, runner, sampler and tokenizer;
the model is a table of logits made beforehand. What a layer of attention asks for once a step (its
reads) is made all the same. CPU time of the engine's thread a step, over the running sequences:

- "going on": greedy, all rows decode, nobody comes or goes;
- "stop string, drawn": the same with a stop string, temperature and top_p;
- "come and go": greedy, each chat ends after 64 tokens and another takes its place at once, so
  that `add_request`, admission and new plans count, too.

A second pass of the first kind with a timer around each phase says where it goes, less what the
timers themselves take; a phase is without those within it. `--profile N` prints cProfile's view of
N rows instead. Logits are `--vocabulary` wide: reading wider ones is work of the model's kind, and
is shown on its own ("read logits").
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from measure import print_head, print_table, write_json

# Before torch: it says how long OpenMP's threads turn round.
from radixkv import SamplingParams  # isort: split

import torch

import radixkv.attention.batch as batch_module
import radixkv.decoding.sampler as sampler_module
import radixkv.engine.engine as engine_module
from radixkv.attention import FULL, AttentionBatch, NativeBackend
from radixkv.attention.cost import ON_A_CPU
from radixkv.cache import PrefixCache
from radixkv.config import CacheConfig, EngineConfig
from radixkv.engine import Engine, EngineCounters, ModelRunner
from radixkv.model.loading import load_tokenizer

BLOCK_SIZE = 16
WARM_STEPS = 8
MOST = 4_000  # tokens of a chat that goes on; a request must fit into the pool
TURN_TOKENS = 64  # of a chat that comes and goes
TABLES = 8  # of logits, one after the other
PLAIN = SamplingParams(max_tokens=MOST, temperature=0, ignore_eos=True)
KINDS = {
    "going on": PLAIN,
    "stop string, drawn": SamplingParams(
        max_tokens=MOST, temperature=0.8, top_p=0.95, seed=7, ignore_eos=True, stop="\n\nUser:"
    ),
    "come and go": SamplingParams(max_tokens=TURN_TOKENS, temperature=0, ignore_eos=True),
}


class Tables:
    """A model: whatever is asked, the next of some tables of logits is the answer.

    Each row's likeliest token is a word or a part of one, so that texts are decoded as usual.
    """

    def __init__(self, tokenizer: Any, rows: int, vocabulary: int) -> None:
        texts = ((id_, tokenizer.decode([id_])) for id_ in range(vocabulary))
        words = torch.tensor([i for i, text in texts if text.isascii() and text.strip().isalpha()])
        generator = torch.Generator().manual_seed(0)
        self._tables = []
        for _ in range(TABLES):
            table = torch.randn(rows, vocabulary, generator=generator)
            picked = words[torch.randint(len(words), (rows,), generator=generator)]
            table[torch.arange(rows), picked] = 12.0
            self._tables.append(table)
        self._asked = 0
        store: Any = SimpleNamespace(block_size=BLOCK_SIZE)
        self._native = NativeBackend(store)

    def reads(self, batch: AttentionBatch) -> None:
        """What the first layer of a model without windows would ask of the batch."""
        self._native.reads(batch, FULL)

    def __call__(
        self, batch: AttentionBatch, tokens: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        self.reads(batch)
        self._asked += 1
        return self._tables[self._asked % TABLES][: len(wanted)]


class Chats:
    """An engine on which so many chats run behind one prefix."""

    def __init__(self, tokenizer: Any, rows: int, prefix: int, vocabulary: int, steps: int) -> None:
        self.rows, self.prefix, self.vocabulary = rows, prefix, vocabulary
        # Rows stand at different places in their blocks, so that every step is like the others.
        own = 2 * BLOCK_SIZE + 2 * steps + TURN_TOKENS
        blocks = prefix // BLOCK_SIZE + (rows + 1) * (own // BLOCK_SIZE + 2)
        store = SimpleNamespace(block_size=BLOCK_SIZE)
        backend: Any = SimpleNamespace(store=store, cost=ON_A_CPU, copy_blocks=lambda copies: None)
        adapter: Any = SimpleNamespace()
        runner = ModelRunner(adapter, backend, EngineCounters())
        self.model = runner.forward = Tables(tokenizer, rows, vocabulary)
        self.engine = Engine(
            runner,
            PrefixCache(
                CacheConfig(num_blocks=2 * blocks + MOST // BLOCK_SIZE, block_size=BLOCK_SIZE)
            ),
            EngineConfig(max_num_seqs=rows, max_num_batched_tokens=prefix + 64 * rows),
            vocab_size=vocabulary,
            max_model_len=1 << 20,
            tokenizer=tokenizer,
        )
        self._shared = [7919 * i % (vocabulary - 20) + 20 for i in range(prefix)]
        self._asked = 0

    def add(self, params: SamplingParams) -> None:
        """Another chat."""
        number, self._asked = self._asked, self._asked + 1
        length = BLOCK_SIZE // 2 + number % BLOCK_SIZE
        own = [(131 * number + 17 * i) % (self.vocabulary - 20) + 20 for i in range(length)]
        self.engine.add_request(self._shared + own, params)

    def begin(self, kind: str) -> None:
        """Have all rows decode."""
        for row in range(self.rows):
            self.add(KINDS[kind])
            if kind == "come and go" and row % max(self.rows // 16, 1) == 0:
                self.step(kind)  # so that they do not all end at once
        for _ in range(WARM_STEPS):
            self.step(kind)

    def step(self, kind: str) -> int:
        """One step, and who comes for those who went; how many did."""
        ended = sum(delta.finish_reason is not None for delta in self.engine.step())
        for _ in range(ended):
            self.add(KINDS[kind])
        return ended

    def end(self) -> None:
        for request in list(self.engine.requests):
            self.engine.abort(request)
        self.engine.cache.check()


# What is timed in the second pass: where it is looked up, its name there, and the phase around it.
PHASES: dict[str, tuple[Any, str, str]] = {
    "schedule": (engine_module.Scheduler, "schedule", "rest"),
    "rows, token ids": (ModelRunner, "run", "rest"),
    "batch, slots": (AttentionBatch, "grown", "rows, token ids"),
    "plan": (batch_module, "plan_attention", "batch, slots"),
    "reads": (Tables, "reads", "rows, token ids"),
    "commit": (Engine, "_advance", "rest"),
    "sample": (engine_module, "sample", "push"),
    "read logits": (sampler_module, "argmax", "sample"),
    "push": (Engine, "_sample", "commit"),
    "texts": (engine_module, "add_each", "push"),
}


class Stopwatch:
    """Nanoseconds that each phase took by itself, without those within it, and its calls."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inner = [0]

    def around(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        clock, spent, calls, inner = time.perf_counter_ns, self.spent, self.calls, self._inner

        @wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            inner.append(0)
            begin = clock()
            try:
                return call(*args, **kwargs)
            finally:
                took = clock() - begin
                spent[phase] += took - inner.pop()
                inner[-1] += took
                calls[phase] += 1

        return timed


@contextmanager
def timers(watch: Stopwatch) -> Iterator[None]:
    """A timer around each phase."""
    before = {phase: getattr(owner, name) for phase, (owner, name, _) in PHASES.items()}
    try:
        for phase, (owner, name, _) in PHASES.items():
            setattr(owner, name, watch.around(phase, before[phase]))
        yield
    finally:
        for phase, (owner, name, _) in PHASES.items():
            setattr(owner, name, before[phase])


def cost_of_a_timer() -> tuple[float, float]:
    """Nanoseconds that a timer adds to its own phase, and to the one around it."""
    watch = Stopwatch()
    calls = 20_000
    inside = watch.around("inside", lambda: None)

    def many() -> None:
        for _ in range(calls):
            inside()

    def none() -> None:
        for _ in range(calls):
            (lambda: None)()

    watch.around("outside", many)()
    watch.around("bare", none)()
    return watch.spent["inside"] / calls, (watch.spent["outside"] - watch.spent["bare"]) / calls


def per_step(chats: Chats, kind: str, steps: int) -> tuple[list[float], float]:
    """Microseconds of CPU time of each step, and of all a request that came and went."""
    clock, times, ended = time.thread_time_ns, [], 0
    for _ in range(steps):
        begin = clock()
        ended += chats.step(kind)
        times.append((clock() - begin) / 1e3)
    return times, sum(times) / max(ended, 1)


def by_phase(chats: Chats, steps: int) -> dict[str, tuple[float, float]]:
    """Microseconds and calls a step of each phase, and of all that is in none ("rest")."""
    watch, (own, outer) = Stopwatch(), cost_of_a_timer()
    spent: list[Counter[str]] = []
    with timers(watch):
        step = watch.around("rest", chats.engine.step)
        for _ in range(steps):
            watch.spent.clear()
            step()
            spent.append(watch.spent.copy())
    calls = {phase: watch.calls[phase] / steps for phase in (*PHASES, "rest")}
    found = {
        phase: statistics.median(each[phase] for each in spent) - own * calls[phase]
        for phase in calls
    }
    # What a timer takes outside of its own measurement lies in the phase around it.
    for phase, (_, _, around) in PHASES.items():
        found[around] -= outer * calls[phase]
    return {phase: (found[phase] / 1e3, calls[phase]) for phase in calls}


def measure(
    tokenizer: Any, all_rows: list[int], prefix: int, vocabulary: int, steps: int, turns: int
) -> dict[str, Any]:
    """Each kind and number of rows, in turn; microseconds a step."""
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    whole: dict[int, list[float]] = defaultdict(list)
    phases: dict[int, list[dict[str, tuple[float, float]]]] = defaultdict(list)
    for _ in range(turns):
        for rows in all_rows:
            for kind in KINDS:
                chats = Chats(tokenizer, rows, prefix, vocabulary, steps)
                chats.begin(kind)
                gc.collect()
                gc.freeze()
                # Whoever comes and goes is met often enough by some steps more.
                count = max(steps, 2 * TURN_TOKENS) if kind == "come and go" else steps
                found, a_request = per_step(chats, kind, count)
                times[kind, rows] += found
                if kind == "come and go":
                    whole[rows].append(a_request)
                if kind == "going on":
                    phases[rows].append(by_phase(chats, steps))
                gc.unfreeze()
                chats.end()
    results: dict[str, Any] = {}
    for rows in all_rows:
        split = {
            phase: statistics.median(each[phase][0] for each in phases[rows]) / rows
            for phase in (*PHASES, "rest")
        }
        results[str(rows)] = {
            "us_a_step_and_row": {
                kind: statistics.mean(times[kind, rows]) / rows
                if kind == "come and go"
                else statistics.median(times[kind, rows]) / rows
                for kind in KINDS
            },
            "best_us_a_step_and_row": {kind: min(times[kind, rows]) / rows for kind in KINDS},
            "us_a_request_of_64_tokens": statistics.median(whole[rows]),
            "phases_us_a_step_and_row": split,
            "calls_a_step": {phase: calls for phase, (_, calls) in phases[rows][0].items()},
        }
    return results


def show(results: dict[str, Any]) -> None:
    """Totals, then where they go."""
    rows = []
    for kind in KINDS:
        found = [each["us_a_step_and_row"][kind] for each in results.values()]
        rows.append([kind, *(f"{value:.2f}" for value in found)])
    best = [each["best_us_a_step_and_row"]["going on"] for each in results.values()]
    rows.append(["going on, best step", *(f"{value:.2f}" for value in best)])
    requests = [each["us_a_request_of_64_tokens"] for each in results.values()]
    rows.append(
        [f"a request of {TURN_TOKENS} tokens, all", *(f"{value:.0f}" for value in requests)]
    )
    head = ["CPU us a step and row", *(f"{count} rows" for count in results)]
    print_table("Beside the model", head, rows)
    rows = []
    for phase in (*PHASES, "rest"):
        found = [each["phases_us_a_step_and_row"][phase] for each in results.values()]
        rows.append([phase, *(f"{value:.2f}" for value in found)])
    sums = [sum(each["phases_us_a_step_and_row"].values()) for each in results.values()]
    rows.append(["sum", *(f"{value:.2f}" for value in sums)])
    print_table("Where it goes, going on (wall, medians)", ["us a step and row", *head[1:]], rows)


def profile(chats: Chats, steps: int) -> None:
    """cProfile's view of steps that go on: functions by the time they take themselves."""
    chats.begin("going on")
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        chats.engine.step()
    profiler.disable()
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="one turn of few steps")
    parser.add_argument("--rows", default="1,16,64,256", help="running sequences")
    parser.add_argument("--prefix", type=int, default=512, help="tokens that all share")
    parser.add_argument("--vocabulary", type=int, default=1_000, help="width of the logits")
    parser.add_argument("--steps", type=int, help="of each turn; 100, or 30 if short")
    parser.add_argument("--turns", type=int, help="5, or 1 if short")
    parser.add_argument("--profile", type=int, metavar="N", help="profile N rows, and no more")
    parser.add_argument("--output", type=Path, help="write the results there, as JSON")
    options = parser.parse_args()
    steps = options.steps or (30 if options.short else 100)
    turns = options.turns or (1 if options.short else 5)
    torch.set_num_threads(1)
    print_head()
    # The fast tokenizer inside, as the engine of an LLM has it.
    tokenizer: Any = load_tokenizer("demo")[0].backend_tokenizer
    if options.profile:
        rows = options.profile
        profile(Chats(tokenizer, rows, options.prefix, options.vocabulary, steps), steps)
        return
    all_rows = [int(rows) for rows in options.rows.split(",")]
    results = measure(tokenizer, all_rows, options.prefix, options.vocabulary, steps, turns)
    show(results)
    write_json(options.output, results, prefix=options.prefix, vocabulary=options.vocabulary)


if __name__ == "__main__":
    main()
