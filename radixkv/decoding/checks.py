"""Checks of single values, each with a message that says what to write instead."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from operator import index
from typing import SupportsIndex

import numpy as np

from radixkv.errors import RequestError

BOOLS = (bool, np.bool_)


def integer(name: str, value: object, *, low: int, high: int | None = None, hint: str = "") -> int:
    """Return ``value`` as an int within ``[low, high]``; a bool is not an int.

    Raises
    ------
    RequestError
        If ``value`` has another type or lies outside the range.
    """
    if isinstance(value, SupportsIndex) and not isinstance(value, BOOLS):
        result = index(value)
        if result >= low and (high is None or result <= high):
            return result
    span = f"of at least {low}" if high is None else f"from {low} to {high}"
    raise RequestError(f"{name} must be an int {span}{_also(hint)}, got {value!r}")


def number(
    name: str,
    value: object,
    low: float,
    high: float = math.inf,
    *,
    open_low: bool = False,
    hint: str = "",
) -> float:
    """Return ``value`` as a finite float within ``[low, high]``, or ``(low, high]``.

    Raises
    ------
    RequestError
        If ``value`` is not a real number, is a bool, is NaN or infinite, or is out of range.
    """
    if isinstance(value, Real) and not isinstance(value, BOOLS):
        result = float(value)
        above = result > low if open_low else result >= low
        if math.isfinite(result) and above and result <= high:
            return result
    left, right = "(" if open_low else "[", "]" if math.isfinite(high) else ")"
    span = f"{left}{low:g}, {high:g}{right}"
    raise RequestError(f"{name} must be a number in {span}{_also(hint)}, got {value!r}")


def in_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise RequestError if a token id is ``vocab_size`` or more; all are at least 0 already."""
    if (highest := max(token_ids, default=0)) >= vocab_size:
        raise RequestError(
            f"{name} names token id {highest}, which is outside the vocabulary of "
            f"{vocab_size} tokens"
        )


def boolean(name: str, value: object) -> bool:
    """Return ``value`` if it is a bool, else raise RequestError."""
    if isinstance(value, bool):
        return value
    raise RequestError(f"{name} must be True or False, got {value!r}")


def strings(name: str, value: object) -> tuple[str, ...]:
    """Return a string or an iterable of strings as a tuple without repeats, none of them empty.

    Raises
    ------
    RequestError
        If any item is not a string, or is empty.
    """
    one = isinstance(value, str)
    found: dict[str, None] = {}
    for item in (value,) if one else _items(name, value, "a string or a list of strings"):
        if not isinstance(item, str):
            raise RequestError(f"{name} must hold strings only, got {item!r}")
        if not item:
            raise RequestError(f"{name} must not hold an empty string, which matches everywhere")
        found[item] = None
    return tuple(found)


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """Return an iterable of token ids as a tuple of ints without repeats.

    Raises
    ------
    RequestError
        If ``value`` is not iterable, or holds anything but ints of at least 0.
    """
    items = _items(name, value, "a list of token ids")
    return tuple(dict.fromkeys(integer(f"each of {name}", item, low=0) for item in items))


def token_sequences(name: str, value: object) -> tuple[tuple[int, ...], ...]:
    """Return an iterable of sequences of token ids as a tuple of tuples, without equal ones.

    Raises
    ------
    RequestError
        If any of them is empty, or holds anything but ints of at least 0.
    """
    found: dict[tuple[int, ...], None] = {}
    for item in _items(name, value, "a list of lists of token ids"):
        ids = _items(f"each of {name}", item, "a list of token ids")
        if not ids:
            raise RequestError(f"{name} must not hold an empty list, which matches everywhere")
        found[tuple(integer(f"each id of {name}", token, low=0) for token in ids)] = None
    return tuple(found)


def _items(name: str, value: object, wanted: str) -> tuple[object, ...]:
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise RequestError(f"{name} must be {wanted}, got {value!r}")
    return tuple(value)


def _also(hint: str) -> str:
    return f" ({hint})" if hint else ""
