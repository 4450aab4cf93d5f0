"""Log-probabilities of texts that are given, and the choice of the likeliest.

Each text is read by a fork of the context, as a prompt's end whose tokens' logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixkv.decoding import SamplingParams
from radixkv.engine import Request
from radixkv.engine.interrupts import DeferredInterrupts
from radixkv.errors import RequestError
from radixkv.programs.content import Prepared
from radixkv.programs.host import Host
from radixkv.programs.pending import Pending

if TYPE_CHECKING:
    from radixkv.programs.context import Context

# A request ends with a sampled token; that of a text that is only read is not looked at.
READ_ONLY = SamplingParams(max_tokens=1, temperature=0)


@dataclass(frozen=True, slots=True)
class Score:
    """What the model thinks of a text behind a context.

    Attributes
    ----------
    token_ids : tuple of int
    logprobs : tuple of float
        One a token.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        """Log-probability of the whole text."""
        return sum(self.logprobs)

    @property
    def mean(self) -> float:
        """The same a token, so that texts of different lengths can be compared."""
        return self.total / len(self.logprobs)


class Scoring(Pending[Score]):
    """The score of a text that is not kept; its numbers run the engine until they are there."""

    def _value(self) -> Score:
        return score_of(self._requests[0])

    @property
    def logprobs(self) -> tuple[float, ...]:
        return self.result().logprobs

    @property
    def total(self) -> float:
        return self.result().total

    @property
    def mean(self) -> float:
        return self.result().mean


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of several texts a context went on with.

    Attributes
    ----------
    index : int
    text : str
        The option itself; empty if it was given as tokens.
    scores : tuple of Score
        Of all options, in order.
    """

    index: int
    text: str
    scores: tuple[Score, ...]


class Choosing(Pending[Choice]):
    """A choice between texts; its properties run the engine until it is made."""

    def __init__(
        self,
        host: Host,
        requests: Sequence[Request],
        conclude: Callable[[bool], None],
        options: Sequence[str],
    ) -> None:
        super().__init__(host, requests, conclude)
        self._options = options

    def _value(self) -> Choice:
        scores = tuple(score_of(request) for request in self._requests)
        index = best_score(self._requests)
        return Choice(index, self._options[index], scores)

    @property
    def text(self) -> str:
        return self.result().text

    @property
    def index(self) -> int:
        return self.result().index


def score_of(request: Request) -> Score:
    """The score of what a scoring request was given behind its context."""
    tokens = request.prompt[request.scored_from + 1 :].tolist()
    return Score(tuple(tokens), tuple(entry.logprob for entry in request.prompt_logprobs))


def best_score(requests: Sequence[Request]) -> int:
    """Which request's text is the likeliest a token; of equals the first."""
    means = [score_of(request).mean for request in requests]
    return means.index(max(means))


Continuation = str | Sequence[int] | Prepared


def score(context: Context, content: Continuation) -> Scoring:
    """See `Context.score`."""
    tokens = _continuation(context, content)
    with DeferredInterrupts():
        (branch,), requests = _read(context, [tokens])
        scoring = Scoring(context.host, requests, lambda well: branch.close())
        branch.occupy(scoring)
    return scoring


def choose(context: Context, options: Sequence[Continuation]) -> Choosing:
    """See `Context.choose`."""
    if isinstance(options, str) or not len(options):
        raise RequestError("choose takes a list of texts, at least one")
    continuations = [_continuation(context, option) for option in options]
    texts = [_text(option) for option in options]

    def conclude(well: bool) -> None:
        if well:
            index = best_score(requests)
            context.take_over(branches[index], requests[index], texts[index])
        for branch in branches:
            branch.close()

    with DeferredInterrupts():
        branches, requests = _read(context, continuations)
        choosing = Choosing(context.host, requests, conclude, texts)
        context.occupy(choosing)
    return choosing


def _text(option: Continuation) -> str:
    if isinstance(option, Prepared):
        return option.text
    return option if isinstance(option, str) else ""


def _continuation(context: Context, content: Continuation) -> Sequence[int]:
    if not len(context):
        raise RequestError("an empty context has nothing to score behind; append a text first")
    host = context.host
    if isinstance(content, Prepared):
        tokens = content.tokens
    elif isinstance(content, str):
        tokens = host.tokenize(content, first=False)
    else:
        tokens = host.checked(content)
    if not tokens:
        raise RequestError("the continuation is empty; it needs at least one token")
    return tokens


def _read(
    context: Context, continuations: Sequence[Sequence[int]]
) -> tuple[list[Context], list[Request]]:
    """A fork and a request for each continuation; none of them if any is refused."""
    branches = context.fork(len(continuations))
    requests: list[Request] = []
    try:
        for branch, tokens in zip(branches, continuations, strict=True):
            requests.append(branch.submit(READ_ONLY, tokens))
    except BaseException:
        for request in requests:
            context.host.engine.abort(request.request_id)
        for branch in branches:
            branch.close()
        raise
    return branches, requests
