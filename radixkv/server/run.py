"""A process that serves: its signals, and its exit code."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import uvicorn

from radixkv.llm import LLM
from radixkv.server.address import taken, url_of
from radixkv.server.app import create_app
from radixkv.server.config import ServerConfig
from radixkv.server.connections import Connection
from radixkv.server.service import Service

KEEP_ALIVE_SECONDS = 75
"""An idle connection is kept this long: longer than proxies and clients keep theirs, as a rule."""

LINGER_SECONDS = 3
"""What has ended may still be read this long, by readers that are slow, when the server stops."""

BACKLOG = 2048

SWITCH_SECONDS = 0.0003
"""The engine's thread lets go of the interpreter in every layer, and waits so long at the most to
have it back from the event loop's: at Python's 5 ms, with 64 streams, a tenth of its throughput."""

MOST_FILES = 1 << 16
"""Each connection is an open file, and most systems let a process begin with 1,024."""


class _Server(uvicorn.Server):
    """uvicorn's, with signals left to us, and told when it is ready."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()


class _Stopper:
    """Ends a server: gently at the first signal, at once at the second, with 1 if its engine died.

    Attributes
    ----------
    code : int
        The process's exit code.
    """

    def __init__(self, service: Service, server: _Server) -> None:
        self.code = 0
        self._service = service
        self._server = server
        self._tasks: list[asyncio.Task[None]] = [asyncio.create_task(self._mourn())]

    def signalled(self, number: int) -> None:
        """SIGTERM or SIGINT has come."""
        worker = self._service.worker
        if worker.draining:
            sys.stdout.flush()
            os._exit(128 + number)
        worker.draining = True
        print(
            f"radixkv: stopping; {worker.num_unfinished} requests have "
            f"{self._service.config.drain_seconds:g} s to end (again to stop at once)",
            file=sys.stderr,
        )
        self._tasks.append(asyncio.create_task(self._drain()))

    async def _drain(self) -> None:
        worker = self._service.worker
        if not await worker.drain(self._service.config.drain_seconds):
            await worker.stop()  # What still runs ends with an error that says so.
        self._server.should_exit = True

    async def _mourn(self) -> None:
        await self._service.worker.gone()
        if not self._service.worker.draining:
            print("radixkv: the engine has stopped; nothing can be served", file=sys.stderr)
            self.code = 1
            self._server.should_exit = True

    async def close(self) -> None:
        """End its tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def run_server(llm: LLM, config: ServerConfig, listener: socket.socket) -> int:
    """Serve a model until a signal; the process's exit code. On the main thread.

    Parameters
    ----------
    llm : LLM
        Closed in the end.
    config : ServerConfig
    listener : socket
        As `bound` makes it; closed in the end.

    Raises
    ------
    RadixKVError
        If another process was let in at the address meanwhile.
    """
    _allow_files()
    with closing(listener):
        return asyncio.run(_serve(Service(llm, config), listener))


def _allow_files() -> None:
    current, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = (MOST_FILES if limit == resource.RLIM_INFINITY else limit for limit in (current, most))
    current, wanted = (min(limit, MOST_FILES) for limit in limits)
    if current < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def _serve(service: Service, listener: socket.socket) -> int:
    settings = uvicorn.Config(
        create_app(service),
        log_level="warning",
        access_log=False,
        lifespan="on",
        http=Connection,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=LINGER_SECONDS,
    )
    # What is loaded stays: the collector need not walk through it, a quarter of a second each time.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_SECONDS)
    url = url_of(listener, service.config.host)

    def ready() -> None:
        print(f"radixkv serves {service.model_name} at {url}", flush=True)

    server = _Server(settings, ready)
    stopper = _Stopper(service, server)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopper.signalled, number)
    try:
        await server.serve([listener])
    except OSError as error:
        raise taken(url, error) from None
    finally:
        gc.unfreeze()  # Libraries complain at the end of what was not collected.
        await stopper.close()
    return stopper.code if server.started else 1
