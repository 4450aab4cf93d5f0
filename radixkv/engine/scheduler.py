"""Scheduler: what the next step computes.

Decodes first, then chunks of prompts, within one budget of tokens. Requests that arrive together
with a common prefix are admitted in one step, where the first computes it and the others share it.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from radixkv.cache import CopyOrder, PrefixCache, Retention, Sequence
from radixkv.cache.hashing import TOKEN_DTYPE
from radixkv.config import EngineConfig
from radixkv.engine.decodes import Decodes, ScheduledRow, Tokens
from radixkv.engine.holds import Holds
from radixkv.engine.request import NOTHING, Branch, Request, Status
from radixkv.engine.stats import EngineCounters
from radixkv.errors import OutOfBlocksError

# A request that was overtaken this often goes before any that fits the cache better.
AGEING = 16
# Waiting requests among which the best fit is looked for at each step.
WINDOW = 64
# Tokens of prompts whose logits a step gives at most: each may be some 150,000 float32 numbers.
SCORED_PER_STEP = 256


@dataclass(slots=True)
class Step:
    """What to compute, and the block copies to make for it.

    Attributes
    ----------
    decodes : Decodes
    prompts : list of ScheduledRow
    refused : (Request, OutOfBlocksError) or None
        A request that found no room though none is running: blocks are held by others than the
        engine, and nothing that the engine does will free them.
    """

    decodes: Decodes
    prompts: list[ScheduledRow] = field(default_factory=list)
    copies: list[CopyOrder] = field(default_factory=list)
    refused: tuple[Request, OutOfBlocksError] | None = None

    @property
    def rows(self) -> list[ScheduledRow]:
        """All rows: first those that decode."""
        return self.decodes.rows + self.prompts

    def __len__(self) -> int:
        return len(self.decodes) + len(self.prompts)


class Scheduler:
    """Continuous batching over a prefix cache.

    Attributes
    ----------
    waiting : list of Request
        In order of arrival.
    running : list of Request
        In order of admission.
    holds : Holds
        Sequences of contexts that stand between requests; given up before anybody must wait.
    """

    def __init__(self, cache: PrefixCache, config: EngineConfig, counters: EngineCounters) -> None:
        self.cache = cache
        self.config = config
        self.counters = counters
        self.holds = Holds(cache)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._decodes = Decodes([], [], None)
        # Who goes on in the step that is being scheduled, and their tokens while they are known.
        self._going_on: list[Branch] = []
        self._tokens: Tokens | None = None
        # Whether no others than the last step's decodes can have a token to go on from.
        self._alone = False

    def schedule(self) -> Step:
        """Choose the next step's rows and hold the blocks they need."""
        preemptions = self.counters.preemptions
        # Whoever may take blocks from others comes first: what a step was promised stays.
        self._go_on()
        self._resume_branches()
        decodes = self._decode()
        step = Step(decodes)
        budget = self.config.max_num_batched_tokens - len(decodes)
        for request in self.running:
            budget = self._schedule_prefills(step, request, budget)
        # Whoever just lost its blocks must not be the one to take them back.
        if self.counters.preemptions == preemptions:
            self._admit_waiting(step, budget)
        step.copies = self.cache.take_copies()
        # A prompt's branches have tokens next time, and beams are others then.
        self._alone = self._alone and not step.prompts and not decodes.searching
        return step

    # -- decodes ---------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Append the token of each branch that has one, as far as the budget goes; may preempt."""
        budget = self.config.max_num_batched_tokens
        branches = self._with_token()
        if len(branches) > budget:
            # Whoever waited longest for its turn goes first.
            branches.sort(key=lambda branch: len(branch.stream.token_ids))
        first = branches[:budget]
        self._alone = len(first) == len(branches)
        tokens = np.array([branch.next_token for branch in first], TOKEN_DTYPE)
        done = self.cache.append_each(_sequences(first), tokens.tobytes())
        self._going_on = first[:done]
        self._tokens = tokens[:done]
        for branch in self._going_on:
            branch.next_token = -1
        for branch in branches[done:]:
            if len(self._going_on) == budget:
                break
            self._tokens = None
            if self._append(branch):
                self._going_on.append(branch)

    def _with_token(self) -> list[Branch]:
        """Branches that have a token to go on from, in order of admission."""
        if self._alone:
            return [branch for branch in self._decodes.branches if branch.next_token >= 0]
        return [
            branch
            for request in self.running
            for branch in request.branches
            if branch.next_token >= 0
        ]

    def _append(self, branch: Branch) -> bool:
        """Make room for the branch's next token; False if its request had to be preempted."""
        while (sequence := branch.sequence) is not None:
            try:
                sequence.append(branch.next_token)
            except OutOfBlocksError:
                if not self.holds.reclaim():
                    self._preempt(self._victim())
            else:
                branch.next_token = -1
                return True
        return False

    def _decode(self) -> Decodes:
        """The rows of those that go on; the last step's, moved on, if they are the same."""
        branches, sequences = self._going_on, _sequences(self._going_on)
        last = self._decodes
        if branches == last.branches and sequences == last.sequences:
            last.move_on(self._tokens)
        else:
            self._decodes = Decodes(branches, sequences, self._tokens)
        return self._decodes

    # -- preemption ------------------------------------------------------------------------------

    def _victim(self) -> Request:
        """The running request that loses least; never the oldest, so that one always ends.

        Whoever holds nothing alone is spared: taking it out would free nothing.
        """
        youngest_first = sorted(self.running, key=lambda request: -request.serial)
        candidates = youngest_first[:-1] or youngest_first
        losses = [_held_alone(request) for request in candidates]
        useful = [place for place, loss in enumerate(losses) if loss] or range(len(losses))
        return candidates[min(useful, key=losses.__getitem__)]

    def _preempt(self, request: Request) -> None:
        """Take a request out of the step being scheduled, before anything of it is promised."""
        self._going_on = [branch for branch in self._going_on if branch.request is not request]
        self._tokens = None
        self.requeue(request)

    def requeue(self, request: Request) -> None:
        """Give a running request's blocks back and let it wait; what it computed stays cached."""
        for branch in request.branches:
            if branch.sequence is not None:
                branch.num_known = max(branch.num_known, branch.sequence.num_computed)
            self.release(branch)
        self.running.remove(request)
        request.to_prefill = []
        request.score_from_where_it_stands()
        request.status = Status.WAITING
        request.overtaken = AGEING
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self.add(request)

    def requeue_withdrawn(self) -> None:
        """Let requests start again whose blocks turned out to hold what cannot be trusted."""
        for request in self.running[:]:
            if any(branch.sequence and branch.sequence.withdrawn for branch in request.branches):
                self.requeue(request)

    def _resume_branches(self) -> None:
        """Blocks for the next branch of each request that comes back; may preempt.

        One after the other, each once the one before it is scheduled to its end: so it finds the
        prompt, and whatever else they have in common, in the cache.
        """
        for request in self.running[:]:
            while request.to_prefill and request.to_prefill[0].sequence is None:
                try:
                    self._acquire(request.to_prefill[0])
                except OutOfBlocksError:
                    self._preempt(self._victim())

    # -- prompts ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Let a request wait, in order of arrival."""
        insort(self.waiting, request, key=lambda waiting: waiting.serial)

    def _admit_waiting(self, step: Step, budget: int) -> None:
        if budget <= 0 or not self.waiting:
            return
        running = self._num_running()
        while budget > 0 and self.waiting and running < self.config.max_num_seqs:
            for request in self._candidates():
                if budget <= 0 or not self._admit(step, request, running):
                    return
                running += len(request.live_branches)
                budget = self._schedule_prefills(step, request, budget)

    def _candidates(self) -> Iterator[Request]:
        """Who waits, the longest cached prefix first, but before all those that have aged."""
        window = self.waiting[:WINDOW]
        yield from (request for request in window if request.overtaken >= AGEING)
        others = [request for request in window if request.status is Status.WAITING]
        if len(others) > 1:
            others.sort(key=lambda request: -self.cache.match(request.prompt, request.namespace))
        yield from others

    def _admit(self, step: Step, request: Request, running: int) -> bool:
        """Hold blocks for a whole prompt (or what a branch has of it); False to wait on."""
        live = request.live_branches
        if running and running + len(live) > self.config.max_num_seqs:
            return False
        spare = 0
        if running:
            # Without a block for each running branch, someone would be preempted at once.
            spare = running + sum(self._tail_blocks(branch) for branch in live[1:])
        try:
            self._acquire(live[0], spare)
        except OutOfBlocksError as error:
            if not running:
                step.refused = (request, error)
            return False
        self.waiting.remove(request)
        for earlier in self.waiting:
            if earlier.serial > request.serial:
                break
            earlier.overtaken += 1
        self.running.append(request)
        request.status = Status.RUNNING
        if request.admitted_at is None:
            request.admitted_at = time.perf_counter()
        request.to_prefill = live[:1] if request.is_fresh else live
        self._note_cached(request)
        return True

    def _num_running(self) -> int:
        return sum(len(request.live_branches) for request in self.running)

    def _tail_blocks(self, branch: Branch) -> int:
        """Blocks that a branch will want beside those it shares with its siblings."""
        size = self.cache.block_size
        shared = len(branch.request.prompt) // size
        return max(-(-branch.num_tokens // size) - shared, 1)

    def _acquire(self, branch: Branch, spare_blocks: int = 0) -> None:
        """Hold blocks for what a branch has; holds are given up for it, its own the last."""
        request, tokens = branch.request, branch.tokens()
        resumed = request.num_preemptions > 0
        while branch.sequence is None:
            try:
                if request.hold is not None:
                    branch.sequence = self.holds.take(
                        request.hold, tokens, resumed=resumed, spare_blocks=spare_blocks
                    )
                branch.sequence = branch.sequence or self.cache.acquire(
                    tokens,
                    request.namespace,
                    retention=request.retention,
                    resumed=resumed,
                    spare_blocks=spare_blocks,
                )
            except OutOfBlocksError:
                if not self.holds.reclaim():
                    raise

    def _schedule_prefills(self, step: Step, request: Request, budget: int) -> int:
        """Rows for what is left of a request's tokens, as far as the budget goes."""
        while request.to_prefill and budget > 0:
            branch = request.to_prefill[0]
            sequence = branch.sequence
            if sequence is None:
                break
            if self.cache.reuse(sequence):
                self._note_cached(request)
            row = self._prefill_row(branch, sequence, budget, _scored_left(step, request))
            if row is None:
                break
            step.prompts.append(row)
            budget -= row.stop - row.start
            if row.samples:
                request.to_prefill.pop(0)
        return budget

    def _prefill_row(
        self, branch: Branch, sequence: Sequence, budget: int, scored: int
    ) -> ScheduledRow | None:
        """The next tokens of a branch: first the cached ones whose logits are wanted, then others.

        The logits behind the last token are wanted always. None if no more than ``scored`` logits
        may be asked for, and that is none.
        """
        request, start, end = branch.request, sequence.num_computed, sequence.num_tokens
        wanted = min(request.next_scored, end - 1)
        computes = wanted >= start
        if computes:
            stop = min(end, start + budget, wanted + scored)
            if stop == start:
                return None
            self.cache.commit(sequence, stop, include_open=True, pending=True)
            self._count(branch, start, stop)
        else:
            start, stop = wanted, min(start, wanted + budget, wanted + scored)
            if stop == start:
                return None
            self.counters.logits_only_tokens += stop - start
        if wanted < stop and request.next_scored != NOTHING:
            request.next_scored = NOTHING if stop == end else stop
        return ScheduledRow(
            branch, start, stop, computes, stop == end, logits_from=max(wanted, start)
        )

    def _count(self, branch: Branch, start: int, stop: int) -> None:
        """Count computed tokens: again, for the first time of a prompt, or of a continuation."""
        known = min(max(branch.num_known, start), stop)
        prompt = min(max(len(branch.request.prompt), known), stop)
        self.counters.recomputed_tokens += known - start
        self.counters.prefilled_tokens += prompt - known
        self.counters.decoded_tokens += stop - prompt

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
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED

    def release(self, branch: Branch, retention: Retention | None = None) -> None:
        """Give up what a branch holds; all that is computed of it stays cached.

        With an ephemeral ``retention`` only its full blocks do, and they are the next to go.
        """
        sequence, branch.sequence, branch.next_token = branch.sequence, None, -1
        if sequence is None:
            return
        if (hold := branch.request.hold) is not None:
            self.holds.put(hold, sequence)
        else:
            if not sequence.withdrawn and not (retention and retention.ephemeral):
                sequence.truncate(sequence.num_computed)
                self.cache.commit(sequence, include_open=True)
            self.cache.release(sequence, retention)


def _sequences(branches: list[Branch]) -> list[Sequence]:
    return [branch.sequence for branch in branches if branch.sequence is not None]


def _scored_left(step: Step, request: Request) -> int:
    """Logits that a request's next row may ask for; any number if none of its prompt's."""
    if request.next_scored == NOTHING:
        return NOTHING
    return SCORED_PER_STEP - sum(row.num_scored for row in step.prompts)


def _held_alone(request: Request) -> int:
    """Blocks that only this request holds, so that they can go when it gives them up."""
    count = 0
    for branch in request.branches:
        if (sequence := branch.sequence) is not None:
            count += sequence.num_blocks - sequence.num_tree_blocks
            node = sequence.node
            while node is not None and node.pins == 1:
                count += len(node.blocks)
                node = node.parent
    return count
