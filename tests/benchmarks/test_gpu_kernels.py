"""The kernels' benchmark from end to end, in the interpreter, and that it notices what is wrong."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
import gpu_path  # noqa: F401

if torch.cuda.is_available():
    pytest.skip("benchmarks/gpu_checks.py runs this on a GPU", allow_module_level=True)

import gpu
import gpu_kernels
import gpu_moves
import gpu_rivals
import gpu_scenes
import gpu_tune
from gpu_scenes import Heads, Problem, make_pool, make_rows, never_sharing
from radixkv_kernels import Tile

from radixkv.attention import CostModel, Row, TritonBackend

HEADS = Heads(4, 1, 16)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def run(folder: Path, *arguments: str, name: str = "gpu_kernels_tiny") -> tuple[int, Any]:
    status = gpu_kernels.main([*arguments, "--output-dir", str(folder)])
    return status, json.loads((folder / f"{name}.json").read_text())


@pytest.mark.interpreted
def test_everything_runs_and_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run(tmp_path)
    assert status == 0
    assert found["complete"]
    assert found["environment"]["device"] == "none: Triton's interpreter"
    assert found["environment"]["torch"].startswith(torch.__version__.split("+")[0])
    assert found["command"].startswith("python benchmarks/gpu_kernels.py --output-dir")
    for part in gpu_kernels.PARTS:
        assert found[part], part
        for record in found[part]:
            assert "failed" not in record, record
            assert record["us"] > 0
            assert record["time"]["by"] == "interpreter"
    (decode,) = found["decode"]
    assert decode["launches"] == 1
    assert 0 < decode["error"] < 1e-2
    # Two rows of 40 keys and values; queries and outputs of four heads.
    assert decode["bytes"] == 2 * (2 * 40 * 16 * 2) + 2 * (2 * 4 * 16 * 2)
    (shared,) = found["shared"]
    assert shared["kv_read"] == (96 + 4 * 9) / (4 * 105)
    assert (shared["launches"], shared["unshared"]["launches"]) == (2, 1)
    assert shared["x_unshared"] == shared["unshared"]["us"] / shared["us"]
    sdpa = shared["rivals"]["sdpa"]
    assert sdpa["us"] == min(sdpa[way]["us"] for way in ("enable_gqa", "group as queries"))
    assert 0 < sdpa["enable_gqa"]["error"] < 1e-2
    assert shared["rivals"]["flashinfer"]["not_there"]
    assert found["flex"][0]["rivals"]["flex"]["way"] == "not compiled"
    assert 0 < found["prefill"][0]["rivals"]["sdpa"]["causal_lower_right"]["error"] < 1e-2
    assert [move["what"] for move in found["moves"]] == [
        "write_kv, 9 tokens",
        "copy_blocks, 3 blocks",
    ]
    # One token of nine, and the first, have no slot.
    assert found["moves"][0]["bytes"] == 2 * 2 * 7 * 16 * 2
    said = capsys.readouterr().out
    assert said.startswith("no GPU: tiny sizes, in Triton's interpreter\n")
    assert "6 points timed, all within tolerance; 0 failed" in said


@pytest.mark.interpreted
def test_a_kernel_that_is_wrong_fails_its_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = gpu_scenes.paged_attention

    def wrong(query: Any, keys: Any, values: Any, tables: Any, work: Any, *rest: Any, **etc: Any):
        kernel(query, keys, values, tables, work, *rest, **etc)
        rest[1][-1] *= 1.05

    monkeypatch.setattr(gpu_scenes, "paged_attention", wrong)
    status, found = run(tmp_path, "--parts", "decode", "moves")
    assert status == 1
    assert found["decode"][0]["failed"].startswith("ArithmeticError: an error of 0.04")
    assert "us" not in found["decode"][0]
    assert all("us" in move for move in found["moves"])


@pytest.mark.interpreted
def test_what_stops_halfway_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_kernels, "PARTS", {"decode": gpu_kernels.decode, "prefill": stopped})
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--parts", "decode", "prefill")
    found = json.loads((tmp_path / "gpu_kernels_tiny.json").read_text())
    assert not found["complete"]
    assert found["decode"][0]["us"] > 0


def test_out_of_time(tmp_path: Path) -> None:
    status, found = run(tmp_path, "--minutes", "0")
    assert status == 0
    assert [found[part][0]["left_out"] for part in gpu_kernels.PARTS] == ["out of time"] * 5


def test_a_point_too_large_for_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels.Bench, "_pool_tokens", lambda self, heads: 16 * 5)
    status, found = run(tmp_path, "--parts", "decode", "moves")
    assert status == 0
    assert found["decode"][0]["left_out"] == "6 blocks are needed, this card has room for 5"
    assert all("us" in move for move in found["moves"])


# --- Problems. ---


@pytest.mark.interpreted
def test_the_error_of_an_output() -> None:
    backend = TritonBackend(make_pool(HEADS, 200))
    problem = Problem(backend, make_rows(backend.store, batch=3, own=20), HEADS)
    assert problem.error() == math.inf
    problem.run()
    assert 0 < problem.check() < 1e-2
    off = problem.out.clone()
    off[2] *= 0.9
    assert problem.error(off) == pytest.approx(0.1, abs=0.01)
    off[2] = problem.out[1]
    with pytest.raises(ArithmeticError, match=r"of which 0\.01 is tolerated"):
        problem.check(off)
    off[2, 0, 0] = torch.nan
    assert problem.error(off) == math.inf


def test_flops_and_rows() -> None:
    backend = TritonBackend(make_pool(HEADS, 400))
    rows = make_rows(backend.store, batch=2, own=20, queries=3, prefix=32)
    assert [(row.start, row.num_queries, len(row.table)) for row in rows] == [(49, 3, 4)] * 2
    assert rows[0].table[:2].tolist() == rows[1].table[:2].tolist()
    assert len({*rows[0].table.tolist(), *rows[1].table.tolist()}) == 6
    problem = Problem(never_sharing(backend), rows, HEADS)
    assert problem.kv_tokens == (104, 104)
    # Keys that are seen by each query, twice a multiplication and an addition each, four heads.
    assert problem.flops == 2 * (50 + 51 + 52) * 2 * 2 * 16 * 4


def test_pages_for_flashinfer() -> None:
    rows = [
        Row(np.array(table, np.int32), stop - 1, 1)
        for table, stop in ([[7, 3, 9], 33], [[5, 4], 32])
    ]
    bounds, blocks, last = gpu_rivals.pages(rows, 0)
    assert bounds.tolist() == [0, 3, 5]
    assert blocks.tolist() == [7, 3, 9, 5, 4]
    assert last.tolist() == [1, 16]
    bounds, blocks, last = gpu_rivals.pages(rows, 1)
    assert (bounds.tolist(), blocks.tolist()) == ([0, 2, 3], [3, 9, 4])
    assert last.dtype is torch.int32


def test_moves_that_went_wrong_are_noticed() -> None:
    store = make_pool(HEADS, 16 * 8)
    for move, touched in (
        (gpu_moves.writing(store, 20), store.values[0]),
        (gpu_moves.copying(store, 3), store.keys[0]),
    ):
        assert not move.is_right()
        move.run()
        assert move.is_right()
        touched += 1
        touched[::2] -= 1
        assert not move.is_right()


# --- Tiles. ---


def times_of(best: Tile) -> Any:
    """A device on which every number that differs from the best tile's costs a fifth."""

    def time(store: Any, problems: Any, heads: Any, tile: Tile, clock: Any) -> float:
        if tile.stages == 4:
            raise RuntimeError("out of resource: shared memory")
        fields = ("tokens", "warps", "stages", "registers", "rows")
        return 100.0 * 1.2 ** sum(getattr(tile, name) != getattr(best, name) for name in fields)

    return time


def tuned(few_rows: bool) -> Any:
    entry = gpu_tune.Entry(2, few_rows, HEADS, ({"batch": 2, "own": 40},))
    return gpu_tune._tuned(entry, gpu.Clock(), gpu.Deadline(1), gpu_tune.CHOICES)


def test_the_best_tile_is_found_one_number_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tune, "target_of", lambda _: "sm_90")
    monkeypatch.setattr(gpu_tune, "_time", times_of(Tile(128, 128, 8, 2, 168)))
    found = tuned(few_rows=False)
    assert found["paste"] == "    (2, False, 64): Tile(128, 128, 8, 2, 168),"
    assert found["table"] == "Tile(64, 64, 4, 3)"
    assert found["speed_up"] == pytest.approx(1.2**5)
    assert any("stages" in name or ", 4)" in name for name in found["refused"])
    # Sixteen rows stay sixteen.
    assert tuned(few_rows=True)["paste"] == "    (2, True, 64): Tile(16, 128, 8, 2, 168),"


def test_the_cost_models_constants_come_out_of_what_was_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A made-up card: 64 keys a partial, 70 to start a program, a microsecond a key."""

    def us(backend: TritonBackend, rows: list[Any], heads: Heads, clock: Any) -> float:
        own, prefix = rows[0]
        if backend.cost.programs == 0:
            programs = TritonBackend(backend.store).cost.programs
            return -(-len(rows) * heads.kv // programs) * (70.0 + own)
        if backend.cost.per_item:
            return len(rows) * (own + prefix)
        return len(rows) * own + prefix + 64 * len(rows)

    def rows_of(store: Any, *, batch: int, own: int, prefix: int = 0) -> list[Any]:
        return [(own, prefix)] * batch

    monkeypatch.setattr(gpu_tune, "_us", us)
    monkeypatch.setattr(gpu_tune, "make_rows", rows_of)
    monkeypatch.setattr(gpu_tune, "_store", lambda entry: make_pool(HEADS, 400))
    found = gpu_tune._sharing(gpu.Clock(), gpu.Deadline(1), tiny=False)
    assert {rows: it["pays_from"] for rows, it in found["rows"].items()} == {
        "2": 128,
        "8": 96,
        "32": 96,
        "128": 96,
    }
    assert found["rows"]["2"]["per_query"] == 64
    assert gpu_tune._start(gpu.Clock(), gpu.Deadline(1), tiny=False)["keys"] == 70
    assert gpu_tune._start(gpu.Clock(), gpu.Deadline(0), tiny=False)["left_out"] == "out of time"


def test_a_tile_that_is_hardly_faster_is_not_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    def hardly(store: Any, problems: Any, heads: Any, tile: Tile, clock: Any) -> float:
        return 99.0 if tile.warps == 8 else 100.0

    monkeypatch.setattr(gpu_tune, "target_of", lambda _: "sm_90")
    monkeypatch.setattr(gpu_tune, "_time", hardly)
    found = tuned(few_rows=True)
    assert (found["paste"], found["speed_up"]) == (
        "    (2, True, 64): Tile(16, 64, 4, 3, 128),",
        1.0,
    )
    assert len(found["tried_us"]) > 5


@pytest.mark.interpreted
def test_tuning_runs(tmp_path: Path) -> None:
    status, found = run(tmp_path, "--tune", name="gpu_kernels_tune_tiny")
    assert status == 0
    assert found["target"] == "cpu"
    (entry,) = found["tiles"]
    assert set(entry["tried_us"]) == {"Tile(16, 16, 4, 1)", "Tile(16, 32, 4, 1)"}
    assert list(found["programs_a_processor"][0]["us"]) == ["1", "2"]


def test_a_backend_that_never_shares() -> None:
    backend = TritonBackend(make_pool(HEADS, 400), cost=CostModel(per_item=0, tile=32))
    rows = make_rows(backend.store, batch=3, own=9, prefix=64)
    assert Problem(backend, rows, HEADS).kv_tokens == (64 + 27, 3 * 73)
    assert Problem(never_sharing(backend), rows, HEADS).kv_tokens == (3 * 73, 3 * 73)
