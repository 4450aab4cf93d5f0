"""A trace against the whole engine, its lengths reduced, and what the cache alone says to the same.

A helper of `replay.py`. All lengths are divided by one number a trace. Later prompts that repeat an
earlier answer repeat what the engine answered, so a request is asked once that one has ended.
The tokens that a trace does not repeat are drawn from the model's vocabulary by their number.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import traces
from transformers import LlamaConfig, LlamaForCausalLM

from radixkv import LLM, SamplingParams
from radixkv.cache import PrefixCache
from radixkv.config import CacheConfig
from radixkv.engine import Request
from radixkv.model.loading import LoadedModel, load_model

Tokens = npt.NDArray[np.int32]

# By which lengths are divided, so that a request takes milliseconds.
FACTORS = {"mooncake_conversation": 32, "mtbench101_chat": 4, "bbh_fewshot": 4, "tot_game24": 2}
SHARES = (0.10, 0.50)
AT_ONCE = 16
VOCABULARY, LONGEST = 32_000, 16_384
# A prime beyond all vocabularies: neighbouring numbers become tokens far from each other.
STRIDE = 2_654_435_761


def tiny_model() -> LoadedModel:
    """A random Llama of two layers, in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    return LoadedModel(
        model=model,
        tokenizer=None,
        config=config,
        name="tiny",
        eos_token_ids=(),
        max_model_len=LONGEST,
        vocab_size=VOCABULARY,
        dtype=torch.float32,
    )


@dataclass(frozen=True)
class Reduced:
    """A request of a trace, reduced: whose tokens it repeats, how many, and how many follow."""

    parent: int
    shared: int
    prompt: int
    output: int


def reduced(trace: traces.Trace, factor: int) -> list[Reduced]:
    """All requests, their lengths divided; one token at least of each."""
    return [
        Reduced(parent, shared // factor, max(prompt // factor, 1), max(output // factor, 1))
        for _, _, parent, shared, prompt, output, _ in trace.rows
    ]


def unique_blocks(rows: list[Reduced], block_size: int) -> int:
    """Blocks of a cache that need never evict, but for their ends."""
    tokens = sum(max(row.prompt - row.shared, 0) + row.output for row in rows)
    return max(tokens // block_size, 1)


@dataclass
class Served:
    """What became of a trace's requests.

    Attributes
    ----------
    prompts, outputs : dict of int to int32 array
        By the request's number, of those that were served, in the order in which they were asked.
    too_large : int
        Requests that the pool cannot hold; nobody is asked for them.
    """

    prompts: dict[int, Tokens] = field(default_factory=dict)
    outputs: dict[int, Tokens] = field(default_factory=dict)
    too_large: int = 0
    prefilled: int = 0
    recomputed: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts.values()))

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.outputs.values()))

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": len(self.prompts),
            "too_large": self.too_large,
            "prompt_tokens": self.prompt_tokens,
            "prefilled": self.prefilled,
            "recomputed": self.recomputed,
            "hit_rate": 1 - self.prefilled / self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "wall_s": self.wall_s,
            "cpu_s": self.cpu_s,
        }


class Asker:
    """Asks an engine for a trace's requests, in order, so many at once."""

    def __init__(self, llm: LLM, rows: list[Reduced], at_once: int) -> None:
        self._llm, self._rows, self._at_once = llm, rows, at_once
        self._left = list(range(len(rows)))
        self._whole: dict[int, Tokens] = {}  # prompt and answer, of those that have ended
        self._running: dict[int, Request] = {}
        self._fresh = 0
        self.served = Served()

    def run(self) -> Served:
        """Until all have ended."""
        engine = self._llm.engine
        before, wall, cpu = self._llm.stats().engine, time.perf_counter(), time.process_time()
        while self._left or self._running:
            self._ask()
            if self._running:
                engine.step()
            self._collect()
        now, served = self._llm.stats().engine, self.served
        served.wall_s, served.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        served.prefilled = now.prefilled_tokens - before.prefilled_tokens
        served.recomputed = now.recomputed_tokens - before.recomputed_tokens
        return served

    def _ask(self) -> None:
        for number in self._left[:]:
            if len(self._running) == self._at_once:
                break
            row = self._rows[number]
            if row.parent >= 0 and row.parent not in self._whole:
                continue
            self._left.remove(number)
            prompt = self._prompt(row)
            cache = self._llm.cache
            if len(prompt) + row.output - 1 > cache.pool.num_blocks * cache.block_size:
                self.served.too_large += 1
                self._whole[number] = np.concatenate((prompt, self._new(row.output)))
                continue
            params = SamplingParams(max_tokens=row.output, temperature=0, ignore_eos=True)
            self._running[number] = self._llm.engine.add_request(prompt, params)
            self.served.prompts[number] = prompt

    def _prompt(self, row: Reduced) -> Tokens:
        length = row.prompt
        repeated = self._whole[row.parent][: min(row.shared, length)] if row.parent >= 0 else []
        return np.concatenate((repeated, self._new(length - len(repeated)))).astype(np.int32)

    def _new(self, count: int) -> Tokens:
        numbers = np.arange(self._fresh, self._fresh + count, dtype=np.int64)
        self._fresh += count
        return (numbers * STRIDE % self._llm.loaded.vocab_size).astype(np.int32)

    def _collect(self) -> None:
        for number, request in list(self._running.items()):
            if request.finished_at is None:
                continue
            if request.error is not None:
                raise request.error
            del self._running[number]
            answer = np.array(request.branches[0].stream.token_ids, np.int32)
            self.served.outputs[number] = answer
            self._whole[number] = np.concatenate((request.prompt, answer))


def cache_alone(served: Served, num_blocks: int, block_size: int) -> dict[str, Any]:
    """The same requests, one after the other, against a cache of the same size without an engine.

    As an engine does, it never stores the last token of an answer, which is sampled only.
    """
    cache = PrefixCache(CacheConfig(num_blocks=num_blocks, block_size=block_size))
    begin, prefilled = time.process_time(), 0
    for number, prompt in served.prompts.items():
        sequence = cache.acquire(prompt)
        prefilled += len(prompt) - min(sequence.num_cached, len(prompt))
        cache.commit(sequence)
        sequence.extend(served.outputs[number][:-1])
        cache.commit(sequence, include_open=True)
        cache.release(sequence)
        cache.take_copies()
    cpu_s = time.process_time() - begin
    cache.check()
    hit_rate = 1 - prefilled / served.prompt_tokens
    return {"prefilled": prefilled, "hit_rate": hit_rate, "cpu_s": cpu_s}


def measure(trace: traces.Trace, factor: int, block_size: int, model: str) -> dict[str, Any]:
    """By share of the unique blocks: the cache alone, the engine in order, and several at once."""
    rows = reduced(trace, factor)
    loaded = tiny_model() if model == "tiny" else load_model(model, "bfloat16")
    with LLM(loaded, block_size=block_size, kv_memory="64MiB") as llm:
        store = llm.engine.runner.backend.store
        per_block = store.bytes_per_block(store.layers, block_size, store.kv_dtype)
    found: dict[str, Any] = {}
    for share in SHARES:
        num_blocks = max(int(unique_blocks(rows, block_size) * share), 1)
        with LLM(loaded, block_size=block_size, kv_memory=num_blocks * per_block) as llm:
            in_order = Asker(llm, rows, 1).run()
            llm.cache.reset()
            at_once = Asker(llm, rows, AT_ONCE).run()
            llm.cache.check()
        found[f"{share:.0%}"] = {
            "blocks": num_blocks,
            "cache alone": cache_alone(in_order, num_blocks, block_size),
            "engine, in order": in_order.as_dict(),
            f"engine, {AT_ONCE} at once": at_once.as_dict(),
        }
    return found


def rows_of(found: dict[str, Any]) -> list[list[Any]]:
    """Lines of the table of one trace; the first column is ``capacity: who``."""
    rows: list[list[Any]] = []
    for share, each in found.items():
        for who, kept in each.items():
            if who == "blocks":
                continue
            line = [f"{share}: {who}", each["blocks"], 100 * kept["hit_rate"], kept["prefilled"]]
            if "wall_s" in kept:
                tokens = kept["output_tokens"] / kept["wall_s"]
                asked = kept["requests"]
                rows.append([*line, kept["recomputed"], asked, kept["too_large"], tokens])
            else:
                rows.append([*line, "-", "-", "-", "-"])
            rows[-1].append(kept["cpu_s"])
    return rows


HEAD = ["capacity", "blocks", "hits %", "prefilled", "again", "requests", "too large", "tokens/s"]
HEAD += ["CPU s"]
