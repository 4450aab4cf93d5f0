"""How long the largest bodies and answers keep the event loop from everybody else.

    python benchmarks/event_loop.py [--turns 7]

A server over a tiny random model is asked for what is large, and for what is made to be slow, each
body as large as the default limit lets it be. Meanwhile its event loop sleeps for a millisecond
again and again; the longest that one of these took, less that millisecond, is how long anybody may
have waited. The first row asks for nothing: what the machine does to the loop anyhow.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import print_head, print_table, write_json
from serve_overhead import Served, tiny_model

from radixkv import LLM
from radixkv.server.body import BYTES_A_PART
from radixkv.server.config import ServerConfig

MOST_BYTES = ServerConfig().max_body_bytes
MOST_PARTS = MOST_BYTES // BYTES_A_PART
SEND = """
import sys
from urllib import error, request
asked = request.Request(sys.argv[1], open(sys.argv[2], "rb").read())
try:
    print(request.urlopen(asked).status)
except error.HTTPError as refusal:
    print(refusal.code)
"""
IN_BYTES = r"""
import socket, sys
from urllib.parse import urlsplit
url = urlsplit(sys.argv[1])
line = socket.create_connection((url.hostname, url.port))
head = f"POST {url.path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
chunks = [b"1\r\n%c\r\n" % byte for byte in open(sys.argv[2], "rb").read()]
line.sendall(head.encode() + b"".join(chunks) + b"0\r\n\r\n")
print(line.recv(12).split()[1].decode())
"""


def filled(head: str, part: str, tail: str, most: int | None = None) -> bytes:
    """A body as large as it may be, or of so many parts."""
    count = most or (MOST_BYTES - len(head) - len(tail)) // (len(part) + 1)
    return (head + ",".join([part] * count) + tail).encode()


def bodies() -> dict[str, tuple[str, bytes]]:
    """What is asked for, by name: route and body."""
    drawn = random.Random(0)
    ids = [drawn.randrange(100_000, 131_072) for _ in range(MOST_BYTES // 8 - 8)]
    text = "".join(drawn.choice("abcdefgh ") for _ in range(130_000))
    message = '{"role":"user","content":"' + "a" * 40 + '"}'
    operation = '{"context":"ctx-' + "a" * 22 + '","read":{}}'
    few = MOST_PARTS - 100
    fields = ",".join(f'"{"k" * 20}{i}":1' for i in range(few))
    schema = ",".join(f'"{"k" * 20}{i}":{{}}' for i in range(few // 2))
    scored = {"prompt": text[:1900], "max_tokens": 1, "prompt_logprobs": 20}
    return {
        "nothing": ("/health", b""),
        "token ids": ("/v1/completions", json.dumps({"prompt": ids}).encode()),
        "token ids, a context": ("/v1/contexts", json.dumps({"content": ids}).encode()),
        "messages": ("/v1/chat/completions", filled('{"messages":[', message, "]}", few // 3)),
        "messages, a context": ("/v1/contexts", filled('{"content":[', message, "]}", few // 3)),
        "one text": ("/v1/completions", filled('{"prompt":"', "a" * 1000, '"}')),
        "130,000 tokens found": ("/tokenize", json.dumps({"prompt": text}).encode()),
        "1,900 × 20 log-probabilities": ("/v1/completions", json.dumps(scored).encode()),
        "strings for token ids": ("/detokenize", filled('{"tokens":[', '""', "]}")),
        "1,024 operations": (
            "/v1/contexts/operations",
            filled('{"operations":[', operation, "]}", 1024),
        ),
        "objects in objects": ("/v1/chat/completions", filled('{"messages":[', '{"a":{}}', "]}")),
        "objects in objects, as many as are read": (
            "/v1/chat/completions",
            filled('{"messages":[', '{"a":{}}', "]}", few // 3),
        ),
        "empty prompts": ("/v1/completions", filled('{"prompt":[', "[]", "]}")),
        "empty prompts, as many as are read": (
            "/v1/completions",
            filled('{"prompt":[', "[]", "]}", few),
        ),
        "unknown fields": (
            "/v1/completions",
            ("{" + ",".join(f'"k{i}":1' for i in range(MOST_BYTES // 12)) + "}").encode(),
        ),
        "unknown fields, as many as are read": ("/v1/completions", f"{{{fields}}}".encode()),
        "a tool's choice": (
            "/v1/chat/completions",
            f'{{"messages":[{{}}],"tool_choice":{{{fields}}}}}'.encode(),
        ),
        "a schema": (
            "/v1/completions",
            f'{{"prompt":"a","guided_json":{{"properties":{{{schema}}}}}}}'.encode(),
        ),
        "chunks of a byte": ("/v1/completions", b" " * 200_000),
        "a long name": ("/v1/completions", filled('{"prompt":"a","', "k" * 1000, '":1}')),
    }


async def longest_wait(stop: asyncio.Event) -> float:
    """The longest that a sleep of a millisecond took, less that, in milliseconds."""
    longest = 0.0
    while not stop.is_set():
        begin = time.perf_counter()
        await asyncio.sleep(0.001)
        longest = max(longest, time.perf_counter() - begin - 0.001)
    return longest * 1000


def measure(served: Served, route: str, file: str, send: str) -> tuple[float, int]:
    """The longest wait while one request is served, and its status."""
    loop = served.loop
    assert loop is not None
    stop = asyncio.Event()
    waits = asyncio.run_coroutine_threadsafe(longest_wait(stop), loop)
    if file:
        command = [sys.executable, "-c", send, served.url + route, file]
        status = int(subprocess.run(command, capture_output=True, check=True).stdout)
    else:
        time.sleep(1)
        status = 0
    loop.call_soon_threadsafe(stop.set)
    return waits.result(), status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = replace(tiny_model(), max_model_len=131_072)
    served = Served(LLM(model, kv_memory="64MiB", max_model_len=131_072))
    gc.collect()
    gc.freeze()  # As `radixkv serve` does.
    found: dict[str, list[float]] = {}
    rows: list[list[Any]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            asked = bodies()
            for place, (_, body) in enumerate(asked.values()):
                (Path(folder) / str(place)).write_bytes(body)
            for turn in range(options.turns):
                for place, (name, (route, body)) in enumerate(asked.items()):
                    file = f"{folder}/{place}" if body else ""
                    send = IN_BYTES if name == "chunks of a byte" else SEND
                    wait, status = measure(served, route, file, send)
                    found.setdefault(name, []).append(wait)
                    if turn == 0:
                        rows.append([name, f"{len(body) / 1e6:.2f}", status])
    finally:
        served.close()
    for row in rows:
        row += [statistics.median(found[row[0]]), max(found[row[0]])]
    print_head()
    print_table(
        f"the event loop's longest wait, ms, of {options.turns} turns",
        ["asked for", "MB", "status", "median", "most"],
        rows,
    )
    write_json(options.output, found)


if __name__ == "__main__":
    main()
