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
    GrammarCompiler,
    SamplingRow,
    Tokenizer,
    sample,
)
from radixkv.engine.beams import BeamStepper, Params
from radixkv.engine.door import Door
from radixkv.engine.holds import Hold
from radixkv.engine.interrupts import DeferredInterrupts
from radixkv.engine.ranking import rank
from radixkv.engine.request import NO_TOKEN_LEFT, Branch, Request, Status, TokenDelta
from radixkv.engine.runner import ModelRunner
from radixkv.engine.scheduler import ScheduledRow, Scheduler, Step
from radixkv.engine.scoring import score_prompts
from radixkv.engine.stats import EngineCounters, EngineStats
from radixkv.errors import (
    EngineStoppedError,
    NumericalError,
    RequestError,
)


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
        self.beams = BeamStepper(cache, self.scheduler, self.counters)
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
            return self._fail(self.scheduler.running, error)
        if not step.rows:
            return [] if step.refused is None else self._end(*step.refused)
        try:
            with interrupts.allowed():
                logits = self.runner.run(step)
        except BaseException as error:
            self.cache.abort()
            deltas = self._fail((row.branch.request for row in step.rows), error)
            if not isinstance(error, Exception):
                raise
            return deltas
        self.cache.settle()
        return self._advance(step, score_prompts(step, logits))

    def _note_peak(self) -> None:
        pool = self.cache.pool
        held = pool.num_blocks - pool.num_free - self.cache.tree.num_evictable
        self.counters.peak_blocks_held = max(self.counters.peak_blocks_held, held)

    def _fail(self, requests: Iterable[Request], error: BaseException) -> list[TokenDelta]:
        deltas = []
        for request in dict.fromkeys(requests):
            reason = str(error) or type(error).__name__
            failure = EngineStoppedError(f"the step that carried the request failed: {reason}")
            failure.__cause__ = error
            deltas += self._end(request, failure)
        return deltas

    def _advance(self, step: Step, logits: torch.Tensor) -> list[TokenDelta]:
        """Sample behind every row that asks for it, or search, and go on from there."""
        sampling: list[tuple[ScheduledRow, Branch]] = []
        searching: list[tuple[Branch, int]] = []
        index = []
        wanted = 0
        for row in step.rows:
            if row.decodes:
                self.cache.commit(row.sequence, row.stop)
                self.counters.decoded_tokens += 1
            if row.samples:
                if row.branch.request.beams is not None:
                    searching.append((row.branch, wanted))
                else:
                    for branch in self._branches_behind(row):
                        sampling.append((row, branch))
                        index.append(wanted)
                wanted += 1
        deltas: list[TokenDelta] = []
        for request, fault in self.beams.look(searching, logits).items():
            deltas += self._fail([request], fault) if fault else self._fail_numerically(request)
        if index != list(range(wanted)):
            logits = logits[torch.tensor(index, dtype=torch.int64)]
        deltas += self._sample(sampling, logits)
        if any(delta.finish_reason == "error" for delta in deltas):
            self.scheduler.requeue_withdrawn()
        return deltas + self._advance_beams(searching)

    def _advance_beams(self, searching: list[tuple[Branch, int]]) -> list[TokenDelta]:
        deltas: list[TokenDelta] = []
        for request in dict.fromkeys(branch.request for branch, _ in searching):
            try:
                successors = self.beams.choose(request)
            except RequestError as error:
                deltas += self._end(request, error)
                continue
            except Exception as error:  # a tokenizer's, which is not ours to trust
                deltas += self._fail([request], error)
                continue
            if successors is not None:
                deltas += self.beams.carry_out(request, successors)
                if not request.live_branches:
                    self._close(request)
        return deltas

    def _sample(
        self, sampling: list[tuple[ScheduledRow, Branch]], logits: torch.Tensor
    ) -> list[TokenDelta]:
        try:
            sampled = sample(logits, [self._sampling_row(row, branch) for row, branch in sampling])
        except Exception as error:
            return self._fail((branch.request for _, branch in sampling), error)
        deltas: list[TokenDelta] = []
        for (_, branch), token, valid, exhausted, logprobs in zip(
            sampling,
            sampled.token_ids.tolist(),
            sampled.valid,
            sampled.exhausted,
            sampled.logprobs,
            strict=True,
        ):
            if branch.request.status is Status.FINISHED:
                continue
            if exhausted:
                deltas += self._end(branch.request, RequestError(NO_TOKEN_LEFT))
                continue
            if not valid:
                deltas += self._fail_numerically(branch.request)
                continue
            if logprobs is not None:
                branch.logprobs.append(logprobs)
            try:
                deltas += self._push(branch, token)
            except Exception as error:  # a tokenizer's, which is not ours to trust
                deltas += self._fail([branch.request], error)
        return deltas

    def _branches_behind(self, row: ScheduledRow) -> list[Branch]:
        """The branches that sample from a row's logits: all of them, behind a fresh prompt."""
        request = row.branch.request
        if request.is_fresh:
            for branch in request.branches[1:]:
                branch.sequence = self.cache.fork(row.sequence)
            return request.branches
        return [row.branch]

    def _sampling_row(self, row: ScheduledRow, branch: Branch) -> SamplingRow:
        request = branch.request
        stream = branch.stream
        return SamplingRow(
            request.params,
            request.seed,
            branch.index,
            row.stop,
            stream.banned_tokens,
            stream.edits,
            None if stream.grammar is None else stream.grammar.allowed,
        )

    def _push(self, branch: Branch, token: int) -> list[TokenDelta]:
        request = branch.request
        ranked = request.params.ranked
        if request.first_token_at is None and not ranked:
            request.first_token_at = time.perf_counter()
        self.counters.sampled_tokens += 1
        delta = branch.stream.push(token)
        text = delta.text
        if delta.finish_reason is None and branch.num_tokens >= self.max_model_len:
            delta = branch.stream.finish()
            text += delta.text
        if delta.finish_reason is None:
            branch.next_token = token
        else:
            self.scheduler.release(branch)
            if not request.live_branches:
                self._close(request)
                if ranked:
                    return rank(request)
        if ranked:
            return []
        return [
            TokenDelta(
                request.request_id,
                branch.index,
                token,
                text,
                delta.finish_reason,
                delta.stop_reason,
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
            self._close(request)
        return True

    def shutdown(self) -> None:
        """End every request with `EngineStoppedError` and take no more."""
        self._stopped = True
        for request in list(self.requests.values()):
            self._end(request, EngineStoppedError("the engine was shut down"))
        self.scheduler.holds.release_all()

    def _fail_numerically(self, request: Request) -> list[TokenDelta]:
        """NaN logits: nothing that this request computed may be found by others."""
        for branch in request.branches:
            if branch.sequence is not None:
                self.cache.withdraw(branch.sequence, request.num_cached_tokens)
        return self._end(request, NumericalError("the model gave NaN logits for this request"))

    def _end(self, request: Request, error: Exception) -> list[TokenDelta]:
        request.error = error
        self.counters.requests_failed += 1
        # Of what is ranked nothing was shown yet, so none of it has ended for who looks on.
        live = request.branches if request.params.ranked else request.live_branches
        live = live[: request.params.n]
        self._close(request)
        return [TokenDelta(request.request_id, b.index, -1, "", "error") for b in live]

    def _close(self, request: Request) -> None:
        self.scheduler.finish(request)
        request.finished_at = time.perf_counter()
        del self.requests[request.request_id]

    def stats(self) -> EngineStats:
        """Counters and state now."""
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            engine=replace(self.counters),
            cache=self.cache.stats(),
        )
