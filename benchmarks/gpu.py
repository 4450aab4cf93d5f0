"""What the GPU benchmarks share: where they run, times on the device, results kept as they come.

To be imported before anything of Triton: without a GPU its interpreter must be chosen first. The
scripts run from a checkout in which nothing was installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT / "kernels", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

# Triton's default for this changes in 3.10, and with it the figures.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
DEVICE = torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else torch.device("cpu")

RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "triton", "transformers", "numpy", "flashinfer-python")

# A timed run is repeated until this many microseconds are spent on it, within these bounds.
ENOUGH_US, FEWEST, MOST = 150_000, 7, 50


def parser_of(description: str, *, minutes: float) -> argparse.ArgumentParser:
    """The arguments that all GPU benchmarks take."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="sizes for the interpreter")
    parser.add_argument("--minutes", type=float, default=minutes, help="begin nothing after this")
    parser.add_argument("--output-dir", type=Path, default=RESULTS, help="where the JSON goes")
    return parser


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options. Without a GPU everything is tiny, which is said."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(given)
    options.given = given
    if not HAS_GPU and not options.tiny:
        options.tiny = True
        print("no GPU: tiny sizes, in Triton's interpreter")
    if options.tiny:
        print("tiny: this shows that everything runs and is right; its times mean nothing")
    return options


def environment() -> dict[str, Any]:
    """Device and versions, for the head of a table."""
    found: dict[str, Any] = {
        "device": "none: Triton's interpreter",
        "system": platform.system(),
        "python": platform.python_version(),
        "commit": _said_by("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
    }
    if HAS_GPU:
        properties = torch.cuda.get_device_properties(DEVICE)
        found |= {
            "device": properties.name,
            "processors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "driver": _said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "cuda": torch.version.cuda or f"HIP {torch.version.hip}",
        }
    return found | {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _said_by(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"


class Report:
    """Results in a file that is whole after every addition, so that a time limit loses nothing."""

    def __init__(self, script: str, options: argparse.Namespace, *, name: str = "") -> None:
        tiny = "_tiny" if options.tiny else ""
        self.path: Path = options.output_dir / f"{name or script}{tiny}.json"
        command = " ".join(["python", f"benchmarks/{script}.py", *options.given])
        self.results: dict[str, Any] = {
            "command": command,
            "environment": environment(),
            "complete": False,
        }
        print(command)
        print(", ".join(f"{key} {value}" for key, value in self.results["environment"].items()))
        self._write()

    def add(self, part: str, record: Any) -> None:
        """One more record of a part."""
        self.results.setdefault(part, []).append(record)
        self._write()

    def set(self, part: str, record: Any) -> None:
        """All there is to say of a part."""
        self.results[part] = record
        self._write()

    def finish(self) -> None:
        self.set("complete", True)
        print(f"\nwritten to {self.path}")

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.results, indent=2) + "\n")
        beside.replace(self.path)


class Deadline:
    """When no part may begin any more."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        """Seconds, negative once it has passed."""
        return self._end - time.monotonic()

    def passed(self, what: str, needs: float = 0.0) -> bool:
        """Whether there are fewer than so many seconds left, which is said."""
        late = self.left <= needs
        if late:
            print(f"out of time, left out: {what}", flush=True)
        return late


@dataclass(frozen=True, slots=True)
class Time:
    """Microseconds of several runs of one thing.

    Attributes
    ----------
    us : float
        The median.
    low, high : float
        The shortest and longest.
    runs : int
    by : str
        "graph": a CUDA graph was played, so that the time is the device's alone; "launches":
        between two events around the call; "interpreter": by the wall clock, and no measurement.
    """

    us: float
    low: float
    high: float
    runs: int
    by: str

    def record(self) -> dict[str, Any]:
        return asdict(self)


class Clock:
    """Times launches with CUDA events; every run starts with nothing of its data in the L2 cache.

    Without a GPU a run is timed once by the wall clock.
    """

    def __init__(self) -> None:
        if HAS_GPU:
            size = 4 * max(torch.cuda.get_device_properties(DEVICE).L2_cache_size, 2**26)
            self._other_data = torch.ones(size // 4, dtype=torch.int32, device=DEVICE)

    def time(self, run: Callable[[], object], *, graph: bool = True) -> Time:
        """How long a thing takes that launches kernels.

        Parameters
        ----------
        run : callable
        graph : bool
            Whether it may be recorded. What cannot be is timed by its launches.
        """
        if not HAS_GPU:
            begin = time.perf_counter()
            run()
            us = 1e6 * (time.perf_counter() - begin)
            return Time(us, us, us, 1, "interpreter")
        run()
        torch.cuda.synchronize()
        play, by = _recorded(run) if graph else (run, "launches")
        first = self._once(play, 3)
        count = int(min(max(ENOUGH_US / max(statistics.median(first), 1.0), FEWEST), MOST))
        times = self._once(play, count)
        return Time(statistics.median(times), min(times), max(times), count, by)

    def _once(self, play: Callable[[], object], count: int) -> list[float]:
        pairs = []
        for _ in range(count):
            # Read, not written: changed lines would be written back in the time of what follows.
            # It also gives the host time to hand the next run over.
            self._other_data.amax()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
            start.record()
            play()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in pairs]


def _recorded(run: Callable[[], object]) -> tuple[Callable[[], object], str]:
    """A thing as a CUDA graph, or as it is if it waits for the device."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        torch.cuda.synchronize()
        print(f"timed by its launches, for it cannot be recorded: {str(error).splitlines()[0]}")
        return run, "launches"
    return graph.replay, "graph"


def copy_bandwidth(clock: Clock, tiny: bool) -> dict[str, float]:
    """What the card moves at best, by torch's own copy; bytes read and written both count."""
    size = 2**20 if tiny else min(2**32, torch.cuda.mem_get_info(DEVICE)[0] // 4)
    source = torch.empty(size // 4, device=DEVICE).normal_()
    target = torch.empty_like(source)
    time_ = clock.time(lambda: target.copy_(source), graph=False)
    if not torch.equal(source, target):
        raise RuntimeError("the card does not copy what it is given")
    return {"bytes": 2 * size, "us": time_.us, "gb_s": 2e-3 * size / time_.us}
