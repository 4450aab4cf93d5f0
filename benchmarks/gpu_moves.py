"""Writing tokens into a paged cache, and copying its blocks, for the GPU benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from gpu import DEVICE
from gpu_scenes import BLOCK_SIZE
from radixkv_kernels import copy_blocks, write_kv

from radixkv.attention import KVStore


class Move(NamedTuple):
    """What is run, what it moves (bytes read and written), and whether it came out right."""

    run: Callable[[], object]
    num_bytes: int
    is_right: Callable[[], bool]


def writing(store: KVStore, num_tokens: int) -> Move:
    """Keys and values of so many tokens into slots anywhere; every eighth token has none.

    A store in 8 bits gets a scale for each KV head.
    """
    shape = store.layers[0]
    caches = (store.keys[0], store.values[0])
    new = [
        torch.randn(num_tokens, shape.kv_heads, width, device=DEVICE).to(store.dtype)
        for width in (shape.key_dim, shape.value_dim)
    ]
    picker = torch.Generator().manual_seed(0)
    slots = torch.randperm(store.num_blocks * BLOCK_SIZE, generator=picker)[:num_tokens]
    slots[::8] = -1
    slots = slots.to(DEVICE)
    kept = slots >= 0
    scales = {}
    if store.quantized:
        store.scales["key", 0] = 0.01 * torch.arange(1.0, shape.kv_heads + 1, device=DEVICE)
        store.scales["value", 0] = store.scales["key", 0].flip(0)
        scales = {f"{side}_scale": store.scales[side, 0] for side in ("key", "value")}
    expected = [store.kept("key", 0, new[0][kept]), store.kept("value", 0, new[1][kept])]

    def is_right() -> bool:
        return all(
            torch.equal(_words(cache).flatten(0, 1)[slots[kept]], _words(rows))
            for cache, rows in zip(caches, expected, strict=True)
        )

    moved = sum(
        rows.numel() * (store.dtype.itemsize + store.kv_dtype.itemsize) for rows in expected
    )
    return Move(lambda: write_kv(*new, *caches, slots, **scales), moved, is_right)


def copying(store: KVStore, num_blocks: int) -> Move:
    """So many blocks of keys and values to blocks that are no sources: copy-on-write's case."""
    caches = [store.keys[0], store.values[0]]
    picker = torch.Generator().manual_seed(0)
    ids = torch.randperm(store.num_blocks, generator=picker)
    sources, targets = ids[:num_blocks], ids[num_blocks : 2 * num_blocks]

    def is_right() -> bool:
        return all(
            torch.equal(_words(cache)[targets.to(DEVICE)], _words(cache)[sources.to(DEVICE)])
            for cache in caches
        )

    each = sum(cache[0].numel() * cache.element_size() for cache in caches)
    host = (sources.tolist(), targets.tolist())
    return Move(lambda: copy_blocks(caches, *host), 2 * num_blocks * each, is_right)


def _words(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of 8 bits as bytes: not every operator knows them."""
    return numbers.view(torch.uint8) if numbers.element_size() == 1 else numbers
