"""Which of several branches is the best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Literal

from radixkv.errors import JoinError

if TYPE_CHECKING:
    from radixkv.programs.context import Context

By = Literal["mean_logprob", "total_logprob"]


class Majority:
    """Most votes win; among the winners the likeliest branch. See `majority`."""

    def __init__(self, key: Callable[[Context], Hashable]) -> None:
        self.key = key


def majority(key: Callable[[Context], Hashable]) -> Majority:
    """Join by vote: ``key`` gives each branch's answer; the most frequent one wins.

    Of the branches that gave it the one with the highest mean log-probability is taken; of answers
    with equally many votes, the one that has such a branch. A branch whose answer is None does
    not vote.
    """
    return Majority(key)


def check_branches(context: Context, branches: Sequence[Context]) -> None:
    """Raise `JoinError` unless all of these were forked from the context or its branches."""
    if not len(branches):
        raise JoinError("there are no branches to join")
    for branch in branches:
        above = getattr(branch, "parent", None)
        while above is not None and above is not context:
            above = above.parent
        if above is None:
            raise JoinError(f"{branch!r} was not forked from this context")
    if len(set(branches)) < len(branches):
        raise JoinError("a branch can be joined only once")


def best_of(
    branches: Sequence[Context],
    by: By | Majority | Callable[[Context], float],
    logprobs_of: Callable[[Context], Sequence[float]],
) -> Context:
    """The winner; of equals the first.

    Parameters
    ----------
    branches : sequence of Context
        At least one.
    by : "mean_logprob", "total_logprob", Majority or callable
        A callable gives a branch's score: the highest wins.
    logprobs_of : callable
        The log-probabilities of what a branch generated.

    Raises
    ------
    JoinError
        If ``by`` is unknown, a branch that must be compared generated nothing, or none votes.
    """
    if isinstance(by, Majority):
        return _voted(branches, by, logprobs_of)
    if callable(by):
        scores = [by(branch) for branch in branches]
    elif by in ("mean_logprob", "total_logprob"):
        scores = [_likelihood(logprobs_of(branch), by) for branch in branches]
    else:
        raise JoinError(
            f'by must be "mean_logprob", "total_logprob", majority(key) or a function, not {by!r}'
        )
    return branches[max(range(len(branches)), key=scores.__getitem__)]


def _likelihood(logprobs: Sequence[float], by: By) -> float:
    if not logprobs:
        raise JoinError(f"a branch has generated nothing, so it has no {by}; leave it out")
    total = sum(logprobs)
    return total / len(logprobs) if by == "mean_logprob" else total


def _voted(
    branches: Sequence[Context],
    by: Majority,
    logprobs_of: Callable[[Context], Sequence[float]],
) -> Context:
    answers = [by.key(branch) for branch in branches]
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        raise JoinError("no branch has an answer to vote for: the key gave None for all of them")
    most = max(votes.values())
    ahead = [
        branch for branch, answer in zip(branches, answers, strict=True) if votes[answer] == most
    ]
    return max(ahead, key=lambda branch: _likelihood(logprobs_of(branch), "mean_logprob"))


def fill_in(template: str, texts: Sequence[str]) -> str:
    """The template for each text, with its ``{text}`` and ``{index}``, one after the other."""
    try:
        return "".join(template.format(text=text, index=i) for i, text in enumerate(texts))
    except (LookupError, ValueError) as error:
        raise JoinError(
            f"the template {template!r} can hold {{text}} and {{index}} alone ({error})"
        ) from None
