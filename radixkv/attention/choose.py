"""Which backend serves a store."""

from __future__ import annotations

import torch

from radixkv import native
from radixkv.attention.backend import AttentionBackend
from radixkv.attention.native_backend import NativeBackend
from radixkv.attention.store import KVStore
from radixkv.attention.torch_backend import TorchBackend


def choose_backend(store: KVStore) -> AttentionBackend:
    """The compiled operators where they are built and take this store's keys, else torch's."""
    if store.dtype is torch.bfloat16 and native.has_attention():
        return NativeBackend(store)
    return TorchBackend(store)
