"""The kernels in plain torch: what runs without Triton, and what the kernels must equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radixkv_kernels.checks import BlockIds, as_words, check_copy_blocks, check_write_kv


@torch.no_grad()
def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write each token's key and value into its slot; see `radixkv_kernels.write_kv`.

    Reads which slots are negative on the host, so on a GPU it waits for the stream.

    Parameters
    ----------
    key, value : Tensor
        float32, float16 or bfloat16, any strides, shapes (T, Hkv, D) and (T, Hkv, Dv).
    key_cache, value_cache : Tensor
        Changed in place, contiguous, shapes (num_blocks, block_size, Hkv, D) and (..., Dv).
    slot_mapping : Tensor
        int64 or int32; a negative slot skips its token, shape (T,).
    """
    check_write_kv(key, value, key_cache, value_cache, slot_mapping)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    for rows, cache in ((key, key_cache), (value, value_cache)):
        cache.flatten(0, 1).index_copy_(0, slots, rows[kept].to(cache.dtype))


@torch.no_grad()
def copy_blocks(caches: Sequence[Tensor], sources: BlockIds, targets: BlockIds) -> None:
    """Copy whole blocks, all sources read first; see `radixkv_kernels.copy_blocks`.

    Parameters
    ----------
    caches : sequence of Tensor
        Changed in place, contiguous, any dtype, each of shape (num_blocks, ...).
    sources, targets : sequence of int or Tensor
        Block ids; no target twice, shape (P,).
    """
    pairs = check_copy_blocks(caches, sources, targets)
    if not (caches and pairs):
        return
    ids = torch.tensor(pairs, device=caches[0].device)
    for cache in caches:
        blocks = as_words(cache)
        blocks.index_copy_(0, ids[:, 1], blocks.index_select(0, ids[:, 0]))
