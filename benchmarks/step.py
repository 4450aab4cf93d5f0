"""How near is a decode step to what the machine allows? One step of many rows, and its floor.

    python benchmarks/step.py [--rows 1,16,64] [--prefix 1500] [--threads 2] [--steps 20] [--int8]
    python benchmarks/step.py --prompts 160,400,800,2048

Rows decode behind a shared prefix, the demo model in bfloat16. Whole blocks ("blocks"), the fused
blocks that they took the place of ("fused"), and two lower bounds, in turn: all weights, and keys
and values once each, read as fast as a plain sum reads memory ("read"), and all of the step's
matrix products by torch over oneDNN's own order of weights ("products"). The floor is the larger
of these. Milliseconds, wall, medians; the step's CPU time beside it. With --int8, whole blocks over
int8 weights take their turns too. With --prompts, steps that compute a new prompt of so many tokens
instead: whole blocks and fused ones, in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measure import print_head, print_table, write_json

# Before torch: it says how long OpenMP's threads turn round.
from radixkv import LLM, SamplingParams  # isort: split

import torch

from radixkv.model.prepack import PackedLinear
from radixkv.model.whole_block import WholeBlock

OWN_TOKENS = 16
WARM_STEPS = 6
HEAD = ["rows", "blocks", "CPU", "fused", "CPU", "read", "products", "blocks / floor"]


def ready(llm: LLM, rows: int, prefix: int, tokens: int) -> None:
    """Have so many rows decode, all behind one prefix."""
    shared = [(7919 * i) % 40_000 + 100 for i in range(prefix)]
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    for row in range(rows):
        own = [(131 * row + i) % 40_000 + 100 for i in range(OWN_TOKENS)]
        llm.engine.add_request(shared + own, params)
    for _ in range(WARM_STEPS):
        llm.engine.step()


@contextmanager
def fused(llm: LLM) -> Any:
    """Blocks of several operators, over oneDNN's order of weights, in their place."""
    own = WholeBlock.__call__
    linears = [m for m in llm.loaded.model.modules() if isinstance(m, PackedLinear)]
    tiles = [linear.tiles for linear in linears]
    WholeBlock.__call__ = lambda *_: None  # type: ignore[method-assign]
    for linear in linears:
        linear.tiles = None
    try:
        yield
    finally:
        WholeBlock.__call__ = own  # type: ignore[method-assign]
        for linear, kept in zip(linears, tiles, strict=True):
            linear.tiles = kept


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of wall and of CPU time."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


def kv_bytes(llm: LLM) -> int:
    """Of the keys and values that one step reads, each once."""
    store, branches = llm.engine.runner.backend.store, llm.engine.scheduler.running
    tables = [b.sequence.block_table for r in branches for b in r.branches if b.sequence]
    blocks = {int(block) for table in tables for block in table}
    return len(blocks) * store.bytes_per_block(store.layers, store.block_size, store.kv_dtype)


def products(llm: LLM, rows: int) -> Callable[[], None]:
    """All of a step's matrix products, one after the other, by oneDNN."""
    linears = [m for m in llm.loaded.model.modules() if isinstance(m, PackedLinear)]
    inputs = {m.in_features: torch.randn(rows, m.in_features).bfloat16() for m in linears}

    def run() -> None:
        for m in linears:
            torch.ops.mkldnn._linear_pointwise(
                inputs[m.in_features], m._packed, None, "none", [], ""
            )

    return run


@torch.inference_mode()
def measure(llm: LLM, int8: LLM | None, rows: int, prefix: int, steps: int) -> list[Any]:
    """One line of the table."""
    for each in (llm, int8):
        if each is not None:
            ready(each, rows, prefix, WARM_STEPS + 4 * steps)
    weights = sum(
        2 * m.in_features * m.out_features
        for m in llm.loaded.model.modules()
        if isinstance(m, PackedLinear)
    )
    memory = torch.ones((weights + kv_bytes(llm)) // 4, dtype=torch.float32)
    multiply = products(llm, rows)
    times: dict[str, list[tuple[float, float]]] = {}
    for _ in range(steps):
        times.setdefault("blocks", []).append(timed(llm.engine.step))
        with fused(llm):
            times.setdefault("fused", []).append(timed(llm.engine.step))
        if int8 is not None:
            times.setdefault("int8", []).append(timed(int8.engine.step))
        times.setdefault("read", []).append(timed(memory.sum))
        times.setdefault("products", []).append(timed(multiply))
    for each in (llm, int8):
        for request in list(each.engine.requests) if each is not None else []:
            each.engine.abort(request)
    wall = {name: statistics.median(w for w, _ in each) for name, each in times.items()}
    cpu = {name: statistics.median(c for _, c in each) for name, each in times.items()}
    floor = max(wall["read"], wall["products"])
    line = [
        str(rows), wall["blocks"], cpu["blocks"], wall["fused"], cpu["fused"], wall["read"],
        wall["products"], f"{wall['blocks'] / floor:.2f}",
    ]  # fmt: skip
    return line if int8 is None else [*line, wall["int8"], cpu["int8"]]


def prompt_step(llm: LLM, tokens: int, number: int) -> tuple[float, float]:
    """Milliseconds of the step that computes a prompt which nobody has had before."""
    prompt = [(7919 * i + 104_729 * number) % 40_000 + 100 for i in range(tokens)]
    llm.engine.add_request(prompt, SamplingParams(max_tokens=1))
    times = timed(llm.engine.step)
    assert not llm.engine.has_work, "it took more than a step"
    return times


def measure_prompts(llm: LLM, tokens: int, steps: int) -> list[Any]:
    """One line of the table: medians and the best, in turn."""
    blocks, in_parts = [], []
    for turn in range(steps + 1):
        blocks.append(prompt_step(llm, tokens, 2 * turn)[0])
        with fused(llm):
            in_parts.append(prompt_step(llm, tokens, 2 * turn + 1)[0])
    blocks, in_parts = blocks[1:], in_parts[1:]
    middle = statistics.median(blocks), statistics.median(in_parts)
    best = min(blocks), min(in_parts)
    return [str(tokens), *middle, *best, f"{best[1] / best[0]:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="1,16,64")
    parser.add_argument("--prefix", type=int, default=1500)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--prompts", help="tokens of new prompts, in place of decode steps")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print_head()
    llm = LLM.demo(dtype="bfloat16", max_num_batched_tokens=4096)
    if arguments.prompts:
        rows = arguments.prompts.split(",")
        lines = [measure_prompts(llm, int(tokens), arguments.steps) for tokens in rows]
        head = ["tokens", "blocks", "fused", "blocks, best", "fused, best", "fused / blocks, best"]
        print_table("A step that computes a prompt, ms", head, lines)
        write_json(arguments.output, {"prompts": [dict(zip(head, x, strict=True)) for x in lines]})
        return
    int8 = LLM.demo(quantization="int8", max_num_batched_tokens=4096) if arguments.int8 else None
    lines = [
        measure(llm, int8, int(rows), arguments.prefix, arguments.steps)
        for rows in arguments.rows.split(",")
    ]
    head = [*HEAD, "int8", "CPU"] if arguments.int8 else HEAD
    print_table("A decode step, ms", head, lines)
    names = ["rows", "blocks_ms", "blocks_cpu_ms", "fused_ms", "fused_cpu_ms", "read_ms"]
    names += ["products_ms", "over_floor", *(["int8_ms", "int8_cpu_ms"] if arguments.int8 else [])]
    write_json(arguments.output, {"lines": [dict(zip(names, x, strict=True)) for x in lines]})


if __name__ == "__main__":
    main()
