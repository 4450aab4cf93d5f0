"""The clients of `serve_overhead.py`, in a process of their own: URL, streams, tokens of each."""

from __future__ import annotations

import asyncio
import json
import sys


async def read_streams(url: str, streams: int, tokens: int) -> dict[str, int]:
    """Read so many chats to their ends; events that came, and bytes."""
    host, port = url.removeprefix("http://").split(":")
    found = {"events": 0, "bytes": 0}

    async def one(number: int) -> None:
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": f"number {number}"}],
                "max_tokens": tokens,
                "stream": True,
                "ignore_eos": True,
                "seed": number,
                "allowed_token_ids": list(range(32, 94)),
            }
        ).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        raw = await reader.read(-1)
        assert raw.rstrip().endswith(b"0"), raw[-200:]
        assert b"[DONE]" in raw
        found["events"] += raw.count(b"data: {")
        found["bytes"] += len(raw)
        writer.close()

    await asyncio.gather(*(one(number) for number in range(streams)))
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(read_streams(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))
