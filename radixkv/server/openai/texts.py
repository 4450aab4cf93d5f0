"""What is known of a model's texts, made when it is first wanted and kept with the model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from radixkv.errors import PromptTooLongError, RequestError
from radixkv.llm import LLM
from radixkv.model.loading import LoadedModel
from radixkv.server.openai.logprobs import TokenTable


class Texts:
    """A model's tokenizer with what serving asks of it; for the thread that works on texts."""

    def __init__(self, loaded: LoadedModel) -> None:
        # Not the model: who holds this must not keep that.
        self._tokenizer = loaded.tokenizer
        self._name = loaded.name
        self._vocab_size = loaded.vocab_size

    @cached_property
    def table(self) -> TokenTable:
        """What each token is shown as."""
        return TokenTable(self._tokenizer, self._vocab_size)

    @cached_property
    def _longest_token(self) -> int:
        names = self._tokenizer.get_vocab() if self._tokenizer is not None else ()
        return max(map(len, names), default=1)

    def check_length(self, characters: int, max_model_len: int) -> None:
        """Refuse what is too long whatever its tokens are, before it takes seconds to find them.

        Raises
        ------
        PromptTooLongError
        """
        if characters > max_model_len * self._longest_token:
            raise PromptTooLongError(
                f"the prompt has {characters} characters, which is more than the "
                f"{max_model_len} tokens of the model's context can have"
            )

    def tokens(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text.

        Raises
        ------
        RequestError
            If the model has no tokenizer.
        """
        if self._tokenizer is None:
            raise RequestError(f"{self._name} has no tokenizer; give token ids")
        found: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens).input_ids
        return list(found)

    def text(self, tokens: list[int], **options: Any) -> str:
        """The text of token ids, which must be within the vocabulary; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        decoded: str = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False, **options)
        return decoded


_KNOWN: WeakKeyDictionary[LoadedModel, Texts] = WeakKeyDictionary()


def texts_of(llm: LLM) -> Texts:
    """The texts of an LLM's model."""
    return _KNOWN.setdefault(llm.loaded, Texts(llm.loaded))


def characters_of(value: object) -> int:
    """Characters in all the strings of a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(characters_of, value.values()))
    return sum(map(characters_of, value)) if isinstance(value, list) else 0
