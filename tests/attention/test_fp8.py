"""Keys and values kept in 8 bits: rounded once, and then the same for every reader."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from steps import Shape, Step, attend, forest, with_cached_rows

from radixkv.attention import (
    CostModel,
    KVStore,
    LayerShape,
    ReferenceBackend,
    Span,
    TorchBackend,
    TritonBackend,
    choose_backend,
    parse_kv_dtype,
)
from radixkv.errors import ConfigError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Of the output's error over its norm. A number is off by half of its last bit at the most, which is
# 2^-4 and 2^-3 of it.
BOUND = {E4M3: 0.05, E5M2: 0.1}
CUTS = CostModel(per_item=0, tile=16, programs=1000)
BACKENDS = [
    pytest.param(TorchBackend, id="torch"),
    pytest.param(partial(TritonBackend, cost=CUTS), marks=pytest.mark.interpreted, id="triton"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    # Whatever is allocated and not yet written is NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def store_of(step: Step, kind: torch.dtype, scales: tuple[float, float] | None = None) -> KVStore:
    """The step's store in 8 bits."""
    shape = step.shape
    layer = LayerShape(shape.kv_heads, shape.key_dim, shape.value_dim)
    blocks = len(step.keys) // step.size
    store = KVStore([layer], blocks, step.size, shape.dtype, kv_dtype=kind)
    if scales is not None:
        for side, scale in zip(("key", "value"), scales, strict=True):
            store.scales[side, 0] = scale * torch.arange(1.0, shape.kv_heads + 1)  # type: ignore[index]
    store.keys[0].flatten(0, 1).copy_(store.kept("key", 0, step.keys))
    store.values[0].flatten(0, 1).copy_(store.kept("value", 0, step.values))
    return store


def rounded(step: Step, store: KVStore) -> Step:
    """The step with keys and values as the store will give them back."""
    return replace(
        step,
        key=store.rounded("key", 0, step.key),
        value=store.rounded("value", 0, step.value),
        keys=store.rounded("key", 0, step.keys),
        values=store.rounded("value", 0, step.values),
    )


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


# A capped logit may overflow, to the right limit; here of keys that nobody sees.
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("scales", [None, (0.02, 0.5)], ids=["plain", "scaled"])
def test_backends_compute_with_what_is_kept(
    kind: torch.dtype, scales: tuple[float, float] | None, backend: Any
) -> None:
    step = Step.of(forest(2, 4, depth=2, rows=4, queries=(1, 5)), 4, Shape(2, 2))
    step = with_cached_rows(step, [True, False, True, True])
    for attention in (attend(), attend(span=Span(window=6), softcap=3.0)):
        store = store_of(step, kind, scales)
        expected, reference = rounded(step, store).run(ReferenceBackend, attention)
        served = backend(store)
        assert served.store.kv_dtype is kind
        batch = step.batch(CUTS)
        found = served.forward(attention, batch, step.query, step.key, step.value)
        assert off(found, expected) < 2e-6
        for side in ("key", "value"):
            kept = store.restored(side, 0, store.caches(side)[0]).nan_to_num(99)
            assert torch.equal(kept, reference.store.caches(side)[0].nan_to_num(99))


@pytest.mark.parametrize("kind", BOUND, ids=["e4m3", "e5m2"])
def test_how_far_outputs_are_off(kind: torch.dtype) -> None:
    worst = 0.0
    for seed in range(5):
        step = Step.of(forest(seed, 4, depth=2, rows=5), 4, Shape(2, 2), seed)
        expected, _ = step.run(ReferenceBackend, attend())
        store = store_of(step, kind)
        found = TorchBackend(store).forward(
            attend(), step.batch(), step.query, step.key, step.value
        )
        worst = max(worst, off(found, expected))
    assert BOUND[kind] / 5 < worst < BOUND[kind]


def test_numbers_that_are_too_large_become_the_largest() -> None:
    large = torch.tensor([[[1e6, -500.0, 448.0, 1.0]]])
    layer = LayerShape(1, 4, 4)
    store = KVStore([layer], 1, 1, torch.float32, kv_dtype=E4M3)
    assert store.rounded("key", 0, large).tolist() == [[[448.0, -448.0, 448.0, 1.0]]]
    store.scales["key", 0] = torch.tensor([4.0])
    assert store.rounded("key", 0, large).tolist() == [[[1792.0, -512.0, 448.0, 1.0]]]
    store = KVStore([layer], 1, 1, torch.float32, kv_dtype=E5M2)
    assert store.rounded("value", 0, large).tolist() == [[[57344.0, -512.0, 448.0, 1.0]]]


@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_copies_keep_every_bit(kind: torch.dtype) -> None:
    store = KVStore([LayerShape(1, 4, 4)], 3, 2, torch.float32, kv_dtype=kind)
    key = torch.randn(2, 1, 4)
    store.write(0, key, -key, torch.tensor([0, 1]))
    store.copy_blocks([(0, 2)])
    store.copy_slots(0, torch.tensor([5]), torch.tensor([2]))
    for cache in (store.keys[0], store.values[0]):
        words = cache.view(torch.uint8)
        assert torch.equal(words[2], words[0])
        assert torch.equal(words[1, 0], words[0, 1])
    values = store.restored("value", 0, store.values[0][0])
    assert torch.equal(values, -store.rounded("key", 0, key))


def test_names_and_sizes() -> None:
    assert parse_kv_dtype("auto") is None
    assert parse_kv_dtype("fp8") is E4M3
    assert parse_kv_dtype("fp8_e5m2") is E5M2
    with pytest.raises(ConfigError, match="unknown kv_dtype 'int3'; use auto, fp8 or fp8_e5m2"):
        parse_kv_dtype("int3")
    layers = [LayerShape(2, 16, 8)]
    assert KVStore.bytes_per_block(layers, 16, E4M3) == 16 * 2 * 24


def test_who_serves_it() -> None:
    even = KVStore([LayerShape(1, 32, 32)], 1, 1, torch.bfloat16, kv_dtype=E4M3)
    assert type(choose_backend(even)) is TorchBackend
    half = KVStore([LayerShape(1, 8, 8)], 1, 1, torch.float32, kv_dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"in torch.bfloat16 for a model in torch.float32"):
        TritonBackend(half)
