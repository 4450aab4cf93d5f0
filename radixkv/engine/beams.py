"""Beams: a request whose branches are the beams of one search.

A step computes one token a beam. What follows from the logits is decided by `BeamSearch`; here its
decision is carried out on branches and their sequences: a beam with several successors is forked,
one with a single successor hands its sequence on, one with none is released. No block is copied
before a beam writes into one that it shares.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from radixkv.cache import EPHEMERAL, PrefixCache
from radixkv.decoding import (
    Beam,
    BeamSearch,
    BeamSearchParams,
    Candidates,
    SamplingParams,
    TextStream,
    propose,
)
from radixkv.engine.endings import Endings
from radixkv.engine.request import (
    NO_TOKEN_LEFT,
    Branch,
    Request,
    Status,
    TokenDelta,
    deltas_of,
)
from radixkv.engine.scheduler import Scheduler
from radixkv.engine.stats import EngineCounters
from radixkv.errors import RequestError

Params = SamplingParams | BeamSearchParams


@dataclass(slots=True)
class BeamGroup:
    """What a request that is searched has beside its branches.

    Attributes
    ----------
    search : BeamSearch
        Its running beams are the request's branches, in order; one before the first step, when the
        other branches only stand for the room that they will take.
    blank : TextStream
        Of no token yet, to make the results' texts from.
    candidates : dict
        What was proposed for beams whose logits are there already: a step may not carry them all.
    """

    search: BeamSearch
    blank: TextStream
    candidates: dict[Branch, Candidates] = field(default_factory=dict)


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows, without a copy where they lie side by side, as a request's beams mostly do."""
    first, count = rows[0], len(rows)
    if rows == list(range(first, first + count)):
        return logits[first : first + count]
    return logits[torch.tensor(rows)]


def num_branches(params: Params) -> int:
    """Most sequences that a request holds at once."""
    if isinstance(params, BeamSearchParams):
        return params.beam_width
    return params.best_of or params.n


def make_group(
    params: BeamSearchParams, eos_token_ids: Iterable[int], blank: TextStream, room: int
) -> BeamGroup:
    """The group of a new request that has room for ``room`` tokens behind its prompt."""
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    limit = min(params.max_tokens, room)
    return BeamGroup(BeamSearch(params, end_tokens=ends, max_new_tokens=limit), blank)


class BeamStepper:
    """Takes beam requests from logits to their next branches."""

    def __init__(
        self,
        cache: PrefixCache,
        scheduler: Scheduler,
        counters: EngineCounters,
        endings: Endings,
    ) -> None:
        self.cache = cache
        self.scheduler = scheduler
        self.counters = counters
        self.endings = endings

    def look(self, rows: Sequence[tuple[Branch, int]], logits: torch.Tensor) -> list[TokenDelta]:
        """Note what may follow each beam; what came of requests for which nothing may.

        Changes no sequence of the others.

        Parameters
        ----------
        rows : sequence of (Branch, int)
            Beams and the rows of their logits.
        logits : tensor (rows, vocabulary)

        """
        by_request: dict[Request, list[tuple[Branch, int]]] = {}
        for branch, row in rows:
            by_request.setdefault(branch.request, []).append((branch, row))
        deltas: list[TokenDelta] = []
        for request, beams in by_request.items():
            group = _group_of(request)
            try:
                proposed = propose(
                    _rows(logits, [row for _, row in beams]),
                    group.search.num_candidates,
                    edits=[branch.stream.edits for branch, _ in beams],
                    banned=group.search.banned_tokens,
                    top=request.params.logprobs,
                )
            except Exception as error:  # of memory, say
                deltas += self.endings.fail([request], error)
                continue
            self.counters.sampled_tokens += len(beams)
            for (branch, _), candidates in zip(beams, proposed, strict=True):
                if candidates is not None:
                    group.candidates[branch] = candidates
            if any(candidates is None for candidates in proposed):
                deltas += self.endings.fail_numerically(request)
        return deltas

    def advance(self, rows: Sequence[tuple[Branch, int]]) -> list[TokenDelta]:
        """Go on with the searches whose beams `look` was given, as far as they are complete."""
        deltas: list[TokenDelta] = []
        for request in dict.fromkeys(branch.request for branch, _ in rows):
            try:
                successors = self._choose(request)
            except RequestError as error:
                deltas += self.endings.end(request, error)
                continue
            except Exception as error:  # a tokenizer's, which is not ours to trust
                deltas += self.endings.fail([request], error)
                continue
            if successors is not None:
                deltas += self._carry_out(request, successors)
                if not request.live_branches:
                    self.endings.close(request)
        return deltas

    def _choose(self, request: Request) -> list[Branch] | None:
        """The branches that follow, without their sequences; None while some logits are missing.

        Changes no sequence, so that a tokenizer's error finds the request whole. If the search is
        done, the branches are its results, best first, and have ended.

        Raises
        ------
        RequestError
            If nothing may follow any beam, and no sequence has ended.
        """
        group = _group_of(request)
        # A beam that is still to be computed again (after a preemption) has old candidates at best.
        if request.status is not Status.RUNNING or request.to_prefill:
            return None
        beams = request.branches[: len(group.search.running)]
        if not all(branch in group.candidates for branch in beams):
            return None
        candidates = [group.candidates[branch] for branch in beams]
        group.candidates = {}
        streams: dict[tuple[int, int], TextStream] = {}

        def grow(beam: Beam) -> TextStream:
            place = beam.parent, beam.token_ids[-1]
            if place not in streams:
                streams[place] = beams[beam.parent].stream.copy()
                streams[place].push(beam.token_ids[-1])
            return streams[place]

        # Text is made of every candidate only where it may end one.
        searched = group.search.params.stop
        group.search.advance(
            candidates, (lambda beam: grow(beam).finish_reason is not None) if searched else None
        )
        if not group.search.done:
            return [
                _successor(beams[beam.parent], index, beam, grow(beam))
                for index, beam in enumerate(group.search.running)
            ]
        if not group.search.finished:
            raise RequestError(NO_TOKEN_LEFT)
        return _results(request, group)

    def _carry_out(self, request: Request, successors: list[Branch]) -> list[TokenDelta]:
        """Let the chosen branches take over; returns the results' tokens once there are any."""
        search = _group_of(request).search
        beams = request.branches
        if not search.done:
            self._hand_on(beams, successors, [beam.parent for beam in search.running])
            request.branches = successors
            return []
        # The one that led to the best result keeps prompt and answer cached, for whoever goes on.
        kept = _nearest(beams, successors[0].stream.token_ids)
        for branch in beams:
            if branch is not kept:
                self.scheduler.release(branch, EPHEMERAL)
        # Last, so that none of the others takes their common prompt for its own.
        self.scheduler.release(kept)
        request.branches = successors
        request.first_token_at = time.perf_counter()
        return [delta for branch in successors for delta in deltas_of(branch)]

    def _hand_on(
        self, beams: list[Branch], successors: list[Branch], parents: Sequence[int]
    ) -> None:
        """Give each successor its beam's sequence; all are retained before any is released."""
        sources = [branch.sequence for branch in beams]
        heirs: dict[int, Branch] = {}
        for branch, parent in zip(successors, parents, strict=True):
            if heirs.setdefault(parent, branch) is not branch:
                source = sources[parent]
                assert source is not None
                branch.sequence = self.cache.fork(source)
        for parent, branch in heirs.items():
            branch.sequence, beams[parent].sequence = sources[parent], None
        for branch in beams:
            self.scheduler.release(branch, EPHEMERAL)


def _group_of(request: Request) -> BeamGroup:
    assert request.beams is not None
    return request.beams


def _successor(branch: Branch, index: int, beam: Beam, stream: TextStream) -> Branch:
    """A beam one token on, as a branch that still has no sequence."""
    return Branch(
        branch.request,
        index,
        stream,
        next_token=beam.token_ids[-1],
        num_known=branch.num_known,
        logprobs=list(beam.details),
        cumulative_logprob=beam.logprob,
    )


def _results(request: Request, group: BeamGroup) -> list[Branch]:
    """The best hypotheses as branches that have ended."""
    best = group.search.finished[: group.search.params.num_return_sequences]
    results = []
    for index, (beam, score) in enumerate(best):
        stream = group.blank.copy()
        for token in beam.token_ids:
            stream.push(token)
        stream.finish()
        details = list(beam.details)
        branch = Branch(request, index, stream, logprobs=details, cumulative_logprob=beam.logprob)
        branch.score = score
        results.append(branch)
    return results


def _nearest(beams: list[Branch], token_ids: Sequence[int]) -> Branch:
    """The beam that has most leading tokens in common with these."""

    def common(branch: Branch) -> int:
        own = branch.stream.token_ids
        pairs = zip(own, token_ids, strict=False)
        return next((n for n, (left, right) in enumerate(pairs) if left != right), len(own))

    return max(beams, key=common)
