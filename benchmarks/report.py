"""What every benchmark prints and writes: machine, versions, command, a table, JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGES = ("radixkv", "torch", "transformers", "numpy", "xxhash", "sortedcontainers")


def environment() -> dict[str, Any]:
    """The machine, the versions and the command that made a result."""
    model = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else ""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": versions,
        "command": "python " + " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
    }


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


def report(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    output: Path | None = None,
    **details: Any,
) -> None:
    """Print the table with what made it; write it as JSON if there is somewhere to."""
    rows = [list(row) for row in rows]
    made_by = environment()
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(_shown(value) for value in row))
    console = Console() if sys.stdout.isatty() else Console(width=140)
    console.print(table)
    versions = ", ".join(f"{name} {version}" for name, version in made_by["versions"].items())
    console.print(
        f"{made_by['cpu']}, {made_by['cores']} cores, load {made_by['load']:.1f}; "
        f"Python {made_by['python']}, {versions}\n$ {made_by['command']}",
        highlight=False,
    )
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        result = {"title": title, "columns": list(columns), "rows": rows, **details}
        output.write_text(json.dumps({**result, "environment": made_by}, indent=1) + "\n")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
