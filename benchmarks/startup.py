"""How long from starting Python to the first token?

    python benchmarks/startup.py [--short] [--engines radixkv,vllm,...] [--turns 3]

Each engine is started in a process of its own, loads the model and answers one request with one
token; then the process ends. Where the files come from is what the machine has in memory: an
untimed start comes before the timed ones (not with ``--short``). What is left to compile is each
engine's own affair; vLLM keeps its compiled code for the next start, and that is what a later turn
then measures.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import plots
import serving
from measure import print_head, print_table, write_json
from peers.engines import ENGINES, Setting, on_cores, start
from peers.process import PeerError
from serving import Run, Texts

PARTS = ("to_loaded_s", "to_first_token_s")


def start_once(name: str, setting: Setting, prompt: list[int]) -> dict[str, Any]:
    """Seconds from the start of the process, and what the engine said."""
    begin = time.perf_counter()
    process, said = start(name, setting)
    try:
        loaded = time.perf_counter()
        reply = Run(1)(process, [prompt])
        done = time.perf_counter()
    finally:
        process.close()
    return {
        "to_loaded_s": loaded - begin,
        "load_s": said["wall_s"],
        "to_first_token_s": done - begin,
        "peak_mib": reply["peak_mib"],
    }


def measure(
    names: list[str], setting: Setting, prompt: list[int], turns: int, warm: bool
) -> dict[str, dict[str, Any]]:
    """Each engine's turns, in turn; or why it does not start."""
    found: dict[str, dict[str, Any]] = {name: {"turns": []} for name in names}
    for turn in range(-1 if warm else 0, turns):
        for name in names:
            if "failure" in found[name]:
                continue
            try:
                once = start_once(name, setting, prompt)
            except PeerError as error:
                found[name]["failure"] = str(error)
                continue
            if turn >= 0:
                found[name]["turns"].append(once)
    return found


def median_of(kept: dict[str, Any], part: str) -> float | None:
    """The median over turns; None if there was none."""
    return statistics.median(each[part] for each in kept["turns"]) if kept["turns"] else None


def report(options: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    """Table, JSON and plot."""
    print_head()
    ours = median_of(found["radixkv"], "to_first_token_s")
    rows: list[list[Any]] = []
    for name, kept in found.items():
        loaded, first = (median_of(kept, part) for part in PARTS)
        if loaded is None or first is None:
            continue
        ratio = f"{first / ours:.2f}" if ours else "-"
        peak = max(each["peak_mib"] for each in kept["turns"])
        rows.append([ENGINES[name].title, f"{loaded:.2f}", f"{first:.2f}", ratio, peak])
    head = ["seconds from the start", "loaded", "first token", "ours is x faster", "peak MiB"]
    print_table(f"Start, {options.dtype}, {options.threads} threads", head, rows)
    serving.print_failures(found)
    engines = {
        name: {"failure": kept["failure"]} if "failure" in kept else {"wall_s": first}
        for name, kept in found.items()
        if "failure" in kept or (first := median_of(kept, "to_first_token_s")) is not None
    }
    write_json(options.output, found, engines=engines)
    if options.plot is not None:
        draw(found, options.plot)
    serving.fail_without_ours(found["radixkv"])


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Seconds until the first token."""
    series = {
        ENGINES[name].title: [median_of(kept, "to_first_token_s")] for name, kept in found.items()
    }
    plots.bars(path, "From starting Python to the first token", "seconds", [""], series)


def main() -> None:
    parser = serving.parser_of(__doc__, turns=3)
    options = parser.parse_args()
    if options.short:
        options.turns = 1
    folder = serving.model_folder(options)
    prompt = Texts(folder).question(0)
    setting = Setting(
        model=str(folder), dtype=options.dtype, threads=options.threads, max_len=256, max_seqs=1
    )
    with on_cores(options.threads):
        names = serving.engines_of(options)
        found = measure(names, setting, prompt, options.turns, warm=not options.short)
    report(options, found)


if __name__ == "__main__":
    main()
