"""Decode steps by graphs; a function that is called again stands for a graph.

So everything is tested but CUDA's own part: buffers, padding, what is played when.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from radixkv.attention import CostModel, KVStore, Row, TritonBackend, make_batch
from radixkv.decoding import SamplingParams
from radixkv.engine import graphs
from radixkv.engine.graphs import DecodeGraphs, Run, graph_size
from radixkv.errors import ConfigError
from radixkv.llm import LLM

pytestmark = pytest.mark.interpreted

MakeLLM = Callable[..., LLM]
Reference = Callable[[list[int], int], list[int]]
COST = CostModel(per_item=0, tile=16, programs=2)


class Again:
    """Stands for a CUDA graph: computes anew, into the same tensor."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.out = run().clone()

    def replay(self) -> None:
        self.out.copy_(self.run())


def again(run: Run) -> tuple[Again, torch.Tensor]:
    graph = Again(run)
    return graph, graph.out


@pytest.fixture
def make_graph_llm(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[LLM, DecodeGraphs]]:
    def choose(store: KVStore) -> TritonBackend:
        return TritonBackend(store, cost=COST)

    def make(capture: Any = again, **settings: int) -> tuple[LLM, DecodeGraphs]:
        with monkeypatch.context() as patch:
            patch.setattr("radixkv.llm.choose_backend", choose)
            llm = make_llm(**settings)
        runner = llm.engine.runner
        made = DecodeGraphs(
            runner.adapter, runner.backend, max_rows=4, max_blocks=16, capture=capture
        )
        runner.forward = made.forward
        return llm, made

    return make


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


def tokens(llm: LLM, prompts: list[list[int]], *params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(prompts, list(params))
    assert all(output.error is None for output in outputs)
    return [list(output.token_ids) for output in outputs]


def test_sizes_of_graphs() -> None:
    assert [graph_size(rows) for rows in (1, 2, 3, 4, 5, 8, 9, 16)] == [1, 2, 4, 4, 8, 8, 16, 16]
    assert [graph_size(rows) for rows in (17, 32, 33, 256)] == [32, 32, 48, 256]


def test_graphs_give_hugging_faces_tokens(make_graph_llm: Any, reference: Reference) -> None:
    """Three rows that share and leave one after the other: padded, full, shared and not."""
    system = [(7 * i) % 250 for i in range(20)]
    prompts = [[*system, *range(50 * i, 50 * i + 5)] for i in range(3)]
    llm, made = make_graph_llm()
    found = tokens(llm, prompts, greedy(3), greedy(4), greedy(6))
    assert found == [reference(prompt, n) for prompt, n in zip(prompts, (3, 4, 6), strict=True)]
    # Decodes of 3, 3, 2, 1 and 1 rows; the first of each size is recorded.
    assert set(made._recorded) == {(4, True), (2, True), (1, False)}
    assert made.replays == 1 + 0 + 1
    # Again, by what was recorded.
    assert tokens(llm, prompts[:1], greedy(3)) == [reference(prompts[0], 3)]
    assert made.replays == 2 + 2


def step(stops: list[int], table: int = 8) -> Any:
    """A decode batch of rows that share nothing."""
    rows = [
        Row(np.arange(table * i, table * (i + 1), dtype=np.int32), stop - 1, 1)
        for i, stop in enumerate(stops)
    ]
    return make_batch(rows, 16, cost=COST)


def run(made: DecodeGraphs, batch: Any, wanted: list[int] | None = None) -> torch.Tensor:
    count = batch.num_tokens
    ids = torch.arange(10, 10 + count)
    return made.forward(
        batch, ids, torch.tensor(list(range(count)) if wanted is None else wanted).long()
    )


@torch.inference_mode()
def test_padding_reads_and_writes_nothing(make_graph_llm: Any) -> None:
    """Three rows by the graph of four: as without, and NaN stays wherever it was."""
    _, made = make_graph_llm(num_blocks=32)
    store = made.backend.store
    for cache in (*store.keys, *store.values):
        cache.flatten(0, 1)[: 128 * 4 : 1].fill_(torch.nan)
        for row in range(4):
            cache[8 * row : 8 * row + 2].normal_()
    before = [cache.clone() for cache in (*store.keys, *store.values)]
    run(made, step([30, 31, 32, 29]))
    batch = step([31, 32, 33])
    found = run(made, batch, [2, 0, 1]).clone()
    assert made.replays == 1
    expected = made.adapter.forward(
        made.backend, step([31, 32, 33]), torch.arange(10, 13), torch.tensor([2, 0, 1])
    )
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-5)
    for was, cache in zip(before, (*store.keys, *store.values), strict=True):
        changed = (was.nan_to_num(9) != cache.nan_to_num(9)).flatten(2).any(-1)
        written = {(b, o) for b, o in changed.nonzero().tolist()}
        assert written == {(1, 13), (1, 14), (9, 14), (9, 15), (17, 15), (18, 0), (25, 12)}


@torch.inference_mode()
def test_what_is_no_plain_decode_runs_as_it_comes(make_graph_llm: Any) -> None:
    _, made = make_graph_llm(num_blocks=64)
    for cache in (*made.backend.store.keys, *made.backend.store.values):
        cache.zero_()
    prefill = make_batch([Row(np.arange(2, dtype=np.int32), 0, 5)], 16)
    asks = make_batch([Row(np.arange(2, dtype=np.int32), 4, 1)], 16, keep=[False])
    copies = step([20])
    copies.copies.append((torch.tensor([0]), torch.tensor([100])))
    for batch in (prefill, asks, copies, step([9] * 5)):
        run(made, batch)
    run(made, step([20]), [])
    assert made._recorded == {}
    run(made, step([20]))
    assert set(made._recorded) == {(1, False)}
    assert made.replays == 0


@torch.inference_mode()
def test_a_step_that_does_not_fit_runs_as_it_comes(make_graph_llm: Any) -> None:
    _, made = make_graph_llm(num_blocks=64)
    for cache in (*made.backend.store.keys, *made.backend.store.values):
        cache.zero_()
    run(made, step([20]))
    run(made, step([21]))
    assert made.replays == 1
    # A longer table than the buffers'.
    run(made, step([22], table=17))
    # More parts than there are items.
    made.backend.cost = CostModel(per_item=0, tile=4, split=4)
    run(made, step([120]))
    assert made.replays == 1
    made.backend.cost = COST
    expected = run(made, step([22])).clone()
    assert made.replays == 2
    eager = made.adapter.forward(made.backend, step([22]), torch.tensor([10]), torch.tensor([0]))
    assert torch.allclose(expected, eager, atol=1e-5)


@torch.inference_mode()
def test_what_cannot_be_recorded_is_said_once(
    make_graph_llm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(run: Run) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    _, made = make_graph_llm(failing, num_blocks=64)
    for cache in (*made.backend.store.keys, *made.backend.store.values):
        cache.zero_()
    with caplog.at_level(logging.WARNING, logger=graphs.__name__):
        for stop in (20, 21, 22):
            assert bool(run(made, step([stop])).isfinite().all())
    assert [record.getMessage() for record in caplog.records] == [
        "decode steps of 1 rows run without a graph: "
        "operation not permitted when stream is capturing"
    ]
    assert made.replays == 0


def test_recording_compiles_first_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a made-up device: one run on a stream of its own, waited for, then one that records."""
    said: list[str] = []

    class Stream:
        def __init__(self, name: str = "side") -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            said.append(f"{self.name} waits for {other.name}")

    class Graph:
        pass

    @contextmanager
    def within(name: str) -> Iterator[None]:
        said.append(f"{name} begins")
        yield
        said.append(f"{name} ends")

    cuda = SimpleNamespace(
        Stream=Stream,
        current_stream=lambda: Stream("main"),
        stream=lambda stream: within(stream.name),
        CUDAGraph=Graph,
        graph=lambda graph, pool: within(f"{type(graph).__name__} in {pool}"),
    )
    monkeypatch.setattr(graphs.torch, "cuda", cuda)
    outputs = iter([torch.zeros(1), torch.ones(1)])

    def run() -> torch.Tensor:
        said.append("run")
        return next(outputs)

    graph, out = graphs.capture_on_gpu(run, (0, 7))
    assert isinstance(graph, Graph)
    assert out.item() == 1
    assert said == [
        *("side waits for main", "side begins", "run", "side ends", "main waits for side"),
        *("Graph in (0, 7) begins", "run", "Graph in (0, 7) ends"),
    ]


def test_all_graphs_of_an_engine_share_their_memory(
    make_graph_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty graphs would hold forty times what a step computes on the way."""
    _, made = make_graph_llm(num_blocks=64)
    for cache in (*made.backend.store.keys, *made.backend.store.values):
        cache.zero_()
    pools = []

    def capture(run: Run, pool: tuple[int, int]) -> Any:
        pools.append(pool)
        return again(run)

    handles = iter([(0, 1), (0, 2)])
    monkeypatch.setattr(graphs.torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(graphs, "capture_on_gpu", capture)
    made = DecodeGraphs(made.adapter, made.backend, max_rows=4, max_blocks=16)
    with torch.inference_mode():
        run(made, step([20]))
        run(made, step([20, 21]))
    assert pools == [(0, 1)] * 2


def test_graphs_are_refused_where_there_can_be_none(make_llm: MakeLLM, make_graph_llm: Any) -> None:
    with pytest.raises(ConfigError, match="needs a model on a GPU"):
        make_llm(cuda_graphs=True)
    with pytest.raises(ConfigError, match="needs a model on a GPU"):
        LLM("./there is no such model", device="cpu", cuda_graphs=True)
    _, made = make_graph_llm()
    made.adapter.max_positions = 100
    try:
        with pytest.raises(ConfigError, match="cannot be recorded"):
            DecodeGraphs(made.adapter, made.backend, max_rows=1, max_blocks=1)
    finally:
        made.adapter.max_positions = None
