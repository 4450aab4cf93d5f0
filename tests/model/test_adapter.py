"""The adapters' own rules: the self-check, giving the model back, and rows that await others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from families import VOCABULARY, build, quiet, softcap_applied

from radixkv.attention import (
    FULL,
    AttentionBatch,
    CostModel,
    KVStore,
    LayerShape,
    Row,
    Span,
    TorchBackend,
    make_batch,
)
from radixkv.errors import ModelNotSupportedError
from radixkv.model.adapter import ModelAdapter, adapt
from radixkv.model.cache_adapter import CacheAdapter
from radixkv.model.function_adapter import IMPLEMENTATION, FunctionAdapter
from radixkv.model.layers import layer_span, max_positions

TOKENS = torch.arange(3, 27) * 5 % VOCABULARY


@pytest.fixture(autouse=True)
def _quietly() -> Iterator[None]:
    torch.set_num_threads(1)
    with quiet():
        yield


def own_logits(model: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens[None], use_cache=False).logits[0]
    return logits


# --- The self-check. ---


def mix_in_the_token_before(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
    """State that no KV holds: causal, and lost at the border of a chunk."""
    return out + 0.5 * torch.nn.functional.pad(out, (0, 0, 1, 0))[:, :-1]


@pytest.mark.parametrize("name", ["llama", "bloom", "bart"])
def test_a_model_with_hidden_state_is_refused(name: str) -> None:
    model = build(name)
    model.get_input_embeddings().register_forward_hook(mix_in_the_token_before)
    expected = own_logits(model)
    with pytest.raises(ModelNotSupportedError, match="its logits are off by 0"):
        adapt(model)
    assert torch.equal(own_logits(model), expected)
    assert model.config._attn_implementation != IMPLEMENTATION


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_model_that_turns_nan_in_a_decode_is_refused(name: str) -> None:
    model = build(name)

    def poison(_: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        return out * torch.nan if inputs[0].numel() <= 2 else out

    model.get_input_embeddings().register_forward_hook(poison)
    with pytest.raises(ModelNotSupportedError, match="off by inf"):
        adapt(model)


def test_a_model_whose_own_logits_are_not_finite_is_refused() -> None:
    model = build("llama")
    model.get_input_embeddings().weight.fill_(torch.nan)
    with pytest.raises(ModelNotSupportedError, match="its own logits are not finite"):
        adapt(model)


def test_a_model_whose_forward_fails_is_refused_with_its_words() -> None:
    model = build("llama")

    def fail(*_: Any) -> None:
        raise KeyError("no such weight")

    model.get_input_embeddings().register_forward_hook(fail)
    with pytest.raises(ModelNotSupportedError, match="fails with KeyError: 'no such weight'"):
        adapt(model)


def test_an_adapter_that_fails_is_closed_and_the_next_is_tried() -> None:
    model = build("llama")
    before = model.config._attn_implementation

    def fail_when_served(*_: Any) -> None:
        if model.config._attn_implementation == IMPLEMENTATION:
            raise KeyError("served")

    model.get_input_embeddings().register_forward_hook(fail_when_served)
    adapter = adapt(model)
    assert isinstance(adapter, CacheAdapter)
    assert model.config._attn_implementation == before


def test_an_encoder_decoder_is_refused() -> None:
    config = SimpleNamespace(is_encoder_decoder=True)
    config.get_text_config = lambda decoder: config
    model = SimpleNamespace(config=config)
    with pytest.raises(ModelNotSupportedError, match="cross attention has no paged form"):
        adapt(model)


@pytest.mark.parametrize("name", ["deepseek_sparse_attention", "qwen_sparse_attention"])
def test_sparse_attention_is_refused_by_its_older_names(name: str) -> None:
    config = SimpleNamespace(layer_types=["full_attention", name])
    config.get_text_config = lambda decoder: config
    model = SimpleNamespace(config=config)
    with pytest.raises(ModelNotSupportedError, match=rf"{name} \(sparse attention by an index\)"):
        adapt(model)


def test_a_model_that_looks_ahead_in_short_texts_only_is_refused() -> None:
    """As some of transformers' models do where no mask seems to be needed."""
    model = build("llama")

    def look_ahead(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
        return out + out[:, -1:] if out.shape[1] < 8 else out

    model.get_input_embeddings().register_forward_hook(look_ahead)
    with pytest.raises(ModelNotSupportedError, match="its attention is not causal"):
        adapt(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gemma3_text", "mixtral", "gpt_oss", "deepseek_v3", "bloom", "bart"]
)
def test_good_models_in_half_precision_are_served(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    adapter = adapt(model)
    assert isinstance(adapter, CacheAdapter if name in ("bloom", "bart") else FunctionAdapter)
    adapter.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_bad_model_in_half_precision_is_refused(dtype: torch.dtype) -> None:
    model = build("llama", dtype)
    model.get_input_embeddings().register_forward_hook(mix_in_the_token_before)
    with pytest.raises(ModelNotSupportedError, match="its logits are off by 0"):
        adapt(model)


@pytest.mark.parametrize("name", ["gemma2", "vaultgemma"])
def test_a_softcap_is_applied_where_sdpa_of_transformers_leaves_it_out(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(name)
    # Older releases say that SDPA will do for these families, and leave the softcap out.
    left_out = type(model)._supports_sdpa
    assert model.config._attn_implementation == ("sdpa" if left_out else "eager")
    own = own_logits(model)
    with softcap_applied(model):
        capped = own_logits(model)
    assert (float((own - capped).abs().max()) > 1e-2) == left_out
    adapter = adapt(model)
    assert isinstance(adapter, FunctionAdapter)
    assert ("was trained with a softcap of 2, which" in caplog.text) == left_out
    logits = run(
        adapter, empty_store(adapter), make_batch([Row(table(*range(6)), 0, 24)], 4), [TOKENS]
    )
    adapter.close()
    assert float((logits - capped).abs().max()) < 1e-4
    assert torch.equal(own_logits(model), own)


def test_a_cache_adapter_applies_the_softcap_or_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("no function")

    monkeypatch.setattr(FunctionAdapter, "_probe", fail)
    model = build("gemma2")
    if type(model)._supports_sdpa:
        with pytest.raises(ModelNotSupportedError, match=r"no function.*its logits are off by"):
            adapt(model)
        return
    adapter = adapt(model)
    assert isinstance(adapter, CacheAdapter)
    batch = make_batch([Row(table(*range(6)), 0, 24)], 4)
    check_rows(model, batch, run(adapter, empty_store(adapter), batch, [TOKENS]), [TOKENS])


# --- The model is given back. ---


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3 multimodal"])
@pytest.mark.parametrize("before", ["eager", None])
def test_close_gives_the_model_its_attention_back(name: str, before: str | None) -> None:
    model = build(name)
    if before:
        model.set_attn_implementation(before)
    parts = [model.config, *(getattr(model.config, part) for part in model.config.sub_configs)]
    was = [part._attn_implementation for part in parts]
    expected = own_logits(model)
    adapter = adapt(model)
    assert model.config._attn_implementation == IMPLEMENTATION
    adapter.close()
    assert [part._attn_implementation for part in parts] == was
    assert torch.equal(own_logits(model), expected)


def test_a_part_with_an_attention_of_its_own_keeps_it() -> None:
    model = build("gemma3 multimodal")
    model.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    adapter = adapt(model)
    adapter.close()
    assert model.config.text_config._attn_implementation == "eager"
    assert model.config.vision_config._attn_implementation == "sdpa"


def test_a_served_model_says_so() -> None:
    model = build("llama")
    adapter = adapt(model)
    with pytest.raises(RuntimeError, match="close its adapter"):
        own_logits(model)
    with pytest.raises(ModelNotSupportedError, match="another adapter serves it"):
        adapt(model)
    adapter.close()
    adapt(model).close()


# --- Rows that read what other rows of the step write. ---


def run(
    adapter: ModelAdapter,
    store: KVStore,
    batch: AttentionBatch,
    texts: list[torch.Tensor],
    wanted: torch.Tensor | None = None,
) -> torch.Tensor:
    """The batch's rows over these texts; all logits in the batch's order unless told otherwise."""
    tokens = [texts[index][row.start : row.stop] for index, row in rows_of(batch)]
    wanted = torch.arange(batch.num_tokens) if wanted is None else wanted
    return adapter.forward(TorchBackend(store), batch, torch.cat(tokens), wanted)


def rows_of(batch: AttentionBatch) -> list[tuple[int, Row]]:
    return list(zip(batch.plan.order.tolist(), batch.rows, strict=True))


def empty_store(adapter: ModelAdapter, size: int = 4) -> KVStore:
    store = KVStore(adapter.layers, 32, size, torch.float32)
    for cache in (*store.keys, *store.values):
        cache.fill_(torch.nan)
    return store


def check_rows(model: Any, batch: AttentionBatch, logits: torch.Tensor, texts: Any) -> None:
    for place, (index, row) in enumerate(rows_of(batch)):
        own = own_logits(model, texts[index][: row.stop])[row.start :]
        ours = logits[int(batch.offsets[place]) : int(batch.offsets[place + 1])]
        assert float((ours - own).abs().max()) < 1e-4, index


def table(*blocks: int) -> Any:
    return np.array(blocks, np.int32)


@pytest.fixture(params=["llama", "bloom", "bart"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Any, ModelAdapter]]:
    """A model by each adapter, and a second copy that stays its own."""
    adapter = adapt(build(request.param))
    yield build(request.param), adapter
    adapter.close()


def test_single_queries_may_read_one_another(served: tuple[Any, ModelAdapter]) -> None:
    model, adapter = served
    # Blocks of one token: the second row's text goes on from the token that the first computes.
    store = empty_store(adapter, 1)
    run(adapter, store, make_batch([Row(table(9, 8, 7), 0, 3)], 1), [TOKENS])
    rows = [Row(table(9, 8, 7, 6, 5), 4, 1), Row(table(9, 8, 7, 6), 3, 1)]
    batch = make_batch(rows, 1, cost=CostModel(per_item=0))
    check_rows(model, batch, run(adapter, store, batch, [TOKENS, TOKENS]), [TOKENS, TOKENS])


def test_a_copy_awaits_its_source_through_another_copy(served: tuple[Any, ModelAdapter]) -> None:
    model, adapter = served
    store = empty_store(adapter)
    other = torch.cat([TOKENS[:3], TOKENS[10:15]])
    third = torch.cat([TOKENS[:3], TOKENS[15:20]])
    texts = [other, third, TOKENS]
    # The third row computes block 3; its first three slots go to block 5, from there to block 7.
    rows = [Row(table(5, 6), 3, 4), Row(table(7, 8), 3, 1), Row(table(3, 4), 0, 6)]
    batch = make_batch(rows, 4, cost=CostModel(per_item=0))
    batch.copies.append((torch.tensor([12, 13, 14]), torch.tensor([20, 21, 22])))
    batch.copies.append((torch.tensor([20, 21, 22]), torch.tensor([28, 29, 30])))
    check_rows(model, batch, run(adapter, store, batch, texts), texts)


def test_a_chain_of_copies_reaches_a_row_before_the_middle_one() -> None:
    """The middle row starts later than the last: its block is filled when the last needs it."""
    model, adapter = build("bloom"), CacheAdapter(build("bloom"))
    store = empty_store(adapter)
    texts = [TOKENS, TOKENS, torch.cat([TOKENS[:2], TOKENS[9:12]])]
    rows = [Row(table(3), 0, 4), Row(table(5), 3, 1), Row(table(7), 2, 2)]
    batch = make_batch(rows, 4, cost=CostModel(per_item=0))
    batch.copies.append((torch.tensor([12, 13, 14]), torch.tensor([20, 21, 22])))
    batch.copies.append((torch.tensor([20, 21]), torch.tensor([28, 29])))
    check_rows(model, batch, run(adapter, store, batch, texts), texts)


@pytest.mark.parametrize("first", [0, 1])
def test_a_row_that_only_asks_need_not_come_second(
    served: tuple[Any, ModelAdapter], first: int
) -> None:
    model, adapter = served
    store = empty_store(adapter)
    texts = [TOKENS, TOKENS]
    rows = [Row(table(3, 4), 0, 6), Row(table(3, 4), 0, 6)]
    keep = [first == 0, first == 1]
    batch = make_batch(rows, 4, keep=keep, cost=CostModel(per_item=0))
    check_rows(model, batch, run(adapter, store, batch, texts), texts)
    # What the one that keeps wrote is there for the next step.
    later = make_batch([Row(table(3, 4), 6, 2)], 4)
    check_rows(model, later, run(adapter, store, later, texts), texts)


def test_logits_come_in_the_order_asked_for_and_as_often(served: tuple[Any, ModelAdapter]) -> None:
    _, adapter = served
    texts = [TOKENS, TOKENS.flip(0), TOKENS[5:]]
    rows = [Row(table(3, 4), 0, 6), Row(table(5, 6), 0, 7), Row(table(7), 0, 1)]
    everything = run(adapter, empty_store(adapter), make_batch(rows, 4), texts)
    wanted = torch.tensor([12, 3, 3, 0, 8])
    some = run(adapter, empty_store(adapter), make_batch(rows, 4), texts, wanted)
    assert some.shape == (5, VOCABULARY)
    assert float((some - everything[wanted]).abs().max()) < 1e-5
    assert not some.requires_grad


def test_padding_is_hidden_from_rows_of_other_lengths() -> None:
    model, adapter = build("bloom"), CacheAdapter(build("bloom"))
    store = empty_store(adapter)
    texts = [TOKENS, TOKENS.flip(0)]
    long, short = table(3, 4, 5, 6), table(8)
    first = make_batch([Row(long, 0, 13), Row(short, 0, 1)], 4)
    run(adapter, store, first, texts)
    batch = make_batch([Row(long, 13, 1), Row(short, 1, 1)], 4)
    check_rows(model, batch, run(adapter, store, batch, texts), texts)


# --- What a layer sees, and how far. ---


@pytest.mark.parametrize(
    ("config", "keywords", "expected"),
    [
        ({}, {}, FULL),
        ({"sliding_window": 9}, {"sliding_window": 5}, Span(window=5)),
        ({"sliding_window": 9}, {"sliding_window": None}, Span(window=9)),
        ({"sliding_window": 9, "use_sliding_window": False}, {}, FULL),
        ({"sliding_window": 9, "layer_types": ["full_attention"]}, {}, FULL),
        ({"sliding_window": 9, "layer_types": ["sliding_attention"]}, {}, Span(window=9)),
        ({"attention_chunk_size": 6, "layer_types": ["chunked_attention"]}, {}, Span(chunk=6)),
        ({"sliding_window": 0, "layer_types": ["sliding_attention"]}, {}, FULL),
        ({"sliding_window": 9, "layer_types": []}, {}, Span(window=9)),
    ],
)
def test_layer_span(config: dict[str, Any], keywords: dict[str, Any], expected: Span) -> None:
    assert layer_span(SimpleNamespace(**config), 0, keywords) == expected


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, None),
        ({"rope_type": "default", "rope_theta": 1e4}, None),
        ({"rope_type": "yarn", "original_max_position_embeddings": 64}, None),
        ({"rope_type": "longrope", "original_max_position_embeddings": 64}, 64),
        ({"rope_type": "dynamic", "factor": 2.0}, 256),
        ({"full": {"rope_type": "default"}, "sliding": {"rope_type": "dynamic"}}, 256),
    ],
)
def test_positions_after_which_keys_depend_on_length(rope: Any, expected: int | None) -> None:
    config = SimpleNamespace(rope_parameters=rope, max_position_embeddings=256)
    config.get_text_config = lambda decoder: config
    assert max_positions(SimpleNamespace(config=config)) == expected


def test_an_adapter_tells_what_the_store_must_hold() -> None:
    adapter = adapt(build("deepseek_v3"))
    assert adapter.layers == [LayerShape(4, 24, 12)] * 4
    assert adapter.max_positions is None
    adapter.close()
