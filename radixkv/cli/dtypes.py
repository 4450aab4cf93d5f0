"""The type that commands serve a model in."""

from __future__ import annotations


def command_dtype(model: str, dtype: str, device: str) -> str:
    """What "auto" means for a command: for weights that have no type of their own, the fastest.

    A GGUF, as the demo model is one, holds quantised numbers. From Python "auto" makes float32 of
    them, which gives the same tokens however requests are batched; a command is there to answer.
    """
    if dtype != "auto" or not (model == "demo" or model.endswith(".gguf")):
        return dtype
    import torch

    from radixkv.devices import computes, resolve_device
    from radixkv.model.loading import is_native

    place = resolve_device(device)
    fast = is_native(torch.bfloat16) if place.type == "cpu" else computes(torch.bfloat16, place)
    return "bfloat16" if fast else dtype
