"""What a client gets: what a context says and holds, and what came of what ran on it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from radixkv.decoding import TokenLogprobs
from radixkv.engine import RequestOutput
from radixkv.llm import LLM
from radixkv.programs import Choice, Context, Host, Pending, Score
from radixkv.server.contexts.registry import Entry


def number(value: float) -> float | None:
    """JSON has no infinities: a token that cannot be has None for its log-probability."""
    return value if math.isfinite(value) else None


def numbers(values: Iterable[float]) -> list[float | None]:
    """The same for many."""
    return [number(value) for value in values]


def view_of(entry: Entry, tree: Iterable[Entry]) -> dict[str, Any]:
    """What a context says and holds, with its open branches' ids; also once it is closed.

    Its text is put in by `add_text`: a long one takes longer than a step.
    """
    context = entry.context
    assert context is not None
    names = {each.context: each.id for each in tree if each.context is not None}
    open_branches = [names.get(branch) for branch in context.branches]
    return {
        "id": entry.id,
        "closed": context.closed,
        "parent": None if context.parent is None else names.get(context.parent),
        # A score is read by a branch that nobody else knows of.
        "branches": [name for name in open_branches if name is not None],
        "text": None,
        "tokens": list(context.tokens),
        "generated": context.generated,
        "logprobs": numbers(context.logprobs),
        "messages": list(context.messages),
        "stats": asdict(context.stats),
    }


def add_text(view: dict[str, Any], llm: LLM) -> None:
    """Put its text into what `view_of` gave, where the model has a tokenizer."""
    if llm.loaded.tokenizer is not None:
        view["text"] = Host(llm.engine, llm.loaded).decode(view["tokens"])


def result_of(context: Context, pending: Pending[Any]) -> dict[str, Any]:
    """What came of something that has ended; raises what it failed of."""
    value = pending.value()
    if isinstance(value, Score):
        return _score(value)
    if isinstance(value, Choice):
        return {
            "index": value.index,
            "text": value.text,
            "scores": [_score(score) for score in value.scores],
            "generated": value.text or context.host.decode(value.scores[value.index].token_ids),
            "num_tokens": len(context),
        }
    return {**_output(value), "num_tokens": len(context)}


def _score(score: Score) -> dict[str, Any]:
    return {"token_ids": list(score.token_ids), "logprobs": numbers(score.logprobs)}


def _output(output: RequestOutput) -> dict[str, Any]:
    (completion,) = output.outputs
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "logprobs": _logprobs(completion.logprobs),
        "prompt_logprobs": _logprobs(output.prompt_logprobs),
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
    }


def _logprobs(entries: Iterable[TokenLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            "logprob": number(entry.logprob),
            "rank": entry.rank,
            "top": [[token, number(value)] for token, value in entry.top],
        }
        for entry in entries
    ]
