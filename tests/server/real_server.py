"""Fixtures: the engine's tiny model behind real servers, in a thread of this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from radixkv.llm import LLM
from radixkv.server.app import create_app
from radixkv.server.config import ServerConfig
from radixkv.server.connections import Connection
from radixkv.server.service import Service


@contextmanager
def serving(llm: LLM, **settings: Any) -> Iterator[tuple[str, Service]]:
    """A real server on a free port, in a thread of this process: its URL, and what it stands on."""
    service = Service(llm, ServerConfig(port=0, drain_seconds=5, **settings))
    app = create_app(service)
    config = uvicorn.Config(app, port=0, log_level="warning", lifespan="on", http=Connection)
    server = uvicorn.Server(config)
    # Named TCP, or asyncio does not switch the delay of small packets off: 40 ms an answer.
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive(), "the server ended before it served"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", service
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def serve(make_llm: Callable[..., LLM]) -> Iterator[Callable[..., tuple[str, Service]]]:
    """Servers over the tiny model, one at a time; their settings are `ServerConfig`'s."""
    open_servers: list[Any] = []

    def start(num_blocks: int = 256, *, llm: dict[str, Any] | None = None, **settings: Any) -> Any:
        context = serving(make_llm(num_blocks, **(llm or {})), **settings)
        open_servers.append(context)
        return context.__enter__()

    yield start
    for context in open_servers:
        context.__exit__(None, None, None)
