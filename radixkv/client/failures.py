"""The server's errors as the classes of `radixkv.errors` that they were there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from radixkv import errors

BY_CODE: Mapping[str, type[errors.RadixKVError]] = {
    "cancelled": errors.GenerationCancelledError,
    "context_busy": errors.ContextBusyError,
    "context_closed": errors.ContextClosedError,
    "context_conflict": errors.ContextError,
    "context_length_exceeded": errors.PromptTooLongError,
    "context_not_found": errors.ContextNotFoundError,
    "engine_stopped": errors.EngineStoppedError,
    "join_conflict": errors.JoinError,
    "numerical_error": errors.NumericalError,
    "shutting_down": errors.EngineStoppedError,
    "too_many_contexts": errors.TooManyContextsError,
    "unsupported_parameter": errors.UnsupportedParameterError,
}


def error_of(body: Mapping[str, Any]) -> errors.RadixKVError:
    """An error in OpenAI's form as an exception; what has no class here is a plain one."""
    error = body.get("error")
    if not isinstance(error, Mapping):
        return errors.RadixKVError(f"the server answered with an error: {body!r}")
    message, code = str(error.get("message")), str(error.get("code"))
    if code in BY_CODE:
        return BY_CODE[code](message)
    if code == "queue_full":
        unfinished, limit = re.findall(r"\d+", message)[:2]
        return errors.QueueFullError(int(unfinished), int(limit))
    if error.get("type") in ("invalid_request_error", "authentication_error"):
        return errors.RequestError(message)
    return errors.RadixKVError(f"the server has failed: {message}")
