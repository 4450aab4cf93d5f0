"""KV events: who listens knows what is cached, and knows when it does not."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgspec
import pytest
import zmq
from observing import GREEDY, scrape, value, with_app

from radixkv.cache import PrefixCache, chain_hashes, namespace_hash, token_bytes
from radixkv.cache.node import RootNode
from radixkv.config import CacheConfig
from radixkv.errors import ConfigError
from radixkv.server.config import ServerConfig
from radixkv.server.kv_events import KVEventPublisher, _replay_at
from radixkv.server.kv_wire import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    to_wire,
)
from radixkv.server.service import Service

ANYWHERE = "tcp://127.0.0.1:*"
A, B, C = ([letter] * 4 for letter in range(1, 4))


class Subscriber:
    """What a router in front does: a mirror of hash -> (parent, tokens), and the last number."""

    def __init__(self, publisher: KVEventPublisher) -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.connect(publisher.endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(publisher.replay_endpoint)
        self._decoder = msgspec.msgpack.Decoder(EventBatch)
        self.mirror: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.last = -1
        self.numbers: list[int] = []
        self.sizes: list[int] = []

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        """Batches from a number on."""
        self._replay.send_multipart((b"", first.to_bytes(8, "big")))
        got = []
        while True:
            assert self._replay.poll(5000), "no end of the replay"
            _, number, batch = self._replay.recv_multipart()
            if number == END_OF_REPLAY:
                assert batch == b""
                return got
            got.append((int.from_bytes(number, "big"), batch))

    def catch_up(self) -> None:
        """Everything so far, by a replay of what was not received."""
        for number, batch in self.replay(self.last + 1):
            self.take(number, batch)

    def receive(self, seconds: float = 5) -> bool:
        if not self._sub.poll(int(seconds * 1000)):
            return False
        topic, number, batch = self._sub.recv_multipart()
        assert topic == b""
        self.take(int.from_bytes(number, "big"), batch)
        return True

    def take(self, number: int, encoded: bytes) -> None:
        if number <= self.last:
            return
        self.last = number
        self.numbers.append(number)
        batch = self._decoder.decode(encoded)
        assert batch.data_parallel_rank == 0
        assert abs(batch.ts - time.time()) < 60
        self.sizes.append(len(batch.events))
        for event in batch.events:
            self.hear(event)

    def hear(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self.mirror.clear()
        elif isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                del self.mirror[name]
        else:
            parent, size = event.parent_block_hash, event.block_size
            assert len(event.token_ids) == size * len(event.block_hashes)
            for place, name in enumerate(event.block_hashes):
                tokens = tuple(event.token_ids[place * size : (place + 1) * size])
                assert name not in self.mirror
                self.mirror[name] = (parent, tokens)
                parent = name

    def close(self) -> None:
        self._context.destroy(linger=0)


def mirror_of(cache: PrefixCache) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    """The same, read from the tree."""
    mirror: dict[int, tuple[int | None, tuple[int, ...]]] = {}
    for node in cache.tree.nodes():
        path = node.path()
        root = path[0].parent
        assert isinstance(root, RootNode)
        data = b"".join(bytes(above.tokens) for above in path)
        names = chain_hashes(namespace_hash(root.namespace), data, cache.block_bytes)
        for place in range(node.start, node.start + cache.tree.num_full(node)):
            part = memoryview(data)[place * cache.block_bytes : (place + 1) * cache.block_bytes]
            parent = names[place - 1] if place else None
            mirror[names[place]] = (parent, tuple(part.cast("i")))
    return mirror


@contextmanager
def publishing(**settings: Any) -> Iterator[tuple[KVEventPublisher, PrefixCache]]:
    publisher = KVEventPublisher(ANYWHERE, 4, **settings)
    cache = PrefixCache(CacheConfig(num_blocks=8, block_size=4, events=publisher.sink))
    publisher.start()
    try:
        yield publisher, cache
    finally:
        publisher.close()


def store(cache: PrefixCache, tokens: list[int], namespace: tuple[str, ...] = ()) -> None:
    sequence = cache.acquire(tokens, namespace)
    cache.commit(sequence)
    cache.release(sequence)


def wait_for(publisher: KVEventPublisher, number: int) -> None:
    deadline = time.monotonic() + 10
    while publisher.published < number:
        assert time.monotonic() < deadline
        time.sleep(0.002)


# -- the form ----------------------------------------------------------------------------------


def test_the_bytes_are_vllms_arrays() -> None:
    said: list[Any] = []
    cache = PrefixCache(CacheConfig(num_blocks=3, block_size=4, events=said.append))
    store(cache, A + B)
    store(cache, A + C)
    cache.reset()
    store(cache, C, ("salt:s",))
    root = namespace_hash(())
    a, b = chain_hashes(root, token_bytes(A + B), 16)
    (c,) = chain_hashes(a, token_bytes(C), 16)
    (salted,) = chain_hashes(namespace_hash(("salt:s",)), token_bytes(C), 16)
    batch = EventBatch(1.5, to_wire(said, 4), 0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == [
        1.5,
        [
            ["BlockStored", [a, b], None, A + B, 4, None, "GPU", None, None],
            ["BlockStored", [c], a, C, 4, None, "GPU", None, None],
            ["AllBlocksCleared"],
            ["BlockStored", [salted], None, C, 4, None, "GPU", None, [["salt:s"]]],
        ],
        0,
    ]
    assert len({a, b, c, salted}) == 4
    said.clear()
    store(cache, A + B + C)
    assert msgspec.to_builtins(to_wire(said, 4))[0] == ["BlockRemoved", [salted], "GPU"]


class OldBatch(msgspec.Struct, array_like=True):
    """What a reader of vLLM 0.9 declares."""

    ts: float
    events: list[list[Any]]


def test_a_reader_of_the_earliest_form_reads_it() -> None:
    stored = BlockStored([1], None, A, 4, None, "GPU", None, [("x",)])
    encoded = msgspec.msgpack.encode(EventBatch(0.0, [stored], 0))
    (event,) = msgspec.msgpack.decode(encoded, type=OldBatch).events
    assert event[:6] == ["BlockStored", [1], None, A, 4, None]


HASHES = """
from radixkv.cache import PrefixCache
from radixkv.config import CacheConfig
said = []
cache = PrefixCache(CacheConfig(num_blocks=8, block_size=4, events=said.append))
for namespace in ((), ("salt:x",), ("key:1", "salt:x"), ("key:1salt:x",)):
    sequence = cache.acquire([1, 2, 3, 4, 5, 6, 7, 8], namespace)
    cache.commit(sequence)
    cache.release(sequence)
print([(event.parent, event.hashes) for event in said])
"""


def test_hashes_are_the_same_in_every_process_and_different_in_every_namespace() -> None:
    printed = set()
    for seed in ("1", "2"):
        environment = dict(os.environ, PYTHONHASHSEED=seed)
        done = subprocess.run(
            [sys.executable, "-c", HASHES],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        printed.add(done.stdout)
    (events,) = map(eval, printed)
    assert len(events) == 4
    assert len({name for _, hashes in events for name in hashes}) == 8


# -- publishing --------------------------------------------------------------------------------


def test_a_mirror_equals_the_tree_after_random_work(make_llm) -> None:
    async def use(client: Any, service: Service) -> None:
        publisher = service.observed.kv_events
        assert publisher is not None
        draw = random.Random(1)
        with closing(Subscriber(publisher)) as subscriber:
            answers = []
            for number in range(40):
                prompt = [draw.choice((1, 2)) for _ in range(draw.randrange(1, 60))]
                namespace = draw.choice(((), ("salt:a",), ("salt:b",)))
                answer = await service.worker.submit(prompt, GREEDY, namespace=namespace)
                answers.append(answer)
                if draw.random() < 0.2:
                    answer.cancel()
                if number % 4 == 3:
                    await asyncio.gather(*(answer.end() for answer in answers))
                if number == 20:
                    await service.worker.call(lambda llm: llm.cache.reset())
            await asyncio.gather(*(answer.end() for answer in answers))
            stats = await service.worker.call(lambda llm: llm.stats())
            assert stats.cache.counters.blocks_evicted > 20
            truth = await service.worker.call(lambda llm: mirror_of(llm.cache))
            assert len(truth) > 5
            deadline = time.monotonic() + 10
            while subscriber.mirror != truth:
                assert time.monotonic() < deadline
                subscriber.catch_up()
            assert subscriber.numbers == list(range(subscriber.last + 1)), "no gap"
        samples = await scrape(client)
        assert value(samples, "kv_events_dropped_total") == 0
        assert value(samples, "kv_event_batches_total") >= 2

    with_app(make_llm(16), use, kv_events=ANYWHERE)


def test_who_subscribes_hears_what_happens_and_replays_what_it_missed() -> None:
    with publishing() as (publisher, cache):
        wait_for(publisher, 1)
        store(cache, A)
        wait_for(publisher, 2)
        with closing(Subscriber(publisher)) as subscriber:
            # It came too late for two batches, and knows by the first number that it hears.
            deadline = time.monotonic() + 10
            letter = 10
            while not subscriber.receive(0.05):
                assert time.monotonic() < deadline
                store(cache, [letter] * 4)
                letter += 1
            assert subscriber.last >= 2
            subscriber.mirror.clear()
            subscriber.last = -1
            subscriber.catch_up()
            assert subscriber.mirror.keys() <= mirror_of(cache).keys()
            assert subscriber.replay(subscriber.last + 1) == []
            first = subscriber.replay(1)[0]
            assert first[0] == 1
            (event,) = msgspec.msgpack.decode(first[1], type=EventBatch).events
            assert isinstance(event, BlockStored)
            assert event.token_ids == A


def test_what_does_not_fit_is_dropped_counted_and_seen_as_a_gap() -> None:
    publisher = KVEventPublisher(ANYWHERE, 4, max_queued=2, heartbeat_seconds=0.02)
    cache = PrefixCache(CacheConfig(num_blocks=8, block_size=4, events=publisher.sink))
    # Nobody sends yet: of five events two wait.
    for letter in range(1, 6):
        store(cache, [letter] * 4)
    assert publisher.dropped == 3
    publisher.start()
    wait_for(publisher, 3)
    try:
        with closing(Subscriber(publisher)) as subscriber:
            subscriber.catch_up()
            # 0 clears, 1 has what waited, 2 is what was dropped, 3 a heartbeat.
            assert subscriber.numbers[:3] == [0, 1, 3]
            assert subscriber.sizes[:3] == [1, 2, 0]
            assert publisher.counts()[1] == 3
    finally:
        publisher.close()


def test_a_gap_is_where_events_are_missing() -> None:
    publisher = KVEventPublisher(ANYWHERE, 4, max_queued=2)
    cache = PrefixCache(CacheConfig(num_blocks=8, block_size=4, events=publisher.sink))
    for letter in range(1, 4):
        store(cache, [letter] * 4)
    publisher._queue.popleft()  # as if it had been sent meanwhile
    store(cache, [4] * 4)
    assert publisher.dropped == 1
    publisher.start()
    wait_for(publisher, 3)
    try:
        with closing(Subscriber(publisher)) as subscriber:
            subscriber.catch_up()
            assert subscriber.numbers == [0, 1, 3]
            assert [tokens for _, tokens in subscriber.mirror.values()] == [(2,) * 4, (4,) * 4]
    finally:
        publisher.close()


def test_an_idle_cache_has_a_heartbeat() -> None:
    with publishing(heartbeat_seconds=0.02) as (publisher, _):
        wait_for(publisher, 4)
        with closing(Subscriber(publisher)) as subscriber:
            subscriber.catch_up()
            assert subscriber.numbers == list(range(len(subscriber.numbers)))
            assert subscriber.sizes[:4] == [1, 0, 0, 0]


def test_a_replay_has_what_is_kept_and_no_question_breaks_it() -> None:
    with publishing(max_replayed=2, heartbeat_seconds=0.01) as (publisher, _):
        wait_for(publisher, 5)
        with closing(Subscriber(publisher)) as subscriber:
            for nonsense in ([b"", b"short"], [b"x", bytes(8)], [b"alone"], [b"", bytes(8), b""]):
                subscriber._replay.send_multipart(nonsense)
            kept = subscriber.replay(0)
            assert len(kept) == 2
            assert kept[0][0] >= 3
            assert subscriber.replay(2**64 - 1) == []


def test_what_is_said_last_is_sent() -> None:
    publisher = KVEventPublisher(ANYWHERE, 4)
    cache = PrefixCache(CacheConfig(num_blocks=8, block_size=4, events=publisher.sink))
    publisher.start()
    wait_for(publisher, 1)
    store(cache, A)
    publisher.close()
    assert publisher.published == 2


def test_an_address_that_is_taken_is_refused(make_llm) -> None:
    with publishing() as (publisher, _):
        with pytest.raises(ConfigError, match="cannot publish KV events at tcp://"):
            KVEventPublisher(publisher.endpoint, 4)
        with pytest.raises(ConfigError, match="cannot publish KV events at nowhere"):
            Service(make_llm(8), ServerConfig(kv_events="nowhere"))


@pytest.mark.parametrize(
    ("endpoint", "replays"),
    [
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"),
        ("tcp://*:5557", "tcp://*:5558"),
        ("tcp://[::1]:9", "tcp://[::1]:10"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
        ("ipc:///tmp/events", "ipc:///tmp/events-replay"),
    ],
)
def test_where_replays_are(endpoint: str, replays: str) -> None:
    assert _replay_at(endpoint) == replays


def test_a_missing_package_is_named_and_nothing_stays_bound(make_llm, monkeypatch) -> None:
    config = ServerConfig(kv_events=ANYWHERE, otlp_endpoint="http://127.0.0.1:1")
    llm = make_llm(8)
    threads = threading.active_count()
    monkeypatch.setitem(sys.modules, "radixkv.server.tracing", None)
    with pytest.raises(ConfigError, match=r"pip install 'radixkv\[traces\]'"):
        Service(llm, config)
    monkeypatch.setitem(sys.modules, "radixkv.server.kv_events", None)
    with pytest.raises(ConfigError, match=r"pip install 'radixkv\[events\]'"):
        Service(llm, config)
    assert threading.active_count() == threads
