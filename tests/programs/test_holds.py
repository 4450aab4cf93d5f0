"""Contexts that stand open: what they cost, and that they never block the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from fake import check_content, make_engine, naive

from radixkv.decoding import SamplingParams
from radixkv.engine import Engine
from radixkv.programs import Context, Host, run

NO_TOKENIZER: Any = SimpleNamespace(name="fake", tokenizer=None)


def open_context(engine: Engine, tokens: list[int]) -> Context:
    context = Context(Host(engine, NO_TOKENIZER))
    context.append(tokens)
    return context


def prefix(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 5, length).tolist()


def test_a_thousand_contexts_over_one_prefix() -> None:
    """The prefix's blocks once, and at most one block each."""
    engine = make_engine(1500, 16, max_model_len=4096, max_num_batched_tokens=4096)
    root = open_context(engine, prefix(2000))
    branches = root.fork(1000)
    for number, branch in enumerate(branches):
        branch.append([number // 5**i % 5 for i in range(5)])
    run([branch.generate(max_tokens=4, temperature=0, ignore_eos=True) for branch in branches])
    stats = engine.cache.stats()
    assert stats.sequences == 1000
    assert stats.num_blocks - stats.free - stats.cached_only <= 125 + 1000
    assert engine.counters.peak_blocks_held <= 125 + 1000
    assert engine.counters.prefilled_tokens == 2000 + len(
        {b.tokens[2000 : 2000 + i] for b in branches for i in range(1, 6)}
    )
    assert engine.scheduler.holds.given_up == engine.counters.preemptions == 0
    assert {(b.stats.shared_blocks, b.stats.own_blocks) for b in branches} == {(125, 1)}
    again = branches[7].fork(1000)
    assert engine.cache.stats().free == stats.free
    assert {(b.stats.shared_blocks, b.stats.own_blocks) for b in again} == {(126, 0)}
    root.close()
    assert not engine.cache.sequences
    engine.cache.check()


def test_a_thousand_contexts_in_a_pool_for_three() -> None:
    """Whoever was used longest ago gives its blocks up; all go on with the very same tokens."""
    engine = make_engine(12, 4, max_num_batched_tokens=64)
    contexts = [
        open_context(engine, [number // 5**i % 5 for i in range(5)]) for number in range(1000)
    ]
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    for _ in range(2):
        run([context.generate(params) for context in contexts])
        engine.cache.check()
        check_content(engine)
    assert engine.scheduler.holds.given_up > 900
    assert engine.cache.stats().sequences < 12
    for context in contexts[::50]:
        first, _ = naive(context.tokens[:5], params, 0)
        second, _ = naive(context.tokens[:8], params, 0)
        assert context.tokens[5:] == (*first, *second)
    for context in contexts:
        context.close()
    assert not engine.cache.sequences


def test_idle_contexts_go_before_anyone_waits_or_is_preempted() -> None:
    engine = make_engine(16, 4)
    idle = [open_context(engine, [i] * 8) for i in range(5)]
    run([context.generate(max_tokens=1, temperature=0) for context in idle])
    assert sum(context.stats.own_blocks for context in idle) == 10
    idle[0].generate(max_tokens=1, temperature=0).result()
    busy = open_context(engine, prefix(30))
    busy.generate(max_tokens=10, temperature=0, ignore_eos=True).result()
    assert engine.counters.preemptions == 0
    # Those used longest ago went, the others stayed.
    held = [context.stats.num_computed > 0 for context in idle]
    assert held == [True, False, False, held[3], held[4]]
    for context in (*idle, busy):
        context.close()


def test_a_reset_is_felt_by_contexts_too() -> None:
    engine = make_engine()
    context = open_context(engine, prefix(10))
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    context.generate(params).result()
    engine.cache.reset()
    before = engine.counters.prefilled_tokens
    context.generate(params).result()
    assert engine.counters.prefilled_tokens - before == 13
    assert (
        list(context.tokens[10:])
        == naive(prefix(10), SamplingParams(max_tokens=6, temperature=0, ignore_eos=True), 0)[0]
    )
    context.close()
    assert engine.cache.pool.num_free + engine.cache.tree.num_evictable == 64


def test_losers_go_first() -> None:
    """Before what was used longer ago: nobody will ask for them again."""
    engine = make_engine(24, 4)
    engine.add_request([4] * 20, SamplingParams(max_tokens=1, temperature=0))
    engine.step()
    context = open_context(engine, prefix(8))
    drafts = context.fork(3)
    for number, draft in enumerate(drafts):
        draft.append([number] * 9)
    run([d.generate(max_tokens=2, temperature=0, ignore_eos=True) for d in drafts])
    tokens = [draft.tokens for draft in drafts]
    assert [engine.cache.match(each) for each in tokens] == [17, 17, 17]
    assert context.join(drafts, by=lambda draft: float(draft is drafts[1])) is drafts[1]
    other = open_context(engine, prefix(51))
    other.generate(max_tokens=1, temperature=0).result()
    assert engine.cache.match([4] * 20) == 20
    assert engine.cache.match(tokens[1]) >= 16
    assert engine.cache.match(tokens[0]) + engine.cache.match(tokens[2]) < 34
    other.close()
    context.close()
