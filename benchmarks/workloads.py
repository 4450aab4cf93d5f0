"""Prefix-cache workloads in plain numpy, the ones on which the peers were timed.

A request's cacheable sequence is prompt + output; the prompt of turn t + 1 starts with the whole
sequence of turn t, so a perfect cache finds everything but the new user tokens. Same seed, same
tokens: `digest` says whether a workload is the one that published figures speak of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

VOCABULARY = 128_000
CHAT_DIGEST = "b186117b0e2c681d"

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request: ``sequence[:prompt_length]`` is the prompt, the rest what is generated."""

    conversation: int
    turn: int
    group: int
    sequence: Tokens
    prompt_length: int

    @property
    def prompt(self) -> Tokens:
        return self.sequence[: self.prompt_length]

    @property
    def output(self) -> Tokens:
        return self.sequence[self.prompt_length :]


def _conversation(
    rng: np.random.Generator, system: Tokens, turns: int, turn_length: int, jitter: int
) -> tuple[Tokens, list[tuple[int, int]]]:
    """All tokens of a conversation, and where each turn's prompt and sequence end."""
    new = rng.integers(turn_length - jitter, turn_length + jitter + 1, size=turns)
    own = rng.integers(0, VOCABULARY, size=int(new.sum()))
    ends, position = [], len(system)
    for count in new.tolist():
        output = max(1, int(count * (1 / 3)))
        ends.append((position + count - output, position + count))
        position += count
    return np.concatenate([system, own]).astype(np.int64), ends


def chat(
    conversations: int = 2_000,
    groups: int = 8,
    system_length: int = 2_000,
    turns: int = 5,
    turn_length: int = 150,
    jitter: int = 50,
    min_gap: int = 32,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """Multi-turn chats, all open at once; the next to speak is random, but spoke not just now."""
    rng = np.random.default_rng(seed)
    systems = [rng.integers(0, VOCABULARY, size=system_length) for _ in range(groups)]
    made = [
        _conversation(rng, systems[index % groups], turns, turn_length, jitter)
        for index in range(conversations)
    ]
    open_conversations = list(range(conversations))
    next_turn = [0] * conversations
    recent: list[int] = []
    requests: list[WorkloadRequest] = []
    while open_conversations:
        gap = min(min_gap, len(open_conversations) - 1)
        blocked = set(recent[-gap:]) if gap > 0 else set()
        while True:
            place = int(rng.integers(len(open_conversations)))
            if open_conversations[place] not in blocked:
                break
        index = open_conversations[place]
        sequence, ends = made[index]
        prompt_end, end = ends[next_turn[index]]
        requests.append(
            WorkloadRequest(index, next_turn[index], index % groups, sequence[:end], prompt_end)
        )
        recent.append(index)
        next_turn[index] += 1
        if next_turn[index] == turns:
            open_conversations[place] = open_conversations[-1]
            open_conversations.pop()
    return requests


def sweep(
    leaves: int,
    timed: int = 2_000,
    groups: int = 8,
    system_length: int = 2_000,
    turn_length: int = 150,
    jitter: int = 50,
    seed: int = 0,
) -> tuple[list[WorkloadRequest], list[WorkloadRequest]]:
    """Requests that make about ``leaves`` leaves, and then some to time in that steady state.

    The timed ones alternate a new conversation with the second turn of one of the newer half, so a
    cache that just holds the fill must evict at every one of them.
    """
    rng = np.random.default_rng(seed)
    systems = [rng.integers(0, VOCABULARY, size=system_length) for _ in range(groups)]

    def request(index: int, turn: int) -> WorkloadRequest:
        own = np.random.default_rng((seed, index))
        sequence, ends = _conversation(own, systems[index % groups], 2, turn_length, jitter)
        prompt_end, end = ends[turn]
        return WorkloadRequest(index, turn, index % groups, sequence[:end], prompt_end)

    fill = [request(index, 0) for index in range(leaves)]
    newer = np.arange(leaves // 2, leaves)
    second = rng.choice(newer, size=min(timed // 2, leaves // 2), replace=False)
    requests: list[WorkloadRequest] = []
    for place, index in enumerate(second.tolist()):
        requests += [request(leaves + place, 0), request(index, 1)]
    return fill, requests


def deep(turns: int = 200, conversations: int = 4, seed: int = 0) -> list[WorkloadRequest]:
    """Few conversations of many turns, as agents have them: 32,000 tokens in the end."""
    return chat(conversations, 1, turns=turns, min_gap=1, seed=seed)


def unique_tokens(requests: Iterable[WorkloadRequest]) -> int:
    """Tokens that an unbounded cache would hold, every distinct prefix counted once."""
    longest: dict[int, Tokens] = {}
    groups: dict[int, list[int]] = {}
    for request in requests:
        if len(request.sequence) > len(longest.get(request.conversation, ())):
            longest[request.conversation] = request.sequence
            groups.setdefault(request.group, []).append(request.conversation)
    total = 0
    for members in groups.values():
        sequences = [longest[index] for index in dict.fromkeys(members)]
        common = min(map(len, sequences)) if len(sequences) > 1 else 0
        for other in sequences[1:]:
            differs = np.flatnonzero(sequences[0][:common] != other[:common])
            common = int(differs[0]) if len(differs) else common
        total += common + sum(len(sequence) - common for sequence in sequences)
    return total


def digest(requests: Iterable[WorkloadRequest]) -> str:
    """A name for exactly these requests."""
    state = hashlib.sha256()
    for request in requests:
        state.update(request.sequence.tobytes())
        state.update(bytes([request.turn]))
    return state.hexdigest()[:16]
