"""Attention over some keys, and merging partial results by log-sum-exp."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

# Stands for minus infinity: the difference of two of them is a number.
LSE_FLOOR = -1e30


@dataclass(slots=True)
class KeyMask:
    """Which keys each query sees.

    Attributes
    ----------
    visible : bool tensor, broadcastable to (batch, heads, queries, keys)
    blind : bool tensor (batch, heads, queries) or None
        Queries that see no key at all; None if there are none.
    """

    visible: torch.Tensor
    blind: torch.Tensor | None = None
    _bias: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, visible: torch.Tensor) -> KeyMask:
        blind = ~visible.any(-1)
        return cls(visible, blind if bool(blind.any()) else None)

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """0 for visible keys, minus infinity for the others; made once a dtype."""
        bias = self._bias.get(dtype)
        if bias is None:
            bias = torch.zeros(self.visible.shape, dtype=dtype)
            bias.masked_fill_(~self.visible, -torch.inf)
            self._bias[dtype] = bias
        return bias

    def for_groups(self, groups: int) -> KeyMask:
        """The mask of (queries × groups) packed queries, each query's heads side by side."""
        if groups == 1:
            return self
        blind = self.blind
        return KeyMask(
            self.visible.repeat_interleave(groups, -2),
            None if blind is None else blind.repeat_interleave(groups, -1),
        )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: KeyMask | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries over some keys, with its log-sum-exp.

    Parameters
    ----------
    query : tensor (batch, heads, queries, key_dim)
    key, value : tensors (batch, kv_heads, keys, key_dim / value_dim)
        At least one key; ``heads`` is a multiple of ``kv_heads``. Strided views are welcome.
    scale : float
    causal : bool
        Query i sees keys up to i.
    mask : KeyMask, optional
        A query that sees no key gets zeros and `LSE_FLOOR`.
    softcap : float
        Logits become ``softcap × tanh(logit / softcap)``; 0 for off.

    Returns
    -------
    out : tensor (batch, heads, queries, value_dim), in the query's dtype
    lse : float32 tensor (batch, heads, queries), natural logarithm
    """
    if softcap:
        return _attend_plainly(query, key, value, scale, causal, mask, softcap)
    return _attend_fused(query, key, value, scale, causal, mask)


def _attend_fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool,
    mask: KeyMask | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    key_dim, value_dim = key.shape[-1], value.shape[-1]
    # The fused operator reads a wider stride of the last axis as if it were 1, without a word.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    # It wants keys and values of one width.
    if key_dim < value_dim:
        query, key = (F.pad(x, (0, value_dim - key_dim)) for x in (query, key))
    elif value_dim < key_dim:
        value = F.pad(value, (0, key_dim - value_dim))
    bias = None if mask is None else mask.bias(query.dtype)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=bias, scale=scale
    )
    if mask is not None and mask.blind is not None:
        # For a row without a key the operator's log-sum-exp is 0, which a merge would believe.
        out = out.masked_fill(mask.blind.unsqueeze(-1), 0)
        lse = lse.masked_fill(mask.blind, LSE_FLOOR)
    return out[..., :value_dim], lse


def _attend_plainly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool,
    mask: KeyMask | None,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, queries, _ = query.shape
    kv_heads = key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(wide).unflatten(1, (kv_heads, heads // kv_heads))
    logits = grouped @ key.to(wide).transpose(-1, -2).unsqueeze(2) * scale
    logits = softcap * torch.tanh(logits / softcap)
    if causal:
        seen = torch.ones(queries, key.shape[-2], dtype=torch.bool).tril_()
        logits = logits.masked_fill(~seen, -torch.inf)
    if mask is not None:
        logits = logits.masked_fill(~mask.visible.unsqueeze(2), -torch.inf)
    lse = torch.logsumexp(logits, -1).clamp_min_(LSE_FLOOR)
    out = torch.exp(logits - lse.unsqueeze(-1)) @ value.to(wide).unsqueeze(2)
    shape = (batch, heads, queries)
    return out.reshape(*shape, -1).to(query.dtype), lse.reshape(shape)


def merge_into(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merge a partial result over other keys into ``out`` and ``lse``, in place.

    Parameters
    ----------
    out, part : tensors (..., value_dim)
    lse, part_lse : float32 tensors (...)
    """
    weight = torch.sigmoid(part_lse - lse).unsqueeze(-1).to(out.dtype)
    out.lerp_(part.to(out.dtype), weight)
    lse.copy_(torch.logaddexp(lse, part_lse))
