"""Service: what all routes stand on."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from radixkv.cache import Namespace
from radixkv.llm import LLM
from radixkv.server.config import ServerConfig
from radixkv.server.contexts.registry import Contexts
from radixkv.server.observed import Observed
from radixkv.server.worker import EngineWorker

T = TypeVar("T")


class Service:
    """A model being served: its engine's worker, its texts, and how it was told to serve.

    Parameters
    ----------
    llm : LLM
        Closed with the service.
    config : ServerConfig
    """

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self.llm = llm
        self.config = config
        self.model_name = config.served_model_name or llm.loaded.name
        self.worker = EngineWorker(llm, max_queued=config.max_queued)
        self.contexts = Contexts(self.worker, config.context_seconds, config.max_contexts)
        self.observed = Observed(llm, self.worker, self.model_name, config)
        # One thread: a fast tokenizer must not be used by two at a time.
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="radixkv-texts")

    def start(self) -> None:
        """Start the engine's thread, and those who look on; from a running event loop."""
        self.worker.start()
        self.observed.start()

    async def on_texts(self, function: Callable[[LLM], T]) -> T:
        """Run what works on texts (tokenizing, templates, grammars) off the event loop.

        It may use the LLM's tokenizer and ``engine.check_request``, and no more of it.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._texts, function, self.llm)

    def namespace(self, api_key: str | None, cache_salt: str | None) -> Namespace:
        """What a caller's blocks are shared within: the same key (if told so) and salt."""
        parts = []
        if self.config.isolate_keys and api_key is not None:
            # Namespaces are shown on the page; keys are not.
            digest = hashlib.blake2b(api_key.encode(), digest_size=8, person=b"radixkv-key")
            parts.append(f"key:{digest.hexdigest()}")
        if cache_salt:
            parts.append(f"salt:{cache_salt}")
        return tuple(parts)

    async def close(self) -> None:
        """Let what runs come to its end, within the time it has, and end the engine."""
        await self.worker.drain(self.config.drain_seconds)
        await self.contexts.close()
        await self.worker.stop()
        await self.observed.close()
        self._texts.shutdown(cancel_futures=True)
