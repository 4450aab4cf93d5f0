"""Triton kernels over a paged KV cache: tensors and ints in, tensors out.

A cache is one contiguous tensor of shape ``(num_blocks, block_size, heads, head_dim)``; a *slot* is
``block * block_size + offset``. Importing this package needs neither a GPU nor Triton: Triton is
imported at the first launch. `torch_twins` holds the same functions in plain torch.
"""

from radixkv_kernels.kv import copy_blocks, write_kv

__all__ = ["copy_blocks", "write_kv"]
