"""What serving costs the event loop: its thread's CPU time for each streamed token.

    python benchmarks/serve_overhead.py [--streams 64] [--tokens 256] [--turns 5]

A tiny random model is served by the real engine, worker, application and uvicorn; all its streams
are read by another process. CPU time of the event loop's thread is what counts: the wall time is
shared with the engine, and with whoever else uses the machine. It holds all that a request takes
there, from its body to its last byte. An event has several tokens where the loop fell behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import uvicorn
from measure import print_head, print_table, write_json
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from radixkv import LLM
from radixkv.model.loading import LoadedModel
from radixkv.server.app import create_app
from radixkv.server.config import ServerConfig
from radixkv.server.connections import Connection
from radixkv.server.service import Service

NAMES = ("microseconds_a_token", "tokens_an_event", "bytes_a_token")


def tiny_model() -> LoadedModel:
    """A random two-layer Llama with a token a byte: its steps are short, its streams long."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    return LoadedModel(
        model=model,
        tokenizer=fast,
        config=config,
        name="tiny",
        eos_token_ids=(256,),
        max_model_len=2048,
        vocab_size=257,
        dtype=torch.float32,
    )


class Served:
    """A server on a thread, whose CPU time can be asked for."""

    def __init__(self, llm: LLM) -> None:
        service = Service(llm, ServerConfig(port=0))
        self._app = create_app(service)
        self.loop: asyncio.AbstractEventLoop | None = None
        config = uvicorn.Config(self._app, log_level="warning", access_log=False, http=Connection)
        self.server = uvicorn.Server(config)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.server._serve([self.listener])

    def cpu_seconds(self) -> float:
        """CPU time of the event loop's thread so far."""
        assert self.loop is not None
        told: Future[float] = Future()
        self.loop.call_soon_threadsafe(lambda: told.set_result(time.thread_time()))
        return told.result()

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()


def measure(url: str, served: Served, streams: int, tokens: int) -> dict[str, Any]:
    """One turn: microseconds of the event loop for each token, tokens of an event."""
    reader = Path(__file__).with_name("stream_reader.py")
    command = [sys.executable, str(reader), url, str(streams), str(tokens)]
    before = served.cpu_seconds()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    cpu = served.cpu_seconds() - before
    found = json.loads(done.stdout)
    total = streams * tokens
    return {
        "microseconds_a_token": cpu / total * 1e6,
        "tokens_an_event": total / (found["events"] - 2 * streams),
        "bytes_a_token": found["bytes"] / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    served = Served(LLM(tiny_model(), kv_memory="64MiB"))
    try:
        measure(served.url, served, options.streams, 8)  # warm
        turns = [
            measure(served.url, served, options.streams, options.tokens)
            for _ in range(options.turns)
        ]
    finally:
        served.close()
    medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    print_head()
    print_table(
        f"{options.streams} streams of {options.tokens} tokens, medians of {options.turns} turns",
        ["", "event loop, µs a token", "tokens an event", "bytes a token"],
        [["radixkv", *(medians[name] for name in NAMES)]],
    )
    write_json(options.output, {"medians": medians, "turns": turns})


if __name__ == "__main__":
    main()
