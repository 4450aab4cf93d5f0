"""What do int8 weights change? Logits of a real text, and the memory that weights take.

    python benchmarks/quantization.py [--tokens 0] [--threads 2]

The demo model reads the demo's system prompt and its questions (2,199 tokens; --tokens of each, 0
for all), in steps of 64 tokens that attend to all before them, in float32, in bfloat16, and with
int8 weights. Perplexity; then, against bfloat16 and against float32: the mean difference of a
logit, the mean Kullback-Leibler divergence from the other's distribution in nats, and the share of
tokens after which both have the same likeliest one. MB of the weights as they are kept, in all
forms; and of a process that has answered once, its own memory (Linux counts pages of files apart,
which is where float32 weights of a file in float32 stay).
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from measure import print_head, print_table, write_json

# Before torch: it says how long OpenMP's threads turn round.
from radixkv import LLM  # isort: split

import torch

from radixkv.attention import KVStore, Row, choose_backend, make_batch
from radixkv.model.prepack import weight_bytes
from radixkv.workloads import demo_workload

SETTINGS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
}
STEP, BLOCK = 64, 16
HEAD = ["weights", "perplexity"]
HEAD += [f"{what} to {other}" for other in ("bf16", "f32") for what in ("|d|", "KL", "same %")]
HEAD += ["weights MB", "process MB"]
NAMES = ["weights", "perplexity", "difference_bf16", "kl_bf16", "same_bf16"]
NAMES += ["difference_f32", "kl_f32", "same_f32", "weights_mb", "process_mb"]


def texts(llm: LLM, count: int) -> list[list[int]]:
    """Tokens of the system prompt, and of all questions after each other."""
    workload = demo_workload()
    questions = "\n".join([*workload.questions, *workload.follow_ups])
    tokens = [llm.tokenize(text) for text in (workload.system_prompt, questions)]
    return [each[: count or None] for each in tokens]


@torch.inference_mode()
def logits_of(llm: LLM, tokens: list[int]) -> torch.Tensor:
    """Logits after each token, float32 (tokens, vocabulary); as the engine computes them."""
    adapter = llm.engine.runner.adapter
    table = np.arange(-(-len(tokens) // BLOCK), dtype=np.int32)
    backend = choose_backend(KVStore(adapter.layers, len(table), BLOCK, llm.loaded.dtype))
    parts = []
    for start in range(0, len(tokens), STEP):
        ids = torch.tensor(tokens[start : start + STEP])
        batch = make_batch([Row(table, start, len(ids))], BLOCK)
        parts.append(adapter.forward(backend, batch, ids, torch.arange(len(ids))).float())
    return torch.cat(parts)


def perplexity(logits: list[torch.Tensor], tokens: list[list[int]]) -> float:
    """Of each text's tokens but the first."""
    losses = [
        torch.nn.functional.cross_entropy(each[:-1], torch.tensor(ids[1:]), reduction="none")
        for each, ids in zip(logits, tokens, strict=True)
    ]
    return math.exp(float(torch.cat(losses).mean()))


def compared(logits: list[torch.Tensor], others: list[torch.Tensor]) -> list[float]:
    """Mean difference of a logit, KL divergence in nats, and share of same tokens in %."""
    found = []
    for each, other in zip(logits, others, strict=True):
        mine, its = each.log_softmax(-1), other.log_softmax(-1)
        divergence = (its.exp() * (its - mine)).sum(-1)
        same = each.argmax(-1) == other.argmax(-1)
        found.append(torch.stack([(each - other).abs().mean(-1), divergence, 100.0 * same]))
    return [float(value) for value in torch.cat(found, 1).mean(1)]


def own_memory() -> float:
    """MB that this process has written, and no file has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024 / 1e6


def resident(name: str) -> float:
    """MB of a process of its own that has such a model and nothing else, and has answered."""
    command = [sys.executable, __file__, "--resident", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=0, help="of each text; 0 for all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resident", choices=SETTINGS, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.resident:
        with LLM.demo(kv_memory="64MiB", **SETTINGS[arguments.resident]) as llm:
            llm.generate("Once upon a time")
            print(own_memory())
        return
    print_head()
    logits: dict[str, list[torch.Tensor]] = {}
    megabytes: dict[str, float] = {}
    for name, settings in SETTINGS.items():
        with LLM.demo(kv_memory="64MiB", **settings) as llm:
            tokens = texts(llm, arguments.tokens)
            logits[name] = [logits_of(llm, each) for each in tokens]
            megabytes[name] = weight_bytes(llm.loaded.model) / 1e6
    lines: list[list[Any]] = []
    for name, each in logits.items():
        pairs = [compared(each, logits[other]) for other in ("bfloat16", "float32")]
        line = [name, perplexity(each, tokens), *pairs[0], *pairs[1]]
        lines.append([*line, megabytes[name], resident(name)])
    shown = [
        [line[0], f"{line[1]:.3f}", *(f"{value:.4f}" for value in line[2:-2]), *line[-2:]]
        for line in lines
    ]
    print_table(f"{sum(map(len, tokens))} tokens of the demo's texts", HEAD, shown)
    write_json(arguments.output, {"lines": [dict(zip(NAMES, x, strict=True)) for x in lines]})


if __name__ == "__main__":
    main()
