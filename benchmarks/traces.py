"""The recorded traces of this folder (`traces/README.md`), by their names."""

from __future__ import annotations

from pathlib import Path

from radixkv.workloads.traces import Trace, TracedRequest, read_trace

__all__ = ["FOLDER", "NAMES", "Trace", "TracedRequest", "load"]

FOLDER = Path(__file__).parent / "traces"
NAMES = ("mooncake_conversation", "mtbench101_chat", "bbh_fewshot", "tot_game24")


def load(name: str, limit: int | None = None) -> Trace:
    """A trace by its name, or its first ``limit`` requests."""
    trace = read_trace(FOLDER / f"{name}.lcp.jsonl.gz", limit)
    assert isinstance(trace, Trace)
    return trace
