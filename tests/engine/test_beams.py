"""Beam search in the engine: Hugging Face's sequences and scores; blocks by reference counts."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from beams import Answer, answers, assert_same, hugging_face
from failing import let_fail
from fake import check_over, make_engine
from tiny_model import VOCABULARY, tiny_llama

from radixkv.cache import PrefixCache
from radixkv.decoding import BeamSearchParams, SamplingParams
from radixkv.engine import TokenDelta, output_of
from radixkv.errors import NumericalError, PromptTooLongError, RequestError
from radixkv.llm import LLM
from radixkv.model.loading import LoadedModel

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
from families import build, quiet, softcap_applied

MakeLLM = Callable[..., LLM]
Beams = Callable[[list[int], BeamSearchParams], list[Answer]]
Reference = Callable[[list[int], int], list[int]]

# Every width, penalty, mode and number of results; stop tokens are drawn from so many.
SAMPLE = [
    # width, penalty, early_stopping, returned, stop tokens
    (2, 1.0, False, 1, 0),
    (2, 0.5, True, 2, 20),
    (2, 2.0, "never", 2, 40),
    (3, 1.0, True, 3, 20),
    (3, 2.0, False, 1, 1),
    (3, 0.5, "never", 2, 40),
    (4, 1.0, False, 3, 20),
    (4, 1.0, True, 1, 40),
    (4, 2.0, "never", 3, 20),
    (4, -1.0, "never", 2, 20),
    (5, 0.5, False, 2, 1),
    (5, 2.0, True, 3, 20),
    (6, 1.0, "never", 1, 1),
    (6, 0.0, False, 3, 40),
    (7, 0.5, True, 2, 1),
    (7, 2.0, False, 3, 20),
    (8, 1.0, True, 3, 1),
    (8, 2.0, "never", 1, 20),
    (8, 0.5, False, 3, 0),
]
CASES = [
    BeamSearchParams(
        beam_width=width,
        length_penalty=penalty,
        early_stopping=early,  # type: ignore[arg-type]
        num_return_sequences=returned,
        stop_token_ids=random.Random(place).sample(range(250), stops),
        max_tokens=12,
        min_tokens=place % 3,
    )
    for place, (width, penalty, early, returned, stops) in enumerate(SAMPLE)
]
FOUR = BeamSearchParams(beam_width=4, max_tokens=14, num_return_sequences=2)


def prompt(seed: int, length: int = 40) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(length)]


@pytest.fixture(scope="module")
def beams(tiny: LoadedModel) -> Beams:
    """Hugging Face's own search; each asked once."""
    model = tiny_llama()
    known: dict[tuple[tuple[int, ...], BeamSearchParams], list[Answer]] = {}

    def search(tokens: list[int], params: BeamSearchParams) -> list[Answer]:
        key = tuple(tokens), params
        if key not in known:
            known[key] = hugging_face(model, tokens, params, tiny.eos_token_ids)
        return known[key]

    return search


def held(cache: PrefixCache) -> int:
    return cache.pool.num_blocks - cache.pool.num_free - cache.tree.num_evictable


def steps(llm: LLM) -> Iterator[list[TokenDelta]]:
    """Run until there is nothing left to do; the laws hold after each step."""
    while llm.engine.has_work:
        yield llm.engine.step()
        llm.cache.check()


# -- the same as Hugging Face ------------------------------------------------------------------


@pytest.mark.parametrize("params", CASES, ids=[str(case) for case in SAMPLE])
def test_equals_hugging_face(make_llm: MakeLLM, beams: Beams, params: BeamSearchParams) -> None:
    llm = make_llm()
    tokens = prompt(params.beam_width, 9 + 3 * params.beam_width)
    (output,) = llm.beam_search([tokens], params)
    assert_same(answers(output), beams(tokens, params))
    for completion in output.outputs:
        length = len(completion.token_ids) ** params.length_penalty
        assert completion.cumulative_logprob is not None
        assert completion.score == pytest.approx(completion.cumulative_logprob / length, rel=1e-5)
        ended = completion.token_ids[-1] in {*params.stop_token_ids, 256}
        assert completion.finish_reason == ("stop" if ended else "length")


def test_many_of_the_cases_end_by_a_token(beams: Beams) -> None:
    found = [beams(prompt(p.beam_width, 9 + 3 * p.beam_width), p) for p in CASES]
    short = [len(tokens) for found_here in found for tokens, _ in found_here if len(tokens) < 12]
    assert len(short) > 10
    assert len(set(short)) > 4


def test_one_beam_is_greedy(make_llm: MakeLLM, reference: Reference) -> None:
    llm = make_llm()
    (output,) = llm.beam_search([prompt(1)], BeamSearchParams(beam_width=1, max_tokens=20))
    assert list(output.token_ids) == reference(prompt(1), 20)
    assert llm.cache.counters.forks == 0
    (greedy,) = llm.generate([prompt(1)], SamplingParams(max_tokens=20, temperature=0, logprobs=0))
    assert greedy.outputs[0].logprobs is not None
    total = sum(entry.logprob for entry in greedy.outputs[0].logprobs)
    assert output.outputs[0].cumulative_logprob == pytest.approx(total, rel=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_other_families(family: str) -> None:
    cases = [
        BeamSearchParams(beam_width=3, max_tokens=10, num_return_sequences=3),
        BeamSearchParams(
            beam_width=4, max_tokens=10, early_stopping="never", stop_token_ids=range(3, 23)
        ),
    ]
    prompts = [[token % 160 for token in prompt(seed, 21)] for seed in range(2)]
    with quiet():
        model = build(family)
        with softcap_applied(model):
            expected = [
                hugging_face(model, tokens, params, [2])
                for tokens, params in zip(prompts, cases, strict=True)
            ]
        loaded = LoadedModel(
            model=model,
            tokenizer=None,
            config=model.config,
            name=family,
            eos_token_ids=(2,),
            max_model_len=256,
            vocab_size=160,
            dtype=torch.float32,
        )
        with LLM(loaded, kv_memory="1MiB", block_size=4) as llm:
            for output, theirs in zip(llm.beam_search(prompts, cases), expected, strict=True):
                assert_same(answers(output), theirs)
            llm.cache.check()
            assert not llm.cache.sequences


# -- however it is run ---------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_in_chunks_of_7(make_llm: MakeLLM, beams: Beams, block_size: int) -> None:
    """Twelve beams and 7 tokens a step: no step carries all of them."""
    llm = make_llm(512, block_size=block_size, max_num_batched_tokens=7)
    prompts = [prompt(seed, 20) for seed in range(3)]
    for tokens, output in zip(prompts, llm.beam_search(prompts, FOUR), strict=True):
        assert_same(answers(output), beams(tokens, FOUR))


def test_a_budget_smaller_than_the_group(make_llm: MakeLLM, beams: Beams) -> None:
    llm = make_llm(max_num_batched_tokens=3)
    (output,) = llm.beam_search([prompt(5, 10)], FOUR)
    assert_same(answers(output), beams(prompt(5, 10), FOUR))
    assert llm.stats().engine.decoded_tokens == 4 * 13


def test_cold_and_warm(make_llm: MakeLLM, beams: Beams) -> None:
    llm = make_llm()
    for cached in (0, 40):
        (output,) = llm.beam_search([prompt(7)], FOUR)
        assert_same(answers(output), beams(prompt(7), FOUR))
        assert output.num_cached_tokens == cached
    # The beam that led to the answer stays, for whoever goes on from there.
    longer = [*prompt(7), *output.token_ids, 1, 2]
    (second,) = llm.generate([longer], SamplingParams(max_tokens=1, temperature=0))
    assert second.num_cached_tokens >= len(longer) - 3 - 12


def test_under_preemption(make_llm: MakeLLM, beams: Beams) -> None:
    llm = make_llm(22, block_size=4)
    prompts = [prompt(seed, 11) for seed in range(5)]
    requests = [llm.engine.add_request(tokens, FOUR) for tokens in prompts]
    for _ in steps(llm):
        pass
    assert llm.stats().engine.preemptions > 1
    assert sum(request.num_preemptions > 0 for request in requests) > 0
    for tokens, request in zip(prompts, requests, strict=True):
        assert_same(answers(output_of(request)), beams(tokens, FOUR))


def test_taken_out_again_and_again(make_llm: MakeLLM, beams: Beams) -> None:
    """Each time its beams come back one after the other, and share what they have in common."""
    llm = make_llm(block_size=4, max_num_batched_tokens=6)
    request = llm.engine.add_request(prompt(3, 13), FOUR)
    for count, _ in enumerate(steps(llm)):
        if count % 5 == 4 and request in llm.engine.scheduler.running:
            llm.engine.scheduler.requeue(request)
    assert request.num_preemptions > 1
    assert_same(answers(output_of(request)), beams(prompt(3, 13), FOUR))


def test_beside_other_requests(make_llm: MakeLLM, beams: Beams, reference: Reference) -> None:
    llm = make_llm()
    sampled = SamplingParams(max_tokens=9, seed=5, n=3)
    alone = llm.generate([prompt(2)], sampled)[0].outputs
    llm.cache.reset()
    greedy = SamplingParams(max_tokens=20, temperature=0)
    wide = replace(FOUR, beam_width=6, length_penalty=2.0)
    # One row of logits for the beams and one for three samples: as many rows as tokens to choose.
    prompts = [prompt(1), prompt(2), prompt(3), prompt(1)]
    outputs = llm.generate(prompts, [FOUR, sampled, greedy, wide])
    assert_same(answers(outputs[0]), beams(prompt(1), FOUR))
    assert [c.token_ids for c in outputs[1].outputs] == [c.token_ids for c in alone]
    assert list(outputs[2].token_ids) == reference(prompt(3), 20)
    assert_same(answers(outputs[3]), beams(prompt(1), wide))
    assert outputs[3].num_cached_tokens == 40


def test_logits_find_their_rows_when_both_counts_agree(make_llm: MakeLLM, beams: Beams) -> None:
    """Two rows ask, for a search and for two samples: two tokens to sample, from the second."""
    llm = make_llm()
    sampled = SamplingParams(max_tokens=6, seed=5, n=2)
    alone = llm.generate([prompt(2)], sampled)[0].outputs
    outputs = llm.generate([prompt(1), prompt(2)], [FOUR, sampled])
    assert_same(answers(outputs[0]), beams(prompt(1), FOUR))
    assert [c.token_ids for c in outputs[1].outputs] == [c.token_ids for c in alone]


# -- blocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_one_token_a_beam_and_no_block_beyond_what_the_beams_need(
    make_llm: MakeLLM, block_size: int
) -> None:
    llm = make_llm(1024 // block_size, block_size=block_size)
    params = replace(FOUR, max_tokens=30)
    request = llm.engine.add_request(prompt(4, 21), params)
    counters = llm.engine.counters
    most = 0
    for count, _ in enumerate(steps(llm)):
        if not llm.engine.has_work:
            break
        assert counters.prefilled_tokens == 21
        assert counters.decoded_tokens == 4 * count
        needed = {
            branch.tokens()[: start + block_size].tobytes()
            for branch in request.branches
            for start in range(0, branch.num_tokens - 1, block_size)
        }
        assert held(llm.cache) <= len(needed) + params.beam_width
        most = max(most, held(llm.cache))
        assert len(llm.cache.sequences) == 4
    assert count == 29
    assert counters.decoded_tokens == 4 * 29
    assert held(llm.cache) == 0
    assert llm.cache.counters.copies_on_write <= llm.cache.counters.forks
    # Without sharing, four beams would hold four prompts.
    assert most < 4 * -(-50 // block_size)


def test_a_beam_that_goes_on_alone_keeps_its_sequence(make_llm: MakeLLM) -> None:
    llm = make_llm()
    request = llm.engine.add_request(prompt(6), replace(FOUR, max_tokens=30))
    before: list[Any] = []
    for _ in steps(llm):
        if not llm.engine.has_work:
            break
        assert request.beams is not None
        parents = [beam.parent for beam in request.beams.search.running]
        after = [branch.sequence for branch in request.branches]
        if before:
            for parent in set(parents):
                assert before[parent] in after
            forked = len(parents) - len(set(parents))
            assert sum(sequence not in before for sequence in after) == forked
        before = after


def test_losers_are_the_first_to_be_evicted(make_llm: MakeLLM) -> None:
    llm = make_llm(block_size=4)
    llm.beam_search([prompt(8, 16)], replace(FOUR, max_tokens=40))
    nodes = list(llm.cache.tree.nodes())
    kept = [node for node in nodes if not node.retention.ephemeral]
    assert sum(len(node.blocks) for node in kept if node.start == 0) == 4
    assert any(node.retention.ephemeral for node in nodes)
    for node in nodes:
        assert not node.retention.ephemeral or node.start >= 4


@pytest.mark.parametrize("length", [14, 15, 16, 17])
@pytest.mark.parametrize("new", [1, 2, 3, 6])
def test_the_prompt_is_no_loser(make_llm: MakeLLM, length: int, new: int) -> None:
    """Whichever beam is released last, what all of them began with stays as long as any prompt."""
    llm = make_llm(block_size=4)
    llm.beam_search([prompt(8, length)], replace(FOUR, max_tokens=new))
    nodes = [node for node in llm.cache.tree.nodes() if not node.retention.ephemeral]
    assert max(node.start + len(node.blocks) for node in nodes) >= length // 4
    assert llm.cache.match(prompt(8, length)) == length


def test_the_smallest_pool_that_is_accepted_is_enough(make_llm: MakeLLM, beams: Beams) -> None:
    """Prompt 11 and 14 new ones in blocks of 4: two that are shared, and four times four more."""
    tokens = prompt(1, 11)
    with pytest.raises(PromptTooLongError, match=r"may need 18 blocks .* beam_width 4"):
        make_llm(17, block_size=4).beam_search([tokens], FOUR)
    llm = make_llm(18, block_size=4)
    (output,) = llm.beam_search([tokens], FOUR)
    assert_same(answers(output), beams(tokens, FOUR))
    assert output.num_preemptions == 0


# -- the door, endings and failures --------------------------------------------------------------


def test_what_cannot_be_searched_is_refused(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=3)
    with pytest.raises(RequestError, match="beam_width=4 continuations exceed max_num_seqs=3"):
        llm.beam_search([prompt(1)], FOUR)
    with pytest.raises(RequestError, match="beam_search takes BeamSearchParams"):
        llm.beam_search([prompt(1)], SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="SamplingParams or BeamSearchParams"):
        llm.engine.add_request(prompt(1), 4)  # type: ignore[arg-type]
    assert not llm.engine.requests


def test_the_context_s_end_ends_the_search(make_llm: MakeLLM, beams: Beams) -> None:
    llm = make_llm(max_model_len=45)
    params = replace(FOUR, early_stopping="never", length_penalty=2.0)
    (output,) = llm.beam_search([prompt(3)], params)
    assert_same(answers(output), beams(prompt(3), replace(params, max_tokens=5)))
    assert [c.finish_reason for c in output.outputs] == ["length", "length"]


def test_texts_log_probabilities_and_deltas(make_llm: MakeLLM, beams: Beams) -> None:
    llm = make_llm()
    deltas: list[TokenDelta] = []
    params = replace(FOUR, logprobs=2)
    text = "".join(map(chr, prompt(9, 12)))
    tokens = list(llm.tokenize(text))
    (output,) = llm.beam_search(text, params, on_token=deltas.append)
    assert_same(answers(output), beams(tokens, FOUR))
    assert llm.loaded.tokenizer is not None
    for completion in output.outputs:
        own = [delta for delta in deltas if delta.index == completion.index]
        assert tuple(delta.token_id for delta in own) == completion.token_ids
        assert "".join(delta.text for delta in own) == completion.text
        assert [delta.finish_reason for delta in own] == [None] * 13 + ["length"]
        assert completion.logprobs is not None
        total = sum(entry.logprob for entry in completion.logprobs)
        assert completion.cumulative_logprob == pytest.approx(total, rel=1e-5)
        assert all(len(entry.top) == 2 for entry in completion.logprobs)
    assert output.time_to_first_token == pytest.approx(output.total_time, rel=0.1)


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_abort(make_llm: MakeLLM, beams: Beams, after: int) -> None:
    llm = make_llm(max_num_batched_tokens=30)
    request = llm.engine.add_request(prompt(1), FOUR)
    other = llm.engine.add_request(prompt(2), FOUR)
    for _ in range(after):
        llm.engine.step()
    assert llm.engine.abort(request.request_id)
    output = output_of(request)
    assert [c.finish_reason for c in output.outputs] == ["abort", "abort"]
    assert all(c.score is None for c in output.outputs)
    for _ in steps(llm):
        pass
    assert_same(answers(output_of(other)), beams(prompt(2), FOUR))


def test_nan_logits_fail_alone(
    make_llm: MakeLLM, beams: Beams, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    run = llm.engine.runner.run
    poisoned = llm.engine.add_request(prompt(1), FOUR)
    # Shares blocks with the one that fails, and must compute them anew.
    twin = llm.engine.add_request(prompt(1), replace(FOUR, beam_width=3))
    healthy = llm.engine.add_request(prompt(2), FOUR)

    def poison(step: Any) -> torch.Tensor:
        logits = run(step).clone()
        for index, row in enumerate(row for row in step.rows if row.samples):
            if row.branch.request is poisoned and len(row.branch.stream.token_ids) == 3:
                logits[index, 7] = torch.nan if row.branch.index == 2 else logits[index, 7]
        return logits

    monkeypatch.setattr(llm.engine.runner, "run", poison)
    deltas = [delta for step in steps(llm) for delta in step]
    assert isinstance(poisoned.error, NumericalError)
    failed = [delta for delta in deltas if delta.request_id == poisoned.request_id]
    assert [(delta.index, delta.finish_reason) for delta in failed] == [(0, "error"), (1, "error")]
    assert twin.num_preemptions == 1
    assert_same(answers(output_of(twin)), beams(prompt(1), replace(FOUR, beam_width=3)))
    assert_same(answers(output_of(healthy)), beams(prompt(2), FOUR))


@pytest.mark.parametrize("call", [1, 3, 20, 60])
def test_a_failing_tokenizer_fails_its_search_alone(
    make_llm: MakeLLM, beams: Beams, call: int
) -> None:
    llm = make_llm()
    broken = llm.engine.add_request(prompt(1), FOUR)
    healthy = llm.engine.add_request(prompt(2), FOUR)
    count = itertools.count(1)
    assert broken.beams is not None
    for stream in (broken.beams.blank, *(branch.stream for branch in broken.branches)):
        let_fail(stream, lambda: next(count) == call)
    for _ in steps(llm):
        pass
    assert "no such token" in str(broken.error)
    assert_same(answers(output_of(healthy)), beams(prompt(2), FOUR))


def test_a_vocabulary_that_leaves_fewer_beams() -> None:
    """Six tokens, one of which ends: after the first step five beams of eight are running."""
    engine = make_engine(num_blocks=64)
    params = BeamSearchParams(beam_width=8, max_tokens=3, num_return_sequences=8)
    request = engine.add_request([1, 2, 3], params)
    engine.step()
    assert len(request.branches) == 5
    while engine.has_work:
        engine.step()
        engine.cache.check()
    output = output_of(request)
    assert len(output.outputs) == 8
    assert len({completion.token_ids for completion in output.outputs}) == 8
    check_over(engine)


def test_the_tiny_vocabulary_is_larger_than_any_search_here() -> None:
    assert max((2 + len(p.stop_token_ids)) * p.beam_width for p in CASES) < 8 * VOCABULARY
