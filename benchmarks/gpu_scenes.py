"""Attention problems for the GPU benchmarks: rows over a pool of random keys and values.

Planned and cut as the engine does it. What a kernel wrote is compared with attention in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import radixkv_kernels.attention
import torch
from gpu import DEVICE
from radixkv_kernels import Tile, WorkList, allocate_partials, paged_attention

from radixkv.attention import FULL, KVStore, LayerShape, Row, TritonBackend, make_batch
from radixkv.attention.triton_backend import WorkKey, step_tensors

BLOCK_SIZE = 16
NEVER = 10**15  # what a read more must save, for sharing never to pay
# Of a token's output, by its type: how far from float64 it may be, as a ratio of norms.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Fill a pool in pieces of this many numbers.
PIECE = 2**26


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads, and the width of each."""

    query: int
    kv: int
    dim: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv}"


def make_pool(
    heads: Heads,
    num_tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> KVStore:
    """A store of one layer, every slot a random number."""
    shape = LayerShape(heads.kv, heads.dim, heads.dim)
    blocks = -(-num_tokens // BLOCK_SIZE)
    store = KVStore([shape], blocks, BLOCK_SIZE, dtype, DEVICE, kv_dtype=kv_dtype)
    for cache in (*store.keys, *store.values):
        for piece in cache.flatten().split(PIECE):
            piece.copy_(torch.randn(len(piece), device=DEVICE, dtype=dtype))
    return store


def blocks_of(prefix: int, batch: int, own: int) -> int:
    """Blocks that `make_rows` takes."""
    return prefix // BLOCK_SIZE + batch * -(-own // BLOCK_SIZE)


def make_rows(
    store: KVStore, *, batch: int, own: int, queries: int = 1, prefix: int = 0, seed: int = 0
) -> list[Row]:
    """Rows of `prefix` shared tokens and `own` more, in blocks that lie anywhere in the pool.

    The last `queries` tokens of each are asked for. The prefix is a multiple of the block size.
    """
    order = np.random.default_rng(seed).permutation(store.num_blocks).astype(np.int32)
    shared, each = prefix // BLOCK_SIZE, -(-own // BLOCK_SIZE)
    tables = order[shared : shared + batch * each].reshape(batch, each)
    return [
        Row(np.concatenate([order[:shared], table]), prefix + own - queries, queries)
        for table in tables
    ]


def never_sharing(backend: TritonBackend) -> TritonBackend:
    """A backend over the same store that reads every row by itself."""
    return TritonBackend(backend.store, cost=replace(backend.cost, per_item=NEVER))


class Problem:
    """One attention call.

    Attributes
    ----------
    rows : list of Row
        In the plan's order, all with as many queries.
    query, out : tensors (tokens, heads, dim)
        In the plan's order; `out` is NaN until `run`.
    kv_tokens : (int, int)
        KV tokens that are read, and that would be without sharing.
    """

    def __init__(
        self, backend: TritonBackend, rows: Sequence[Row], heads: Heads, tile: Tile | None = None
    ) -> None:
        store = self.store = backend.store
        batch = make_batch(rows, BLOCK_SIZE, cost=backend.cost)
        self.heads, self.tile, self.rows = heads, tile, batch.rows
        self.kv_tokens = batch.kv_tokens()
        works = backend.work_lists(batch, WorkKey(FULL, heads.query, heads.kv))
        if len(works) > 1:
            raise ValueError("the partial outputs of this problem are too many for one launch")
        self.work: WorkList = works[0]
        self.step = step_tensors(batch, DEVICE)
        self.positions = batch.positions
        shape = (len(rows), rows[0].num_queries, heads.query, heads.dim)
        # The same for a row wherever it stands, so that two plans can be compared.
        made = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(store.dtype)
        order = torch.from_numpy(np.asarray(batch.plan.order, np.int64))
        self.query = made[order].flatten(0, 1).to(DEVICE)
        self.out = torch.full_like(self.query, torch.nan)
        self.partials = allocate_partials(self.work, heads.query, heads.dim)

    @property
    def scale(self) -> float:
        return self.heads.dim**-0.5

    @property
    def num_bytes(self) -> int:
        """What must be moved at least: keys and values read once, queries, outputs."""
        itemsize = self.store.kv_dtype.itemsize
        kept = 2 * self.kv_tokens[0] * self.heads.kv * self.heads.dim * itemsize
        return kept + 2 * self.query.numel() * self.query.element_size()

    @property
    def flops(self) -> int:
        """Multiplications and additions of queries with the keys that they see, and with values."""
        seen = sum(int((row.start + 1 + np.arange(row.num_queries)).sum()) for row in self.rows)
        return 4 * seen * self.heads.query * self.heads.dim

    def run(self) -> torch.Tensor:
        paged_attention(
            *(self.query, self.store.keys[0], self.store.values[0], self.step.tables),
            *(self.work, self.step.positions, self.out),
            scale=self.scale,
            partials=self.partials,
            tile=self.tile,
        )
        return self.out

    def launches(self) -> int:
        """Kernels that a run launches, counted."""
        count = 0

        def counting(launch: Callable[..., None]) -> Callable[..., None]:
            def counted(*arguments: object, **keywords: object) -> None:
                nonlocal count
                count += 1
                launch(*arguments, **keywords)

            return counted

        kernels = radixkv_kernels.attention
        with (
            mock.patch.object(kernels, "_attend", counting(kernels._attend)),
            mock.patch.object(kernels, "_merge", counting(kernels._merge)),
        ):
            self.run()
        return count

    def error(self, out: torch.Tensor | None = None, most: int = 16) -> float:
        """How far an output is from float64, of so many tokens spread over all; the worst token's.

        Infinite if any number of the whole output is not finite.
        """
        out = self.out if out is None else out
        if not bool(out.isfinite().all()):
            return math.inf
        tokens = np.unique(np.linspace(0, len(out) - 1, min(most, len(out))).astype(np.int64))
        return max(_off(out[token], self.reference(token)) for token in tokens.tolist())

    def reference(self, token: int) -> torch.Tensor:
        """Attention of one token in float64 (heads, dim)."""
        row = self.rows[token // self.rows[0].num_queries]
        keys, values = (
            cache.double()[: int(self.positions[token]) + 1]
            for cache in (_gathered(self.store.keys[0], row), _gathered(self.store.values[0], row))
        )
        query = self.query[token].double().unflatten(0, (self.heads.kv, -1))
        weights = (torch.einsum("hgd,khd->hgk", query, keys) * self.scale).softmax(-1)
        return torch.einsum("hgk,khd->hgd", weights, values).flatten(0, 1)

    def check(self, out: torch.Tensor | None = None) -> float:
        """The error of an output.

        Raises
        ------
        ArithmeticError
            If it is not within tolerance.
        """
        error, most = self.error(out), TOLERANCE[self.store.dtype]
        if not error <= most:
            raise ArithmeticError(f"an error of {error:.2g}, of which {most:.2g} is tolerated")
        return error

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of each row in one piece, (rows, tokens, KV heads, dim)."""
        tables = torch.from_numpy(np.stack([row.table for row in self.rows]).astype(np.int64))
        length = self.rows[0].stop
        return tuple(
            cache[tables.to(DEVICE)].flatten(1, 2)[:, :length]
            for cache in (self.store.keys[0], self.store.values[0])
        )  # type: ignore[return-value]


def _gathered(cache: torch.Tensor, row: Row) -> torch.Tensor:
    """What a row holds (tokens, KV heads, dim)."""
    table = torch.from_numpy(row.table.astype(np.int64)).to(DEVICE)
    # 8-bit numbers are gathered as bytes: not every operator knows them.
    words = cache.view(torch.uint8) if cache.element_size() == 1 else cache
    return words[table].view(cache.dtype).flatten(0, 1)[: row.stop]


def _off(out: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((out.double() - wanted).norm() / wanted.norm())
