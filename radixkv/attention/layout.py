"""What the torch backend works out once a step and span: key ranges, gathers, masks.

All layers of a step with the same span read through the same layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from radixkv.attention.batch import AttentionBatch, Row, Span, table_slots
from radixkv.attention.numerics import KeyMask
from radixkv.attention.plan import Int64Array

# A single query over this many contiguous keys or more is attended to alone, through a view:
# gathering its keys into a batch would cost more than the extra call.
ALONE_FROM = 256

Keys = slice | torch.Tensor
Tokens = slice | torch.Tensor


@dataclass(slots=True)
class RunLayout:
    """A shared run: the queries ``tokens`` all read ``keys``; the mask is (queries, keys)."""

    tokens: slice
    keys: Keys
    mask: KeyMask | None
    _packed: dict[int, KeyMask] = field(default_factory=dict)

    def packed_mask(self, groups: int) -> KeyMask | None:
        """The mask for ``groups`` heads packed beside each query."""
        if self.mask is None:
            return None
        if groups not in self._packed:
            self._packed[groups] = self.mask.for_groups(groups)
        return self._packed[groups]


@dataclass(slots=True)
class DecodeLayout:
    """Rows with one query, batched: row i of ``tokens`` reads row i of ``keys`` (rows, keys)."""

    tokens: Tokens
    keys: torch.Tensor | slice
    num_rows: int
    mask: KeyMask | None


@dataclass(slots=True)
class PrefillLayout:
    """A row with several queries: its own keys, and those before them that nobody shares."""

    tokens: slice
    own_keys: Keys
    own_mask: KeyMask | None
    prefix_keys: Keys | None
    prefix_mask: KeyMask | None


@dataclass(slots=True)
class SpanLayout:
    """Everything a layer with this span reads. Tails cover every query; runs are merged in."""

    runs: list[RunLayout]
    decodes: list[DecodeLayout]
    prefills: list[PrefillLayout]


def lay_out(batch: AttentionBatch, span: Span) -> SpanLayout:
    """Work out a step's reads for layers with this span."""
    first = span.first_visible(batch.positions)
    runs = [run for run in _runs(batch, first) if run is not None]
    decodes, prefills = [], []
    for index, row in enumerate(batch.rows):
        start = int(batch.plan.tail_blocks[index]) * batch.block_size
        if row.num_queries == 1:
            decodes.append((index, max(start, int(first[batch.offsets[index]])), row))
        else:
            prefills.append(_prefill(batch, index, start, first))
    return SpanLayout(runs, _decodes(batch, decodes), prefills)


def _keys(row: Row, start: int, stop: int, block_size: int) -> Keys:
    """Slots of a row's tokens: a slice where they are consecutive, else their numbers."""
    slots = table_slots(row.table, start, stop, block_size)
    if slots[-1] - slots[0] == len(slots) - 1 and (np.diff(slots) == 1).all():
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return torch.from_numpy(slots)


def _mask(first: Int64Array, start: int, stop: int) -> KeyMask | None:
    """Keys ``start`` to ``stop`` as seen from queries whose first visible key is given."""
    if first.max() <= start:
        return None
    visible = np.arange(start, stop)[None, :] >= first[:, None]
    return KeyMask.of(torch.from_numpy(visible)[None, None])


def _runs(batch: AttentionBatch, first: Int64Array) -> Sequence[RunLayout | None]:
    layouts: list[RunLayout | None] = []
    for run in batch.plan.runs:
        tokens = slice(int(batch.offsets[run.first_row]), int(batch.offsets[run.last_row]))
        stop = run.last_block * batch.block_size
        start = max(run.first_block * batch.block_size, int(first[tokens].min()))
        if start >= stop:
            # Out of the window of every query.
            layouts.append(None)
            continue
        keys = _keys(batch.rows[run.first_row], start, stop, batch.block_size)
        layouts.append(RunLayout(tokens, keys, _mask(first[tokens], start, stop)))
    return layouts


def _prefill(batch: AttentionBatch, index: int, start: int, first: Int64Array) -> PrefillLayout:
    row = batch.rows[index]
    tokens = slice(int(batch.offsets[index]), int(batch.offsets[index + 1]))
    seen_from = first[tokens]
    own_mask = None
    if seen_from.max() > row.start:
        keys = np.arange(row.start, row.stop)
        visible = (keys[None, :] >= seen_from[:, None]) & (keys[None, :] <= keys[:, None])
        own_mask = KeyMask.of(torch.from_numpy(visible)[None, None])
    own_keys = _keys(row, row.start, row.stop, batch.block_size)
    start = max(start, int(seen_from.min()))
    if start >= row.start:
        return PrefillLayout(tokens, own_keys, own_mask, None, None)
    prefix = _keys(row, start, row.start, batch.block_size)
    mask = _mask(seen_from, start, row.start)
    return PrefillLayout(tokens, own_keys, own_mask, prefix, mask)


def _decodes(batch: AttentionBatch, rows: list[tuple[int, int, Row]]) -> list[DecodeLayout]:
    """Batch rows of like length, so that padding stays below half; long views go alone."""
    layouts: list[DecodeLayout] = []
    buckets: dict[int, list[tuple[int, int, Row]]] = {}
    for index, start, row in rows:
        length = row.stop - start
        if length >= ALONE_FROM or len(rows) == 1:
            keys = _keys(row, start, row.stop, batch.block_size)
            if isinstance(keys, slice):
                token = int(batch.offsets[index])
                layouts.append(DecodeLayout(slice(token, token + 1), keys, 1, None))
                continue
        buckets.setdefault(max(6, (length - 1).bit_length()), []).append((index, start, row))
    layouts.extend(_bucket(batch, members) for _, members in sorted(buckets.items()))
    return layouts


def _bucket(batch: AttentionBatch, members: list[tuple[int, int, Row]]) -> DecodeLayout:
    indices = np.array([index for index, _, _ in members])
    starts = np.array([start for _, start, _ in members])
    stops = np.array([row.stop for _, _, row in members])
    longest = int((stops - starts).max())
    positions = starts[:, None] + np.arange(longest)
    visible = positions < stops[:, None]
    # Padding reads the row's own last key: a slot that nobody wrote may hold anything, NaN too.
    positions = np.minimum(positions, stops[:, None] - 1)
    blocks = np.zeros((len(members), max(len(row.table) for _, _, row in members)), np.int64)
    for place, (_, _, row) in enumerate(members):
        blocks[place, : len(row.table)] = row.table
    size = batch.block_size
    slots = np.take_along_axis(blocks, positions // size, 1) * size + positions % size
    mask = None
    if not visible.all():
        mask = KeyMask(torch.from_numpy(visible)[:, None, None])
    tokens = batch.offsets[indices]
    if len(tokens) == tokens[-1] - tokens[0] + 1:
        where: Tokens = slice(int(tokens[0]), int(tokens[-1]) + 1)
    else:
        where = torch.from_numpy(tokens)
    return DecodeLayout(where, torch.from_numpy(slots), len(members), mask)
