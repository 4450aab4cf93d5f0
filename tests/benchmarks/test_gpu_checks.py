"""What is run first on a GPU: in the interpreter, and that it notices what is wrong."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
import gpu_path  # noqa: F401

if torch.cuda.is_available():
    pytest.skip("benchmarks/gpu_checks.py runs this on a GPU", allow_module_level=True)

import gpu_checks
import gpu_scenes
from gpu_checks import Part, run_part

import radixkv.attention


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.interpreted
def test_small(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_checks.small(tiny=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert sum("torch.float8_e4m3fn" in line for line in lines) == 4
    # A prefix of 96 and three rows of 9; without sharing, three of 105.
    assert sum("(123, 315)" in line for line in lines) == 4


@pytest.mark.interpreted
def test_small_notices_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = gpu_scenes.paged_attention

    def wrong(*arguments: Any, **keywords: Any) -> Any:
        return kernel(*arguments, **keywords | {"scale": 1.1 * keywords["scale"]})

    monkeypatch.setattr(gpu_scenes, "paged_attention", wrong)
    with pytest.raises(ArithmeticError, match="an error of"):
        gpu_checks.small(tiny=True)


@pytest.mark.interpreted
def test_invariant(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_checks.invariant(tiny=True)
    assert capsys.readouterr().out.splitlines() == [
        "torch.float32, 3 rows, 7 queries: the same bits",
        "torch.bfloat16, 3 rows, 7 queries: the same bits",
    ]


@pytest.mark.interpreted
def test_invariant_notices_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = radixkv.attention.CostModel

    def cuts_as_it_likes(*, split: int, **keywords: int) -> Any:
        return cost(programs=64, **keywords)

    monkeypatch.setattr(radixkv.attention, "CostModel", cuts_as_it_likes)
    with pytest.raises(ArithmeticError, match="other bits"):
        gpu_checks.invariant(tiny=True)


@pytest.mark.interpreted
def test_engine(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_checks.engine(tiny=True)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "graphs False: 2 x 3 tokens as Hugging Face's; 0 replays"
    assert second == "graphs True: 2 x 3 tokens as Hugging Face's; 1 replays"


def test_parts_pass_and_fail() -> None:
    found = run_part(Part([python("print('a')"), python("print('b')")], 60, {}), 60)
    assert found["status"] == "passed"
    assert found["output"] == "a\nb\n"
    found = run_part(
        Part([python("print('a')"), python("exit(3)"), python("print('c')")], 60, {}), 60
    )
    assert (found["status"], found["output"]) == ("failed (3)", "a\n")
    settings = {"FOR_THE_PART": "yes"}
    found = run_part(
        Part([python("import os; print(os.environ['FOR_THE_PART'])")], 60, settings), 60
    )
    assert found["output"] == "yes\n"
    assert run_part(Part([["nothing"]], 60, {}, "no GPU"), 60) == {
        "status": "left out",
        "reason": "no GPU",
    }


def test_a_part_that_hangs_is_ended_with_all_that_it_started() -> None:
    child = "import time; print('begun', flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    begin = time.monotonic()
    found = run_part(Part([python(parent)], 60, {}), 5)
    # Its output ends only when nobody holds it any more.
    assert time.monotonic() - begin < 30
    assert (found["status"], found["output"]) == ("out of time", "begun\n")


def test_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {
        "good": Part([python("print('fine')")], 60, {}),
        "bad": Part([python("print('why'); exit(1)")], 60, {}),
        "absent": Part([], 60, {}, "needs a GPU"),
    }
    monkeypatch.setattr(gpu_checks, "parts_of", lambda tiny, scratch: parts)
    run = partial(gpu_checks.main, ["--output-dir", str(tmp_path)])
    assert run() == 1
    found = json.loads((tmp_path / "gpu_checks_tiny.json").read_text())
    assert {name: part["status"] for name, part in found["parts"].items()} == {
        "good": "passed",
        "bad": "failed (1)",
        "absent": "left out",
    }
    assert found["complete"]
    assert "why\n" in capsys.readouterr().out
    del parts["bad"]
    assert run() == 0
    # What there was no time for was not found to be right.
    assert gpu_checks.main(["--output-dir", str(tmp_path), "--minutes", "0"]) == 1
    with pytest.raises(SystemExit):
        gpu_checks.main(["--output-dir", str(tmp_path), "--parts", "godo"])


def test_what_is_run_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = gpu_checks.parts_of(True, tmp_path)
    assert [name for name, part in parts.items() if not part.missing] == list(gpu_checks.INSIDE)
    monkeypatch.setattr(gpu_checks, "HAS_GPU", True)
    monkeypatch.setattr(gpu_checks, "find_sanitizer", lambda: None)
    parts = gpu_checks.parts_of(False, tmp_path)
    assert [name for name, part in parts.items() if part.missing] == ["memcheck", "racecheck"]
    monkeypatch.setattr(gpu_checks, "find_sanitizer", lambda: "/bin/compute-sanitizer")
    parts = gpu_checks.parts_of(False, tmp_path)
    assert not any(part.missing for part in parts.values())
    (command,) = parts["memcheck"].commands
    assert command[:3] == ["/bin/compute-sanitizer", "--tool", "memcheck"]
    assert parts["memcheck"].settings == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    (command,) = parts["figures"].commands
    assert "--tiny" not in command
    assert command[-2:] == ["--minutes", "0.9"]
    (command,) = parts["kernels"].commands
    assert "tests/kernels" in command
    assert parts["kernels"].settings == {"TRITON_INTERPRET": "0"}


def test_one_command_ends_within_eight_minutes(tmp_path: Path) -> None:
    """Each part is ended at its limit, and together they leave the kernels' tests two minutes."""
    parts = gpu_checks.parts_of(False, tmp_path)
    assert list(parts)[-2:] == ["kernels", "compile"]
    assert {"compile"} == gpu_checks.ONLY_IF_ASKED
    before = sum(part.seconds for part in list(parts.values())[:-2])
    assert before + 120 <= 60 * gpu_checks.MINUTES
    # What is begun at the last moment is ended at once: see `run_part`.
    assert gpu_checks.MINUTES < 8
