"""Findings: faults of the same kind in the same place, with what they cost together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.text import Text

from radixkv.cli.lint.divergence import Divergence
from radixkv.cli.lint.judge import WINDOW, Fault, judge
from radixkv.cli.lint.prompts import Renderer
from radixkv.cli.lint.requests import LoggedRequest

ADVICE = {
    "timestamp": "Put it behind what is common, into the last message, or leave it out.",
    "date": "Put it behind what is common: it costs once a day, and for every time zone.",
    "time": "Put it behind what is common, into the last message, or leave it out.",
    "random id": "Send it beside the prompt (metadata, user), or put it behind what is common.",
    "counter": "Put it behind what is common, or leave it out.",
    "number": "Put it behind what is common.",
    "user name": "Put it behind what is common, into the user's first message.",
    "tool order": "Send tools in one order, sorted by name.",
    "JSON key order": "Write JSON with sorted keys.",
    "whitespace": "Write it in one way.",
    "text": "Put what is common first, and what changes behind it.",
}
SHOWN_VALUES = 3
SHOWN_CHARACTERS = 60
# Of a value that is kept: it may be a whole document.
MOST_CHARACTERS = 200


@dataclass
class Finding:
    """A place in a template at which prompts that are alike begin to differ.

    Attributes
    ----------
    kinds : tuple of str
        What stands there; several where things stand side by side that all differ.
    token, token_text
        The first token that differs, in the first request that paid for it.
    requests : int
        How many had to recompute what is behind it.
    tokens_lost, most_tokens_lost : int
        What they recomputed in all, and the most of one.
    lines : list of int
        Theirs in the file, and in ``earlier_lines`` those with which they could have shared.
    """

    kinds: tuple[str, ...]
    role: str | None
    token: int
    token_text: str
    before: str
    after: str
    values: list[str] = field(default_factory=list)
    requests: int = 0
    tokens_lost: int = 0
    most_tokens_lost: int = 0
    lines: list[int] = field(default_factory=list)
    earlier_lines: list[int] = field(default_factory=list)

    def count(self, fault: Fault, line: int, earlier_line: int) -> None:
        if not self.values:
            self.values.append(fault.other[:MOST_CHARACTERS])
        self.values.append(fault.value[:MOST_CHARACTERS])
        self.requests += 1
        self.tokens_lost += fault.tokens_lost
        self.most_tokens_lost = max(self.most_tokens_lost, fault.tokens_lost)
        self.lines.append(line)
        self.earlier_lines.append(earlier_line)

    @property
    def advice(self) -> str:
        return ADVICE[self.kinds[0]]

    def name(self) -> None:
        """Numbers that only grow are a counter."""
        numbers = [re.sub(r"\D", "", value) for value in self.values]
        if self.kinds == ("number",) and len(numbers) > 2 and all(numbers):
            ordered = [int(number) for number in numbers]
            if all(one < two for one, two in pairwise(ordered)):
                self.kinds = ("counter",)


@dataclass
class Verdict:
    """What was found in a file.

    Attributes
    ----------
    prompt_tokens : int
    shared_tokens : int
        Of these an earlier prompt begins with, so that a cache without bounds shares them.
    unseen_tools : int
        Requests whose tools the model's template takes no notice of.
    min_tokens : int
        Less that a request could share did not matter.
    """

    requests: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    unseen_tools: int = 0
    min_tokens: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def tokens_lost(self) -> int:
        """Tokens that were recomputed, and need not have been, in all."""
        return sum(finding.tokens_lost for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        findings = [asdict(one) | {"advice": one.advice} for one in self.findings]
        return asdict(self) | {"tokens_lost": self.tokens_lost, "findings": findings}


def lint(requests: Sequence[LoggedRequest], renderer: Renderer, min_tokens: int) -> Verdict:
    """Compare requests with those before them, as if a cache without bounds had served them.

    Parameters
    ----------
    min_tokens : int
        A request that could share fewer tokens more is none that should share.

    Raises
    ------
    RequestError
        If the model's template refuses one.
    """
    verdict = Verdict(requests=len(requests), min_tokens=min_tokens)
    divergence, prompts = Divergence(WINDOW), []
    places: dict[tuple[object, ...], Finding] = {}
    for request in requests:
        prompt = renderer.render(request)
        prompts.append(prompt)
        verdict.prompt_tokens += len(prompt.tokens)
        shared, likest = divergence.add(prompt.tokens)
        verdict.shared_tokens += shared
        if likest is None:
            continue
        faults = judge(renderer, prompt, prompts[likest], shared)
        if sum(fault.tokens_lost for fault in faults) < min_tokens:
            continue
        for fault in faults:
            place = fault.kinds, fault.role, _skeleton(fault.before)
            finding = places.get(place)
            if finding is None:
                finding = places[place] = Finding(
                    fault.kinds,
                    fault.role,
                    fault.token,
                    fault.token_text,
                    fault.before,
                    fault.after,
                )
            finding.count(fault, request.line, prompts[likest].request.line)
    verdict.unseen_tools = renderer.unseen_tools
    verdict.findings = sorted(places.values(), key=lambda one: -one.tokens_lost)
    for finding in verdict.findings:
        finding.name()
    return verdict


def _skeleton(before: str) -> str:
    """The words before a difference, whatever numbers stand in them."""
    return re.sub(r"\d+", "0", before[-32:])


def print_verdict(verdict: Verdict, console: Console) -> None:
    """What a person reads."""

    def say(text: str | Text) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    whole = max(verdict.prompt_tokens, 1)
    say(
        f"{verdict.requests:,} requests, {verdict.prompt_tokens:,} prompt tokens: "
        f"{verdict.shared_tokens / whole:.1%} can be shared as they are"
    )
    if verdict.unseen_tools:
        say(f"{verdict.unseen_tools:,} have tools, which this model's template does not show.")
    if not verdict.findings:
        say(
            "Nothing keeps prompts that should share from sharing, or it costs each less than "
            f"--min-tokens ({verdict.min_tokens})."
        )
        return
    could = (verdict.shared_tokens + verdict.tokens_lost) / whole
    say(f"{could:.1%} if it were not for what follows ({verdict.tokens_lost:,} tokens):")
    for number, finding in enumerate(verdict.findings, 1):
        say("")
        for line in _lines(number, finding):
            say(line)


def _lines(number: int, finding: Finding) -> list[str | Text]:
    place = f"in a {finding.role} message" if finding.role else "in the prompt"
    mean, rest = divmod(finding.tokens_lost, finding.requests)
    each = f"about {finding.tokens_lost / finding.requests:,.0f}" if rest else f"{mean:,}"
    shown = [_short(value) for value in dict.fromkeys(finding.values)][:SHOWN_VALUES]
    more = "" if len(set(finding.values)) <= SHOWN_VALUES else ", …"
    words = Text("   …" + _flat(finding.before[-SHOWN_CHARACTERS:]))
    words.append(_flat(finding.values[1])[:SHOWN_CHARACTERS] or "␣", style="bold red")
    words.append(_flat(finding.after[:SHOWN_CHARACTERS]) + "…")
    return [
        Text(f"{number}. {' and '.join(finding.kinds)} {place}", style="bold"),
        f"   token {finding.token:,} {finding.token_text!r} of line {finding.lines[0]}, "
        f"against line {finding.earlier_lines[0]}",
        words,
        f"   {', '.join(shown)}{more}",
        f"   {finding.requests:,} requests recomputed {each} tokens each, "
        f"{finding.tokens_lost:,} in all",
        f"   {finding.advice}",
    ]


def _flat(text: str) -> str:
    text = text.replace("\n", "⏎").replace("\t", "⇥")
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def _short(value: str) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
