"""Fused blocks compute what the model's own layers do, and give them back as they were."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MistralConfig, MistralForCausalLM

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


def unchanged(model: Any, change: Any) -> None:
    """The model is served, with or without blocks, and computes the same before and after."""
    change(model)
    expected = logits(model)
    kinds = [type(module) for module in model.modules()]
    adapter = adapt(model)
    adapter.close()
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(logits(model), expected)


def test_one_layer_that_stands_in_two_places() -> None:
    def repeat(model: Any) -> None:
        model.model.layers[2] = model.model.layers[0]

    unchanged(build("llama"), repeat)
    model = build("llama")
    repeat(model)
    fuse_blocks(model)
    assert model.model.layers[2] is model.model.layers[0]
    restore_blocks(model)
    assert model.model.layers[2] is model.model.layers[0]


@pytest.mark.parametrize(
    "break_layer",
    [
        pytest.param(lambda layer, _: setattr(layer, "input_layernorm", nn.Identity()), id="norm"),
        pytest.param(lambda layer, first: setattr(layer, "mlp", first.mlp), id="shared mlp"),
        pytest.param(
            lambda layer, _: setattr(
                layer.self_attn.k_proj, "bias", nn.Parameter(torch.ones(32), requires_grad=False)
            ),
            id="bias",
        ),
    ],
)
def test_a_layer_that_cannot_be_rewritten_leaves_the_others_whole(break_layer: Any) -> None:
    model = build("llama")
    break_layer(model.model.layers[-1], model.model.layers[0])
    with pytest.raises((AttributeError, TypeError)):
        FusedAdapter(model)
    unchanged(model, lambda _: None)


@pytest.mark.parametrize(
    "own", [{}, {"layer_types": ["full_attention"] * 2}, {"use_sliding_window": False}], ids=str
)
def test_windows_are_those_of_the_layers_own_attention(own: dict[str, Any]) -> None:
    """Windows longer than the check's text, which it cannot see."""
    config = MistralConfig(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=100, **own,
    )  # fmt: skip
    for kind in (FunctionAdapter, FusedAdapter):
        adapter = kind(MistralForCausalLM(config).eval())
        assert [call.span.window for call in adapter._calls] == [100, 100], kind


def test_a_cap_that_attention_does_not_use_is_none() -> None:
    model = build("gemma3_text")
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 50.0
    fuse_blocks(model)
    assert {layer.keywords["softcap"] for layer in model.model.layers} == {None}
    model = build("gemma2")
    fuse_blocks(model)
    assert {layer.keywords["softcap"] for layer in model.model.layers} == {
        model.config.attn_logit_softcapping
    }


def test_an_adapter_that_fails_gives_the_layers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(FunctionAdapter, "_probe", fail)
    model = build("llama")
    with pytest.raises(ZeroDivisionError):
        FusedAdapter(model)
    assert fused_layers(model) == 0
    assert bool(logits(model).isfinite().all())
