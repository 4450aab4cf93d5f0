"""Prompts as a model sees them: tokens, and where in the text each begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from radixkv.cli.lint.requests import LoggedRequest
from radixkv.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """A message's content within the prompt: characters from ``start`` to ``end``."""

    role: str
    start: int
    end: int


@dataclass(frozen=True)
class Prompt:
    """A request as a model sees it.

    Attributes
    ----------
    tokens : int64 (num_tokens,)
    starts : int64 (num_tokens,)
        The character at which each token begins.
    parts : tuple of Part or None
        By message; None for one that the template does not show as it is.
    """

    request: LoggedRequest
    text: str
    tokens: Tokens
    starts: Tokens
    parts: tuple[Part | None, ...]

    def token_at(self, character: int) -> int:
        """The first token that begins at or behind a character."""
        return int(np.searchsorted(self.starts, character, side="left"))

    def character_at(self, token: int) -> int:
        """Where a token begins; the text's end behind the last."""
        return int(self.starts[token]) if token < len(self.starts) else len(self.text)

    def part_at(self, character: int) -> int | None:
        """The message in which a character stands, or at whose end."""
        for index, part in enumerate(self.parts):
            if part is not None and part.start <= character <= part.end:
                return index
        return None


class Renderer:
    """Makes prompts by a model's own tokenizer and chat template.

    Parameters
    ----------
    tokenizer
        A fast one: others do not say where in a text their tokens are.
    name : str
        The model's.

    Attributes
    ----------
    unseen_tools : int
        Requests so far whose tools the template took no notice of.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(f"the tokenizer of {name} does not say where its tokens are")
        self._tokenizer: Any = tokenizer
        self._name = name
        self.unseen_tools = 0

    def render(self, request: LoggedRequest) -> Prompt:
        """The prompt of a request.

        Raises
        ------
        RequestError
            If the model's template is missing or refuses it.
        """
        if isinstance(request.prompt, tuple):
            return self._of_tokens(request, request.prompt)
        if request.prompt is not None:
            return self._of_text(request, request.prompt, special=True)
        text = self._chat(request, request.tools)
        if request.tools and text == self._chat(request, ()):
            self.unseen_tools += 1
        return self._of_text(request, text, special=False)

    def with_tools(self, prompt: Prompt, tools: tuple[dict[str, Any], ...]) -> Prompt:
        """The same request with its tools written in another way."""
        request = replace(prompt.request, tools=tools)
        return self._of_text(request, self._chat(request, tools), special=False)

    def replaced(self, prompt: Prompt, start: int, stop: int, other: Prompt, end: int) -> Prompt:
        """The same with its tokens from ``start`` to ``stop`` replaced by another's up to ``end``.

        Both begin alike up to ``start``. Texts are tokenized anew, as they would be.
        """
        if isinstance(prompt.request.prompt, tuple):
            parts = (prompt.tokens[:start], other.tokens[start:end], prompt.tokens[stop:])
            return self._of_tokens(prompt.request, np.concatenate(parts).tolist())
        text = (
            prompt.text[: prompt.character_at(start)]
            + other.text[other.character_at(start) : other.character_at(end)]
            + prompt.text[prompt.character_at(stop) :]
        )
        return self.retold(prompt, text)

    def retold(self, prompt: Prompt, text: str) -> Prompt:
        """The same request with another text, whose messages are not looked for any more."""
        special = prompt.request.prompt is not None
        return self._of_text(replace(prompt.request, messages=()), text, special)

    def _chat(self, request: LoggedRequest, tools: Sequence[dict[str, Any]]) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise RequestError(f"{self._name} has no chat template; name another --model")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in request.messages],
                    tools=list(tools) or None,
                    add_generation_prompt=True,
                    tokenize=False,
                )
            )
        except Exception as error:
            reason = " ".join(str(error).split())
            raise RequestError(
                f"line {request.line}: the template of {self._name} refuses it: {reason}"
            ) from error

    def _of_text(self, request: LoggedRequest, text: str, special: bool) -> Prompt:
        encoded = self._tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        tokens = np.array(encoded["input_ids"], np.int64)
        begins = [begin for begin, _ in encoded["offset_mapping"]]
        # Special tokens at the end say that they are at 0.
        starts = np.maximum.accumulate(np.array(begins, np.int64)) if begins else tokens
        return Prompt(request, text, tokens, starts, _parts(request, text))

    def _of_tokens(self, request: LoggedRequest, ids: Sequence[int]) -> Prompt:
        texts = [self._tokenizer.decode([token]) for token in ids]
        starts = np.cumsum([0, *map(len, texts)])[:-1].astype(np.int64)
        return Prompt(request, "".join(texts), np.array(ids, np.int64), starts, ())


def _parts(request: LoggedRequest, text: str) -> tuple[Part | None, ...]:
    """Where each message's content stands; templates may strip it."""
    found: list[Part | None] = []
    behind = 0
    for message in request.messages:
        content = message["content"].strip()
        start = text.find(content, behind) if content else -1
        if start < 0:
            found.append(None)
            continue
        behind = start + len(content)
        found.append(Part(message["role"], start, behind))
    return tuple(found)
