"""Steps of attention over tables that branch, and what every backend must make of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch

from radixkv import native
from radixkv.attention import (
    ON_A_CPU,
    AttentionBackend,
    AttentionBatch,
    CostModel,
    KVStore,
    LayerAttention,
    LayerShape,
    NativeBackend,
    ReferenceBackend,
    Row,
    TorchBackend,
    make_batch,
)
from radixkv.attention.batch import table_slots

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
BLOCKS = 320
SHARE_ALL = CostModel(per_item=0)


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer."""

    kv_heads: int = 2
    groups: int = 2
    key_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def heads(self) -> int:
        return self.kv_heads * self.groups


def forest(
    seed: int, size: int, *, depth: int, rows: int, queries: tuple[int, ...] = (1, 1, 1, 2, 17)
) -> list[Row]:
    """Rows whose tables branch ``depth`` times, over scattered blocks."""
    rng = random.Random(seed)
    free = list(range(BLOCKS))
    rng.shuffle(free)
    found: list[Row] = []

    def grow(prefix: list[int], left: int, members: int) -> None:
        prefix = prefix + [free.pop() for _ in range(rng.randint(1, 3))]
        if left and members > 1:
            cut = sorted(rng.sample(range(members + 1), rng.randint(0, min(2, members))))
            for low, high in pairwise([0, *cut, members]):
                if high > low:
                    grow(prefix, left - 1, high - low)
            return
        for _ in range(members):
            start = len(prefix) * size + rng.randint(0, 2 * size)
            count = rng.choice(queries)
            own = -(-(start + count) // size) - len(prefix)
            table = prefix + [free.pop() for _ in range(own)]
            found.append(Row(np.array(table, np.int32), start, count))

    grow([], depth, rows)
    rng.shuffle(found)
    return found


def lone(length: int, size: int, queries: int = 1) -> Row:
    """One row that ends at this length, its blocks backwards."""
    blocks = -(-length // size)
    return Row(np.arange(blocks, 0, -1, dtype=np.int32), length - queries, queries)


@dataclass
class Step:
    """Everything that a layer needs for one step; stores are made anew for each backend."""

    rows: list[Row]
    size: int
    shape: Shape
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    keep: list[bool] | None = None
    copies: tuple[tuple[list[int], list[int]], ...] = ()

    @classmethod
    def of(cls, rows: list[Row], size: int, shape: Shape, seed: int = 0) -> Step:
        """NaN wherever no row owns a computed token."""
        made = torch.Generator().manual_seed(seed)
        tokens = sum(row.num_queries for row in rows)
        blocks = 1 + max(int(row.table.max()) for row in rows)

        def some(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=made).to(shape.dtype)

        stores = []
        for dim in (shape.key_dim, shape.value_dim):
            full = torch.full((blocks * size, shape.kv_heads, dim), torch.nan, dtype=shape.dtype)
            for row in rows:
                slots = torch.from_numpy(table_slots(row.table, 0, row.start, size))
                full[slots] = some(len(slots), shape.kv_heads, dim)
            stores.append(full)
        return cls(
            rows,
            size,
            shape,
            some(tokens, shape.heads, shape.key_dim),
            some(tokens, shape.kv_heads, shape.key_dim),
            some(tokens, shape.kv_heads, shape.value_dim),
            *stores,
        )

    def batch(self, cost: CostModel = SHARE_ALL) -> AttentionBatch:
        batch = make_batch(self.rows, self.size, keep=self.keep, cost=cost)
        for sources, targets in self.copies:
            batch.copies.append((torch.tensor(sources), torch.tensor(targets)))
        return batch

    def store(self) -> KVStore:
        shape = self.shape
        layer = LayerShape(shape.kv_heads, shape.key_dim, shape.value_dim)
        store = KVStore([layer], len(self.keys) // self.size, self.size, shape.dtype)
        store.keys[0].flatten(0, 1).copy_(self.keys)
        store.values[0].flatten(0, 1).copy_(self.values)
        return store

    def run(
        self,
        kind: Callable[[KVStore], AttentionBackend],
        attention: LayerAttention,
        cost: CostModel = SHARE_ALL,
    ) -> tuple[torch.Tensor, AttentionBackend]:
        backend = kind(self.store())
        out = backend.forward(attention, self.batch(cost), self.query, self.key, self.value)
        assert out.shape == (len(self.query), self.shape.heads, self.shape.value_dim)
        assert out.dtype == self.shape.dtype
        return out.double(), backend


def attend(**changes: Any) -> LayerAttention:
    return replace(LayerAttention(0, 0.3), **changes)


def check(step: Step, attention: LayerAttention) -> None:
    """Both ways of every backend give the reference's values and leave the same store."""
    expected, reference = step.run(ReferenceBackend, attention)
    assert bool(expected.isfinite().all())
    kinds = [TorchBackend]
    if step.shape.dtype is torch.bfloat16 and native.has_attention():
        kinds.append(NativeBackend)
    for kind, cost in product(kinds, (SHARE_ALL, ON_A_CPU)):
        found, backend = step.run(kind, attention, cost)
        error = float((found - expected).norm() / expected.norm())
        assert error < TOLERANCE[step.shape.dtype], (kind, cost, error)
        for name in ("keys", "values"):
            ours, theirs = getattr(backend.store, name)[0], getattr(reference.store, name)[0]
            assert torch.equal(ours.nan_to_num(9), theirs.nan_to_num(9))


def with_cached_rows(step: Step, keep: list[bool]) -> Step:
    """The step with some rows' own keys and values in the store already."""
    batch = step.batch()
    keys, values = step.keys.clone(), step.values.clone()
    for place, index in enumerate(batch.plan.order.tolist()):
        if not keep[index]:
            tokens = slice(int(batch.offsets[place]), int(batch.offsets[place + 1]))
            row = step.rows[index]
            slots = torch.from_numpy(table_slots(row.table, row.start, row.stop, step.size))
            keys[slots], values[slots] = step.key[tokens], step.value[tokens]
    return replace(step, keys=keys, values=values, keep=keep)
