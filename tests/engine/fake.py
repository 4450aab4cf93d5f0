"""A fake model whose logits are a hash of the whole prefix as read back through block tables.

Every slot carries the token and its position. A read through a wrong table entry, a missing copy,
a stale block or a slot that nobody wrote changes the hash, and with it what is generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from radixkv.attention import ON_A_CPU, AttentionBatch, CostModel, Row, make_batch
from radixkv.cache import PrefixCache
from radixkv.config import CacheConfig, EngineConfig
from radixkv.decoding import (
    BeamSearch,
    BeamSearchParams,
    GrammarCompiler,
    Hypothesis,
    SamplingParams,
    SamplingRow,
    TextStream,
    logit_edits,
    propose,
    sample,
)
from radixkv.engine import Engine, EngineCounters, ModelRunner
from radixkv.engine.scheduler import Step

VOCABULARY = 6
EOS = 5
POISON = -1
Words = npt.NDArray[np.int64]


def words_of(tokens: Words, start: int = 0) -> Words:
    """What the slots of these tokens hold; their positions begin at ``start``."""
    return tokens * 1000 + np.arange(start, start + len(tokens))


def logits_of(words: Words) -> torch.Tensor:
    """Logits behind a prefix, by the words that were read for it; float32 (VOCABULARY,)."""
    rng = np.random.default_rng(abs(hash(words.tobytes())))
    return torch.from_numpy(rng.normal(0, 1.5, VOCABULARY)).float()


class FakeStore:
    """Slots of one layer, each with a word; stands for a `KVStore`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots = np.full((num_blocks, block_size), POISON, np.int64)
        self.fail: Exception | None = None

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self.fail is not None:
            error, self.fail = self.fail, None
            self.slots[[target for _, target in pairs]] = POISON
            raise error
        if pairs:
            self.slots[[target for _, target in pairs]] = self.slots[
                [source for source, _ in pairs]
            ]


class FakeBackend:
    cost: ClassVar[CostModel] = ON_A_CPU

    def __init__(self, store: FakeStore) -> None:
        self.store = store

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.store.copy_blocks(pairs)


class FakeAdapter:
    """Stands for a `ModelAdapter`.

    Attributes
    ----------
    fail : exception or None
        The next forward raises it, having written nothing (or, with ``fail_late``, garbage).
    nan_row : int
        Which of the next forward's logits are NaN; -1 for none.
    """

    layers: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.fail: BaseException | None = None
        self.fail_late = False
        self.nan_row = -1

    def close(self) -> None:
        pass

    def forward(
        self,
        backend: FakeBackend,
        batch: AttentionBatch,
        tokens: torch.Tensor,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        error, self.fail = self.fail, None
        flat = backend.store.slots.reshape(-1)
        if error is not None:
            if self.fail_late:
                flat[batch.slots.numpy()] = POISON
            raise error
        words = tokens.numpy() * 1000 + batch.positions
        if batch.written is not None:
            words = words[batch.written.numpy()]
        flat[batch.slots.numpy()] = words
        for sources, targets in batch.copies:
            flat[targets.numpy()] = flat[sources.numpy()]
        rows = np.searchsorted(batch.offsets, wanted.numpy(), "right") - 1
        logits = [
            logits_of(self._read(backend.store, batch, int(row), int(batch.positions[token]) + 1))
            for row, token in zip(rows, wanted.tolist(), strict=True)
        ]
        if self.nan_row >= 0 and logits:
            logits[self.nan_row % len(logits)][0] = torch.nan
            self.nan_row = -1
        return torch.stack(logits) if logits else torch.empty(0, VOCABULARY)

    def _read(self, store: FakeStore, batch: AttentionBatch, row: int, stop: int) -> Words:
        """The row's first words, shared runs through the first member's table, as backends do."""
        table = batch.rows[row].table.copy()
        for run in batch.plan.runs:
            if run.first_row <= row < run.last_row:
                blocks = slice(run.first_block, run.last_block)
                table[blocks] = batch.rows[run.first_row].table[blocks]
        for run in batch.plan.runs:
            inside = run.first_row <= row < run.last_row
            assert not inside or run.last_block <= batch.plan.tail_blocks[row]
        return store.slots[table].reshape(-1)[:stop]


def make_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    max_model_len: int = 64,
    tokenizer: Any = None,
    grammars: GrammarCompiler | None = None,
    **settings: Any,
) -> Engine:
    """An engine over the fake model."""
    cache = PrefixCache(CacheConfig(num_blocks=num_blocks, block_size=block_size))
    backend = FakeBackend(FakeStore(num_blocks, block_size))
    runner = ModelRunner(FakeAdapter(), backend, EngineCounters())  # type: ignore[arg-type]
    return Engine(
        runner,
        cache,
        EngineConfig(**settings),
        vocab_size=VOCABULARY,
        max_model_len=max_model_len,
        tokenizer=tokenizer,
        eos_token_ids=[EOS],
        grammars=grammars,
    )


def naive(
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int,
    branch: int = 0,
    max_model_len: int = 64,
) -> tuple[list[int], str | None]:
    """What a model without any cache generates, and how it ends."""
    tokens = np.array(prompt, np.int64)
    edits = logit_edits(params, tokens, vocab_size=VOCABULARY)
    stream = TextStream(params, None, eos_token_ids=[EOS], edits=edits)
    while stream.finish_reason is None:
        row = SamplingRow(params, seed, branch, len(tokens), stream.banned_tokens, stream.edits)
        token = int(sample(logits_of(words_of(tokens))[None], [row]).token_ids[0])
        stream.push(token)
        tokens = np.append(tokens, token)
        if len(tokens) >= max_model_len:
            stream.finish()
    return stream.token_ids, stream.finish_reason


def naive_beams(
    prompt: Sequence[int], params: BeamSearchParams, max_model_len: int = 64
) -> tuple[list[list[list[int]]], list[Hypothesis]]:
    """The beams after each step, and the results, of a model without any cache."""
    room = min(params.max_tokens, max_model_len - len(prompt))
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    search = BeamSearch(params, end_tokens=ends, max_new_tokens=room)
    each = params.for_branches()
    states = []
    while not search.done:
        states.append([list(beam.token_ids) for beam in search.running])
        words = [words_of(np.array([*prompt, *tokens], np.int64)) for tokens in states[-1]]
        logits = torch.stack([logits_of(its) for its in words])
        edits = [
            logit_edits(each, np.array(prompt), vocab_size=VOCABULARY, words_begin_in_prompt=True)
            for _ in states[-1]
        ]
        for its, tokens in zip(edits, states[-1], strict=True):
            for token in tokens if its is not None else ():
                its.push(token)
        proposed = propose(logits, search.num_candidates, edits=edits, banned=search.banned_tokens)
        search.advance([candidates for candidates in proposed if candidates is not None])
    return states, search.finished[: params.num_return_sequences]


def check_content(engine: Engine) -> None:
    """Whatever the tree shows has been computed, to the slot; free blocks are made garbage."""
    cache, slots = engine.cache, engine.runner.backend.store.slots  # type: ignore[attr-defined]
    for node in cache.tree.nodes():
        tokens = np.frombuffer(bytes(node.tokens), np.int32).astype(np.int64)
        stored = slots[node.blocks.tolist()].reshape(-1)[: len(tokens)]
        expected = words_of(tokens, node.start * cache.block_size)
        assert (stored == expected).all(), "the tree shows what nobody computed"
    slots[cache.pool.free_blocks()] = POISON


def check_over(engine: Engine) -> None:
    """Law 12: only the tree holds blocks, and after a reset nobody does."""
    assert not engine.has_work
    assert not engine.requests
    assert not engine.cache.sequences
    engine.cache.check()
    stats = engine.cache.stats()
    assert stats.held_only == stats.held_and_cached == 0
    engine.cache.reset()
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks


def equals_a_new_one(step: Step, batch: AttentionBatch) -> None:
    """A batch that was grown from the last step's is what the rows themselves would make."""
    rows = [Row(row.sequence.block_table, row.start, row.stop - row.start) for row in step.rows]
    new = make_batch(rows, batch.block_size, plan=batch.plan)
    for mine, other in zip(batch.rows, new.rows, strict=True):
        assert mine.table.tolist() == other.table.tolist()
        assert mine[1:] == other[1:]
    assert batch.offsets.tolist() == new.offsets.tolist()
    assert batch.positions.tolist() == new.positions.tolist() == batch.position_ids.tolist()
    assert batch.slots.tolist() == new.slots.tolist()
    assert batch.written is new.written is None
    assert batch.copies == new.copies == []
    assert batch.kv_tokens() == new.kv_tokens()
