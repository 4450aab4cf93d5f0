"""The kernels compile for real GPUs, without spills and with 16-byte accesses; no GPU is needed."""

import json
import os
import subprocess
import sys

import pytest
from radixkv_kernels import report

TARGETS = ["sm_80", "sm_90", "sm_100", "gfx942"]
# Every kernel, dtype, head size and feature is in one of these.
PLAIN = [
    *("write bf16", "write fp32 to bf16", "write bf16 to fp8e4nv", "write fp16 to fp8e5, scales"),
    *("write bf16 to i8, scales", "copy i16", "merge bf16", "merge fp32"),
]
ATTENTION = [
    "attend bf16, D 64, 16 rows, order, ALiBi",
    "attend fp16, D 64, many rows, chunk",
    "attend bf16, D 128, 16 rows",
    "attend bf16, D 128, many rows, window, sinks, LSE",
    "attend bf16, D 80, 16 rows, bidirectional",
    "attend bf16, D 256, 16 rows, window, softcap",
    "attend bf16, D 192/128, many rows",
    "attend bf16, D 512, many rows",
    "attend fp32, D 80, 16 rows, softcap",
    "attend bf16 over fp8e4nv, D 128, 16 rows",
    "attend fp16 over fp8e5, D 64, 16 rows",
    "attend bf16 over i8, D 128, many rows",
]


def run(*arguments, **environment):
    # Not in this process: under the interpreter @triton.jit leaves nothing to compile.
    inherited = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "radixkv_kernels.report", *arguments],
        env=inherited | environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    done = run("--json", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture
def record(records, variant, target):
    # The names of the plain ones go on with their sizes.
    (found,) = (
        record
        for record in records
        if record["target"] == target
        and (record["variant"] == variant or record["variant"].startswith(f"{variant}, D"))
    )
    return found


def test_nothing_was_left_out(records):
    assert {record["target"] for record in records} == set(TARGETS)
    assert len(records) == len(TARGETS) * len(PLAIN + ATTENTION)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", PLAIN + ATTENTION)
def test_fits(record, variant, target):
    assert record["registers"] > 0
    assert record["spills"] == 0
    assert record["shared"] <= record["shared_limit"]
    assert record["shared"] > 0 or variant in PLAIN


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", ATTENTION)
def test_two_tiles_of_keys_and_values_in_flight(record, variant, target):
    # Where two would not fit one is in flight while another is computed on.
    one = (variant, target) == ("attend bf16, D 512, many rows", "gfx942")
    assert record["buffers"] >= 2 - one
    # What a buffer takes, of keys and of values, times the buffers: nothing was optimised away.
    tile_bytes = record["tile"]["tokens"] * record["tile_bytes"]
    assert record["shared"] >= record["buffers"] * tile_bytes


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", ATTENTION)
def test_keys_and_values_come_sixteen_bytes_at_a_time(record, variant, target):
    tile, lanes = record["tile"], 64 if target == "gfx942" else 32
    per_thread = tile["tokens"] * record["tile_bytes"] / (16 * lanes * tile["warps"])
    if " over " in variant and target != "gfx942":
        # NVIDIA's shared layout for a small tile of 8-bit values takes eight bytes at a time.
        assert record["wide"] + record["narrow"] / 2 >= per_thread
        assert record["wide"] > 0
    else:
        assert record["wide"] >= per_thread
        assert record["narrow"] == 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("variant", "least"),
    [
        ("write bf16", 4),
        # What is read; 8 bits are half of that, and so is what a thread stores at a time.
        ("write bf16 to fp8e4nv", 2),
        ("write fp16 to fp8e5, scales", 2),
        ("write bf16 to i8, scales", 2),
        *(("copy i16", 2), ("merge bf16", 2), ("merge fp32", 2)),
    ],
)
def test_sixteen_bytes_at_a_time(record, variant, target, least):
    assert record["wide"] >= least


@pytest.mark.parametrize("target", TARGETS[:3])
@pytest.mark.parametrize("variant", ["write fp32 to bf16", "merge bf16", ATTENTION[2]])
def test_rounds_to_nearest(record, variant, target):
    assert record["rounds"] > 0


def test_the_table_has_a_line_for_each_record(records):
    lines = report.table(records).splitlines()
    assert len(lines) == 1 + len(records)
    for line, record in zip(lines[1:], records, strict=True):
        assert line.startswith(record["variant"])
        assert f" {record['registers']} " in line
        assert record["target"] in line


def test_says_so_under_the_interpreter():
    done = run("copy", TRITON_INTERPRET="1")
    assert done.returncode != 0
    assert "kernels cannot be compiled under TRITON_INTERPRET=1: unset it" in done.stderr
