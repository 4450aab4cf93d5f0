"""When the engine plans anew: a decode loop does only if its batch or a shared block changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import radixkv.attention.batch
from radixkv.attention import plan_attention
from radixkv.decoding import SamplingParams
from radixkv.llm import LLM

MakeLLM = Callable[..., LLM]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each plan had that was made."""
    made: list[int] = []

    def counting(*arguments: object) -> object:
        plan = plan_attention(*arguments)  # type: ignore[arg-type]
        made.append(len(plan.order))
        return plan

    monkeypatch.setattr(radixkv.attention.batch, "plan_attention", counting)
    return made


def params(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, n=n, temperature=0.7, seed=1, ignore_eos=True)


def test_a_decode_loop_plans_once(make_llm: MakeLLM, planned: list[int]) -> None:
    """Over forty tokens: rows take new blocks, and these are no reason to plan anew."""
    llm = make_llm()
    planned.clear()
    llm.generate([list(range(30)), list(range(100, 130))], params(41))
    assert llm.stats().engine.steps == 41
    # The prompts, then the first decode.
    assert planned == [2, 2]
    assert llm.stats().engine.steps_grown == 39


def test_membership_changes_the_plan(make_llm: MakeLLM, planned: list[int]) -> None:
    llm = make_llm()
    planned.clear()
    llm.generate([list(range(30)), list(range(100, 130))], [params(11), params(31)])
    assert planned == [2, 2, 1]
    assert llm.stats().engine.steps_grown == 31 - len(planned)


def test_a_fork_and_its_copies_change_the_plan(make_llm: MakeLLM, planned: list[int]) -> None:
    llm = make_llm()
    planned.clear()
    # The prompt ends inside a block, which the tree holds too: each branch copies it.
    llm.generate([list(range(30))], params(31, n=3))
    assert llm.stats().cache.counters.copies_on_write == 3
    assert planned == [1, 3]
