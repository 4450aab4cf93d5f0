"""FunctionAdapter: models that ask transformers' registry for their attention.

One flattened forward of all rows, with position ids, without a transformers cache or mask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from radixkv.attention import (
    AttentionBackend,
    AttentionBatch,
    LayerAttention,
    LayerShape,
    Span,
    send,
)
from radixkv.attention.native_backend import DirectLayer, NativeBackend
from radixkv.model.layers import (
    Model,
    forward_parameters,
    layer_span,
    max_positions,
    probe_tokens,
    refuse,
    text_config,
)

IMPLEMENTATION = "radixkv"

# Tensors among the attention call's keywords that a backend takes, or that attention ignores.
KNOWN_TENSORS = {"s_aux", "sinks", "position_ids", "cache_position", "logits_to_keep"}
# What some of the others mean.
UNSUPPORTED = {
    "indices": "sparse-index attention",
    "block_indices": "sparse-index attention",
    "position_bias": "a learned bias for each position",
}

AttentionCall = Callable[..., torch.Tensor]

# Extra keywords of `forward` do not reach the attention function in every family, so the step
# that is running is handed over here.
_running = threading.local()


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' attention functions are, for the step that is running."""
    call: AttentionCall | None = getattr(_running, "call", None)
    if call is None:
        raise RuntimeError("this model is being served by radixkv; close its adapter to call it")
    keywords["attention_mask"] = attention_mask
    return call(module, query, key, value, scaling, keywords), None


AttentionInterface.register(IMPLEMENTATION, paged_attention)


@contextmanager
def _answering(call: AttentionCall, step: Step | None = None) -> Iterator[None]:
    before = getattr(_running, "call", None), getattr(_running, "step", None)
    _running.call, _running.step = call, step
    try:
        yield
    finally:
        _running.call, _running.step = before


@dataclass(frozen=True, slots=True)
class _Call:
    """One attention call of a forward: where its KV is, and whether it is its own to write."""

    store: int
    writes: bool
    span: Span


class Step:
    """The forward that is running, and how many attention calls it has come to.

    Attributes
    ----------
    computed : int
        How many of the next whole blocks have been computed already, by the one before them.
    """

    def __init__(
        self, backend: AttentionBackend, batch: AttentionBatch, calls: Sequence[_Call]
    ) -> None:
        self.backend = backend
        self.batch = batch
        self.computed = 0
        self._calls = calls
        self._next = 0

    def next_call(self) -> _Call:
        self._next += 1
        return self._calls[self._next - 1]

    def direct_layers(self, most: int) -> list[DirectLayer]:
        """What the next attention calls read and write, for whole blocks; they have been made.

        As many as read alike, at most `most`. None, and nothing has been taken, if attention must
        be asked for.
        """
        if not isinstance(self.backend, NativeBackend):
            return []
        calls = self._calls[self._next : self._next + most]
        alike = takewhile(lambda call: call.writes and call.span == calls[0].span, calls)
        layers = [self.backend.direct(call.store, self.batch, call.span) for call in alike]
        self._next += len(layers)
        return layers


def running_step() -> Step | None:
    """The step that is running; None while a model is only being looked at."""
    step: Step | None = getattr(_running, "step", None)
    return step


class FunctionAdapter:
    """Routes a registry model's attention to a backend; see `ModelAdapter`.

    A model's layers are told apart by the order of their attention calls, not by ``layer_idx``: a
    model that runs through its layers several times keeps keys and values for each time.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.max_positions = max_positions(model)
        self.layers: list[LayerShape] = []
        self._calls: list[_Call] = []
        self._parameters = forward_parameters(model)
        if "position_ids" not in self._parameters:
            raise refuse(model, "its forward takes no position_ids")
        self._before = _implementations(model.config)
        model.set_attn_implementation(IMPLEMENTATION)
        try:
            self._probe()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the model its own attention back."""
        self.model.set_attn_implementation(self._before)

    @torch.no_grad()
    def forward(
        self,
        backend: AttentionBackend,
        batch: AttentionBatch,
        tokens: torch.Tensor,
        logit_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """See `ModelAdapter.forward`."""
        step = Step(backend, batch, self._calls)

        def call(
            module: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            scaling: float | None,
            keywords: dict[str, Any],
        ) -> torch.Tensor:
            this = step.next_call()
            attention = LayerAttention(
                this.store,
                query.shape[-1] ** -0.5 if scaling is None else scaling,
                this.span,
                keywords.get("softcap") or 0.0,
                _sinks(keywords),
            )
            out = backend.forward(
                attention,
                batch,
                query[0].transpose(0, 1),
                key[0].transpose(0, 1) if this.writes else None,
                value[0].transpose(0, 1) if this.writes else None,
            )
            return out[None]

        with _answering(call, step):
            return self._run(tokens, batch.position_ids, logit_tokens)

    def _run(
        self, tokens: torch.Tensor, positions: torch.Tensor, logit_tokens: torch.Tensor
    ) -> torch.Tensor:
        device = self.model.device
        tokens, positions, logit_tokens = (
            send(tensor, device) for tensor in (tokens, positions, logit_tokens)
        )
        keywords: dict[str, Any] = {"position_ids": positions[None], "use_cache": False}
        if "logits_to_keep" in self._parameters:
            keywords["logits_to_keep"] = logit_tokens
        logits: torch.Tensor = self.model(input_ids=tokens[None], **keywords).logits[0]
        if "logits_to_keep" not in self._parameters:
            logits = logits[logit_tokens]
        return logits

    @torch.no_grad()
    def _probe(self) -> None:
        """Learn from one small forward what each attention call keeps, and which calls share."""
        config = text_config(self.model)
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []

        def call(
            module: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            scaling: float | None,
            keywords: dict[str, Any],
        ) -> torch.Tensor:
            self._refuse_call(module, query, key, keywords)
            layer = getattr(module, "layer_idx", None)
            span = layer_span(config, len(self._calls) if layer is None else layer, keywords)
            # A call with an earlier one's very tensors reads that one's KV.
            store = next((i for i, (k, v) in enumerate(seen) if k is key and v is value), len(seen))
            writes = store == len(seen)
            if writes:
                self.layers.append(LayerShape(key.shape[1], key.shape[3], value.shape[3]))
                seen.append((key, value))
            self._calls.append(_Call(store, writes, span))
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=True
            )
            return out.transpose(1, 2)

        with _answering(call):
            self._run(probe_tokens(self.model, 3), torch.arange(3), torch.tensor([2]))
        if not self.layers:
            raise refuse(self.model, "no layer asked for attention")

    def _refuse_call(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, keywords: dict[str, Any]
    ) -> None:
        """Refuse an attention call that no backend computes."""
        causal = keywords.get("is_causal")
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            raise refuse(self.model, "its attention is not causal")
        if keywords["attention_mask"] is not None:
            # We register no mask function, so this is none that transformers made.
            raise refuse(self.model, "it hands attention a mask of its own")
        for name, item in keywords.items():
            if isinstance(item, torch.Tensor) and name not in KNOWN_TENSORS:
                what = UNSUPPORTED.get(name, f"{name!r}, which is not known here")
                raise refuse(self.model, f"its attention uses {what}")
        if key.shape[2] != query.shape[2] or query.shape[1] % key.shape[1]:
            raise refuse(self.model, "its attention has other keys than its own tokens'")


def _implementations(config: Any) -> dict[str, str | None]:
    """The attention of a model and of its parts, as ``set_attn_implementation`` takes it."""
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    return {
        "": config._attn_implementation,
        **{name: part._attn_implementation for name, part in parts.items() if part is not None},
    }


def _sinks(keywords: dict[str, Any]) -> torch.Tensor | None:
    sinks: torch.Tensor | None = keywords.get("s_aux")
    if sinks is None:
        sinks = keywords.get("sinks")
    return None if sinks is None else sinks.flatten()
