"""Getting a step's numbers to where its tensors are."""

from __future__ import annotations

import torch


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host's on a device; itself if that is the CPU.

    Copied from page-locked memory, so that nobody waits. torch's allocator keeps that memory from
    being used again before the copy is done.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
