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

from radixkv.attention import AttentionBackend, AttentionBatch, KVStore, LayerShape, Row, send
from radixkv.attention.batch import table_slots
from radixkv.attention.plan import Int64Array
from radixkv.attention.store import Side
from radixkv.model.layers import Model, forward_parameters, max_positions, probe_tokens, refuse


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
        device = store.device
        self.mask = send(torch.from_numpy((positions >= 0).astype(np.int64)), device)
        # Padding reads the row's own first key; the mask hides it.
        positions = np.maximum(positions, 0)
        slots = np.stack(
            [
                table_slots(row.table, 0, row.stop, batch.block_size)[place]
                for row, place in zip(members, positions, strict=True)
            ]
        )
        self._read = send(torch.from_numpy(slots.reshape(-1)), device)
        self._copies = [
            (send(sources, device), send(targets, device))
            for sources, targets in _awaited_copies(batch, members)
        ]
        own = np.concatenate([np.arange(batch.offsets[r], batch.offsets[r + 1]) for r in rows])
        self._write_slots, self._written = (send(x, device) for x in _written(batch, own))

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows' new keys and values; return all of theirs, (rows, heads, width, dim)."""
        new = [x.transpose(1, 2).flatten(0, 1)[self._written] for x in (key_states, value_states)]
        self._store.write(layer_idx, new[0], new[1], self._write_slots)
        for sources, targets in self._copies:
            self._store.copy_slots(layer_idx, sources, targets)
        key = self._all("key", layer_idx, key_states)
        return key, self._all("value", layer_idx, value_states)

    def _all(self, side: Side, layer: int, new: torch.Tensor) -> torch.Tensor:
        """A layer's keys or values of the rows' whole texts; (rows, heads, width, dim)."""
        store = self._store
        read = store.caches(side)[layer].flatten(0, 1)[self._read]
        old = store.restored(side, layer, read).unflatten(0, (len(new), self.width))
        # A row that does not write may be here before the row that writes for it.
        old[:, -self.queries :] = store.rounded(side, layer, new.transpose(1, 2))
        old = old.transpose(1, 2)
        whole: torch.Tensor = old.to(new.dtype)
        return whole

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


def _awaited_copies(
    batch: AttentionBatch, rows: Sequence[Row]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The step's copies that end in these rows' blocks, in one go or by way of other copies.

    Made anew by every group that awaits them: an earlier group may have copied before the source
    was written, which did no harm, as whoever reads the target comes later.
    """
    blocks = {block for row in rows for block in row.table.tolist()} if batch.copies else set()
    awaited = []
    for sources, targets in reversed(batch.copies):
        if not blocks.isdisjoint((targets // batch.block_size).tolist()):
            blocks.update((sources // batch.block_size).tolist())
            awaited.append((sources, targets))
    return awaited[::-1]


def _written(batch: AttentionBatch, own: Int64Array) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots to write for these tokens of the batch, and which of them those are."""
    if batch.written is None:
        return batch.slots[torch.from_numpy(own)], torch.arange(len(own))
    slot_of = dict(zip(batch.written.tolist(), batch.slots.tolist(), strict=True))
    kept = [index for index, token in enumerate(own.tolist()) if token in slot_of]
    slots = [slot_of[int(own[index])] for index in kept]
    return torch.tensor(slots, dtype=torch.int64), torch.tensor(kept, dtype=torch.int64)


class CacheAdapter:
    """Serves a model through its own cache interface; see `ModelAdapter`.

    Parameters
    ----------
    pad : bool
        Whether rows of different lengths may go together. Off for a model that takes the length of
        its cache, padding included, for the position of its tokens.
    """

    def __init__(self, model: Model, *, pad: bool = True) -> None:
        self.model = model
        self.max_positions = max_positions(model)
        self._pad = pad
        self._parameters = forward_parameters(model)
        names = [name for name in ("cache", "past_key_values") if name in self._parameters]
        if not names:
            raise refuse(model, "its forward takes no cache")
        self._cache_name = names[0]
        self.layers = self._probe()

    def close(self) -> None:
        """Nothing of the model was changed."""

    @torch.no_grad()
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
        positions = torch.from_numpy(batch.positions)
        for rows in self._groups(batch):
            starts, queries = batch.offsets[rows], batch.rows[rows[0]].num_queries
            index = torch.from_numpy(starts[:, None] + np.arange(queries))
            # Whose logits are wanted, as columns of this forward: for all rows the same, as
            # several rows have a single query each. A forward without any keeps one.
            columns = torch.isin(index, logit_tokens).any(0).nonzero()[:, 0]
            columns = columns if len(columns) else torch.tensor([queries - 1])
            cache = PagedCache(store, batch, rows)
            part = self._run(
                send(tokens[index], store.device),
                send(positions[index], store.device),
                cache,
                send(columns, store.device),
            ).flatten(0, 1)
            if logits is None:
                logits = part.new_empty(len(logit_tokens), part.shape[-1])
            place = torch.full((batch.num_tokens,), -1)
            place[index[:, columns].flatten()] = torch.arange(len(part))
            wanted = place[logit_tokens]
            found = wanted >= 0
            logits[send(found, store.device)] = part[send(wanted[found], store.device)]
        assert logits is not None
        return logits

    def _groups(self, batch: AttentionBatch) -> list[list[int]]:
        """Rows that can go together, in an order in which whatever is read was written before.

        A row reads blocks that another row of the step writes only if they lie before its own
        first query, so rows go by their first position; only single queries are batched, and they
        may read one another's, as a layer writes for all of them before it reads.
        """
        order = sorted(range(len(batch.rows)), key=lambda row: batch.rows[row].start)

        def together(row: int) -> tuple[int, int]:
            single = batch.rows[row].num_queries == 1
            return (-1 if single else row, -1 if self._pad else batch.rows[row].start)

        return [list(members) for _, members in groupby(order, key=together)]

    def _run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: PagedCache,
        columns: torch.Tensor,
    ) -> torch.Tensor:
        keywords: dict[str, Any] = {self._cache_name: cache, "use_cache": True}
        if "attention_mask" in self._parameters:
            keywords["attention_mask"] = cache.mask
        if "position_ids" in self._parameters:
            keywords["position_ids"] = positions
        if "logits_to_keep" in self._parameters:
            keywords["logits_to_keep"] = columns
        logits: torch.Tensor = self.model(input_ids=tokens, **keywords).logits
        return logits if "logits_to_keep" in self._parameters else logits[:, columns]

    @torch.no_grad()
    def _probe(self) -> list[LayerShape]:
        """Learn from one small forward over an ordinary cache what each layer keeps."""
        cache = DynamicCache()
        self.model(
            input_ids=probe_tokens(self.model, 3)[None].to(self.model.device),
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
