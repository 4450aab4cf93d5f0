"""The engine over int8 weights: the tokens of Hugging Face over the same rounded weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from radixkv import native
from radixkv.decoding import SamplingParams
from radixkv.errors import ConfigError
from radixkv.llm import LLM
from radixkv.model import quantize
from radixkv.model.loading import LoadedModel
from radixkv.model.quantize import Int8Linear, quantized
from radixkv.model.whole_block import WholeBlock

needs_operators = pytest.mark.skipif(
    not native.has_attention(), reason="the compiled operators are not built on this machine"
)
Tokens = tuple[int, ...]
NEW = 12
GREEDY = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
# Nearer than this, bfloat16 may take the one or the other; the logits' spread is 6.
NEAR = 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in bfloat16 whose logits lie far apart, and its tokenizer."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.15)
    model.lm_head.weight.mul_(5)
    model.bfloat16().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def rounded(folder: Path) -> Any:
    """The same model in float32, each linear weight as its int8 says, by Hugging Face alone."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            weight, scales = quantized(module.weight.bfloat16())
            module.weight.copy_(weight * scales[:, None])
    return model.eval()


@torch.inference_mode()
def greedy(model: Any, prompt: list[int]) -> tuple[Tokens, float]:
    """What the model says, and how near a second choice ever came."""
    tokens, nearest = list(prompt), float("inf")
    for _ in range(NEW):
        best = model(input_ids=torch.tensor([tokens])).logits[0, -1].topk(2)
        nearest = min(nearest, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return tuple(tokens[len(prompt) :]), nearest


@pytest.fixture(scope="module")
def expected(rounded: Any) -> list[tuple[list[int], Tokens]]:
    """Prompts, half of them over one prefix, whose answers bfloat16 cannot change."""
    shared = [(7 * i) % 250 for i in range(37)]
    found = []
    for seed in range(120):
        own = [(seed * 31 + 13 * i) % 250 for i in range(5 + seed % 7)]
        prompt = shared + own if seed % 2 else own * 3
        answer, nearest = greedy(rounded, prompt)
        if nearest > NEAR:
            found.append((prompt, answer))
        if len(found) == 6:
            break
    assert len(found) == 6
    assert len({answer for _, answer in found}) == 6
    return found


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make_(num_blocks: int = 64, **settings: Any) -> LLM:
        llm = LLM(
            str(folder),
            quantization="int8",
            kv_memory=num_blocks * 4 * 512,
            block_size=4,
            **settings,
        )
        assert llm.cache.pool.num_blocks == num_blocks
        made.append(llm)
        return llm

    yield make_
    for llm in made:
        assert not llm.cache.sequences
        llm.cache.check()
        llm.close()


@needs_operators
def test_tokens_cold_warm_batched_and_in_chunks(
    make: Callable[..., LLM],
    expected: list[tuple[list[int], Tokens]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[bool] = []
    call = WholeBlock.__call__

    def counting(self: WholeBlock, *arguments: Any) -> torch.Tensor | None:
        output = call(self, *arguments)
        taken.append(output is not None)
        return output

    monkeypatch.setattr(WholeBlock, "__call__", counting)
    for settings in ({}, {"max_num_batched_tokens": 8}):
        llm = make(256, **settings)
        assert llm.loaded.dtype is torch.bfloat16
        assert sum(isinstance(m, Int8Linear) for m in llm.loaded.model.modules()) == 2 * 4 + 1
        taken.clear()
        for prompt, answer in expected:
            assert llm.generate([prompt], GREEDY)[0].token_ids == answer
        assert taken
        assert all(taken)
        again = llm.generate([prompt for prompt, _ in expected], GREEDY)
        assert [output.token_ids for output in again] == [answer for _, answer in expected]
        assert any(output.num_cached_tokens for output in again)


@needs_operators
@pytest.mark.parametrize("tiled_rows", [1, 16])
def test_tokens_of_long_steps(
    tiled_rows: int,
    make: Callable[..., LLM],
    expected: list[tuple[list[int], Tokens]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of several operators, over weights that are made for the product; and both mixed."""
    monkeypatch.setattr(quantize, "INT8_TILED_ROWS", tiled_rows)
    monkeypatch.setattr(WholeBlock, "__call__", lambda *_: None)
    found = make(256).generate([prompt for prompt, _ in expected], GREEDY)
    assert [output.token_ids for output in found] == [answer for _, answer in expected]


@needs_operators
def test_tokens_of_forks(
    make: Callable[..., LLM], expected: list[tuple[list[int], Tokens]]
) -> None:
    llm = make(256)
    for prompt, answer in expected[:3]:
        with llm.context() as context:
            context.append(prompt)
            branches = context.fork(2)
            for branch in branches:
                assert branch.generate(GREEDY).token_ids == answer
            for branch in branches:
                branch.close()


@needs_operators
def test_tokens_after_preemption(
    make: Callable[..., LLM], expected: list[tuple[list[int], Tokens]]
) -> None:
    llm = make(24)
    found = llm.generate([prompt for prompt, _ in expected], GREEDY)
    assert llm.stats().engine.preemptions > 0
    assert [output.token_ids for output in found] == [answer for _, answer in expected]


@needs_operators
def test_a_closed_llm_has_the_rounded_weights(folder: Path, rounded: Any) -> None:
    llm = LLM(str(folder), quantization="int8", kv_memory="1MiB")
    model = llm.loaded.model
    llm.close()
    other = dict(rounded.named_parameters())
    for name, weight in model.named_parameters():
        assert torch.equal(weight, other[name].bfloat16()), name


MISSING = "./there is no such model"


@pytest.mark.parametrize("name", ["int4", "INT8", "fp8", ""])
def test_an_unknown_name_is_refused_at_the_door(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown quantization '{name}'; did you mean int8"):
        LLM(MISSING, quantization=name)


@pytest.mark.parametrize("dtype", ["float32", torch.float32, "float16"])
def test_another_dtype_is_refused_at_the_door(dtype: Any) -> None:
    with pytest.raises(ConfigError, match=r"computes in bfloat16; leave dtype='.*' out"):
        LLM(MISSING, quantization="int8", dtype=dtype)


def test_a_gpu_is_refused_at_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "resolve_device", lambda _: torch.device("cuda", 0))
    with pytest.raises(ConfigError, match="is for CPUs; use device='cpu'"):
        LLM(MISSING, quantization="int8")


def test_a_loaded_model_is_refused(tiny: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="needs the name or folder of a model"):
        LLM(tiny, quantization="int8")


@pytest.mark.parametrize(
    ("lacks", "amx", "said"),
    [
        ("they need Linux", True, "they need Linux; or leave it out"),
        (None, False, "they need a CPU with AMX for bfloat16; or"),
        (None, True, r"build them with python -m radixkv\.native\.build; or"),
    ],
)
def test_without_the_compiled_operators_it_is_refused(
    lacks: str | None, amx: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "has_attention", lambda: False)
    monkeypatch.setattr(native, "missing_feature", lambda: lacks)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": amx})
    with pytest.raises(ConfigError, match=f"needs the compiled operators: {said}"):
        LLM(MISSING, quantization="int8")


@needs_operators
def test_a_model_without_int8_is_given_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "can_pack", lambda _: False)
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no linear layer"):
        LLM(str(folder), quantization="int8", kv_memory="1MiB")
