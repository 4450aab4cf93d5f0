"""Context: a text that grows, branches and joins, and the blocks that hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import numpy as np

from radixkv.cache import DEFAULT_RETENTION, EPHEMERAL, Namespace, Retention
from radixkv.cache.hashing import check_namespace
from radixkv.decoding import SamplingParams
from radixkv.engine import Request
from radixkv.engine.holds import Hold
from radixkv.engine.interrupts import DeferredInterrupts
from radixkv.errors import (
    JoinError,
    RequestError,
    UnsupportedParameterError,
)
from radixkv.programs.content import Content, Prepared
from radixkv.programs.endings import ending_of
from radixkv.programs.host import Host
from radixkv.programs.joining import By, Majority, best_of, check_branches, fill_in
from radixkv.programs.pending import Generation
from radixkv.programs.scoring import Choosing, Scoring, choose, score
from radixkv.programs.transcript import Checkpoint
from radixkv.programs.turns import are_messages
from radixkv.programs.view import ContextView

# Tokens behind which a generation's first ones are turned into text; as the engine does.
DECODED_BEHIND = 8


class Context(ContextView):
    """A text over the cache. Made by ``LLM.context`` or `fork`; not thread-safe.

    Its blocks are held from one generation to the next. If memory runs out, the context that was
    used longest ago gives its blocks up; it goes on as before, and computes at worst its tokens
    again.

    Attributes
    ----------
    namespace : tuple of str
        What its blocks are shared within.
    parent : Context or None
        What it was forked from.
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
        super().__init__(host)
        namespace = (namespace,) if isinstance(namespace, str) else namespace
        self.namespace = check_namespace(namespace)
        self._retention = retention
        self.parent = parent
        self._children: dict[Context, None] = {}

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._children)} branches"
        return f"<Context of {len(self._said.tokens)} tokens, {state}>"

    # -- growing ---------------------------------------------------------------------------------

    def append(self, content: Content | Prepared) -> None:
        """Add a text, token ids or chat messages; computed with the next generation.

        A text is tokenized on its own, so no token spans two appended texts. Messages open the
        assistant's turn behind them; what is in the context since the last ones is the answer.

        Raises
        ------
        RequestError
            If the content is of another kind, a token id is unknown, or the model has no chat
            template; if it is too long for its host.
        """
        self._check_free()
        if isinstance(content, Prepared):
            tokens, content = content.tokens, content.content
        else:
            first, history = not self._said.tokens, self._said.messages
            tokens = self.host.tokens_behind(content, first=first, history=history)
        self.host.check_length(len(self._said.tokens) + len(tokens))
        self._said.tokens.extend(tokens)
        if are_messages(content):
            self._said.messages += content  # type: ignore[arg-type]

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
        if params.n > 1 or params.ranked:
            raise UnsupportedParameterError(
                "a context has one continuation; fork it for n > 1, and join the branches for the "
                "best of them"
            )
        if params.logprobs is None:
            params = replace(params, logprobs=0)
        params = self.host.seeded(params)
        with DeferredInterrupts():
            request = self.submit(params)
            generation = Generation(self.host, [request], lambda well: self._absorb(request, well))
            self.occupy(generation)
        return generation

    def submit(self, params: SamplingParams, scored: Iterable[int] | None = None) -> Request:
        """A request on this context's own sequence."""
        prompt = np.array(self._said.tokens, np.int32)
        scored_from = None
        if scored is not None:
            scored_from = len(prompt) - 1
            prompt = np.concatenate((prompt, np.array(scored, np.int32)))
        name = self.host.name_request
        return self.host.engine.add_request(
            prompt,
            params,
            request_id=name() if name else None,
            namespace=self.namespace,
            retention=self._retention,
            hold=self._hold,
            scored_from=scored_from,
        )

    def _absorb(self, request: Request, well: bool) -> None:
        """A generation has ended: go on from its text, or from where it began."""
        if well:
            (branch,) = request.branches
            stream, behind = branch.stream, self._said.tokens[-DECODED_BEHIND:]
            kept, rest = ending_of(stream, self.host.engine.tokenizer, behind)
            self._said.add(stream.token_ids[:kept], stream.text, branch.logprobs)
            self.host.holds.truncate(self._hold, len(self._said.tokens))
            if rest:
                self._said.tokens.extend(self.host.tokenize(rest, first=False))
        else:
            self.host.holds.truncate(self._hold, len(self._said.tokens))

    # -- scoring ---------------------------------------------------------------------------------

    def score(self, content: str | Sequence[int] | Prepared) -> Scoring:
        """Log-probabilities of a continuation, which is not kept; queued as `generate` is.

        It is read by a fork, so the context can go on meanwhile.

        Raises
        ------
        RequestError
            If the continuation or the context is empty.
        """
        self._check_free()
        return score(self, content)

    def choose(self, options: Sequence[str | Sequence[int] | Prepared]) -> Choosing:
        """Go on with the likeliest of some continuations, by mean log-probability a token.

        All are read in one batch, as forks; the winner's blocks become the context's.

        Raises
        ------
        RequestError
            If there are no options, or one is empty, or the context is.
        """
        self._check_free()
        self._check_free()
        return choose(self, options)

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

    @property
    def branches(self) -> tuple[Context, ...]:
        """Those that were forked from it and are open."""
        return tuple(self._children)

    def _branch(self) -> Context:
        branch = object.__new__(Context)
        vars(branch).update(vars(self))
        branch.parent = self
        branch._children = {}
        branch._hold = self.host.holds.fork(self._hold)
        branch._said = self._said.branch()
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
        check_branches(self, branches)
        for branch in branches:
            branch._check_free()
        if mode == "best":
            since = len(self._said.logprobs)
            winner = best_of(branches, by, lambda branch: branch._said.logprobs[since:])
            if winner._said.tokens[: len(self._said.tokens)] != self._said.tokens:
                raise JoinError(
                    "the context has changed since the winner was forked from it; join with "
                    'mode="append", or do not append to a context whose branches are open'
                )
            with DeferredInterrupts():
                self._become(winner)
                self._end(branches)
            return winner
        if mode not in ("append", "all"):
            raise JoinError(f'mode must be "best", "append" or "all", not {mode!r}')
        start = len(self._said.pieces)
        texts = ["".join(branch._said.pieces[start:]) for branch in branches]
        if mode == "append":
            self.append(fill_in(template, texts))
        self._end(branches)
        return texts

    def take_over(self, branch: Context, request: Request, text: str) -> None:
        """Go on as a branch whose request has read ``text`` as its prompt's end."""
        read = request.prompt[len(branch._said) :].tolist()
        branch._said.add(read, text or self.host.decode(read), request.prompt_logprobs)
        self._become(branch)

    def _become(self, winner: Context) -> None:
        """Go on as the winner does, on its blocks."""
        old, self._hold, winner._hold = self._hold, winner._hold, Hold()
        self.host.holds.release(old)
        self._said.become(winner._said)

    def _end(self, branches: Sequence[Context]) -> None:
        for branch in branches:
            branch.close()

    # -- going back ------------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """A place that `rollback` can come back to; O(1), holds nothing."""
        self._check_free()
        return self._said.mark()

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
        with DeferredInterrupts():
            self._said.rewind(place)
            self.host.holds.truncate(self._hold, len(self._said.tokens))

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
            if self.parent is not None:
                self.parent._children.pop(self, None)
            self.host.holds.release(self._hold, retention)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
