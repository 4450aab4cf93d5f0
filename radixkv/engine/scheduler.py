"""Scheduler: what the next step computes.

Decodes first, then chunks of prompts, within one budget of tokens. Requests that arrive together
with a common prefix are admitted in one step, where the first computes it and the others share it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from radixkv.cache import CopyOrder, PrefixCache, Sequence
from radixkv.config import EngineConfig
from radixkv.engine.request import Branch, Request, Status
from radixkv.engine.stats import EngineCounters
from radixkv.errors import OutOfBlocksError

# A request that was overtaken this often goes before any that fits the cache better.
AGEING = 16
# Waiting requests among which the best fit is looked for at each step.
WINDOW = 64


@dataclass(slots=True)
class ScheduledRow:
    """One sequence's share of a step.

    Attributes
    ----------
    start, stop : int
        Positions of its queries, half-open.
    computes : bool
        Whether their keys and values are computed and written; a prompt that is cached to the end
        only asks for its last token's logits.
    samples : bool
        Whether a token is sampled behind them.
    decodes : bool
        Whether the one query is a token that was sampled in an earlier step.
    """

    branch: Branch
    start: int
    stop: int
    computes: bool = True
    samples: bool = True
    decodes: bool = False

    @property
    def sequence(self) -> Sequence:
        assert self.branch.sequence is not None
        return self.branch.sequence


@dataclass(slots=True)
class Step:
    """What to compute, and the block copies to make for it."""

    rows: list[ScheduledRow] = field(default_factory=list)
    copies: list[CopyOrder] = field(default_factory=list)


class Scheduler:
    """Continuous batching over a prefix cache.

    Attributes
    ----------
    waiting : list of Request
        In order of arrival.
    running : list of Request
        In order of admission.
    """

    def __init__(self, cache: PrefixCache, config: EngineConfig, counters: EngineCounters) -> None:
        self.cache = cache
        self.config = config
        self.counters = counters
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def schedule(self) -> Step:
        """Choose the next step's rows and hold the blocks they need."""
        step = Step()
        preemptions = self.counters.preemptions
        budget = self._schedule_decodes(step, self.config.max_num_batched_tokens)
        for request in self.running:
            budget = self._schedule_prefills(step, request, budget)
        # Whoever just lost its blocks must not be the one to take them back.
        crowded = self.counters.preemptions > preemptions
        while budget > 0 and self.waiting and not crowded:
            request = self._next_waiting()
            if not self._admit(request):
                break
            budget = self._schedule_prefills(step, request, budget)
        step.copies = self.cache.take_copies()
        return step

    # -- decodes ---------------------------------------------------------------------------------

    def _schedule_decodes(self, step: Step, budget: int) -> int:
        """A row for each branch that has a token to go on from; may preempt."""
        branches = [
            branch
            for request in self.running
            for branch in request.branches
            if branch.next_token >= 0 and branch.sequence is not None
        ]
        if len(branches) > budget:
            # Whoever waited longest for its turn goes first.
            branches.sort(key=lambda branch: len(branch.stream.token_ids))
        for branch in branches:
            if budget == 0:
                break
            if branch.sequence is None or not self._append(step, branch):
                continue
            stop = branch.sequence.num_tokens
            step.rows.append(ScheduledRow(branch, stop - 1, stop, decodes=True))
            budget -= 1
        return budget

    def _append(self, step: Step, branch: Branch) -> bool:
        """Make room for the branch's next token; False if its request had to be preempted."""
        while branch.sequence is not None:
            try:
                branch.sequence.append(branch.next_token)
            except OutOfBlocksError:
                self._preempt(step, self._victim())
            else:
                branch.next_token = -1
                return True
        return False

    def _victim(self) -> Request:
        """The running request that loses least; never the oldest, so that one always ends.

        What it loses is what only it holds: blocks that others share, or that were committed,
        stay cached.
        """
        youngest_first = sorted(self.running, key=lambda request: -request.serial)
        candidates = youngest_first[:-1] or youngest_first
        return min(candidates, key=self._own_blocks)

    def _own_blocks(self, request: Request) -> int:
        return sum(
            branch.sequence.num_blocks - branch.sequence.num_tree_blocks
            for branch in request.branches
            if branch.sequence is not None
        )

    def _preempt(self, step: Step, request: Request) -> None:
        """Give a request's blocks back and let it wait; what it computed stays cached."""
        step.rows = [row for row in step.rows if row.branch.request is not request]
        for branch in request.branches:
            if branch.sequence is not None:
                self._keep_computed(branch.sequence)
                self.cache.release(branch.sequence)
                branch.sequence = None
            branch.next_token = -1
        self.running.remove(request)
        request.status = Status.WAITING
        request.overtaken = AGEING
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self.add(request)

    def _keep_computed(self, sequence: Sequence) -> None:
        """Show all that is computed, so that it stays cached once the sequence is released."""
        if not sequence.withdrawn:
            sequence.truncate(sequence.num_computed)
            self.cache.commit(sequence, include_open=True)

    # -- prompts ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Let a request wait, in order of arrival."""
        place = len(self.waiting)
        while place and self.waiting[place - 1].serial > request.serial:
            place -= 1
        self.waiting.insert(place, request)

    def _next_waiting(self) -> Request:
        """The request with the longest cached prefix, unless an earlier one has aged."""
        window = self.waiting[:WINDOW]
        if window[0].overtaken >= AGEING or len(window) == 1:
            return window[0]
        aged = [request for request in window if request.overtaken >= AGEING]
        if aged:
            return aged[0]
        return max(window, key=lambda request: (self._num_cached(request), -request.serial))

    def _num_cached(self, request: Request) -> int:
        return self.cache.match(request.prompt, request.namespace)

    def _admit(self, request: Request) -> bool:
        """Hold blocks for all of the request's tokens; False if it must wait on."""
        branches = request.branches[:1] if request.is_fresh else request.live_branches
        others = sum(len(other.live_branches) for other in self.running)
        if others and others + len(request.live_branches) > self.config.max_num_seqs:
            return False
        try:
            for branch in branches:
                branch.sequence = self.cache.acquire(
                    request.tokens_of(branch),
                    request.namespace,
                    retention=request.retention,
                    resumed=request.num_preemptions > 0,
                    # Without a block for each running branch, someone would be preempted at once.
                    spare_blocks=others,
                )
        except OutOfBlocksError:
            for branch in branches:
                if branch.sequence is not None:
                    self.cache.release(branch.sequence)
                    branch.sequence = None
            return False
        self.waiting.remove(request)
        for earlier in self.waiting:
            if earlier.serial > request.serial:
                break
            earlier.overtaken += 1
        self.running.append(request)
        request.status = Status.RUNNING
        self._note_cached(request)
        request.to_prefill = list(branches)
        return True

    def _schedule_prefills(self, step: Step, request: Request, budget: int) -> int:
        """Rows for what is left of a request's tokens, as far as the budget goes."""
        while request.to_prefill and budget > 0:
            branch = request.to_prefill[0]
            sequence = branch.sequence
            assert sequence is not None
            if self.cache.reuse(sequence):
                self._note_cached(request)
            start, end = sequence.num_computed, sequence.num_tokens
            if start == end:
                step.rows.append(ScheduledRow(branch, end - 1, end, computes=False))
                budget -= 1
                self.counters.logits_only_tokens += 1
            else:
                stop = min(end, start + budget)
                self.cache.commit(sequence, stop, include_open=True, pending=True)
                step.rows.append(ScheduledRow(branch, start, stop, samples=stop == end))
                budget -= stop - start
                if not request.num_preemptions:
                    self.counters.prefilled_tokens += stop - start
                else:
                    self.counters.recomputed_tokens += stop - start
                if stop < end:
                    break
            request.to_prefill.pop(0)
        return budget

    def _note_cached(self, request: Request) -> None:
        """What the request found in the cache counts once, whatever happens to it later."""
        sequence = request.branches[0].sequence
        if not request.num_preemptions and sequence is not None:
            request.num_cached_tokens = sequence.num_cached

    # -- endings ---------------------------------------------------------------------------------

    def finish(self, request: Request) -> None:
        """Release whatever the request still holds; its computed blocks stay cached."""
        for branch in request.branches:
            self.release(branch)
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.to_prefill.clear()
        request.status = Status.FINISHED

    def release(self, branch: Branch) -> None:
        """End a branch that has ended or is given up."""
        sequence, branch.sequence, branch.next_token = branch.sequence, None, -1
        if sequence is not None:
            self._keep_computed(sequence)
            self.cache.release(sequence)

    def requests(self) -> Iterable[Request]:
        """All that are not finished."""
        return [*self.running, *self.waiting]
