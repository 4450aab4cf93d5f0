"""What every launch needs: the kernel, imported late, on the right device, with a fitting tile."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

# In half precision, one access of 16 bytes (the widest) for each lane of AMD's waves of 64 lanes,
# and two for each lane of NVIDIA's warps of 32.
TILE, WARPS = 1024, 2

# Bits of the exponents of 8-bit floats.
EXPONENTS = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}


def load_kernel(module: str, name: str, device: torch.device) -> Any:
    """Import a Triton kernel when it is first needed.

    Raises
    ------
    ImportError
        If Triton is not installed.
    RuntimeError
        If the tensors are on the CPU and Triton is not interpreting.
    """
    try:
        kernel = getattr(importlib.import_module(f"radixkv_kernels.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(
            "this function needs Triton, which is not installed: pip install 'radixkv[triton]', "
            "or call its twin in radixkv_kernels.torch_twins"
        ) from error
    if device.type == "cpu" and not interpreted(kernel):
        raise RuntimeError(
            "Triton kernels need tensors on a GPU: call the twin in radixkv_kernels.torch_twins, "
            "or set TRITON_INTERPRET=1 before triton is imported"
        )
    return kernel


def interpreted(kernel: Any) -> bool:
    """Whether Triton interprets a kernel instead of compiling it."""
    from triton.runtime import JITFunction

    return not isinstance(kernel, JITFunction)


@cache
def target_of(device: torch.device) -> str:
    """The instruction set of a GPU as compilers name it, "sm_90" or "gfx942"; "cpu" for a CPU."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` current for a launch: Triton launches on the current one, not the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor's strides as a kernel should get them.

    The stride of an axis of length 1 is never used but may be anything, 1 for example: a step of
    one token would cost a compilation of its own. It is given that of a contiguous tensor.
    """
    strides, inside = [], 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        strides.append(stride if size > 1 else inside)
        inside *= size
    return tuple(reversed(strides))


def row_tile(columns: int) -> tuple[int, int]:
    """Rows and columns (powers of two) of the tile that one program moves."""
    width = min(TILE, 1 << (columns - 1).bit_length())
    return TILE // width, width
