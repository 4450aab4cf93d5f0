"""Python's objects, as programs give them, as the JSON that a server takes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from radixkv.errors import JoinError, RequestError

if TYPE_CHECKING:
    from radixkv.client.context import Context

T = TypeVar("T")
Message = Mapping[str, Any]
Content = str | Sequence[int] | Sequence[Message]


class Majority(Generic[T]):
    """Most votes win; among the winners the likeliest branch. See `majority`."""

    def __init__(self, key: Callable[[T], Hashable]) -> None:
        self.key = key


def majority(key: Callable[[T], Hashable]) -> Majority[T]:
    """Join by vote, as `radixkv.programs.majority`, which can be given as well.

    The key is asked here; the server counts.
    """
    return Majority(key)


def content_json(content: Content) -> str | list[Any]:
    """Text, token ids or messages."""
    if isinstance(content, str):
        return content
    try:
        return [dict(each) if isinstance(each, Mapping) else int(each) for each in content]
    except (TypeError, ValueError):
        raise RequestError(f"{content!r} is no text, token ids or messages") from None


def params_json(params: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters: `SamplingParams`, fields of it, or both."""
    given: dict[str, Any] = {}
    if params is not None:
        if not is_dataclass(params):
            raise RequestError(f"generate takes SamplingParams and their fields, not {params!r}")
        given = {
            each.name: getattr(params, each.name)
            for each in fields(params)
            if getattr(params, each.name) != each.default
        }
    return {name: _plain(value) for name, value in {**given, **settings}.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        return value.model_json_schema()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(each) for each in value]
    if isinstance(value, str | bool | int | float | None):
        return value
    if hasattr(value, "item"):  # a scalar of numpy's
        return value.item()
    raise RequestError(f"{value!r} cannot be sent to a server")


def salt_of(namespace: str | tuple[str, ...]) -> str | None:
    """A namespace as a salt: different ones stay different."""
    if isinstance(namespace, str):
        return namespace or None
    if len(namespace) < 2:
        return namespace[0] if namespace else None
    return json.dumps(namespace)


def retention_json(retention: Any) -> str | float:
    """What a server is told of a `Retention`: "default", "ephemeral", or seconds to live."""
    if retention is None or isinstance(retention, str | int | float):
        return "default" if retention is None else retention
    if retention.ephemeral:
        return "ephemeral"
    if not retention.priority:
        return "default"
    if retention.priority != 1 or math.isinf(retention.expires_at):
        raise RequestError("a server is told of a time to live alone: Retention.for_seconds(...)")
    return max(float(retention.expires_at) - time.monotonic(), 1e-3)


def by_json(by: Any, branches: Sequence[Context]) -> Any:
    """By what branches are compared; functions are called here, and what they gave is sent."""
    if isinstance(by, str):
        return by
    if callable(key := getattr(by, "key", None)):
        labels: dict[Hashable, int] = {}
        answers = [key(branch) for branch in branches]
        numbered = [None if a is None else labels.setdefault(a, len(labels)) for a in answers]
        return {"answers": numbered}
    if callable(by):
        return {"scores": [float(by(branch)) for branch in branches]}
    raise JoinError(
        f'by must be "mean_logprob", "total_logprob", majority(key) or a function, not {by!r}'
    )
