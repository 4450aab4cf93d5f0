"""Scales of keys and values that a checkpoint brings, as calibration tools leave them there.

One for each layer and side, of all heads together or of each KV head: a key or value divided by it
is what e4m3 holds. Without any, numbers are kept as they are (scale 1).
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch

from radixkv.attention import KVStore
from radixkv.errors import ModelLoadError

logger = logging.getLogger(__name__)

Scales = dict[tuple[str, int], torch.Tensor]

# "model.layers.3.self_attn.k_scale"; others put it on the projection, or on an inner `attn`.
_NAME = re.compile(r"\.(\d+)\.(?:[a-z_]*attn|attention)\.(?:attn\.|[kv]_proj\.)?([kv])_scale$")
_SIDES = {"k": "key", "v": "value"}


def read_kv_scales(folder: Path) -> Scales:
    """All scales in a folder's safetensors, by side and the layer's number; none is fine.

    Raises
    ------
    ModelLoadError
        For a file that cannot be read, or two scales of one thing.
    """
    from safetensors import SafetensorError, safe_open

    found: Scales = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 -- no mapping
                    if match := _NAME.search(name):
                        place = (_SIDES[match[2]], int(match[1]))
                        if place in found:
                            raise ModelLoadError(f"{folder} has a second scale {name}")
                        found[place] = file.get_tensor(name)
        except SafetensorError as error:
            raise ModelLoadError(f"cannot read {path}: {error}") from error
    return found


def take_scales(store: KVStore, scales: Scales) -> None:
    """Have a store divide by a checkpoint's scales, if it has any.

    Raises
    ------
    ModelLoadError
        If they are not one for each side of each layer, each a positive number or one for each KV
        head: with some of them only, keys would be rounded in two ways.
    """
    if not scales:
        return
    wanted = [(side, layer) for layer in range(len(store.layers)) for side in _SIDES.values()]
    if sorted(scales) != sorted(wanted):
        raise ModelLoadError(
            f"the checkpoint has {len(scales)} scales for keys and values, of layers "
            f"{sorted({layer for _, layer in scales})}, but the model keeps those of "
            f"{len(store.layers)} layers; use kv_dtype='fp8_e5m2', which needs none, or 'auto'"
        )
    for side, layer in wanted:
        scale, heads = scales[side, layer].float().flatten(), store.layers[layer].kv_heads
        if len(scale) not in (1, heads) or not bool((scale.isfinite() & (scale > 0)).all()):
            raise ModelLoadError(
                f"the checkpoint's {side} scale of layer {layer} is no positive number for each "
                f"of {heads} KV heads: {scale.tolist()[:8]}; use kv_dtype='fp8_e5m2' or 'auto'"
            )
        kept = scale.expand(heads).contiguous().to(store.device)
        store.scales["key" if side == "key" else "value", layer] = kept
    logger.info("keys and values are scaled as the checkpoint says")
