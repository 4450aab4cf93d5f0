"""Engine: requests in, tokens out, one step after the other."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from radixkv.cache import DEFAULT_RETENTION, Namespace, PrefixCache, Retention
from radixkv.config import EngineConfig
from radixkv.decoding import (
    Added,
    GrammarCompiler,
    SampledTokens,
    SamplingBatch,
    Tokenizer,
    add_each,
    sample,
)
from radixkv.engine.beams import BeamStepper, Params
from radixkv.engine.decodes import Decodes, ScheduledRow, sampling_row
from radixkv.engine.door import Door
from radixkv.engine.endings import Endings
from radixkv.engine.holds import Hold
from radixkv.engine.interrupts import DeferredInterrupts
from radixkv.engine.ranking import rank
from radixkv.engine.request import NO_TOKEN_LEFT, Branch, Request, Status, TokenDelta
from radixkv.engine.runner import ModelRunner
from radixkv.engine.scheduler import Scheduler, Step
from radixkv.engine.scoring import score_prompts
from radixkv.engine.stats import EngineCounters, EngineStats
from radixkv.errors import EngineStoppedError, RequestError


class Engine:
    """Continuous batching over one model and one prefix cache. Not thread-safe.

    Parameters
    ----------
    runner : ModelRunner
    cache : PrefixCache
    config : EngineConfig
    vocab_size, max_model_len : int
        The model's.
    tokenizer : Tokenizer, optional
        Without one, texts stay empty and stop strings are refused.
    eos_token_ids : iterable of int
        Tokens that end a continuation.
    grammars : GrammarCompiler, optional
        Compiles what requests' texts must obey; without one, such requests are refused.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: PrefixCache,
        config: EngineConfig,
        *,
        vocab_size: int,
        max_model_len: int,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] = (),
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.runner = runner
        self.cache = cache
        self.config = config
        self.counters: EngineCounters = runner.counters
        self.scheduler = Scheduler(cache, config, self.counters)
        self.vocab_size = vocab_size
        self.max_model_len = min(max_model_len, config.max_model_len or max_model_len)
        self.tokenizer = tokenizer
        self.door = Door(
            vocab_size=vocab_size,
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs,
            pool=(cache.pool.num_blocks, cache.block_size),
            tokenizer=tokenizer,
            eos_token_ids=tuple(eos_token_ids),
            grammars=GrammarCompiler(None, vocab_size) if grammars is None else grammars,
        )
        self.requests: dict[str, Request] = {}
        self.endings = Endings(self.requests, cache, self.scheduler)
        self.beams = BeamStepper(cache, self.scheduler, self.counters, self.endings)
        self._serial = 0
        self._stopped = False

    # -- the door --------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Iterable[int],
        params: Params,
        *,
        request_id: str | None = None,
        namespace: Namespace = (),
        retention: Retention = DEFAULT_RETENTION,
        hold: Hold | None = None,
        scored_from: int | None = None,
    ) -> Request:
        """Queue a request: `SamplingParams` continue the prompt, `BeamSearchParams` search.

        Parameters
        ----------
        prompt : token ids
        params : SamplingParams or BeamSearchParams
        request_id : str, optional
        namespace, retention
            See `PrefixCache.acquire`.
        hold : Hold, optional
            The request runs on its sequence, whose tokens the prompt begins with, and leaves it
            there when it ends, with all that is computed then.
        scored_from : int, optional
            Give the log-probabilities of the prompt's tokens behind this position. Those of all
            tokens are given if ``params.prompt_logprobs`` is set.

        Raises
        ------
        RequestError
            If it cannot be served: empty prompt, token ids out of range, a prompt longer than the
            model's context, a request larger than the pool, an id that is in use, a namespace
            that is no tuple of strings, a grammar that cannot be compiled.
        EngineStoppedError
            If the engine was shut down.
        """
        if self._stopped:
            raise EngineStoppedError("the engine was shut down")
        if request_id in self.requests:
            raise RequestError(f"there is a request {request_id!r} already")
        request = self.door.make(
            prompt,
            params,
            request_id=self._new_id() if request_id is None else request_id,
            serial=self._serial,
            namespace=namespace,
            retention=retention,
            hold=hold,
            scored_from=scored_from,
        )
        with DeferredInterrupts():
            self._serial += 1
            self.requests[request.request_id] = request
            self.scheduler.add(request)
            self.counters.requests += 1
        return request

    def check_request(self, prompt: Iterable[int], params: Params) -> npt.NDArray[np.int32]:
        """The prompt's tokens, if `add_request` would take it; raises what that would raise."""
        return self.door.check(prompt, params)

    def _new_id(self) -> str:
        number = self._serial
        while f"request-{number}" in self.requests:
            number += 1
        return f"request-{number}"

    # -- the loop --------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> list[TokenDelta]:
        """Run one step and return what it added, for streaming.

        A request that fails ends with its error in it; the others go on. An exception is raised
        only for what is no request's fault and not the model's: an interrupt, which ends the
        requests of the step that it hit, or a broken law of the cache, after which the engine
        takes no more steps. Never is anything visible that was not computed.
        """
        if self._stopped:
            raise EngineStoppedError("the engine was shut down")
        try:
            with DeferredInterrupts() as interrupts:
                return self._step(interrupts)
        except Exception:
            # Blocks may be half moved: nothing that is cached can be believed any more.
            self._stopped = True
            raise

    def _step(self, interrupts: DeferredInterrupts) -> list[TokenDelta]:
        step = self.scheduler.schedule()
        self._note_peak()
        try:
            self.runner.copy_blocks(step)
        except Exception as error:
            # Any block may be one that was to be copied into.
            self.cache.abort()
            self.cache.reset()
            return self.endings.fail(self.scheduler.running, error)
        if not len(step):
            return [] if step.refused is None else self.endings.end(*step.refused)
        try:
            with interrupts.allowed():
                logits = self.runner.run(step)
        except BaseException as error:
            self.cache.abort()
            deltas = self.endings.fail((row.branch.request for row in step.rows), error)
            # Others may have counted on what it was to compute, and have no row in it yet.
            self.scheduler.requeue_withdrawn()
            if not isinstance(error, Exception):
                raise
            return deltas
        self.cache.settle()
        if step.prompts:
            logits = score_prompts(step, logits)
        return self._advance(step, logits)

    def _note_peak(self) -> None:
        pool = self.cache.pool
        held = pool.num_blocks - pool.num_free - self.cache.tree.num_evictable
        self.counters.peak_blocks_held = max(self.counters.peak_blocks_held, held)

    def _advance(self, step: Step, logits: torch.Tensor) -> list[TokenDelta]:
        """Sample behind every row that asks for it, or search, and go on from there."""
        decodes, failed = step.decodes, self.counters.requests_failed
        self.cache.commit_each(decodes.sequences)
        self.counters.decoded_tokens += len(decodes)
        searching: list[tuple[Branch, int]] = []
        if not step.prompts and not decodes.searching:
            deltas = self._sample(decodes.branches, decodes.sampling(), logits, decodes)
        else:
            sampling, searching = self._behind(step)
            deltas = self.beams.look(searching, logits)
            index = [place for _, _, place in sampling]
            if index != list(range(len(logits))):
                logits = logits[torch.tensor(index, dtype=torch.int64)]
            rows = [sampling_row(branch, position) for branch, position, _ in sampling]
            deltas += self._sample([each[0] for each in sampling], SamplingBatch(rows), logits)
        if self.counters.requests_failed > failed:
            self.scheduler.requeue_withdrawn()
        return deltas + self.beams.advance(searching)

    def _behind(self, step: Step) -> tuple[list[tuple[Branch, int, int]], list[tuple[Branch, int]]]:
        """Who samples (each with its position) and who searches, by rows of the step's logits."""
        sampling: list[tuple[Branch, int, int]] = []
        searching: list[tuple[Branch, int]] = []
        wanted = 0
        for row in step.rows:
            if row.samples:
                if row.branch.request.beams is not None:
                    searching.append((row.branch, wanted))
                else:
                    branches = self._branches_behind(row)
                    sampling += [(branch, row.stop, wanted) for branch in branches]
                wanted += 1
        return sampling, searching

    def _sample(
        self,
        branches: list[Branch],
        batch: SamplingBatch,
        logits: torch.Tensor,
        decodes: Decodes | None = None,
    ) -> list[TokenDelta]:
        """A token for each branch, and what becomes of it; ``decodes`` if they are all of these."""
        try:
            sampled = sample(logits, batch)
        except Exception as error:
            return self.endings.fail((branch.request for branch in branches), error)
        tokens = sampled.token_ids.tolist()
        all_valid = bool(sampled.valid.all())
        deltas = [] if all_valid else self._end_invalid(branches, sampled)
        if batch.asked:
            for branch, logprobs in zip(branches, sampled.logprobs, strict=True):
                # Of a sibling of one that has ended so, there is no token either.
                if logprobs is not None and branch.request.status is not Status.FINISHED:
                    branch.logprobs.append(logprobs)
        if not all_valid:
            pairs = zip(branches, tokens, strict=True)
            left = [pair for pair in pairs if pair[0].request.status is not Status.FINISHED]
            return deltas + self._push([branch for branch, _ in left], [token for _, token in left])
        if decodes is None or decodes.ranked:
            return self._push(branches, tokens)
        added = add_each(decodes.streams, tokens)
        if added.ended or added.failures:
            return self._note_each(branches, tokens, added)
        # Nothing but texts that have grown.
        self.counters.sampled_tokens += len(tokens)
        for branch, token in zip(branches, tokens, strict=True):
            branch.next_token = token
        return [*map(TokenDelta, decodes.request_ids, decodes.indices, tokens, added.texts)]

    def _end_invalid(self, branches: list[Branch], sampled: SampledTokens) -> list[TokenDelta]:
        """End the requests for which there is no token."""
        deltas: list[TokenDelta] = []
        for place in np.flatnonzero(~sampled.valid).tolist():
            request = branches[place].request
            if request.status is Status.FINISHED:
                continue
            if sampled.exhausted[place]:
                deltas += self.endings.end(request, RequestError(NO_TOKEN_LEFT))
            else:
                deltas += self.endings.fail_numerically(request)
        return deltas

    def _push(self, branches: list[Branch], tokens: list[int]) -> list[TokenDelta]:
        added = add_each([branch.stream for branch in branches], tokens)
        return self._note_each(branches, tokens, added)

    def _note_each(
        self, branches: list[Branch], tokens: list[int], added: Added
    ) -> list[TokenDelta]:
        """What becomes of each branch that has got a token, or failed to take it."""
        deltas: list[TokenDelta] = []
        self.counters.sampled_tokens += len(tokens) - len(added.failures)
        for place, branch in enumerate(branches):
            if branch.request.status is Status.FINISHED:  # A sibling has failed.
                continue
            if place in added.failures:
                deltas += self.endings.fail([branch.request], added.failures[place])
            else:
                deltas += self._note(branch, tokens[place], added.texts[place])
        # Not before, or the last tokens of siblings that end in the same step would be lost.
        for request in dict.fromkeys(branch.request for branch in branches if branch.finished):
            if request.status is not Status.FINISHED and not request.live_branches:
                self.endings.close(request)
                deltas += rank(request) if request.params.ranked else []
        return deltas

    def _branches_behind(self, row: ScheduledRow) -> list[Branch]:
        """The branches that sample from a row's logits: all of them, behind a fresh prompt."""
        request = row.branch.request
        if request.is_fresh:
            for branch in request.branches[1:]:
                branch.sequence = self.cache.fork(row.sequence)
            return request.branches
        return [row.branch]

    def _note(self, branch: Branch, token: int, text: str) -> list[TokenDelta]:
        """What becomes of a branch that has got a token, and its text."""
        request, stream = branch.request, branch.stream
        ranked = request.params.ranked
        if request.first_token_at is None and not ranked:
            request.first_token_at = time.perf_counter()
        if stream.finish_reason is None:
            branch.next_token = token
        else:
            self.scheduler.release(branch)
        if ranked:
            return []
        return [
            TokenDelta(
                request.request_id,
                branch.index,
                token,
                text,
                stream.finish_reason,
                stream.stop_reason,
            )
        ]

    # -- endings ---------------------------------------------------------------------------------

    def abort(self, request_id: str) -> bool:
        """End a request at whatever stage it is; what it computed stays cached.

        Returns False if there is no such request (it may just have finished).
        """
        request = self.requests.get(request_id)
        if request is None:
            return False
        with DeferredInterrupts():
            self.counters.requests_aborted += 1
            self.endings.close(request)
        return True

    def shutdown(self) -> None:
        """End every request with `EngineStoppedError` and take no more."""
        self._stopped = True
        for request in list(self.requests.values()):
            self.endings.end(request, EngineStoppedError("the engine was shut down"))
        self.scheduler.holds.release_all()

    def stats(self) -> EngineStats:
        """Counters and state now."""
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            engine=replace(self.counters),
            cache=self.cache.stats(),
        )
