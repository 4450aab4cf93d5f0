"""ModelAdapter: what the engine asks of a model, and the choice of how to get it.

A model that goes through transformers' attention registry is given our attention function; one
that computes attention itself is given a cache that reads the paged store. Neither is believed
before it has reproduced the model's own logits on a short text, in two chunks beside a decode.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from radixkv.attention import (
    AttentionBackend,
    AttentionBatch,
    KVStore,
    LayerShape,
    Row,
    choose_backend,
    make_batch,
)
from radixkv.errors import ModelNotSupportedError
from radixkv.model.blocks import FusedAdapter, can_fuse
from radixkv.model.cache_adapter import CacheAdapter
from radixkv.model.function_adapter import IMPLEMENTATION, FunctionAdapter
from radixkv.model.layers import (
    Model,
    counts_tokens,
    probe_tokens,
    reason_of,
    refuse,
    refuse_unpageable,
    text_config,
)

logger = logging.getLogger(__name__)

VERIFIED_TOKENS = 24
# How far logits may be off, over their spread, and still be the same model's.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class ModelAdapter(Protocol):
    """A model whose keys and values live in a paged store.

    Attributes
    ----------
    layers : list of LayerShape
        What the store must hold.
    max_positions : int or None
        The length from which the model's keys depend on how long their text is, so that texts of
        different lengths cannot share them; None for a model without.
    """

    layers: list[LayerShape]
    max_positions: int | None

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
            Token ids in the batch's order; on the host, as are the batch's tensors.
        logit_tokens : int64 tensor (wanted,)
            Which tokens' logits are wanted; in any order, on the host.

        Returns
        -------
        tensor (wanted, vocabulary)
            On the model's device.
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
        With the reason: state that is no KV, attention that looks ahead, or logits that differ
        from the model's own. The model is left as it was.
    """
    refuse_unpageable(model)
    if model.config._attn_implementation == IMPLEMENTATION:
        raise refuse(model, "another adapter serves it already; close that one first")
    tokens = probe_tokens(model, VERIFIED_TOKENS)
    expected = _own_logits(model, tokens)
    reasons = []
    for kind in _kinds(model):
        try:
            return _verified(kind(model), model, tokens, expected)
        except ModelNotSupportedError as error:
            reasons.append(reason_of(model, error))
        except Exception as error:  # a model's code, on a path that its authors may never have run
            reasons.append(f"{type(error).__name__}: {error}")
    raise refuse(model, "; ".join(dict.fromkeys(reasons)))


def _kinds(model: Model) -> list[Callable[[Model], ModelAdapter]]:
    """What may serve a model, fastest first."""
    one_by_one = partial(CacheAdapter, pad=False)
    if counts_tokens(model):
        return [one_by_one]
    if type(model)._can_set_attn_implementation():
        fused: list[Callable[[Model], ModelAdapter]] = [FusedAdapter] if can_fuse(model) else []
        return [*fused, FunctionAdapter, CacheAdapter, one_by_one]
    return [CacheAdapter, one_by_one]


def _own_logits(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """The model's own logits (tokens, vocabulary), if they are fit to compare with."""
    # Texts within a window of attention may be given another mask, or none.
    starts = (VERIFIED_TOKENS // 2, 3)
    try:
        with torch.inference_mode(), _softcap_applied(model):
            ids = tokens[None].to(model.device)
            logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
            alone = [model(input_ids=ids[:, :end], use_cache=False).logits[0] for end in starts]
    except Exception as error:
        raise refuse(
            model, f"its own forward fails with {type(error).__name__}: {error}"
        ) from error
    if not bool(logits.isfinite().all()):
        raise refuse(model, "its own logits are not finite")
    if any(_distance(a, logits[: len(a)], model.dtype) > _tolerance(model) for a in alone):
        raise refuse(model, "its attention is not causal: later tokens change earlier logits")
    return logits


@contextmanager
def _softcap_applied(model: Model) -> Iterator[None]:
    """A model's own attention with its softcap, which transformers' SDPA leaves out.

    Older releases use SDPA for Gemma 2 all the same; newer ones compute its attention by "eager".
    """
    config = text_config(model)
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is None or config._attn_implementation != "sdpa":
        yield
        return
    logger.warning(
        "%s was trained with a softcap of %g, which transformers' SDPA leaves out: it is applied"
        ' here, so logits are those of attn_implementation="eager"',
        type(model).__name__,
        softcap,
    )
    config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def _verified(
    adapter: ModelAdapter, model: Model, tokens: torch.Tensor, expected: torch.Tensor
) -> ModelAdapter:
    """The adapter, if it computes the model's own logits in chunks over a paged store."""
    half, size = VERIFIED_TOKENS // 2, 4
    blocks = -(-VERIFIED_TOKENS // size)
    store = KVStore(adapter.layers, 2 * blocks, size, model.dtype, model.device)
    # Block tables that run backwards, so that nothing is right by being contiguous.
    whole = np.arange(2 * blocks - 1, blocks - 1, -1, dtype=np.int32)
    short = np.arange(blocks - 1, -1, -1, dtype=np.int32)
    steps = [
        [Row(whole, 0, half)],
        [Row(whole, half, VERIFIED_TOKENS - half - 1), Row(short, 0, half)],
        [Row(whole, VERIFIED_TOKENS - 1, 1), Row(short, half, 1)],
    ]
    worst = 0.0
    try:
        backend = choose_backend(store)  # What will serve is what is tried.
        for rows in steps:
            batch = make_batch(rows, size)
            wanted = torch.from_numpy(batch.positions)
            everything = torch.arange(batch.num_tokens)
            logits = adapter.forward(backend, batch, tokens[wanted], everything)
            for lo, hi in pairwise(batch.offsets.tolist()):
                distance = _distance(logits[lo:hi], expected[wanted[lo:hi]], model.dtype)
                worst = max(worst, distance)
    except BaseException:
        adapter.close()
        raise
    logger.debug("%s: logits within %.2g of their spread", type(model).__name__, worst)
    if worst > _tolerance(model):
        adapter.close()
        raise refuse(model, f"its logits are off by {worst:.2g} of their spread")
    return adapter


def _distance(logits: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float:
    """How far a row's logits are off, over their spread; infinite if any is not a number.

    In float32 the worst token counts. In half precision rounding may send a token to another
    expert, which says nothing of the adapter, so there the median does.
    """
    off = (logits.float() - expected.float()).square().mean(-1).sqrt()
    if not bool(off.isfinite().all()):
        return float("inf")
    spread = float(expected.float().std()) or 1.0
    return float(off.max() if dtype == torch.float32 else off.median()) / spread


def _tolerance(model: Model) -> float:
    return TOLERANCE.get(model.dtype, 1e-3)
