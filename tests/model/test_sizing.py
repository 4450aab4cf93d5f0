"""The largest step, and the store beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from families import build

from radixkv.attention import KVStore
from radixkv.config import EngineConfig
from radixkv.errors import ConfigError
from radixkv.model import sizing
from radixkv.model.adapter import ModelAdapter, adapt
from radixkv.model.sizing import make_store, run_largest_step

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def adapter() -> Any:
    adapter = adapt(build("llama"))
    yield adapter
    adapter.close()


@pytest.mark.parametrize(("max_len", "rows"), [(64, 1), (40, 2), (25, 3)])
def test_the_largest_step_is_as_large_as_the_engine_allows(
    adapter: ModelAdapter, monkeypatch: pytest.MonkeyPatch, max_len: int, rows: int
) -> None:
    seen: dict[str, Any] = {}
    forward = adapter.forward

    def recording(backend: Any, batch: Any, tokens: Any, wanted: Any) -> torch.Tensor:
        seen.update(store=backend.store, rows=[row.num_queries for row in batch.rows])
        return forward(backend, batch, tokens, wanted)

    monkeypatch.setattr(adapter, "forward", recording)
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=7)
    logits = run_largest_step(adapter, torch.float32, CPU, 16, max_len, config)
    assert logits.shape[0] == 7
    assert bool(logits.isfinite().all())
    assert sum(seen["rows"]) == 64
    assert len(seen["rows"]) == rows
    assert max(seen["rows"]) <= max_len
    assert seen["store"].num_blocks == sum(-(-count // 16) for count in seen["rows"])


def store_of(adapter: ModelAdapter, device: torch.device = CPU, **changes: Any) -> KVStore:
    settings: dict[str, Any] = {
        "kv_memory": "auto",
        "kv_dtype": None,
        "block_size": 16,
        "max_len": 64,
    }
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=4)
    return make_store(adapter, torch.float32, device, **(settings | {"config": config} | changes))


def test_a_store_on_the_cpu_is_not_measured(
    adapter: ModelAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "room_for_kv", lambda *_: pytest.fail("measured"))
    # As many blocks as four sequences of 64 tokens need.
    assert store_of(adapter).num_blocks == 16


def test_a_store_on_a_gpu_takes_what_is_left(
    adapter: ModelAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store itself is made on the CPU here."""
    block = KVStore.bytes_per_block(adapter.layers, 16, torch.float32)
    asked = []

    def room(device: torch.device, step: Any) -> int:
        asked.append(device)
        return 5 * block + 1

    def on_the_cpu(
        layers: Any, blocks: int, size: int, dtype: Any, device: Any, **_: Any
    ) -> KVStore:
        assert device == gpu
        return KVStore(layers, blocks, size, dtype)

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(sizing, "room_for_kv", room)
    made = KVStore.bytes_per_block
    monkeypatch.setattr(sizing, "KVStore", on_the_cpu)
    monkeypatch.setattr(on_the_cpu, "bytes_per_block", made, raising=False)
    assert store_of(adapter, gpu).num_blocks == 5
    assert asked == [gpu]
    assert store_of(adapter, gpu, kv_memory=3 * block).num_blocks == 3
    assert asked == [gpu]

    def no_room(*_: Any) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(sizing, "room_for_kv", no_room)
    with pytest.raises(ConfigError, match="no memory for a step of 64 tokens beside the model"):
        store_of(adapter, gpu)
    monkeypatch.setattr(sizing, "room_for_kv", lambda *_: 0)
    with pytest.raises(ConfigError, match="holds no block"):
        store_of(adapter, gpu)


def test_a_store_that_does_not_fit_says_what_to_do(
    adapter: ModelAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(ConfigError, match=r"cpu has no memory for 3 blocks .* with kv_memory"):
        KVStore(adapter.layers, 3, 16, torch.float32)
