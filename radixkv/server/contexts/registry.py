"""Contexts: ids, owners, and the time that contexts live without a call."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from radixkv.errors import (
    ContextClosedError,
    ContextError,
    ContextNotFoundError,
    RequestError,
    TooManyContextsError,
)
from radixkv.llm import LLM
from radixkv.programs import Checkpoint, Context, Host, Pending
from radixkv.programs.turns import Message
from radixkv.server.record import name_request
from radixkv.server.worker import EngineWorker

# Joined branches of a tree that can still be read.
MAX_READABLE = 64
MAX_CHECKPOINTS = 1024


def new_id() -> str:
    """An id that nobody guesses."""
    return f"ctx-{secrets.token_urlsafe(16)}"


class Standing(NamedTuple):
    """What decides on the tokens of what is appended to a context.

    Attributes
    ----------
    first : bool
        Whether the context is empty.
    history : tuple of messages
    """

    first: bool
    history: tuple[Message, ...] = ()


class Left(NamedTuple):
    """How the last operation left a context.

    Attributes
    ----------
    standing : Standing
    marks : mapping of str to (bool, int)
        For its checkpoints, in order: whether it was empty there, and how many of the messages
        were there.
    """

    standing: Standing
    marks: Mapping[str, tuple[bool, int]] = {}


@dataclass(slots=True, eq=False)
class Entry:
    """A context as clients know it.

    Attributes
    ----------
    context : Context or None
        None until the engine's thread has made it, which alone touches it.
    marks : dict of str to Checkpoint
        Its checkpoints' names.
    pending : dict of str to Pending
        What runs on it, by the names that clients chose.
    left : Left or None
        How its context was left by the last operation.
    closed : bool
        Whether it was found to be closed, or never came to be.
    """

    id: str
    tree: Tree
    context: Context | None = None
    marks: dict[str, Checkpoint] = field(default_factory=dict)
    pending: dict[str, Pending[object]] = field(default_factory=dict)
    left: Left | None = None
    closed: bool = False


@dataclass(slots=True, eq=False)
class Tree:
    """A context that a client opened, and all that was forked from it: they live together.

    Attributes
    ----------
    owner : str or None
        The API key it belongs to.
    calls : int
        Calls on any of its contexts that have not ended; it cannot expire meanwhile.
    renewed : float
        The event loop's time at the end of its last call.
    """

    owner: str | None
    renewed: float
    root: Entry | None = None
    open: dict[Entry, None] = field(default_factory=dict)
    readable: deque[Entry] = field(default_factory=deque)
    calls: int = 0
    timer: asyncio.TimerHandle | None = None


class Contexts:
    """All contexts of a server's clients. For the event loop, but for what `Entry` says.

    Parameters
    ----------
    worker : EngineWorker
    seconds : float
        Time without a call after which a context is closed with its branches.
    limit : int
        Contexts that may be open at a time, branches among them.
    """

    def __init__(self, worker: EngineWorker, seconds: float, limit: int) -> None:
        self.worker = worker
        self.seconds = seconds
        self.limit = limit
        self._entries: dict[str, Entry] = {}
        self._trees: dict[Tree, None] = {}
        self._num_open = 0
        self._host: Host | None = None
        # What was closed lately: for a clearer word than "not found".
        self._gone: OrderedDict[str, tuple[str | None, str]] = OrderedDict()

    def __len__(self) -> int:
        """How many are open."""
        return self._num_open

    def host(self, llm: LLM) -> Host:
        """What all contexts stand on; for the engine's thread."""
        if self._host is None:
            # Texts are tokenized on another thread at the same time, and a fast tokenizer must
            # not be used by two: contexts have one of their own.
            own = replace(llm.loaded, tokenizer=deepcopy(llm.loaded.tokenizer))
            engine = llm.engine
            self._host = Host(
                engine,
                own,
                seed=llm.seed,
                max_tokens=engine.max_model_len,
                name_request=name_request,
            )
        return self._host

    # -- finding and adding ----------------------------------------------------------------------

    def find(self, owner: str | None, context_id: str) -> Entry:
        """A caller's context.

        Raises
        ------
        ContextClosedError
            If it was closed or has expired.
        ContextNotFoundError
            If there is none, or it is another caller's.
        """
        entry = self._entries.get(context_id)
        if entry is not None and entry.tree.owner == owner:
            return entry
        whose, reason = self._gone.get(context_id, (None, ""))
        if reason and whose == owner:
            raise ContextClosedError(f"the context {reason}; open another")
        raise ContextNotFoundError(f"there is no context {context_id}")

    def left(self, owner: str | None, ids: Iterable[str]) -> dict[str, Left]:
        """How a caller's contexts were left, of those that are there."""
        found = ((name, self._entries.get(name)) for name in ids)
        return {
            name: entry.left
            for name, entry in found
            if entry is not None and entry.left is not None and entry.tree.owner == owner
        }

    def add_tree(self, owner: str | None, context_id: str) -> Entry:
        """A place for a context that is about to be opened."""
        (entry,) = self._add(Tree(owner, asyncio.get_running_loop().time()), [context_id])
        entry.tree.root = entry
        self._trees[entry.tree] = None
        return entry

    def add_branches(self, parent: Entry, number: int, ids: list[str] | None) -> list[Entry]:
        """Places for branches that are about to be forked."""
        self._check_room(number)
        ids = [new_id() for _ in range(number)] if ids is None else ids
        if len(ids) != number:
            raise RequestError(f"{number} branches, but {len(ids)} ids for them")
        return self._add(parent.tree, ids)

    def _check_room(self, number: int) -> None:
        if self._num_open + number > self.limit:
            raise TooManyContextsError(
                f"{self._num_open} of at most {self.limit} contexts are open, and {number} more "
                "were asked for; close some, or try again later"
            )

    def _add(self, tree: Tree, ids: list[str]) -> list[Entry]:
        self._check_room(len(ids))
        if len(set(ids)) < len(ids) or any(i in self._entries or i in self._gone for i in ids):
            raise ContextError("a new context's id is taken; choose another, or none")
        made = [Entry(context_id, tree) for context_id in ids]
        for entry in made:
            self._entries[entry.id] = entry
            tree.open[entry] = None
        self._num_open += len(made)
        return made

    # -- living ----------------------------------------------------------------------------------

    def hold(self, trees: Iterable[Tree]) -> None:
        """A call on these begins: they do not expire before `renew`."""
        for tree in trees:
            tree.calls += 1

    def renew(self, tree: Tree) -> None:
        """A call has ended: note what is closed by now; from here its time runs anew."""
        tree.calls -= 1
        if tree not in self._trees:
            return  # Several calls can end together: the first has seen to it.
        for entry in [entry for entry in tree.open if entry.closed]:
            self._set_aside(entry)
        if tree.root is None or tree.root.closed:
            self._forget(tree, "was closed")
            return
        loop = asyncio.get_running_loop()
        tree.renewed = loop.time()
        if tree.timer is None:
            tree.timer = loop.call_later(self.seconds, self._look, tree)

    def _look(self, tree: Tree) -> None:
        """Its time may have run out; if it was renewed meanwhile, look again later."""
        loop = asyncio.get_running_loop()
        tree.timer = None
        left = tree.renewed + self.seconds - loop.time()
        if tree.calls:
            return  # The end of the call sets the timer.
        if left > 0:
            tree.timer = loop.call_later(left, self._look, tree)
        else:
            self._close(tree, f"was closed after {self.seconds:g} seconds without a call")

    def _close(self, tree: Tree, reason: str) -> None:
        root = tree.root
        assert root is not None

        def close(_: LLM) -> None:
            if root.context is not None:
                root.context.close()

        self.worker.tell(close)
        self._forget(tree, reason)

    def _set_aside(self, entry: Entry) -> None:
        """A closed context can be read for a while; one that never came to be is forgotten."""
        tree = entry.tree
        del tree.open[entry]
        self._num_open -= 1
        if entry.context is None:
            del self._entries[entry.id]
            return
        tree.readable.append(entry)
        if len(tree.readable) > MAX_READABLE:
            self._bury(tree.readable.popleft(), "was closed")

    def _forget(self, tree: Tree, reason: str) -> None:
        del self._trees[tree]
        if tree.timer is not None:
            tree.timer.cancel()
        self._num_open -= len(tree.open)
        for entry in (*tree.open, *tree.readable):
            self._bury(entry, reason)
        tree.open.clear()
        tree.readable.clear()

    def _bury(self, entry: Entry, reason: str) -> None:
        del self._entries[entry.id]
        self._gone[entry.id] = (entry.tree.owner, reason)
        while len(self._gone) > self.limit:
            self._gone.popitem(last=False)

    async def close(self) -> None:
        """Close all; for the server's end."""
        for tree in list(self._trees):
            self._close(tree, "was closed when the server was shut down")
        if self.worker.alive:
            await self.worker.call(lambda _: None)
