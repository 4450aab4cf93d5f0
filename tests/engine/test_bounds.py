"""How much memory and work branches may take, at every step: the promises as tests."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
from fake import VOCABULARY, check_over, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.decoding import BeamSearchParams, SamplingParams
from radixkv.engine import Engine, Request
from radixkv.engine.beams import Params

PROMPT = 1530


def prompt(length: int = PROMPT) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(VOCABULARY - 1) for _ in range(length)]


def start(params: Params, length: int, block_size: int) -> tuple[Engine, Request]:
    engine = make_engine(1024, block_size, max_model_len=4096)
    return engine, engine.add_request(prompt(length), params)


def steps(engine: Engine) -> Iterator[int]:
    """Run to the end; after each step but the last, the tokens that it computed."""
    before = 0
    while engine.has_work:
        engine.step()
        engine.cache.check()
        counters = engine.counters
        computed = counters.prefilled_tokens + counters.decoded_tokens + counters.recomputed_tokens
        if engine.has_work:
            yield computed - before
        before = computed
    check_over(engine)


def in_use(engine: Engine) -> int:
    """Blocks that are not free, those that are only cached among them."""
    return engine.cache.pool.num_blocks - engine.cache.pool.num_free


def held(engine: Engine) -> int:
    """Blocks that a running sequence holds: what cannot be given to others."""
    return in_use(engine) - engine.cache.tree.num_evictable


def needed(request: Request, block_size: int) -> int:
    """Blocks that the union of the branches' computed tokens takes, each shared once."""
    return len(
        {
            branch.tokens()[: min(start + block_size, branch.num_tokens - 1)].tobytes()
            for branch in request.branches
            for start in range(0, branch.num_tokens - 1, block_size)
        }
    )


def test_eight_samples_of_a_long_prompt_hold_it_once() -> None:
    params = SamplingParams(n=8, max_tokens=50, seed=1, ignore_eos=True)
    engine, request = start(params, PROMPT, 16)
    most = 0
    for _ in steps(engine):
        assert in_use(engine) <= math.ceil(PROMPT / 16) + 8 * (1 + math.ceil(50 / 16))
        most = max(most, in_use(engine))
    assert all(len(branch.stream.token_ids) == 50 for branch in request.branches)
    # Each on its own: 1,579 computed tokens in 99 blocks, eight times.
    assert most < 8 * 99 / 5


def test_eight_samples_compute_the_prompt_once_and_then_a_token_each() -> None:
    engine, _ = start(SamplingParams(n=8, max_tokens=50, seed=1, ignore_eos=True), PROMPT, 16)
    assert list(steps(engine)) == [PROMPT] + [8] * 48
    assert engine.counters.prefilled_tokens == PROMPT
    assert engine.counters.decoded_tokens == 8 * 49


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_four_beams_hold_no_more_than_their_tokens_and_a_block_each(block_size: int) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=50, ignore_eos=True)
    engine, request = start(params, 400, block_size)
    for _ in steps(engine):
        assert held(engine) <= needed(request, block_size) + 4
    assert len(request.branches[0].stream.token_ids) == 50


def test_a_step_of_a_beam_search_computes_one_token_a_beam() -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=50, ignore_eos=True)
    engine, _ = start(params, PROMPT, 16)
    assert list(steps(engine)) == [PROMPT] + [4] * 48
    assert engine.counters.prefilled_tokens == PROMPT
    assert engine.counters.decoded_tokens == 4 * 49
    assert engine.counters.recomputed_tokens == 0


@settings(deadline=None, max_examples=60)
@given(
    width=st.integers(1, 5),
    length=st.integers(1, 40),
    new=st.integers(1, 20),
    block_size=st.integers(1, 5),
    penalty=st.sampled_from([1.0, 1.3]),
    searched=st.booleans(),
)
def test_the_bounds_hold_for_any_branches(
    width: int, length: int, new: int, block_size: int, penalty: float, searched: bool
) -> None:
    params: Params
    if searched:
        params = BeamSearchParams(beam_width=width, max_tokens=new, repetition_penalty=penalty)
    else:
        params = SamplingParams(n=width, max_tokens=new, seed=new, repetition_penalty=penalty)
    engine, request = start(params, length, block_size)
    for place, computed in enumerate(steps(engine)):
        live = len(request.live_branches)
        assert computed == length if not place else computed <= width
        assert held(engine) <= needed(request, block_size) + live
    assert engine.counters.prefilled_tokens == length
