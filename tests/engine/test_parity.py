"""The same request gives the same tokens cold, warm, batched, chunked and preempted."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from radixkv.decoding import SamplingParams
from radixkv.llm import LLM

GREEDY = SamplingParams(max_tokens=20, temperature=0)
MakeLLM = Callable[..., LLM]
Reference = Callable[[list[int], int], list[int]]


def shared_prompts(count: int, seed: int = 0, prefix: int = 70) -> list[list[int]]:
    rng = random.Random(seed)
    system = [rng.randrange(250) for _ in range(prefix)]
    return [
        system[: prefix - rng.randrange(3)]
        + [rng.randrange(250) for _ in range(rng.randint(1, 40))]
        for _ in range(count)
    ]


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts, params)
    assert all(output.error is None for output in outputs)
    return [list(output.token_ids) for output in outputs]


def test_cold_warm_and_batched_equal_hugging_face(make_llm: MakeLLM, reference: Reference) -> None:
    prompts = shared_prompts(10)
    expected = [reference(prompt, 20) for prompt in prompts]
    assert len({tuple(answer) for answer in expected}) > 5
    llm = make_llm()
    assert [tokens(llm, [prompt])[0] for prompt in prompts] == expected
    assert [tokens(llm, [prompt])[0] for prompt in prompts] == expected
    assert tokens(llm, prompts) == expected
    assert tokens(make_llm(), prompts) == expected


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
def test_chunked(make_llm: MakeLLM, reference: Reference, chunk: int, block_size: int) -> None:
    prompts = shared_prompts(6, seed=chunk)
    llm = make_llm(
        num_blocks=2048 // block_size, block_size=block_size, max_num_batched_tokens=chunk
    )
    assert tokens(llm, prompts) == [reference(prompt, 20) for prompt in prompts]


def test_under_preemption(make_llm: MakeLLM, reference: Reference) -> None:
    prompts = shared_prompts(8, prefix=5)
    llm = make_llm(num_blocks=9)
    assert tokens(llm, prompts) == [reference(prompt, 20) for prompt in prompts]
    assert llm.stats().engine.preemptions > 0


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_at_block_borders(make_llm: MakeLLM, reference: Reference, length: int) -> None:
    """Peer fault 1 and 5: prompts that end at a block's border or beside it, hit in full."""
    prompt = shared_prompts(1, seed=length, prefix=80)[0][:length]
    longer = [*prompt, 7, 8, 9]
    llm = make_llm()
    expected = reference(prompt, 20)
    for expected_cached in (0, length):
        (output,) = llm.generate([prompt], GREEDY)
        assert list(output.token_ids) == expected
        assert output.num_cached_tokens == expected_cached
    (output,) = llm.generate([longer], GREEDY)
    assert output.num_cached_tokens == length
    assert list(output.token_ids) == reference(longer, 20)


def test_second_turn_reuses_the_first_to_the_token(make_llm: MakeLLM, reference: Reference) -> None:
    llm = make_llm()
    (first,) = llm.generate([shared_prompts(1)[0]], GREEDY)
    history = [*first.prompt_token_ids, *first.token_ids]
    (second,) = llm.generate([[*history, 1, 2, 3]], GREEDY)
    # The last token was sampled, but never computed.
    assert second.num_cached_tokens == len(history) - 1
    assert list(second.token_ids) == reference([*history, 1, 2, 3], 20)
