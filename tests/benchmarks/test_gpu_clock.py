"""What the GPU benchmarks do only on a GPU: torch's and FlashInfer's parts are made up here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
import gpu_path  # noqa: F401

if torch.cuda.is_available():
    pytest.skip("benchmarks/gpu_checks.py runs this on a GPU", allow_module_level=True)

import gpu
import gpu_rivals
from gpu_scenes import Heads, Problem, make_pool, make_rows

from radixkv.attention import CostModel, TritonBackend


class FakeCuda:
    """A device on which recorded work takes 2, 3, 4, ... microseconds, one after the other."""

    def __init__(self, records: bool = True) -> None:
        self.records = records
        self.recording = False
        self.now, self.played = 0.0, 0
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = device.now

            def elapsed_time(self, other: Any) -> float:
                return 1e-3 * (other.at - self.at)

        class CUDAGraph:
            def replay(self) -> None:
                device.work()

        self.Event, self.CUDAGraph = Event, CUDAGraph

    def work(self) -> None:
        if self.recording and not self.records:
            raise RuntimeError("operation not permitted when stream is capturing")
        if not self.recording:
            self.now += 2.0 + self.played
            self.played += 1

    def get_device_properties(self, device: object) -> Any:
        return SimpleNamespace(L2_cache_size=1024)

    def synchronize(self) -> None:
        pass

    def Stream(self) -> Any:  # noqa: N802
        return SimpleNamespace(wait_stream=lambda other: None)

    def current_stream(self) -> Any:
        return self.Stream()

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        yield

    @contextmanager
    def graph(self, graph: object) -> Iterator[None]:
        self.recording = True
        try:
            yield
        finally:
            self.recording = False


@pytest.mark.parametrize(("records", "by"), [(True, "graph"), (False, "launches")])
def test_a_clock(
    records: bool, by: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = FakeCuda(records)
    monkeypatch.setattr(gpu, "HAS_GPU", True)
    monkeypatch.setattr(gpu.torch, "cuda", device)
    found = gpu.Clock().time(device.work)
    # Two runs that compile and warm up, three that tell how many are worth it, and the most.
    assert device.played == 2 + 3 + gpu.MOST
    assert found.by == by
    assert found.runs == gpu.MOST
    assert (found.low, found.high) == pytest.approx((2 + 5, 2 + 5 + gpu.MOST - 1))
    assert found.us == pytest.approx((found.low + found.high) / 2)
    assert ("cannot be recorded" in capsys.readouterr().out) is not records


def test_what_takes_long_is_run_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeCuda()
    monkeypatch.setattr(gpu, "HAS_GPU", True)
    monkeypatch.setattr(gpu.torch, "cuda", device)
    device.played = 100_000
    assert gpu.Clock().time(device.work, graph=False).runs == gpu.FEWEST


# --- FlashInfer, as its documentation says. ---


def attend(query: Any, caches: Any, blocks: list[int], length: int) -> torch.Tensor:
    keys, values = (cache[blocks].flatten(0, 1)[:length].float() for cache in caches)
    grouped = query.float().unflatten(0, (keys.shape[1], -1))
    weights = (torch.einsum("hgd,khd->hgk", grouped, keys) * query.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("hgk,khd->hgd", weights, values).flatten(0, 1).to(query.dtype)


def pages_of(plan: tuple[Any, ...], row: int) -> tuple[list[int], int]:
    bounds, blocks, last = (numbers.tolist() for numbers in plan)
    return blocks[bounds[row] : bounds[row + 1]], last[row]


class Decode:
    def __init__(self, workspace: Any, layout: str, use_tensor_cores: bool) -> None:
        assert layout == "NHD"

    def plan(self, *arguments: Any, q_data_type: Any, kv_data_type: Any) -> None:
        self.pages, self.sizes = arguments[:3], arguments[3:]

    def run(self, query: Any, caches: Any) -> torch.Tensor:
        assert self.sizes == (*query.shape[1:2], caches[0].shape[2], query.shape[2], 16)
        out = []
        for row, its in enumerate(query):
            blocks, last = pages_of(self.pages, row)
            out.append(attend(its, caches, blocks, 16 * len(blocks) - 16 + last))
        return torch.stack(out)


class Cascade:
    def __init__(self, levels: int, workspace: Any, layout: str) -> None:
        assert (levels, layout) == (2, "NHD")

    def plan(
        self, queries: Any, bounds: Any, blocks: Any, last: Any, *sizes: int, q_data_type: Any
    ):
        self.levels = list(zip(queries, bounds, blocks, last, strict=True))

    def run(self, query: Any, caches: Any) -> torch.Tensor:
        (shared, *common), (each, *own) = self.levels
        assert shared.tolist() == [0, len(query)]
        assert each.tolist() == list(range(len(query) + 1))
        out = []
        for row, its in enumerate(query):
            before, full = pages_of(tuple(common), 0)
            blocks, last = pages_of(tuple(own), row)
            assert full == 16
            out.append(attend(its, caches, before + blocks, 16 * len(before + blocks) - 16 + last))
        return torch.stack(out)


def test_flashinfer_is_given_the_same_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Decode, MultiLevelCascadeAttentionWrapper=Cascade
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(gpu_rivals, "WORKSPACE", 16)
    heads = Heads(4, 2, 16)
    store = make_pool(heads, 400)
    backend = TritonBackend(store, cost=CostModel(per_item=0, tile=32))
    problem = Problem(backend, make_rows(store, batch=3, own=21, prefix=64), heads)
    with pytest.raises(gpu_rivals.NotThereError, match="it needs a GPU"):
        gpu_rivals.flashinfer(problem, 64)
    monkeypatch.setattr(gpu_rivals, "HAS_GPU", True)
    runs = gpu_rivals.flashinfer(problem, 64)
    assert list(runs) == ["decode", "cascade"]
    for run in runs.values():
        assert 0 < problem.check(run()) < 1e-2
    assert list(gpu_rivals.flashinfer(problem)) == ["decode"]


def test_flashinfer_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(gpu_rivals.NotThereError, match="not installed"):
        gpu_rivals.flashinfer(None)  # type: ignore[arg-type]
