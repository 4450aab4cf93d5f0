"""Tokens counted, as OpenAI reports them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixkv.engine import RequestOutput


def usage_of(outputs: Sequence[RequestOutput], *, generated: bool = True) -> dict[str, Any]:
    """What requests took: each prompt once, however many continuations it has.

    Parameters
    ----------
    outputs : sequence of RequestOutput
    generated : bool
        Whether what was generated is part of the answer.
    """
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    new = sum(len(one.token_ids) for output in outputs for one in output.outputs) * generated
    cached = sum(output.num_cached_tokens for output in outputs)
    return counts(prompt, new) | {"prompt_tokens_details": {"cached_tokens": cached}}


def counts(prompt: int, new: int) -> dict[str, Any]:
    """Tokens of prompts and of answers, as far as they are known."""
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
