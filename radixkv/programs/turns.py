"""Messages behind messages: what a chat template writes between an answer and the next turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from radixkv.errors import RequestError

Message = Mapping[str, Any]

# Stands for the answer, which is in the context already, token by token, as the model gave it.
ANSWER = "\u2063answer\u2063"


def render_next(
    render: Callable[[Sequence[Message]], str],
    history: Sequence[Message],
    messages: Sequence[Message],
) -> str:
    """The text that follows the model's answer to ``history`` if ``messages`` come next.

    Parameters
    ----------
    render : callable
        A conversation to text, with the assistant's turn opened at the end.
    history, messages : sequence of messages
        What was said before the answer, and what is said behind it.

    Raises
    ------
    RequestError
        If the template does not write answers as they are.
    """
    text = render([*history, {"role": "assistant", "content": ANSWER}, *messages])
    _, found, behind = text.rpartition(ANSWER)
    if not found:
        raise RequestError(
            "the model's chat template changes earlier answers, so messages cannot be appended "
            "behind one; open a context with the whole conversation instead"
        )
    return behind


def are_messages(content: object) -> bool:
    """Whether these are chat messages, at least one, and no text or token ids."""
    return (
        not isinstance(content, str | np.ndarray)
        and isinstance(content, Sequence)
        and len(content) > 0
        and isinstance(content[0], Mapping)
    )
