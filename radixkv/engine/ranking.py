"""best_of: more continuations are sampled than are returned, and the likeliest are."""

from __future__ import annotations

import math
import time

from radixkv.engine.request import Branch, Request, TokenDelta, deltas_of


def rank(request: Request) -> list[TokenDelta]:
    """Order the branches of a request that has ended, the likeliest a token first.

    Of equally likely ones the one with the lower number comes first; then they are numbered anew.

    Returns
    -------
    list of TokenDelta
        Everything of those that are returned: before, nobody knew which these are.
    """
    for branch in request.branches:
        branch.cumulative_logprob = math.fsum(entry.logprob for entry in branch.logprobs)
        branch.score = branch.cumulative_logprob / len(branch.logprobs)
    request.branches.sort(key=_score, reverse=True)
    for place, branch in enumerate(request.branches):
        branch.index = place
    request.first_token_at = time.perf_counter()
    best = request.branches[: request.params.n]
    return [delta for branch in best for delta in deltas_of(branch)]


def _score(branch: Branch) -> float:
    assert branch.score is not None
    return branch.score
