"""Chat workloads for a prefix cache: requests in arrival order, in plain numpy.

A request's cacheable tokens are its prompt and its output; the prompt of the next turn begins with
all of them, so a perfect cache finds everything but the user's new tokens. All is drawn from one
generator in a fixed order: the digest of a workload says that two programs were timed on the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]

VOCABULARY = 128_000
SYSTEM_LENGTH = 2_000
TURN_LENGTH = 150
OUTPUT_SHARE = 1 / 3

# Of `chat()`, over each request's tokens and turn: the workload on which others were measured.
CHAT_DIGEST = "b186117b0e2c681d"


@dataclass(frozen=True, slots=True)
class Request:
    """One turn of one conversation; ``tokens`` are the prompt, then the output."""

    conversation: int
    turn: int
    group: int
    tokens: Tokens
    prompt_length: int

    @property
    def prompt(self) -> Tokens:
        return self.tokens[: self.prompt_length]

    @property
    def output(self) -> Tokens:
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A whole history, and where each turn's prompt and output end in it."""

    tokens: Tokens
    ends: list[tuple[int, int]]

    def request(self, number: int, turn: int, group: int) -> Request:
        prompt_end, end = self.ends[turn]
        return Request(number, turn, group, self.tokens[:end], prompt_end)


def _systems(rng: np.random.Generator, groups: int) -> list[Tokens]:
    return [rng.integers(0, VOCABULARY, size=SYSTEM_LENGTH) for _ in range(groups)]


def _converse(rng: np.random.Generator, system: Tokens, turns: int, jitter: int) -> Conversation:
    lengths = rng.integers(TURN_LENGTH - jitter, TURN_LENGTH + jitter + 1, size=turns)
    tokens = np.concatenate([system, rng.integers(0, VOCABULARY, size=int(lengths.sum()))])
    ends, position = [], len(system)
    for length in lengths.tolist():
        output = max(1, int(length * OUTPUT_SHARE))
        position += length
        ends.append((position - output, position))
    return Conversation(tokens.astype(np.int64), ends)


def chat(
    conversations: int = 2_000, groups: int = 8, turns: int = 5, gap: int = 32, seed: int = 0
) -> list[Request]:
    """Many conversations at once; each group shares a system prompt.

    The next to arrive is any conversation that was not served in the last ``gap`` arrivals.
    """
    rng = np.random.default_rng(seed)
    systems = _systems(rng, groups)
    all_of_them = [
        _converse(rng, systems[number % groups], turns, TURN_LENGTH // 3)
        for number in range(conversations)
    ]
    running = list(range(conversations))
    next_turn = [0] * conversations
    recent: list[int] = []
    requests: list[Request] = []
    while running:
        width = min(gap, len(running) - 1)
        blocked = set(recent[-width:]) if width else set()
        place = int(rng.integers(len(running)))
        while running[place] in blocked:
            place = int(rng.integers(len(running)))
        number = running[place]
        turn = next_turn[number]
        requests.append(all_of_them[number].request(number, turn, number % groups))
        recent.append(number)
        next_turn[number] += 1
        if next_turn[number] == turns:
            running[place] = running[-1]
            running.pop()
    return requests


def deep(turns: int = 200, conversations: int = 4, seed: int = 0) -> list[Request]:
    """Few conversations of many turns, as agents hold them: histories of 32,000 tokens."""
    return chat(conversations=conversations, groups=1, turns=turns, gap=1, seed=seed)


def _sweep_request(systems: list[Tokens], seed: int, number: int, turn: int) -> Request:
    own = np.random.default_rng((seed, number))
    group = number % len(systems)
    conversation = _converse(own, systems[group], 2, TURN_LENGTH // 3)
    return conversation.request(number, turn, group)


def sweep(
    leaves: int, timed: int = 2_000, groups: int = 8, seed: int = 0
) -> tuple[list[Request], list[Request]]:
    """Requests that fill a cache with so many leaves, and requests to time on it.

    Those alternate between a new conversation and the second turn of a conversation from the
    newer half, so a cache that is full has to evict for each of them.
    """
    rng = np.random.default_rng(seed)
    systems = _systems(rng, groups)
    half = leaves // 2
    again = rng.choice(np.arange(half, leaves), size=min(timed // 2, half), replace=False)
    to_time: list[Request] = []
    for index, number in enumerate(again.tolist()):
        to_time.append(_sweep_request(systems, seed, leaves + index, 0))
        to_time.append(_sweep_request(systems, seed, number, 1))
    return [_sweep_request(systems, seed, number, 0) for number in range(leaves)], to_time


def further(
    kind: str, leaves: int = 0, timed: int = 2_000, groups: int = 8, seed: int = 0, **_: int
) -> Iterator[Request]:
    """New conversations behind those of `sweep`, without end; nothing for other workloads.

    A cache that stores whole blocks only has room left behind those that fill another: it is given
    more of these until it is full.
    """
    if kind == "sweep":
        systems = _systems(np.random.default_rng(seed), groups)
        for number in count(leaves + timed):
            yield _sweep_request(systems, seed, number, 0)


def own_blocks(request: Request, block_size: int) -> int:
    """Full blocks that a request needs beside those of its system prompt."""
    return (len(request.tokens) - SYSTEM_LENGTH) // block_size


def rag(documents: int = 100, requests: int = 1_000, seed: int = 0) -> list[Request]:
    """Questions about many documents of 2,000 to 32,000 tokens, some far more popular than others.

    A document is one long edge of a tree: it shows what it costs to evict more than is needed.
    """
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.uniform(np.log(2_000), np.log(32_000), size=documents)).astype(int)
    texts = [rng.integers(0, VOCABULARY, size=length) for length in lengths.tolist()]
    popularity = 1.0 / np.arange(1, documents + 1) ** 0.9
    picks = rng.choice(documents, size=requests, p=popularity / popularity.sum())
    made = []
    for number, document in enumerate(picks.tolist()):
        own = rng.integers(0, VOCABULARY, size=TURN_LENGTH)
        tokens = np.concatenate([texts[document], own]).astype(np.int64)
        prompt_length = len(tokens) - int(TURN_LENGTH * OUTPUT_SHARE)
        made.append(Request(number, 0, document, tokens, prompt_length))
    return made


def make(kind: str, **sizes: int) -> tuple[list[Request], list[Request]]:
    """A workload by its name: requests that fill a cache first, and those to time."""
    if kind == "sweep":
        return sweep(**sizes)
    return [], {"chat": chat, "deep": deep, "rag": rag}[kind](**sizes)


def unique_tokens(requests: Iterable[Request]) -> int:
    """Tokens that a cache without bounds would hold: every distinct prefix once."""
    longest: dict[int, Request] = {}
    for request in requests:
        known = longest.get(request.conversation)
        if known is None or len(request.tokens) > len(known.tokens):
            longest[request.conversation] = request
    groups: dict[int, list[Tokens]] = {}
    for request in longest.values():
        groups.setdefault(request.group, []).append(request.tokens)
    return sum(_unique_in_group(histories) for histories in groups.values())


def _unique_in_group(histories: list[Tokens]) -> int:
    if len(histories) == 1:
        return len(histories[0])
    shared = min(map(len, histories))
    for tokens in histories[1:]:
        differs = np.flatnonzero(histories[0][:shared] != tokens[:shared])
        shared = int(differs[0]) if len(differs) else shared
    return shared + sum(len(tokens) - shared for tokens in histories)


def digest(requests: Iterable[Request]) -> str:
    """16 hex digits over all tokens and turns."""
    state = hashlib.sha256()
    for request in requests:
        state.update(request.tokens.tobytes())
        state.update(bytes([request.turn]))
    return state.hexdigest()[:16]
