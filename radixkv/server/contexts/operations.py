"""Operations on contexts, carried out in order on the engine's thread.

Each works or fails by itself, but what failed on a context stops all that was to be done with it
behind that: a client that did not wait for each answer is then where it would be if it had.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from radixkv.cache import Namespace
from radixkv.decoding import SamplingParams
from radixkv.engine import Request
from radixkv.errors import (
    CacheInvariantError,
    ContextClosedError,
    ContextError,
    RadixKVError,
    RequestError,
)
from radixkv.programs import Context, Host, Pending, majority
from radixkv.programs.joining import By
from radixkv.programs.joining import Majority as Vote
from radixkv.server.contexts import bodies
from radixkv.server.contexts.ahead import Guess, fitting, left_of
from radixkv.server.contexts.answers import view_of
from radixkv.server.contexts.registry import MAX_CHECKPOINTS, Entry

log = logging.getLogger("radixkv.server")
MOST_READ = 1 << 22
"""Tokens of all contexts that one list reads: a small body could ask for any number."""

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# These are carried out whatever failed before them: they only end things.
ENDINGS = (bodies.Cancel, bodies.Close)
# Behind these a context may be empty, or have other messages or checkpoints than before.
CHANGES = (
    bodies.Open,
    bodies.Append,
    bodies.Fork,
    bodies.Join,
    bodies.Checkpoint,
    bodies.Rollback,
)


@dataclass(slots=True, eq=False)
class Step:
    """An operation, whom it concerns, and what came of it.

    Attributes
    ----------
    entry : Entry or None
        None if it was not found; then there is an error.
    others : sequence of Entry
        Branches that are made or joined; for one that is read, its tree.
    params : SamplingParams or None
        Of a generation.
    name : str
        What a generation, score or choice is called by.
    namespace : tuple of str
        Of a context that is opened.
    ready : sequence of Guess
        What it gives, tokenized before; see `Ahead`.
    result : dict or None
        What there was to be answered at once.
    pending : Pending or None
        What goes on.
    error : Exception or None
    """

    operand: bodies.Operand
    entry: Entry | None = None
    others: Sequence[Entry] = ()
    params: SamplingParams | None = None
    name: str = ""
    namespace: Namespace = ()
    ready: Sequence[Guess] = ()
    result: dict[str, Any] | None = None
    pending: Pending[Any] | None = None
    error: Exception | None = None

    @property
    def num_requests(self) -> int:
        """Requests that it makes, if all goes well."""
        if self.error is not None:
            return 0
        if isinstance(self.operand, bodies.Choose):
            return len(self.operand.options)
        return int(isinstance(self.operand, bodies.Generate | bodies.Score))


@dataclass(slots=True)
class Workbench:
    """What operations stand on; on the engine's thread."""

    host: Host
    failed: dict[Entry, Exception] = field(default_factory=dict)
    num_read: int = 0

    def carry_out(self, steps: Sequence[Step]) -> list[Request]:
        """Do all, and note results and errors in them; the requests that were made."""
        made: list[Request] = []
        for step in steps:
            try:
                self._do(step)
            except CacheInvariantError:
                raise
            except Exception as error:
                step.error = error
                if step.entry is not None:
                    self.failed[step.entry] = error
                if isinstance(step.operand, bodies.Fork):
                    self.failed.update(dict.fromkeys(step.others, error))
                if not isinstance(error, RadixKVError):
                    log.exception("an operation on a context has failed")
            if step.pending is not None:
                made += step.pending.requests
        self._note_what_is_left(steps)
        return made

    @staticmethod
    def _note_what_is_left(steps: Sequence[Step]) -> None:
        changed: dict[Entry, None] = {}
        for step in steps:
            if step.entry is not None and isinstance(step.operand, CHANGES):
                forked = step.others if isinstance(step.operand, bodies.Fork) else ()
                changed |= dict.fromkeys((step.entry, *forked))
        for entry in changed:
            if entry.context is not None:
                entry.left = left_of(entry.context, entry.marks)

    def _do(self, step: Step) -> None:
        if step.error is not None:
            raise step.error
        entry = step.entry
        assert entry is not None
        if not isinstance(step.operand, ENDINGS):
            joined = step.others if isinstance(step.operand, bodies.Join) else ()
            for concerned in (entry, *joined):
                if concerned in self.failed:
                    raise self.failed[concerned]
        if isinstance(step.operand, bodies.Open):
            entry.context = self._opened(step, step.operand)
            step.result = {"num_tokens": len(entry.context)}
        elif entry.context is not None:
            self._do_with(entry.context, step)
        elif not isinstance(step.operand, ENDINGS):
            raise ContextClosedError("the context has never been opened: that has failed")

    def _opened(self, step: Step, body: bodies.Open) -> Context:
        context = Context(self.host, namespace=step.namespace, retention=body.retention)
        context.append(fitting(step.ready, context, body.content))
        return context

    def _do_with(self, context: Context, step: Step) -> None:
        entry, body = step.entry, step.operand
        assert entry is not None
        match body:
            case bodies.Append():
                context.append(fitting(step.ready, context, body.content))
                step.result = {"num_tokens": len(context)}
            case bodies.Generate():
                step.pending = context.generate(step.params)
            case bodies.Score():
                step.pending = context.score(fitting(step.ready, context, body.content))
            case bodies.Choose():
                options = zip(step.ready, body.options, strict=True)
                step.pending = context.choose([fitting([it], context, own) for it, own in options])
            case bodies.Fork():
                for branch, place in zip(context.fork(body.n), step.others, strict=True):
                    place.context = branch
                step.result = {"branches": [place.id for place in step.others]}
            case bodies.Join():
                step.result = _join(context, body, step.others)
            case bodies.Checkpoint():
                step.result = {"checkpoint": _mark(entry, context, body.name)}
            case bodies.Rollback():
                _roll_back(entry, context, body.checkpoint)
                step.result = {"num_tokens": len(context)}
            case bodies.Cancel():
                for name in [body.name] if body.name is not None else list(entry.pending):
                    if name in entry.pending:
                        entry.pending[name].cancel()
                step.result = {}
            case bodies.Close():
                context.close(body.retention)
                step.result = {}
            case bodies.Read():
                self.num_read += len(context)
                if self.num_read > MOST_READ:
                    raise RequestError(
                        f"contexts of more than {MOST_READ} tokens are read at a time; read some "
                        "of them in another request"
                    )
                step.result = view_of(entry, step.others)
        if step.pending is not None:
            entry.pending[step.name] = step.pending


def look_for_closed(entries: Sequence[Entry]) -> None:
    """Note which contexts are closed by now, or never came to be."""
    for entry in entries:
        entry.closed = entry.context is None or entry.context.closed


def _join(context: Context, body: bodies.Join, places: Sequence[Entry]) -> dict[str, Any]:
    branches = []
    for place in places:
        if place.context is None:
            raise ContextClosedError("a branch has never been forked: that has failed")
        branches.append(place.context)
    if body.mode == "best":
        winner = context.join(branches, by=_by(body, branches))
        return {"winner": places[branches.index(winner)].id, "num_tokens": len(context)}
    texts = context.join(branches, body.mode, template=body.template)
    return {"texts": texts, "num_tokens": len(context)}


def _by(body: bodies.Join, branches: list[Context]) -> By | Vote | Any:
    by = body.by
    if isinstance(by, bodies.Scores):
        scores = dict(zip(branches, by.scores, strict=True))
        return scores.__getitem__
    if isinstance(by, bodies.Answers):
        answers = dict(zip(branches, by.answers, strict=True))
        return majority(answers.__getitem__)
    if isinstance(by, bodies.Majority):
        return majority(_text if by.majority == "text" else _last_number)
    return by


def _text(branch: Context) -> str | None:
    return branch.generated.strip() or None


def _last_number(branch: Context) -> float | None:
    found = NUMBER.findall(branch.generated)
    return float(found[-1]) if found else None


def _mark(entry: Entry, context: Context, name: str | None) -> str:
    if len(entry.marks) >= MAX_CHECKPOINTS:
        raise ContextError(f"a context has at most {MAX_CHECKPOINTS} checkpoints")
    if name is None:
        name = f"checkpoint-{len(entry.marks)}"
    if name in entry.marks:
        raise ContextError(f"there is a checkpoint {name!r} already")
    entry.marks[name] = context.checkpoint()
    return name


def _roll_back(entry: Entry, context: Context, name: str | None) -> None:
    """Back to a checkpoint; names of later ones are free again."""
    if name is not None and name not in entry.marks:
        raise ContextError(f"there is no checkpoint {name!r} in this context; make one first")
    context.rollback(None if name is None else entry.marks[name])
    if name is not None:
        names = list(entry.marks)
        for later in names[names.index(name) + 1 :]:
            del entry.marks[later]
