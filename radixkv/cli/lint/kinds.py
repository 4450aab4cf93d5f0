"""What a difference is: a timestamp, an id, another order of the same things."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DAY = r"(?:(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?),?"
_TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\b\.?)?"
_ZONE = r"(?: ?(?:Z|UTC|GMT|[A-Z]{2,4}T)\b| ?[+-]\d{2}:?\d{2}\b)?"
_DATE = (
    rf"(?:{_DAY} )?(?:\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{2,4}}"
    rf"|\d{{1,2}}(?:st|nd|rd|th)?\.? {_MONTH}(?:,? \d{{4}})?"
    rf"|{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?\b(?:,? \d{{4}})?)"
)
# In this order: what is longer first, so that an id is not taken for numbers.
_PATTERNS = {
    "uuid": r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b",
    "timestamp": rf"\b{_DATE}(?:T|,? (?:at )?){_TIME}{_ZONE}"
    rf"|\b{_DAY} {_MONTH} +\d{{1,2}} {_TIME}{_ZONE}(?: \d{{4}})?"
    r"|\b1[0-9]{9}(?:\d{3}|\.\d+)?\b",
    "date": rf"\b{_DATE}|\b{_DAY}(?=\W|$)",
    "time": rf"\b{_TIME}{_ZONE}",
    "address": r"\b[\w.+-]+@[\w-]+\.[\w.-]+\b",
    "id": r"\b(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])[A-Za-z0-9_-]{6,}\b",
    "number": r"\b\d[\d,.]*\b",
}
_VOLATILE = re.compile("|".join(f"(?P<{kind}>{rule})" for kind, rule in _PATTERNS.items()))
_NAME = re.compile(r"[A-Z][\w.'’-]*(?: [A-Z][\w.'’-]*){0,3}")

NAMES = {"uuid": "random id", "id": "random id", "address": "user name"}
# What stamps a message, whatever that says; and all that says nothing of what is asked.
STAMPS = frozenset({"random id", "timestamp", "date", "time", "whitespace"})
MOVABLE = STAMPS | {"number"}

_ENCLOSING = " \n\t.,:;!?\"'()[]{}<>"

# How far around a difference words are looked at, in characters.
_AROUND = 48
# A longer difference is no stamp; the expressions above would take long over it.
_MOST_CHARACTERS = 1024


@dataclass(frozen=True)
class Difference:
    """What two prompts have in the same place.

    Attributes
    ----------
    kinds : tuple of str
        One, or several that stand side by side, in their order.
    start, end : int
        Where the words, ids or times that differ begin and end in the left text, whole.
    right : str
        Them in the right text, where they end at ``right_end``.
    """

    kinds: tuple[str, ...]
    start: int
    end: int
    right: str
    right_end: int

    @property
    def is_movable(self) -> bool:
        """Whether it says nothing of what is asked, and could stand anywhere."""
        return MOVABLE.issuperset(self.kinds)


def classify(left: str, right: str, start: int, left_end: int, right_end: int) -> Difference:
    """What stands between ``start`` and an end, in two texts that are equal up to ``start``.

    A little of what is equal behind the two ends is looked at, too: it may belong to the words.
    """
    line = max(left.rfind("\n", 0, start) + 1, start - _AROUND)
    behind = 0
    while (
        behind < _AROUND
        and left_end + behind < len(left)
        and right_end + behind < len(right)
        and left[left_end + behind] == right[right_end + behind] != "\n"
    ):
        behind += 1
    shown = left[line : left_end + behind], right[line : right_end + behind]
    short = max(map(len, shown)) <= _MOST_CHARACTERS
    if short and _skeleton(shown[0]) == _skeleton(shown[1]):
        matches = zip(*map(_VOLATILE.finditer, shown), strict=True)
        pairs = [pair for pair in matches if pair[0][0] != pair[1][0]]
        if pairs:
            first, last = pairs[0], pairs[-1]
            kinds = dict.fromkeys(NAMES.get(str(m.lastgroup), str(m.lastgroup)) for m, _ in pairs)
            if {"date", "time"} <= kinds.keys():
                kinds = dict.fromkeys(["timestamp", *(kinds.keys() - {"date", "time"})])
            other = shown[1][first[1].start() : last[1].end()]
            begin, end = line + first[0].start(), line + last[0].end()
            return Difference(tuple(kinds), begin, end, other, line + last[1].end())
    if "".join(shown[0].split()) == "".join(shown[1].split()):
        return Difference(("whitespace",), start, left_end, right[start:right_end], right_end)
    begin, end = _words(left, start, left_end)
    other_begin, other_end = _words(right, start, right_end)
    other = right[other_begin:other_end]
    names = _NAME.fullmatch(left[begin:end]) and _NAME.fullmatch(other)
    return Difference(("user name" if names else "text",), begin, end, other, other_end)


def _skeleton(text: str) -> str:
    """A text with a mark for everything that changes by its nature."""
    return _VOLATILE.sub(lambda match: f"\0{match.lastgroup}\0", text)


def _words(text: str, start: int, end: int) -> tuple[int, int]:
    """Where whole words from ``start`` to ``end`` begin and end, without what encloses them."""
    while start > 0 and text[start - 1].isalnum():
        start -= 1
    while start < end < len(text) and text[end - 1].isalnum() and text[end].isalnum():
        end += 1
    while start < end and text[start] in _ENCLOSING:
        start += 1
    while start < end and text[end - 1] in _ENCLOSING:
        end -= 1
    return start, end


@dataclass(frozen=True)
class Reordering:
    """The same JSON written in two ways: from ``start`` up to an end in each text."""

    kind: str
    start: int
    left_end: int
    right_end: int


_OPENINGS = 256


def reordered_json(left: str, right: str, place: int) -> Reordering | None:
    """The largest JSON around ``place`` that says the same in both texts, equal up to there."""
    openings = [m.start() for m in re.finditer(r"[\[{]", left[: place + 1])][-_OPENINGS:]
    decoder = json.JSONDecoder()
    for start in openings:
        try:
            value, left_end = decoder.raw_decode(left, start)
            other, right_end = decoder.raw_decode(right, start)
        except (ValueError, RecursionError):
            continue
        if min(left_end, right_end) <= place:
            continue
        if (kind := kind_of_reordering(value, other)) is not None:
            return Reordering(kind, start, left_end, right_end)
    return None


def kind_of_reordering(left: Any, right: Any) -> str | None:
    """How two values that say the same are written differently; None if they do not.

    Of lists only those of tools say the same in any order.
    """
    if _canonical(left) == _canonical(right):
        written = json.dumps(left) == json.dumps(right)
        return "whitespace" if written else "JSON key order"
    if not (isinstance(left, list) and isinstance(right, list) and same_items(left, right)):
        return None
    tools = all(isinstance(item, dict) and {"function", "name"} & item.keys() for item in left)
    return "tool order" if tools else None


def same_items(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two lists hold the same in any order."""
    return sorted(map(_canonical, left)) == sorted(map(_canonical, right))


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
