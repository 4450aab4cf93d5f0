"""Is everything right on this GPU, and about how fast? What a first session with one runs.

    python benchmarks/gpu_checks.py [--tiny] [--minutes 7.8] [--output-dir DIR] [--parts NAME ...]

Each part is a process of its own with its own time limit, so that one that hangs or breaks the
device's context leaves the others alone:

- small: a small case of every kernel against float64.
- invariant: with `invariant=True`, shared, unshared and alone give the same bits.
- engine: a tiny Llama in float32 gives Hugging Face's tokens, with and without CUDA graphs.
- memcheck, racecheck: the small case under NVIDIA's compute-sanitizer.
- benchmarks: both benchmarks at their tiny sizes, on the device.
- figures: the beginning of `gpu_kernels.py`: the card's bandwidth, and decodes.
- constants: what the cost model's constants should be, and as many tiles as the time allows.
- kernels: all tests of `tests/kernels`, on the device, in the time that is left.
- compile: that all variants compile for all targets; only if asked for, since it needs no GPU.

What comes before `kernels` is ended at limits that leave it two minutes.

Without a GPU the first three run in Triton's interpreter, and the rest is left out: `make test` has
it. Exit status 1 if a part failed or ran out of time.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu import DEVICE, HAS_GPU, ROOT, Deadline, Report, parsed, parser_of
from measure import print_table

HERE = "benchmarks/gpu_checks.py"
TOOLKITS = ("/usr/local/cuda/bin", "/opt/cuda/bin")
MINUTES = 7.8
# Seconds of each part. What comes before "kernels" leaves it two minutes of `MINUTES`.
LIMITS = {
    "small": 30,
    "invariant": 30,
    "engine": 45,
    "memcheck": 45,
    "racecheck": 35,
    "benchmarks": 40,
    "figures": 65,
    "constants": 55,
    "kernels": 300,
    "compile": 300,
}
ONLY_IF_ASKED = {"compile"}
# The end of a part's output that is kept.
KEPT = 3000


@dataclass(frozen=True)
class Part:
    """A command, run in the repository's root.

    Attributes
    ----------
    commands : sequence of sequence of str
        One after the other; the first that fails ends the part.
    seconds : float
        For all of them.
    settings : dict
        Environment variables.
    missing : str
        Why it cannot be run here; empty if it can.
    """

    commands: Sequence[Sequence[str]]
    seconds: float
    settings: dict[str, str]
    missing: str = ""


def parts_of(tiny: bool, scratch: Path) -> dict[str, Part]:
    """What is run here, in this order."""
    python, pytest = sys.executable, [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    # Every test compiles kernels of its own, which takes longer than running them.
    workers = min(12, os.cpu_count() or 1)
    spread = ["-n", str(workers)] if importlib.util.find_spec("xdist") else []
    size = ["--tiny"] if tiny else []
    inner = {name: [python, HERE, "--inside", name, *size] for name in INSIDE}
    needs_gpu = "" if HAS_GPU else "needs a GPU; make test runs this in the interpreter"
    compile_tests = "tests/kernels/test_compile.py"
    sanitizer = find_sanitizer()
    # Blocks of torch's allocator are one big allocation, within which nothing looks out of bounds.
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    absent = needs_gpu or ("" if sanitizer else "compute-sanitizer is not on this machine")
    case = [python, HERE, "--inside", "small", "--tiny"]
    checked = {
        tool: Part(
            [[sanitizer or "", "--tool", tool, "--error-exitcode", "9", *case]],
            LIMITS[tool],
            uncached,
            absent,
        )
        for tool in ("memcheck", "racecheck")
    }
    folder = ["--output-dir", str(scratch.resolve())]
    output = ["--tiny", *folder]
    kernels = [python, "benchmarks/gpu_kernels.py", *folder, *size]
    return {
        **{name: Part([command], LIMITS[name], {}) for name, command in inner.items()},
        **checked,
        "benchmarks": Part(
            [
                [python, "benchmarks/gpu_kernels.py", *output],
                [python, "benchmarks/gpu_engine.py", *output],
            ],
            LIMITS["benchmarks"],
            {},
            needs_gpu,
        ),
        "figures": Part(
            [[*kernels, "--parts", "decode", "shared", "--minutes", "0.9"]],
            LIMITS["figures"],
            {},
            needs_gpu,
        ),
        "constants": Part(
            [[*kernels, "--tune", "--minutes", "0.8"]], LIMITS["constants"], {}, needs_gpu
        ),
        "kernels": Part(
            [[*pytest, *spread, "tests/kernels", f"--ignore={compile_tests}"]],
            LIMITS["kernels"],
            # On the device, or not at all.
            {"TRITON_INTERPRET": "0"},
            needs_gpu,
        ),
        "compile": Part([[*pytest, compile_tests]], LIMITS["compile"], {}, needs_gpu),
    }


def find_sanitizer() -> str | None:
    """NVIDIA's memory checker, on the path or where its toolkit is installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *TOOLKITS])
    return shutil.which("compute-sanitizer", path=path)


def run_part(part: Part, seconds: float) -> dict[str, Any]:
    """Run a part's commands within so many seconds, and say how it went."""
    if part.missing:
        return {"status": "left out", "reason": part.missing}
    begin, said = time.monotonic(), ""
    for command in part.commands:
        left = seconds - (time.monotonic() - begin)
        status, output = _run(command, part.settings, left)
        said += output
        if status != "passed":
            break
    return {"status": status, "seconds": time.monotonic() - begin, "output": said[-KEPT:]}


def _run(command: Sequence[str], settings: dict[str, str], seconds: float) -> tuple[str, str]:
    path = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, path)), **settings}
    process = subprocess.Popen(
        list(command),
        cwd=ROOT,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=max(seconds, 1))
    except subprocess.TimeoutExpired:
        # What it started goes with it: the command may be a checker around a process.
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        return "out of time", output
    return ("passed" if process.returncode == 0 else f"failed ({process.returncode})"), output


# --- What runs inside of a part. ---


def small(tiny: bool) -> None:
    """Every kernel once, and what it wrote against float64."""
    from gpu_moves import copying, writing
    from gpu_scenes import Heads, Problem, make_pool, make_rows, never_sharing

    from radixkv.attention import TritonBackend

    heads = Heads(4, 2, 16) if tiny else Heads(32, 8, 128)
    batch, prefix, own, queries = (3, 96, 9, 5) if tiny else (40, 1024, 100, 37)
    for kept in (None, torch.float8_e4m3fn):
        store = make_pool(heads, prefix + batch * (own + 16), kv_dtype=kept)
        backend = TritonBackend(store)
        backend.cost = replace(backend.cost, per_item=0, per_query=0)
        for count in (1, queries):
            rows = make_rows(store, batch=batch, own=own, prefix=prefix, queries=count)
            for kind in (backend, never_sharing(backend)):
                problem = Problem(kind, rows, heads)
                problem.run()
                print(f"{kept}, {count} queries, {problem.kv_tokens}: {problem.check():.2g}")
    for kept in (None, torch.float8_e4m3fn, torch.float8_e5m2):
        store = make_pool(heads, 16 * 64, kv_dtype=kept)
        for make, count in ((writing, 50), (copying, 20)):
            move = make(store, count)
            move.run()
            if not move.is_right():
                raise ArithmeticError(f"{make.__name__} went wrong in {store.kv_dtype}")


def invariant(tiny: bool) -> None:
    """Bits of rows that share, of the same rows without sharing, and of each row alone."""
    # Rounding to bfloat16 hides most of what differs, but it is what is used.
    for dtype in (torch.float32, torch.bfloat16):
        _same_bits(tiny, dtype)


def _same_bits(tiny: bool, dtype: torch.dtype) -> None:
    from gpu_scenes import NEVER, Heads, make_pool, make_rows

    from radixkv.attention import CostModel, LayerAttention, Row, TritonBackend, make_batch

    heads = Heads(4, 2, 16) if tiny else Heads(32, 8, 128)
    batch, prefix, own = (3, 96, 9) if tiny else (24, 4096, 700)
    counts = (1, 5, 1) if tiny else (1, 17, 1, 64, 2, 1)
    store = make_pool(heads, prefix + batch * (own + 16), dtype)
    cost = TritonBackend(store, invariant=True).cost
    if tiny:
        cost = CostModel(per_item=0, tile=32, split=32)
    rows = [
        Row(row.table, row.stop - counts[i % len(counts)], counts[i % len(counts)])
        for i, row in enumerate(make_rows(store, batch=batch, own=own, prefix=prefix))
    ]
    queries = [torch.randn(row.num_queries, heads.query, heads.dim) for row in rows]

    def attend(which: Sequence[int], shares: bool) -> dict[int, torch.Tensor]:
        backend = TritonBackend(store, cost=cost if shares else replace(cost, per_item=NEVER))
        laid_out = make_batch([rows[i] for i in which], store.block_size, cost=backend.cost)
        if bool(laid_out.plan.runs) != (shares and len(which) > 1):
            raise RuntimeError("the plan shares what it should not, or nothing")
        order = [which[i] for i in laid_out.plan.order.tolist()]
        query = torch.cat([queries[i] for i in order]).to(DEVICE, store.dtype)
        out = backend.forward(LayerAttention(0, heads.dim**-0.5), laid_out, query, None, None)
        bounds = laid_out.offsets.tolist()
        return {i: out[bounds[k] : bounds[k + 1]] for k, i in enumerate(order)}

    everyone = list(range(batch))
    shared, apart = attend(everyone, True), attend(everyone, False)
    for i in everyone:
        alone = attend([i], True)[i]
        if not bool(alone.isfinite().all()):
            raise ArithmeticError(f"row {i} is not finite")
        for name, other in (("shared", shared[i]), ("in a batch", apart[i])):
            if not torch.equal(alone, other):
                raise ArithmeticError(f"row {i}: other bits {name} than alone")
    print(f"{dtype}, {batch} rows, {sum(map(len, queries))} queries: the same bits")


def engine(tiny: bool) -> None:
    """A tiny Llama's greedy tokens by Hugging Face, by the engine, and by its graphs."""
    from gpu_llama import TINY, random_llama, replays, serve

    from radixkv import SamplingParams

    rows, length, count = (2, 20, 3) if tiny else (5, 100, 40)
    vocabulary = TINY["vocab_size"]
    picker = torch.Generator().manual_seed(3)
    common = torch.randint(0, vocabulary, (length,), generator=picker).tolist()
    prompts = [[*common, *range(i, i + 5 + i)] for i in range(rows)]
    theirs = random_llama(TINY, torch.float32).model
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=DEVICE)
        with torch.inference_mode():
            for _ in range(count):
                best = theirs(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)
                ids = torch.cat([ids, best], 1)
        expected.append(ids[0, len(prompt) :].tolist())
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    for graphs in (False, True):
        loaded = random_llama(TINY, torch.float32)
        with serve(loaded, graphs=graphs, kv_memory="1MiB", max_num_seqs=16) as llm:
            outputs = llm.generate(prompts, params)
            found = [list(output.outputs[0].token_ids) for output in outputs]
            played = replays(llm)
        if graphs and not played:
            raise RuntimeError("no step was played by a graph")
        if found != expected:
            raise ArithmeticError(f"graphs {graphs}: {found} instead of {expected}")
        print(f"graphs {graphs}: {rows} x {count} tokens as Hugging Face's; {played} replays")


INSIDE: dict[str, Callable[[bool], None]] = {
    "small": small,
    "invariant": invariant,
    "engine": engine,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; 1 if one failed."""
    parser = parser_of(__doc__ or "", minutes=MINUTES)
    parser.add_argument("--parts", nargs="+", help="only these")
    parser.add_argument("--inside", choices=INSIDE, help=argparse.SUPPRESS)
    options = parsed(parser, arguments)
    torch.manual_seed(0)
    if options.inside:
        INSIDE[options.inside](options.tiny)
        return 0
    parts = parts_of(options.tiny, options.output_dir)
    chosen = options.parts or [name for name in parts if name not in ONLY_IF_ASKED]
    if unknown := sorted(set(chosen) - set(parts)):
        parser.error(f"no parts {unknown}; there are {', '.join(parts)}")
    deadline = Deadline(options.minutes)
    report = Report("gpu_checks", options)
    results = {}
    for name in chosen:
        if deadline.passed(name, 5):
            results[name] = {"status": "left out", "reason": "out of time"}
        else:
            results[name] = run_part(parts[name], min(parts[name].seconds, deadline.left))
        report.set("parts", results)
        status = results[name]["status"]
        if status.startswith(("failed", "out of time")):
            print(results[name]["output"])
        print(f"{name}: {status}", flush=True)
    lines = [
        [name, result["status"], result.get("seconds", "-"), result.get("reason", "")]
        for name, result in results.items()
    ]
    print_table("checks", ["", "status", "s", ""], lines)
    report.finish()
    bad = [name for name, result in results.items() if is_bad(result)]
    return int(bool(bad))


def is_bad(result: dict[str, Any]) -> bool:
    """Whether a part found a fault, or should have run and did not come to its end."""
    late = result["status"] == "left out" and result["reason"] == "out of time"
    return late or result["status"] not in ("passed", "left out")


if __name__ == "__main__":
    sys.exit(main())
