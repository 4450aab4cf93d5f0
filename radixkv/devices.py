"""Where a model is served, what runs there, and how much of its memory keys and values may take."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from radixkv.errors import ConfigError

# Of a GPU's memory: what neither the model, nor keys and values, nor the largest step's tensors
# take. For the allocator's fragments, the kernels' code, and steps that merge more partial outputs
# than the one that is measured.
HEADROOM = 0.08


def resolve_device(device: str | torch.device) -> torch.device:
    """The device that is meant; to be asked before anything is loaded.

    Parameters
    ----------
    device : str or torch.device
        "auto" (a GPU if torch finds one and Triton is installed, else the CPU), "cpu", "cuda", or
        "cuda:N". AMD's GPUs go by the same names.

    Raises
    ------
    ConfigError
        For any other, or one that is not there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and has_triton() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise _unknown(device) from error
    if found.type not in ("cpu", "cuda"):
        raise _unknown(device)
    if found.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device={str(device)!r}: torch {torch.__version__} finds no GPU. Install a build of "
            "torch for your GPU and check its driver, or use device='cpu'"
        )
    if not has_triton():
        raise ConfigError(
            f"device={str(device)!r} needs Triton: pip install 'radixkv[triton]', "
            "or use device='cpu'"
        )
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device={str(device)!r}: there are {torch.cuda.device_count()} GPUs, from cuda:0 on"
        )
    return torch.device("cuda", index)


def _unknown(device: object) -> ConfigError:
    return ConfigError(f"unknown device {str(device)!r}; use auto, cpu, cuda or cuda:N")


def has_triton() -> bool:
    """Whether Triton can be imported; it is not."""
    return importlib.util.find_spec("triton") is not None


def computes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a GPU's matrix units take a type; the oldest that are served lack bfloat16."""
    if device.type != "cuda" or dtype is not torch.bfloat16:
        return True
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def room_for_kv(device: torch.device, largest_step: Callable[[], object]) -> int:
    """Bytes of a GPU that keys and values may take.

    Parameters
    ----------
    device : torch.device
        Holds the model already.
    largest_step : callable
        Runs a forward pass of as many tokens as there will ever be in one, and lets go of all that
        it made.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    largest_step()
    torch.cuda.synchronize(device)
    step = torch.cuda.max_memory_allocated(device) - before
    # What the step took is torch's by now, not free; given back, it counts once.
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return max(free - step - int(total * HEADROOM), 0)
