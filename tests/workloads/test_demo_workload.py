"""The demo's workload: real prose, long enough, and sixteen different conversations."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from radixkv.model.loading import load_model, render_chat
from radixkv.workloads import demo_workload


def test_sixteen_conversations_without_repetition() -> None:
    workload = demo_workload()
    assert len(workload.questions) == len(workload.follow_ups) == 16
    turns = workload.questions + workload.follow_ups
    assert len(set(turns)) == 32
    assert all(turn == turn.strip() and turn.endswith(("?", ".")) for turn in turns)


def test_prompt_is_prose_without_repetition() -> None:
    prompt = demo_workload().system_prompt
    assert prompt.startswith("You are the help desk assistant of the Ashmere Public Library.")
    assert prompt.endswith("is first in line when the item arrives.")
    sentences = [s for s in re.split(r"(?<=[.!?])\s+", prompt) if s]
    assert len(sentences) > 70
    assert Counter(sentences).most_common(1)[0][1] == 1
    words = prompt.split()
    runs = Counter(tuple(words[i : i + 5]) for i in range(len(words) - 4))
    assert runs.most_common(1)[0][1] <= 2


@pytest.mark.parametrize(
    ("question", "fact"),
    [
        ("Is the Central Library open on Sunday afternoon?", "on Sunday from 1 to 5"),
        ("How much do I owe if I bring a film back four days late?", "cost 1 euro a day"),
        ("My daughter is seven. How many items can she borrow at once?", "under sixteen up to 12"),
        ("I think I lost my library card on the bus. What should I do?", "costs 3 euros"),
    ],
)
def test_handbook_holds_the_answers(question: str, fact: str) -> None:
    workload = demo_workload()
    assert question in workload.questions
    assert fact in workload.system_prompt


@pytest.mark.model
def test_lengths_in_tokens_of_the_demo_model() -> None:
    workload, loaded = demo_workload(), load_model("demo")
    assert loaded.tokenizer is not None
    assert 1500 <= len(loaded.tokenizer.encode(workload.system_prompt)) <= 1750
    system = {"role": "system", "content": workload.system_prompt}
    prompts = [
        render_chat(loaded, [system, {"role": "user", "content": question}])
        for question in workload.questions
    ]
    shared = len(render_chat(loaded, [system], add_generation_prompt=False))
    assert all(prompt[:shared] == prompts[0][:shared] for prompt in prompts)
    assert all(len(prompt) - shared < 50 for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) == 16
