"""KV events: what is cached, published over ZMQ for routers in front of several engines.

As vLLM's: a PUB socket sends ``[topic, sequence number, batch]``, the topic empty, the number eight
bytes, the highest first. A ROUTER socket at the next port replays: it is sent a number, and answers
with ``[number, batch]`` for each batch from that one on that it still has, and at last with -1 and
an empty batch. The first batch of all says that nothing is cached. A batch without events, a
heartbeat, follows after `HEARTBEAT_SECONDS` without any, so that a lost last batch is noticed.

The engine never waits for the network: its thread puts events into a bounded queue, and what does
not fit is dropped and counted. Where events are missing, a number is missing that no replay has.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections import deque
from contextlib import suppress

import msgspec
import zmq

from radixkv.cache.events import Event
from radixkv.errors import ConfigError
from radixkv.server.kv_wire import END_OF_REPLAY, AllBlocksCleared, EventBatch, WireEvent, to_wire

log = logging.getLogger("radixkv.server")

HEARTBEAT_SECONDS = 10.0
# Events that may wait to be sent, and batches that can be replayed.
MAX_QUEUED = 100_000
MAX_REPLAYED = 10_000
# Events that come within this time share a batch.
GATHER_SECONDS = 0.002
LINGER_MS = 200


class KVEventPublisher:
    """Publishes the events of one cache from a thread of its own.

    Parameters
    ----------
    endpoint : str
        Where to bind, like "tcp://127.0.0.1:5557"; "tcp://127.0.0.1:*" takes free ports. Replays
        are at the next port (or, for "ipc://PATH", at PATH-replay).
    block_size : int
        Tokens in a block.
    max_queued, max_replayed : int
    heartbeat_seconds : float

    Attributes
    ----------
    endpoint, replay_endpoint : str
        Where it is bound.
    published, dropped : int
        Batches that were sent, and events that never were.

    Raises
    ------
    ConfigError
        If the endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        block_size: int,
        *,
        max_queued: int = MAX_QUEUED,
        max_replayed: int = MAX_REPLAYED,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self.published = 0
        self.dropped = 0
        self._block_size = block_size
        self._max_queued = max_queued
        self._heartbeat = heartbeat_seconds
        # An event, or None where some were dropped.
        self._queue: deque[Event | None] = deque()
        self._dropping = False
        self._sequence = 0
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=max_replayed)
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        try:
            self._pub = self._bind(zmq.PUB, endpoint, max_replayed)
            self.endpoint: str = self._pub.get_string(zmq.LAST_ENDPOINT)
            # A whole replay fits, or its end would be lost.
            self._replay = self._bind(zmq.ROUTER, _replay_at(endpoint), max_replayed + 1)
            self.replay_endpoint: str = self._replay.get_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"cannot publish KV events at {endpoint}: {error}; give an address like "
                "tcp://127.0.0.1:5557 that nobody uses, nor the port behind it"
            ) from None
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        self._awake = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="radixkv-kv-events", daemon=True)

    def _bind(self, kind: int, endpoint: str, high_water: int) -> zmq.Socket[bytes]:
        bound = self._context.socket(kind)
        bound.set_hwm(high_water)
        bound.bind(endpoint)
        return bound

    def start(self) -> None:
        """Begin to publish."""
        self._thread.start()

    def counts(self) -> tuple[int, int]:
        """Batches that were published, and events that were dropped."""
        return self.published, self.dropped

    # -- on the engine's thread ------------------------------------------------------------------

    def sink(self, event: Event) -> None:
        """Take an event of the cache; never waits. Nobody hears what comes after `close`."""
        if self._closing:
            return
        queue = self._queue
        if len(queue) >= self._max_queued:
            self.dropped += 1
            self._dropping = True
            return
        if self._dropping:
            queue.append(None)
            self._dropping = False
        queue.append(event)
        if not self._awake:
            self._awake = True
            self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # Then it is awake already.
            self._mouth.send(b"!")

    # -- on the publisher's thread ---------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._replay, zmq.POLLIN)
        poller.register(self._ear, zmq.POLLIN)
        self._send([AllBlocksCleared()])
        spoke = time.monotonic()
        while not self._closing:
            left = max(spoke + self._heartbeat - time.monotonic(), 0)
            ready = dict(poller.poll(int(left * 1000) + 1))
            if self._replay in ready:
                self._answer()
            if self._ear.fileno() in ready:
                self._ear.recv(64)
                time.sleep(GATHER_SECONDS)
                # From here on whoever adds wakes anew; what came before is taken now.
                self._awake = False
                self._drain()
                spoke = time.monotonic()
            elif time.monotonic() >= spoke + self._heartbeat:
                self._send([])
                spoke = time.monotonic()
        self._drain()
        self._pub.close(linger=LINGER_MS)
        self._replay.close(linger=LINGER_MS)

    def _drain(self) -> None:
        events: list[Event] = []
        for _ in range(len(self._queue)):
            event = self._queue.popleft()
            if event is not None:
                events.append(event)
                continue
            if events:
                self._send(to_wire(events, self._block_size))
                events = []
            self._sequence += 1
        if events:
            self._send(to_wire(events, self._block_size))
        if self._dropping:
            # Nothing has come since: the number is missing now, not only once something does.
            self._dropping = False
            self._sequence += 1

    def _send(self, events: list[WireEvent]) -> None:
        number = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        batch = self._encode(EventBatch(time.time(), events, 0))
        self._pub.send_multipart((b"", number, batch))
        self._sent.append((number, batch))
        self.published += 1

    def _answer(self) -> None:
        """Send again what was asked for; what is no such question is not answered."""
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            log.warning("not a request to replay KV events: %d frames", len(frames))
            return
        peer, _, first = frames
        for number, batch in self._sent:
            if number >= first:
                self._replay.send_multipart((peer, b"", number, batch))
        self._replay.send_multipart((peer, b"", END_OF_REPLAY, b""))

    def close(self) -> None:
        """Send what waits, and end."""
        self._closing = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._context.destroy(linger=LINGER_MS)
        self._ear.close()
        self._mouth.close()


def _replay_at(endpoint: str) -> str:
    """Where replays are: at the port after the one where events are published."""
    match = re.fullmatch(r"(tcp://.+:)(\d+)", endpoint)
    if match:
        return f"{match[1]}{int(match[2]) + 1}"
    return endpoint if endpoint.endswith(":*") else f"{endpoint}-replay"
