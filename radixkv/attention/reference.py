"""ReferenceBackend: row by row, key by key through the block table, in float64.

Slow and plain on purpose; it shares no code with the backends that are tested against it, except
the store.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixkv.attention.backend import LayerAttention
from radixkv.attention.batch import AttentionBatch, Row
from radixkv.attention.cost import ON_A_CPU
from radixkv.attention.store import KVStore


class ReferenceBackend:
    """What every backend must compute."""

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self.cost = ON_A_CPU

    def forward(
        self,
        attention: LayerAttention,
        batch: AttentionBatch,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        if key is not None and value is not None:
            kept = range(batch.num_tokens) if batch.written is None else batch.written.tolist()
            for token, slot in zip(kept, batch.slots.tolist(), strict=True):
                block, offset = divmod(slot, batch.block_size)
                self.store.keys[attention.layer][block, offset] = key[token]
                self.store.values[attention.layer][block, offset] = value[token]
            for sources, targets in batch.copies:
                for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                    for cache in (
                        self.store.keys[attention.layer],
                        self.store.values[attention.layer],
                    ):
                        cache.flatten(0, 1)[target] = cache.flatten(0, 1)[source].clone()
        out = []
        for index, row in enumerate(batch.rows):
            for offset in range(row.num_queries):
                token = int(batch.offsets[index]) + offset
                out.append(self._one(attention, batch, row, row.start + offset, query[token]))
        return torch.stack(out).to(query.dtype)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `AttentionBackend.copy_blocks`."""
        self.store.copy_blocks(pairs)

    def _one(
        self,
        attention: LayerAttention,
        batch: AttentionBatch,
        row: Row,
        position: int,
        query: torch.Tensor,
    ) -> torch.Tensor:
        span, size = attention.span, batch.block_size
        seen = [
            kv
            for kv in range(position + 1)
            if (not span.window or kv > position - span.window)
            and (not span.chunk or kv // span.chunk == position // span.chunk)
        ]
        blocks = torch.tensor([int(row.table[kv // size]) for kv in seen])
        offsets = torch.tensor([kv % size for kv in seen])
        keys = self.store.keys[attention.layer][blocks, offsets].double()
        values = self.store.values[attention.layer][blocks, offsets].double()
        groups = query.shape[0] // keys.shape[1]
        logits = (
            torch.einsum("hd,khd->hk", query.double(), keys.repeat_interleave(groups, 1))
            * attention.scale
        )
        if attention.softcap:
            logits = attention.softcap * torch.tanh(logits / attention.softcap)
        if attention.sinks is not None:
            logits = torch.cat([logits, attention.sinks.double()[:, None]], 1)
        weights = torch.softmax(logits, 1)[:, : len(seen)]
        return torch.einsum("hk,khd->hd", weights, values.repeat_interleave(groups, 1))
