"""Whether a server stays as it is: clients of all kinds, some of whom leave, and what it holds.

    python benchmarks/soak.py [--minutes 10] [--clients 32] [--leaving 0.2] [--model tiny]

`radixkv serve` runs as a process, over a tiny random model unless another is named. Each client
does one thing after another, drawn by chance: chats, streams, several continuations, JSON schemas,
contexts that fork and join. A share of them leaves in the middle, at a random time. Meanwhile the
process is looked at: its memory, files and threads as the system counts them, its requests, blocks
and contexts as it tells itself; and once more, after all have left. It fails if anything is left
over then, if something has gone wrong, or if memory, files or threads have grown: by the line
through the second half of the samples, more over that half than `MOST_GROWTH` allows. Connections
come and go with those who use them, so of these as many must be left as were there before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from measure import print_head, print_table, write_json

SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "boolean"}}}
SYSTEM = "You answer in one short sentence, and you are kind to everybody. " * 3
INTERVAL_SECONDS = 1.0
# By the end of the line less its beginning. Memory of a process is given back in large pieces.
MOST_GROWTH = {"memory, MiB": 8.0, "files": 1.0, "threads": 1.0}
HELD = ("running", "waiting", "blocks held")

Sample = dict[str, float]


class Clients:
    """Those who use a server, and what has come of it."""

    def __init__(self, url: str, count: int, leaving: float, seed: int) -> None:
        self.count = count
        self.done: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._leaving = leaving
        self._random = random.Random(seed)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=count)
        self._http = httpx.AsyncClient(base_url=url, timeout=120, limits=limits)

    async def run(self, seconds: float) -> None:
        """All of them, for so long."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._client(end) for _ in range(self.count)))
        await self._http.aclose()

    async def _client(self, end: float) -> None:
        kinds = (self._whole, self._stream, self._several, self._schema, self._context)
        while time.monotonic() < end:
            kind = self._random.choice(kinds)
            leaves = self._random.random() < self._leaving
            name = kind.__name__.strip("_")
            try:
                async with asyncio.timeout(self._patience() if leaves else None):
                    await kind()
            except TimeoutError:
                self.done[f"{name}, left"] += 1
            except (httpx.HTTPError, AssertionError, ValueError, KeyError) as error:
                self.failures[f"{name}: {error!r}"[:200]] += 1
            else:
                self.done[name] += 1

    def _patience(self) -> float:
        """From the first byte of a request to well into an answer."""
        return 10 ** self._random.uniform(-3.5, 0)

    def _body(self, **more: Any) -> dict[str, Any]:
        asked = f"Question {self._random.randrange(10_000)}: " + "why? " * self._random.randrange(8)
        roles = {"system": SYSTEM, "user": asked}
        messages = [{"role": role, "content": text} for role, text in roles.items()]
        tokens = self._random.randrange(4, 48)
        return {"messages": messages, "max_tokens": tokens, "ignore_eos": True, **more}

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = await self._http.post(path, json=body)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text[:120]}"
        return answer.json()

    async def _whole(self) -> None:
        body = self._body()
        told = await self._post("/v1/chat/completions", body)
        assert told["usage"]["completion_tokens"] == body["max_tokens"], told["usage"]

    async def _stream(self) -> None:
        body = self._body(stream=True, stream_options={"include_usage": True})
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200, answer.status_code
            lines = [line async for line in answer.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]", lines[-1]
        usage = json.loads(lines[-2].removeprefix("data: "))["usage"]
        assert usage["completion_tokens"] == body["max_tokens"], usage

    async def _several(self) -> None:
        told = await self._post("/v1/chat/completions", self._body(n=3, cache_salt="several"))
        assert len(told["choices"]) == 3

    async def _schema(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        body = self._body(response_format=form, max_tokens=64, ignore_eos=False)
        told = await self._post("/v1/chat/completions", body)
        (choice,) = told["choices"]
        if choice["finish_reason"] == "stop":  # A tiny model may write blanks to the end.
            assert isinstance(json.loads(choice["message"]["content"])["a"], bool)

    async def _context(self) -> None:
        messages = self._body()["messages"]
        context = (await self._post("/v1/contexts", {"content": messages}))["id"]
        path = f"/v1/contexts/{context}"
        branches = (await self._post(f"{path}/fork", {"n": 2}))["branches"]
        settings = {"max_tokens": 12, "ignore_eos": True}
        for seed, branch in enumerate(branches):
            await self._post(f"/v1/contexts/{branch}/generate", {**settings, "seed": seed})
        await self._post(f"{path}/join", {"branches": branches})
        await self._post(f"{path}/generate", settings)
        answer = await self._http.delete(path)
        assert answer.status_code == 200, answer.text


class Server:
    """A server's process, seen from outside."""

    def __init__(self, model: str, options: list[str]) -> None:
        command = [sys.executable, "-m", "radixkv.cli", "serve", model, "--port", "0"]
        command += ["--context-ttl", "15", "--access-log", "off", *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        found = re.search(r"http://\S+", self.process.stdout.readline())
        if found is None:
            raise SystemExit("the server did not start")
        self.url = found[0]
        self._http = httpx.AsyncClient(base_url=self.url, timeout=60)

    async def sample(self) -> Sample:
        """What it has now."""
        text = (await self._http.get("/metrics")).text
        # Then, so that the connection for it is always among those that are counted.
        folder = Path("/proc") / str(self.process.pid)
        pages = int((folder / "statm").read_text().split()[1])
        files = list(opened(folder / "fd"))
        sockets = sum(name.startswith("socket:") for name in files)
        found = {
            "memory, MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            "files": len(files) - sockets,
            "connections": sockets,
            "threads": len(os.listdir(folder / "task")),
        }
        for name, metric in (
            ("running", r"num_requests_running\{[^}]*\}"),
            ("waiting", r"num_requests_waiting\{[^}]*\}"),
            ("blocks held", r'kv_blocks\{[^}]*state="held"\}'),
        ):
            value = re.search(rf"^radixkv:{metric} (\S+)$", text, re.MULTILINE)
            assert value is not None, f"/metrics has no {metric}"
            found[name] = float(value[1])
        return found

    async def close(self) -> int:
        """Its exit code, once it was told to stop."""
        await self._http.aclose()
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self.process.wait, 60)


def opened(folder: Path) -> Iterator[str]:
    """What a process has open, by its folder of file descriptors."""
    for number in os.listdir(folder):
        with suppress(FileNotFoundError):  # It was closed meanwhile.
            yield os.readlink(folder / number)


def growth(samples: list[Sample], name: str) -> float:
    """How much the line through the samples' second half rises, from its first to its last."""
    values = np.array([sample[name] for sample in samples[len(samples) // 2 :]])
    slope = np.polyfit(np.arange(len(values)), values, 1)[0]
    return float(slope * (len(values) - 1))


async def soak(server: Server, clients: Clients, seconds: float) -> tuple[list[Sample], Sample]:
    """Samples while clients are at work, and one when nothing should be left of them."""
    samples = [await server.sample()]
    work = asyncio.create_task(clients.run(seconds))
    while not work.done():
        samples.append(await server.sample())
        await asyncio.wait({work}, timeout=INTERVAL_SECONDS)
    await work
    deadline = time.monotonic() + 60  # Contexts of those who left expire after 15 seconds.
    last = await server.sample()
    while not as_before(samples[0], last) and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
        last = await server.sample()
    return samples, last


def as_before(first: Sample, last: Sample) -> bool:
    """Whether nobody is there any more, and nothing is held for anybody."""
    return not any(last[name] for name in HELD) and last["connections"] <= first["connections"]


def faults(samples: list[Sample], last: Sample, clients: Clients) -> list[str]:
    """What is not as it should be."""
    found = [f"{name} was {last[name]:g} at the end" for name in HELD if last[name]]
    if last["connections"] > samples[0]["connections"]:
        found.append(f"{last['connections']:g} connections were left at the end")
    for name, most in MOST_GROWTH.items():
        if (grown := growth(samples, name)) > most:
            found.append(f"{name} has grown by {grown:.1f} in the second half")
    return found + [f"{count} times: {what}" for what, count in clients.failures.items()]


def save_tiny(folder: str) -> str:
    """`serve_overhead`'s tiny model as a checkpoint."""
    from serve_overhead import tiny_model

    loaded = tiny_model()
    loaded.model.save_pretrained(folder)
    assert loaded.tokenizer is not None
    loaded.tokenizer.save_pretrained(folder)
    return folder


async def run(options: argparse.Namespace, folder: str) -> None:
    tiny = options.model == "tiny"
    server = Server(save_tiny(folder) if tiny else options.model, ["--kv-memory", options.memory])
    try:
        clients = Clients(server.url, options.clients, options.leaving, options.seed)
        samples, last = await soak(server, clients, options.minutes * 60)
        code = await server.close()
    finally:
        with suppress(ProcessLookupError):
            server.process.kill()
    left = sum(count for name, count in clients.done.items() if name.endswith("left"))
    print_head()
    rows = [
        [
            name,
            samples[0][name],
            samples[len(samples) // 2][name],
            samples[-1][name],
            max(sample[name] for sample in samples),
            growth(samples, name) if name in MOST_GROWTH else "",
            last[name],
        ]
        for name in samples[0]
    ]
    print_table(
        f"{options.clients} clients for {options.minutes:g} minutes: "
        f"{clients.done.total():,} requests or programs, {left:,} of them left in the middle",
        ["", "begin", "half", "end", "most", "growth, second half", "all gone"],
        rows,
    )
    print_table("what they did", ["", "times"], sorted(clients.done.items()))
    wrong = faults(samples, last, clients) + ([f"exit code {code}"] if code else [])
    write_json(options.output, {"samples": samples, "last": last, "done": clients.done})
    if wrong:
        raise SystemExit("failed: " + "; ".join(wrong))
    print("nothing has grown, nothing is left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--leaving", type=float, default=0.2, help="share that leaves")
    parser.add_argument("--model", default="tiny", help="tiny, demo, a folder or a hub name")
    parser.add_argument("--memory", default="64MiB", help="for keys and values")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(parser.parse_args(), folder))


if __name__ == "__main__":
    main()
