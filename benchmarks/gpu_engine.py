"""How fast is the whole engine on this GPU, with a Llama of 8 billion random weights?

    python benchmarks/gpu_engine.py [--tiny] [--minutes 7.5] [--output-dir DIR]

Three engines one after the other over the same weights in bfloat16: decode steps launched one by
one, played by CUDA graphs, and by graphs with keys and values in fp8. Each does:

- decode: random prompts, greedy, by the number of rows; tokens/s of the steps that only decode.
- prefill: long random prompts; prompt tokens/s of the steps that prefill.
- chat: many chats behind one long system prompt; beside them the same with reads not shared (the
  cache shares the blocks still), and as many chats of the same length with nothing in common.
- sample: n samples of each prompt; beside them as many prompts of the same length.

Every workload is cold first: one new token each from an empty cache, which is prefill. Then it is
warm: all new tokens behind cached prompts, so that all rows decode together from the first step to
the last; once for a few tokens, untimed, that compile and record.

Greedy tokens with and without graphs must be equal, for a step runs the same kernels either way;
those with fp8 are others' by right. Without a GPU all of it runs in Triton's interpreter, at a tiny
size, in float32.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from gpu import DEVICE, HAS_GPU, Deadline, Report, parsed, parser_of
from gpu_llama import EIGHT_BILLION, TINY, random_llama, replays, serve
from gpu_scenes import NEVER
from measure import print_table

from radixkv import SamplingParams
from radixkv.llm import LLM

Prompts = list[list[int]]
# No workload begins with less than this many seconds left.
A_WORKLOAD = 25.0


@dataclass(frozen=True)
class Sizes:
    """What is run. `tokens` are new tokens of each continuation.

    Attributes
    ----------
    decode : sequence of (rows, prompt)
        Row numbers that graphs have without padding.
    prefill : (prompts, length)
    chat : (chats, system prompt, own prompt)
    sample : (prompts, length, n)
    """

    shape: dict[str, int]
    dtype: torch.dtype
    tokens: int
    decode: Sequence[tuple[int, int]]
    prefill: tuple[int, int]
    chat: tuple[int, int, int]
    sample: tuple[int, int, int]
    settings: dict[str, Any]


FULL_SIZES = Sizes(
    EIGHT_BILLION,
    torch.bfloat16,
    tokens=64,
    decode=[(1, 512), (16, 512), (64, 512), (256, 512), (64, 2048)],
    prefill=(8, 4096),
    chat=(64, 2048, 64),
    sample=(8, 512, 16),
    settings={"kv_memory": "24GiB", "max_num_seqs": 256, "max_num_batched_tokens": 8192},
)
TINY_SIZES = Sizes(
    TINY | {"num_hidden_layers": 1},
    torch.float32,
    tokens=3,
    decode=[(2, 20)],
    prefill=(2, 24),
    chat=(2, 32, 4),
    sample=(1, 20, 2),
    settings={"kv_memory": "1MiB", "max_num_seqs": 16},
)
ENGINES: dict[str, dict[str, Any]] = {
    "launches": {"graphs": False},
    "graphs": {"graphs": True},
    "graphs, fp8 cache": {"graphs": True, "kv_dtype": "fp8"},
}


@dataclass(frozen=True, slots=True)
class Step:
    """A step's seconds, and the tokens that it prefilled, only asked for, and sampled."""

    seconds: float
    prefilled: int
    asked: int
    sampled: int


class Steps:
    """Notes every step of an engine. A step's tokens are on the host when it returns."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.steps: list[Step] = []
        self._step = llm.engine.step

    def __enter__(self) -> Steps:
        self.llm.engine.step = self._timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.engine.step = self._step  # type: ignore[method-assign]

    def _timed(self) -> Any:
        before = self._counted()
        begin = time.perf_counter()
        made = self._step()
        seconds = time.perf_counter() - begin
        pairs = zip(before, self._counted(), strict=True)
        self.steps.append(Step(seconds, *(after - was for was, after in pairs)))
        return made

    def _counted(self) -> tuple[int, int, int]:
        counters = self.llm.stats().engine
        return counters.prefilled_tokens, counters.logits_only_tokens, counters.sampled_tokens

    def rates(self) -> dict[str, Any]:
        """Tokens a second of the steps that only decode, and of those that prefill."""
        decodes = [step for step in self.steps if not (step.prefilled or step.asked)]
        prefills = [step for step in self.steps if step.prefilled]
        found: dict[str, Any] = {"steps": len(self.steps)}
        if decodes:
            seconds = [step.seconds for step in decodes]
            found["decode_tokens_s"] = sum(step.sampled for step in decodes) / sum(seconds)
            found["decode_step_ms"] = 1e3 * float(np.median(seconds))
        if prefills:
            prompt_tokens = sum(step.prefilled for step in prefills)
            found["prefill_tokens_s"] = prompt_tokens / sum(step.seconds for step in prefills)
        return found


class Workloads:
    """The prompts of a run: random, and the same for every engine."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._rng = np.random.default_rng(0)
        self._greedy = SamplingParams(max_tokens=sizes.tokens, temperature=0, ignore_eos=True)

    def _random(self, count: int, length: int) -> Prompts:
        vocabulary = self.sizes.shape["vocab_size"]
        made: Prompts = self._rng.integers(0, vocabulary, (count, length)).tolist()
        return made

    def all(self) -> dict[str, tuple[Prompts, SamplingParams, bool]]:
        """Prompts, parameters, and whether reads may be shared, by the workload's name."""
        sizes, greedy = self.sizes, self._greedy
        made = {
            f"decode, {rows} rows behind {length}": (self._random(rows, length), greedy, True)
            for rows, length in sizes.decode
        }
        one = replace(greedy, max_tokens=1)
        prompts, length = sizes.prefill
        made[f"prefill, {prompts} x {length}"] = (self._random(prompts, length), one, True)
        chats, system, own = sizes.chat
        (common,) = self._random(1, system)
        shared = [[*common, *question] for question in self._random(chats, own)]
        made["chat, shared"] = (shared, greedy, True)
        made["chat, reads not shared"] = (shared, greedy, False)
        made["chat, nothing in common"] = (self._random(chats, system + own), greedy, True)
        prompts, length, n = sizes.sample
        sampled = replace(greedy, temperature=1.0, n=n, seed=1)
        made[f"sample, {prompts} x {n}"] = (self._random(prompts, length), sampled, True)
        plain = replace(sampled, n=1)
        made[f"sample, {prompts * n} x 1"] = (self._random(prompts * n, length), plain, True)
        return made


@contextmanager
def reads_not_shared(llm: LLM, off: bool) -> Any:
    """For a while, every row reads its keys by itself, if `off`."""
    backend = llm.engine.runner.backend
    before = backend.cost
    if off:
        backend.cost = replace(before, per_item=NEVER)
    try:
        yield
    finally:
        backend.cost = before


def run(
    llm: LLM, prompts: Prompts, params: SamplingParams, shares: bool
) -> tuple[list[list[int]], dict[str, Any]]:
    """A workload over what is cached: its tokens, and its figures.

    Raises
    ------
    RuntimeError
        If a request failed.
    """
    before = replace(llm.stats().engine)
    played = replays(llm)
    begin = time.perf_counter()
    with reads_not_shared(llm, not shares), Steps(llm) as steps:
        outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - begin
    failed = [output.error for output in outputs if output.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first with: {failed[0]}")
    tokens = [list(its.token_ids) for output in outputs for its in output.outputs]
    after = llm.stats().engine
    read = after.kv_tokens_read - before.kv_tokens_read
    unshared = after.kv_tokens_unshared - before.kv_tokens_unshared
    return tokens, {
        "seconds": seconds,
        "tokens_s": sum(map(len, tokens)) / seconds,
        **steps.rates(),
        "prefilled": after.prefilled_tokens - before.prefilled_tokens,
        "preemptions": after.preemptions - before.preemptions,
        "kv_read": read / unshared,
        "by_graphs": replays(llm) - played,
    }


def with_engine(
    name: str,
    llm: LLM,
    sizes: Sizes,
    report: Report,
    deadline: Deadline,
    check: Callable[[str, list[list[int]]], dict[str, Any]],
) -> int:
    """All workloads on one engine; how many failed."""
    failures = 0
    for workload, (prompts, params, shares) in Workloads(sizes).all().items():
        record: dict[str, Any] = {"engine": name, "workload": workload}
        if deadline.passed(f"{workload} by {name}", A_WORKLOAD if HAS_GPU else 0):
            report.add("workloads", record | {"left_out": "out of time"})
            continue
        try:
            llm.cache.reset()
            if HAS_GPU:
                torch.cuda.reset_peak_memory_stats(DEVICE)
            tokens, record["cold"] = run(llm, prompts, replace(params, max_tokens=1), shares)
            if params.max_tokens > 1:
                if HAS_GPU:
                    run(llm, prompts, replace(params, max_tokens=3), shares)
                tokens, record["warm"] = run(llm, prompts, params, shares)
            if HAS_GPU:
                record["peak_gib"] = torch.cuda.max_memory_allocated(DEVICE) / 2**30
            if params.temperature == 0:
                record |= check(workload, tokens)
        except Exception as error:  # of one workload; the others go on
            failures += 1
            record["failed"] = f"{type(error).__name__}: {error}"[:300]
        failures += record.get("equal_without_graphs") is False
        report.add("workloads", record)
        print(_line(record), flush=True)
    return failures


def _line(record: dict[str, Any]) -> str:
    parts = []
    for key, value in record.items():
        if isinstance(value, dict):
            value = f"({_line(value)})"
        parts.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
    return ", ".join(parts)


def differences(expected: list[list[int]], found: list[list[int]]) -> dict[str, Any]:
    """How many continuations are equal, and where the first difference is."""
    pairs = list(zip(expected, found, strict=True))
    unequal = [
        next(place for place, (a, b) in enumerate(zip(*pair, strict=True)) if a != b)
        for pair in pairs
        if pair[0] != pair[1]
    ]
    return {"equal_rows": len(pairs) - len(unequal), "first_difference": min(unequal, default=None)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 1 if a workload failed, or gave other tokens with graphs than without."""
    options = parsed(parser_of(__doc__ or "", minutes=7.5), arguments)
    sizes = TINY_SIZES if options.tiny else FULL_SIZES
    deadline = Deadline(options.minutes)
    report = Report("gpu_engine", options)
    begin = time.perf_counter()
    loaded = random_llama(sizes.shape, sizes.dtype)
    weights = sum(parameter.numel() for parameter in loaded.model.parameters())
    report.set("model", {"weights": weights, "made_in_s": time.perf_counter() - begin})
    print(f"{weights / 1e9:.2f} billion weights in {sizes.dtype}", flush=True)
    without_graphs: dict[str, list[list[int]]] = {}
    failures = 0
    for name, settings in ENGINES.items():

        def check(
            workload: str, tokens: list[list[int]], name: str = name, kind: Any = settings
        ) -> dict[str, Any]:
            if not kind["graphs"]:
                without_graphs[workload] = tokens
                return {}
            if workload not in without_graphs:
                return {}
            found = differences(without_graphs[workload], tokens)
            if "kv_dtype" in kind:
                return found
            return found | {"equal_without_graphs": found["first_difference"] is None}

        with serve(loaded, **settings, **sizes.settings) as llm:
            failures += with_engine(name, llm, sizes, report, deadline, check)
        del llm
        if HAS_GPU:
            gc.collect()
            torch.cuda.empty_cache()
    _tables(report)
    report.finish()
    return int(failures > 0)


COLUMNS = [
    ("cold", "seconds", "cold s"),
    ("cold", "prefill_tokens_s", "prefill tokens/s"),
    ("warm", "seconds", "warm s"),
    ("warm", "decode_tokens_s", "decode tokens/s"),
    ("warm", "decode_step_ms", "step ms"),
    ("warm", "kv_read", "KV read"),
    ("warm", "by_graphs", "by graphs"),
    ("", "equal_rows", "equal rows"),
    ("", "peak_gib", "peak GiB"),
]


def _tables(report: Report) -> None:
    for name in ENGINES:
        rows = []
        for record in report.results.get("workloads", []):
            if record["engine"] == name and "cold" in record:
                cells = [
                    (record.get(part, {}) if part else record).get(key, "-")
                    for part, key, _ in COLUMNS
                ]
                cells[5] = cells[5] if cells[5] == "-" else f"{cells[5]:.2f}"
                rows.append([record["workload"], *cells])
        print_table(name, ["", *(title for _, _, title in COLUMNS)], rows)


if __name__ == "__main__":
    sys.exit(main())
