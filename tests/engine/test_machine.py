"""A state machine over the whole engine with a fake model: any order of requests and accidents."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
from fake import (
    EOS,
    VOCABULARY,
    FakeBackend,
    check_content,
    check_over,
    equals_a_new_one,
    make_engine,
    naive,
    naive_beams,
)
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import radixkv.engine.engine
from radixkv.attention import CostModel
from radixkv.cache import DEFAULT_RETENTION, EPHEMERAL, Retention
from radixkv.decoding import BeamSearchParams, Hypothesis, SamplingParams, sample
from radixkv.engine import Engine, Request
from radixkv.engine.request import Status
from radixkv.engine.scheduler import Step
from radixkv.errors import EngineStoppedError, NumericalError, PromptTooLongError, RequestError

picks = st.integers(0, 1 << 16)
raw_tokens = st.binary(min_size=1, max_size=24)
namespaces = st.sampled_from([(), (), (), ("a", "bc"), ("ab", "c")])

FAULTS = {
    "forward fails": ValueError("device lost"),
    "forward fails late": ValueError("device lost half way"),
    "interrupt": KeyboardInterrupt(),
    "copy fails": MemoryError("no memory for a copy"),
    "sampling fails": ValueError("no dice"),
    "NaN": None,
}
# What a request may change in its logits; each depends on other parts of a branch's state.
EDITS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 3.0},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"bad_words_ids": [[0, 1], [1, 1, 2], [3]], "logit_bias": {2: 1.5}},
    {"allowed_token_ids": [0, 2, 4], "frequency_penalty": 2.0},
]
SITUATIONS = [
    "abort half prefilled",
    "abort of some branches",
    "abort running",
    "abort waiting",
    "beams forked",
    "beams in several steps",
    "beams preempted",
    "beams requeued with NaN of another",
    "beams: all done",
    "cached to the end",
    "chunk",
    "copy on write",
    "decodes over budget",
    "eviction",
    "failed by a fault",
    "finished by length",
    "finished by stop",
    "late copy",
    "batch grown",
    "preemption",
    "preemption half prefilled",
    "preemption of a fresh n-sample",
    "preemption of several branches",
    "refused at the door",
    "refused for its branches",
    "requeued with NaN of another",
    "resumed branch waits for its siblings",
    "shared run",
    *(f"armed: {fault}" for fault in FAULTS),
    *(f"hit: {fault}" for fault in FAULTS),
]


class EngineMachine(RuleBasedStateMachine):
    """Requests, steps, cancellations and faults in any order."""

    fired: ClassVar[Counter[str]] = Counter()

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4]),
        num_blocks=st.sampled_from([6, 10, 16, 40]),
        budget=st.sampled_from([1, 2, 5, 16, 64]),
        max_num_seqs=st.sampled_from([3, 6, 20]),
    )
    def make(self, block_size: int, num_blocks: int, budget: int, max_num_seqs: int) -> None:
        self.engine: Engine = make_engine(
            num_blocks,
            block_size,
            max_model_len=36,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
        )
        self.all: list[Request] = []
        self.expected: dict[tuple[int, int], tuple[list[int], str | None]] = {}
        self.searched: dict[int, tuple[list[list[list[int]]], list[Hypothesis]]] = {}
        self.history: list[tuple[int, ...]] = [(1, 2, 3)]
        self.armed = ""
        self.serial = 0
        self._watch()

    def _watch(self) -> None:
        """Note what happens inside, for the situations that must have been reached."""
        scheduler, runner = self.engine.scheduler, self.engine.runner
        requeue, run, grow = scheduler.requeue, runner.run, runner._grow

        def watched_requeue(request: Request) -> None:
            held = [branch for branch in request.branches if branch.sequence is not None]
            if any(branch.sequence.withdrawn for branch in held if branch.sequence):
                self.saw("requeued with NaN of another")
            else:
                self.saw("preemption")
            if len(held) > 1:
                self.saw("preemption of several branches")
                if request.beams is not None:
                    withdrawn = any(b.sequence.withdrawn for b in held if b.sequence)
                    nan = "beams requeued with NaN of another"
                    self.saw(nan if withdrawn else "beams preempted")
            if request.to_prefill:
                self.saw("preemption half prefilled")
                if request.is_fresh and request.params.n > 1:
                    self.saw("preemption of a fresh n-sample")
            requeue(request)

        def watched_run(step: Step) -> object:
            decodes = sum(row.decodes for row in step.rows)
            waiting = sum(b.next_token >= 0 for r in scheduler.running for b in r.branches)
            self.saw(*["decodes over budget"] * bool(decodes and waiting))
            self.saw(*["late copy"] * any(order.after_write for order in step.copies))
            self.saw(*["chunk"] * any(not row.samples for row in step.rows))
            self.saw(*["cached to the end"] * any(not row.computes for row in step.rows))
            for request in scheduler.running:
                if any(branch.sequence is None for branch in request.to_prefill):
                    self.saw("resumed branch waits for its siblings")
            logits = run(step)
            self.saw(*["shared run"] * bool(runner._last and runner._last.batch.plan.runs))
            return logits

        def watched_grow(step: Step) -> object:
            batch = grow(step)
            if batch is not None:
                self.saw("batch grown")
                equals_a_new_one(step, batch)
            return batch

        scheduler.requeue = watched_requeue  # type: ignore[method-assign]
        runner.run = watched_run  # type: ignore[method-assign, assignment]
        runner._grow = watched_grow  # type: ignore[method-assign, assignment]

    def saw(self, *what: str) -> None:
        for name in what:
            self.fired[name] += 1

    # -- requests --------------------------------------------------------------------------------

    @rule(raw=raw_tokens, n=st.sampled_from([1, 1, 1, 3]), namespace=namespaces)
    def add_fresh(self, raw: bytes, n: int, namespace: tuple[str, ...]) -> None:
        self._add(tuple(byte % VOCABULARY for byte in raw), n, namespace)

    @rule(raw=st.binary(min_size=10, max_size=16), n=st.integers(1, 2))
    def add_long(self, raw: bytes, n: int) -> None:
        """Long enough to be preempted before its prompt is computed."""
        self._add(tuple(byte % VOCABULARY for byte in raw), n, (), most=2)

    @rule(index=picks, cut=picks, raw=raw_tokens, n=st.sampled_from([1, 1, 4]))
    def add_sharing(self, index: int, cut: int, raw: bytes, n: int) -> None:
        base = self.history[index % len(self.history)]
        suffix = tuple(byte % VOCABULARY for byte in raw[: len(raw) // 3])
        self._add(base[: 1 + cut % len(base)] + suffix, n, ())

    @rule(index=picks, again=st.integers(1, 3), ephemeral=st.booleans())
    def add_twins(self, index: int, again: int, ephemeral: bool) -> None:
        base = self.history[index % len(self.history)]
        for _ in range(again):
            self._add(base, 1, (), ephemeral=ephemeral, greedy=True)

    def _add(
        self,
        prompt: tuple[int, ...],
        n: int,
        namespace: tuple[str, ...],
        *,
        ephemeral: bool = False,
        greedy: bool = False,
        most: int = 13,
    ) -> None:
        self.serial += 1
        params = SamplingParams(
            n=n,
            max_tokens=1 + self.serial * 7 % most,
            temperature=0 if greedy or self.serial % 3 == 0 else 1,
            seed=self.serial,
            ignore_eos=self.serial % 4 == 0,
            **EDITS[0 if greedy else self.serial % len(EDITS)],
        )
        self._submit(prompt, params, namespace, EPHEMERAL if ephemeral else DEFAULT_RETENTION)

    def _submit(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams | BeamSearchParams,
        namespace: tuple[str, ...] = (),
        hint: Retention = DEFAULT_RETENTION,
    ) -> None:
        try:
            request = self.engine.add_request(prompt, params, namespace=namespace, retention=hint)
        except PromptTooLongError:
            self.saw("refused at the door")
            return
        except RequestError:
            self.saw("refused for its branches")
            return
        self.all.append(request)
        self.history = [*self.history[-12:], prompt]

    @rule(index=picks, cut=picks, raw=raw_tokens, width=st.sampled_from([1, 2, 3, 3, 4]))
    def add_beams(self, index: int, cut: int, raw: bytes, width: int) -> None:
        base = self.history[index % len(self.history)]
        suffix = tuple(byte % VOCABULARY for byte in raw[: len(raw) // 3])
        self.serial += 1
        params = BeamSearchParams(
            beam_width=width,
            max_tokens=1 + self.serial * 7 % 9,
            num_return_sequences=1 + self.serial % width,
            length_penalty=[1.0, 0.5, 2.0][self.serial % 3],
            early_stopping=[False, True, "never"][index % 3],  # type: ignore[arg-type]
            stop_token_ids=[4] if self.serial % 5 == 0 else [],
            ignore_eos=self.serial % 4 == 0,
            repetition_penalty=[1.0, 1.3][self.serial % 2],
            bad_words_ids=[[base[0], 1], [2, 3]] if self.serial % 3 == 1 else [],
        )
        self._submit(base[: 1 + cut % len(base)] + suffix, params)

    @rule(
        raw=raw_tokens,
        steps=st.integers(2, 5),
        row=picks,
        fault=st.sampled_from(["NaN", "copy fails"]),
    )
    def fault_among_beams(self, raw: bytes, steps: int, row: int, fault: str) -> None:
        """Two searches of one prompt share what they generate, too, and copy at most steps."""
        prompt = tuple(byte % VOCABULARY for byte in raw)
        for width in (2, 3):
            self._submit(prompt, BeamSearchParams(beam_width=width, max_tokens=9))
        self.step(steps)
        self.fault(fault, row)

    @rule(index=picks)
    def abort(self, index: int) -> None:
        live = list(self.engine.requests.values())
        if not live:
            return
        self._abort(live[index % len(live)])

    @rule(raw=raw_tokens)
    def abort_between_two_ends(self, raw: bytes) -> None:
        """Cancel a request of which some branches have ended."""
        self._add(tuple(byte % VOCABULARY for byte in raw[:8]), 3, ())
        for _ in range(12):
            for request in list(self.engine.requests.values()):
                if any(branch.finished for branch in request.branches):
                    self._abort(request)
                    return
            self._step()

    def _abort(self, request: Request) -> None:
        if request.status is Status.WAITING:
            self.saw("abort waiting")
        else:
            self.saw("abort half prefilled" if request.to_prefill else "abort running")
        if any(branch.finished for branch in request.branches):
            self.saw("abort of some branches")
        assert self.engine.abort(request.request_id)
        assert not self.engine.abort(request.request_id)

    # -- steps -----------------------------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @rule(fault=st.sampled_from(list(FAULTS)), row=picks)
    def fault(self, fault: str, row: int) -> None:
        """The next step that gets there hits a fault."""
        if not self.engine.has_work:
            return
        self.saw(f"armed: {fault}")
        self.armed = fault
        adapter, store = self.engine.runner.adapter, self.engine.runner.backend.store
        adapter.fail_late = fault == "forward fails late"  # type: ignore[attr-defined]
        if fault == "NaN":
            adapter.nan_row = row  # type: ignore[attr-defined]
        elif fault == "copy fails":
            store.fail = FAULTS[fault]  # type: ignore[attr-defined]
        elif fault == "sampling fails":
            radixkv.engine.engine.sample = self._fail_to_sample  # type: ignore[attr-defined]
        else:
            adapter.fail = FAULTS[fault]  # type: ignore[attr-defined]
        for _ in range(3):
            self._step()
        adapter.nan_row = -1  # type: ignore[attr-defined]
        adapter.fail = store.fail = None  # type: ignore[attr-defined]
        radixkv.engine.engine.sample = sample  # type: ignore[attr-defined]
        self.armed = ""

    @rule(raw=raw_tokens, steps=st.integers(1, 4), row=picks)
    def nan_among_twins(self, raw: bytes, steps: int, row: int) -> None:
        """Whoever shares blocks with the one that fails must not go on with them."""
        prompt = tuple(byte % VOCABULARY for byte in raw)
        for _ in range(3):
            self._add(prompt, 1, ())
        self.step(steps)
        self.fault("NaN", row)

    @rule(index=picks)
    def preempt(self, index: int) -> None:
        """Take a request out between two steps, at whatever stage it is."""
        scheduler = self.engine.scheduler
        half = [request for request in scheduler.running if request.to_prefill]
        chosen = half if half and index % 2 else scheduler.running
        if chosen:
            scheduler.requeue(chosen[index % len(chosen)])

    @rule(raw=raw_tokens, steps=st.integers(1, 3))
    def preempt_branches(self, raw: bytes, steps: int) -> None:
        """Take a request out whose branches are on their way, and let it come back."""
        self._add(tuple(byte % VOCABULARY for byte in raw), 3, ())
        self.step(1)
        for request in self.engine.scheduler.running[:]:
            if request.is_fresh and request.to_prefill and request.params.n > 1:
                self.engine.scheduler.requeue(request)
                break
        self.step(steps)
        for request in self.engine.scheduler.running[:]:
            if sum(branch.sequence is not None for branch in request.branches) > 1:
                self.engine.scheduler.requeue(request)
                self.step(2)
                return

    def _fail_to_sample(self, *_: object) -> None:
        radixkv.engine.engine.sample = sample  # type: ignore[attr-defined]
        raise ValueError("no dice")

    def _step(self) -> None:
        engine = self.engine
        before = engine.cache.counters.blocks_evicted, engine.cache.counters.copies_on_write
        running = set(engine.requests)
        try:
            deltas = engine.step()
        except KeyboardInterrupt:
            assert self.armed == "interrupt"
            self.saw("hit: interrupt")
            deltas = []
        for request in self.all:
            if request.error is not None and request.request_id in running:
                assert self.armed, f"failed by itself: {request.error}"
                self.saw("failed by a fault", f"hit: {self.armed}")
                kind = NumericalError if self.armed == "NaN" else EngineStoppedError
                assert isinstance(request.error, kind)
        for delta in deltas:
            assert delta.request_id in running
        counters = engine.cache.counters
        self.saw(*["eviction"] * (counters.blocks_evicted > before[0]))
        self.saw(*["copy on write"] * (counters.copies_on_write > before[1]))
        self._check()

    # -- oracles ---------------------------------------------------------------------------------

    @invariant()
    def laws(self) -> None:
        if hasattr(self, "engine"):
            self._check()

    def _check(self) -> None:
        self.engine.cache.check()
        check_content(self.engine)
        for request in self.all:
            if request.beams is not None:
                self._check_beams(request)
                continue
            for branch in request.branches:
                expected, reason = self._expected(request, branch.index)
                found = branch.stream.token_ids
                assert found == expected[: len(found)], "other tokens than the naive model's"
                if branch.finished:
                    assert (found, branch.stream.finish_reason) == (expected, reason)
                    self.saw(f"finished by {reason}")
                    assert reason == "length" or found[-1] == EOS
            assert request.num_cached_tokens <= len(request.prompt)
        for request in [r for r in self.all if r.status is Status.FINISHED]:
            self.all.remove(request)

    def _check_beams(self, request: Request) -> None:
        group = request.beams
        assert group is not None
        if request.serial not in self.searched:
            prompt = request.prompt.tolist()
            self.searched[request.serial] = naive_beams(prompt, group.search.params, 36)
        states, results = self.searched[request.serial]
        found = [branch.stream.token_ids for branch in request.branches]
        if not group.search.done:
            assert len(found[0]) == group.search.num_tokens
            assert found == states[len(found[0])] or not found[0], "other beams than the model's"
            self.saw(*["beams in several steps"] * bool(group.candidates))
            held = {id(branch.sequence) for branch in request.branches if branch.sequence}
            self.saw(*["beams forked"] * (len(held) > 1))
        elif request.error is None:
            assert found == [list(beam.token_ids) for beam, _ in results]
            assert [branch.score for branch in request.branches] == [s for _, s in results]
            assert all(branch.finished for branch in request.branches)
            self.saw("beams: all done")

    def _expected(self, request: Request, branch: int) -> tuple[list[int], str | None]:
        key = (request.serial, branch)
        if key not in self.expected:
            self.expected[key] = naive(
                request.prompt.tolist(), request.params, request.seed, branch, 36
            )
        return self.expected[key]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        bound = 1000 + 300 * sum(len(r.branches) for r in self.engine.requests.values())
        while self.engine.has_work:
            bound -= 1
            assert bound, "the engine does not come to an end"
            self._step()
        check_over(self.engine)


def test_any_order_of_requests_and_accidents(monkeypatch: pytest.MonkeyPatch) -> None:
    # Share every run, or the short prompts of the machine would share none.
    monkeypatch.setattr(FakeBackend, "cost", CostModel(per_item=0))
    EngineMachine.fired.clear()
    for attempt in range(4):
        # What is rare may need more than one round; the first is the same every time.
        run_state_machine_as_test(
            EngineMachine,
            settings=settings(
                max_examples=150,
                stateful_step_count=40,
                deadline=None,
                derandomize=attempt == 0,
                database=None,
                # What fails is small enough to read; shrinking it would take minutes.
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
        if all(EngineMachine.fired[situation] for situation in SITUATIONS):
            break


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_machine_reached(situation: str) -> None:
    if not EngineMachine.fired:
        pytest.skip("the machine was not run")
    assert EngineMachine.fired[situation], "never happened: the machine does not test it"
