"""FunctionAdapter: models that ask transformers' registry for their attention.

One flattened forward of all rows, with position ids, without a transformers cache or mask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from radixkv.attention import AttentionBackend, AttentionBatch, LayerAttention, LayerShape, Span
from radixkv.model.layers import (
    Model,
    forward_parameters,
    layer_span,
    probe_tokens,
    refuse,
    text_config,
)

IMPLEMENTATION = "radixkv"

# Keywords of the attention call that change its result and that no backend of ours computes.
UNSUPPORTED = {
    "indices": "sparse-index attention",
    "position_bias": "a learned bias for each position",
    "block_mask": "an attention mask of its own",
}

AttentionCall = Callable[..., torch.Tensor]

# Extra keywords of `forward` do not reach the attention function in every family, so the step
# that is running is handed over here.
_running = threading.local()


def _paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    call: AttentionCall = _running.call
    return call(module, query, key, value, scaling, keywords), None


AttentionInterface.register(IMPLEMENTATION, _paged_attention)


@contextmanager
def _answering(call: AttentionCall) -> Iterator[None]:
    before = getattr(_running, "call", None)
    _running.call = call
    try:
        yield
    finally:
        _running.call = before


@dataclass(frozen=True, slots=True)
class _Layer:
    """Where a layer's KV is: ``writes`` is False for one that reads another layer's."""

    store: int
    writes: bool
    span: Span


class FunctionAdapter:
    """Routes a registry model's attention to a backend; see `ModelAdapter`."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.layers: list[LayerShape] = []
        self._by_index: dict[int, _Layer] = {}
        self._parameters = forward_parameters(model)
        self._before = model.config._attn_implementation
        model.set_attn_implementation(IMPLEMENTATION)
        try:
            self._probe()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the model its own attention back."""
        self.model.set_attn_implementation(self._before)

    def forward(
        self,
        backend: AttentionBackend,
        batch: AttentionBatch,
        tokens: torch.Tensor,
        logit_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """See `ModelAdapter.forward`."""

        def call(
            module: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            scaling: float | None,
            keywords: dict[str, Any],
        ) -> torch.Tensor:
            layer = self._by_index[module.layer_idx]
            attention = LayerAttention(
                layer.store,
                query.shape[-1] ** -0.5 if scaling is None else scaling,
                layer.span,
                keywords.get("softcap") or 0.0,
                _sinks(keywords),
            )
            out = backend.forward(
                attention,
                batch,
                query[0].transpose(0, 1),
                key[0].transpose(0, 1) if layer.writes else None,
                value[0].transpose(0, 1) if layer.writes else None,
            )
            return out[None]

        with _answering(call):
            return self._run(tokens, torch.from_numpy(batch.positions), logit_tokens)

    def _run(
        self, tokens: torch.Tensor, positions: torch.Tensor, logit_tokens: torch.Tensor
    ) -> torch.Tensor:
        keywords: dict[str, Any] = {"position_ids": positions[None], "use_cache": False}
        if "logits_to_keep" in self._parameters:
            keywords["logits_to_keep"] = logit_tokens
        logits: torch.Tensor = self.model(input_ids=tokens[None], **keywords).logits[0]
        if "logits_to_keep" not in self._parameters:
            logits = logits[logit_tokens]
        return logits

    def _probe(self) -> None:
        """Learn from one small forward what each layer keeps, and which layers share."""
        config = text_config(self.model)
        seen: list[tuple[torch.Tensor, int]] = []

        def call(
            module: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            scaling: float | None,
            keywords: dict[str, Any],
        ) -> torch.Tensor:
            for name, what in UNSUPPORTED.items():
                if keywords.get(name) is not None:
                    raise refuse(self.model, f"it uses {what}")
            if key.shape[2] != query.shape[2] or query.shape[1] % key.shape[1]:
                raise refuse(self.model, "its attention has other keys than its own tokens'")
            span = layer_span(config, module.layer_idx, keywords)
            # A layer that is handed an earlier layer's very tensor reads that layer's KV.
            source = next((store for other, store in seen if other is key), None)
            if source is None:
                self.layers.append(LayerShape(key.shape[1], key.shape[3], value.shape[3]))
                seen.append((key, len(self.layers) - 1))
            store = len(self.layers) - 1 if source is None else source
            self._by_index[module.layer_idx] = _Layer(store, source is None, span)
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=True
            )
            return out.transpose(1, 2)

        if "position_ids" not in self._parameters:
            raise refuse(self.model, "its forward takes no position_ids")
        tokens = probe_tokens(self.model, 3)
        with torch.inference_mode(), _answering(call):
            self._run(tokens, torch.arange(3), torch.tensor([2]))
        if not self.layers:
            raise refuse(self.model, "no layer asked for attention")


def _sinks(keywords: dict[str, Any]) -> torch.Tensor | None:
    sinks = keywords.get("s_aux")
    if sinks is None:
        sinks = keywords.get("sinks")
    return sinks if sinks is None else sinks.flatten()
