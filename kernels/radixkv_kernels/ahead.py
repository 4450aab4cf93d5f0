"""Compile a kernel for a GPU that is not here, and read from the result what it costs."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Bytes of shared memory that one program may use: the compiler itself does not check it.
SHARED_LIMITS = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}


@dataclass(frozen=True, slots=True)
class Figures:
    """What one compiled kernel costs on one target.

    Attributes
    ----------
    registers : int
        Of a thread (vector registers on AMD).
    spills : int
        Bytes of memory, or on AMD vector registers, that did not fit into registers.
    scalar_spills : int
        AMD only: scalar registers that are kept in lanes of a vector register, not in memory.
    shared, shared_limit : int
        Bytes of shared memory: used, and available.
    buffers : int
        Tiles that the pipeline holds of each of keys and values at once; 0 without a pipeline.
    wide, narrow : int
        Instructions that read or write 16 bytes of global memory at once, asynchronous copies into
        shared memory included; and copies, or on AMD reads of one or two bytes, that are narrower.
    rounds : int
        NVIDIA only: instructions that round float32 to bfloat16.
    """

    registers: int
    spills: int
    scalar_spills: int
    shared: int
    shared_limit: int
    buffers: int
    wide: int
    narrow: int
    rounds: int


def kernel_source(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], unaligned: Set[str]
) -> ASTSource:
    """What Triton's JIT would compile for arguments of these types.

    Parameters
    ----------
    kernel : triton.JITFunction
        Arguments in neither `types` nor `constants` are None.
    types : mapping of str to str
        "*bf16", "i32", ...; all are taken as multiples of 16, as a rule they are, ...
    unaligned : set of str
        ... but for these.
    constants : mapping of str to Any
        The compile-time arguments.

    Raises
    ------
    RuntimeError
        Under Triton's interpreter, which leaves nothing to compile.
    """
    if not isinstance(kernel, JITFunction):
        raise RuntimeError("kernels cannot be compiled under TRITON_INTERPRET=1: unset it")
    names = kernel.arg_names
    return ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={name: constants.get(name) for name in names if name not in types},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name in types
            if name not in unaligned
        },
    )


def compile_for(target: str, source: ASTSource, **options: int) -> Figures:
    """Compile for one of `TARGETS` with Triton's options, and read the compiler's output."""
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    read = _read_amd if target.startswith("gfx") else _read_nvidia
    return Figures(
        shared=compiled.metadata.shared,
        shared_limit=SHARED_LIMITS[target],
        buffers=count_buffers(compiled.asm["ttgir"]),
        **read(compiled),
    )


def count_buffers(ttgir: str) -> int:
    """The fewest tiles in any of the buffers that the software pipeline allocates; 0 without two.

    Those are allocated empty, before the loop, with an axis for the tiles in front.
    """
    depths = re.findall(r"ttg\.local_alloc\s*:\s*\(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", ttgir)
    return min(map(int, depths)) if len(depths) >= 2 else 0


def _read_amd(compiled: Any) -> dict[str, int]:
    assembly = compiled.asm["amdgcn"]

    def count(name: str) -> int:
        (number,) = re.findall(rf"\.{name}:\s+(\d+)", assembly)
        return int(number)

    narrow = r"\b(?:global|buffer)_load_(?:u8|i8|u16|i16|ubyte|sbyte|ushort|sshort|short)\w*"
    return {
        "registers": count("vgpr_count"),
        "spills": count("vgpr_spill_count") + count("private_segment_fixed_size"),
        "scalar_spills": count("sgpr_spill_count"),
        "wide": len(re.findall(r"\b(?:global|buffer)_(?:load|store)_dwordx4\b", assembly)),
        "narrow": len(re.findall(narrow, assembly)),
        "rounds": 0,
    }


def _read_nvidia(compiled: Any) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # One function each: anything else would be read wrongly.
    ((registers, stack, local),) = re.findall(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
    ptx = compiled.asm["ptx"]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^,]*,[^,]*, (0x\w+|\d+)", ptx)
    direct = re.findall(r"(?:ld|st)\.global\S*\.v4\.b32", ptx)
    wide = sum(int(size, 0) == 16 for size in copies)
    return {
        "registers": int(registers),
        "spills": int(stack) + int(local),
        "scalar_spills": 0,
        "wide": wide + len(direct),
        "narrow": len(copies) - wide,
        "rounds": len(re.findall(r"cvt\.rn\.bf16x?2?\.f32", ptx)),
    }
