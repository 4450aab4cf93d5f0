"""The kernels compile for real GPUs, without spills and with 16-byte accesses; no GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TARGETS = ["sm_80", "sm_90", "sm_100", "gfx942"]
KERNELS = ["write bf16", "write fp32 to bf16", "copy 16-bit"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    # Not in this process: under the interpreter @triton.jit leaves nothing to compile.
    environment = {
        **{name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"},
        "TRITON_DEFAULT_FP_FUSION": "1",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    script = Path(__file__).with_name("compile_ahead.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_nothing_was_left_out(report):
    assert set(report) == {f"{kernel}, {target}" for kernel in KERNELS for target in TARGETS}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_spills(report, kernel, target):
    assert report[f"{kernel}, {target}"]["spills"] == 0
    assert report[f"{kernel}, {target}"]["shared"] <= 48 * 1024


@pytest.mark.parametrize("target", TARGETS)
def test_sixteen_bytes_at_a_time(report, target):
    assert report[f"write bf16, {target}"]["wide"] >= 4
    assert report[f"copy 16-bit, {target}"]["wide"] >= 2


@pytest.mark.parametrize("target", TARGETS[:3])
def test_rounds_to_nearest(report, target):
    assert report[f"write fp32 to bf16, {target}"]["rounds"] > 0
