"""Traces: requests that share prefixes as recorded ones did, with tokens made to fit.

What a trace keeps of a request is when it came, how long it was, and how much of which earlier
prompt it repeats. The tokens that it does not repeat are numbers that occur nowhere else, so two
requests share exactly what they shared when they were recorded. Two forms are read:

- a line of header, then ``[milliseconds, session, parent, shared, prompt tokens, output tokens,
  category]`` a line, as in this repository's ``benchmarks/traces``;
- an object with ``timestamp`` (milliseconds), ``input_length``, ``output_length`` and ``hash_ids``
  a line, as Mooncake's: equal ids are equal blocks behind equal blocks.
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

from radixkv.errors import RequestError

Tokens = npt.NDArray[np.int32]


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
    at_s : float
        When it came, in seconds from the trace's beginning.
    output_length : int
    """

    tokens: Tokens
    prompt_length: int
    goes_on: bool
    at_s: float
    output_length: int


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
        for number, (at_ms, _, parent, shared, prompt, output, _) in enumerate(self.rows):
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
            yield TracedRequest(tokens, prompt, number in last_child, at_ms / 1000, output)


@dataclass(frozen=True)
class HashTrace:
    """The rows of a trace that names blocks by hash ids, and its tokens a block."""

    name: str
    unit: int
    rows: list[dict[str, Any]]

    def requests(self) -> Iterator[TracedRequest]:
        """In order of arrival."""
        number_of: dict[Any, int] = {}
        last = {id_: place for place, row in enumerate(self.rows) for id_ in row["hash_ids"]}
        for place, row in enumerate(self.rows):
            ids, length = row["hash_ids"], row["input_length"]
            blocks = np.array([number_of.setdefault(id_, len(number_of)) for id_ in ids], np.int32)
            inside = np.arange(self.unit, dtype=np.int32)
            tokens = (blocks[:, None] * self.unit + inside).ravel().astype(np.int32)
            goes_on = any(last[id_] > place for id_ in ids)
            at_s, output = row["timestamp"] / 1000, row["output_length"]
            yield TracedRequest(tokens[:length], length, goes_on, at_s, output)


def read_trace(path: Path, limit: int | None = None) -> Trace | HashTrace:
    """A trace from a file, gzipped if its name ends so, or its first ``limit`` requests.

    Raises
    ------
    RequestError
        If a line has another form; it is named.
    """
    name = path.name.partition(".")[0]
    rows: list[Any] = []
    header: dict[str, Any] | None = None
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if limit is not None and len(rows) == limit:
                break
            try:
                row = json.loads(line)
                if number == 1 and isinstance(row, dict) and "unit" in row:
                    header = row
                    continue
                _check(row, len(rows), header is not None)
            except (ValueError, KeyError, TypeError) as error:
                reason = f"no request of a trace ({type(error).__name__}: {error})"
                raise RequestError(f"{path}, line {number}: {reason}") from error
            rows.append(row)
    if not rows:
        raise RequestError(f"{path} holds no requests")
    if header is None:
        return HashTrace(name, _unit_of(rows, path), rows)
    return Trace(header.get("name", name), header["unit"], header["outputs_known"], rows)


def _check(row: Any, number: int, listed: bool) -> None:
    if listed:
        _, _, parent, shared, prompt, output, _ = row
        if not -1 <= parent < number:
            raise ValueError(f"its parent is {parent}, which is no earlier request")
    else:
        shared, prompt, output = 0, row["input_length"], row["output_length"]
        row["timestamp"] / 1000
        if not isinstance(row["hash_ids"], list):
            raise ValueError("hash_ids is no list")
    if prompt < 1 or shared < 0 or output < 0:
        raise ValueError("a length is too small")


def _unit_of(rows: list[dict[str, Any]], path: Path) -> int:
    """Tokens a block: the power of two with which all prompts have as many blocks as ids."""
    fitting = [
        unit
        for unit in (1 << power for power in range(15))
        if all(-(-row["input_length"] // unit) == len(row["hash_ids"]) for row in rows)
    ]
    if not fitting:
        raise RequestError(f"{path}: with no block size do input_length and hash_ids agree")
    return fitting[-1]
