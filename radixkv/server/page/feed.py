"""Feed: snapshots as server-sent events, while somebody watches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from pydantic_core import to_json

from radixkv.errors import EngineStoppedError
from radixkv.llm import LLM
from radixkv.server.page.pulse import Pulse
from radixkv.server.page.removals import RemovalLog
from radixkv.server.page.snapshot import Look, Snapshot
from radixkv.server.page.texts import Decode, Labels, describe, spell, token_ids
from radixkv.server.service import Service

# At most five snapshots a second, and no more than this share of a core for all that they cost.
INTERVAL_SECONDS = 0.2
MOST_OF_A_CORE = 0.015
# A line to keep the connection open where nothing happens.
HEARTBEAT_SECONDS = 15.0
MOST_SPELLED_TOKENS = 1024

log = logging.getLogger("radixkv.server")


class Feed:
    """What all watchers see: taken, named and encoded once for all of them.

    A watcher who reads slowly misses snapshots and never the last one.

    Parameters
    ----------
    service : Service
        Its worker must not have been started: the feed looks on from the first step.

    Attributes
    ----------
    cpu_seconds : float
        What all snapshots have cost so far, on all threads.
    num_snapshots : int
    """

    def __init__(self, service: Service) -> None:
        self.pulse = Pulse()
        self.removals = RemovalLog(self.pulse)
        self.cpu_seconds = 0.0
        self.num_snapshots = 0
        self._service = service
        self._look = Look(self.pulse, self.removals)
        tokenizer = service.llm.loaded.tokenizer
        self._decode: Decode = _ids_as_text if tokenizer is None else tokenizer.decode
        # What a chat format writes around texts would fill all labels.
        plain = partial(tokenizer.decode, skip_special_tokens=True) if tokenizer else _ids_as_text
        self._labels = Labels(plain)
        # Each part as it was last sent, and the number of the snapshot in which it changed.
        self._parts: dict[str, tuple[int, bytes]] = {}
        self._watchers: set[asyncio.Event] = set()
        self._task: asyncio.Task[None] | None = None
        service.worker.watch(self.pulse)
        service.llm.cache.watch_removals(self.removals)

    # -- watching --------------------------------------------------------------------------------

    async def watch(self) -> AsyncIterator[bytes]:
        """Server-sent events: the parts of the newest snapshot that this watcher has not seen."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        elif self._parts:
            changed.set()
        seen = 0
        try:
            yield event("hello", to_json(self._hello()))
            while self._task is not None:
                try:
                    async with asyncio.timeout(HEARTBEAT_SECONDS):
                        await changed.wait()
                except TimeoutError:
                    yield b": nothing new\n\n"
                    continue
                changed.clear()
                parts = [item for item in self._parts.items() if item[1][0] > seen]
                seen = self.num_snapshots
                yield b"".join(event(name, data) for name, (_, data) in parts)
        finally:
            self._watchers.discard(changed)

    def _hello(self) -> dict[str, Any]:
        """What does not change, and the rates of the last two minutes."""
        llm, config = self._service.llm, self._service.config
        return {
            "model": self._service.model_name,
            "num_blocks": llm.cache.pool.num_blocks,
            "block_size": llm.cache.block_size,
            "now": self.pulse.clock(),
            "needs_key": bool(config.api_keys),
            "history": list(self.pulse.history),
        }

    async def _run(self) -> None:
        """Take snapshots until the last watcher has gone, or the server shuts down."""
        worker = self._service.worker
        try:
            while self._watchers and not worker.draining:
                begin = self.cpu_seconds
                await self._refresh()
                cost = self.cpu_seconds - begin
                await asyncio.sleep(max(INTERVAL_SECONDS, cost / MOST_OF_A_CORE))
                if not self._watchers:
                    # While this is awaited somebody may have come again.
                    await worker.call(lambda _: self._look.forget())
        except EngineStoppedError:
            log.debug("the engine has stopped: nothing is left to be watched")
        finally:
            # Streams end where no snapshots come any more, so that they keep no server up.
            self._task = None
            self._parts.clear()
            self._wake()

    async def _refresh(self) -> None:
        snapshot = await self._service.worker.call(self._look.take)
        if snapshot is None:
            return
        parts, seconds = await self._service.on_texts(lambda _: encode(snapshot, self._labels))
        self.cpu_seconds += snapshot.cpu_seconds + seconds
        self.num_snapshots += 1
        for name, data in parts.items():
            if name not in self._parts or self._parts[name][1] != data:
                self._parts[name] = self.num_snapshots, data
        self._wake()

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()

    # -- one node --------------------------------------------------------------------------------

    async def spell_node(self, serial: int) -> dict[str, Any] | None:
        """A node's tokens one by one and its blocks; None if it is not shown any more."""

        def find(_: LLM) -> tuple[bytes, list[int]] | None:
            node = self._look.shown.get(serial)
            return None if node is None else (bytes(node.tokens), node.blocks.tolist())

        found = await self._service.worker.call(find)
        if found is None:
            return None
        data, blocks = found
        ids = token_ids(data)
        shown = ids[:MOST_SPELLED_TOKENS]
        pieces = await self._service.on_texts(lambda _: spell(shown, self._decode))
        return {
            "serial": serial,
            "ids": shown,
            "pieces": pieces,
            "num_tokens": len(ids),
            "blocks": blocks,
        }


def _ids_as_text(ids: list[int]) -> str:
    """Stands in where a model has no tokenizer."""
    return "".join(f"{token} " for token in ids)


def encode(snapshot: Snapshot, labels: Labels) -> tuple[dict[str, bytes], float]:
    """A snapshot's parts as JSON, with texts, and the CPU seconds that took."""
    begin = time.thread_time()
    parts = {name: to_json(part) for name, part in describe(snapshot, labels).items()}
    return parts, time.thread_time() - begin


def event(name: str, data: bytes) -> bytes:
    """One server-sent event; JSON has no line breaks of its own."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
