"""What do branches cost? Programs that fork and join beside clients that send the text again.

    python benchmarks/programs.py [--short] [--parts trees,calls] [--branches 4] [--output FILE]

"trees": the same two programs, greedy or with the same seeds, over the demo model. Tree of thought:
behind a root prompt, several branches think, the likeliest thought is kept, and so on for some
levels; then an answer. Best of n: several drafts, of which the likeliest is kept. Once with
contexts that fork and join; once as a client without forks does it, who sends the whole text with
each call, where it is tokenized anew and found in the prefix cache; and once where nothing is kept,
so that each call computes everything. Calls that do not wait for each other run in one batch in all
three, and each program begins with an empty cache. In turn, medians. "same text" says whether the
program came to the same end as with forks: in bfloat16 sums round by the batch, and a text that is
tokenized anew may be cut into other tokens.

"calls": a context of 4,096 computed tokens is forked; a branch is handed back by `join`, and losers
are released. The cache's own part (`PrefixCache.fork`) is timed beside the whole call, and so is
what each call spends on holding Ctrl-C back. The engine stands on a runner that computes nothing.
Medians over all calls; the shortest too, for other programs share the machine.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from measure import Timing, in_turn, print_head, print_table, write_json

# Before torch: it says how long OpenMP's threads turn round.
from radixkv import LLM  # isort: split

import torch

from radixkv.cache import EPHEMERAL, PrefixCache
from radixkv.config import CacheConfig, EngineConfig
from radixkv.decoding import SamplingParams
from radixkv.engine import Engine, EngineCounters, RequestOutput, output_of
from radixkv.engine.interrupts import DeferredInterrupts
from radixkv.engine.scheduler import Step
from radixkv.programs import Context, Host, run
from radixkv.workloads import demo_workload

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


# -- trees -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Of a program: tokens of the root, branches, levels, tokens of a thought or draft."""

    root: int
    branches: int
    levels: int
    tokens: int


Way = Callable[[LLM, str, Shape], str]


def thoughts(level: int, shape: Shape) -> list[str]:
    """How the branches of a level begin."""
    return [f"\nStep {level + 1}, idea {i + 1}:" for i in range(shape.branches)]


def thinking(shape: Shape) -> SamplingParams:
    return SamplingParams(max_tokens=shape.tokens, temperature=0, logprobs=0, ignore_eos=True)


def drafting(shape: Shape, draft: int) -> SamplingParams:
    return replace(thinking(shape), temperature=0.8, seed=draft)


def forked_tree(llm: LLM, root: str, shape: Shape) -> str:
    """Tree of thought by contexts."""
    with llm.context(root) as context:
        for level in range(shape.levels):
            branches = context.fork(shape.branches)
            for branch, begin in zip(branches, thoughts(level, shape), strict=True):
                branch.append(begin)
            llm.run([branch.generate(thinking(shape)) for branch in branches])
            context.join(branches)
        context.append("\nAnswer:")
        context.generate(thinking(shape)).result()
        return context.text


def forked_drafts(llm: LLM, root: str, shape: Shape) -> str:
    """Best of n by contexts."""
    with llm.context(root + "\nAnswer:") as context:
        branches = context.fork(shape.branches)
        drafts = [branch.generate(drafting(shape, i)) for i, branch in enumerate(branches)]
        llm.run(drafts)
        context.join(branches)
        return context.text


class Client:
    """Sends whole texts; they are found in the cache, or each is computed from its beginning."""

    def __init__(self, llm: LLM, cached: bool) -> None:
        self._llm, self._cached = llm, cached
        self._names = count()

    def best(self, texts: list[str], params: list[SamplingParams]) -> str:
        """Continue all in one batch; the text whose continuation is the likeliest a token."""
        engine = self._llm.engine
        requests = []
        for text, its in zip(texts, params, strict=True):
            # Under a name of its own a text shares nothing, as where nothing is kept.
            namespace = () if self._cached else (f"call {next(self._names)}",)
            tokens = self._llm.tokenize(text)
            requests.append(engine.add_request(tokens, its, namespace=namespace))
        while engine.has_work:
            engine.step()
        outputs = [output_of(request) for request in requests]
        place = max(range(len(texts)), key=lambda i: mean_logprob(outputs[i]))
        return texts[place] + outputs[place].text


def mean_logprob(output: RequestOutput) -> float:
    """By which `Context.join` chooses, too."""
    if output.error is not None:
        raise output.error
    return statistics.fmean(token.logprob for token in output.outputs[0].logprobs or ())


def sent_tree(llm: LLM, root: str, shape: Shape, cached: bool) -> str:
    """Tree of thought by a client who sends the text again."""
    client, text = Client(llm, cached), root
    for level in range(shape.levels):
        texts = [text + begin for begin in thoughts(level, shape)]
        text = client.best(texts, [thinking(shape)] * shape.branches)
    return client.best([text + "\nAnswer:"], [thinking(shape)])


def sent_drafts(llm: LLM, root: str, shape: Shape, cached: bool) -> str:
    """Best of n by a client who sends the text once for each."""
    params = [drafting(shape, i) for i in range(shape.branches)]
    return Client(llm, cached).best([root + "\nAnswer:"] * shape.branches, params)


FORKED, SENT, COMPUTED = "fork and join", "sent again, cached", "sent again, not cached"
PROGRAMS: dict[str, dict[str, Way]] = {
    "tree of thought": {
        FORKED: forked_tree,
        SENT: partial(sent_tree, cached=True),
        COMPUTED: partial(sent_tree, cached=False),
    },
    "best of n": {
        FORKED: forked_drafts,
        SENT: partial(sent_drafts, cached=True),
        COMPUTED: partial(sent_drafts, cached=False),
    },
}


class Ways:
    """The ways of one program, each of which leaves what it found and what it cost."""

    def __init__(self, llm: LLM, root: str, shape: Shape, ways: dict[str, Way]) -> None:
        self._llm, self._root, self._shape = llm, root, shape
        self.texts: dict[str, str] = {}
        self.counts: dict[str, dict[str, int]] = {}
        self.runs = {name: partial(self._run, name, way) for name, way in ways.items()}

    def _run(self, name: str, way: Way) -> None:
        self._llm.cache.reset()
        before = self._llm.stats().engine
        self.texts[name] = way(self._llm, self._root, self._shape)
        now = self._llm.stats().engine
        self.counts[name] = {
            "prefilled": now.prefilled_tokens - before.prefilled_tokens,
            "sampled": now.sampled_tokens - before.sampled_tokens,
            "steps": now.steps - before.steps,
            "kv_read": now.kv_tokens_read - before.kv_tokens_read,
        }


def root_text(llm: LLM, tokens: int) -> str:
    """The beginning of the demo's handbook, and a task."""
    handbook = list(llm.tokenize(demo_workload().system_prompt))[:tokens]
    tokenizer: Any = llm.loaded.tokenizer
    text: str = tokenizer.decode(handbook, skip_special_tokens=True)
    return text + "\n\nTask: plan a day at the library for a family of four.\n"


def measure_trees(llm: LLM, shape: Shape, turns: int, slow_turns: int) -> dict[str, Any]:
    """Every program in every way, in turn; those who compute all, in the first turns only."""
    root = root_text(llm, shape.root)
    results: dict[str, Any] = {}
    for program, all_ways in PROGRAMS.items():
        ways = Ways(llm, root, shape, all_ways)
        ways.runs[FORKED]()  # for what is made at a first use
        times = in_turn(ways.runs, slow_turns)
        more = {name: run for name, run in ways.runs.items() if name != COMPUTED}
        for name, timing in in_turn(more, turns - slow_turns).items():
            times[name] = Timing(times[name].wall + timing.wall, times[name].cpu + timing.cpu)
        results[f"{program}, {shape.branches} branches"] = {
            name: ways.counts[name]
            | {
                "wall_s": times[name].median_wall,
                "cpu_s": times[name].median_cpu,
                "same_text": ways.texts[name] == ways.texts[FORKED],
            }
            for name in ways.runs
        }
    return results


def show_trees(title: str, results: dict[str, Any]) -> None:
    rows = []
    for program, ways in results.items():
        base = ways[FORKED]
        for name, kept in ways.items():
            rows.append(
                [
                    f"{program}: {name}",
                    kept["prefilled"],
                    kept["sampled"],
                    kept["steps"],
                    f"{kept['wall_s']:.2f}",
                    f"{kept['cpu_s']:.2f}",
                    f"{kept['wall_s'] / base['wall_s']:.2f}",
                    f"{kept['cpu_s'] / base['cpu_s']:.2f}",
                    "yes" if kept["same_text"] else "no",
                ]
            )
    head = ["", "prefilled", "sampled", "steps", "wall s", "CPU s", "x wall", "x CPU", "same text"]
    print_table(title, head, rows)


def trees(options: argparse.Namespace) -> dict[str, Any]:
    """The table of the trees, and what is written of it."""
    llm = LLM.demo(dtype=options.dtype)
    results: dict[str, Any] = {}
    for branches in options.branches.split(","):
        shape = Shape(options.root, int(branches), options.levels, options.new_tokens)
        results |= measure_trees(llm, shape, options.turns, min(options.slow_turns, options.turns))
    llm.close()
    title = (
        f"A root of {options.root:,} tokens, {options.levels} levels, {options.new_tokens} tokens"
    )
    show_trees(f"{title} a branch; {options.dtype}, {options.threads} threads", results)
    return results


def calls(options: argparse.Namespace) -> dict[str, Any]:
    """The table of the calls, and what is written of it."""
    times = measure(options.tokens, options.runs)
    results = {
        name: {"p50_us": statistics.median(all_), "best_us": min(all_)}
        for name, all_ in times.items()
    }
    rows = [[name, kept["p50_us"], kept["best_us"]] for name, kept in results.items()]
    print_table(f"A context of {options.tokens:,} tokens", ["microseconds", "p50", "best"], rows)
    return results


PARTS = {"trees": trees, "calls": calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="two branches, two levels, one turn")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, of trees and calls")
    parser.add_argument("--root", type=int, default=1_500, help="tokens of the root prompt")
    parser.add_argument("--branches", help="numbers of branches: 4, or 2 if short")
    parser.add_argument("--levels", type=int, help="3, or 2 if short")
    parser.add_argument("--new-tokens", type=int, help="of a thought or draft: 32, or 8 if short")
    parser.add_argument("--turns", type=int, help="5, or 1 if short")
    parser.add_argument("--slow-turns", type=int, default=2, help="of who computes everything")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=4096, help="of the context of the calls")
    parser.add_argument("--runs", type=int, help="of the calls: 500, or 50 if short")
    parser.add_argument("--output", type=Path, help="write the results there, as JSON")
    options = parser.parse_args()
    usual = {"branches": "4", "levels": 3, "new_tokens": 32, "turns": 5, "runs": 500}
    short = {"branches": "2", "levels": 2, "new_tokens": 8, "turns": 1, "runs": 50}
    for name, value in (short if options.short else usual).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    torch.set_num_threads(options.threads)
    print_head()
    results: dict[str, Any] = {}
    for part in parts:
        results |= PARTS[part](options)
    write_json(options.output, results)


if __name__ == "__main__":
    main()
