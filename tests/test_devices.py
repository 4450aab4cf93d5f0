"""Which device serves, what it computes in, and how much of it keys and values may take.

Nothing here needs a GPU: torch's answers are made up.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radixkv import devices
from radixkv.devices import HEADROOM, computes, resolve_device, room_for_kv
from radixkv.errors import ConfigError
from radixkv.llm import LLM
from radixkv.model.loading import load_model

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What torch and the import system say; to be changed by a test."""
    said: dict[str, Any] = {"count": 2, "current": 1, "triton": True, "bf16": True}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: said["count"] > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: said["count"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: said["current"])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: said["bf16"])
    monkeypatch.setattr(devices, "has_triton", lambda: said["triton"])
    return said


def test_auto(gpus: dict[str, Any]) -> None:
    assert resolve_device("auto") == torch.device("cuda", 1)
    gpus["triton"] = False
    assert resolve_device("auto") == CPU
    gpus.update(triton=True, count=0)
    assert resolve_device("auto") == CPU


def test_devices_by_name(gpus: dict[str, Any]) -> None:
    assert resolve_device("cpu") == resolve_device("cpu:0") == resolve_device(CPU) == CPU
    assert resolve_device("cuda") == torch.device("cuda", 1)
    assert resolve_device("cuda:0") == resolve_device(torch.device("cuda", 0))
    assert resolve_device("cuda:0") == torch.device("cuda", 0)


@pytest.mark.parametrize("device", ["abacus", "mps", "meta", "", "cuda:x", None, 1.5])
def test_devices_that_are_none(gpus: dict[str, Any], device: Any) -> None:
    with pytest.raises(ConfigError, match=r"unknown device .*; use auto, cpu, cuda or cuda:N"):
        resolve_device(device)


def test_devices_that_are_not_there(gpus: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="there are 2 GPUs, from cuda:0 on"):
        resolve_device("cuda:2")
    gpus["triton"] = False
    with pytest.raises(ConfigError, match=r"needs Triton: pip install 'radixkv\[triton\]'"):
        resolve_device("cuda")
    gpus["count"] = 0
    with pytest.raises(ConfigError, match=r"finds no GPU.* or use device='cpu'"):
        resolve_device("cuda")


def test_a_missing_gpu_is_refused_before_anything_is_loaded(gpus: dict[str, Any]) -> None:
    gpus["count"] = 0
    for load in (load_model, LLM):
        with pytest.raises(ConfigError, match="finds no GPU"):
            load("./there is no such model", device="cuda")


def test_types_that_a_gpu_does_not_compute_in(gpus: dict[str, Any]) -> None:
    gpu = torch.device("cuda", 0)
    assert computes(torch.bfloat16, gpu)
    gpus["bf16"] = False
    assert not computes(torch.bfloat16, gpu)
    assert computes(torch.float16, gpu)
    assert computes(torch.bfloat16, CPU)
    with pytest.raises(ConfigError, match="does not compute in bfloat16; use float16 or float32"):
        load_model("./there is no such model", "bfloat16", device=gpu)


def test_what_a_model_is_served_in(gpus: dict[str, Any]) -> None:
    from radixkv.model.loading import _served_in

    gpu = torch.device("cuda", 0)
    assert _served_in(torch.bfloat16, gpu, None) is torch.bfloat16
    assert _served_in(torch.float32, gpu, None) is torch.float32
    gpus["bf16"] = False
    assert _served_in(torch.bfloat16, gpu, None) is torch.float16
    assert _served_in(torch.bfloat16, gpu, torch.float32) is torch.float32
    assert _served_in(torch.float16, CPU, None) is torch.float32
    assert _served_in(torch.float16, CPU, torch.float16) is torch.float16


def test_keys_and_values_take_what_model_and_largest_step_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU of 1,000 bytes: 300 of a model, a step of 200, which torch keeps until told."""
    state = {"allocated": 300, "peak": 900, "kept": 50}
    gpu = torch.device("cuda", 0)

    def step() -> None:
        state["peak"] = max(state["peak"], state["allocated"] + 200)
        state["kept"] = 200

    def free(device: torch.device) -> tuple[int, int]:
        return 1000 - state["allocated"] - state["kept"], 1000

    cuda = {
        "empty_cache": lambda: state.update(kept=0),
        "reset_peak_memory_stats": lambda device: state.update(peak=state["allocated"]),
        "memory_allocated": lambda device: state["allocated"],
        "max_memory_allocated": lambda device: state["peak"],
        "synchronize": lambda device: None,
        "mem_get_info": free,
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    assert room_for_kv(gpu, step) == 1000 - 300 - 200 - int(1000 * HEADROOM)
    state["allocated"] = 900
    assert room_for_kv(gpu, step) == 0
