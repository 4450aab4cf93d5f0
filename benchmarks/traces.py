"""Real traces: requests that share prefixes as recorded ones did, with tokens made to fit.

What a trace keeps of a request is how long it is and how much of which earlier prompt it repeats
(`traces/README.md`). The tokens that it does not repeat are numbers that occur nowhere else, so two
requests share exactly what they shared when they were recorded.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
FOLDER = Path(__file__).parent / "traces"
NAMES = ("mooncake_conversation", "mtbench101_chat", "bbh_fewshot", "tot_game24")


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request of a trace.

    Attributes
    ----------
    tokens : int32 (num_tokens,)
        The prompt; and the output, where later prompts may repeat it.
    prompt_length : int
    goes_on : bool
        Whether a later request repeats some of it.
    """

    tokens: Tokens
    prompt_length: int
    goes_on: bool


@dataclass(frozen=True)
class Trace:
    """The rows of a trace, and how they are to be read."""

    name: str
    unit: int
    outputs_known: bool
    rows: list[list[Any]]

    def requests(self) -> Iterator[TracedRequest]:
        """In order of arrival. A prompt is forgotten once nobody repeats it any more."""
        last_child = {row[2]: number for number, row in enumerate(self.rows)}
        alive: dict[int, Tokens] = {}
        fresh = 0
        for number, (_, _, parent, shared, prompt, output, _) in enumerate(self.rows):
            length = prompt + (output if self.outputs_known else 0)
            repeated = (
                alive[parent][: min(shared, length)] if parent >= 0 else np.zeros(0, np.int32)
            )
            new = length - len(repeated)
            tokens = np.concatenate((repeated, np.arange(fresh, fresh + new, dtype=np.int32)))
            fresh += new
            if number in last_child:
                alive[number] = tokens
            if last_child.get(parent) == number and parent >= 0:
                del alive[parent]
            yield TracedRequest(tokens, prompt, number in last_child)


def load(name: str, limit: int | None = None) -> Trace:
    """A trace by its name, or its first ``limit`` requests."""
    with gzip.open(FOLDER / f"{name}.lcp.jsonl.gz", "rt") as file:
        header = json.loads(file.readline())
        rows = [json.loads(line) for line in file]
    return Trace(header["name"], header["unit"], header["outputs_known"], rows[:limit])
