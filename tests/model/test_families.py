"""Every family that is served computes its own logits, over a paged store and a shared prefix.

The driver here knows nothing of the engine: it lays out block tables by hand, so that prompts share
a prefix's blocks, part of a block is copied, and prefills, chunks and decodes meet in one step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import transformers
from families import VOCABULARY, YOUNG, build, family_of, quiet, softcap_applied
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from radixkv.attention import (
    FULL,
    CostModel,
    KVStore,
    LayerAttention,
    Row,
    TorchBackend,
    make_batch,
)
from radixkv.attention.batch import table_slots
from radixkv.errors import ModelNotSupportedError
from radixkv.model import function_adapter
from radixkv.model.adapter import ModelAdapter, adapt
from radixkv.model.blocks import FusedAdapter
from radixkv.model.cache_adapter import CacheAdapter
from radixkv.model.function_adapter import FunctionAdapter

pytestmark = pytest.mark.filterwarnings(
    # Advice of transformers and torch about configurations, not about what is tested.
    "ignore::FutureWarning:transformers",
    "ignore::UserWarning:transformers",
    "ignore::DeprecationWarning:transformers",
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning",
)

SIZE = 4
NEW = 12
TOLERANCE = 1e-4
# What a feature that is switched off must change at least.
MATTERS = 1e-2

BY_FUSED_BLOCKS = """
    exaone gemma gemma2 gemma3_text granite internlm3 llama mistral olmo2 olmo3 phi3 qwen2 qwen3
    smollm3
"""
BY_FUNCTION = """
    afmoe apertus apertus1p5_text arcee aria_text axk1 beam bert bert-generation biogpt bitnet
    codegen cohere cohere2 cohere2_moe ctrl cwm deepseek_v2 deepseek_v3 diffllama dory dots1
    ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma3n_text gemma4_text
    gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss gptj
    granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe kolibri1 laguna llama4_text longcat_flash mellum
    mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mixtral modernbert-decoder nanochat
    nemotron olmo olmoe opt persimmon phi phimoe qwen2_moe qwen3_moe sarvam_mla seed_oss
    solar_open stablelm starcoder2 vaultgemma youtu
"""
BY_CACHE = ["bloom", "doge", "falcon", "gpt_neo", "mpt", "xglm"]
ONE_BY_ONE = ["bart", "gpt_neox_japanese", "roformer", "whisper"]
VARIANTS = {
    "llama multi-query": "fused",
    "llama multi-head": "fused",
    "gemma3 multimodal": "fused",
    "gemma4_text experts": "function",
    "deepseek_v3 dense query": "function",
    "falcon alibi": "cache",
    "falcon new": "cache",
    "llama4_text tempered": "one by one",
}
SERVED = {
    **dict.fromkeys(BY_FUSED_BLOCKS.split(), "fused"),
    **dict.fromkeys(BY_FUNCTION.split(), "function"),
    **dict.fromkeys(BY_CACHE, "cache"),
    **dict.fromkeys(ONE_BY_ONE, "one by one"),
    **VARIANTS,
}

# What older releases of transformers do otherwise, and 5.24 does not: attention that does not go
# through the registry, and masks that are left out.
NEWEST = Version(transformers.__version__) >= Version("5.24")
LATE_IN_THE_REGISTRY = {"codegen", "gptj"}
LOOKED_AHEAD = {"doge", "roformer"}

# transformers has had two names for the kind of layer.
INDEXED = "_attention (sparse attention by an index)"
REFUSED = {
    "mamba": "linear_attention (recurrent state)",
    "mamba2": "linear_attention (recurrent state)",
    "falcon_mamba": "linear_attention (recurrent state)",
    "jamba": "linear_attention (recurrent state)",
    "bamba": "linear_attention (recurrent state)",
    "granitemoehybrid": "linear_attention (recurrent state)",
    "nemotron_h": "linear_attention (recurrent state)",
    # Older releases of transformers give its layers no types; the state is found all the same.
    "recurrent_gemma": "recurrent state",
    "qwen3_next": "linear_attention (recurrent state)",
    "minimax": "linear_attention (recurrent state)",
    "falcon_h1": "hybrid (recurrent state beside attention)",
    "zamba2": "hybrid (recurrent state beside attention)",
    "zaya": "hybrid (recurrent state beside attention)",
    "inkling_text": "hybrid_sliding (recurrent state beside attention)",
    "lfm2": "conv (convolution state)",
    "lfm3": "conv (convolution state)",
    "axk2": INDEXED,
    "deepseek_v32": INDEXED,
    "glm_moe_dsa": INDEXED,
    "minimax_m3_vl_text": "minimax_m3_sparse (sparse attention by an index)",
    "rwkv": "recurrent state from token to token",
    "xlstm": "recurrent state from token to token",
    "bert bidirectional": "its attention is not causal: later tokens change earlier logits",
    "xlnet": "its attention is not causal: later tokens change earlier logits",
    "prophetnet": "its attention is not causal: later tokens change earlier logits",
    "openai-gpt": "its forward takes no cache",
    "roberta": "its logits are off by",
}


@pytest.fixture(autouse=True)
def _quietly() -> Iterator[None]:
    torch.set_num_threads(1)
    with quiet():
        yield


@dataclass(slots=True)
class Text:
    """A sequence of the driver: a prompt, what was generated, and what is computed of it."""

    tokens: list[int]
    arrives: int
    table: Any = None
    computed: int = 0
    shared: int = 0
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    prompt_length: int = 0

    @property
    def finished(self) -> bool:
        return len(self.tokens) == self.prompt_length + NEW


def make_texts(staggered: bool) -> list[Text]:
    """Prompts with 42 tokens in common, 3 more of them in two; some end inside a block."""
    generator = torch.Generator().manual_seed(7)

    def some(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    common, branch = some(42), some(3)
    prompts = [common + some(8), common + branch + some(1), common + branch + some(15), common[:41]]
    texts = [Text(p, 3 * index if staggered else 0) for index, p in enumerate(prompts)]
    for index, text in enumerate(texts):
        text.prompt_length = len(text.tokens)
        # Blocks of their own, scattered: nothing is right by lying side by side.
        blocks = -(-(text.prompt_length + NEW) // SIZE)
        text.table = (np.arange(blocks, dtype=np.int32) * 7 % 31) * len(texts) + index
        if index:
            text.shared = 40 if index == 3 else 42
            text.table[: text.shared // SIZE] = texts[0].table[: text.shared // SIZE]
    return texts


def copies_of(texts: list[Text]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The shared tokens that do not fill a block, from the first text's block to these texts'."""
    copies = []
    for text in texts:
        start = text.shared // SIZE * SIZE
        if start < text.shared:
            ends = (TEXT_ZERO, text.table)
            pair = [torch.from_numpy(table_slots(t, start, text.shared, SIZE)) for t in ends]
            copies.append((pair[0], pair[1]))
    return copies


# The first text's table, the same in every run: where shared tokens are copied from.
TEXT_ZERO = make_texts(False)[0].table


def drive(
    adapter: ModelAdapter,
    chunk: int | None,
    backend_class: type[TorchBackend] = TorchBackend,
) -> tuple[list[Text], int]:
    """Generate greedily; the texts, and how many shared runs the plans had.

    Whole prompts: all arrive together, and the first computes the prefix that the others read in
    the same step. Chunks: they arrive one after the other, so chunks meet decodes.
    """
    texts = make_texts(staggered=chunk is not None)
    store = KVStore(adapter.layers, 31 * len(texts), SIZE, torch.float32)
    for cache in (*store.keys, *store.values):
        cache.fill_(torch.nan)
    backend = backend_class(store)
    runs = step = 0
    while not all(text.finished for text in texts):
        ready = [t for t in texts if t.arrives <= step and not t.finished]
        fresh = [t for t in ready if t.shared and not t.computed]
        if chunk is not None:
            fresh = [t for t in fresh if texts[0].computed >= t.shared]
            ready = [t for t in ready if t.computed or not t.shared or t in fresh]
        for text in fresh:
            text.computed = text.shared
        runs += run_step(adapter, backend, ready, copies_of(fresh), chunk)
        step += 1
    return texts, runs


def run_step(
    adapter: ModelAdapter,
    backend: TorchBackend,
    texts: list[Text],
    copies: list[tuple[torch.Tensor, torch.Tensor]],
    chunk: int | None,
) -> int:
    """One step of all texts; the number of its shared runs."""
    counts = [min(len(t.tokens) - t.computed, chunk or len(t.tokens)) for t in texts]
    rows = [Row(t.table, t.computed, count) for t, count in zip(texts, counts, strict=True)]
    batch = make_batch(rows, SIZE, cost=CostModel(per_item=0))
    batch.copies.extend(copies)
    ordered = [texts[index] for index in batch.plan.order]
    pairs = list(zip(ordered, batch.rows, strict=True))
    tokens = [token for t, row in pairs for token in t.tokens[row.start : row.stop]]
    # Whole prompts: all logits, in reverse; chunks: only each row's last, as an engine asks.
    last = torch.from_numpy(batch.offsets[1:] - 1)
    wanted = last if chunk else torch.arange(batch.num_tokens).flip(0)
    logits = adapter.forward(backend, batch, torch.tensor(tokens), wanted)
    assert logits.shape == (len(wanted), VOCABULARY)
    rows_of = np.searchsorted(batch.offsets, wanted.numpy(), side="right") - 1
    for token, index, line in zip(wanted.tolist(), rows_of.tolist(), logits, strict=True):
        ordered[index].logits[int(batch.positions[token])] = line.float()
    for text, row in pairs:
        text.computed = row.stop
        if row.stop == len(text.tokens):
            text.tokens.append(int(text.logits[row.stop - 1].argmax()))
    return len(batch.plan.runs)


def difference(model: Any, texts: list[Text]) -> float:
    """Largest difference of any logit from the model's own, each text alone and whole."""
    worst = 0.0
    for text in texts:
        with torch.no_grad(), softcap_applied(model):
            own = model(input_ids=torch.tensor([text.tokens[:-1]]), use_cache=False).logits[0]
        places = sorted(text.logits)
        assert places[-1] == len(text.tokens) - 2
        ours = torch.stack([text.logits[place] for place in places])
        assert bool(ours.isfinite().all())
        worst = max(worst, float((ours - own[places]).abs().max()))
        if worst < TOLERANCE:
            # Equal tokens at every step: what we chose is what the model would have.
            chosen = own[text.prompt_length - 1 :].argmax(-1).tolist()
            assert text.tokens[text.prompt_length :] == chosen
    return worst


def kind_of(adapter: ModelAdapter) -> str:
    if isinstance(adapter, FunctionAdapter):
        return "fused" if isinstance(adapter, FusedAdapter) else "function"
    assert isinstance(adapter, CacheAdapter)
    return "cache" if adapter._pad else "one by one"


def test_nothing_is_skipped_on_the_newest_transformers() -> None:
    """The oldest lacks nine families, those between may lack some of the nine."""
    missing = {family_of(name) for name in (*SERVED, *REFUSED)} - {*CONFIG_MAPPING}
    if NEWEST:
        assert missing == set()
    elif Version(transformers.__version__) < Version("5.18"):
        assert missing == YOUNG
    else:
        assert missing <= YOUNG


def looks_ahead(model: Any) -> bool:
    """Whether the model's own logits of a text depend on what comes after it."""
    tokens = torch.arange(3, 27)[None]
    with torch.no_grad():
        whole, alone = (
            model(input_ids=ids, use_cache=False).logits for ids in (tokens, tokens[:, :5])
        )
    return float((whole[:, :5] - alone).abs().max()) > MATTERS


def expected_kind(name: str, model: Any) -> str:
    """How a family is served, or "" if this transformers computes it in a way that cannot be."""
    if NEWEST:
        return SERVED[name]
    if name in LOOKED_AHEAD and looks_ahead(model):
        return ""
    if name in LATE_IN_THE_REGISTRY and not type(model)._can_set_attn_implementation():
        return "cache"
    return SERVED[name]


@pytest.mark.parametrize("name", SERVED)
def test_a_family_computes_its_own_logits_and_tokens(name: str) -> None:
    model = build(name)
    before = model.config._attn_implementation
    kind = expected_kind(name, model)
    if not kind:
        with pytest.raises(ModelNotSupportedError, match="its attention is not causal"):
            adapt(model)
        return
    adapter = adapt(model)
    assert kind_of(adapter) == kind
    whole, runs = drive(adapter, None)
    chunks, _ = drive(adapter, 7)
    adapter.close()
    assert runs > NEW / 2, "no run was shared"
    assert model.config._attn_implementation == before
    assert difference(model, whole) < TOLERANCE
    assert difference(model, chunks) < TOLERANCE


@pytest.mark.parametrize(
    "name", ["llama", "gemma3_text", "gpt_oss", "llama4_text", "deepseek_v3", "bloom", "falcon"]
)
def test_tokens_are_those_of_generate(name: str) -> None:
    model = build(name)
    adapter = adapt(model)
    texts, _ = drive(adapter, 7)
    adapter.close()
    model.generation_config.eos_token_id = None
    for text in texts:
        prompt = torch.tensor([text.tokens[: text.prompt_length]])
        found = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False
        )
        assert found[0].tolist() == text.tokens


# --- Negative controls: with a feature switched off in our path, the comparison must fail. ---


def without(**changes: Any) -> type[TorchBackend]:
    """A backend that ignores part of what a layer asks for."""

    class Without(TorchBackend):
        def forward(self, attention: LayerAttention, *rest: Any) -> torch.Tensor:
            return super().forward(replace(attention, **changes), *rest)

    return Without


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral", {"span": FULL}),
        ("gemma2", {"span": FULL}),
        ("gemma3_text", {"span": FULL}),
        ("qwen2_moe", {"span": FULL}),
        ("phimoe", {"span": FULL}),
        ("modernbert-decoder", {"span": FULL}),
        ("llama4_text", {"span": FULL}),
        ("gemma2", {"softcap": 0.0}),
        ("gpt_oss", {"sinks": None}),
        ("granite_swa", {"sinks": None}),
        ("mimo_v2_flash", {"sinks": None}),
        ("granite", {"scale": 16**-0.5}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_feature_of_attention_matters(name: str, changes: dict[str, Any]) -> None:
    model = build(name)
    adapter = FunctionAdapter(model)
    intact, _ = drive(adapter, 7)
    texts, _ = drive(adapter, 7, without(**changes))
    adapter.close()
    assert difference(model, intact) < TOLERANCE
    assert difference(model, texts) > MATTERS


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("bloom", "transformers.models.bloom.modeling_bloom.BloomModel.build_alibi_tensor"),
        ("mpt", "transformers.models.mpt.modeling_mpt.build_mpt_alibi_tensor"),
        ("falcon alibi", "transformers.models.falcon.modeling_falcon.build_alibi_tensor"),
    ],
)
def test_alibi_matters(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    adapter = CacheAdapter(model)
    module, _, function = path.rpartition(".")
    owner: Any = sys.modules.get(module)
    if owner is None:
        parent, _, class_name = module.rpartition(".")
        owner = getattr(sys.modules[parent], class_name)
    own: Callable[..., torch.Tensor] = getattr(owner, function)
    with monkeypatch.context() as patch:
        patch.setattr(owner, function, lambda *args, **kw: torch.zeros_like(own(*args, **kw)))
        texts, _ = drive(adapter, 7)
    assert difference(model, texts) > MATTERS


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_sharing_keys_among_layers_matters(name: str) -> None:
    model = build(name)
    adapter = FunctionAdapter(model)
    assert [call.writes for call in adapter._calls] == [True] * 4 + [False] * 2
    assert [call.store for call in adapter._calls] == [0, 1, 2, 3, 2, 3]
    assert len(adapter.layers) == 4
    # The first layers of the kinds, instead of the last.
    adapter._calls[4:] = [replace(adapter._calls[4], store=0), replace(adapter._calls[5], store=1)]
    texts, _ = drive(adapter, 7)
    adapter.close()
    assert difference(model, texts) > MATTERS


@pytest.mark.parametrize(("name", "kind"), [("llama", FunctionAdapter), ("bloom", CacheAdapter)])
def test_copies_within_a_step_matter(
    name: str, kind: Callable[[Any], ModelAdapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name)
    adapter = kind(model)
    with monkeypatch.context() as patch:
        patch.setattr(KVStore, "copy_slots", lambda *_: None)
        texts, _ = drive(adapter, None)
    adapter.close()
    # What was not copied was never written: it is NaN.
    assert any(bool(line.isnan().any()) for text in texts for line in text.logits.values())


def test_padding_matters_to_a_model_that_counts_its_cache() -> None:
    model = build("bart")
    texts, _ = drive(CacheAdapter(model), 7)
    assert difference(model, texts) > MATTERS


def test_a_model_that_loops_over_its_layers_keeps_keys_for_each_time() -> None:
    model = build("hrm_text")
    adapter = FunctionAdapter(model)
    times = len(adapter.layers)
    adapter.close()
    modules = [m for m in model.modules() if type(m).__name__ == "HrmTextAttention"]
    assert times > len(modules)


# --- Refusals. ---


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_is_refused_by_name_and_left_as_it_was(name: str) -> None:
    model = build(name)
    before = model.config._attn_implementation
    tokens = torch.arange(3, 30)[None]
    with torch.no_grad():
        own = model(input_ids=tokens, use_cache=False).logits
    with pytest.raises(ModelNotSupportedError) as caught:
        adapt(model)
    message = str(caught.value)
    assert message.startswith(f"{type(model).__name__} is not supported: ")
    assert REFUSED[name] in message
    assert model.config._attn_implementation == before
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens, use_cache=False).logits, own)


def test_the_window_of_a_mask_alone_is_found() -> None:
    """phimoe hands its window to nobody: it lives in the mask that transformers would make."""
    model = build("phimoe")
    adapter = FunctionAdapter(model)
    spans = {call.span for call in adapter._calls}
    adapter.close()
    assert spans == {function_adapter.Span(window=8)}
