"""A state machine over trees of contexts with a fake model: any order of calls and accidents.

The oracle knows no blocks: a context is a tuple of tokens, and a model without a cache says what
comes next.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from fake import EOS, VOCABULARY, check_content, check_over, logits_of, make_engine, naive, words_of
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from radixkv.decoding import SamplingParams
from radixkv.engine import Engine
from radixkv.errors import (
    ContextBusyError,
    ContextClosedError,
    EngineStoppedError,
    GenerationCancelledError,
    JoinError,
    NumericalError,
    PromptTooLongError,
)
from radixkv.programs import Checkpoint, Context, Generation, Host, run

LENGTH = 20
picks = st.integers(0, 1 << 16)
raw_tokens = st.binary(max_size=6)
SITUATIONS = [
    "appended",
    "armed fault hit",
    "async cancelled",
    "async gathered",
    "busy refused",
    "cancelled",
    "chosen",
    "closed refused",
    "forked",
    "full",
    "generated",
    "given up",
    "joined all",
    "joined append",
    "joined best",
    "joined grandchild",
    "outdated refused",
    "preempted",
    "reset",
    "rolled back",
    "scored",
    "stranger refused",
]


@dataclass(eq=False)
class Twin:
    """A context and what it must say."""

    context: Context
    tokens: list[int]
    parent: Twin | None = None
    marks: list[tuple[Checkpoint, int]] = field(default_factory=list)
    pending: Generation | None = None
    expected: list[int] = field(default_factory=list)

    def above(self) -> list[Twin]:
        return [] if self.parent is None else [self.parent, *self.parent.above()]


class ProgramMachine(RuleBasedStateMachine):
    """Trees of contexts, in any order."""

    fired: ClassVar[Counter[str]] = Counter()

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4]),
        num_blocks=st.sampled_from([1, 1, 10, 40, 200]),
        budget=st.sampled_from([2, 7, 64]),
    )
    def make(self, block_size: int, num_blocks: int, budget: int) -> None:
        num_blocks = max(num_blocks, -(-LENGTH // block_size))
        self.engine: Engine = make_engine(
            num_blocks, block_size, max_model_len=LENGTH, max_num_batched_tokens=budget
        )
        tokenizer: Any = SimpleNamespace(decode=lambda ids, **_: "".join(map(str, ids)))
        loaded: Any = SimpleNamespace(name="fake", tokenizer=tokenizer)
        self.host = Host(self.engine, loaded)
        self.twins: list[Twin] = []

    def saw(self, *situations: str) -> None:
        self.fired.update(situations)

    def pick(self, index: int, *, busy: bool = False) -> Twin | None:
        """An open context, with nothing pending unless ``busy``."""
        found = [twin for twin in self.twins if busy or twin.pending is None]
        return found[index % len(found)] if found else None

    # -- growing ---------------------------------------------------------------------------------

    @rule(raw=raw_tokens)
    def open(self, raw: bytes) -> None:
        if len(self.twins) < 12:
            tokens = [1, *(byte % VOCABULARY for byte in raw)]
            context = Context(self.host)
            context.append(tokens)
            self.twins.append(Twin(context, tokens))

    @rule(index=picks, raw=raw_tokens)
    def append(self, index: int, raw: bytes) -> None:
        tokens = [byte % VOCABULARY for byte in raw]
        if (twin := self.pick(index)) is not None and len(twin.tokens) + len(raw) < LENGTH:
            twin.context.append(tokens)
            twin.tokens += tokens
            self.saw("appended")

    @rule(index=picks, count=st.integers(1, 12), seed=st.sampled_from([None, 1, 2]))
    def generate(self, index: int, count: int, seed: int | None) -> None:
        if (twin := self.pick(index)) is None:
            return
        params = SamplingParams(
            max_tokens=count, seed=seed or 0, temperature=0.0 if seed is None else 1.0
        )
        if len(twin.tokens) >= LENGTH:
            with pytest.raises(PromptTooLongError):
                twin.context.generate(params)
            self.saw("full")
            return
        found, reason = naive(twin.tokens, params, seed or 0, 0, LENGTH)
        twin.expected = found[:-1] if reason == "stop" else found
        twin.pending = twin.context.generate(params)
        if twin.parent is not None and twin.parent.pending is None:
            with pytest.raises(ContextBusyError):
                twin.parent.context.join([twin.context], "all")
            self.saw("busy refused")

    @rule(index=picks, steps=st.integers(1, 8))
    def crowd(self, index: int, steps: int) -> None:
        """Branches that all want more blocks at once."""
        self.fork(index, 3)
        for number in range(len(self.twins)):
            self.generate(number, 12, number + 1)
        self.step(steps)

    @rule(index=picks)
    def fill(self, index: int) -> None:
        if (twin := self.pick(index)) is not None and len(twin.tokens) < LENGTH - 1:
            self.append(self.twins.index(twin), bytes(LENGTH - 1 - len(twin.tokens)))
            for _ in range(2):
                self.generate(index, 2, None)
                self.run(0, 16)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @rule(index=picks, among=st.integers(1, 4))
    def run(self, index: int, among: int) -> None:
        busy = [twin for twin in self.twins if twin.pending is not None]
        chosen = busy[index % len(busy) :][:among] if busy else []
        run([twin.pending for twin in chosen if twin.pending])
        self._collect()
        self.saw(*["generated"] * len(chosen))

    @rule(index=picks)
    def cancel(self, index: int) -> None:
        busy = [twin for twin in self.twins if twin.pending is not None]
        if busy:
            twin = busy[index % len(busy)]
            assert twin.pending is not None
            if not twin.pending.done:
                twin.pending.cancel()
                with pytest.raises(GenerationCancelledError):
                    twin.pending.result()
                twin.pending = None
                self.saw("cancelled")

    # -- scoring ---------------------------------------------------------------------------------

    def _scores(self, tokens: list[int], behind: list[int]) -> list[float]:
        words = words_of(np.array(tokens + behind, np.int64))
        return [
            float(logits_of(words[: len(tokens) + i]).log_softmax(-1)[token])
            for i, token in enumerate(behind)
        ]

    @rule(index=picks, raw=st.binary(min_size=1, max_size=6))
    def score(self, index: int, raw: bytes) -> None:
        behind = [byte % VOCABULARY for byte in raw]
        twin = self.pick(index)
        if twin is not None and len(twin.tokens) + len(behind) < LENGTH:
            found = twin.context.score(behind).logprobs
            np.testing.assert_allclose(found, self._scores(twin.tokens, behind), atol=1e-5)
            self._collect()
            self.saw("scored")

    @rule(index=picks, raws=st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=3))
    def choose(self, index: int, raws: list[bytes]) -> None:
        options = [[byte % VOCABULARY for byte in raw] for raw in raws]
        twin = self.pick(index)
        if twin is not None and len(twin.tokens) + 4 < LENGTH:
            choice = twin.context.choose(options).result()
            means = [float(np.mean(self._scores(twin.tokens, option))) for option in options]
            assert means[choice.index] == pytest.approx(max(means), abs=1e-5)
            twin.tokens += options[choice.index]
            self._collect()
            self.saw("chosen")

    # -- trees -----------------------------------------------------------------------------------

    @rule(index=picks, n=st.integers(1, 3))
    def fork(self, index: int, n: int) -> None:
        if (twin := self.pick(index)) is not None and len(self.twins) < 16:
            for branch in twin.context.fork(n):
                self.twins.append(Twin(branch, twin.tokens.copy(), twin))
            self.saw("forked")

    @rule(index=picks, picked=picks, mode=st.sampled_from(["best", "best", "append", "all"]))
    def join(self, index: int, picked: int, mode: Any) -> None:
        parents = [
            twin
            for twin in self.twins
            if twin.pending is None and any(twin in other.above() for other in self.twins)
        ]
        if not parents:
            return
        twin = parents[index % len(parents)]
        below = [other for other in self.twins if twin in other.above()]
        chosen = [other for number, other in enumerate(below) if picked >> number & 1] or below
        if any(other.pending is not None for other in chosen):
            with pytest.raises(ContextBusyError):
                twin.context.join([other.context for other in chosen], mode)
            self.saw("busy refused")
            return
        contexts = [other.context for other in chosen]
        winner = chosen[picked % len(chosen)]
        if mode != "best":
            if mode == "append" and len(twin.tokens) + len(chosen) >= LENGTH:
                return
            # No tokenizer here: what is appended is tested on the real one.
            twin.context.join(contexts, mode, template="")
            self.saw(f"joined {mode}")
        elif winner.tokens[: len(twin.tokens)] != twin.tokens:
            with pytest.raises(JoinError, match="has changed"):
                twin.context.join(contexts, by=lambda c: float(c is winner.context))
            self.saw("outdated refused")
            return
        else:
            best = twin.context.join(contexts, by=lambda c: float(c is winner.context))
            assert best is winner.context
            twin.tokens = winner.tokens.copy()
            self.saw("joined best")
        for other in chosen:
            self._forget(other)
        with pytest.raises(ContextClosedError):
            winner.context.append([1])

    @rule(index=picks, raw=raw_tokens)
    def join_grandchild(self, index: int, raw: bytes) -> None:
        """A branch of a branch ends; the one between stays open."""
        if (twin := self.pick(index)) is None or len(twin.tokens) + len(raw) >= LENGTH - 1:
            return
        (child,) = twin.context.fork(1)
        self.twins.append(Twin(child, twin.tokens.copy(), twin))
        (below,) = child.fork(1)
        below.append([byte % VOCABULARY for byte in raw])
        assert twin.context.join([below], by=len) is below
        twin.tokens += [byte % VOCABULARY for byte in raw]
        self.saw("joined grandchild")

    @rule(index=picks, other=picks)
    def join_a_stranger(self, index: int, other: int) -> None:
        one, two = self.pick(index), self.pick(other, busy=True)
        if one is not None and two is not None and one not in two.above():
            with pytest.raises(JoinError, match="was not forked"):
                one.context.join([two.context], "all")
            self.saw("stranger refused")

    @rule(index=picks)
    def checkpoint(self, index: int) -> None:
        if (twin := self.pick(index)) is not None:
            twin.marks.append((twin.context.checkpoint(), len(twin.tokens)))

    @rule(index=picks, which=picks)
    def rollback(self, index: int, which: int) -> None:
        marked = [twin for twin in self.twins if twin.marks and twin.pending is None]
        if marked:
            twin = marked[index % len(marked)]
            place = which % len(twin.marks)
            mark, length = twin.marks[place]
            twin.context.rollback(mark)
            del twin.marks[place + 1 :]
            del twin.tokens[length:]
            self.saw("rolled back")

    @rule(index=picks)
    def close(self, index: int) -> None:
        if (twin := self.pick(index, busy=True)) is not None:
            twin.context.close()
            self._forget(twin)
            with pytest.raises(ContextClosedError):
                twin.context.fork(1)
            self.saw("closed refused")

    def _forget(self, twin: Twin) -> None:
        """It is closed, and with it all that was forked from it."""
        for other in [each for each in self.twins if each is twin or twin in each.above()]:
            assert other.context.closed
            self.twins.remove(other)

    # -- async and accidents ---------------------------------------------------------------------

    @rule(patience=st.integers(0, 3), cancelled=picks)
    def gather(self, patience: int, cancelled: int) -> None:
        """Await all that is pending in tasks; cancel one of them after some turns of the loop."""
        self.generate(cancelled, 12, 1)
        busy = [twin for twin in self.twins if twin.pending is not None]
        if not busy:
            return
        victim = busy[cancelled % len(busy)]

        async def wait(twin: Twin) -> None:
            assert twin.pending is not None
            await twin.pending

        async def program() -> None:
            tasks = {twin: asyncio.create_task(wait(twin)) for twin in busy}
            for _ in range(patience):
                await asyncio.sleep(0)
            if cancelled % 2:
                tasks[victim].cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

        asyncio.run(program())
        # A task that was cancelled before its first turn has cancelled nothing.
        assert all(twin.pending.done for twin in busy if twin is not victim and twin.pending)
        self.saw("async gathered")
        if cancelled % 2 and victim.pending is not None and victim.pending.done:
            try:
                victim.pending.result()
            except GenerationCancelledError:
                victim.pending = None
                self.saw("async cancelled")
            except (EngineStoppedError, NumericalError):
                pass
        self._collect()

    @rule(fault=st.sampled_from(["fails", "fails late", "interrupt", "copy", "NaN"]), row=picks)
    def fault(self, fault: str, row: int) -> None:
        adapter: Any = self.engine.runner.adapter
        store: Any = self.engine.runner.backend.store
        if not self.engine.has_work:
            return
        if fault == "NaN":
            adapter.nan_row = row
        elif fault == "copy":
            store.fail = MemoryError("no memory for a copy")
        else:
            adapter.fail_late = fault == "fails late"
            adapter.fail = KeyboardInterrupt() if fault == "interrupt" else ValueError("lost")
        for _ in range(2):
            try:
                self._step()
            except KeyboardInterrupt:
                self._collect()
        adapter.nan_row, adapter.fail, store.fail = -1, None, None

    @rule()
    def reset(self) -> None:
        self.engine.cache.reset()
        self.saw("reset")

    def _step(self) -> None:
        if self.engine.has_work:
            self.engine.step()
            self._collect()

    def _collect(self) -> None:
        """Take over what has ended; what failed leaves its context as it was."""
        for twin in self.twins:
            if twin.pending is not None and twin.pending.done:
                try:
                    output = twin.pending.result()
                except (EngineStoppedError, NumericalError):
                    self.saw("armed fault hit")
                else:
                    kept = list(output.token_ids)
                    assert (kept[:-1] if output.finish_reason == "stop" else kept) == twin.expected
                    assert output.finish_reason != "stop" or kept[-1] == EOS
                    twin.tokens += twin.expected
                twin.pending = None

    # -- oracles ---------------------------------------------------------------------------------

    @invariant()
    def says_what_it_must(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.cache.check()
        check_content(self.engine)
        holds = self.engine.scheduler.holds
        self.saw(*["given up"] * (holds.given_up > 0))
        self.saw(*["preempted"] * (self.engine.counters.preemptions > 0))
        for twin in self.twins:
            if twin.pending is None:
                assert list(twin.context.tokens) == twin.tokens
            sequence = twin.context._hold.sequence
            if sequence is not None and not sequence.withdrawn:
                assert sequence.num_computed == sequence.num_tokens
                stats = twin.context.stats
                assert stats.shared_blocks + stats.own_blocks == sequence.num_blocks

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for twin in self.twins[:]:
            if twin.parent is None:
                twin.context.close()
        check_over(self.engine)
        assert not len(self.engine.scheduler.holds)


def test_any_order_of_calls_and_accidents() -> None:
    ProgramMachine.fired.clear()
    for attempt in range(6):
        run_state_machine_as_test(
            ProgramMachine,
            settings=settings(
                max_examples=150,
                stateful_step_count=50,
                deadline=None,
                derandomize=attempt == 0,
                database=None,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
        if all(ProgramMachine.fired[situation] for situation in SITUATIONS):
            break


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_machine_reached(situation: str) -> None:
    if not ProgramMachine.fired:
        pytest.skip("the machine was not run")
    assert ProgramMachine.fired[situation], "never happened: the machine does not test it"
