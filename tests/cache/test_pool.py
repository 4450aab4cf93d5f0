"""BlockPool: references and the free list."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from radixkv.cache.pool import FREE_OR_HELD, FULL, OPEN, BlockPool
from radixkv.errors import CacheInvariantError, ConfigError, OutOfBlocksError


def blocks(*ids: int) -> array[int]:
    return array("i", ids)


def test_blocks_come_out_ascending_and_held_once() -> None:
    pool = BlockPool(5)
    assert pool.num_free == 5
    assert pool.free_blocks() == [0, 1, 2, 3, 4]
    assert pool.allocate(3) == blocks(0, 1, 2)
    assert pool.allocate(0) == blocks()
    assert pool.refs == [1, 1, 1, 0, 0]
    assert pool.num_free == 2


def test_what_was_freed_last_goes_out_first_in_the_same_order() -> None:
    pool = BlockPool(6)
    held = pool.allocate(6)
    pool.release(held[2:5])
    assert pool.free_blocks() == [2, 3, 4]
    assert pool.allocate(2) == blocks(2, 3)


@pytest.mark.parametrize("size", [0, -1])
def test_a_pool_has_blocks(size: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        BlockPool(size)


def test_too_many_blocks_are_refused_whole() -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(OutOfBlocksError) as caught:
        pool.allocate(4)
    error = caught.value
    assert (error.needed, error.free, error.evictable, error.held) == (4, 3, 0, 1)
    assert pool.num_free == 3
    assert pool.allocate(3) == blocks(1, 2, 3)


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    held = pool.allocate(2)
    pool.retain(held[:1])
    pool.release(held)
    assert pool.refs == [1, 0]
    assert pool.free_blocks() == [1]
    pool.release(held[:1])
    assert pool.num_free == 2


def test_retaining_a_free_block_raises() -> None:
    pool = BlockPool(2)
    with pytest.raises(CacheInvariantError, match="block 1 was retained"):
        pool.retain([1])


def test_a_double_free_raises_and_changes_nothing() -> None:
    pool = BlockPool(3)
    held = pool.allocate(2)
    pool.retain(held[1:])
    with pytest.raises(CacheInvariantError, match="double free of block 0"):
        pool.release(blocks(1, 0, 0))
    assert pool.refs == [1, 2, 0]
    assert pool.num_free == 1


def test_full_blocks_belong_to_the_tree_alone() -> None:
    pool = BlockPool(3)
    held = pool.allocate(2)
    pool.enter_tree(held)
    assert pool.refs == [0, 0, 0]
    assert list(pool.place) == [FULL, FULL, FREE_OR_HELD]
    pool.refs[1] = 2  # two tables keep it
    pool.leave_tree(held)
    assert list(pool.place) == [FREE_OR_HELD] * 3
    assert pool.free_blocks() == [0, 2]


def test_freed_blocks_of_the_tree_come_out_in_their_order() -> None:
    pool = BlockPool(4)
    held = pool.allocate(4)
    pool.enter_tree(held)
    pool.leave_tree(held[1:])
    assert pool.allocate(3) == blocks(1, 2, 3)


def test_an_open_block_is_counted_once_more() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.enter_open(0)
    assert (pool.refs[0], pool.place[0]) == (2, OPEN)
    pool.release(blocks(0))
    pool.leave_open(0)
    assert (pool.refs[0], pool.place[0]) == (0, FREE_OR_HELD)
    assert pool.num_free == 2


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda pool: pool.enter_tree([2]), "2 cannot enter the tree: refcount 0, place 0"),
        (lambda pool: pool.enter_tree([1]), "1 cannot enter the tree: refcount 2, place 0"),
        (lambda pool: pool.enter_open(2), "2 cannot become the tree's open block"),
        (
            lambda pool: (pool.enter_open(0), pool.enter_open(0)),
            "0 cannot become the tree's open block",
        ),
        (
            lambda pool: (pool.enter_open(0), pool.release(blocks(0)), pool.enter_tree([0])),
            "0 cannot enter the tree: refcount 1, place 2",
        ),
        (lambda pool: pool.leave_tree(blocks(0)), "0 left the tree but was not in it"),
        (lambda pool: pool.leave_open(0), "0 is not an open block of the tree"),
    ],
)
def test_blocks_enter_and_leave_the_tree_properly(
    misuse: Callable[[BlockPool], None], message: str
) -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    pool.retain([1])
    with pytest.raises(CacheInvariantError, match=f"^block {message}$"):
        misuse(pool)


def test_long_tables_get_a_contiguous_run() -> None:
    pool = BlockPool(400)
    held = pool.allocate(400)
    pool.release(held[0:100:2])  # fifty holes
    pool.release(held[150:260])
    pool.release(held[101:140:2])
    got = pool.allocate(64)
    assert got == blocks(*range(150, 214))
    assert sorted(pool.free_blocks()) == [*range(0, 100, 2), *range(101, 140, 2), *range(214, 260)]
    assert all(pool.refs[block] == 1 for block in got)


def test_the_lowest_run_is_taken() -> None:
    pool = BlockPool(300)
    held = pool.allocate(300)
    pool.release(held[0:100])
    pool.release(held[150:250])
    pool.release(held[120:122])
    assert pool.allocate(64) == blocks(*range(64))


def test_a_run_at_the_top_is_taken_as_it_is() -> None:
    pool = BlockPool(256)
    held = pool.allocate(256)
    pool.release(held[0:64])  # a lower run, further down
    pool.release(held[192:256])
    pool.release(held[96:160])
    assert pool.allocate(64) == blocks(*range(96, 160))
    assert pool.free_blocks() == [*range(192, 256), *range(64)]


def test_without_a_run_any_blocks_will_do() -> None:
    pool = BlockPool(200)
    held = pool.allocate(200)
    pool.release(held[1::2])
    got = pool.allocate(70)
    assert sorted(got) == got.tolist() == list(range(1, 141, 2))


def test_short_tables_are_not_worth_a_search() -> None:
    pool = BlockPool(200)
    held = pool.allocate(200)
    pool.release(held[0:63])
    pool.release(held[100:110])
    got = pool.allocate(63)
    assert got[:10] == blocks(*range(100, 110))


def test_the_search_is_bounded() -> None:
    pool = BlockPool(2000)
    held = pool.allocate(2000)
    pool.release(held[:100])  # a run, but deep down
    pool.release(held[200:1900:2])
    got = pool.allocate(64)
    assert got[0] >= 200
    assert pool.num_free == 100 + 850 - 64
    assert len(set(pool.free_blocks())) == pool.num_free
