"""Each prefix is computed once: tokens prefilled = tokens of the union of prompts, to the token."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixkv.decoding import SamplingParams
from radixkv.llm import LLM

MakeLLM = Callable[..., LLM]
ONE = SamplingParams(max_tokens=1, temperature=0)


def union(prompts: list[list[int]]) -> int:
    """Tokens of a trie over the prompts."""
    return len({tuple(prompt[: end + 1]) for prompt in prompts for end in range(len(prompt))})


def test_64_simultaneous_prompts(make_llm: MakeLLM) -> None:
    rng = random.Random(1)
    system = [rng.randrange(250) for _ in range(101)]
    prompts = [system + [rng.randrange(250) for _ in range(rng.randint(0, 20))] for _ in range(60)]
    prompts += [prompts[3], prompts[3][:-2], [*prompts[4], 5], system]
    llm = make_llm(num_blocks=512, max_num_batched_tokens=4096)
    llm.generate(prompts, ONE)
    stats = llm.stats()
    assert stats.engine.prefilled_tokens == union(prompts)
    assert stats.cache.counters.query_tokens == sum(map(len, prompts))
    assert stats.cache.counters.hit_tokens == sum(map(len, prompts)) - union(prompts)
    assert stats.engine.steps == 1


@given(st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_prompts_at_any_time(make_llm: MakeLLM, data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 2, 4, 16]))
    budget = data.draw(st.sampled_from([5, 17, 64, 4096]))
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=40)
    batches = data.draw(st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=3))
    llm = make_llm(num_blocks=512, block_size=block_size, max_num_batched_tokens=budget)
    for prompts in batches:
        llm.generate(prompts, ONE)
    everything = [prompt for prompts in batches for prompt in prompts]
    assert llm.stats().engine.prefilled_tokens == union(everything)


@pytest.mark.parametrize("n", [1, 8])
def test_n_samples_prefill_the_prompt_once(make_llm: MakeLLM, n: int) -> None:
    prompt = [random.Random(n).randrange(250) for _ in range(53)]
    llm = make_llm()
    (output,) = llm.generate([prompt], SamplingParams(n=n, max_tokens=10, seed=3))
    assert llm.stats().engine.prefilled_tokens == 53
    assert len({completion.token_ids for completion in output.outputs}) == n
    # 3 full blocks of the prompt and its open end, and 8 x (copied end + 1) for the branches.
    assert llm.stats().engine.peak_blocks_held <= 4 + n * 2


def test_a_full_engine_leaves_the_waiting_alone(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking up every waiting prompt at every step cost more than a step of decoding."""
    llm = make_llm(max_num_seqs=2)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    for number in range(6):
        llm.engine.add_request([number + 1] * 20, params)
    llm.engine.step()
    assert len(llm.engine.scheduler.running) == 2
    looked: list[int] = []

    class Watched:
        """The cache, but for looking things up."""

        def __getattr__(self, name: str) -> object:
            if name == "match":
                looked.append(1)
            return getattr(llm.cache, name)

    monkeypatch.setattr(llm.engine.scheduler, "cache", Watched())
    for _ in range(5):
        llm.engine.step()
    assert not looked
    while llm.engine.has_work:
        llm.engine.step()
    assert looked
    assert llm.engine.counters.requests == 6
