"""What a load generator asks: turns of conversations, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from radixkv.workloads import demo_workload
from radixkv.workloads.traces import read_trace
from radixkv.workloads.words import words_of

# Conversations that are open at a time; their turns come in any order.
OPEN_CONVERSATIONS = 16
TURNS = 4
QUESTION_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Turn:
    """A request: what it adds to its conversation, whose answers so far go before it.

    Attributes
    ----------
    conversation : int
    messages : tuple of (role, content)
    max_tokens : int
    at_s : float or None
        When it came in a recorded trace, in seconds from the beginning.
    prompt_tokens : int or None
        How long the trace, or whoever asked for the text, wanted the prompt; about.
    """

    conversation: int
    messages: tuple[tuple[str, str], ...]
    max_tokens: int
    at_s: float | None = None
    prompt_tokens: int | None = None


def chat(requests: int, max_tokens: int, seed: int) -> list[Turn]:
    """Visitors of the demo's library: all share its handbook, each asks four questions."""
    return list(islice(_visits(max_tokens, random.Random(seed)), requests))


def _visits(max_tokens: int, rng: random.Random) -> Iterator[Turn]:
    demo = demo_workload()
    opened = 0
    waiting: dict[int, list[str]] = {}
    while True:
        while len(waiting) < OPEN_CONVERSATIONS:
            first, second = rng.sample(range(len(demo.questions)), 2)
            waiting[opened] = [
                # What makes every conversation another one, however many there are.
                f"My card has the number {rng.randrange(10**8):08}. {demo.questions[first]}",
                demo.follow_ups[first],
                f"Something else. {demo.questions[second]}",
                demo.follow_ups[second],
            ]
            opened += 1
        number = rng.choice(list(waiting))
        questions = waiting[number]
        opening = (("system", demo.system_prompt),) if len(questions) == TURNS else ()
        yield Turn(number, (*opening, ("user", questions.pop(0))), max_tokens)
        if not questions:
            del waiting[number]


def shared_prefix(
    requests: int, groups: int, prefix_tokens: int, max_tokens: int, seed: int
) -> list[Turn]:
    """One question of each user; the users of a group share a system prompt."""
    rng = np.random.default_rng(seed)
    systems = [words_of(rng.integers(0, 2**62, prefix_tokens)) for _ in range(groups)]
    turns = []
    for number in range(requests):
        question = words_of(rng.integers(0, 2**62, QUESTION_TOKENS))
        messages = (("system", systems[number % groups]), ("user", question))
        tokens = prefix_tokens + QUESTION_TOKENS
        turns.append(Turn(number, messages, max_tokens, prompt_tokens=tokens))
    return turns


def recorded(path: Path, requests: int | None, max_tokens: int | None) -> list[Turn]:
    """A trace's requests, with its lengths of answers, but at the most ``max_tokens``.

    Raises
    ------
    RequestError
        If the file holds no trace.
    """
    turns = []
    for number, request in enumerate(read_trace(path, requests).requests()):
        text = words_of(request.tokens[: request.prompt_length])
        wanted = max(request.output_length, 1)
        limit = wanted if max_tokens is None else min(wanted, max_tokens)
        message = (("user", text),)
        turns.append(Turn(number, message, limit, request.at_s, request.prompt_length))
    return turns
