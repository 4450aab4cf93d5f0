"""Packed weights change no bit, are really used, and come off again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from radixkv.model.loading import is_native
from radixkv.model.prepack import PackedLinear, pack_linears, unpack_linears

needs_bfloat16 = pytest.mark.skipif(
    not is_native(torch.bfloat16), reason="this CPU has no bfloat16 instructions"
)


def llama(dtype: torch.dtype, **settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **settings,
    )
    return LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)


@torch.inference_mode()
def logits(model: LlamaForCausalLM) -> torch.Tensor:
    return model(input_ids=torch.arange(20)[None]).logits


@needs_bfloat16
@pytest.mark.parametrize("settings", [{"attention_bias": True}, {"tie_word_embeddings": True}])
def test_same_bits_packed_and_unpacked(settings: dict[str, Any]) -> None:
    model = llama(torch.bfloat16, **settings)
    expected = logits(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert pack_linears(model) == 2 * 7 + 1
    assert isinstance(model.model.layers[0].mlp.up_proj, PackedLinear)
    assert torch.equal(logits(model), expected)
    unpack_linears(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(logits(model), expected)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == settings.get("tie_word_embeddings", False)


def test_float32_stays_as_it_is() -> None:
    assert pack_linears(llama(torch.float32)) == 0


@needs_bfloat16
def test_falls_back_where_bits_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(torch.bfloat16)
    forward = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: forward(self, x) * 1.01)
    assert pack_linears(model) == 0
    monkeypatch.undo()

    def missing(*_: object) -> torch.Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr(PackedLinear, "forward", missing)
    assert pack_linears(model) == 0
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
