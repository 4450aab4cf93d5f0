"""ModelAdapter: what the engine asks of a model, and the choice of how to get it.

A model that goes through transformers' attention registry is given our attention function; one
that computes attention itself is given a cache that reads the paged store. Neither is believed
before it has reproduced the model's own logits on a short text, in two chunks beside a decode.
"""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np
import torch

from radixkv.attention import (
    AttentionBackend,
    AttentionBatch,
    KVStore,
    LayerShape,
    Row,
    TorchBackend,
    make_batch,
)
from radixkv.errors import ModelNotSupportedError
from radixkv.model.cache_adapter import CacheAdapter
from radixkv.model.function_adapter import FunctionAdapter
from radixkv.model.layers import Model, probe_tokens, refuse, refuse_unpageable

logger = logging.getLogger(__name__)

VERIFIED_TOKENS = 24
# Largest difference of logits that still counts as the same model, over their spread.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


class ModelAdapter(Protocol):
    """A model whose keys and values live in a paged store.

    Attributes
    ----------
    layers : list of LayerShape
        What the store must hold.
    """

    layers: list[LayerShape]

    def forward(
        self,
        backend: AttentionBackend,
        batch: AttentionBatch,
        tokens: torch.Tensor,
        logit_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Run one step.

        Parameters
        ----------
        backend : AttentionBackend
        batch : AttentionBatch
        tokens : int64 tensor (tokens,)
            Token ids in the batch's order.
        logit_tokens : int64 tensor (wanted,)
            Which tokens' logits are wanted.

        Returns
        -------
        tensor (wanted, vocabulary)
        """
        ...

    def close(self) -> None:
        """Give the model back as it was."""
        ...


def adapt(model: Model) -> ModelAdapter:
    """The adapter that serves this model.

    Raises
    ------
    ModelNotSupportedError
        With the reason: state that is no KV, or logits that differ from the model's own.
    """
    refuse_unpageable(model)
    tokens = probe_tokens(model, VERIFIED_TOKENS)
    with torch.inference_mode():
        expected: torch.Tensor = model(input_ids=tokens[None], use_cache=False).logits[0]
    reasons = []
    registry = type(model)._can_set_attn_implementation()
    kinds: list[type[FunctionAdapter] | type[CacheAdapter]] = [CacheAdapter]
    for kind in [FunctionAdapter, *kinds] if registry else kinds:
        try:
            adapter = kind(model)
        except ModelNotSupportedError as error:
            reasons.append(str(error))
            continue
        difference = _difference(adapter, model, tokens, expected)
        if difference <= TOLERANCE.get(expected.dtype, 1e-3):
            return adapter
        adapter.close()
        reasons.append(f"{kind.__name__} changes its logits by {difference:.2g} of their spread")
    raise refuse(model, "; ".join(reasons))


def _difference(
    adapter: ModelAdapter, model: Model, tokens: torch.Tensor, expected: torch.Tensor
) -> float:
    """Logits computed in chunks over a paged store against the model's own, over their spread."""
    half, size = VERIFIED_TOKENS // 2, 4
    blocks = -(-VERIFIED_TOKENS // size)
    store = KVStore(adapter.layers, 2 * blocks, size, expected.dtype)
    backend = TorchBackend(store)
    # Block tables that run backwards, so that nothing is right by being contiguous.
    whole = np.arange(2 * blocks - 1, blocks - 1, -1, dtype=np.int32)
    short = np.arange(blocks - 1, -1, -1, dtype=np.int32)
    steps = [
        [Row(whole, 0, half)],
        [Row(whole, half, VERIFIED_TOKENS - half - 1), Row(short, 0, half)],
        [Row(whole, VERIFIED_TOKENS - 1, 1), Row(short, half, 1)],
    ]
    worst = 0.0
    with torch.inference_mode():
        for rows in steps:
            batch = make_batch(rows, size)
            wanted = torch.from_numpy(batch.positions)
            everything = torch.arange(batch.num_tokens)
            logits = adapter.forward(backend, batch, tokens[wanted], everything)
            worst = max(worst, float((logits - expected[wanted]).abs().max()))
    spread = float(expected.float().std()) or 1.0
    logger.debug("%s: logits within %.2g of their spread", type(model).__name__, worst / spread)
    return worst / spread if worst == worst else float("inf")
