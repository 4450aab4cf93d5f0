"""Compiles every kernel for every target without a GPU and prints what it costs; a script."""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from radixkv_kernels.kv_jit import copy_blocks_kernel, write_kv_kernel
from radixkv_kernels.launch import WARPS, row_tile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    **{f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 90, 100)},
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def write_source(dtype, cache_dtype, heads, key_dim, value_dim):
    strides = [f"{rows}_stride_{axis}" for rows in ("key", "value") for axis in ("token", "head")]
    rows, columns = row_tile(heads * max(key_dim, value_dim))
    return source(
        write_kv_kernel,
        dict.fromkeys(("key_ptr", "value_ptr"), dtype)
        | dict.fromkeys(("key_cache_ptr", "value_cache_ptr"), cache_dtype)
        | {"slot_ptr": "*i64", "num_tokens": "i32"}
        | dict.fromkeys(strides, "i32"),
        {"key_stride_dim": 1, "value_stride_dim": 1}
        | {"HEADS": heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim}
        | {"ROWS": rows, "COLUMNS": columns},
        unaligned={"slot_ptr", "num_tokens"},
    )


def copy_source(word, words):
    rows, columns = row_tile(words)
    return source(
        copy_blocks_kernel,
        {"source_ptr": word, "target_ptr": word, "pair_ptr": "*i64", "num_pairs": "i32"},
        {"WORDS": words, "ROWS": rows, "COLUMNS": columns},
        unaligned={"num_pairs"},
    )


def source(kernel, types, constants, unaligned):
    """What the JIT would specialise on: multiples of 16 for all but `unaligned`."""
    names = kernel.arg_names
    return ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name in types
            if name not in unaligned
        },
    )


SOURCES = {
    "write bf16": write_source("*bf16", "*bf16", 8, 128, 128),
    "write fp32 to bf16": write_source("*fp32", "*bf16", 3, 80, 64),
    "copy 16-bit": copy_source("*i16", 16 * 8 * 128),
}


def spills(compiled, target):
    if target == "gfx942":
        counts = re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", compiled.asm["amdgcn"])
    else:
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [tool, "--dump-resource-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        counts = re.findall(r"(?:STACK|LOCAL):(\d+)", usage)
    assert len(counts) == 2, f"{target}: {counts}"
    return sum(map(int, counts))


if __name__ == "__main__":
    report = {}
    for name, kernel_source in SOURCES.items():
        for target, gpu in TARGETS.items():
            compiled = triton.compile(kernel_source, target=gpu, options={"num_warps": WARPS})
            assembly = compiled.asm["amdgcn" if target == "gfx942" else "ptx"]
            wide = r"global_(?:load|store)_dwordx4|(?:ld|st)\.global\S*\.v4\.b32"
            report[f"{name}, {target}"] = {
                "spills": spills(compiled, target),
                "shared": compiled.metadata.shared,
                "wide": len(re.findall(wide, assembly)),
                "rounds": len(re.findall(r"cvt\.rn\.bf16x?2?\.f32", assembly)),
            }
    print(json.dumps(report))
