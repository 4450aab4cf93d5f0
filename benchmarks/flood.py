"""What a crowd, slow readers and a sudden end do to a server.

    python benchmarks/flood.py [--requests 10000] [--readers 200] [--model tiny]

`radixkv serve` runs as a process. First so many requests are sent at once, each on a connection of
its own: as many as `--max-queued` says may be taken, the others must be told when to come again.
Then some read their streams slowly (nothing for a while, from a socket with a small buffer) while
others ask as usual. In the end the process is killed, and nothing of it may be left. It fails
unless all of that is so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import signal
import socket
import statistics
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from measure import print_head, print_table, write_json
from soak import Server, save_tiny

QUEUED = 1024
PARALLEL_CONNECTS = 256
HOLD_SECONDS = 3.0


def request(tokens: int, *, stream: bool = False, prompt: str = "Once upon a time") -> bytes:
    """The bytes of a request for a completion."""
    asked = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    body = json.dumps(asked).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


async def ask(url: str, raw: bytes) -> tuple[int, bytes, float]:
    """A request on a connection of its own: status, answer, seconds."""
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection(*address(url))
    try:
        writer.write(raw)
        answer = await reader.read(-1)
    finally:
        writer.close()
    return int(answer[9:12]), answer, time.perf_counter() - begin


async def crowd(server: Server, count: int) -> dict[str, object]:
    """All at once; what became of them, and the most that were unfinished."""
    found: Counter[str] = Counter()
    gate, connected = asyncio.Event(), asyncio.Semaphore(PARALLEL_CONNECTS)

    async def one(number: int) -> None:
        async with connected:
            reader, writer = await asyncio.open_connection(*address(server.url))
        await gate.wait()
        writer.write(request(8, prompt=f"{number} times"))
        answer = await reader.read(-1)
        writer.close()
        status = answer[9:12].decode() or "no answer"
        told = status == "429" and re.search(rb"(?i)^retry-after: \d", answer, re.MULTILINE)
        found[f"{status} with Retry-After" if told else status] += 1

    tasks = [asyncio.create_task(one(number)) for number in range(count)]
    await asyncio.sleep(count / 2000)
    begin = time.perf_counter()
    gate.set()
    most = 0.0
    while not all(task.done() for task in tasks):
        sample = await server.sample()
        most = max(most, sample["running"] + sample["waiting"])
        await asyncio.sleep(0.2)
    await asyncio.gather(*tasks)
    seconds = time.perf_counter() - begin
    status, _, after = await ask(server.url, request(8))
    return {
        **found,
        "most unfinished": most,
        "seconds": seconds,
        "then answered": status,
        "in seconds": after,
    }


async def median_of(url: str, count: int) -> float:
    """Seconds of requests, one after the other."""
    return statistics.median([(await ask(url, request(16)))[2] for _ in range(count)])


async def slow_readers(server: Server, count: int) -> dict[str, object]:
    """Streams that nobody reads for a while, and how long others wait meanwhile."""
    alone = await median_of(server.url, 20)
    lines: list[socket.socket] = []
    for _ in range(count):
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(address(server.url))
        line.sendall(request(400, stream=True))
        lines.append(line)
    # Until the engine is done with them: what is left then is the readers' own.
    while (await server.sample())["running"] + (await server.sample())["waiting"]:
        await asyncio.sleep(0.1)
    beside = await median_of(server.url, 20)
    await asyncio.sleep(HOLD_SECONDS)

    def read(line: socket.socket) -> bool:
        with line, line.makefile("rb") as answer:
            return b"data: [DONE]" in answer.read()

    whole = await asyncio.gather(*(asyncio.to_thread(read, line) for line in lines))
    return {
        "readers": count,
        "read to the end": sum(whole),
        "ms of a request alone": alone * 1000,
        "ms beside them": beside * 1000,
    }


def of_session(session: int) -> list[int]:
    """Processes of a session, dead ones that nobody has asked about left out."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(folder.name))
    return found


def kill(server: Server) -> dict[str, object]:
    """The end without a word; what is left of it."""
    before = of_session(server.process.pid)
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    time.sleep(1)
    return {"processes": len(before), "left when killed": len(of_session(server.process.pid))}


def faults(found: dict[str, dict[str, object]], options: argparse.Namespace) -> list[str]:
    """What is not as it should be."""
    asked, slow = found["crowd"], found["slow readers"]
    answered, refused = asked.get("200", 0), asked.get("429 with Retry-After", 0)
    assert isinstance(answered, int)
    assert isinstance(refused, int)
    wrong = []
    if answered + refused != options.requests:
        wrong.append("some of the crowd were neither answered nor told when to come again")
    if asked["most unfinished"] > QUEUED:  # type: ignore[operator]
        wrong.append(f"more than {QUEUED} were unfinished")
    if asked["then answered"] != 200:
        wrong.append("the server did not answer behind the crowd")
    if slow["read to the end"] != slow["readers"]:
        wrong.append("some slow readers did not get all")
    if found["killed"]["left when killed"]:
        wrong.append("processes were left behind")
    return wrong


async def run(options: argparse.Namespace, folder: str) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    model = save_tiny(folder) if options.model == "tiny" else options.model
    server = Server(model, ["--kv-memory", "64MiB", "--max-queued", str(QUEUED)])
    try:
        found = {"crowd": await crowd(server, options.requests)}
        found["slow readers"] = await slow_readers(server, options.readers)
        found["killed"] = kill(server)
    finally:
        with suppress(ProcessLookupError):
            os.kill(server.process.pid, signal.SIGKILL)
    print_head()
    for title, values in found.items():
        print_table(title, ["", ""], list(values.items()))
    write_json(options.output, found)
    if wrong := faults(found, options):
        raise SystemExit("failed: " + "; ".join(wrong))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--readers", type=int, default=200)
    parser.add_argument("--model", default="tiny", help="tiny, demo, a folder or a hub name")
    parser.add_argument("--output", type=Path)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(parser.parse_args(), folder))


if __name__ == "__main__":
    main()
