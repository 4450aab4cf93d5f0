"""Which backend serves a store."""

from __future__ import annotations

import torch

from radixkv import native
from radixkv.attention.backend import AttentionBackend
from radixkv.attention.native_backend import NativeBackend
from radixkv.attention.store import KVStore
from radixkv.attention.torch_backend import TorchBackend
from radixkv.attention.triton_backend import TritonBackend


def choose_backend(store: KVStore) -> AttentionBackend:
    """Triton's kernels on a GPU; on a CPU the compiled operators where they are, else torch's.

    Raises
    ------
    ConfigError
        On a GPU, for what the kernels do not take: nothing else computes there.
    """
    if store.device.type == "cuda":
        return TritonBackend(store)
    if store.dtype is store.kv_dtype is torch.bfloat16 and native.has_attention():
        return NativeBackend(store)
    return TorchBackend(store)
