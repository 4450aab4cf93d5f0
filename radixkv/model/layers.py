"""What a model's layers keep for each token, and which models keep more than that."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from radixkv.attention import FULL, Span
from radixkv.errors import ModelNotSupportedError

# transformers is not typed: its models and configurations are Any to us.
Model = Any
Config = Any

PAGEABLE_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# Layers that keep nothing from token to token.
STATELESS_LAYERS = {"sparse", "dense", "moe", "mlp"}
UNPAGEABLE_LAYERS = {
    "linear_attention": "recurrent state",
    "hybrid": "recurrent state beside attention",
    "hybrid_sliding": "recurrent state beside attention",
    "conv": "convolution state",
    "indexed_attention": "sparse attention by an index",
    # What older releases of transformers call two kinds of the former.
    "deepseek_sparse_attention": "sparse attention by an index",
    "qwen_sparse_attention": "sparse attention by an index",
    "minimax_m3_sparse": "sparse attention by an index",
    "compressed_sparse_attention": "sparse attention over compressed keys",
    "heavily_compressed_attention": "attention over compressed keys",
}


def text_config(model: Model) -> Config:
    """The configuration of the decoder, also inside a multimodal model."""
    return model.config.get_text_config(decoder=True)


def forward_parameters(model: Model) -> set[str]:
    """Names that the model's ``forward`` takes."""
    return set(inspect.signature(model.forward).parameters)


def refuse(model: Model, reason: str) -> ModelNotSupportedError:
    """The error that names the model and the reason."""
    return ModelNotSupportedError(f"{type(model).__name__} is not supported: {reason}")


def reason_of(model: Model, error: ModelNotSupportedError) -> str:
    """The reason alone, of an error that `refuse` made."""
    return str(error).removeprefix(str(refuse(model, "")))


def refuse_unpageable(model: Model) -> None:
    """Refuse by name what a paged KV cache cannot hold.

    Raises
    ------
    ModelNotSupportedError
        For recurrent or convolution state, sparse-index attention and cross attention.
    """
    config = text_config(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise refuse(model, "it is an encoder-decoder, and cross attention has no paged form")
    if not getattr(config, "is_causal", True):
        raise refuse(model, "its attention is not causal")
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    strange = sorted(kinds - PAGEABLE_LAYERS - STATELESS_LAYERS)
    if strange:
        kept = [f"{kind} ({UNPAGEABLE_LAYERS.get(kind, 'not known here')})" for kind in strange]
        raise refuse(model, f"it has layers of a kind that is not paged: {', '.join(kept)}")
    if getattr(model, "_is_stateful", False):
        raise refuse(model, "it carries recurrent state from token to token")


def counts_tokens(model: Model) -> bool:
    """Whether attention counts the tokens before a query, whatever ``position_ids`` say.

    Llama 4's attention temperature does, from thousands of tokens on, which no short check shows.
    """
    return bool(getattr(text_config(model), "attn_temperature_tuning", False))


def max_positions(model: Model) -> int | None:
    """The length beyond which rotary frequencies follow the length of the text; None if never.

    Beyond it, what is cached for a prefix of one text is wrong for another's.
    """
    config = text_config(model)
    rope = getattr(config, "rope_parameters", None) or {}
    # Either one set of parameters, or one a kind of layer.
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    limits = []
    for kind in kinds:
        if kind.get("rope_type") in ("longrope", "dynamic"):
            known = kind.get("original_max_position_embeddings")
            limits.append(int(known or config.max_position_embeddings))
    return min(limits, default=None)


def layer_span(config: Config, layer: int, keywords: dict[str, Any]) -> Span:
    """Which keys a layer's queries see.

    The window may come as a keyword, may stand in the configuration, or may live only in the mask
    that transformers would have made; so: keyword, else the layer's type, else the configuration.
    """
    window = keywords.get("sliding_window")
    if window:
        return Span(window=int(window))
    kinds = getattr(config, "layer_types", None)
    if kinds:
        kind = kinds[layer] if layer < len(kinds) else "full_attention"
        if kind == "chunked_attention":
            return Span(chunk=int(config.attention_chunk_size))
        if kind == "sliding_attention" and getattr(config, "sliding_window", None):
            return Span(window=int(config.sliding_window))
        return FULL
    if getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None):
        return Span(window=int(config.sliding_window))
    return FULL


def probe_tokens(model: Model, count: int) -> torch.Tensor:
    """A few different, ordinary token ids; int64 (count,)."""
    vocabulary = int(text_config(model).vocab_size)
    return torch.arange(count) * 7 % max(vocabulary - 3, 1) + min(3, vocabulary - 1)
