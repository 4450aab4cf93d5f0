"""Host: what a program stands on, and the one loop that all of its generations share."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from radixkv.cache import token_bytes
from radixkv.decoding import SamplingParams
from radixkv.engine import Engine
from radixkv.errors import PromptTooLongError, RequestError
from radixkv.model.loading import LoadedModel, render_chat
from radixkv.programs.content import Content
from radixkv.programs.turns import Message, are_messages, render_next

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Awaited(Protocol):
    """What can be waited for: the engine's steps bring it to its end."""

    @property
    def done(self) -> bool:
        """Whether it has ended, however it ended."""

    def cancel(self) -> None:
        """End it now."""


class Host:
    """The engine, its tokenizer and its loop, as contexts use them. Not thread-safe.

    Parameters
    ----------
    engine : Engine
    loaded : LoadedModel
        For its tokenizer and chat format.
    step : callable, optional
        Runs one step of the engine; ``engine.step`` unless given.
    seed : int, optional
        Seed of generations that bring none of their own.
    max_tokens : int, optional
        Most tokens that anything is appended up to; any number unless given, and what is too long
        is refused when it shall be continued.
    name_request : callable, optional
        Makes the ids of requests to the engine, which makes them unless given.
    """

    def __init__(
        self,
        engine: Engine,
        loaded: LoadedModel,
        *,
        step: Callable[[], object] | None = None,
        seed: int | None = None,
        max_tokens: int | None = None,
        name_request: Callable[[], str] | None = None,
    ) -> None:
        self.engine = engine
        self.holds = engine.scheduler.holds
        self.loaded = loaded
        self.step = step or engine.step
        self.max_tokens = max_tokens
        self.name_request = name_request
        self._seed = seed
        self._serial = count()
        self._waiting: list[tuple[Awaited, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    # -- tokens ----------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's; raises `RequestError` if it has none."""
        if self.loaded.tokenizer is None:
            raise RequestError(f"{self.loaded.name} has no tokenizer; give token ids")
        return self.loaded.tokenizer

    def tokenize(self, text: str, *, first: bool) -> array[int]:
        """Token ids of a text; only the first of a context gets the model's special tokens."""
        return array("i", self.tokenizer(text, add_special_tokens=first).input_ids)

    def checked(self, token_ids: Iterable[int]) -> array[int]:
        """Token ids that the model knows; raises `RequestError` for others."""
        try:
            tokens = array("i", token_bytes(list(token_ids)))
        except TypeError:
            raise RequestError(f"{token_ids!r} is no text, token ids or messages") from None
        for token in (min(tokens), max(tokens)) if tokens else ():
            if not 0 <= token < self.engine.vocab_size:
                raise RequestError(
                    f"token id {token} is outside the vocabulary of {self.engine.vocab_size} tokens"
                )
        return tokens

    def tokens_behind(
        self, content: Content, *, first: bool, history: Sequence[Message]
    ) -> array[int]:
        """Token ids of what is appended to a context.

        Parameters
        ----------
        content : str, sequence of int or sequence of messages
        first : bool
            Whether the context is empty.
        history : sequence of messages
            What was appended to it as messages.

        Raises
        ------
        RequestError
            If the content is of another kind, a token id is unknown, or the model has no chat
            template.
        """
        if isinstance(content, str):
            return self.tokenize(content, first=first) if content else array("i")
        if not are_messages(content):
            return self.checked(content)  # type: ignore[arg-type]
        if history:
            return self.render_next(history, content)  # type: ignore[arg-type]
        if not first:
            raise RequestError(
                "messages cannot follow plain text: the model's chat format begins a conversation"
            )
        return self.render_first(content)  # type: ignore[arg-type]

    def check_length(self, num_tokens: int) -> None:
        """Raise `PromptTooLongError` for more tokens than a context may have here."""
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            raise PromptTooLongError(
                f"the context would have {num_tokens} tokens, and may have {self.max_tokens}"
            )

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of all tokens, special ones among them."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def render_first(self, messages: Sequence[Message]) -> array[int]:
        """The tokens with which a conversation begins, up to where the model answers."""
        return array("i", render_chat(self.loaded, messages))

    def render_next(self, history: Sequence[Message], messages: Sequence[Message]) -> array[int]:
        """The tokens that follow the model's answer to ``history``."""
        render_chat(self.loaded, messages)  # refuses what is malformed, or a model without template
        return self.tokenize(render_next(self._render, history, messages), first=False)

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        turns = [dict(message) for message in messages]
        return str(
            self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        )

    def seeded(self, params: SamplingParams) -> SamplingParams:
        """The parameters with this host's next seed, if they have none and it has one."""
        if self._seed is None or params.seed is not None:
            return params
        return replace(params, seed=(self._seed + next(self._serial)) % 2**64)

    # -- the loop --------------------------------------------------------------------------------

    async def wait(self, awaited: Awaited) -> None:
        """Wait for an end; all that wait in one event loop share the engine's steps.

        Steps run on the loop's own thread: between two of them every task that can go on does.
        A task that is cancelled here cancels what it waits for.
        """
        if awaited.done:
            return
        loop = asyncio.get_running_loop()
        entry = (awaited, loop.create_future())
        self._waiting.append(entry)
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._task = loop.create_task(self._drive(loop))
        try:
            await entry[1]
        except asyncio.CancelledError:
            awaited.cancel()
            raise
        finally:
            self._waiting.remove(entry)

    async def _drive(self, loop: asyncio.AbstractEventLoop) -> None:
        """Step for as long as anyone in this event loop waits."""
        while True:
            # Whoever is ready speaks first, so that what starts together runs together.
            await asyncio.sleep(0)
            waiting = [
                (awaited, future)
                for awaited, future in self._waiting
                if future.get_loop() is loop and not future.done()
            ]
            if not waiting:
                return
            error: Exception | None = None
            if not all(awaited.done for awaited, _ in waiting):
                try:
                    self.step()
                except Exception as caught:
                    error = caught
            for awaited, future in waiting:
                if error is not None:
                    future.set_exception(error)
                elif awaited.done:
                    future.set_result(None)
