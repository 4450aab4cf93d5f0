"""What the benchmarks share: timing, the machine's name, tables, JSON."""

from __future__ import annotations

import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.cache import IS_COMPILED

PACKAGES = ("numpy", "sortedcontainers", "xxhash", "torch", "transformers")


def machine() -> dict[str, str]:
    """Processor, system and versions, for the head of a table."""
    model = platform.processor() or "unknown processor"
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    found = {"processor": model, "system": platform.system(), "python": platform.python_version()}
    found["cache"] = "compiled" if IS_COMPILED else "not compiled"
    return found | {name: version(name) for name in PACKAGES}


def best(runs: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """The shortest time of each request over several equal runs: what others' load did not touch.

    float64 (runs, requests) -> float64 (requests,)
    """
    return np.min(np.stack(runs), axis=0)


@dataclass(frozen=True)
class Timing:
    """Seconds of several runs of one thing."""

    wall: tuple[float, ...]
    cpu: tuple[float, ...]

    @property
    def median_wall(self) -> float:
        return statistics.median(self.wall)

    @property
    def median_cpu(self) -> float:
        return statistics.median(self.cpu)


def in_turn(runs: dict[str, Callable[[], object]], turns: int) -> dict[str, Timing]:
    """Run each thing once a turn, one after the other, so that the machine's drift hits all."""
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            run()
            wall[name].append(time.perf_counter() - wall_start)
            cpu[name].append(time.process_time() - cpu_start)
    return {name: Timing(tuple(wall[name]), tuple(cpu[name])) for name in runs}


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Plain text, columns as wide as they must be."""
    cells = [list(head)] + [
        [f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    print(f"\n{title}")
    for number, row in enumerate(cells):
        line = [row[0].ljust(widths[0])]
        line += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(line))
        if not number:
            print("  ".join("-" * width for width in widths))


def command_line() -> str:
    """How this benchmark was started, as it would be typed in the repository's root."""
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def print_head() -> None:
    """The machine, the versions, and the command; what stands above every table."""
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(command_line())


def write_json(path: Path | None, results: dict[str, Any], **more: Any) -> None:
    """Write ``command``, ``machine``, ``more`` and ``results`` as JSON, if a path is given.

    `check_results` says what must be there.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    written = {"command": command_line(), "machine": machine(), **more, "results": results}
    check_results(written)
    path.write_text(json.dumps(written, indent=2) + "\n")
    print(f"\nwritten to {path}")


def check_results(written: Any) -> None:
    """Check what a benchmark has written: who reads the figures later must know what they are of.

    Raises
    ------
    ValueError
        Naming what is missing.
    """
    command, machine_, results = (written.get(key) for key in ("command", "machine", "results"))
    if not isinstance(command, str) or not command.startswith("python "):
        raise ValueError(f"no command by which this was measured: {command!r}")
    if not isinstance(machine_, dict) or not {"processor", "python", "numpy"} <= machine_.keys():
        raise ValueError(f"no machine on which this was measured: {machine_!r}")
    if not isinstance(results, dict) or not results:
        raise ValueError("no results")
    for engine, facts in written.get("engines", {}).items():
        if not facts.keys() & {"failure", "wall_s"}:
            raise ValueError(f"{engine} neither ran nor is said why not")
