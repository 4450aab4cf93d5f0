"""CUDA graphs for decode steps: the launches of a whole step, recorded once and played again.

A decode step of a small batch takes longer to launch than to compute. What a graph reads lies in
buffers of fixed size; a step fills them and plays the graph of the next larger batch size, in which
the rows too many read and write nothing.

None of this has run on a GPU yet; the tests put a function that is called again in a graph's place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from radixkv_kernels import WorkList

from radixkv.attention import AttentionBackend, AttentionBatch, TritonBackend
from radixkv.attention.cost import ROUNDS
from radixkv.attention.placement import refill
from radixkv.attention.triton_backend import STEP, StepTensors, WorkKey, padded_tables
from radixkv.engine.runner import ModelRunner
from radixkv.errors import ConfigError
from radixkv.model.adapter import ModelAdapter
from radixkv.model.function_adapter import FunctionAdapter

logger = logging.getLogger(__name__)

# Up to this size every power of two has a graph, from there on every multiple.
STEP_OF_SIZES = 16
# What a work list has room for. A forest has fewer inner nodes than leaves, and each is cut into
# reads of some queries; reads that are cut into parts give every program a few at the most.
ITEMS_A_ROW, PARTIALS_A_ROW, PARTS_A_PROGRAM = 4, 8, max(ROUNDS)


class Graph(Protocol):
    """What was recorded."""

    def replay(self) -> None:
        """Do it again, with what the buffers hold now."""
        ...


Run = Callable[[], torch.Tensor]
Capture = Callable[[Run], tuple[Graph, torch.Tensor]]


def capture_on_gpu(run: Run, pool: Any) -> tuple[Graph, torch.Tensor]:
    """Record a function's launches; the graph, and the tensor that it computes anew every time.

    Graphs of one pool use the same memory for what they compute on the way, so only one of them may
    be played at a time.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Compiles what is launched for the first time, which must not happen while recording.
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = run()
    return graph, out


def graph_size(rows: int) -> int:
    """The batch size of the graph that serves a step of so many rows."""
    if rows > STEP_OF_SIZES:
        return -(-rows // STEP_OF_SIZES) * STEP_OF_SIZES
    return 1 << (rows - 1).bit_length()


@dataclass(slots=True)
class _Buffers:
    """What a graph reads, on the device.

    Attributes
    ----------
    batch : AttentionBatch
        Its tensors and what is prepared in it are the buffers; its rows are those of the step
        that was recorded.
    tokens, wanted : int64 tensors (size,)
    work : dict of WorkKey to WorkList
        Also in ``batch.prepared``.
    filled : dict of WorkKey to WorkList
        What each was last filled from.
    """

    batch: AttentionBatch
    tokens: torch.Tensor
    wanted: torch.Tensor
    work: dict[WorkKey, WorkList]
    filled: dict[WorkKey, WorkList] = field(default_factory=dict)

    def fill(
        self,
        backend: TritonBackend,
        batch: AttentionBatch,
        tokens: torch.Tensor,
        wanted: torch.Tensor,
    ) -> bool:
        """Take a step's numbers; False if they do not fit, and then nothing may be played."""
        for key, room in self.work.items():
            works = backend.work_lists(batch, key)
            if len(works) > 1:
                return False
            (work,) = works
            if self.filled.get(key) is not work:
                self.filled.pop(key, None)
                try:
                    room.copy_(work)
                except ValueError:
                    return False
                self.filled[key] = work
        step = self.batch.prepared[STEP]
        assert isinstance(step, StepTensors)
        size, rows = len(self.tokens), len(batch.rows)
        tables = padded_tables(batch.rows)
        if tables.shape[1] > step.tables.shape[1]:
            return False
        refill(step.tables[:rows, : tables.shape[1]], tables)
        positions = batch.position_ids
        for buffer, numbers, padding in (
            (self.tokens, tokens, 0),
            (self.wanted, wanted, 0),
            (self.batch.position_ids, positions, 0),
            (step.positions, positions.int(), -1),
            (step.slots, batch.slots, -1),
        ):
            padded = torch.full((size,), padding, dtype=buffer.dtype)
            padded[:rows] = numbers
            refill(buffer, padded)
        return True


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: Graph
    logits: torch.Tensor
    buffers: _Buffers


class DecodeGraphs:
    """Runs decode steps by graphs where it can, and all others as they come.

    The first step of a batch size runs as it comes, and is recorded afterwards.

    Parameters
    ----------
    adapter : ModelAdapter
    backend : AttentionBackend
        A `TritonBackend`.
    max_rows : int
        Larger steps are not recorded.
    max_blocks : int
        Longest block table.
    capture : callable, optional
        What stands for `capture_on_gpu`.

    Attributes
    ----------
    replays : int
        Steps that a graph ran.

    Raises
    ------
    ConfigError
        Without a GPU, or for a model whose forward pass is not the same launches for every step.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        backend: AttentionBackend,
        *,
        max_rows: int,
        max_blocks: int,
        capture: Capture | None = None,
    ) -> None:
        if not isinstance(backend, TritonBackend):
            raise _needs_gpu()
        if not isinstance(adapter, FunctionAdapter) or adapter.max_positions is not None:
            raise ConfigError(
                "cuda_graphs=True: this model's forward pass depends on more than its inputs' "
                "shapes, so it cannot be recorded; leave it off"
            )
        self.adapter = adapter
        self.backend = backend
        self.max_rows = max_rows
        self.max_blocks = max_blocks
        self.replays = 0
        # Steps come one after the other, and each takes its logits before the next.
        self._capture = capture or partial(capture_on_gpu, pool=torch.cuda.graph_pool_handle())
        self._recorded: dict[tuple[int, bool], _Recorded | None] = {}

    def forward(
        self, batch: AttentionBatch, tokens: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        """One step; as `ModelAdapter.forward`. The logits are good until the next step."""
        name = self._name(batch, wanted)
        if name is None:
            return self._run(batch, tokens, wanted)
        recorded = self._recorded.get(name)
        if recorded is not None and recorded.buffers.fill(self.backend, batch, tokens, wanted):
            recorded.graph.replay()
            self.replays += 1
            return recorded.logits[: len(wanted)]
        logits = self._run(batch, tokens, wanted)
        if name not in self._recorded:
            self._recorded[name] = self._record(name, batch, tokens, wanted)
        return logits

    def _run(
        self, batch: AttentionBatch, tokens: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        return self.adapter.forward(self.backend, batch, tokens, wanted)

    def _name(self, batch: AttentionBatch, wanted: torch.Tensor) -> tuple[int, bool] | None:
        """The graph for a step: its size, and whether rows share; None if it is to run as it is."""
        rows = len(batch.rows)
        decodes = batch.num_tokens == rows == len(wanted)
        if not decodes or batch.written is not None or batch.copies or rows > self.max_rows:
            return None
        return graph_size(rows), bool(batch.plan.runs)

    def _record(
        self,
        name: tuple[int, bool],
        batch: AttentionBatch,
        tokens: torch.Tensor,
        wanted: torch.Tensor,
    ) -> _Recorded | None:
        """Record the step that has just run: what it writes once more is what is there already."""
        buffers = self._buffers(name, batch)
        if not buffers.fill(self.backend, batch, tokens, wanted):
            return None

        def run() -> torch.Tensor:
            return self._run(buffers.batch, buffers.tokens, buffers.wanted)

        try:
            graph, logits = self._capture(run)
        except Exception as error:  # of a model's code, which may wait for the device
            logger.warning("decode steps of %d rows run without a graph: %s", name[0], error)
            return None
        return _Recorded(graph, logits, buffers)

    def _buffers(self, name: tuple[int, bool], batch: AttentionBatch) -> _Buffers:
        size, shares = name
        device = self.backend.store.device

        def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        work = {
            key: self._room(key, made[0], size, shares)
            for key, made in batch.prepared.items()
            if isinstance(key, WorkKey) and isinstance(made, tuple)
        }
        step = StepTensors(
            numbers(torch.int32, size, self.max_blocks),
            numbers(torch.int32, size),
            numbers(torch.int64, size),
            [],
            padded=True,
        )
        prepared: dict[object, object] = {STEP: step}
        prepared.update((key, (room,)) for key, room in work.items())
        return _Buffers(
            replace(batch, position_ids=numbers(torch.int64, size), prepared=prepared),
            numbers(torch.int64, size),
            numbers(torch.int64, size),
            work,
        )

    def _room(self, key: WorkKey, made: WorkList, size: int, shares: bool) -> WorkList:
        """A work list that most steps of this size fit into."""
        most = key.max_queries if shares else 1
        parts = PARTS_A_PROGRAM * self.backend.cost.programs // key.kv_heads
        needs = (len(made.items), size, made.num_partials, made.max_queries)
        has = (ITEMS_A_ROW * size + parts, size, PARTIALS_A_ROW * size + most * parts, most)
        return made.padded(*(max(pair) for pair in zip(needs, has, strict=True)))


def refuse_without_gpu(device: torch.device) -> None:
    """Refuse graphs for a device that has none, before a model is loaded there."""
    if device.type == "cpu":
        raise _needs_gpu()


def _needs_gpu() -> ConfigError:
    return ConfigError("cuda_graphs=True needs a model on a GPU; leave it off")


def decode_by_graphs(runner: ModelRunner, max_rows: int, max_len: int) -> None:
    """Have a runner's decode steps recorded, of so many rows, each of so many tokens at the most.

    Raises
    ------
    ConfigError
        See `DecodeGraphs`.
    """
    # A row may hold a block more than its tokens take, for what comes next.
    max_blocks = -(-max_len // runner.backend.store.block_size) + 1
    graphs = DecodeGraphs(runner.adapter, runner.backend, max_rows=max_rows, max_blocks=max_blocks)
    runner.forward = graphs.forward
