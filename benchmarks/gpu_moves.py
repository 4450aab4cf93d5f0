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
    """Keys and values of so many tokens into slots anywhere; every eighth token has none."""
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

    def is_right() -> bool:
        pairs = zip(caches, new, strict=True)
        return all(
            torch.equal(cache.flatten(0, 1)[slots[kept]], rows[kept]) for cache, rows in pairs
        )

    moved = sum(rows[kept].numel() * rows.element_size() for rows in new)
    return Move(lambda: write_kv(*new, *caches, slots), 2 * moved, is_right)


def copying(store: KVStore, num_blocks: int) -> Move:
    """So many blocks of keys and values to blocks that are no sources: copy-on-write's case."""
    caches = [store.keys[0], store.values[0]]
    picker = torch.Generator().manual_seed(0)
    ids = torch.randperm(store.num_blocks, generator=picker)
    sources, targets = ids[:num_blocks], ids[num_blocks : 2 * num_blocks]

    def is_right() -> bool:
        return all(
            torch.equal(cache[targets.to(DEVICE)], cache[sources.to(DEVICE)]) for cache in caches
        )

    each = sum(cache[0].numel() * cache.element_size() for cache in caches)
    host = (sources.tolist(), targets.tolist())
    return Move(lambda: copy_blocks(caches, *host), 2 * num_blocks * each, is_right)
