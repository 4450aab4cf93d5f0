"""All benchmarks in their short form, on one page.

    python -m benchmarks [--only chat,replay] [--results FOLDER] [--plots] [-- OPTIONS]

Each is a program of its own, run here one after the other; options behind ``--`` go to those that
run a model, like ``-- --engines radixkv,hf --threads 2``. One that fails is named at the end, and
the others run all the same.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent

# Name, options of the short form, and whether it takes those of the programs with a model.
SHORT: dict[str, tuple[tuple[str, ...], bool]] = {
    "control_plane": (("--short",), False),
    "replay": (("--short",), False),
    "waste": (("--short",), False),
    "metadata": (("--short",), False),
    "control_step": (("--short",), False),
    "programs": (("--short",), False),
    "planner": (("--runs", "20"), False),
    "observing": (("--runs", "20"), False),
    "page": (("--runs", "10"), False),
    "serve_overhead": (("--turns", "1", "--streams", "16", "--tokens", "64"), False),
    "memory": (("--prompts", "2", "--scale", "8"), False),
    "step": (("--steps", "3", "--rows", "1,16"), False),
    "scaling": (("--short",), False),
    "quantization": (("--tokens", "256"), False),
    "shared_prompt": (("--turns", "1", "--conversations", "2", "--max-tokens", "8"), False),
    "startup": (("--short",), True),
    "single": (("--short",), True),
    "chat": (("--short",), True),
    "branches": (("--short",), True),
    "no_sharing": (("--short",), True),
}
PLOTS = {"control_plane", "replay", "waste", "startup", "single", "chat", "branches", "no_sharing"}


def command_of(name: str, results: Path | None, plots: bool, model_options: list[str]) -> list[str]:
    """The command that runs one benchmark."""
    options, has_model = SHORT[name]
    command = [sys.executable, str(HERE / f"{name}.py"), *options]
    if results is not None:
        command += ["--output", str(results / f"{name}.json")]
        if plots and name in PLOTS:
            command += ["--plot", str(results / f"{name}.svg")]
    return command + (model_options if has_model else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(SHORT), help="which, by name")
    parser.add_argument("--results", type=Path, help="a folder for JSON, and for plots")
    parser.add_argument("--plots", action="store_true", help="draw them, too (needs --results)")
    parser.add_argument("model_options", nargs="*", metavar="OPTIONS")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in SHORT]:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(SHORT)}")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
        )
    }
    failed = []
    for name in names:
        print(f"\n=== {name} " + "=" * (90 - len(name)), flush=True)
        start = time.monotonic()
        command = command_of(name, options.results, options.plots, options.model_options)
        if subprocess.run(command, env=environment, check=False).returncode:
            failed.append(name)
        print(f"({time.monotonic() - start:.0f} s)", flush=True)
    if failed:
        raise SystemExit(f"\nfailed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
