"""Context: a text that grows, branches and joins, and the blocks that hold it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import numpy as np

from radixkv.cache import DEFAULT_RETENTION, EPHEMERAL, Namespace, Retention
from radixkv.cache.hashing import check_namespace
from radixkv.decoding import SamplingParams
from radixkv.engine import Request
from radixkv.engine.holds import Hold
from radixkv.engine.interrupts import DeferredInterrupts
from radixkv.errors import (
    ContextBusyError,
    ContextClosedError,
    ContextError,
    JoinError,
    RequestError,
    UnsupportedParameterError,
)
from radixkv.programs.endings import ending_of
from radixkv.programs.host import Host
from radixkv.programs.joining import By, Majority, best_of
from radixkv.programs.pending import Choosing, Generation, Pending, Scoring, best_score
from radixkv.programs.turns import Message

Content = str | Sequence[int] | Sequence[Message]

# Tokens behind which a generation's first ones are turned into text; as the engine does.
DECODED_BEHIND = 8


@dataclass(frozen=True, slots=True)
class ContextStats:
    """What a context holds now.

    Attributes
    ----------
    num_tokens, num_computed : int
        All of its tokens, and those whose KV it holds.
    shared_blocks, own_blocks : int
        Blocks that others hold too, and those that only this context does. Both are 0 while a
        generation runs on them, and once they were given up for want of memory.
    """

    num_tokens: int
    num_computed: int
    shared_blocks: int
    own_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A place to come back to; made by `Context.checkpoint`."""

    num_tokens: int
    num_generated: int
    num_logprobs: int
    num_messages: int
    answer_from: int


class Context:
    """A text over the cache. Made by ``LLM.context`` or `fork`; not thread-safe.

    Its blocks are held from one generation to the next. If memory runs out, the context that was
    used longest ago gives its blocks up; it goes on as before, and computes at worst its tokens
    again.

    Attributes
    ----------
    namespace : tuple of str
        What its blocks are shared within.
    closed : bool
        Whether it was closed or joined. What it says can still be read.
    """

    def __init__(
        self,
        host: Host,
        *,
        namespace: Namespace | str = (),
        retention: Retention = DEFAULT_RETENTION,
        parent: Context | None = None,
    ) -> None:
        self._host = host
        namespace = (namespace,) if isinstance(namespace, str) else namespace
        self.namespace = check_namespace(namespace)
        self._retention = retention
        self._parent = parent
        self._children: dict[Context, None] = {}
        self._hold = Hold()
        self._pending: Pending[Any] | None = None
        self._tokens = array("i")
        self._generated: list[str] = []
        self._logprobs: list[float] = []
        # How much of the two above was there when it was forked.
        self._since = (0, 0)
        self._messages: list[Message] = []
        self._answer_from = 0
        self._checkpoints: list[Checkpoint] = []
        self.closed = False

    # -- reading ---------------------------------------------------------------------------------

    @property
    def tokens(self) -> tuple[int, ...]:
        """All of its tokens; those of an unfinished generation come when that is finished."""
        self._settle()
        return tuple(self._tokens)

    @property
    def text(self) -> str:
        """All of its tokens as text, special ones among them."""
        self._settle()
        return self._host.decode(self._tokens)

    @property
    def generated(self) -> str:
        """What was generated in it since it was opened or forked."""
        self._settle()
        return "".join(self._generated[self._since[0] :])

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log-probabilities of all tokens sampled since it was opened or forked.

        They are the model's own, before temperature and filters; the tokens that ended a
        generation count, also where they are no text.
        """
        self._settle()
        return tuple(self._logprobs[self._since[1] :])

    @property
    def stats(self) -> ContextStats:
        """What it holds; O(nodes of the tree above it)."""
        self._settle()
        sequence = self._hold.sequence
        if sequence is None:
            return ContextStats(len(self._tokens), 0, 0, 0)
        own = sequence.num_own_blocks
        shared = sequence.num_blocks - own
        return ContextStats(len(self._tokens), sequence.num_computed, shared, own)

    def __len__(self) -> int:
        self._settle()
        return len(self._tokens)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._children)} branches"
        return f"<Context of {len(self._tokens)} tokens, {state}>"

    # -- growing ---------------------------------------------------------------------------------

    def append(self, content: Content) -> None:
        """Add a text, token ids or chat messages; computed with the next generation.

        A text is tokenized on its own, so no token spans two appended texts. Messages open the
        assistant's turn behind them; what is in the context since the last ones is the answer.

        Raises
        ------
        RequestError
            If the content is of another kind, a token id is unknown, or the model has no chat
            template.
        """
        self._check_free()
        if isinstance(content, str):
            tokens = self._host.tokenize(content, first=not self._tokens) if content else ()
        elif _are_messages(content):
            tokens = self._turn_tokens(content)
        else:
            tokens = self._host.checked(content)  # type: ignore[arg-type]
        self._tokens.extend(tokens)
        if _are_messages(content):
            self._messages += content  # type: ignore[arg-type]
            self._answer_from = len(self._tokens)

    def _turn_tokens(self, messages: Any) -> array[int]:
        if self._messages:
            return self._host.render_next(self._messages, messages)
        if self._tokens:
            raise RequestError(
                "messages cannot follow plain text: the model's chat format begins a conversation"
            )
        return self._host.render_first(messages)

    def generate(self, params: SamplingParams | None = None, **settings: Any) -> Generation:
        """Queue a continuation; it runs when its result is asked for, or another's.

        The context goes on from the text that came out: without the token or the stop string that
        ended it. If it fails or is cancelled, the context stays as it was.

        Parameters
        ----------
        params : SamplingParams, optional
        **settings
            Fields of `SamplingParams`, in place of those of ``params``.

        Raises
        ------
        RequestError
            If it is refused at the door: an empty context, one that leaves no room.
        ContextBusyError, ContextClosedError
        """
        self._check_free()
        if params is None:
            params = SamplingParams(**settings)
        elif settings:
            params = replace(params, **settings)
        if params.n > 1:
            raise UnsupportedParameterError("a context has one continuation; fork it for n > 1")
        if params.logprobs is None:
            params = replace(params, logprobs=0)
        params = self._host.seeded(params)
        with DeferredInterrupts():
            request = self._submit(params)
            generation = Generation(self._host, [request], lambda well: self._absorb(request, well))
            self._pending = generation
        return generation

    def _submit(self, params: SamplingParams, scored: Iterable[int] | None = None) -> Request:
        """A request on this context's own sequence."""
        prompt = np.array(self._tokens, np.int32)
        scored_from = None
        if scored is not None:
            scored_from = len(prompt) - 1
            prompt = np.concatenate((prompt, np.array(scored, np.int32)))
        return self._host.engine.add_request(
            prompt,
            params,
            namespace=self.namespace,
            retention=self._retention,
            hold=self._hold,
            scored_from=scored_from,
        )

    def _absorb(self, request: Request, well: bool) -> None:
        """A generation has ended: go on from its text, or from where it began."""
        self._pending = None
        if well:
            (branch,) = request.branches
            stream, behind = branch.stream, self._tokens[-DECODED_BEHIND:]
            kept, rest = ending_of(stream, self._host.engine.tokenizer, behind)
            self._tokens.extend(stream.token_ids[:kept])
            self._generated.append(stream.text)
            self._logprobs += [entry.logprob for entry in branch.logprobs]
            self._host.holds.truncate(self._hold, len(self._tokens))
            if rest:
                self._tokens.extend(self._host.tokenize(rest, first=False))
        else:
            self._host.holds.truncate(self._hold, len(self._tokens))

    # -- scoring ---------------------------------------------------------------------------------

    def score(self, content: str | Sequence[int]) -> Scoring:
        """Log-probabilities of a continuation, which is not kept; queued as `generate` is.

        It is read by a fork, so the context can go on meanwhile.

        Raises
        ------
        RequestError
            If the continuation or the context is empty.
        """
        tokens = self._continuation(content)
        branch = self._branch()
        try:
            request = branch._submit(SamplingParams(max_tokens=1, temperature=0), tokens)
        except BaseException:
            branch.close()
            raise
        scoring = Scoring(self._host, [request], lambda well: branch.close())
        branch._pending = scoring
        return scoring

    def choose(self, options: Sequence[str | Sequence[int]]) -> Choosing:
        """Go on with the likeliest of some continuations, by mean log-probability a token.

        All are read in one batch, as forks; the winner's blocks become the context's.

        Raises
        ------
        RequestError
            If there are no options, or one is empty, or the context is.
        """
        self._check_free()
        if isinstance(options, str) or not len(options):
            raise RequestError("choose takes a list of texts, at least one")
        continuations = [self._continuation(option) for option in options]
        branches: list[Context] = []
        requests: list[Request] = []
        params = SamplingParams(max_tokens=1, temperature=0)
        try:
            for tokens in continuations:
                branches.append(self._branch())
                requests.append(branches[-1]._submit(params, tokens))
        except BaseException:
            for request in requests:
                self._host.engine.abort(request.request_id)
            for branch in branches:
                branch.close()
            raise
        texts = [option if isinstance(option, str) else "" for option in options]

        def conclude(well: bool) -> None:
            self._pending = None
            if well:
                index = best_score(requests)
                self._take_choice(branches[index], requests[index], texts[index])
            for branch in branches:
                branch.close()

        self._pending = Choosing(self._host, requests, conclude, texts)
        return self._pending

    def _continuation(self, content: str | Sequence[int]) -> array[int]:
        self._check_free()
        if not self._tokens:
            raise RequestError("an empty context has nothing to score behind; append a text first")
        if isinstance(content, str):
            tokens = self._host.tokenize(content, first=False)
        else:
            tokens = self._host.checked(content)
        if not tokens:
            raise RequestError("the continuation is empty; it needs at least one token")
        return tokens

    def _take_choice(self, branch: Context, request: Request, text: str) -> None:
        scored = request.prompt[len(self._tokens) :].tolist()
        branch._tokens.extend(scored)
        branch._generated.append(text or self._host.decode(scored))
        branch._logprobs += [entry.logprob for entry in request.prompt_logprobs]
        self._become(branch)

    # -- branching -------------------------------------------------------------------------------

    def fork(self, n: int) -> list[Context]:
        """``n`` branches that go on from here, each on its own; every block is shared.

        Nothing is computed or copied. They are closed with this context, if they were not joined
        or closed before.
        """
        self._check_free()
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise RequestError(f"fork takes a number of branches, at least 1, not {n!r}")
        with DeferredInterrupts():
            return [self._branch() for _ in range(n)]

    def _branch(self) -> Context:
        branch = object.__new__(Context)
        vars(branch).update(vars(self))
        branch._parent = self
        branch._children = {}
        branch._hold = self._host.holds.fork(self._hold)
        branch._tokens = self._tokens[:]
        branch._generated = self._generated.copy()
        branch._logprobs = self._logprobs.copy()
        branch._since = (len(self._generated), len(self._logprobs))
        branch._messages = self._messages.copy()
        branch._checkpoints = []
        self._children[branch] = None
        return branch

    @overload
    def join(
        self,
        branches: Sequence[Context],
        mode: Literal["best"] = "best",
        *,
        by: By | Majority | Callable[[Context], float] = "mean_logprob",
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
        by: By | Majority | Callable[[Context], float] = "mean_logprob",
        template: str = "{text}\n",
    ) -> Context | list[str]:
        """End branches, and go on with what came of them.

        Parameters
        ----------
        branches : sequence of Context
            Forked from this context, or from its branches. All are closed; what they say can
            still be read.
        mode : str
            "best": the context becomes the winner; its blocks are handed over, nothing is computed
            or copied. "append": what each branch generated is appended, in order; only these
            tokens are new. "all": the context stays as it is.
        by : "mean_logprob", "total_logprob", `majority` (key) or callable
            What "best" means: log-probability of what was generated since it left this context, a
            vote, or the highest score that a function gives.
        template : str
            What "append" writes for a branch; ``{text}`` and ``{index}`` are filled in.

        Returns
        -------
        Context or list of str
            The winner, or what each branch generated.

        Raises
        ------
        JoinError
            If one is no branch of this context, comes twice, or (for "best") this context has
            changed since. Nothing has changed then.
        ContextClosedError, ContextBusyError
        """
        self._check_free()
        self._check_branches(branches)
        if mode == "best":
            since = len(self._logprobs)
            winner = best_of(branches, by, lambda branch: branch._logprobs[since:])
            if winner._tokens[: len(self._tokens)] != self._tokens:
                raise JoinError(
                    "the context has changed since the winner was forked from it; join with "
                    'mode="append", or do not append to a context whose branches are open'
                )
            self._become(winner)
            self._end(branches)
            return winner
        if mode not in ("append", "all"):
            raise JoinError(f'mode must be "best", "append" or "all", not {mode!r}')
        start = len(self._generated)
        texts = ["".join(branch._generated[start:]) for branch in branches]
        if mode == "append":
            written = [template.format(text=text, index=i) for i, text in enumerate(texts)]
            self.append("".join(written))
        self._end(branches)
        return texts

    def _check_branches(self, branches: Sequence[Context]) -> None:
        if not len(branches):
            raise JoinError("there are no branches to join")
        for branch in branches:
            if not isinstance(branch, Context) or not branch._descends_from(self):
                raise JoinError(f"{branch!r} was not forked from this context")
            branch._check_free()
        if len(set(branches)) < len(branches):
            raise JoinError("a branch can be joined only once")

    def _descends_from(self, other: Context) -> bool:
        above = self._parent
        while above is not None and above is not other:
            above = above._parent
        return above is not None

    def _become(self, winner: Context) -> None:
        """Go on as the winner does, on its blocks."""
        with DeferredInterrupts():
            old, self._hold, winner._hold = self._hold, winner._hold, Hold()
            self._host.holds.release(old)
            self._tokens = winner._tokens[:]
            self._generated = winner._generated.copy()
            self._logprobs = winner._logprobs.copy()
            self._messages = winner._messages.copy()
            self._answer_from = winner._answer_from

    def _end(self, branches: Sequence[Context]) -> None:
        for branch in branches:
            branch.close()

    # -- going back ------------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """A place that `rollback` can come back to; O(1), holds nothing."""
        self._check_free()
        place = Checkpoint(
            len(self._tokens),
            len(self._generated),
            len(self._logprobs),
            len(self._messages),
            self._answer_from,
        )
        self._checkpoints.append(place)
        return place

    def rollback(self, place: Checkpoint | None = None) -> None:
        """Forget all that came after a checkpoint, the last one unless given.

        The checkpoint stays good; later ones are gone. Branches forked since then stay as they
        are. O(blocks that are given back).

        Raises
        ------
        ContextError
            If the checkpoint is not this context's, or was rolled back over.
        """
        self._check_free()
        if place is None and self._checkpoints:
            place = self._checkpoints[-1]
        if place is None or place not in self._checkpoints:
            raise ContextError("there is no such checkpoint in this context; make one first")
        with DeferredInterrupts():
            del self._checkpoints[self._checkpoints.index(place) + 1 :]
            del self._tokens[place.num_tokens :]
            del self._generated[place.num_generated :]
            del self._logprobs[place.num_logprobs :]
            del self._messages[place.num_messages :]
            self._answer_from = place.answer_from
            self._host.holds.truncate(self._hold, place.num_tokens)

    # -- endings ---------------------------------------------------------------------------------

    def close(self, retention: Retention = EPHEMERAL) -> None:
        """Cancel what is pending, close all branches, and give the blocks up.

        Parameters
        ----------
        retention : Retention
            Blocks that nobody else has used are the first to be evicted, unless this says
            otherwise.
        """
        if self.closed:
            return
        with DeferredInterrupts():
            if self._pending is not None:
                self._pending.cancel()
            for child in list(self._children):
                child.close(retention)
            self.closed = True
            if self._parent is not None:
                self._parent._children.pop(self, None)
            self._host.holds.release(self._hold, retention)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle(self) -> None:
        if self._pending is not None:
            self._pending.settle()

    def _check_free(self) -> None:
        """Raise unless it is open and no generation runs on it."""
        self._settle()
        if self.closed:
            raise ContextClosedError("the context was closed or joined; fork or open another")
        if self._pending is not None:
            raise ContextBusyError(
                "a generation of this context is not finished; ask for its result, run or await "
                "it, or cancel it, first"
            )


def _are_messages(content: object) -> bool:
    return (
        not isinstance(content, str | np.ndarray)
        and isinstance(content, Sequence)
        and len(content) > 0
        and isinstance(content[0], Mapping)
    )
