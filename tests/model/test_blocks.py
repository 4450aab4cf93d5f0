"""Fused blocks compute what the model's own layers do, and give them back as they were."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from families import build

from radixkv.model import operators
from radixkv.model.adapter import adapt
from radixkv.model.blocks import FusedAdapter, FusedBlock, can_fuse, fuse_blocks, restore_blocks
from radixkv.model.function_adapter import FunctionAdapter
from radixkv.model.prepack import pack_linears, unpack_linears

FAMILIES = ["llama", "gemma3_text", "granite", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=torch.arange(3, 40)[None], use_cache=False).logits
    return found


def fused_layers(model: Any) -> int:
    return sum(isinstance(module, FusedBlock) for module in model.modules())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("packed", [False, True])
def test_a_model_gets_its_own_layers_back(name: str, packed: bool) -> None:
    model = build(name).to(torch.bfloat16 if packed else torch.float32)
    before, expected, kinds = weights(model), logits(model), [type(m) for m in model.modules()]
    fuse_blocks(model)
    assert fused_layers(model) == model.config.num_hidden_layers
    assert weights(model).keys() != before.keys()
    if packed:
        pack_linears(model)
    restore_blocks(model)
    unpack_linears(model)
    assert [type(module) for module in model.modules()] == kinds
    after = weights(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert torch.equal(logits(model), expected)


def test_weights_are_not_kept_twice() -> None:
    model = build("llama")
    size = sum(value.numel() for value in model.state_dict().values())
    fuse_blocks(model)
    assert sum(value.numel() for value in model.state_dict().values()) <= size
    own = model.model.layers[0]._own[0]
    assert own.self_attn.q_proj.weight is None
    assert own.mlp.up_proj.weight is None


def test_only_layers_that_were_read_are_fused() -> None:
    assert can_fuse(build("llama"))
    assert not can_fuse(build("cohere"))
    assert not can_fuse(build("mixtral"))
    hooked = build("llama")
    for layer in hooked.model.layers:
        layer.mlp.register_forward_hook(lambda *_: None)
    assert not can_fuse(hooked)
    stranger = build("llama")
    for layer in stranger.model.layers:
        type(layer).__module__, kept = "somebody.elses", type(layer).__module__
        try:
            assert not can_fuse(stranger)
        finally:
            type(layer).__module__ = kept


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_that_compute_something_else_are_not_used(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of every adapter catches a block that is wrong; the model is served unmodified."""
    right = operators.Rotary.rotate

    def wrong(self: Any, heads: torch.Tensor, embeddings: Any) -> torch.Tensor:
        return right(self, heads.flip(-1), embeddings)

    monkeypatch.setattr(operators.Rotary, "rotate", wrong)
    model = build(name)
    adapter = adapt(model)
    assert type(adapter) is FunctionAdapter
    assert fused_layers(model) == 0


def test_an_adapter_that_fails_gives_the_layers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(FunctionAdapter, "_probe", fail)
    model = build("llama")
    with pytest.raises(ZeroDivisionError):
        FusedAdapter(model)
    assert fused_layers(model) == 0
    assert bool(logits(model).isfinite().all())
