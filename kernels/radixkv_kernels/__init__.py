"""Triton kernels over a paged KV cache: tensors and ints in, tensors out.

A cache is one contiguous tensor of shape ``(num_blocks, block_size, heads, head_dim)``; a *slot* is
``block * block_size + offset``. Importing this package needs neither a GPU nor Triton: Triton is
imported at the first launch. `torch_twins` holds the same functions in plain torch. What
`paged_attention` reads is a `WorkList`, which `docs/kernels.md` explains.
"""

from radixkv_kernels.attention import allocate_partials, paged_attention
from radixkv_kernels.kv import copy_blocks, write_kv
from radixkv_kernels.tiles import Tile
from radixkv_kernels.worklist import (
    DIRECT,
    NOTHING,
    TO_THE_END,
    WorkList,
    build_work_list,
    unshared_work_list,
)

__all__ = [
    "DIRECT",
    "NOTHING",
    "TO_THE_END",
    "Tile",
    "WorkList",
    "allocate_partials",
    "build_work_list",
    "copy_blocks",
    "paged_attention",
    "unshared_work_list",
    "write_kv",
]
