"""Tiny random models of every generative family that transformers knows, and what becomes of each.

``python tests/model/families.py [name ...]`` prints the table: which adapter serves a family, or
why it is refused.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 160
WINDOW = 8
# Building something larger would take the machine's memory.
MOST_PARAMETERS = 8e6

# Whatever a family calls these, its configuration maps the name or has it; others are left out.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": WINDOW,
    "max_window_layers": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "rotary_dim": 8,
    "d_model": 64,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Multi-head latent attention: keys of 16 + 8, values of 12.
MLA: dict[str, Any] = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
DENSE_MLA = {**MLA, "q_lora_rank": None}
_WIDE = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16}
_TWO_KINDS = ["sliding_attention", "full_attention"]
_SHARED_KV = {**_WIDE, "num_hidden_layers": 6, "num_kv_shared_layers": 2}

# What a family needs beside SMALL; None leaves the family's own default.
OVERRIDES: dict[str, dict[str, Any]] = {
    "axk1": MLA,
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "glm4_moe_lite": MLA,
    "minicpm3": MLA,
    "sarvam_mla": MLA,
    "axk2": MLA,
    "deepseek_v32": MLA,
    "glm_moe_dsa": MLA,
    "youtu": MLA,
    "longcat_flash": {
        **MLA,
        "num_layers": 2,
        "num_hidden_layers": None,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "cohere_compass_text": {"layer_types": _TWO_KINDS * 2},
    "cpmant": {"dim_ff": 96, "dim_head": 16, "prompt_length": 4},
    "dbrx": {
        "num_hidden_layers": None,
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": 64,
            "ffn_hidden_size": 32,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "gemma3n_text": {
        **_SHARED_KV,
        "laurel_rank": 8,
        "layer_types": _TWO_KINDS * 3,
        "activation_sparsity_pattern": [0.0] * 6,
    },
    "gemma4_text": {**_SHARED_KV, "layer_types": _TWO_KINDS * 3, "global_head_dim": 24},
    "gemma4_unified_text": {"layer_types": _TWO_KINDS * 2, "global_head_dim": 24},
    "gemma2": {"attn_logit_softcapping": 2.0},
    "vaultgemma": {"attn_logit_softcapping": 2.0},
    "gpt_neo": {
        "num_hidden_layers": None,
        "num_layers": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": WINDOW,
    },
    "llama4_text": {
        "attention_chunk_size": WINDOW,
        "intermediate_size_mlp": 96,
        "num_experts_per_tok": 1,
        "attn_temperature_tuning": False,
    },
    "qwen2": {"use_sliding_window": True},
    "qwen2_moe": {"use_sliding_window": True, "layer_types": _TWO_KINDS * 2},
    "qwen3": {"use_sliding_window": True},
    "qwen3_moe": {"use_sliding_window": True},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    # Refused, once they are built.
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"is_decoder": True},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4, "qk_rope_head_dim": 8, **MLA},
}
# Encoders, unless they are told otherwise.
_ENCODERS = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert"
    " roberta roberta-prelayernorm roformer xlm-roberta xlm-roberta-xl"
)
for _decoder in _ENCODERS.split():
    OVERRIDES[_decoder] = {"is_decoder": True}

# Variants of a family, under a name of their own.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama multi-query": ("llama", {"num_key_value_heads": 1}),
    "llama multi-head": ("llama", {"num_key_value_heads": 4}),
    "falcon alibi": ("falcon", {"alibi": True}),
    "falcon new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "deepseek_v3 dense query": ("deepseek_v3", DENSE_MLA),
    "gemma4_text experts": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "attention_k_eq_v": True},
    ),
    "llama4_text tempered": ("llama4_text", {"attn_temperature_tuning": True, "floor_scale": 16}),
    "gemma3 multimodal": ("gemma3", {"image_token_index": 9}),
    "bert bidirectional": ("bert", {"is_decoder": False}),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a family: the adapter that serves it, or why none does."""

    name: str
    adapter: str = ""
    reason: str = field(default="", compare=False)


# Families that the oldest transformers we support does not have, and the newest does.
YOUNG = {
    *("apertus1p5_text", "beam", "dory", "exaone", "flint"),
    *("internlm3", "kolibri1", "lfm3", "sarvam_mla"),
}


def family_of(name: str) -> str:
    """The family of a family's or a variant's name."""
    return VARIANTS.get(name, (name, {}))[0]


def skip_unknown(name: str) -> None:
    """Skip the test that is running if this transformers does not have the family.

    Only families that are known to be young: any other must be there.
    """
    family = family_of(name)
    if family in YOUNG and family not in CONFIG_MAPPING:
        version = transformers.__version__
        pytest.skip(f"transformers {version} does not have the family {family}")


def small_config(name: str) -> Any:
    """The configuration of a tiny model of this family or variant."""
    family, extra = VARIANTS.get(name, (name, {}))
    known = CONFIG_MAPPING[family]
    names = getattr(known, "attribute_map", {})
    have = {*known().to_dict(), *names}
    if "text_config" in have:
        return known(**_small_parts(known), **extra)
    small = {names.get(key, key): value for key, value in SMALL.items() if key in have}
    over = {**OVERRIDES.get(family, {}), **extra}
    small.update({names.get(key, key): value for key, value in over.items()})
    return known(**{key: v for key, v in small.items() if v is not None or key == "q_lora_rank"})


def _small_parts(known: Any) -> dict[str, Any]:
    """Tiny text and vision parts of a multimodal model."""
    whole = known()
    text = small_config(whole.text_config.model_type).to_dict()
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    return {
        "text_config": text,
        "vision_config": {**vision, "model_type": whole.vision_config.model_type},
    }


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny random model whose logits depend on all that they can see.

    Where this transformers does not have the family, the test that is running is skipped.
    """
    skip_unknown(name)
    config = small_config(name)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters are not tiny")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for path, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.12)
        elif "sink" in path:
            parameter.normal_(0, 1)
        elif "logit_scale" not in path:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(dtype)


@contextmanager
def softcap_applied(model: Any) -> Iterator[None]:
    """The model's own attention with its softcap, which SDPA of older transformers leaves out."""
    before = model.config._attn_implementation
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    model.config._attn_implementation = "eager" if capped else before
    try:
        yield
    finally:
        model.config._attn_implementation = before


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' advice about configurations that nobody trained."""
    logger = logging.getLogger("transformers")
    level = logger.level
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        logger.setLevel(level)


def outcome(name: str) -> Outcome:
    """Build a family and ask for its adapter."""
    from radixkv.errors import ModelNotSupportedError
    from radixkv.model.adapter import adapt

    try:
        model = build(name)
    except (Exception, pytest.skip.Exception) as error:
        text = " ".join(str(error).split())
        return Outcome(name, "not built", f"{type(error).__name__}: {text}"[:110])
    try:
        adapter = adapt(model)
    except ModelNotSupportedError as error:
        return Outcome(name, "refused", str(error).partition("supported: ")[2])
    kind = type(adapter).__name__
    return Outcome(name, kind if getattr(adapter, "_pad", True) else f"{kind}, unpadded")


def main(names: list[str]) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    counts: dict[str, int] = {}
    for name in names or [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS]:
        with quiet():
            found = outcome(name)
        counts[found.adapter] = counts.get(found.adapter, 0) + 1
        print(f"{found.name:28} {found.adapter:26} {found.reason}", flush=True)
    print("; ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))


if __name__ == "__main__":
    main(sys.argv[1:])
