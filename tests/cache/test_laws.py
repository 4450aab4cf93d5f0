"""Every law's check fires when the state is broken by hand."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from helpers import cached, compute, make_cache

from radixkv.cache import PrefixCache, Sequence
from radixkv.cache.children import Children
from radixkv.cache.node import RadixNode, RootNode
from radixkv.cache.pool import FREE_OR_HELD, FULL, OPEN
from radixkv.errors import CacheInvariantError

A, B, C, D = ([letter] * 4 for letter in range(1, 5))


class World:
    """A cache in which everything occurs: held and unheld, full and open, shared and pending."""

    def __init__(self) -> None:
        cache = self.cache = make_cache(num_blocks=24)
        cached(cache, A + B)
        self.running: Sequence = compute(cache, A + C)
        self.unheld = self.node(B)
        self.root_child = self.node(A)
        self.held = self.node(C)
        self.private = cache.acquire([*D, 5])
        self.opened = compute(cache, [9, 9], include_open=True)
        cached(cache, [8, 8], include_open=True)
        self.pending = cache.acquire(A + D)
        cache.commit(self.pending, pending=True)
        cache.check()

    def node(self, tokens: list[int]) -> RadixNode:
        first = array("i", tokens).tobytes()
        return next(n for n in self.cache.tree.nodes() if bytes(n.tokens) == first)

    @property
    def open_node(self) -> RadixNode:
        return self.cache.tree.open_nodes[self.opened.table[0]]

    @property
    def root(self) -> RootNode:
        return self.cache.tree.roots[()]


def swap(table: array[int], i: int, j: int) -> None:
    table[i], table[j] = table[j], table[i]


def change(mapping: object, key: object, value: object) -> None:
    mapping[key] = value  # type: ignore[index]


def add_double(world: World) -> None:
    """A second child with the tokens of an unheld one."""
    cache = world.cache
    blocks = cache.pool.allocate(1)
    cache.pool.enter_tree(blocks)
    twin = RadixNode(
        world.root_child, world.unheld.tokens[:], blocks, 1, 0, 99, world.held.retention
    )
    assert world.root_child.children is not None
    world.root_child.children._collided.append(twin)
    world.root_child.children._alike[bytes(twin.tokens[:4])].append(twin)
    cache.tree.num_evictable += 1
    cache.tree.queue.put(twin)


def miscount_children(world: World) -> None:
    assert world.root_child.children is not None
    world.root_child.children._num_open += 1


def hide_from_likeness(world: World) -> None:
    """A child that is found by its hash, and alike to others by mistake."""
    children = world.root_child.children
    assert children is not None
    alike = children._alike
    keys = list(alike)
    alike[keys[0]], alike[keys[1]] = alike[keys[1]], alike[keys[0]]


def hide_from_search(world: World) -> None:
    """A child that stands in the container, but under the hash of others."""
    children = world.root_child.children
    assert children is not None
    by_hash = children._by_hash
    keys = list(by_hash)
    by_hash[keys[0]], by_hash[keys[1]] = by_hash[keys[1]], by_hash[keys[0]]


def keep_an_empty_root(world: World) -> None:
    world.cache.tree.roots[("empty",)] = RootNode(("empty",))


def keep_an_empty_container(world: World) -> None:
    world.unheld.children = Children(16, hash)
    world.cache.tree.queue.discard(world.unheld)


def queue_twice(world: World) -> None:
    assert world.unheld.entry is not None
    world.cache.tree.queue._heap.append(list(world.unheld.entry))


def open_with_children(world: World) -> None:
    world.open_node.children = Children(16, hash)


def hold_a_block_twice(world: World) -> None:
    pool, table = world.cache.pool, world.private.table
    gone = table[1]
    table[1] = table[0]
    pool.refs[table[0]] = 2
    pool.refs[gone] = 0
    pool._free.append(gone)


def end_outside_the_tree(world: World) -> None:
    world.running.node = RootNode(())
    world.held.pins -= 1
    world.root_child.pins -= 1


def make_evictable(world: World) -> None:
    world.cache.tree.queue.put(world.held)


def move_free_to_nowhere(world: World) -> None:
    del world.cache.pool._free[-1:]


BROKEN: list[tuple[int, str, Callable[[World], object]]] = [
    (
        1,
        "refcounts differ from tables and tree",
        lambda w: change(w.cache.pool.refs, w.private.table[0], 2),
    ),
    (
        1,
        "refcounts differ from tables and tree",
        lambda w: change(w.cache.pool.refs, w.opened.table[0], 1),
    ),
    (
        1,
        "refcounts differ from tables and tree",
        lambda w: change(w.cache.pool.refs, w.running.table[0], 1),
    ),
    (
        1,
        "the pool and the tree disagree on what is cached",
        lambda w: change(w.cache.pool.place, 0, FREE_OR_HELD),
    ),
    (
        1,
        "the pool and the tree disagree on what is cached",
        lambda w: change(w.cache.pool.place, 0, OPEN),
    ),
    (1, "pins differ from the tables", lambda w: setattr(w.held, "pins", 2)),
    (1, "pins differ from the tables", lambda w: setattr(w.root_child, "pins", 5)),
    (
        1,
        "a table has blocks that its tokens do not need",
        lambda w: w.private.data.__delitem__(slice(16, 20)),
    ),
    (
        2,
        "a block is on the free list twice",
        lambda w: w.cache.pool._free.append(w.cache.pool._free[0]),
    ),
    (2, "a free block is in use", lambda w: w.cache.pool._free.append(0)),
    (2, "a block is neither free nor in use", move_free_to_nowhere),
    (
        2,
        "the count of evictable blocks is off",
        lambda w: setattr(w.cache.tree, "num_evictable", 1),
    ),
    (
        3,
        "block 2 is in two places of the tree",
        lambda w: change(w.unheld.blocks, 0, w.held.blocks[0]),
    ),
    (
        3,
        "an open block lost its node",
        lambda w: change(w.cache.tree.open_nodes, w.opened.table[0], w.held),
    ),
    (3, "an open block is not in the tree", lambda w: change(w.cache.tree.open_nodes, 23, w.held)),
    (3, "a node without tokens", lambda w: w.open_node.tokens.__delitem__(slice(2, None))),
    (
        3,
        "a node without tokens",
        lambda w: (
            w.unheld.tokens.clear(),
            w.cache.pool.place.__setitem__(w.unheld.blocks[0], 0),
            w.unheld.blocks.pop(),
            w.cache.pool._free.append(1),
        ),
    ),
    (3, "tokens and blocks disagree", lambda w: w.unheld.tokens.__iadd__(bytes(16))),
    (3, "a node is at the wrong depth", lambda w: setattr(w.unheld, "start", 2)),
    (3, "a child has another parent", lambda w: setattr(w.open_node, "parent", RootNode(("x",)))),
    (3, "a table holds a block twice", hold_a_block_twice),
    (3, "a table differs from the path it holds", lambda w: swap(w.running.table, 0, 1)),
    (4, "more computed than there are tokens", lambda w: setattr(w.private, "num_computed", 6)),
    (4, "visible, but not computed", lambda w: setattr(w.running, "num_computed", 3)),
    (4, "promised, but not to be withdrawn", lambda w: setattr(w.pending, "num_settled", None)),
    (
        4,
        "rests on a promise without knowing it",
        lambda w: (
            setattr(w.pending, "num_settled", None),
            setattr(w.pending, "promised_from", None),
        ),
    ),
    (
        4,
        "a block is pending that no sequence waits for",
        lambda w: w.cache.allocator.pending.add(w.unheld.blocks[0]),
    ),
    (
        4,
        "a late copy into a settled block",
        lambda w: change(w.cache.allocator.late, w.private.table[0], 0),
    ),
    (5, "a child cannot be found by its tokens", hide_from_search),
    (5, "a shared block has other tokens", lambda w: change(w.running.data, 0, 7)),
    (5, "wrong namespace", lambda w: setattr(w.running, "namespace", ("x",))),
    (6, "a sequence ends at a node that has left the tree", end_outside_the_tree),
    (6, "the queue differs from the unheld leaves", make_evictable),
    (6, "the queue differs from the unheld leaves", lambda w: w.cache.tree.queue.discard(w.unheld)),
    (6, "a leaf is queued twice", queue_twice),
    (6, "a lost place", lambda w: setattr(w.unheld, "entry", None)),
    (8, "an open block has children", open_with_children),
    (8, "an empty container of children", keep_an_empty_container),
    (9, "two children hold the same tokens", add_double),
    (9, "children are counted wrongly", miscount_children),
    (5, "a child cannot be found by likeness", hide_from_likeness),
    (10, "a child was used after its parent", lambda w: setattr(w.unheld, "last_used", 999)),
    (12, "an empty namespace was kept", keep_an_empty_root),
    (13, "more hits than queries", lambda w: setattr(w.cache.counters, "query_tokens", 0)),
    (13, "more copied than hit", lambda w: setattr(w.cache.counters, "copied_tokens", 999)),
]


@pytest.mark.parametrize(("law", "message", "breaks"), BROKEN, ids=[text for _, text, _ in BROKEN])
def test_a_broken_law_is_seen(law: int, message: str, breaks: Callable[[World], object]) -> None:
    world = World()
    breaks(world)
    with pytest.raises(CacheInvariantError) as caught:
        world.cache.check()
    assert str(caught.value) == f"law {law}: {message}"


def test_a_table_may_not_hold_the_trees_block_without_its_ancestors() -> None:
    cache = make_cache()
    cached(cache, A + B)
    sequence = cache.acquire(C)
    spare = sequence.table[0]
    sequence.table[0] = 1
    cache.pool.refs[spare] = 0
    cache.pool._free.append(spare)
    cache.tree.num_evictable -= 1
    with pytest.raises(CacheInvariantError, match="law 3: holds the tree's blocks"):
        cache.check()


def test_a_held_block_may_not_be_evictable() -> None:
    cache = make_cache()
    sequence = compute(cache, A + B)
    node = sequence.node
    assert node is not None
    node.pins = 0
    with pytest.raises(CacheInvariantError, match="law 1"):
        cache.check()


def test_blocks_held_by_nobody_are_seen() -> None:
    cache = make_cache()
    block = cache.pool.allocate(1)[0]
    with pytest.raises(CacheInvariantError, match="law 1: refcounts differ"):
        cache.check()
    cache.pool.refs[block] = 0
    with pytest.raises(CacheInvariantError, match="law 2: a block is neither free nor in use"):
        cache.check()


def test_unpinning_too_often_raises() -> None:
    cache = make_cache()
    sequence = compute(cache, A)
    node = sequence.node
    assert node is not None
    cache.release(sequence)
    with pytest.raises(CacheInvariantError, match=r"^a node was unpinned more often than pinned$"):
        cache.tree.unpin(node)
    assert node.pins == 0


def test_a_sound_cache_passes() -> None:
    World().cache.check()
    cache = PrefixCache(make_cache().config)
    cache.check()
    assert FULL != OPEN
