"""Programs say the same against a server as in the engine's process, word for word."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixkv.client import Client
from radixkv.client import majority as client_majority
from radixkv.decoding import SamplingParams
from radixkv.errors import ContextBusyError, RadixKVError
from radixkv.llm import LLM
from radixkv.programs import majority
from radixkv.server.service import Service

Serve = Callable[..., tuple[str, Service]]
MakeLLM = Callable[..., LLM]
Program = Callable[[Any], Any]
SEEDED = {"seed": 7}


def on_both(make_llm: MakeLLM, serve: Serve, program: Program) -> tuple[Any, Any]:
    """What a program gives in the engine's process, and against a server."""
    llm = make_llm(**SEEDED)
    here = program(llm)
    assert llm.stats().cache.sequences == 0
    url, service = serve(llm=SEEDED)
    with Client(url) as client:
        there = program(client)
        assert len(service.contexts) == 0
    return here, there


def _example(name: str) -> Any:
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example(make_llm: MakeLLM, serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    example = _example("over_http")

    def program(host: Any) -> tuple[str, str, int, tuple[int, ...]]:
        # The tiny model has 512 tokens, each a byte.
        with host.context(example.QUESTION[-120:]) as context:
            text = asyncio.run(example.program(context, 3))
            return text, capsys.readouterr().out, len(context), context.tokens

    here, there = on_both(make_llm, serve, program)
    assert here == there
    assert "best:" in here[1]


def test_a_synchronous_program(make_llm: MakeLLM, serve: Serve) -> None:
    def program(host: Any) -> list[object]:
        said: list[object] = []
        with host.context([{"role": "user", "content": "Speak."}], namespace=("a", "b")) as context:
            drafts = context.fork(3)
            # Seeds are given in the order of the calls, there as here.
            outputs = host.run([each.generate(max_tokens=8, temperature=0.9) for each in drafts])
            said += [(each.text, each.token_ids, each.finish_reason) for each in outputs]
            said += [each.logprobs for each in drafts]
            said.append(context.join(drafts, by="mean_logprob").generated)
            context.append([{"role": "user", "content": "Go on."}])
            said.append(list(context.generate(max_tokens=6, temperature=0, stop=["x", "\n"]))[:0])
            said += [context.messages, context.generated, context.logprobs]
            sides = context.fork(2)
            for side in sides:
                side.append("!")
                said.append(side.choose(["yes", "no"]).text)
            said.append(context.join(sides, "append", template="<{index} {text}>"))
            params = SamplingParams(max_tokens=4, logit_bias={65: 5.0}, logprobs=2, stop="q")
            output = context.generate(params, temperature=0).result()
            said += [output.text, context.score([1, 2, 3]).mean, context.score("abc").logprobs]
            said += [context.text, context.tokens, len(context)]
        return said

    here, there = on_both(make_llm, serve, program)
    assert_alike(there, here)


@pytest.mark.parametrize("client_vote", [majority, client_majority])
def test_functions_that_judge_are_called_here(
    make_llm: MakeLLM, serve: Serve, client_vote: Callable[..., Any]
) -> None:
    def answer(branch: Any) -> str | None:
        return branch.text[-1] if branch.generated else None

    def program(host: Any) -> list[object]:
        vote = client_vote if isinstance(host, Client) else majority
        with host.context("abc") as context:
            branches = context.fork(5)
            host.run([each.generate(max_tokens=3) for each in branches[:4]])
            first = context.join(branches, by=vote(answer))
            more = context.fork(3)
            for branch, length in zip(more, (1, 4, 2), strict=True):
                branch.append("-" * length)
            second = context.join(more, by=len)
            return [branches.index(first), more.index(second), context.text, first.text]

    here, there = on_both(make_llm, serve, program)
    assert here == there


def test_nothing_is_computed_twice(make_llm: MakeLLM, serve: Serve) -> None:
    """A tree of branches costs a server the tokens that it costs in process."""

    def program(host: Any) -> list[str]:
        async def grow(branch: Any, depth: int) -> list[str]:
            await branch.generate(max_tokens=3, temperature=0, ignore_eos=True)
            if not depth:
                return [branch.generated]
            children = branch.fork(2)
            for number, child in enumerate(children):
                child.append(str(number))
            grown = await asyncio.gather(*(grow(child, depth - 1) for child in children))
            branch.join(children, "all")
            return [branch.generated, *(text for texts in grown for text in texts)]

        with host.context("In the beginning") as context:
            return asyncio.run(grow(context, 3))

    llm = make_llm()
    here = program(llm)
    cost = llm.stats().engine
    url, service = serve()
    with Client(url) as client:
        assert program(client) == here
    assert len(here) == 15
    assert service.llm.stats().engine.prefilled_tokens == cost.prefilled_tokens
    assert service.llm.stats().engine.decoded_tokens == cost.decoded_tokens
    assert service.llm.stats().engine.recomputed_tokens == 0


def test_tasks_are_sent_in_one_list(serve: Serve) -> None:
    url, _ = serve()
    with Client(url) as client:
        sent: list[int] = []
        send = client._link.send
        client._link.send = lambda calls: (sent.append(len(calls)), send(calls))[1]  # type: ignore[method-assign, func-returns-value]

        async def idea(branch: Any) -> str:
            branch.append("?")
            return str((await branch.generate(max_tokens=3, temperature=0)).text)

        async def program(context: Any) -> list[str]:
            return await asyncio.gather(*(idea(branch) for branch in context.fork(8)))

        with client.context("abc") as context:
            assert len(set(asyncio.run(program(context)))) == 1
        # To open, to fork, eight times to append and to generate; to close.
        assert sent == [1 + 1 + 8 + 8, 1]


# -- any program -------------------------------------------------------------------------------


class AnyProgram:
    """A random run of operations; what it does depends on nothing but its seed and the answers."""

    def __init__(self, host: Any, seed: int) -> None:
        self.host = host
        self.random = random.Random(seed)
        self.contexts: list[Any] = []
        self.marks: dict[Any, list[Any]] = {}
        self.told: list[object] = []

    def run(self, steps: int) -> list[object]:
        growing = [self.open, self.append, self.generate, self.generate, self.choose, self.bad]
        branching = [self.fork, self.fork, self.join, self.mark, self.rewind]
        others = [self.score, self.look, self.cancel, self.close]
        for _ in range(steps):
            operation = self.random.choice([*growing, *branching, *others])
            if operation == self.open or self.contexts:
                self.told.append(operation.__name__)
                try:
                    self.told.append(operation())
                except RadixKVError as error:
                    # Ids and reprs differ; what kind of error it is does not.
                    self.told.append(type(error).__name__)
        for context in self.contexts:
            self.told.append((context.closed, context.tokens, context.generated))
        for context in self.contexts:
            context.close()
        return self.told

    def pick(self) -> Any:
        return self.random.choice(self.contexts)

    def text(self) -> str:
        return "".join(self.random.choices("abc ", k=self.random.randint(1, 6)))

    def open(self) -> None:
        if len(self.contexts) < 12:
            self.contexts.append(self.host.context(self.text()))

    def append(self) -> None:
        self.pick().append(self.random.choice([self.text(), [1, 2, 3], ""]))

    def generate(self) -> object:
        temperature = self.random.choice([0, 1])
        pending = []
        try:
            for each in dict.fromkeys([self.pick(), self.pick()]):
                tokens = self.random.randint(1, 6)
                pending.append(
                    each.generate(max_tokens=tokens, temperature=temperature, stop=["a", "7"])
                )
        except RadixKVError:
            # Where nobody waits, a server is sooner done.
            for each in pending:
                each.cancel()
            raise
        return [(each.text, each.token_ids) for each in self.host.run(pending)]

    def fork(self) -> None:
        if len(self.contexts) < 12:
            self.contexts += self.pick().fork(self.random.randint(1, 3))

    def score(self) -> object:
        return self.pick().score(self.text()).logprobs

    def choose(self) -> object:
        return self.pick().choose([self.text() for _ in range(3)]).index

    def join(self) -> object:
        context = self.pick()
        below = [each for each in self.contexts if each.parent is context and not each.closed]
        branches = below or [self.pick()]
        mode = self.random.choice(["best", "append", "all"])
        if mode != "best":
            return context.join(branches, mode)
        by = self.random.choice(["mean_logprob", "total_logprob", len, majority(lambda b: b.text)])
        return self.contexts.index(context.join(branches, by=by))

    def mark(self) -> None:
        context = self.pick()
        self.marks.setdefault(context, []).append(context.checkpoint())

    def rewind(self) -> None:
        context = self.pick()
        context.rollback(self.random.choice([None, *self.marks.get(context, [])]))

    def look(self) -> object:
        context = self.pick()
        return context.text, len(context), context.logprobs, context.stats.num_tokens

    def cancel(self) -> object:
        context = self.pick()
        generation = context.generate(max_tokens=300, temperature=0, ignore_eos=True)
        with pytest.raises(ContextBusyError):
            context.append("no")
        generation.cancel()
        return generation.done, context.tokens

    def close(self) -> None:
        if self.random.random() < 0.3:
            context = self.pick()
            context.close()
            self.contexts = [each for each in self.contexts if not each.closed]

    def bad(self) -> None:
        """Refused here at once, there when somebody waits: by then nothing else has happened."""
        context = self.pick()
        context.append([10**6])
        _ = context.text


def assert_alike(there: Any, here: Any) -> None:
    """The same, but for what log-probabilities owe to the rows that shared their step."""
    if isinstance(here, float):
        assert there == pytest.approx(here, abs=1e-4)
    elif isinstance(here, list | tuple):
        assert len(there) == len(here)
        for one, other in zip(there, here, strict=True):
            assert_alike(one, other)
    else:
        assert there == here


def test_any_program(make_llm: MakeLLM, serve: Serve) -> None:
    seeds = range(6)
    llm = make_llm(40, **SEEDED)
    here = []
    for seed in seeds:
        here.append(AnyProgram(llm, seed).run(60))
        llm.cache.check()
    url, service = serve(40, llm=SEEDED)
    with Client(url) as client:
        for seed in seeds:
            assert_alike(AnyProgram(client, seed).run(60), here[seed])
    assert len(service.contexts) == 0
    told = [word for run in here for word in run if isinstance(word, str)]
    for name in ("JoinError", "ContextClosedError", "ContextError", "RequestError", "join"):
        assert name in told
