"""Connection: uvicorn's, but closed if nothing is asked on it, and read little by little."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

READ_BYTES = 2048
"""So much is read at a time: it may be hundreds of chunks, 20 µs each, and nothing else runs."""


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """A client's connection, whose first request must come in time as every other must.

    uvicorn limits the time from an answer to the next request alone: who connects and says nothing
    (or stops in the middle of a request's head) would keep a file open for as long as it likes.
    Clients do so without knowing, where a request is cancelled while they connect.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._buffer = bytearray(READ_BYTES)
        super().connection_made(transport)
        self._wait_for_head()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(memoryview(self._buffer)[:nbytes]))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait_for_head()

    def _wait_for_head(self) -> None:
        if self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self._give_up
            )

    def _give_up(self) -> None:
        # Not uvicorn's own end, which a head that has begun does not allow.
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
