"""KVStore: what is written where, and what it costs."""

from __future__ import annotations

import pytest
import torch

from radixkv.attention import KVStore, LayerShape
from radixkv.errors import ConfigError

SHAPES = [LayerShape(2, 3, 5), LayerShape(1, 4, 4)]


def filled() -> KVStore:
    """Six blocks of two slots; every number tells its slot, layer and kind."""
    store = KVStore(SHAPES, 6, 2, torch.float32)
    for layer in range(2):
        for offset, cache in ((0, store.keys[layer]), (500, store.values[layer])):
            slots = torch.arange(12.0).view(6, 2, 1, 1)
            cache.copy_((slots + offset + 100 * layer).expand(cache.shape))
    return store


def slots_of(cache: torch.Tensor) -> list[int]:
    """Which slot's number each slot holds."""
    return [int(x) % 100 for x in cache[..., 0, 0].flatten()]


def test_tensors_are_paged_and_as_wide_as_asked() -> None:
    store = KVStore(SHAPES, 6, 2, torch.bfloat16)
    assert [tuple(x.shape) for x in store.keys] == [(6, 2, 2, 3), (6, 2, 1, 4)]
    assert [tuple(x.shape) for x in store.values] == [(6, 2, 2, 5), (6, 2, 1, 4)]
    assert {x.dtype for x in (*store.keys, *store.values)} == {torch.bfloat16}
    assert store.layers == tuple(SHAPES)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_memory_is_what_it_says(dtype: torch.dtype, width: int) -> None:
    assert SHAPES[0].bytes_per_token(dtype) == 2 * (3 + 5) * width
    expected = 2 * (2 * 8 + 8) * width
    assert KVStore.bytes_per_block(SHAPES, 2, dtype) == expected
    store = KVStore(SHAPES, 6, 2, dtype)
    held = sum(x.untyped_storage().nbytes() for x in (*store.keys, *store.values))
    assert held == 6 * expected


def test_a_store_without_layers_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least one layer"):
        KVStore([], 1, 1, torch.float32)


def test_write_puts_each_token_into_its_slot_of_one_layer() -> None:
    store = filled()
    key = torch.tensor([1000.0, 1001.0]).view(2, 1, 1).expand(2, 2, 3)
    value = torch.tensor([2000.0, 2001.0]).view(2, 1, 1).expand(2, 2, 5).to(torch.float64)
    store.write(0, key, value, torch.tensor([7, 2]))
    keys, values = store.keys[0].flatten(0, 1), store.values[0].flatten(0, 1)
    assert keys[7].tolist() == [[1000.0] * 3] * 2
    assert keys[2].tolist() == [[1001.0] * 3] * 2
    assert values[7].tolist() == [[2000.0] * 5] * 2
    assert values[2].tolist() == [[2001.0] * 5] * 2
    untouched = [slot for slot in range(12) if slot not in (7, 2)]
    before = filled()
    assert torch.equal(keys[untouched], before.keys[0].flatten(0, 1)[untouched])
    assert torch.equal(store.keys[1], before.keys[1])
    assert torch.equal(store.values[1], before.values[1])


def test_writing_nothing_changes_nothing() -> None:
    store = filled()
    nothing = torch.empty(0, dtype=torch.int64)
    store.write(0, torch.empty(0, 2, 3), torch.empty(0, 2, 5), nothing)
    store.copy_slots(0, nothing, nothing)
    store.copy_blocks([])
    assert torch.equal(store.keys[0], filled().keys[0])


def test_copy_slots_reads_all_sources_before_it_writes_and_stays_in_its_layer() -> None:
    store = filled()
    store.copy_slots(1, torch.tensor([1, 2, 3]), torch.tensor([2, 3, 9]))
    expected = [0, 1, 1, 2, 4, 5, 6, 7, 8, 3, 10, 11]
    assert slots_of(store.keys[1]) == expected
    assert slots_of(store.values[1]) == expected
    assert slots_of(store.keys[0]) == list(range(12))


def test_copy_blocks_copies_all_layers_and_reads_all_sources_first() -> None:
    store = filled()
    store.copy_blocks([(1, 2), (2, 4)])
    expected = [0, 1, 2, 3, 2, 3, 6, 7, 4, 5, 10, 11]
    for cache in (*store.keys, *store.values):
        assert slots_of(cache) == expected
