"""The engine's benchmark from end to end, in the interpreter, and that it notices other tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
import gpu_path  # noqa: F401

if torch.cuda.is_available():
    pytest.skip("benchmarks/gpu_checks.py runs this on a GPU", allow_module_level=True)

import gpu_engine
import gpu_llama
from gpu_engine import Step, Steps, differences


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def run(folder: Path) -> tuple[int, Any]:
    status = gpu_engine.main(["--tiny", "--output-dir", str(folder)])
    return status, json.loads((folder / "gpu_engine_tiny.json").read_text())


@pytest.mark.interpreted
def test_everything_runs_and_graphs_change_no_token(tmp_path: Path) -> None:
    status, found = run(tmp_path)
    assert status == 0
    assert found["complete"]
    records = {(record["engine"], record["workload"]): record for record in found["workloads"]}
    assert len(records) == 3 * 7
    assert not any("failed" in record or "left_out" in record for record in records.values())
    for engine in gpu_engine.ENGINES:
        shared = records[engine, "chat, shared"]
        apart = records[engine, "chat, reads not shared"]
        # The prompts have 32 tokens in common, and 4 each of their own.
        assert shared["cold"]["prefilled"] == apart["cold"]["prefilled"] == 32 + 2 * 4
        assert records[engine, "chat, nothing in common"]["cold"]["prefilled"] == 2 * 36
        assert shared["warm"]["prefilled"] == 0
        assert shared["warm"]["kv_read"] < 0.6
        assert apart["warm"]["kv_read"] == 1.0
        assert records[engine, "sample, 1 x 2"]["warm"]["kv_read"] < 0.8
        assert "warm" not in records[engine, "prefill, 2 x 24"]
        for record in records.values():
            assert record["cold"]["prefill_tokens_s"] > 0
            assert record["cold"]["preemptions"] == 0
            if "warm" in record:
                assert record["warm"]["decode_tokens_s"] > 0
    played = dict.fromkeys(gpu_engine.ENGINES, 0)
    for (engine, workload), record in records.items():
        played[engine] += record.get("warm", {}).get("by_graphs", 0)
        if engine == "graphs" and not workload.startswith("sample"):
            assert record["equal_without_graphs"]
            assert record["equal_rows"] == 2
    assert played["launches"] == 0
    assert played["graphs"] == played["graphs, fp8 cache"] > 0


def only_decodes(self: Any) -> Any:
    return {"decode": (self._random(2, 20), self._greedy, True)}


@pytest.mark.interpreted
def test_a_graph_that_gives_other_tokens_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_engine.Workloads, "all", only_decodes)
    monkeypatch.setattr(gpu_llama._Again, "replay", lambda self: self.out.neg_())
    status, found = run(tmp_path)
    assert status == 1
    without, with_graphs, _ = found["workloads"]
    assert "equal_without_graphs" not in without
    assert not with_graphs["equal_without_graphs"]
    # The last token is the first that a graph gave.
    assert with_graphs["first_difference"] == 2


@pytest.mark.interpreted
def test_a_workload_that_fails_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_one_too_long(self: Any) -> Any:
        return {"too long": (self._random(1, 300), self._greedy, True)} | only_decodes(self)

    monkeypatch.setattr(gpu_engine.Workloads, "all", with_one_too_long)
    monkeypatch.setattr(gpu_engine, "ENGINES", {"launches": {"graphs": False}})
    status, found = run(tmp_path)
    assert status == 1
    failed, decoded = found["workloads"]
    assert failed["failed"].startswith("PromptTooLongError")
    assert decoded["warm"]["decode_tokens_s"] > 0


def test_rates() -> None:
    steps = Steps.__new__(Steps)
    # A prefill, a step that only asks for logits, and two decodes.
    steps.steps = [Step(2.0, 100, 0, 1), Step(9.0, 0, 2, 2), Step(0.5, 0, 0, 4), Step(1.5, 0, 0, 4)]
    assert steps.rates() == {
        "steps": 4,
        "decode_tokens_s": 4.0,
        "decode_step_ms": 1000.0,
        "prefill_tokens_s": 50.0,
    }


def test_differences() -> None:
    expected = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert differences(expected, expected) == {"equal_rows": 3, "first_difference": None}
    found = [[1, 2, 3], [4, 5, 7], [7, 9, 9]]
    assert differences(expected, found) == {"equal_rows": 1, "first_difference": 1}


def test_the_shape_is_that_of_an_8b_model() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**gpu_llama.EIGHT_BILLION, tie_word_embeddings=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248
    assert config.head_dim == 128
