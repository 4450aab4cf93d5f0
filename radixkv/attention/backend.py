"""What a model asks of attention: one call a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from radixkv.attention.batch import FULL, AttentionBatch, Span
from radixkv.attention.cost import CostModel
from radixkv.attention.store import KVStore


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends.

    Attributes
    ----------
    layer : int
        The layer whose keys and values are read, in the store's numbering.
    scale : float
        Factor on the logits.
    span : Span
        Sliding window or chunks.
    softcap : float
        Cap on the logits; 0 for none.
    sinks : tensor (heads,), optional
        A logit per head that takes part in the softmax and has no value.
    """

    layer: int
    scale: float
    span: Span = FULL
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class AttentionBackend(Protocol):
    """Writes a layer's keys and values and attends over the paged store.

    Attributes
    ----------
    store : KVStore
    cost : CostModel
        What its batches are to be planned by.
    """

    store: KVStore
    cost: CostModel

    def forward(
        self,
        attention: LayerAttention,
        batch: AttentionBatch,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
    ) -> torch.Tensor:
        """One layer of one step.

        Parameters
        ----------
        attention : LayerAttention
        batch : AttentionBatch
        query : tensor (tokens, heads, key_dim)
        key, value : tensors (tokens, kv_heads, key_dim / value_dim), or None
            Written before anything is read; None for a layer that reads another layer's.

        Returns
        -------
        tensor (tokens, heads, value_dim)
        """
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) blocks in all layers; all sources are read first."""
        ...
