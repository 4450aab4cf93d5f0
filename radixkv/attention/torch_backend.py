"""TorchBackend: attention over the paged store with torch's operators; the default on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixkv.attention.backend import LayerAttention
from radixkv.attention.batch import AttentionBatch
from radixkv.attention.cost import ON_A_CPU
from radixkv.attention.layout import (
    DecodeLayout,
    Keys,
    PrefillLayout,
    RunLayout,
    SpanLayout,
    lay_out,
)
from radixkv.attention.numerics import attend, merge_into
from radixkv.attention.store import KVStore, Side


class TorchBackend:
    """Reads every shared run once, batches the private tails, merges by log-sum-exp."""

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self.cost = ON_A_CPU
        self._scratch: dict[tuple[str, int, int], torch.Tensor] = {}

    def forward(
        self,
        attention: LayerAttention,
        batch: AttentionBatch,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        asked, query = query.dtype, query.to(self.store.dtype)
        if key is not None and value is not None:
            key, value = key.to(self.store.dtype), value.to(self.store.dtype)
            self._write(attention.layer, batch, key, value)
            key = self.store.rounded("key", attention.layer, key)
            value = self.store.rounded("value", attention.layer, value)
        layout = batch.prepared.get(attention.span)
        if not isinstance(layout, SpanLayout):
            layout = batch.prepared[attention.span] = lay_out(batch, attention.span)
        tokens, heads, _ = query.shape
        value_dim = self.store.layers[attention.layer].value_dim
        # What is merged or scaled stays in float32 until then; else the operator's is final.
        final = not (layout.runs or layout.prefills or attention.sinks is not None)
        out = torch.empty(tokens, heads, value_dim, dtype=query.dtype if final else torch.float32)
        lse = torch.empty(tokens, heads, dtype=torch.float32)
        for decode in layout.decodes:
            self._decode(attention, decode, query, out, lse)
        for prefill in layout.prefills:
            self._prefill(attention, prefill, query, key, value, out, lse)
        for run in layout.runs:
            self._run(attention, run, query, out, lse)
        if attention.sinks is not None:
            # A sink adds to the denominator alone: scale by the share that the keys keep.
            sinks = attention.sinks.to(torch.float32)
            out *= torch.sigmoid(lse - sinks).unsqueeze(-1)
        return out.to(asked)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `AttentionBackend.copy_blocks`."""
        self.store.copy_blocks(pairs)

    def _write(
        self, layer: int, batch: AttentionBatch, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store the step's keys and values, then make the copies that wait for them."""
        if batch.written is not None:
            key, value = key[batch.written], value[batch.written]
        self.store.write(layer, key, value, batch.slots)
        self._copy(layer, batch)

    def _copy(self, layer: int, batch: AttentionBatch) -> None:
        for sources, targets in batch.copies:
            self.store.copy_slots(layer, sources, targets)

    def _gather(self, side: Side, layer: int, keys: Keys) -> torch.Tensor:
        """The named slots of a layer's keys or values; (keys, kv_heads, dim), valid until next."""
        flat = self.store.caches(side)[layer].flatten(0, 1)
        if isinstance(keys, slice) or self.store.quantized:
            return self.store.restored(side, layer, flat[keys])
        heads, dim = flat.shape[1:]
        scratch = self._scratch.get((side, heads, dim))
        if scratch is None or len(scratch) < len(keys):
            # Reused across layers and steps: fresh pages would cost more than the copying. Made as
            # an ordinary tensor, so that steps in and out of inference mode can take turns.
            with torch.inference_mode(False):
                scratch = flat.new_empty(max(len(keys), 1024) * 5 // 4, heads, dim)
            self._scratch[(side, heads, dim)] = scratch
        return torch.index_select(flat, 0, keys, out=scratch[: len(keys)])

    def _read(self, layer: int, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as (1, kv_heads, keys, dim)."""
        key = self._gather("key", layer, keys)
        value = self._gather("value", layer, keys)
        return key.transpose(0, 1)[None], value.transpose(0, 1)[None]

    def _decode(
        self,
        attention: LayerAttention,
        decode: DecodeLayout,
        query: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        rows, kv_heads = decode.num_rows, self.store.layers[attention.layer].kv_heads
        keys = decode.keys if isinstance(decode.keys, slice) else decode.keys.flatten()
        key = self._gather("key", attention.layer, keys)
        value = self._gather("value", attention.layer, keys)
        part, part_lse = attend(
            query[decode.tokens].unflatten(1, (kv_heads, -1)),
            key.unflatten(0, (rows, -1)).transpose(1, 2),
            value.unflatten(0, (rows, -1)).transpose(1, 2),
            attention.scale,
            mask=decode.mask,
            softcap=attention.softcap,
        )
        out[decode.tokens] = part.flatten(1, 2).to(out.dtype)
        lse[decode.tokens] = part_lse.flatten(1, 2).to(lse.dtype)

    def _prefill(
        self,
        attention: LayerAttention,
        prefill: PrefillLayout,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        tokens = prefill.tokens
        if key is None or value is None:
            own_key, own_value = self._read(attention.layer, prefill.own_keys)
        else:
            own_key, own_value = (x[tokens].transpose(0, 1)[None] for x in (key, value))
        queries = query[tokens].transpose(0, 1)[None]
        causal = prefill.own_mask is None
        part, part_lse = attend(
            queries, own_key, own_value, attention.scale,
            causal=causal, mask=prefill.own_mask, softcap=attention.softcap,
        )  # fmt: skip
        out[tokens] = part[0].transpose(0, 1).to(out.dtype)
        lse[tokens] = part_lse[0].T.to(lse.dtype)
        if prefill.prefix_keys is not None:
            part, part_lse = attend(
                queries, *self._read(attention.layer, prefill.prefix_keys), attention.scale,
                mask=prefill.prefix_mask, softcap=attention.softcap,
            )  # fmt: skip
            merge_into(out[tokens], lse[tokens], part[0].transpose(0, 1), part_lse[0].T)

    def _run(
        self,
        attention: LayerAttention,
        run: RunLayout,
        query: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        kv_heads = self.store.layers[attention.layer].kv_heads
        tokens, heads, _ = query[run.tokens].shape
        groups = heads // kv_heads
        # All queries and their heads side by side: one matrix product a KV head.
        packed = query[run.tokens].unflatten(1, (kv_heads, groups)).transpose(0, 1).flatten(1, 2)
        part, part_lse = attend(
            packed[None], *self._read(attention.layer, run.keys), attention.scale,
            mask=run.packed_mask(groups), softcap=attention.softcap,
        )  # fmt: skip
        part = part[0].unflatten(1, (tokens, groups)).transpose(0, 1).flatten(1, 2)
        part_lse = part_lse[0].unflatten(1, (tokens, groups)).transpose(0, 1).flatten(1, 2)
        merge_into(out[run.tokens], lse[run.tokens], part, part_lse)
