"""int8 weights: how they are made, their products against float64, what is kept of a model."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from radixkv import native
from radixkv.errors import ConfigError
from radixkv.model import quantize
from radixkv.model.blocks import FusedAdapter
from radixkv.model.prepack import PackedLinear, pack_linears, tiled, unpack_linears, weight_bytes
from radixkv.model.quantize import INT8_TILED_ROWS, Int8Linear, quantize_linears, quantized

needs_operators = pytest.mark.skipif(
    not native.has_attention(), reason="the compiled operators are not built on this machine"
)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def exact(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product with the quantised weight, in float64."""
    whole, scales = quantized(weight)
    return inputs.double() @ (whole.double() * scales.double()[:, None]).T


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within half a unit in the last place of bfloat16, and what float32 sums may differ by."""
    assert found.shape == expected.shape
    assert bool(((found.double() - expected).abs() <= expected.abs() / 256 + 1e-4).all())


def layer(outputs: int, inputs: int, bias: bool) -> torch.nn.Linear:
    linear = torch.nn.Linear(inputs, outputs, bias=bias).bfloat16().requires_grad_(False)
    linear.weight.copy_(numbers(outputs, inputs, seed=1))
    if bias:
        linear.bias.copy_(numbers(outputs, seed=2))
    return linear


def test_rounding_is_to_the_nearest_of_127_steps() -> None:
    weight = numbers(40, 64)
    weight[3] = 0
    weight[4] *= 1e-30
    whole, scales = quantized(weight)
    assert whole.dtype is torch.int8
    off = (whole * scales[:, None] - weight.float()).abs()
    assert bool((off <= scales[:, None] * 0.5001).all())
    assert bool((whole.abs().amax(1)[torch.arange(40) != 3] == 127).all())
    assert bool((whole[3] == 0).all())
    assert float(scales[0]) == pytest.approx(float(weight[0].abs().max()) / 127)


@needs_operators
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(32, 32), (160, 96), (96, 576)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 15, 16, 17, 32, 33, 63, 128, 257, 300])
def test_products(rows: int, shape: tuple[int, int], threads: int) -> None:
    weight, bias = numbers(*shape), numbers(shape[0], seed=2)
    inputs = numbers(rows, shape[1], seed=rows)
    whole, scales = quantized(weight)
    torch.set_num_threads(threads)
    try:
        plain = torch.ops.radixkv.linear(inputs, tiled(whole), None, scales)
        added = torch.ops.radixkv.linear(inputs, tiled(whole), bias, scales)
    finally:
        torch.set_num_threads(1)
    expected = exact(inputs, weight)
    assert_close(plain, expected)
    assert_close(added, expected + bias.double())


@needs_operators
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_every_byte_and_every_scale_is_where_it_belongs(rows: int) -> None:
    """One input at a time: the product is a column of the weight."""
    whole = torch.arange(-127, 128, dtype=torch.int8).repeat(17)[: 64 * 64].view(64, 64)
    scales = torch.linspace(0.5, 2, 64)
    for column in (0, 1, 31, 32, 63):
        inputs = torch.zeros(rows, 64).bfloat16()
        inputs[-1, column] = 1
        found = torch.ops.radixkv.linear(inputs, tiled(whole), None, scales)
        assert torch.equal(found[-1], (whole[:, column] * scales).bfloat16())
        assert not bool(found[:-1].any())


@needs_operators
@pytest.mark.parametrize("rows", [2, 40])
def test_rows_do_not_touch_each_other(rows: int) -> None:
    whole, scales = quantized(numbers(64, 64))
    inputs = numbers(rows, 64)
    alone = torch.ops.radixkv.linear(inputs, tiled(whole), None, scales)
    inputs[1] = torch.nan
    beside = torch.ops.radixkv.linear(inputs, tiled(whole), None, scales)
    assert bool(beside[1].isnan().all())
    kept = torch.arange(rows) != 1
    assert torch.equal(beside[kept], alone[kept])


@needs_operators
def test_dequantized() -> None:
    whole, scales = quantized(numbers(96, 160))
    expected = (whole.float() * scales[:, None]).bfloat16()
    assert torch.equal(torch.ops.radixkv.dequantize(tiled(whole), scales), expected)


@needs_operators
@pytest.mark.parametrize("break_it", ["no scales", "few scales", "half scales", "bfloat16"])
def test_what_does_not_fit_is_refused(break_it: str) -> None:
    whole, scales = quantized(numbers(64, 64))
    weight, given = tiled(whole), scales
    if break_it == "no scales":
        given = None
    elif break_it == "few scales":
        given = scales[:32]
    elif break_it == "half scales":
        given = scales.bfloat16()
    else:
        weight = weight.bfloat16()
    with pytest.raises(RuntimeError):
        torch.ops.radixkv.linear(numbers(2, 64), weight, None, given)
    if given is not None:
        with pytest.raises(RuntimeError):
            torch.ops.radixkv.dequantize(weight, given)


@needs_operators
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [64, 70])
@pytest.mark.parametrize("rows", [1, 5, INT8_TILED_ROWS + 1])
def test_layers_of_any_number_of_outputs_and_rows(
    rows: int, outputs: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "OUTPUTS_AT_ONCE", 32)
    linear = layer(outputs, 96, bias)
    made = Int8Linear(linear)
    inputs = numbers(1, rows, 96, seed=3)
    found, expected = made(inputs)[0], exact(inputs[0], linear.weight)
    if bias:
        expected = expected + linear.bias.double()
    if rows <= INT8_TILED_ROWS:
        assert_close(found, expected)
    else:
        # Each weight is rounded once more, by 1/256 of itself at the most.
        size = inputs[0].abs().double() @ linear.weight.abs().double().T
        assert bool(((found.double() - expected).abs() <= size / 200 + 1e-2).all())
        distance = (found.double() - expected).square().mean().sqrt()
        assert float(distance) < 4e-3 * float(expected.std())
    whole, scales = quantized(linear.weight)
    assert torch.equal(made.weight, (whole.float() * scales[:, None]).bfloat16())
    assert made.unpacked().bias is linear.bias


@needs_operators
def test_the_error_of_a_layer_is_that_of_its_weights() -> None:
    """Weights are off by a share of the largest: 1 / 254 at the most, 1 / 254 / sqrt(3) by rms."""
    linear = layer(64, 576, False)
    inputs = numbers(32, 576, seed=4)
    off = Int8Linear(linear)(inputs).double() - inputs.double() @ linear.weight.double().T
    largest = linear.weight.abs().amax(1).double()
    expected = largest / 254 / 3**0.5 * inputs.double().square().sum(1, keepdim=True).sqrt()
    ratio = float((off / expected).square().mean().sqrt())
    assert 0.8 < ratio < 1.2


SMALL = {
    "vocab_size": 130,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "phi3":
        model: Any = Phi3ForCausalLM(Phi3Config(**SMALL))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=kind == "tied"))
    return model.bfloat16().eval().requires_grad_(False)


@needs_operators
@pytest.mark.parametrize("kind", ["tied", "untied", "phi3"])
def test_nothing_of_the_plain_weights_is_kept(kind: str) -> None:
    model = model_of(kind)
    adapter = FusedAdapter(model)
    linears = [module for module in model.modules() if type(module) is torch.nn.Linear]
    assert len(linears) == 2 * 4 + 1
    plain = [weakref.ref(linear.weight) for linear in linears if linear is not model.lm_head]
    sizes = [(linear.out_features, linear.in_features) for linear in linears]
    embedding = model.model.embed_tokens.weight
    del linears
    before = weight_bytes(model)
    assert quantize_linears(model) == 2 * 4 + 1
    gc.collect()
    assert [each() for each in plain] == [None] * 8
    assert model.model.embed_tokens.weight is embedding
    padded = [(outputs + -outputs % 32, inputs) for outputs, inputs in sizes]
    kept = sum(outputs * inputs + 4 * outputs for outputs, inputs in padded)
    others = 2 * 64 + 4 * 16  # The last norm, and rotary frequencies.
    assert weight_bytes(model) == kept + 2 * embedding.numel() + others
    own_head = 0 if kind == "tied" else 130 * 64
    blocks = sum(outputs * inputs for outputs, inputs in sizes) - 130 * 64
    assert before == 2 * (blocks + own_head + embedding.numel()) + others
    adapter.close()
    unpack_linears(model)
    assert not any(isinstance(module, Int8Linear) for module in model.modules())
    assert (model.lm_head.weight is embedding) == (kind == "tied")


@needs_operators
def test_packed_weights_let_go_of_the_plain_ones_too() -> None:
    model = model_of("untied")
    adapter = FusedAdapter(model)
    plain = [weakref.ref(m.weight) for m in model.modules() if type(m) is torch.nn.Linear]
    assert pack_linears(model) == len(plain) == 9
    gc.collect()
    assert [each() for each in plain] == [None] * 9
    adapter.close()


@needs_operators
def test_layers_that_have_no_int8(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("untied")
    model.model.layers[0].mlp.down_proj = layer(64, 48, False)
    assert quantize_linears(model) == 2 * 7
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear
    assert "1 of the model's 15 linear layers have no int8" in caplog.text
    pack_linears(model)
    assert type(model.model.layers[0].mlp.down_proj) is PackedLinear
    with pytest.raises(ConfigError, match="no linear layer whose weights could be int8"):
        quantize_linears(model_of("untied").float())
