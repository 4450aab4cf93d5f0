r"""Regular expressions: what xgrammar would read in another way than `re` is refused or rewritten.

xgrammar reads ECMAScript's dialect and always matches the whole text. Some things it lets pass with
no more than a warning, or reads otherwise: anchors inside (dropped), escapes that it does not know
(``\A`` is an "A"), the dot, which matches a newline there, and ``\s``, which matches a byte order
mark. What it refuses by itself, such as look-around and back-references, is reported when it is
compiled.
"""

from __future__ import annotations

import string
from collections.abc import Iterator

from radixkv.errors import RequestError

CLASSES = "dDwWsS"
CONTROLS = "nrtfv0"
CODES = "xuc"
DOT = r"[^\n]"
SPACES = r" \t\n\r\f\v"


def checked_regex(pattern: str, name: str = "regex") -> str:
    """The pattern as xgrammar is to have it: what it matches, `re` does with ``re.ASCII``.

    Raises
    ------
    RequestError
        For an anchor inside, or an escape that is none.
    """
    pieces = list(_pieces(pattern))
    written = []
    for place, (piece, inside) in enumerate(pieces):
        if piece[0] == "\\":
            _check_escape(piece, name)
        elif not inside and piece in "^$":
            if place != (0 if piece == "^" else len(pieces) - 1):
                raise RequestError(
                    f"{name}: {piece!r} stands inside; the whole text is matched anyway, so leave "
                    rf"it out, or write \{piece} for the character"
                )
            continue
        if piece == r"\s":
            piece = SPACES if inside else f"[{SPACES}]"
        written.append(DOT if piece == "." and not inside else piece)
    return "".join(written)


def check_json_pattern(pattern: str, name: str) -> None:
    """Refuse a string's ``pattern`` that could write what JSON must escape.

    Raises
    ------
    RequestError
        For a quote, a backslash or a control character, also by its code, and what
        `checked_regex` refuses.
    """
    checked_regex(pattern, name)
    for piece, _ in _pieces(pattern):
        escaped = piece[0] == "\\" and piece[1:] in ("", "\\", '"', *CONTROLS, *CODES)
        if escaped or piece == '"' or piece < " ":
            raise RequestError(
                f"{name} names {piece!r}: a quote, a backslash, a control character or a "
                "character's code; JSON would have to escape it, and a pattern cannot say so"
            )


def _pieces(pattern: str) -> Iterator[tuple[str, bool]]:
    """Characters and escapes, each with whether it stands in a character class."""
    inside, place = False, 0
    while place < len(pattern):
        length = 2 if pattern[place] == "\\" else 1
        piece = pattern[place : place + length]
        yield piece, inside
        if piece == "[" and not inside:
            inside = True
        elif piece == "]":
            inside = False
        place += length


def _check_escape(piece: str, name: str) -> None:
    letter = piece[1:]
    known = letter in CLASSES or letter in CONTROLS or letter in CODES
    if letter and letter in string.ascii_letters and not known and letter not in "bBpPk":
        raise RequestError(
            f"{name}: the escape {piece!r} is not known; a grammar has {', '.join(CLASSES)}, "
            rf"{', '.join(CONTROLS)}, \x41 and \u0041"
        )
