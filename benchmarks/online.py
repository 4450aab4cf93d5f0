"""Is a server as fast as its own engine? Streaming chats over HTTP, and the same chats offline.

    python benchmarks/online.py [--chats 64] [--tokens 64] [--turns 15] [--threads 1]

`radixkv serve` answers so many streaming chats at once, all behind the demo's system prompt, read
by a process of their own; `LLM.chat` in this process answers the same ones. In turn, each turn with
questions of its own; the demo model in bfloat16, answers of full length. The engine has `--threads`
threads in both: on two cores, with one for the engine, the other is left to those who read.
Seconds of wall time from the first request to the last token. Where the machine's clock moves, one
turn says little: the server has so much of the engine's throughput by the median of the turns'
ratios, and by the best of each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from measure import print_head, print_table, write_json

# Before torch: it says how long OpenMP's threads turn round.
from radixkv import LLM, SamplingParams  # isort: split

import torch

from radixkv.workloads import demo_workload

Messages = list[dict[str, str]]


@contextmanager
def served(threads: int, chats: int) -> Iterator[str]:
    """The URL of a server in a process of its own."""
    command = [sys.executable, "-m", "radixkv.cli", "serve", "--port", "0", "--dtype", "bfloat16"]
    command += ["--max-num-seqs", str(chats), "--access-log", "off", "--max-num-batched-tokens"]
    process = subprocess.Popen(
        [*command, "2048"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        if found is None:
            raise SystemExit("the server did not start")
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


async def read_all(url: str, bodies: list[dict[str, Any]]) -> tuple[float, int]:
    """Seconds until all streams have ended, and the tokens of their usage."""
    where = urlsplit(url)

    async def one(body: dict[str, Any]) -> int:
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data
        )
        raw = await reader.read(-1)
        writer.close()
        used = re.search(rb'"completion_tokens": ?(\d+)', raw)
        assert used is not None, raw[-300:]
        assert b"[DONE]" in raw
        return int(used[1])

    begin = time.perf_counter()
    tokens = await asyncio.gather(*map(one, bodies))
    return time.perf_counter() - begin, sum(tokens)


def online(url: str, chats: list[Messages], tokens: int, folder: str) -> float:
    """Seconds for all chats over HTTP."""
    body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    file = Path(folder) / "bodies.json"
    file.write_text(json.dumps([body | {"messages": messages} for messages in chats]))
    command = [sys.executable, __file__, "--read", url, str(file)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds, count = json.loads(done.stdout)
    assert count == tokens * len(chats), f"{count} tokens came"
    return float(seconds)


def offline(llm: LLM, chats: list[Messages], tokens: int) -> float:
    """Seconds for all chats in this process."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    begin = time.perf_counter()
    answers = llm.chat(chats, params)
    seconds = time.perf_counter() - begin
    assert all(len(answer.token_ids) == tokens for answer in answers)
    return seconds


def chats_of(turn: int, count: int) -> list[Messages]:
    """So many questions behind one system prompt; other ones at each turn."""
    work = demo_workload()
    questions = work.questions
    return [
        [
            {"role": "system", "content": work.system_prompt},
            {"role": "user", "content": f"({turn}, {number}) {questions[number % len(questions)]}"},
        ]
        for number in range(count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chats", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.read:
        url, file = options.read
        print(json.dumps(asyncio.run(read_all(url, json.loads(Path(file).read_text())))))
        return
    torch.set_num_threads(options.threads)
    print_head()
    llm = LLM.demo(dtype="bfloat16", max_num_seqs=options.chats)
    times: list[tuple[float, float]] = []
    with served(options.threads, options.chats) as url, tempfile.TemporaryDirectory() as folder:
        for turn in range(options.turns + 1):
            chats = chats_of(turn, options.chats)
            found = (
                online(url, chats, options.tokens, folder),
                offline(llm, chats, options.tokens),
            )
            if turn:  # The first computes the system prompt.
                times.append(found)
    count = options.chats * options.tokens
    rows = [
        [turn, over, alone, count / over, count / alone, f"{alone / over:.1%}"]
        for turn, (over, alone) in enumerate(times, 1)
    ]
    print_table(
        f"{options.chats} chats of {options.tokens} tokens, {options.threads} threads",
        ["turn", "server s", "engine s", "server tokens/s", "engine tokens/s", "server / engine"],
        rows,
    )
    share = statistics.median(alone / over for over, alone in times)
    best = min(alone for _, alone in times) / min(over for over, _ in times)
    print(f"\nthe server has {share:.1%} of its engine's throughput, by the best turns {best:.1%}")
    write_json(options.output, {"seconds": times, "share": share, "share_of_best": best})


if __name__ == "__main__":
    main()
