"""Requests, their branches, and what users get of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from radixkv.cache import DEFAULT_RETENTION, Namespace, Retention, Sequence
from radixkv.decoding import FinishReason, SamplingParams, TextStream, TokenLogprobs
from radixkv.engine.holds import Hold

# A position behind all prompts.
NOTHING = 1 << 62

NO_TOKEN_LEFT = (
    "grammar, allowed_token_ids, bad_words, logit_bias and min_tokens together leave no token to "
    "sample; allow more, or forbid less"
)

if TYPE_CHECKING:
    from radixkv.engine.beams import BeamGroup


class Status(Enum):
    """Where a request is: WAITING (also after a preemption), RUNNING or FINISHED."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Branch:
    """One continuation of a request.

    Attributes
    ----------
    stream : TextStream
        Its tokens and text, and whether it has ended.
    sequence : Sequence or None
        Its blocks; None while it waits or once it has ended.
    next_token : int
        Sampled, but not yet in the sequence; -1 for none.
    num_known : int
        Leading tokens that were computed before its request was preempted.
    cumulative_logprob, score : float or None
        Of a beam, and of what was ranked; see `Completion`.
    """

    request: Request
    index: int
    stream: TextStream
    sequence: Sequence | None = None
    next_token: int = -1
    num_known: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float | None = None
    score: float | None = None

    @property
    def finished(self) -> bool:
        return self.stream.finish_reason is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of what was generated."""
        return len(self.request.prompt) + len(self.stream.token_ids)

    def tokens(self) -> npt.NDArray[np.int32]:
        """The prompt and what was generated; int32 (num_tokens,)."""
        return np.concatenate((self.request.prompt, np.array(self.stream.token_ids, np.int32)))


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and how to continue it.

    Attributes
    ----------
    serial : int
        Order of arrival.
    branches : list of Branch
        The continuations, from the start; they share one sequence until the prompt is computed.
    to_prefill : list of Branch
        Branches whose tokens are not all computed; of a fresh request only the first, from which
        the others are forked. Of a resumed one, only the first of these has blocks.
    overtaken : int
        How often a later request was admitted first.
    num_cached_tokens : int
        Prompt tokens that did not have to be computed.
    params : SamplingParams
        What each branch obeys: `for_branches` of what the user gave.
    reports_logprobs : bool
        Whether the user asked for the log-probabilities of what was generated.
    beams : BeamGroup or None
        The search whose beams the branches are.
    hold : Hold or None
        Where its sequence comes from, and stays when it ends; None to release it then.
    next_scored : int
        The first position whose logits are wanted for the log-probabilities of the prompt's
        tokens, and have not been scheduled yet; beyond the prompt if none are.
    prompt_logprobs : list of TokenLogprobs
        Of the prompt's tokens behind position ``scored_from``, as far as they are known.
    """

    request_id: str
    serial: int
    prompt: npt.NDArray[np.int32]
    params: SamplingParams
    seed: int
    reports_logprobs: bool = False
    namespace: Namespace = ()
    retention: Retention = DEFAULT_RETENTION
    status: Status = Status.WAITING
    branches: list[Branch] = field(default_factory=list)
    to_prefill: list[Branch] = field(default_factory=list)
    overtaken: int = 0
    hold: Hold | None = None
    scored_from: int = NOTHING
    next_scored: int = NOTHING
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: Exception | None = None
    beams: BeamGroup | None = None
    arrived_at: float = field(default_factory=time.perf_counter)
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether no token of it was sampled yet."""
        return not self.branches[0].stream.token_ids

    def score_from_where_it_stands(self) -> None:
        """What was scheduled but not computed of the prompt's log-probabilities is wanted again."""
        known = self.scored_from + len(self.prompt_logprobs)
        self.next_scored = known if known < len(self.prompt) - 1 else NOTHING

    @property
    def live_branches(self) -> list[Branch]:
        return [branch for branch in self.branches if not branch.finished]


@dataclass(frozen=True, slots=True)
class Completion:
    """One continuation as a user gets it.

    Attributes
    ----------
    finish_reason : "stop", "length", "abort", "error" or None
        None while it goes on.
    stop_reason : str, int or None
        The stop string or stop token that ended it.
    logprobs : tuple of TokenLogprobs or None
        One a token, if they were asked for.
    cumulative_logprob : float or None
        Sum of the tokens' log-probabilities, as the model gave them; of beams, and with
        ``best_of``.
    score : float or None
        By which results are ranked, if they are. Of a beam search, the sum of log-probabilities
        after penalties and biases, over the length penalty; with ``best_of``, the mean of
        ``cumulative_logprob`` a token.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | str | None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request as a user gets it; ``text`` and the like speak of the first continuation.

    Attributes
    ----------
    num_cached_tokens : int
        Prompt tokens whose KV was found in the cache.
    time_in_queue, time_to_first_token, total_time : float or None
        Seconds from the request's arrival: until it first got blocks, until its first token was
        there (what is searched or ranked is there all at once), until it ended.
    prompt_logprobs : tuple of (TokenLogprobs or None), or None
        One a prompt token, None for the first (nothing is before it), if they were asked for; as
        many as were computed.
    error : Exception or None
        Why it failed, if it did.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    num_cached_tokens: int
    num_preemptions: int
    time_to_first_token: float | None
    total_time: float | None
    error: Exception | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    time_in_queue: float | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | str | None:
        return self.outputs[0].finish_reason


@dataclass(slots=True)
class TokenDelta:
    """What one step added to one branch: for streaming.

    Not frozen: one is made for each token, and that would take three times as long.

    Attributes
    ----------
    token_id : int
        -1 if the branch ended without a token (it was aborted, or it failed).
    text : str
        May be empty: characters and possible stop strings are held back until they are certain.
    stop_reason : str, int or None
        With the end, the stop string or stop token that made it; see `Completion`.
    """

    request_id: str
    index: int
    token_id: int
    text: str
    finish_reason: FinishReason | str | None = None
    stop_reason: str | int | None = None


def deltas_of(branch: Branch) -> list[TokenDelta]:
    """All of an ended branch's tokens at once; its text comes with the last of them."""
    stream = branch.stream
    request_id, last = branch.request.request_id, len(stream.token_ids) - 1
    return [
        TokenDelta(request_id, branch.index, token, "", None)
        if place < last
        else TokenDelta(
            request_id,
            branch.index,
            token,
            stream.text,
            stream.finish_reason,
            stream.stop_reason,
        )
        for place, token in enumerate(stream.token_ids)
    ]


def output_of(request: Request) -> RequestOutput:
    """The request as it stands."""
    ending = None
    if request.status is Status.FINISHED:
        ending = "error" if request.error is not None else "abort"
    outputs = tuple(
        Completion(
            index=branch.index,
            text=branch.stream.text,
            token_ids=tuple(branch.stream.token_ids),
            finish_reason=branch.stream.finish_reason or ending,
            stop_reason=branch.stream.stop_reason,
            logprobs=tuple(branch.logprobs) if request.reports_logprobs else None,
            cumulative_logprob=branch.cumulative_logprob,
            score=branch.score,
        )
        # Of a search that was cut short, the best beams.
        for branch in request.branches[: request.params.n]
    )
    since = request.arrived_at
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=tuple(request.prompt.tolist()),
        outputs=outputs,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        time_to_first_token=request.first_token_at and request.first_token_at - since,
        total_time=request.finished_at and request.finished_at - since,
        error=request.error,
        prompt_logprobs=(
            None if request.params.prompt_logprobs is None else (None, *request.prompt_logprobs)
        ),
        time_in_queue=request.admitted_at and request.admitted_at - since,
    )
