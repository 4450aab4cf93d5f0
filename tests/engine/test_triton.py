"""The whole engine over the Triton backend, in the interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from radixkv.attention import CostModel, KVStore, TritonBackend
from radixkv.decoding import BeamSearchParams, SamplingParams
from radixkv.llm import LLM

pytestmark = pytest.mark.interpreted

MakeLLM = Callable[..., LLM]
Reference = Callable[[list[int], int], list[int]]

# Shares what can be shared, and cuts what is long for the interpreter's tiles.
COST = CostModel(per_item=0, tile=16, programs=4)
GREEDY = SamplingParams(max_tokens=6, temperature=0)
SYSTEM = [(7 * i) % 250 for i in range(37)]
PROMPTS = [[*SYSTEM, *range(100 * i, 100 * i + 5)] for i in range(3)]


@pytest.fixture
def make_torch_llm(make_llm: MakeLLM) -> MakeLLM:
    """LLMs over the backend of this CPU."""
    return make_llm


@pytest.fixture
def make_triton_llm(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    def choose(store: KVStore) -> TritonBackend:
        return TritonBackend(store, cost=COST)

    def make(**settings: int) -> LLM:
        with monkeypatch.context() as patch:
            patch.setattr("radixkv.llm.choose_backend", choose)
            llm = make_llm(**settings)
        assert isinstance(llm.engine.runner.backend, TritonBackend)
        return llm

    return make


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(prompts, params)
    assert all(output.error is None for output in outputs)
    return [list(its.token_ids) for output in outputs for its in output.outputs]


def test_cold_batched_and_warm_equal_hugging_face(
    make_triton_llm: MakeLLM, reference: Reference
) -> None:
    expected = [reference(prompt, 6) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in expected}) == 3
    llm = make_triton_llm()
    assert tokens(llm, PROMPTS, GREEDY) == expected
    stats = llm.stats().engine
    # What the prompts share is read once: two blocks, not six, in each of the five decodes.
    assert stats.kv_tokens_unshared - stats.kv_tokens_read >= 5 * 2 * 2 * 16
    assert 0 < stats.kv_tokens_read < stats.kv_tokens_unshared
    assert tokens(llm, PROMPTS[:1], GREEDY) == expected[:1]


def test_chunked_prefill(make_triton_llm: MakeLLM, reference: Reference) -> None:
    llm = make_triton_llm(num_blocks=64, block_size=3, max_num_batched_tokens=16)
    assert tokens(llm, PROMPTS[:2], GREEDY) == [reference(prompt, 6) for prompt in PROMPTS[:2]]


def test_forks_copy_on_write(make_triton_llm: MakeLLM, reference: Reference) -> None:
    llm = make_triton_llm()
    certain = SamplingParams(max_tokens=6, n=3, temperature=1.0, top_k=1)
    assert tokens(llm, PROMPTS[:1], certain) == [reference(PROMPTS[0], 6)] * 3
    counters = llm.stats().cache.counters
    assert counters.forks == 2
    assert counters.copies_on_write >= 2


def test_samples_are_those_of_another_backend(
    make_triton_llm: MakeLLM, make_torch_llm: MakeLLM
) -> None:
    some = SamplingParams(max_tokens=6, n=3, temperature=0.9, seed=5)
    expected = tokens(make_torch_llm(), PROMPTS[:1], some)
    assert len({tuple(answer) for answer in expected}) == 3
    assert tokens(make_triton_llm(), PROMPTS[:1], some) == expected


def test_under_preemption(make_triton_llm: MakeLLM, reference: Reference) -> None:
    prompts = [[100 * i + j for j in range(6)] for i in range(3)]
    llm = make_triton_llm(num_blocks=9, block_size=4, max_model_len=36)
    params = SamplingParams(max_tokens=10, temperature=0)
    assert tokens(llm, prompts, params) == [reference(prompt, 10) for prompt in prompts]
    assert llm.stats().engine.preemptions > 0


def test_a_context_forks_and_joins(make_triton_llm: MakeLLM, reference: Reference) -> None:
    llm = make_triton_llm()
    with llm.context(SYSTEM) as context:
        drafts = context.fork(2)
        for draft, said in zip(drafts, ([1, 2, 3], [4, 5]), strict=True):
            draft.append(said)
        options = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
        outputs = llm.run([draft.generate(**options) for draft in drafts])
        expected = [reference([*SYSTEM, 1, 2, 3], 4), reference([*SYSTEM, 4, 5], 4)]
        assert [list(output.token_ids) for output in outputs] == expected
        assert context.join(drafts, by=lambda branch: -len(branch)) is drafts[1]
        output = context.generate(**options).result()
        assert list(output.token_ids) == reference([*SYSTEM, 4, 5, *expected[1]], 4)


def test_beams(make_triton_llm: MakeLLM, make_torch_llm: MakeLLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=5)
    (expected,) = make_torch_llm().beam_search([PROMPTS[1]], params)
    (found,) = make_triton_llm().beam_search([PROMPTS[1]], params)
    assert [its.token_ids for its in found.outputs] == [its.token_ids for its in expected.outputs]
    scores = [its.score for its in expected.outputs]
    assert [its.score for its in found.outputs] == pytest.approx(scores, abs=1e-4)


def test_a_decode_step_sends_each_kind_of_number_once(
    make_triton_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each is a copy; the work lists stay there while rows only grow."""
    sent: list[torch.Size] = []

    def recording(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        sent.append(tensor.shape)
        return tensor

    llm = make_triton_llm()
    for module in ("model.function_adapter", "attention.triton_backend"):
        monkeypatch.setattr(f"radixkv.{module}.send", recording)
    tokens(llm, [[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    # Token ids, positions twice, whose logits are wanted, tables and slots; of the prompt and of
    # the first decode a work list's four tensors too.
    assert len(sent) == 4 * 6 + 2 * 4
    assert sent[-6:].count(torch.Size([1])) == 5
    assert sent[-6:].count(torch.Size([1, 1])) == 1
