"""Every planted bug is found; without one, nothing is.

Each bug is applied to a copy of the package; its killer runs in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from planted import MACHINE, PLANTED, Planted

import radixkv

ROOT = Path(__file__).parents[2]
CACHE_TESTS = ROOT / "tests" / "cache"
PACKAGE = Path(radixkv.__file__).parent
EXAMPLES = 200
SECONDS = 100

RUN_MACHINE = f"""
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from machine import CacheMachine
run_state_machine_as_test(CacheMachine, settings=settings(
    max_examples={EXAMPLES}, stateful_step_count=60, deadline=None, derandomize=True,
    database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)))
"""


def copy_package(target: Path) -> Path:
    """Only what the cache needs, so that nothing else can be imported by mistake."""
    package = target / "radixkv"
    shutil.copytree(
        PACKAGE / "cache", package / "cache", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("__init__.py", "config.py", "errors.py", "folders.py", "compiled.py"):
        shutil.copy(PACKAGE / name, package / name)
    return package / "cache"


def run_killer(folder: Path, *killers: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(folder), str(CACHE_TESTS)]))
    if killers == (MACHINE,):
        command = [sys.executable, "-c", RUN_MACHINE]
    else:
        options = ["-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
        tests = [str(CACHE_TESTS / killer) for killer in killers]
        command = [sys.executable, "-m", "pytest", *options, *tests]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
    )


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_bug_is_found(planted: Planted, tmp_path: Path) -> None:
    path = copy_package(tmp_path) / planted.file
    source = path.read_text()
    assert source.count(planted.old) == 1, "the patch does not fit any more"
    path.write_text(source.replace(planted.old, planted.new))
    try:
        done = run_killer(tmp_path, planted.killer)
    except subprocess.TimeoutExpired:
        return  # a bug that never ends is found as well
    assert done.returncode == 1, f"survived {planted.killer}:\n{done.stdout}{done.stderr}"
    assert "ImportError" not in done.stderr
    assert "SyntaxError" not in done.stderr


def test_without_a_bug_nothing_is_found(tmp_path: Path) -> None:
    copy_package(tmp_path)
    where = "import radixkv.cache; print(radixkv.cache.__file__)"
    environment = dict(os.environ, PYTHONPATH=str(tmp_path))
    command = [sys.executable, "-c", where]
    found = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith(str(tmp_path)), "the tests would not see the planted bugs"
    assert run_killer(tmp_path, MACHINE).returncode == 0
    named = sorted({planted.killer for planted in PLANTED} - {MACHINE})
    assert run_killer(tmp_path, *named).returncode == 0


def test_there_are_enough() -> None:
    assert len({planted.name for planted in PLANTED}) == len(PLANTED) >= 25
