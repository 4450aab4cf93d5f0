"""Context: a text on a server that grows, branches and joins; as `radixkv.programs.Context`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, overload

from radixkv.client.link import Call
from radixkv.client.pending import Choosing, Generation, Pending, Scoring
from radixkv.client.results import ContextStats, floats
from radixkv.client.said import Checkpoint, Said
from radixkv.client.wire import Content, by_json, content_json, params_json, retention_json
from radixkv.errors import (
    ContextBusyError,
    ContextClosedError,
    JoinError,
    RadixKVError,
    RequestError,
)

if TYPE_CHECKING:
    from radixkv.client.client import Client

_serial = count()


class Context:
    """A text on a server. Made by ``Client.context`` or `fork`; not thread-safe.

    What the server refuses of `append`, `fork`, `checkpoint` and `rollback` is raised by the next
    call on the context that waits; nothing behind it has been done then.

    Attributes
    ----------
    client : Client
    id : str
        The server's name for it, which nobody else can guess.
    parent : Context or None
        What it was forked from.
    closed : bool
        Whether it was closed or joined. What was generated in it can still be read, and of a
        joined one the rest too, for a while.
    """

    def __init__(self, client: Client, parent: Context | None = None) -> None:
        self.client = client
        self.id = f"ctx-{secrets.token_urlsafe(16)}"
        self.parent = parent
        self.closed = False
        self._said: Said = Said() if parent is None else parent._said.branch()
        self._children: dict[Context, None] = {}
        self._pending: Pending[Any] | None = None
        self._view: Mapping[str, Any] | None = None
        self._fault: BaseException | None = None

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._children)} branches"
        return f"<Context {self.id} of {self.client.url}, {state}>"

    # -- growing ---------------------------------------------------------------------------------

    def append(self, content: Content) -> None:
        """Add a text, token ids or chat messages; see `radixkv.programs.Context.append`."""
        self._check_free()
        self.queue({"append": {"content": content_json(content)}})

    def generate(self, params: Any = None, **settings: Any) -> Generation:
        """A continuation: run, await or iterate it.

        Parameters
        ----------
        params : SamplingParams, optional
        **settings
            Fields of `SamplingParams`, in place of those of ``params``.

        Raises
        ------
        ContextBusyError, ContextClosedError
        """
        self._check_free()
        call = self._named({"generate": params_json(params, settings)})
        generation = Generation(self, call, self._absorb)
        self._pending = generation
        return generation

    def _absorb(self, result: Mapping[str, Any]) -> None:
        self._said.add(result["text"], floats(entry["logprob"] for entry in result["logprobs"]))

    def score(self, content: str | Sequence[int]) -> Scoring:
        """Log-probabilities of a continuation, which is not kept."""
        self._check_free()
        return Scoring(self, self._named({"score": {"content": content_json(content)}}))

    def choose(self, options: Sequence[str | Sequence[int]]) -> Choosing:
        """Go on with the likeliest of some continuations, by mean log-probability a token."""
        self._check_free()
        if isinstance(options, str) or not len(options):
            raise RequestError("choose takes a list of texts, at least one")
        call = self._named({"choose": {"options": [content_json(each) for each in options]}})

        def conclude(result: Mapping[str, Any]) -> None:
            chosen = result["scores"][result["index"]]
            self._said.add(result["generated"], floats(chosen["logprobs"]))

        choosing = Choosing(self, call, conclude)
        self._pending = choosing
        return choosing

    # -- branching -------------------------------------------------------------------------------

    def fork(self, n: int) -> list[Context]:
        """``n`` branches that go on from here, each on its own; every block is shared."""
        self._check_free()
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise RequestError(f"fork takes a number of branches, at least 1, not {n!r}")
        branches = [Context(self.client, self) for _ in range(n)]
        self._children.update(dict.fromkeys(branches))
        self.queue({"fork": {"n": n, "ids": [branch.id for branch in branches]}}, *branches)
        return branches

    @overload
    def join(
        self,
        branches: Sequence[Context],
        mode: Literal["best"] = "best",
        *,
        by: Any = "mean_logprob",
    ) -> Context: ...

    @overload
    def join(
        self,
        branches: Sequence[Context],
        mode: Literal["append", "all"],
        *,
        template: str = "{text}\n",
    ) -> list[str]: ...

    def join(
        self,
        branches: Sequence[Context],
        mode: str = "best",
        *,
        by: str | Callable[[Any], float] | Any = "mean_logprob",
        template: str = "{text}\n",
    ) -> Context | list[str]:
        """End branches, and go on with what came of them; see `radixkv.programs.Context.join`.

        Waits for the server's answer. Functions, also those of `majority`, are called here. A
        template holds ``{text}`` and ``{index}`` as they are, without format specifications.
        """
        self._check_free()
        self._check_branches(branches)
        for branch in branches:
            branch._check_free()
        body: dict[str, Any] = {"branches": [branch.id for branch in branches], "mode": mode}
        if mode == "best":
            body["by"] = by_json(by, branches)
        elif mode in ("append", "all"):
            body["template"] = template
        else:
            raise JoinError(f'mode must be "best", "append" or "all", not {mode!r}')
        result = self._answer({"join": body})
        for branch in branches:
            branch._end()
        if mode != "best":
            texts: list[str] = result["texts"]
            return texts
        (winner,) = (branch for branch in branches if branch.id == result["winner"])
        self._said.become(winner._said)
        return winner

    def _check_branches(self, branches: Sequence[Context]) -> None:
        """Raise `JoinError` unless all of these were forked from this context or its branches."""
        if not len(branches):
            raise JoinError("there are no branches to join")
        for branch in branches:
            above = getattr(branch, "parent", None)
            while above is not None and above is not self:
                above = above.parent
            if above is None:
                raise JoinError(f"{branch!r} was not forked from this context")
        if len(set(branches)) < len(branches):
            raise JoinError("a branch can be joined only once")

    # -- going back ------------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """A place that `rollback` can come back to."""
        self._check_free()
        place = self._said.mark()
        self.queue({"checkpoint": {"name": place.name}})
        return place

    def rollback(self, place: Checkpoint | None = None) -> None:
        """Forget all that came after a checkpoint, the last one unless given."""
        self._check_free()
        self.queue({"rollback": {"checkpoint": self._said.rewind(place).name}})

    # -- endings ---------------------------------------------------------------------------------

    def close(self, retention: Any = "ephemeral") -> None:
        """Cancel what is pending, close all branches, and give the blocks up; waits for that."""
        if self.closed:
            return
        fault = self._fault
        pending = self._all_pending()
        self._end()
        self.client.forget(self)
        self._answer({"close": {"cache_retention": retention_json(retention)}})
        wait([each.ended for each in pending])
        if (fault := fault or self._fault) is not None:
            raise fault

    def _all_pending(self) -> list[Pending[Any]]:
        """What is pending here and on all branches."""
        below = [each for child in self._children for each in child._all_pending()]
        return below if self._pending is None else [self._pending, *below]

    def _end(self) -> None:
        """It is closed, with all branches."""
        self.closed = True
        for child in list(self._children):
            child._end()
        if self.parent is not None:
            self.parent._children.pop(self, None)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.close()
        except RadixKVError:
            if error is None:  # Else the first error says more.
                raise

    # -- looking ---------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """All of its tokens as text, special ones among them."""
        return str(self._look()["text"])

    @property
    def tokens(self) -> tuple[int, ...]:
        """All of its tokens; those of an unfinished generation come when that is finished."""
        return tuple(self._look()["tokens"])

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """What was appended as chat turns."""
        return tuple(self._look()["messages"])

    @property
    def stats(self) -> ContextStats:
        """What it holds on the server, now."""
        self._view = None
        return ContextStats(**self._look()["stats"])

    def __len__(self) -> int:
        return len(self._look()["tokens"])

    @property
    def generated(self) -> str:
        """What was generated in it since it was opened or forked; known here."""
        self._settle()
        return "".join(self._said.pieces[self._said.inherited[0] :])

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log-probabilities of all tokens sampled since then; known here."""
        self._settle()
        return tuple(self._said.logprobs[self._said.inherited[1] :])

    def _look(self) -> Mapping[str, Any]:
        """What the server says of it; asked again once anything was done with it."""
        self._settle()
        self._raise_fault()
        if self._view is None or self._pending is not None:
            self._view = self._answer({"read": {}})
        return self._view

    # -- one thing at a time ---------------------------------------------------------------------

    def queue(self, operand: dict[str, Any], *made: Context, waits: bool = False) -> Call:
        """Queue an operation; if nobody waits for it, its error is noted for the next who does."""
        call = Call({"context": self.id, **operand})
        if "read" not in operand:
            self._view = None
        if not waits:
            call.result.add_done_callback(partial(_note_fault, (self, *made)))
        self.client.add(call)
        return call

    def _named(self, operand: dict[str, Any]) -> Call:
        """Queue what goes on for a while, and can be cancelled by its name."""
        return self.queue({**operand, "name": f"call-{next(_serial)}"}, waits=True)

    def _answer(self, operand: dict[str, Any]) -> dict[str, Any]:
        """Queue an operation, and wait for what comes of it."""
        call = self.queue(operand, waits=True)
        self.client.flush()
        wait([call.result])
        if (error := call.result.exception()) is not None:
            self.heard_of(error)
            raise error
        return call.result.result()

    def heard_of(self, error: BaseException) -> None:
        """This is being raised: it need not be raised again for what it came of."""
        if str(self._fault) == str(error):
            self._fault = None

    def _raise_fault(self) -> None:
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def _settle(self) -> None:
        if self._pending is not None and self._pending.done:
            self._pending.settle()
            self._pending = None
            self._view = None

    def _check_free(self) -> None:
        """Raise unless it is open, what was done with it has worked, and nothing runs on it."""
        self._settle()
        if self.closed:
            raise ContextClosedError("the context was closed or joined; fork or open another")
        self._raise_fault()
        if self._pending is not None:
            raise ContextBusyError(
                "a generation of this context is not finished; ask for its result, run or await "
                "it, or cancel it, first"
            )


def _note_fault(contexts: Sequence[Context], result: Future[dict[str, Any]]) -> None:
    if (error := result.exception()) is not None:
        for context in contexts:
            context._fault = context._fault or error
