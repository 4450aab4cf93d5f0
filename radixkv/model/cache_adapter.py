"""CacheAdapter: models that compute attention themselves, over a transformers cache.

Rows with equally many queries go through one left-padded forward; the cache that they are given
writes to the paged store and returns what the block tables name.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from transformers import Cache, DynamicCache

from radixkv.attention import AttentionBackend, AttentionBatch, KVStore, LayerShape
from radixkv.attention.batch import table_slots
from radixkv.model.layers import Model, forward_parameters, probe_tokens, refuse


class PagedCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """A transformers cache over rows of a batch, left-padded to the longest."""

    def __init__(self, store: KVStore, batch: AttentionBatch, rows: Sequence[int]) -> None:
        super().__init__(layers=[])
        self._store = store
        members = [batch.rows[row] for row in rows]
        stops = np.array([row.stop for row in members])
        self.width = int(stops.max())
        self.queries = members[0].num_queries
        positions = np.arange(self.width)[None, :] - (self.width - stops)[:, None]
        self.mask = torch.from_numpy((positions >= 0).astype(np.int64))
        # Padding reads the row's own first key; the mask hides it.
        positions = np.maximum(positions, 0)
        slots = np.stack(
            [
                table_slots(row.table, 0, row.stop, batch.block_size)[place]
                for row, place in zip(members, positions, strict=True)
            ]
        )
        self._read = torch.from_numpy(slots.reshape(-1))
        own = np.concatenate([np.arange(batch.offsets[r], batch.offsets[r + 1]) for r in rows])
        self._write_slots, self._written = _written(batch, own)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows' new keys and values; return all of theirs, (rows, heads, width, dim)."""
        rows = key_states.shape[0]
        new = [x.transpose(1, 2).flatten(0, 1)[self._written] for x in (key_states, value_states)]
        self._store.write(layer_idx, new[0], new[1], self._write_slots)
        caches = (self._store.keys[layer_idx], self._store.values[layer_idx])
        key, value = (
            cache.flatten(0, 1)[self._read].unflatten(0, (rows, self.width)).transpose(1, 2)
            for cache in caches
        )
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the queries, padding included."""
        return self.width - self.queries

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Where the queries begin, padding included."""
        return self.width - self.queries

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Width and offset of the mask."""
        return self.width, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum."""
        return -1

    @property
    def is_compileable(self) -> bool:
        return False


def _written(batch: AttentionBatch, own: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots to write for these tokens of the batch, and which of them those are."""
    if batch.written is None:
        return batch.slots[torch.from_numpy(own)], torch.arange(len(own))
    slot_of = dict(zip(batch.written.tolist(), batch.slots.tolist(), strict=True))
    kept = [index for index, token in enumerate(own.tolist()) if token in slot_of]
    slots = [slot_of[int(own[index])] for index in kept]
    return torch.tensor(slots, dtype=torch.int64), torch.tensor(kept, dtype=torch.int64)


class CacheAdapter:
    """Serves a model through its own cache interface; see `ModelAdapter`."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._parameters = forward_parameters(model)
        names = [name for name in ("cache", "past_key_values") if name in self._parameters]
        if not names:
            raise refuse(model, "its forward takes no cache")
        self._cache_name = names[0]
        self.layers = self._probe()

    def close(self) -> None:
        """Nothing of the model was changed."""

    def forward(
        self,
        backend: AttentionBackend,
        batch: AttentionBatch,
        tokens: torch.Tensor,
        logit_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """See `ModelAdapter.forward`. Rows that read what others write in this step come later."""
        store = backend.store
        logits: torch.Tensor | None = None
        place = {int(token): index for index, token in enumerate(logit_tokens.tolist())}
        for rows in self._groups(batch):
            starts = np.array([batch.offsets[row] for row in rows])
            queries = batch.rows[rows[0]].num_queries
            index = torch.from_numpy(starts[:, None] + np.arange(queries))
            self._copy_into(store, batch, rows)
            cache = PagedCache(store, batch, rows)
            part = self._run(tokens[index], torch.from_numpy(batch.positions)[index], cache)
            if logits is None:
                logits = part.new_empty(len(place), part.shape[-1])
            for row, row_tokens in enumerate(index.tolist()):
                for query, token in enumerate(row_tokens):
                    if token in place:
                        logits[place[token]] = part[row, query]
        assert logits is not None
        return logits

    def _copy_into(self, store: KVStore, batch: AttentionBatch, rows: list[int]) -> None:
        """Make the copies that these rows wait for; whoever computes the sources went before."""
        blocks = {block for row in rows for block in batch.rows[row].table.tolist()}
        for sources, targets in batch.copies:
            if int(targets[0]) // batch.block_size in blocks:
                for layer in range(len(self.layers)):
                    store.copy_slots(layer, sources, targets)

    def _groups(self, batch: AttentionBatch) -> list[list[int]]:
        """Rows that can go together, in an order in which whatever is read was written before.

        A row reads blocks that another row of the step writes only if they lie before its own
        first query, so rows go by their first position; only single queries are batched.
        """
        order = sorted(range(len(batch.rows)), key=lambda row: batch.rows[row].start)
        groups = groupby(order, key=lambda r: -1 if batch.rows[r].num_queries == 1 else r)
        return [list(members) for _, members in groups]

    def _run(
        self, tokens: torch.Tensor, positions: torch.Tensor, cache: PagedCache
    ) -> torch.Tensor:
        keywords: dict[str, Any] = {self._cache_name: cache, "use_cache": True}
        if "attention_mask" in self._parameters:
            keywords["attention_mask"] = cache.mask
        if "position_ids" in self._parameters:
            keywords["position_ids"] = positions
        logits: torch.Tensor = self.model(input_ids=tokens, **keywords).logits
        return logits

    def _probe(self) -> list[LayerShape]:
        """Learn from one small forward over an ordinary cache what each layer keeps."""
        cache = DynamicCache()
        with torch.inference_mode():
            self.model(
                input_ids=probe_tokens(self.model, 3)[None],
                use_cache=True,
                **{self._cache_name: cache},
            )
        shapes = []
        for layer in cache.layers:
            key, value = getattr(layer, "keys", None), getattr(layer, "values", None)
            if key is None or value is None or key.dim() != 4 or key.shape[2] != 3:
                raise refuse(self.model, "its cache holds something else than keys and values")
            shapes.append(LayerShape(key.shape[1], key.shape[3], value.shape[3]))
        if not shapes:
            raise refuse(self.model, "it does not use the cache that it is given")
        return shapes
