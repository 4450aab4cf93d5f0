"""WholeBlock: a decoder block in one compiled operator.

Between operators, threads wait for each other and results go through memory; a decode step of a
small model spends as long there as in its products. `FusedBlock` is the reference, and computes
what this does not: norms behind attention, caps, heads of other widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from radixkv.attention import LayerShape
from radixkv.attention.native_backend import fits
from radixkv.model.function_adapter import direct_layer
from radixkv.model.operators import Norm
from radixkv.model.prepack import ReplacedLinear

if TYPE_CHECKING:
    from radixkv.model.blocks import FusedBlock


@dataclass(frozen=True, slots=True)
class _Parts:
    """A block's weights as the operator takes them: see its schema."""

    weights: list[torch.Tensor]
    scales: list[torch.Tensor]  # of weights in int8
    norms: list[torch.Tensor]
    qkv_bias: torch.Tensor | None
    o_bias: torch.Tensor | None
    eps: float
    head_eps: float


class WholeBlock:
    """Computes a `FusedBlock` at once, where that can be done."""

    def __init__(self, block: FusedBlock) -> None:
        # In a tuple: the block is no part of this, and has no second parent.
        self._block = (block,)
        self._parts: _Parts | None = None

    def __call__(
        self, hidden: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor | None:
        """The block's output (tokens, hidden); None, and nothing was done, if it cannot be."""
        if hidden.dtype is not torch.bfloat16:
            return None
        if self._parts is None:
            # Weights get their tiles after the block is made.
            self._parts = _parts_of(self._block[0])
        parts = self._parts
        if parts is None or (layer := direct_layer()) is None:
            return None
        block = self._block[0]
        cos = sin = None
        if block.rotates and embeddings is not None:
            cos, sin = block.rotary.angles(embeddings, hidden.dtype)
        output: torch.Tensor = torch.ops.radixkv.decoder_layer(
            hidden, parts.weights, parts.scales, parts.norms, parts.qkv_bias, parts.o_bias,
            cos, sin, layer.keys, layer.values, layer.slots, layer.copies, layer.reads,
            block.scaling, parts.eps, parts.head_eps, block.residual_scale,
        )  # fmt: skip
        return output


def _parts_of(block: FusedBlock) -> _Parts | None:
    """A block's weights, if they are all in tiles and it has the operator's shape."""
    linears: list[Any] = [block.qkv_proj, block.o_proj, block.gate_up_proj, block.down_proj]
    replaced = [linear for linear in linears if isinstance(linear, ReplacedLinear)]
    weights = [linear.tiles for linear in replaced if linear.tiles is not None]
    scales = [linear.scales for linear in replaced if linear.scales is not None]
    first, second = block.norm_before_attention, block.norm_before_mlp
    around = (block.norm_after_attention, block.norm_after_mlp, block.keywords["softcap"])
    if len(weights) < len(linears) or first is None or second is None or any(around):
        return None
    heads, kv_heads = (width // block.head_dim for width in (block.query_width, block.key_width))
    if not fits(LayerShape(kv_heads, block.head_dim, block.head_dim), heads):
        return None
    if len(scales) not in (0, len(linears)):
        return None
    if not block.gate.is_silu or any(linear.bias is not None for linear in linears[2:]):
        return None
    of_heads = [norm for norm in (block.query_norm, block.key_norm) if norm is not None]
    norms = [first, second, *of_heads]
    if any(norm.weight.dtype is not torch.bfloat16 for norm in norms):
        return None
    if any(norm.weight.numel() != block.head_dim for norm in of_heads):
        return None
    if not (_one_eps(norms[:2]) and _one_eps(of_heads)):
        return None
    return _Parts(
        weights,
        scales,
        [norm.weight for norm in norms],
        linears[0].bias,
        linears[1].bias,
        first.eps,
        of_heads[0].eps if of_heads else 0.0,
    )


def _one_eps(norms: list[Norm]) -> bool:
    return len({norm.eps for norm in norms}) <= 1
