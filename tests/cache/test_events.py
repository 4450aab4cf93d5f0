"""Events: whoever only listens knows what is cached."""

from __future__ import annotations

import random

from helpers import cached, compute, make_cache

from radixkv.cache import (
    EPHEMERAL,
    BlocksRemoved,
    BlocksStored,
    PrefixCache,
    Removal,
    chain_hashes,
    namespace_hash,
    token_bytes,
)
from radixkv.cache.events import Event
from radixkv.errors import OutOfBlocksError

A, B, C = ([letter] * 4 for letter in range(1, 4))


class Mirror:
    """hash -> (parent's hash, block), kept from events alone."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, int]] = {}
        self.reasons: list[str] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, BlocksStored):
            parent = event.parent
            for name, block in zip(event.hashes, event.blocks, strict=True):
                assert name not in self.blocks, "stored twice"
                self.blocks[name] = (parent, block)
                parent = name
        else:
            self.reasons.append(event.reason)
            for name in event.hashes:
                del self.blocks[name]


def names_in(cache: PrefixCache) -> dict[int, tuple[int, int]]:
    """The same, read from the tree."""
    names: dict[int, tuple[int, int]] = {}
    for node in cache.tree.nodes():
        path = node.path()
        root = path[0].parent
        assert root is not None
        parent = namespace_hash(root.namespace)  # type: ignore[attr-defined]
        tokens = b"".join(bytes(above.tokens) for above in path)
        hashes = chain_hashes(parent, tokens, cache.block_bytes)
        hashes = [parent, *hashes]
        for index in range(cache.tree.num_full(node)):
            place = node.start + index
            names[hashes[place + 1]] = (hashes[place], node.blocks[index])
    return names


def test_what_is_said() -> None:
    said: list[Event] = []
    cache = make_cache(num_blocks=3, events=said.append)
    root = namespace_hash(("m",))
    one, two, three = chain_hashes(root, token_bytes(A + B + C), 16)
    sequence = cache.acquire([*A, *B, 7], ("m",))
    cache.commit(sequence, 4)
    cache.commit(sequence, include_open=True)
    assert said == [
        BlocksStored(("m",), root, (one,), (0,), token_bytes(A)),
        BlocksStored(("m",), one, (two,), (1,), token_bytes(B)),
    ]
    said.clear()
    cache.release(sequence)
    sequence = cache.acquire(A + B + C, ("m",))
    assert said == [], "an open block has no name"
    cache.commit(sequence)
    assert said == [BlocksStored(("m",), two, (three,), (2,), token_bytes(C))]
    said.clear()
    cache.release(sequence)
    cache.allocator.release(cache.allocator.allocate(2))
    assert said == [BlocksRemoved(("m",), (two, three), "evicted")]
    said.clear()
    cache.reset()
    assert said == [BlocksRemoved(("m",), (one,), "reset")]


def test_a_withdrawal_is_said() -> None:
    said: list[Event] = []
    cache = make_cache(events=said.append)
    sequence = compute(cache, A)
    cache.withdraw(sequence, 0)
    assert [event.reason for event in said if isinstance(event, BlocksRemoved)] == ["withdrawn"]


def test_why_an_open_end_went_is_said() -> None:
    went: list[Removal] = []
    cache = make_cache(num_blocks=4)
    cache.watch_removals(went.append)
    cached(cache, [*A, 7], include_open=True)
    cached(cache, [*A, 7, 8], include_open=True)  # in its place
    cached(cache, A + B)  # sets the open end apart
    cached(cache, [*A, 7, 8, 9], include_open=True)
    assert [(its.reason, len(its.tokens) // 4) for its in went] == [
        ("superseded", 1),
        ("superseded", 2),
    ]
    went.clear()
    sequence = compute(cache, [5, 6], include_open=True)
    sequence.append(7)  # in place, for the pool is full
    assert [(its.reason, its.tokens) for its in went] == [("withdrawn", token_bytes([5, 6]))]


def test_all_who_listen_hear_the_same() -> None:
    first: list[Event] = []
    second: list[Event] = []
    cache = make_cache(events=first.append)
    sequence = compute(cache, A)
    cache.listen(second.append)
    late = compute(cache, B)
    cache.release(sequence)
    cache.release(late)
    cache.reset()
    assert [type(event) for event in first] == [BlocksStored, BlocksStored, *[BlocksRemoved] * 2]
    assert second == first[1:]


def test_a_removal_says_what_went_and_when_it_was_used() -> None:
    went: list[Removal] = []
    cache = make_cache(num_blocks=4)
    cache.watch_removals(went.append)
    sequence = cache.acquire([*A, *B, 7], ("m",))
    cache.commit(sequence, include_open=True)
    cache.release(sequence)
    again = cache.acquire([*A, *B, 7, 8], ("m",))
    used = cache.tree.clock
    cache.commit(again, include_open=True)
    open_tokens = token_bytes([7])
    assert [(its.reason, its.num_blocks, its.tokens) for its in went] == [
        ("superseded", 1, open_tokens)
    ]
    went.clear()
    cache.release(again, EPHEMERAL)
    cache.allocator.release(cache.allocator.allocate(2))
    (removal,) = went
    assert (removal.namespace, removal.reason, removal.num_blocks) == (("m",), "evicted", 1)
    assert removal.tokens == token_bytes([7, 8])
    assert removal.start == 2
    assert removal.retention is EPHEMERAL
    assert removal.last_used >= used
    went.clear()
    cache.reset()
    assert [(its.reason, its.tokens, its.start, its.hits) for its in went] == [
        ("reset", token_bytes(A + B), 0, 1)
    ]


def test_a_removal_says_where_the_blocks_stood_and_when_they_were_stored() -> None:
    went: list[Removal] = []
    cache = make_cache(num_blocks=4)
    cache.watch_removals(went.append)
    cached(cache, A)
    cached(cache, C)
    sequence = cache.acquire(A + B + C, retention=EPHEMERAL)
    cache.commit(sequence)
    node = sequence.node
    assert node is not None
    assert (node.start, len(node.blocks)) == (1, 2)
    cache.release(sequence)
    cache.allocator.release(cache.allocator.allocate(1))
    (removal,) = went
    assert (removal.tokens, removal.start) == (token_bytes(C), 2)
    assert removal.created == node.created > 0
    assert removal.last_used == node.last_used > removal.created


def test_a_mirror_kept_from_events_equals_the_tree() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        mirror = Mirror()
        size = rng.choice([1, 2, 3])
        cache = make_cache(num_blocks=rng.choice([4, 9, 20]), block_size=size, events=mirror)
        live = []
        for _ in range(80):
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 4 * size))]
            namespace = rng.choice([(), ("a",)])
            try:
                live.append(cache.acquire(tokens, namespace))
                cache.commit(live[-1], include_open=rng.random() < 0.5)
            except OutOfBlocksError:
                pass
            while live and rng.random() < 0.5:
                sequence = live.pop(rng.randrange(len(live)))
                if rng.random() < 0.1:
                    cache.withdraw(sequence, 0)
                cache.release(sequence)
            live = [s for s in live if not s.withdrawn] + [s for s in live if s.withdrawn]
            if rng.random() < 0.02:
                cache.reset()
            assert mirror.blocks == names_in(cache)
        assert "evicted" in mirror.reasons


def test_without_a_listener_nothing_is_hashed() -> None:
    cache = make_cache()
    cached(cache, A)
    assert cache.config.events is None
