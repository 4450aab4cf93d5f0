"""A peer as a process of its own, spoken to in JSON lines.

Requests and replies, one line each; every reply may be ``{"error": reason}`` instead::

    {"do": "load", "model": folder, "dtype": "bfloat16", "threads": 2, "max_len": 4608,
     "max_seqs": 64, "kv_bytes": 2147483648}
        -> {"wall_s": ..., "cpu_s": ..., "peak_mib": ..., "note": ...}
    {"do": "run", "prompts": [[ids]], "kind": "greedy" | "sample" | "beam", "width": 4,
     "max_tokens": 64}
        -> {"tokens": [[[ids]]], "times": [[seconds]], "cached_tokens": [...], "wall_s": ...,
            "cpu_s": ..., "peak_mib": ...}
    {"do": "reset"}
        -> {}

``times`` are the seconds, from the run's start, at which the tokens of each prompt's first
continuation came; who knows only of the first one says ``first_s``. ``cached_tokens`` are the
tokens of each prompt that were not computed. The end of the input ends the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from tempfile import TemporaryFile
from typing import Any


class PeerError(Exception):
    """A peer cannot be used, or a request to it failed; the message is what a table shows."""


def _inherited() -> dict[str, str]:
    """Our environment, but for what importing radixkv here has set in it: others have their own."""
    return {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}


class PeerProcess:
    """A driver script, running.

    Parameters
    ----------
    name : str
        For messages.
    command : list of str
        Interpreter, script and arguments.
    environment : dict of str to str
        Added to this process's own.
    seconds : float
        The longest that an answer may take; the process is ended then.

    Attributes
    ----------
    started : float
        Reading of `time.perf_counter` when the process was started.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str] | None = None,
        seconds: float = 3600,
    ) -> None:
        self.name = name
        self.seconds = seconds
        self._log = TemporaryFile()  # noqa: SIM115 -- closed by close(); it has no name to leave
        self.started = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=_inherited() | (environment or {}),
            )
        except OSError as error:
            self._log.close()
            raise PeerError(f"{name} cannot be started: {error}") from error

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its reply.

        Raises
        ------
        PeerError
            If the reply is an error, no reply, or does not come in time.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(self.seconds, give_up)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        if late.is_set():
            self._process.wait()
            raise PeerError(f"no answer to {request['do']!r} in {self.seconds:.0f} s")
        if not line:
            raise PeerError(f"ended at {request['do']!r}: {self.last_words()}")
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise PeerError(f"answered {request['do']!r} with {line[:80]!r}") from error
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply

    def is_alive(self) -> bool:
        """Whether it can be asked again."""
        return self._process.poll() is None

    def last_words(self) -> str:
        """The last line it wrote to its log, or its exit status."""
        status = self._process.wait()
        self._log.seek(max(self._log.seek(0, os.SEEK_END) - 4000, 0))
        lines = self._log.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return said[-1][:300] if said else f"exit status {status}"

    def close(self) -> None:
        """End the process; it has five seconds to do so by itself."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # It may have ended already.
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()
