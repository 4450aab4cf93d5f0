"""A decoder block in one operator: the products against float32, the block against fused blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from radixkv import native
from radixkv.attention import AttentionBatch, KVStore, Row, choose_backend, make_batch
from radixkv.attention.native_backend import NativeBackend
from radixkv.model import blocks
from radixkv.model.blocks import FusedAdapter
from radixkv.model.prepack import PackedLinear, pack_linears, tiled
from radixkv.model.quantize import quantize_linears, quantized
from radixkv.model.whole_block import WholeBlock

pytestmark = pytest.mark.skipif(
    not native.has_attention(), reason="the compiled operators are not built on this machine"
)

SMALL = {
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "llama with biases": LlamaConfig(**SMALL, attention_bias=True),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
    "granite": GraniteConfig(**SMALL, residual_multiplier=0.3, attention_multiplier=0.1),
    "mistral": MistralConfig(**SMALL, sliding_window=9),
    "smollm3": SmolLM3Config(**SMALL),
    "phi3": Phi3Config(**SMALL | {"hidden_size": 192}),
    "phi3 partly rotated": Phi3Config(
        **SMALL | {"hidden_size": 192},
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(32, 32), (160, 96), (96, 576)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 32, 33, 63, 128, 300])
def test_products(rows: int, shape: tuple[int, int], threads: int) -> None:
    made = torch.Generator().manual_seed(rows)
    weight, bias = (torch.randn(*size, generator=made).bfloat16() for size in (shape, shape[:1]))
    inputs = torch.randn(rows, shape[1], generator=made).bfloat16()
    torch.set_num_threads(threads)
    try:
        plain = torch.ops.radixkv.linear(inputs, tiled(weight), None)
        added = torch.ops.radixkv.linear(inputs, tiled(weight), bias)
    finally:
        torch.set_num_threads(1)
    exact = inputs.float() @ weight.float().T
    for found, expected in ((plain, exact), (added, exact + bias.float())):
        # Half a unit in the last place of bfloat16, and what float32 sums may differ by.
        assert bool(((found.float() - expected).abs() <= expected.abs() / 256 + 1e-4).all())


def test_rows_do_not_touch_each_other() -> None:
    weight = torch.randn(64, 64).bfloat16()
    inputs = torch.randn(40, 64).bfloat16()
    alone = torch.ops.radixkv.linear(inputs, tiled(weight), None)
    inputs[7] = torch.nan
    beside = torch.ops.radixkv.linear(inputs, tiled(weight), None)
    assert bool(beside[7].isnan().all())
    kept = torch.arange(40) != 7
    assert torch.equal(beside[kept], alone[kept])


@pytest.mark.parametrize("break_it", ["outputs", "inputs", "dtype", "order"])
def test_what_does_not_fit_is_refused(break_it: str) -> None:
    weight, inputs = tiled(torch.zeros(64, 64).bfloat16()), torch.zeros(2, 64).bfloat16()
    if break_it == "outputs":
        weight = weight[:3]
    elif break_it == "inputs":
        inputs = inputs[:, :32]
    elif break_it == "dtype":
        weight = weight.float()
    else:
        weight = weight.transpose(2, 3)
    with pytest.raises(RuntimeError):
        torch.ops.radixkv.linear(inputs, weight, None)


def made(config: Any) -> Any:
    torch.manual_seed(0)
    model = Auto.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.1)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.to(torch.bfloat16)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows by whether the operator was taken, for each block of each step."""
    taken: list[bool] = []
    call: Callable[..., torch.Tensor | None] = WholeBlock.__call__

    def counting(self: WholeBlock, *arguments: Any) -> torch.Tensor | None:
        output = call(self, *arguments)
        taken.append(output is not None)
        return output

    monkeypatch.setattr(WholeBlock, "__call__", counting)
    return taken


def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by how many blocks each call of the operator computes."""
    found: list[int] = []
    operator = torch.ops.radixkv.decoder_layers

    def counting(hidden: torch.Tensor, weights: list[torch.Tensor], *others: Any) -> torch.Tensor:
        found.append(len(weights) // 4)
        output: torch.Tensor = operator(hidden, weights, *others)
        return output

    monkeypatch.setattr(torch.ops.radixkv, "decoder_layers", counting)
    return found


SIZE, NUM_BLOCKS = 4, 120
STEPS = 5


def steps() -> list[AttentionBatch]:
    """Prompts that share blocks, decodes, more tokens than are few, and what is there already."""
    first, second = np.arange(20, 8, -1, dtype=np.int32), np.arange(20, 8, -1, dtype=np.int32)
    second[3:] = np.arange(30, 39)
    third = np.arange(40, 80, dtype=np.int32)
    fourth = np.concatenate((first[:4], np.arange(90, 94))).astype(np.int32)
    rows = [
        [Row(first, 0, 17)],
        [Row(first, 17, 9), Row(second, 3 * SIZE, 7)],
        [Row(first, 26, 1), Row(second, 3 * SIZE + 7, 1)],
        [Row(third, 0, 140)],
    ]
    batches = [make_batch(each, SIZE) for each in rows]
    # The end of one is asked for again, and the other begins within a block: it has the first's
    # token there, and gives it to another block in turn.
    last = make_batch([Row(first, 25, 2), Row(fourth, 17, 5)], SIZE, keep=[False, True])
    source, target, other = (SIZE * int(block) for block in (first[4], fourth[4], 100))
    for pair in ((source, target), (target, other)):
        last.copies.append((torch.tensor([pair[0]]), torch.tensor([pair[1]])))
    return [*batches, last]


def run(adapter: FusedAdapter) -> list[torch.Tensor]:
    dtype = adapter.model.dtype
    store = KVStore(adapter.layers, NUM_BLOCKS, SIZE, dtype)
    for cache in (*store.keys, *store.values):
        cache.fill_(torch.nan)
    backend = choose_backend(store)
    assert isinstance(backend, NativeBackend) == (dtype is torch.bfloat16)
    found = []
    with torch.inference_mode():
        for batch in steps():
            tokens = torch.from_numpy(batch.positions * 7 % 120)
            everything = torch.arange(batch.num_tokens)
            found.append(adapter.forward(backend, batch, tokens, everything))
    assert bool(store.keys[0][100, 0].isfinite().all())
    return [*found, *store.keys, *store.values]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_same_bits_as_fused_blocks(
    name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(CONFIGS[name])
    adapter = FusedAdapter(model)
    pack_linears(model)
    torch.set_num_threads(threads)
    try:
        taken = counted(monkeypatch)
        whole = run(adapter)
        assert taken == [True] * (STEPS * 3)
        monkeypatch.setattr(WholeBlock, "__call__", lambda *_: None)
        fused = run(adapter)
    finally:
        torch.set_num_threads(1)
        adapter.close()
    assert bool(whole[0].isfinite().all())
    for found, expected in zip(whole, fused, strict=True):
        assert torch.equal(found.isnan(), expected.isnan())
        found, expected = found.nan_to_num(7.0).float(), expected.nan_to_num(7.0).float()
        if name == "granite":
            # torch rounds once more where a residual is scaled.
            assert float((found - expected).norm() / expected.norm()) < 1.5e-2
        else:
            assert torch.equal(found, expected)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Of all logits, over their spread."""
    one, other = torch.cat(found[:STEPS]).float(), torch.cat(expected[:STEPS]).float()
    return float((one - other).square().mean().sqrt() / other.std())


def in_float32(model: Any) -> list[torch.Tensor]:
    adapter = FusedAdapter(model)
    found = run(adapter)
    adapter.close()
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["llama with biases", "qwen3", "mistral", "phi3"])
def test_int8(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of fused blocks, as near to float32 as bfloat16 is, and a bounded error."""
    model = made(CONFIGS[name])
    adapter = FusedAdapter(model)
    plain = run(adapter)
    assert quantize_linears(model) == 3 * 4 + 1
    torch.set_num_threads(threads)
    try:
        taken = counted(monkeypatch)
        whole = run(adapter)
        assert taken == [True] * (STEPS * 3)
        monkeypatch.setattr(WholeBlock, "__call__", lambda *_: None)
        fused = run(adapter)
    finally:
        torch.set_num_threads(1)
    for found, expected in zip(whole, fused, strict=True):
        assert_same(found, expected)
    adapter.close()
    exact = made(CONFIGS[name]).float()
    of_bfloat16 = distance(plain, in_float32(exact))
    for module in exact.modules():
        if type(module) is torch.nn.Linear:
            weight, scales = quantized(module.weight)
            module.weight.copy_(weight * scales[:, None])
    assert distance(whole, in_float32(exact)) < 1.3 * of_bfloat16
    assert 0.02 < distance(whole, plain) < 0.1


# How many blocks one call computes: those that rotate, and those that read alike.
AT_ONCE = {
    "llama": [3],
    "qwen2": [3],
    "smollm3": [3, 1, 1],
    "qwen2 with a window": [2, 3],
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_blocks_that_follow_each_other_are_computed_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = sum(AT_ONCE[name])
    configs = CONFIGS | {
        "smollm3": SmolLM3Config(**SMALL | {"num_hidden_layers": layers}),
        "qwen2 with a window": Qwen2Config(
            **SMALL | {"num_hidden_layers": layers},
            use_sliding_window=True, sliding_window=9, max_window_layers=2,
        ),
    }  # fmt: skip
    model = made(configs[name])
    adapter = FusedAdapter(model)
    pack_linears(model)
    made_calls = calls(monkeypatch)
    together = run(adapter)
    assert made_calls == AT_ONCE[name] * STEPS
    monkeypatch.setattr(WholeBlock, "followed_by", lambda *_: None)
    adapter.close()
    adapter = FusedAdapter(model)  # It has seen no block follow another.
    pack_linears(model)
    del made_calls[:]
    alone = run(adapter)
    assert made_calls == [1] * (layers * STEPS)
    adapter.close()
    for found, expected in zip(together, alone, strict=True):
        assert_same(found, expected)


def test_what_comes_between_two_blocks_keeps_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a layer that is not fused, for it is hooked, and a hook that returns a new tensor."""
    model = made(CONFIGS["llama"])
    model.model.layers[1].register_forward_hook(lambda *_: None)
    adapter = FusedAdapter(model)
    pack_linears(model)
    made_calls = calls(monkeypatch)
    run(adapter)
    assert made_calls == [1, 1] * STEPS
    adapter.close()

    model = made(CONFIGS["llama"])
    forward = blocks.FusedBlock.forward

    def between(self: Any, hidden_states: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        return forward(self, hidden_states * 1, *others, **named)

    monkeypatch.setattr(blocks.FusedBlock, "forward", between)
    adapter = FusedAdapter(model)
    pack_linears(model)
    del made_calls[:]
    run(adapter)
    assert made_calls == [1, 1, 1] * STEPS
    adapter.close()


def test_a_block_that_is_followed_by_several_is_followed_by_none() -> None:
    model = made(CONFIGS["llama"])
    blocks.fuse_blocks(model)
    first, second, third = (layer.whole for layer in model.model.layers)
    first.followed_by(second)
    first.followed_by(second)
    assert first._next is second
    first.followed_by(third)
    assert first._next is None
    first.followed_by(third)
    assert first._next is None


# Heads of 48: their projections fit into tiles, they do not.
NOT_WHOLE = {
    "gemma2": Gemma2Config(**SMALL),
    "narrow heads": LlamaConfig(**SMALL | {"head_dim": 48, "num_key_value_heads": 6}),
}


@pytest.mark.parametrize("name", NOT_WHOLE)
def test_blocks_of_another_shape_stay_fused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(NOT_WHOLE[name])
    adapter = FusedAdapter(model)
    pack_linears(model)
    taken = counted(monkeypatch)
    run(adapter)
    adapter.close()
    assert taken == [False] * (STEPS * 3)


@pytest.mark.parametrize("case", ["float32", "not packed"])
def test_blocks_that_the_operator_does_not_take(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(CONFIGS["llama"])
    if case == "float32":
        model = model.float()
    adapter = FusedAdapter(model)
    if case != "not packed":
        pack_linears(model)
    taken = counted(monkeypatch)
    logits = run(adapter)[:STEPS]
    adapter.close()
    assert taken == [False] * (STEPS * 3)
    assert all(bool(each.isfinite().all()) for each in logits)


def test_tiles_take_no_more_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.model.prepack.available_memory", lambda: 1 << 20)
    model = made(CONFIGS["llama"])
    assert pack_linears(model)
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert packed
    assert all(linear.tiles is None for linear in packed)
