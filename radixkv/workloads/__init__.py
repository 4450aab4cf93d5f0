"""The demo's workload: one long system prompt, and sixteen conversations about it.

The texts are ours, written for this purpose and shipped under this repository's licence: the
handbook of a public library that does not exist. The prompt has about 1,700 tokens for SmolLM2.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class DemoWorkload:
    """A system prompt that all conversations share, and two user turns for each of them.

    Attributes
    ----------
    system_prompt : str
    questions, follow_ups : tuple of str
        The first and the second user turn of conversation ``i`` are ``questions[i]`` and
        ``follow_ups[i]``.
    """

    system_prompt: str
    questions: tuple[str, ...]
    follow_ups: tuple[str, ...]


def demo_workload() -> DemoWorkload:
    """The workload that ``radixkv demo`` runs, read from the package's own files."""
    folder = resources.files(__name__)
    turns = json.loads((folder / "library_questions.json").read_text(encoding="utf-8"))
    return DemoWorkload(
        system_prompt=(folder / "library_handbook.md").read_text(encoding="utf-8").strip(),
        questions=tuple(turn["question"] for turn in turns),
        follow_ups=tuple(turn["follow_up"] for turn in turns),
    )
