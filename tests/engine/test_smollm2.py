"""Greedy and beam float32 tokens of the demo model, identical to Hugging Face ``generate``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from beams import Answer, assert_same, hugging_face
from beams import answers as beams_of

from radixkv.attention import KVStore
from radixkv.decoding import BeamSearchParams, SamplingParams
from radixkv.llm import LLM
from radixkv.model.loading import LoadedModel, load_model

pytestmark = pytest.mark.model

NEW = 16
GREEDY = SamplingParams(max_tokens=NEW, temperature=0)
PREFACE = "You are a careful assistant. Answer in one short sentence, and never invent a source.\n"
PROMPTS = [
    PREFACE + "What is the capital of France?",
    PREFACE + "What is the capital of Austria?",
    PREFACE + "How many legs has a spider?",
    "The quick brown fox jumps over the lazy dog, and then",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n",
    "for (int i = 0; i < n; ++i) {\n  sum +=",
    "Der schnelle braune Fuchs springt über den",
    "La capitale de l'Espagne est",
    "東京は日本の",
    "I ❤️ 🍕 and 🍦, but 🥦 is",
]


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load_model("demo", "float32")


@pytest.fixture(scope="module")
def expected(demo: LoadedModel) -> list[list[int]]:
    """What Hugging Face generates for each prompt alone."""
    answers = []
    assert demo.tokenizer is not None
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = torch.tensor([demo.tokenizer(prompt).input_ids])
            out = demo.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NEW,
                eos_token_id=list(demo.eos_token_ids),
                pad_token_id=demo.eos_token_ids[0],
            )
            answers.append(out[0, ids.shape[1] :].tolist())
    assert len({tuple(answer) for answer in answers}) > 7
    return answers


SEARCHES = [
    BeamSearchParams(beam_width=4, max_tokens=10, num_return_sequences=2),
    # A full stop or a line's end, too: sequences of several lengths compete.
    BeamSearchParams(
        beam_width=3,
        max_tokens=12,
        length_penalty=2.0,
        early_stopping="never",
        num_return_sequences=3,
        stop_token_ids=(30, 198),
    ),
]
SEARCHED = [PROMPTS[0], PROMPTS[7]]


@pytest.fixture(scope="module")
def expected_beams(demo: LoadedModel) -> list[list[Answer]]:
    """What Hugging Face finds for each prompt alone."""
    assert demo.tokenizer is not None
    return [
        hugging_face(demo.model, demo.tokenizer(prompt).input_ids, params, demo.eos_token_ids)
        for prompt, params in zip(SEARCHED, SEARCHES, strict=True)
    ]


@pytest.fixture
def make(
    demo: LoadedModel, expected: object, expected_beams: object
) -> Iterator[Callable[..., LLM]]:
    """An LLM over the demo model, whose slots start as NaN; nothing may be left in the end."""
    made: list[LLM] = []

    def make_llm(num_blocks: int = 128, **settings: int) -> LLM:
        size = settings.get("block_size", 16)
        memory = num_blocks * size * 30 * 2 * 3 * 64 * 4
        llm = LLM(demo, kv_memory=memory, **settings)  # type: ignore[arg-type]
        made.append(llm)
        store = llm.engine.runner.backend.store
        assert isinstance(store, KVStore)
        assert store.num_blocks == num_blocks
        for cache in (*store.keys, *store.values):
            cache.fill_(torch.nan)
        return llm

    yield make_llm
    for llm in made:
        llm.cache.check()
        assert not llm.cache.sequences
        llm.close()


def answers(llm: LLM, prompts: list[str]) -> list[list[int]]:
    return [list(output.token_ids) for output in llm.generate(prompts, GREEDY)]


def test_cold_and_warm(make: Callable[..., LLM], expected: list[list[int]]) -> None:
    llm = make()
    assert [answers(llm, [prompt])[0] for prompt in PROMPTS] == expected
    prefilled = llm.stats().engine.prefilled_tokens
    assert answers(llm, PROMPTS) == expected
    assert llm.stats().engine.prefilled_tokens == prefilled


def test_all_ten_batched(make: Callable[..., LLM], expected: list[list[int]]) -> None:
    llm = make()
    assert answers(llm, PROMPTS) == expected
    assert llm.cache.counters.hit_tokens > 30


@pytest.mark.parametrize("chunk", [7, 64])
def test_in_chunks(make: Callable[..., LLM], expected: list[list[int]], chunk: int) -> None:
    assert answers(make(max_num_batched_tokens=chunk), PROMPTS) == expected


def test_under_preemption(make: Callable[..., LLM], expected: list[list[int]]) -> None:
    llm = make(num_blocks=14, block_size=4)
    assert answers(llm, PROMPTS) == expected
    assert llm.stats().engine.preemptions > 0


def test_beam_search(make: Callable[..., LLM], expected_beams: list[list[Answer]]) -> None:
    """Both in one batch, in chunks, beside a greedy request."""
    llm = make(max_num_batched_tokens=16)
    params = [*SEARCHES, GREEDY]
    outputs = llm.generate([*SEARCHED, PROMPTS[2]], params)
    for output, theirs in zip(outputs, expected_beams, strict=False):
        assert_same(beams_of(output), theirs)
    assert {len(tokens) for tokens, _ in expected_beams[0]} == {1, 9}
