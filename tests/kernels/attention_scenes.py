"""Random forests of sequences over a paged cache, and what attention over them must be.

The reference knows no blocks, items or partials: each query attends to its sequence's own keys, as
they were before they went to the cache, in float64.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from radixkv_kernels import TO_THE_END, WorkList, build_work_list, paged_attention, torch_twins
from torch import Tensor

# Relative to the norm of what it should be.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Geometry:
    group: int = 3
    kv_heads: int = 1
    key_dim: int = 16
    value_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    logit_scale: float = 1.0

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads


@dataclass
class Node:
    """A run of keys that all sequences below it have in common."""

    length: int
    children: list[Node] = field(default_factory=list)


@dataclass
class Scene:
    """A batch, with all that a call takes."""

    geometry: Geometry
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    positions: Tensor
    reads: list[tuple[int, int, int, int, int]]
    order: list[int] | None
    # For the reference: the sequence of each token, and keys and values of each sequence.
    sequence_of: list[int]
    keys: list[Tensor]
    values: list[Tensor]
    scales: dict[str, Tensor]

    def work(self) -> WorkList:
        device = self.query.device
        return build_work_list(self.reads, len(self.query), order=self.order, device=device)

    def arguments(self, work: WorkList | None = None) -> tuple[Any, ...]:
        work = self.work() if work is None else work
        caches = (self.key_cache, self.value_cache)
        return (self.query, *caches, self.block_tables, work, self.positions)

    @property
    def scale(self) -> float:
        return self.geometry.logit_scale * self.geometry.key_dim**-0.5

    def poisoned(self) -> Tensor:
        shape = (*self.query.shape[:2], self.geometry.value_dim)
        return torch.full(shape, torch.nan, dtype=self.query.dtype, device=self.query.device)


def attend(scene: Scene, work: WorkList | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """The kernel's output and log-sum-exps; whatever it leaves unwritten is NaN."""
    work = scene.work() if work is None else work
    shape = (work.num_partials, scene.geometry.heads)
    partials = (
        torch.full((*shape, scene.geometry.value_dim), torch.nan, device=scene.query.device),
        torch.full(shape, torch.nan, device=scene.query.device),
    )
    result = paged_attention(
        *scene.arguments(work),
        scene.poisoned(),
        scale=scene.scale,
        partials=partials,
        return_lse=True,
        **{**scene.scales, **options},
    )
    assert isinstance(result, tuple)
    return result


def twin(scene: Scene, work: WorkList | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    result = torch_twins.paged_attention(
        *scene.arguments(work),
        scene.poisoned(),
        scale=scene.scale,
        return_lse=True,
        compute_dtype=torch.float64,
        **{**scene.scales, **options},
    )
    assert isinstance(result, tuple)
    return result


def reference(scene: Scene, **options: Any) -> tuple[Tensor, Tensor]:
    """Token by token; float64 (T, H, Dv), and base-2 log-sum-exps (T, H), -inf without a key."""
    outputs, lses = [], []
    for token, sequence in enumerate(scene.sequence_of):
        position = int(scene.positions[token])
        seen = visible_keys(position, len(scene.keys[sequence]), **options)
        key = scene.keys[sequence][seen].repeat_interleave(scene.geometry.group, 1)
        value = scene.values[sequence][seen].repeat_interleave(scene.geometry.group, 1)
        logits = torch.einsum("hd,khd->hk", scene.query[token].double().cpu(), key) * scene.scale
        if cap := options.get("softcap"):
            logits = cap * torch.tanh(logits / cap)
        if (slopes := options.get("alibi_slopes")) is not None:
            distance = torch.tensor(seen, dtype=torch.float64) - position
            logits = logits + slopes.double().cpu()[:, None] * distance
        if (sinks := options.get("sinks")) is not None:
            logits = torch.cat([logits, sinks.double().cpu()[:, None]], 1)
        lses.append(torch.logsumexp(logits, 1) / math.log(2))
        weights = torch.softmax(logits, 1)[:, : len(seen)]
        outputs.append(torch.einsum("hk,khd->hd", weights, value))
    return torch.stack(outputs), torch.stack(lses)


def visible_keys(
    position: int, length: int, *, causal: bool = True, window: int = 0, chunk: int = 0, **_: Any
) -> list[int]:
    return [
        key
        for key in range(length)
        if position >= 0
        and (not causal or key <= position)
        and (not window or position - key < window)
        and (not chunk or position // chunk == key // chunk)
    ]


def error(got: Tensor, wanted: Tensor) -> float:
    """Of a norm, relative to another; infinite for a NaN anywhere."""
    difference = (got.double().cpu() - wanted).norm() / wanted.norm().clamp_min(1e-30)
    return float(difference) if not got.isnan().any() else math.inf


def check(scene: Scene, work: WorkList | None = None, **options: Any) -> None:
    """Kernel and twin against the reference: outputs and log-sum-exps."""
    tile = {name: options.pop(name) for name in ("tile",) if name in options}
    wanted, wanted_lse = reference(scene, **options)
    tolerance = TOLERANCE[scene.query.dtype]
    for call, extra in ((attend, tile), (twin, {})):
        got, lse = call(scene, work, **options, **extra)
        assert error(got, wanted) < tolerance, call.__name__
        empty = wanted_lse == -math.inf
        assert (lse.cpu()[empty] == -1e30).all()
        wrong = (lse.double().cpu() - wanted_lse)[~empty].abs()
        limit = tolerance * (1 + wanted_lse[~empty].abs() * 4)
        assert (wrong <= limit).all(), (call.__name__, wrong.max())


def make_scene(
    seed: int,
    geometry: Geometry,
    forest: list[Node],
    num_queries: list[int],
    *,
    device: torch.device,
    share: float = 1.0,
    split: float = 0.0,
    shuffle: bool = False,
    to_the_end: bool = True,
) -> Scene:
    """Fill a cache with a forest's sequences, and cut what they read into items.

    Parameters
    ----------
    forest : list of Node
        Inner nodes must end with a block.
    num_queries : list of int
        Of each sequence (leaf), the last of its tokens.
    share : float
        The chance that a node is read once for all; else each sequence reads it by itself.
    split : float
        The chance that a read is cut somewhere.
    shuffle : bool
        Tokens are not in the plan's order.
    to_the_end : bool
        Last reads end with the queries' positions, not at a given key.
    """
    rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
    builder = _Builder(rng, torch_rng, geometry, share, split, to_the_end)
    for node in forest:
        builder.walk(node, [], [], num_queries)
    return builder.scene(shuffle, device)


class _Builder:
    """Walks a forest depth first: a node's sequences, and so its queries, are neighbours."""

    def __init__(
        self,
        rng: random.Random,
        torch_rng: torch.Generator,
        geometry: Geometry,
        share: float,
        split: float,
        to_the_end: bool,
    ) -> None:
        self.rng, self.torch_rng, self.geometry = rng, torch_rng, geometry
        self.share, self.split, self.to_the_end = share, split, to_the_end
        self.runs: list[tuple[Tensor, Tensor]] = []  # what each node holds
        self.paths: list[list[int]] = []  # nodes of each sequence
        self.counts: list[int] = []
        self.reads: list[tuple[int, int, int, int, int]] = []

    def walk(self, node: Node, path: list[int], own: list[bool], num_queries: list[int]) -> None:
        path = [*path, self.fill(node.length)]
        shared = bool(node.children) and self.rng.random() < self.share
        first_row, first_query = len(self.paths), sum(self.counts)
        for child in node.children:
            self.walk(child, path, [*own, not shared], num_queries)
        end = sum(len(self.runs[run][0]) for run in path)
        start = end - node.length
        if node.children:
            if shared and sum(self.counts) > first_query:
                row = self.rng.randrange(first_row, len(self.paths))
                self.read(first_query, sum(self.counts) - first_query, row, start, end)
            return
        count = num_queries[len(self.paths)]
        self.paths.append(path)
        self.counts.append(count)
        # Stretches that nobody reads for this sequence, the last of which goes to its end.
        bounds, at = [], 0
        for run, alone in zip(path, [*own, True], strict=True):
            size = len(self.runs[run][0])
            if alone and bounds and bounds[-1][1] == at:
                bounds[-1] = (bounds[-1][0], at + size)
            elif alone:
                bounds.append((at, at + size))
            at += size
        for start, stop in bounds:
            last = stop == end and self.to_the_end
            if count:
                self.read(first_query, count, first_row, start, stop, last)

    def fill(self, length: int) -> int:
        shapes = (self.geometry.key_dim, self.geometry.value_dim)
        key, value = (
            torch.randn(length, self.geometry.kv_heads, dim, generator=self.torch_rng)
            for dim in shapes
        )
        self.runs.append((key, value))
        return len(self.runs) - 1

    def read(
        self, first: int, count: int, row: int, start: int, end: int, last: bool = False
    ) -> None:
        cuts = [start]
        if end - start > 1 and self.rng.random() < self.split:
            cuts += sorted(self.rng.sample(range(start + 1, end), min(2, end - start - 1)))
        for begin, stop in zip(cuts, [*cuts[1:], end], strict=True):
            until = TO_THE_END if last and stop == end else stop
            self.reads.append((first, count, row, begin, until))

    def scene(self, shuffle: bool, device: torch.device) -> Scene:
        geometry = self.geometry
        caches, tables, scales, keys, values = self.store()
        sequence_of = [row for row, count in enumerate(self.counts) for _ in range(count)]
        positions = [
            len(key) - count + offset
            for key, count in zip(keys, self.counts, strict=True)
            for offset in range(count)
        ]
        order = list(range(len(positions)))
        if shuffle:
            self.rng.shuffle(order)
        self.rng.shuffle(self.reads)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        shape = (len(positions), geometry.heads, geometry.key_dim)
        query = torch.randn(shape, generator=self.torch_rng).to(geometry.dtype)
        return Scene(
            geometry,
            query.to(device),
            *(cache.to(device) for cache in caches),
            tables.to(device),
            torch.tensor([positions[i] for i in inverse], dtype=torch.int32, device=device),
            self.reads,
            order if shuffle else None,
            [sequence_of[i] for i in inverse],
            keys,
            values,
            {name: scale.to(device) for name, scale in scales.items()},
        )

    def store(
        self,
    ) -> tuple[list[Tensor], Tensor, dict[str, Tensor], list[Tensor], list[Tensor]]:
        """Caches, block tables and scales; and what each sequence reads, in float64."""
        geometry, size = self.geometry, self.geometry.block_size
        blocks = [-(-len(key) // size) for key, _ in self.runs]
        num_blocks = sum(blocks) + 2
        ids = self.rng.sample(range(num_blocks), num_blocks)
        poison = ids.pop()
        held = [[ids.pop() for _ in range(count)] for count in blocks]
        caches, stored, scales = [], [], {}
        for part, (name, step) in enumerate((("key_scale", 0.03), ("value_scale", 0.02))):
            scale = torch.ones(geometry.kv_heads)
            if geometry.cache_dtype:
                scale = step * (1 + torch.rand(geometry.kv_heads, generator=self.torch_rng))
                scales[name] = scale
            cache, kept = self.fill_cache(part, num_blocks, held, scale)
            caches.append(cache)
            stored.append([torch.cat([kept[run] for run in path]) for path in self.paths])
        most = max(sum(blocks[run] for run in path) for path in self.paths)
        tables = torch.full((len(self.paths), most + 1), poison, dtype=torch.int32)
        for row, path in enumerate(self.paths):
            table = [block for run in path for block in held[run]]
            tables[row, : len(table)] = torch.tensor(table)
        return caches, tables, scales, stored[0], stored[1]

    def fill_cache(
        self, part: int, num_blocks: int, held: list[list[int]], scale: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """The cache of keys (part 0) or values (1), and what it holds of each run."""
        geometry, size = self.geometry, self.geometry.block_size
        dtype, dim = geometry.cache_dtype or geometry.dtype, self.runs[0][part].shape[2]
        cache = poisoned((num_blocks, size, geometry.kv_heads, dim), dtype)
        kept = []
        for run, blocks in zip(self.runs, held, strict=True):
            numbers = run[part] / scale[:, None]
            if dtype == torch.int8:
                numbers = numbers.round().clamp(-127, 127)
            numbers = numbers.to(dtype)
            kept.append(numbers.double() * scale.double()[:, None])
            for i, block in enumerate(blocks):
                rows = numbers[i * size : (i + 1) * size]
                cache[block, : len(rows)] = rows
        return cache, kept


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A cache full of NaN, or of what spoils most where there is none."""
    if dtype == torch.int8:
        return torch.full(shape, -128, dtype=dtype)
    return torch.full(shape, torch.nan).to(dtype)


def batch(
    lengths: list[int],
    num_queries: list[int],
    geometry: Geometry | None = None,
    *,
    device: torch.device,
    seed: int = 0,
    **cutting: Any,
) -> Scene:
    """Sequences that share nothing."""
    forest = [Node(length) for length in lengths]
    geometry = geometry or Geometry()
    return make_scene(seed, geometry, forest, num_queries, device=device, **cutting)


def random_forest(rng: random.Random, depth: int, block_size: int) -> list[Node]:
    """Up to three trees; leaves of any length, inner nodes of whole blocks, maybe empty."""

    def grow(level: int) -> Node:
        if level == 0 or rng.random() < 0.2:
            return Node(rng.choice([1, 15, 16, 17, rng.randint(1, 30)]))
        children = [grow(level - 1) for _ in range(rng.randint(1, 2))]
        return Node(block_size * rng.choice([0, 1, 2] if block_size < 64 else [0, 1]), children)

    return [grow(depth) for _ in range(rng.randint(1, 2))]


def leaves(forest: list[Node]) -> list[Node]:
    return [
        leaf for node in forest for leaf in (leaves(node.children) if node.children else [node])
    ]
