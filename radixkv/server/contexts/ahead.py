"""What operations give to contexts, tokenized before they reach the engine's thread.

What a text's tokens are depends on whether its context is empty, and what messages' are on the
messages before them. It is noted how each context was left, so this can be told as long as a
client's operations follow each other; if others came between, the engine's thread finds the tokens
itself. Behind a rollback it follows from the checkpoint. Behind a join whose winner only the engine
knows, content is tokenized for each way in which the branches stand, most often a single one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixkv.errors import RequestError
from radixkv.llm import LLM
from radixkv.programs import Checkpoint, Context, Host, Prepared
from radixkv.programs.turns import are_messages
from radixkv.server.contexts import bodies
from radixkv.server.contexts.registry import Left, Standing

Guess = tuple[Standing | None, Prepared | RequestError]
"""What was prepared, or why it is refused, for a context that stands so, or for any."""

MOST_WAYS = 8
"""Of more ways in which a context may stand none is followed: each costs a template's rendering."""


def standing_of(context: Context) -> Standing:
    """How a context stands now; on the engine's thread."""
    return Standing(not len(context), context.messages)


def left_of(context: Context, marks: Mapping[str, Checkpoint]) -> Left:
    """The same, with its checkpoints."""
    places = {name: (not mark.num_tokens, mark.num_messages) for name, mark in marks.items()}
    return Left(standing_of(context), places)


def fitting(ready: Iterable[Guess], context: Context, content: Any) -> Any:
    """What was prepared for a context that stands as this one does; else the content as it is.

    Raises
    ------
    RequestError
        If the content is refused in such a context.
    """
    standing = standing_of(context)
    for wanted, prepared in ready:
        if wanted is None or _matters(wanted, content) == _matters(standing, content):
            if isinstance(prepared, RequestError):
                raise prepared
            return prepared
    return content


def _matters(standing: Standing, content: Any) -> Standing:
    """A text's tokens, and ids, do not depend on messages."""
    return standing if are_messages(content) else Standing(standing.first)


@dataclass(slots=True)
class _Outlook:
    """How a context will stand, as far as it can be told.

    Attributes
    ----------
    ways : list of Standing
        One of these it will be; none if it cannot be told.
    marks : dict of str to list of (bool, int)
        For its checkpoints, in order, as `Left` has them; one of these.
    """

    ways: list[Standing]
    marks: dict[str, list[tuple[bool, int]]] = field(default_factory=dict)

    def mark(self, name: str | None) -> None:
        places = [(way.first, len(way.history)) for way in self.ways]
        self.marks[f"checkpoint-{len(self.marks)}" if name is None else name] = places

    def roll_back(self, name: str | None) -> None:
        """To a checkpoint, the last one if None; what is not there fails when it is carried out."""
        names = list(self.marks)
        if not names or (name is not None and name not in self.marks):
            self.ways = []
            return
        place = len(names) - 1 if name is None else names.index(name)
        for later in names[place + 1 :]:
            del self.marks[later]
        places = self.marks[names[place]]
        # Whatever was said since begins with what had been said there.
        self.ways = _different(
            Standing(first, way.history[:count]) for way in self.ways for first, count in places
        )


def _different(ways: Iterable[Standing]) -> list[Standing]:
    found: list[Standing] = []
    for way in ways:
        if way not in found:
            found.append(way)
        if len(found) > MOST_WAYS:
            return []
    return found


class Ahead:
    """Prepares a list of operations in order; on the thread for texts.

    Parameters
    ----------
    llm : LLM
        Of which the tokenizer is used.
    left : mapping of str to Left
        How the contexts that are known were left, by their ids.
    """

    def __init__(self, llm: LLM, left: Mapping[str, Left]) -> None:
        self._host = Host(llm.engine, llm.loaded)
        self._outlooks = {
            name: _Outlook([its.standing], {mark: [place] for mark, place in its.marks.items()})
            for name, its in left.items()
        }

    def prepared(self, context: str, body: bodies.Operand) -> Sequence[Guess]:
        """What an operation gives, with its tokens, and note what it makes of its context.

        Raises
        ------
        RequestError
            If its content cannot be tokenized, however its context stands.
        """
        outlook = self._outlooks.setdefault(context, _Outlook([]))
        match body:
            case bodies.Open():
                outlook = self._outlooks[context] = _Outlook([Standing(True)])
                ready = self._guesses(body.content, outlook.ways)
                outlook.ways = _behind(outlook.ways, body.content)
                return ready
            case bodies.Append():
                ready = self._guesses(body.content, outlook.ways)
                outlook.ways = _behind(outlook.ways, body.content)
                return ready
            case bodies.Score():
                return [(None, self._with_tokens(body.content, Standing(False)))]
            case bodies.Choose():
                return [(None, self._with_tokens(each, Standing(False))) for each in body.options]
            case bodies.Fork():
                for branch in body.ids or ():
                    self._outlooks[branch] = _Outlook(outlook.ways)
            case bodies.Checkpoint():
                outlook.mark(body.name)
            case bodies.Rollback():
                outlook.roll_back(body.checkpoint)
            case bodies.Join():
                outlook.ways = self._joined(outlook.ways, body)
        return ()

    def _joined(self, ways: Sequence[Standing], body: bodies.Join) -> list[Standing]:
        if body.mode == "append":
            # What is appended, if anything, only the engine knows.
            return _different(way._replace(first=first) for way in ways for first in _later(way))
        if body.mode == "all":
            return list(ways)
        branches = (self._outlooks.get(branch) for branch in body.branches)
        return _different(way for branch in branches if branch is not None for way in branch.ways)

    def _guesses(self, content: Any, ways: Sequence[Standing]) -> list[Guess]:
        if not are_messages(content):
            ways = _different(Standing(way.first) for way in ways)
            ways = ways or [Standing(True), Standing(False)]
        return [(way, self._tried(content, way)) for way in ways]

    def _tried(self, content: Any, way: Standing) -> Prepared | RequestError:
        try:
            return self._with_tokens(content, way)
        except RequestError as error:
            return error  # It matters only if the context will stand so.

    def _with_tokens(self, content: Any, standing: Standing) -> Prepared:
        first, history = standing
        return Prepared(content, self._host.tokens_behind(content, first=first, history=history))


def _later(way: Standing) -> tuple[bool, ...]:
    """Whether it may be empty, once something was appended that may be empty too."""
    return (True, False) if way.first else (False,)


def _behind(ways: Iterable[Standing], content: Any) -> list[Standing]:
    """How a context stands once this was appended."""
    said = tuple(content) if are_messages(content) else ()
    return [Standing(way.first and not content, way.history + said) for way in ways]
