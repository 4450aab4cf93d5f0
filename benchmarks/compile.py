"""Is `torch.compile` worth its start-up? Steps of a model as transformers wrote it, and compiled.

    python benchmarks/compile.py [--rows 1,16,64] [--threads 2] [--steps 20] [--output FILE]

The demo model in bfloat16, served in three ways in turn: the modules of transformers with our
attention ("modules"), as all families run that no fast path is written for; the same through
`torch.compile` with shapes that may vary ("compiled"); and the fast path ("blocks"). Milliseconds
a decode step behind a shared prefix, wall, medians. What compiling takes: the seconds until a
prompt and a first token are there, with an empty cache of compiled code, and with a filled one in
a new process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

from measure import print_head, print_table, write_json

# Before torch: it says how long OpenMP's threads turn round.
from radixkv import LLM, SamplingParams  # isort: split

import torch
from step import WARM_STEPS, ready

import radixkv.llm as llm_module
import radixkv.model.adapter as adapter_module
import radixkv.model.function_adapter as function_module
from radixkv.model.function_adapter import FunctionAdapter

KINDS = ("modules", "compiled", "blocks")


def load(kind: str, frozen: bool) -> LLM:
    """The demo model, served in one of these ways."""
    with ExitStack() as changes:
        if kind != "blocks":
            only = patch.object(adapter_module, "_kinds", return_value=[FunctionAdapter])
            changes.enter_context(only)
        if kind == "compiled":
            # The compiler packs weights itself, and cannot read those that are packed.
            changes.enter_context(patch.object(llm_module, "pack_linears", return_value=0))
        llm = LLM.demo(dtype="bfloat16", max_num_batched_tokens=4096)
    if kind == "compiled":
        # What attention does differs from step to step, and is compiled already.
        attention = torch.compiler.disable(function_module.paged_attention)
        function_module.AttentionInterface.register(function_module.IMPLEMENTATION, attention)
        torch._inductor.config.freezing = frozen
        torch._dynamo.config.recompile_limit = 1000
        llm.loaded.model.compile(dynamic=True)
    return llm


def first_answer(kind: str, frozen: bool) -> float:
    """Seconds until a prompt and two tokens are there, of a model that is loaded."""
    llm = load(kind, frozen)
    begin = time.perf_counter()
    params = SamplingParams(max_tokens=2, temperature=0)
    answer = llm.generate([list(range(100, 300))], params)[0]
    if answer.error is not None:
        raise answer.error
    return time.perf_counter() - begin


def start_ups(frozen: bool) -> list[list[str | float]]:
    """The first answer in new processes: modules, compiled twice with one cache, blocks."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}

        def run(kind: str) -> float:
            command = [sys.executable, __file__, "--first", kind, *["--frozen"] * frozen]
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            return float(done.stdout.split()[-1])

        return [
            ["modules", run("modules")],
            ["compiled, nothing cached", run("compiled")],
            ["compiled, cached", run("compiled")],
            ["blocks", run("blocks")],
        ]


@torch.inference_mode()
def measure(llms: dict[str, LLM], rows: int, prefix: int, steps: int) -> dict[str, float]:
    """Milliseconds a step of each kind, in turn."""
    times: dict[str, list[float]] = defaultdict(list)
    for llm in llms.values():
        ready(llm, rows, prefix, WARM_STEPS + 4 * steps)
    for _ in range(steps):
        for kind, llm in llms.items():
            begin = time.perf_counter()
            deltas = llm.engine.step()
            assert len(deltas) == rows, "a step failed"
            times[kind].append(1e3 * (time.perf_counter() - begin))
    for llm in llms.values():
        for request in list(llm.engine.requests):
            llm.engine.abort(request)
    return {kind: statistics.median(each) for kind, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--prefix", type=int, default=1500)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--frozen", action="store_true", help="compile for each weight anew")
    parser.add_argument("--first", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.first:
        print(first_answer(options.first, options.frozen))
        return
    print_head()
    starts = start_ups(options.frozen)
    print_table("Until the first answer, s", ["", "s"], [[name, f"{s:.1f}"] for name, s in starts])
    llms = {kind: load(kind, options.frozen) for kind in KINDS}
    found = {
        rows: measure(llms, int(rows), options.prefix, options.steps)
        for rows in options.rows.split(",")
    }
    lines = [
        [
            rows,
            *(f"{each[kind]:.1f}" for kind in KINDS),
            f"{each['modules'] / each['compiled']:.2f}",
        ]
        for rows, each in found.items()
    ]
    print_table("A decode step, ms", ["rows", *KINDS, "modules / compiled"], lines)
    write_json(options.output, {"first_answer_s": dict(starts), "step_ms": found})


if __name__ == "__main__":
    main()
