"""What operations go on for a client, until their ends or until it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from radixkv.engine import Request
from radixkv.errors import RadixKVError
from radixkv.llm import LLM
from radixkv.server.answer import Answer
from radixkv.server.contexts import bodies
from radixkv.server.contexts.ahead import Ahead
from radixkv.server.contexts.answers import add_text, result_of
from radixkv.server.contexts.operations import ENDINGS, Step, Workbench, look_for_closed
from radixkv.server.contexts.registry import Contexts, Left, new_id
from radixkv.server.openai.texts import characters_of, texts_of
from radixkv.server.service import Service


@dataclass(frozen=True, slots=True)
class Event:
    """Something that came of the operation in this place: a text, its result, or its error."""

    place: int
    text: str = ""
    result: dict[str, Any] | None = None
    error: Exception | None = None


class Run:
    """Operations that were carried out, and those of them that go on.

    Whoever has one must `leave` it: what goes on is then cancelled, and its context as it was.
    """

    def __init__(self, contexts: Contexts, steps: Sequence[Step], answers: list[Answer]) -> None:
        self.steps = steps
        self._contexts = contexts
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        left = iter(answers)
        self._tasks: list[asyncio.Task[None]] = []
        for place, step in enumerate(steps):
            if step.pending is not None:
                self._start(place, step, list(islice(left, step.num_requests)))

    def _start(self, place: int, step: Step, answers: list[Answer]) -> None:
        entry, pending, name = step.entry, step.pending, step.name
        assert entry is not None
        assert pending is not None

        def settle(_: LLM) -> None:
            pending.settle()
            if entry.pending.get(name) is pending:
                del entry.pending[name]

        def end(_: asyncio.Task[None]) -> None:
            for answer in answers:
                answer.cancel()
            # In order behind the cancellations: by then it has ended, however it did.
            self._contexts.worker.tell(settle)
            self._contexts.renew(entry.tree)

        self._contexts.hold([entry.tree])
        task = asyncio.create_task(self._follow(place, step, answers))
        # Not in the task itself: one that is cancelled before it has begun runs nothing.
        task.add_done_callback(end)
        self._tasks.append(task)

    @property
    def num_going(self) -> int:
        """Operations whose results are still to come."""
        return sum(step.pending is not None for step in self.steps)

    async def events(self) -> AsyncIterator[Event]:
        """Texts as they come, and each operation's result or error once it has ended."""
        going = self.num_going
        while going:
            event = await self._events.get()
            going -= event.result is not None or event.error is not None
            yield event

    async def _follow(self, place: int, step: Step, answers: list[Answer]) -> None:
        assert step.entry is not None
        pending, context = step.pending, step.entry.context
        assert pending is not None
        assert context is not None
        try:
            if isinstance(step.operand, bodies.Generate):
                async for piece in answers[0]:
                    if piece.delta.text:
                        self._events.put_nowait(Event(place, piece.delta.text))
            for answer in answers:
                await answer.end()
            result = await self._contexts.worker.call(lambda _: result_of(context, pending))
            self._events.put_nowait(Event(place, result=result))
        except Exception as error:
            self._events.put_nowait(Event(place, error=error))

    def leave(self) -> None:
        """Cancel what goes on, if anything does."""
        for task in self._tasks:
            task.cancel()


async def begin(service: Service, owner: str | None, operations: bodies.Operations) -> Run:
    """Carry operations out, in order and between two steps of the engine; see `Workbench`.

    If there is no place for what they generate, that alone is refused.

    Raises
    ------
    EngineStoppedError
        If the engine has ended.
    """
    contexts = service.contexts
    left = contexts.left(owner, _names(operations.operations))
    steps = await service.on_texts(partial(_read, operations.operations, left))
    _find_all(service, owner, operations.operations, steps)
    trees = {step.entry.tree for step in steps if step.entry is not None}
    entries = [entry for tree in trees for entry in tree.open]
    contexts.hold(trees)

    here = copy_context()  # It knows the id of the HTTP request, by which others are named.

    def make(llm: LLM) -> list[Request]:
        made = here.run(Workbench(service.contexts.host(llm)).carry_out, steps)
        look_for_closed(entries)
        return made

    slots = _slots(service, steps)
    try:
        answers: list[Answer] = []
        if slots:
            answers = await service.worker.begin(make, slots)
        else:
            await service.worker.call(make)
        run = Run(contexts, steps, answers)
    except RadixKVError:
        # Nothing was done: what was to be opened or forked is not there.
        for entry in entries:
            entry.closed = entry.closed or entry.context is None
        raise
    finally:
        for tree in trees:
            contexts.renew(tree)
    try:
        if views := [step.result for step in steps if isinstance(step.operand, bodies.Read)]:
            await service.on_texts(partial(_add_texts, views))
    except BaseException:
        run.leave()
        raise
    return run


def _add_texts(views: Sequence[dict[str, Any] | None], llm: LLM) -> None:
    for view in views:
        if view is not None:  # It was not found, or not read.
            add_text(view, llm)


def _slots(service: Service, steps: Sequence[Step]) -> int:
    """How many requests they make; if the server does not take so many, they make none."""
    slots = sum(step.num_requests for step in steps)
    if slots:
        try:
            service.worker.check_open(slots)
        except RadixKVError as error:
            for step in steps:
                if step.num_requests:
                    step.error = error
            return 0
    return slots


def _names(operations: Sequence[bodies.Operation]) -> set[str]:
    """Of all contexts that they concern."""
    names = {one.context for one in operations}
    return names.union(*(one.join.branches for one in operations if one.join is not None))


def _read(operations: Sequence[bodies.Operation], left: Mapping[str, Left], llm: LLM) -> list[Step]:
    """A step for each, with what takes long: off the event loop, and off the engine's thread.

    Parameters are checked, their grammars compiled, and what contexts are given is tokenized.
    """
    steps = []
    ahead = Ahead(llm, left)
    for operation in operations:
        step = Step(operation.operand, name=operation.name or new_id())
        steps.append(step)
        try:
            _check_length(step.operand, llm)
            step.ready = ahead.prepared(operation.context, step.operand)
            if isinstance(step.operand, bodies.Generate):
                step.params = step.operand.params
                if step.params.constraint is not None:
                    llm.engine.check_request([0], replace(step.params, max_tokens=1, min_tokens=0))
        except RadixKVError as error:
            step.error = error
    return steps


def _check_length(body: bodies.Operand, llm: LLM) -> None:
    """Refuse what is too long whatever its tokens are, before it takes seconds to find them."""
    parts: Sequence[object] = getattr(body, "options", None) or [getattr(body, "content", "")]
    for part in parts:
        texts_of(llm).check_length(characters_of(part), llm.engine.max_model_len)


def _find_all(
    service: Service,
    owner: str | None,
    operations: Sequence[bodies.Operation],
    steps: Sequence[Step],
) -> None:
    """Look up, and make places for, all contexts that the steps concern."""
    contexts = service.contexts
    refused: dict[str, RadixKVError] = {}
    for operation, step in zip(operations, steps, strict=True):
        body = step.operand
        try:
            if operation.context in refused and not isinstance(body, ENDINGS):
                raise refused[operation.context]
            if isinstance(body, bodies.Open):
                step.namespace = service.namespace(owner, body.cache_salt)
                step.entry = contexts.add_tree(owner, operation.context)
                continue
            step.entry = contexts.find(owner, operation.context)
            if isinstance(body, bodies.Fork):
                step.others = contexts.add_branches(step.entry, body.n, body.ids)
            elif isinstance(body, bodies.Join):
                step.others = [contexts.find(owner, branch) for branch in body.branches]
            elif isinstance(body, bodies.Read):
                step.others = (*step.entry.tree.open, *step.entry.tree.readable)
        except RadixKVError as error:
            step.error = error
            ids = (body.ids or ()) if isinstance(body, bodies.Fork) else ()
            refused.update(dict.fromkeys((operation.context, *ids), error))
