"""KVStore: the tensors behind the block ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from radixkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps for a token: ``kv_heads`` keys and as many values.

    Keys and values may differ in width (multi-head latent attention, expanded).
    """

    kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


class KVStore:
    """Keys and values of all layers, paged: slot = block × block_size + offset.

    Attributes
    ----------
    device : torch.device
    keys, values : list of tensors (num_blocks, block_size, kv_heads, key_dim / value_dim)
        One a layer.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if not layers:
            raise ConfigError("a KV store needs at least one layer")
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype

        # Not zeroed: a block that was never written costs no memory, and what nobody wrote must
        # not matter to anyone.
        def pages(heads: int, dim: int) -> torch.Tensor:
            return torch.empty(num_blocks, block_size, heads, dim, dtype=dtype, device=device)

        try:
            self.keys = [pages(shape.kv_heads, shape.key_dim) for shape in layers]
            self.values = [pages(shape.kv_heads, shape.value_dim) for shape in layers]
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{device} has no memory for {num_blocks} blocks of keys and values; "
                "ask for less with kv_memory"
            ) from error
        # With its number, which a caller may have left out.
        self.device = self.keys[0].device

    @staticmethod
    def bytes_per_block(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
        """Memory of one block over all layers."""
        return block_size * sum(shape.bytes_per_token(dtype) for shape in layers)

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Store tokens.

        Parameters
        ----------
        key, value : tensors (tokens, kv_heads, key_dim / value_dim)
        slots : int64 tensor (tokens,)
            Distinct, none negative: tokens without a slot are left out by the caller.
        """
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, key.to(self.dtype))
        self.values[layer].flatten(0, 1).index_copy_(0, slots, value.to(self.dtype))

    def copy_slots(self, layer: int, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy slots within one layer; int64 (slots,) each, all sources are read first."""
        for cache in (self.keys[layer], self.values[layer]):
            flat = cache.flatten(0, 1)
            flat.index_copy_(0, targets, flat.index_select(0, sources))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) blocks in all layers; all sources are read first."""
        if not pairs:
            return
        sources = torch.tensor([source for source, _ in pairs], device=self.device)
        targets = torch.tensor([target for _, target in pairs], device=self.device)
        for cache in (*self.keys, *self.values):
            cache.index_copy_(0, targets, cache.index_select(0, sources))
