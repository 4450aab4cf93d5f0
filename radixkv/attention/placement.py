"""Getting a step's numbers to where its tensors are."""

from __future__ import annotations

import torch


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host's on a device; itself if it is there already.

    Copied from page-locked memory, so that nobody waits. torch's allocator keeps that memory from
    being used again before the copy is done.
    """
    if tensor.device == device:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def refill(buffer: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor of the host's into one on a device, without waiting; same shapes."""
    pinned = tensor if buffer.device.type == "cpu" else tensor.pin_memory()
    buffer.copy_(pinned, non_blocking=True)
