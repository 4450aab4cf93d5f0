"""Which differences are worth naming, and what each costs.

What a difference costs is measured: in the later prompt it is made equal to the earlier one's, the
text is tokenized anew, and what the two then have in common behind it is what had to be recomputed.
A difference is named only where the common part could have stood first:

- the order of tools, of JSON keys or of white space can always be fixed;
- what says nothing of the request (a time, an id) and stands in a system prompt, or outside of
  messages, could stand behind all that is common; so it could where both are the same conversation;
- anything else could stand behind what is common in its message, if that is most of the message.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from radixkv.cli.lint.divergence import common_length, next_run
from radixkv.cli.lint.kinds import (
    STAMPS,
    Difference,
    classify,
    kind_of_reordering,
    reordered_json,
    same_items,
)
from radixkv.cli.lint.prompts import Prompt, Renderer

# What is equal in fewer tokens than this may be so by chance.
WINDOW = 16
MOST_DIFFERENCES = 16
AROUND = 60
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True)
class Fault:
    """A difference between a prompt and an earlier one.

    Attributes
    ----------
    kinds : tuple of str
        What it is; several where things stand side by side that all differ.
    token : int
        Its place in the later prompt's tokens, as that was before earlier faults were mended.
    token_text : str
    role : str or None
        Of the message in which it stands; None outside of messages.
    value, other : str
        What stands there in the later and in the earlier prompt.
    before, after : str
        Characters around it.
    tokens_lost : int
        Tokens behind it that had to be recomputed though they are the same in both.
    """

    kinds: tuple[str, ...]
    token: int
    token_text: str
    role: str | None
    value: str
    other: str
    before: str
    after: str
    tokens_lost: int


class _Mending:
    """A later prompt that is made equal to an earlier one, a difference at a time."""

    def __init__(self, renderer: Renderer, later: Prompt, earlier: Prompt, place: int) -> None:
        self.renderer = renderer
        self.later = later
        self.earlier = earlier
        self.now = later
        self.place = place  # Tokens that `now` and `earlier` begin with in common.
        self.lengthened = 0  # Tokens by which what was mended is longer than it was.
        self.faults: list[Fault] = []

    def run(self) -> list[Fault]:
        if self.now.request.tools != self.earlier.request.tools:
            self._reorder_tools()
        while len(self.faults) < MOST_DIFFERENCES:
            if min(len(self.now.tokens), len(self.earlier.tokens)) <= self.place:
                break
            if not (self._rewrite_json() or self._move_behind()):
                break
        return self.faults

    def _reorder_tools(self) -> None:
        tools, others = list(self.now.request.tools), list(self.earlier.request.tools)
        if not same_items(tools, others):
            return
        kind = kind_of_reordering(tools, others) or "tool order"
        if kind == "tool order":
            values = _names(tools), _names(others)
        else:
            values = json.dumps(tools), json.dumps(others)
        mended = self.renderer.with_tools(self.now, tuple(others))
        gained = common_length(mended.tokens, self.earlier.tokens) - self.place
        if gained > 0:
            begin = self.now.character_at(self.place)
            self._note(kind, values, (begin, begin), mended, gained)

    def _rewrite_json(self) -> bool:
        """Write a piece of JSON as it was in the earlier prompt, if it says the same."""
        if isinstance(self.now.request.prompt, tuple):
            return False  # Tokens were given: there is no text to be written in another way.
        left, right = self.now.text, self.earlier.text
        found = reordered_json(left, right, self.now.character_at(self.place))
        if found is None:
            return False
        value, other = left[found.start : found.left_end], right[found.start : found.right_end]
        text = left[: found.start] + other + left[found.left_end :]
        mended = self.renderer.retold(self.now, text)
        gained = common_length(mended.tokens, self.earlier.tokens) - self.place
        if gained < 1:
            return False
        self._note(found.kind, (value, other), (found.start, found.left_end), mended, gained)
        return True

    def _move_behind(self) -> bool:
        """Make the next difference equal, if what is equal behind it could have stood first."""
        run = next_run(self.now.tokens, self.earlier.tokens, self.place, WINDOW)
        if run is None:
            return False
        stop, end, _ = run
        found = classify(
            self.now.text,
            self.earlier.text,
            self.now.character_at(self.place),
            self.now.character_at(stop),
            self.earlier.character_at(end),
        )
        mended = self.renderer.replaced(self.now, self.place, stop, self.earlier, end)
        shared = common_length(mended.tokens, self.earlier.tokens)
        limit = self._limit(found, end)
        # What belongs to the difference is no part of what could stand before it.
        gained = min(shared, limit) - max(end, self.earlier.token_at(found.right_end))
        if gained < 1 or not (found.is_movable or self._is_template(gained, limit)):
            return False
        values = self.now.text[found.start : found.end], found.right
        self._note(found.kinds, values, (found.start, found.end), mended, gained)
        if shared >= limit:
            # Nothing behind its message could have been shared.
            self.place = len(mended.tokens)
        return True

    def _message(self) -> int | None:
        """The earlier prompt's message in which the difference stands."""
        start = self.earlier.character_at(self.place)
        left, right = self.now.text[start:], self.earlier.text[start:]
        # A token may begin before the message that it reaches into.
        equal = next(
            (i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), 0
        )
        return self.earlier.part_at(start + equal)

    def _limit(self, found: Difference, end: int) -> int:
        """Up to which of the earlier prompt's tokens something could be shared."""
        earlier, index = self.earlier, self._message()
        part = earlier.parts[index] if index is not None else None
        if not earlier.request.messages:
            return len(earlier.tokens)
        if found.is_movable and (
            part is None or part.role in SYSTEM_ROLES or self._goes_on(found, index)
        ):
            return len(earlier.tokens)
        return end if part is None else earlier.token_at(part.end)

    def _goes_on(self, found: Difference, index: int | None) -> bool:
        """Whether the later is the earlier conversation with more turns, one of them stamped."""
        later, earlier = self.later.request.messages, self.earlier.request.messages
        turns = zip(later, earlier, strict=False)
        same = all(left == right for place, (left, right) in enumerate(turns) if place != index)
        return same and len(later) > len(earlier) > 1 and STAMPS.issuperset(found.kinds)

    def _is_template(self, gained: int, limit: int) -> bool:
        """Whether most of the earlier prompt's message is the same in the later one."""
        index = self._message()
        part = self.earlier.parts[index] if index is not None else None
        begin = self.earlier.token_at(part.start) if part is not None else 0
        return 2 * (max(self.place - begin, 0) + gained) >= limit - begin

    def _note(
        self,
        kinds: str | tuple[str, ...],
        values: tuple[str, str],
        where: tuple[int, int],
        mended: Prompt,
        gained: int,
    ) -> None:
        now, index = self.now, self._message()
        part = self.earlier.parts[index] if index is not None else None
        begin, end = where
        self.faults.append(
            Fault(
                kinds=(kinds,) if isinstance(kinds, str) else kinds,
                token=self.place - self.lengthened,
                token_text=now.text[
                    now.character_at(self.place) : now.character_at(self.place + 1)
                ],
                role=part.role if part is not None else None,
                value=values[0],
                other=values[1],
                before=now.text[max(begin - AROUND, 0) : begin],
                after=now.text[end : end + AROUND],
                tokens_lost=gained,
            )
        )
        self.lengthened += len(mended.tokens) - len(now.tokens)
        self.now = mended
        self.place = common_length(mended.tokens, self.earlier.tokens)


def judge(renderer: Renderer, later: Prompt, earlier: Prompt, shared: int) -> list[Fault]:
    """The faults by which a prompt shares only ``shared`` tokens with an earlier one, in order.

    Each is measured with those before it mended.
    """
    return _Mending(renderer, later, earlier, shared).run()


def _names(tools: list[Any]) -> str:
    return ", ".join(
        str((tool.get("function") or tool).get("name", "?"))
        for tool in tools
        if isinstance(tool.get("function", tool), dict)
    )
