"""The engine over keys and values in 8 bits: its own tokens, but the same however it came there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from radixkv.attention import KVStore, Row, TorchBackend, make_batch
from radixkv.decoding import SamplingParams
from radixkv.errors import ConfigError
from radixkv.llm import LLM
from radixkv.model.adapter import adapt
from radixkv.model.cache_adapter import CacheAdapter
from radixkv.model.loading import LoadedModel

MakeLLM = Callable[..., LLM]
GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.mark.parametrize(
    ("kind", "bound"), [(torch.float8_e4m3fn, 0.1), (torch.float8_e5m2, 0.2)], ids=str
)
def test_logits_are_within_a_share_of_their_spread(
    tiny: LoadedModel, kind: torch.dtype, bound: float
) -> None:
    adapter = adapt(tiny.model)
    tokens = torch.arange(40) * 7 % 250
    logits = []
    try:
        for kv_dtype in (None, kind):
            store = KVStore(adapter.layers, 3, 16, torch.float32, kv_dtype=kv_dtype)
            table = np.arange(3, dtype=np.int32)
            steps = [make_batch([Row(table, 0, 30)], 16), make_batch([Row(table, 30, 10)], 16)]
            logits.append(
                torch.cat(
                    [
                        adapter.forward(
                            TorchBackend(store),
                            batch,
                            tokens[batch.position_ids],
                            torch.arange(batch.num_tokens),
                        )
                        for batch in steps
                    ]
                )
            )
    finally:
        adapter.close()
    exact, rounded = logits
    error = float((rounded - exact).square().mean().sqrt() / exact.std())
    assert bound / 10 < error < bound


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e5m2"])
def test_cold_warm_chunked_and_batched_are_the_same(tiny: LoadedModel, kv_dtype: str) -> None:
    prompts = [[(7 * i) % 250 for i in range(37)] + [i, i + 1] for i in range(3)]
    found = []
    for settings in ({}, {"max_num_batched_tokens": 16}):
        with LLM(tiny, kv_memory="1MiB", kv_dtype=kv_dtype, **settings) as llm:
            for cache in llm.engine.runner.backend.store.keys:
                assert cache.dtype.itemsize == 1
                cache.fill_(torch.nan)
            alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
            again = [output.token_ids for output in llm.generate(prompts, GREEDY)]
            assert alone == again
            found.append(alone)
    assert found[0] == found[1]


def test_a_quarter_of_the_memory(tiny: LoadedModel) -> None:
    counts = []
    for kv_dtype in ("auto", "fp8"):
        with LLM(tiny, kv_memory="1MiB", kv_dtype=kv_dtype) as llm:
            counts.append(llm.cache.pool.num_blocks)
    assert counts[1] == 4 * counts[0]


def test_a_cache_adapter_reads_what_is_kept(tiny: LoadedModel) -> None:
    """Whole and in chunks: the same logits, as a chunk's own keys are rounded too."""
    adapter = CacheAdapter(tiny.model)
    tokens = torch.arange(24) * 7 % 250
    logits = []
    for cuts in ((0, 24), (0, 9, 24)):
        store = KVStore(adapter.layers, 2, 16, torch.float32, kv_dtype=torch.float8_e4m3fn)
        for low, high in pairwise(cuts):
            batch = make_batch([Row(np.arange(2, dtype=np.int32), low, high - low)], 16)
            last = torch.tensor([high - low - 1])
            out = adapter.forward(TorchBackend(store), batch, tokens[low:high], last)
        logits.append(out)
    assert torch.allclose(*logits, atol=1e-4)


def test_an_unknown_name_is_refused_at_the_door() -> None:
    with pytest.raises(ConfigError, match="unknown kv_dtype 'fp4'"):
        LLM("./there is no such model", kv_dtype="fp4")


def test_a_checkpoints_scales_are_used_by_e4m3_alone(tiny: LoadedModel, tmp_path: Path) -> None:
    """Read from the folder, and what is served cold is what is served warm."""
    tiny.model.save_pretrained(tmp_path)
    layers = tiny.config.num_hidden_layers
    scales = {
        f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor(0.01 * (layer + at))
        for layer in range(layers)
        for side, at in (("k", 1), ("v", 2))
    }
    save_file(scales, tmp_path / "scales.safetensors")
    # One file is all that transformers reads; several need no index for us.
    for kv_dtype, expected in (("fp8", 2 * layers), ("fp8_e5m2", 0), ("auto", 0)):
        llm = LLM(tmp_path, kv_dtype=kv_dtype, kv_memory="4MiB", device="cpu")
        try:
            found = llm.engine.runner.backend.store.scales
            assert len(found) == expected
            if expected:
                assert found["key", 1].tolist() == pytest.approx([0.02] * len(found["key", 1]))
            prompt = [(7 * i) % 250 for i in range(40)]
            cold, warm = (list(llm.generate([prompt], GREEDY)[0].token_ids) for _ in range(2))
            assert cold == warm
        finally:
            llm.close()
