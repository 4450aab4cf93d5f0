"""KVStore: the tensors behind the block ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from radixkv.errors import ConfigError

Side = Literal["key", "value"]

# What keys and values may be kept in besides the type that they are computed in.
KV_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def parse_kv_dtype(name: str) -> torch.dtype | None:
    """The type that keys and values are kept in; None for the model's, which "auto" is.

    Raises
    ------
    ConfigError
        For any other name than "auto" and those of `KV_DTYPES`.
    """
    if name == "auto":
        return None
    if name not in KV_DTYPES:
        raise ConfigError(f"unknown kv_dtype {name!r}; use auto, {' or '.join(KV_DTYPES)}")
    return KV_DTYPES[name]


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
    dtype : torch.dtype
        What attention computes in.
    kv_dtype : torch.dtype
        What keys and values are kept in.
    device : torch.device
    keys, values : list of tensors (num_blocks, block_size, kv_heads, key_dim / value_dim)
        One a layer, in ``kv_dtype``.
    scales : dict of ("key" or "value", layer) to float32 tensor (kv_heads,)
        What kept numbers are multiplied by; 1 unless there is an entry. For types of 8 bits.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        if not layers:
            raise ConfigError("a KV store needs at least one layer")
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.kv_dtype = kept = kv_dtype or dtype
        self.scales: dict[tuple[Side, int], torch.Tensor] = {}

        # Not zeroed: a block that was never written costs no memory, and what nobody wrote must
        # not matter to anyone.
        def pages(heads: int, dim: int) -> torch.Tensor:
            return torch.empty(num_blocks, block_size, heads, dim, dtype=kept, device=device)

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

    @property
    def quantized(self) -> bool:
        """Whether keys and values are rounded to 8 bits."""
        return self.kv_dtype in KV_DTYPES.values()

    def caches(self, side: Side) -> list[torch.Tensor]:
        """``keys`` or ``values``."""
        return self.keys if side == "key" else self.values

    def kept(self, side: Side, layer: int, numbers: torch.Tensor) -> torch.Tensor:
        """Keys or values (..., kv_heads, dim) as the store keeps them.

        In 8 bits, what is too large becomes the largest number.
        """
        if not self.quantized:
            return numbers.to(self.kv_dtype)
        if (scale := self.scales.get((side, layer))) is not None:
            numbers = numbers / scale[:, None]
        most = torch.finfo(self.kv_dtype).max
        return numbers.clamp(-most, most).to(self.kv_dtype)

    def restored(self, side: Side, layer: int, numbers: torch.Tensor) -> torch.Tensor:
        """Keys or values (..., kv_heads, dim) that the store kept, as attention computes."""
        if (scale := self.scales.get((side, layer))) is None or not self.quantized:
            return numbers.to(self.dtype)
        return (numbers.float() * scale[:, None]).to(self.dtype)

    def rounded(self, side: Side, layer: int, numbers: torch.Tensor) -> torch.Tensor:
        """Keys or values as they will be read again: what a token sees must not depend on when."""
        if not self.quantized:
            return numbers
        return self.restored(side, layer, self.kept(side, layer, numbers)).to(numbers.dtype)

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
        kept = self.kept("key", layer, key), self.kept("value", layer, value)
        for cache, new in zip((self.keys[layer], self.values[layer]), kept, strict=True):
            _words(cache).flatten(0, 1).index_copy_(0, slots, _words(new))

    def copy_slots(self, layer: int, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy slots within one layer; int64 (slots,) each, all sources are read first."""
        for cache in (self.keys[layer], self.values[layer]):
            flat = _words(cache).flatten(0, 1)
            flat.index_copy_(0, targets, flat.index_select(0, sources))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) blocks in all layers; all sources are read first."""
        if not pairs:
            return
        sources = torch.tensor([source for source, _ in pairs], device=self.device)
        targets = torch.tensor([target for _, target in pairs], device=self.device)
        for cache in map(_words, (*self.keys, *self.values)):
            cache.index_copy_(0, targets, cache.index_select(0, sources))


def _words(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of 8 bits as bytes, for operators that do not know them."""
    return numbers.view(torch.uint8) if numbers.dtype.itemsize == 1 else numbers
