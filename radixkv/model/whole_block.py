"""WholeBlock: decoder blocks in one compiled operator, as many at once as follow each other.

Between operators, threads wait for each other and results go through memory; a decode step of a
small model spends as long there, and in Python between its layers, as in its products. `FusedBlock`
is the reference, and computes what this does not: norms behind attention, caps, heads of other
widths.

The first block of several computes all of them, and the others hand on what they are given. Which
follow each other is seen in the forward that an adapter makes to learn about its model: a block's
input must be the very tensor that the one before it returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from radixkv.attention import LayerShape
from radixkv.attention.native_backend import fits
from radixkv.model.function_adapter import running_step
from radixkv.model.operators import Norm
from radixkv.model.prepack import ReplacedLinear

if TYPE_CHECKING:
    from radixkv.model.blocks import FusedBlock

Embeddings = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Parts:
    """A block's weights as the operator takes them: see its schema."""

    weights: list[torch.Tensor]
    scales: list[torch.Tensor]  # of weights in int8
    norms: list[torch.Tensor]
    qkv_biases: list[torch.Tensor]  # one or none
    o_biases: list[torch.Tensor]
    # Attention's scale, eps, a head's eps, and what a residual is multiplied by.
    numbers: tuple[float, float, float, float]
    rotates: bool

    def alike(self, other: _Parts) -> bool:
        """Whether one call of the operator can compute both."""
        return self._kind() == other._kind()

    def _kind(self) -> tuple[object, ...]:
        lists = (self.weights, self.scales, self.norms, self.qkv_biases, self.o_biases)
        shapes = [[tensor.shape for tensor in tensors] for tensors in lists]
        return shapes, self.numbers, self.rotates


class WholeBlock:
    """Computes a `FusedBlock` at once, and those that follow it, where that can be done."""

    def __init__(self, block: FusedBlock) -> None:
        # In a tuple: the block is no part of this, and has no second parent.
        self._block = (block,)
        self._next: WholeBlock | None = None
        self._seen_next = False
        # This block's and those of the blocks that follow, once weights have got their tiles.
        self._all_parts: list[_Parts] = []

    def followed_by(self, other: WholeBlock | None) -> None:
        """Note what a forward came to after this block; None for anything but a block."""
        if self._seen_next and other is not self._next:
            other = None  # Not the same each time.
        self._next, self._seen_next = other, True

    def __call__(self, inputs: torch.Tensor, embeddings: Embeddings | None) -> torch.Tensor | None:
        """The block's output, or its input if its output is that already; (1, tokens, hidden).

        None, and nothing was done, if it cannot be.
        """
        step = running_step()
        if step is None or inputs.dtype is not torch.bfloat16:
            return None
        if step.computed:
            step.computed -= 1
            return inputs
        if not self._all_parts:
            self._all_parts = self._find_parts()
        layers = step.direct_layers(len(self._all_parts))
        if not layers:
            return None
        step.computed = len(layers) - 1
        parts, block, first = self._all_parts[: len(layers)], self._block[0], layers[0]
        cos = sin = None
        if block.rotates and embeddings is not None:
            cos, sin = block.rotary.angles(embeddings, inputs.dtype)
        output: torch.Tensor = torch.ops.radixkv.decoder_layers(
            inputs[0],
            [weight for part in parts for weight in part.weights],
            [scales for part in parts for scales in part.scales],
            [norm for part in parts for norm in part.norms],
            [bias for part in parts for bias in part.qkv_biases],
            [bias for part in parts for bias in part.o_biases],
            cos, sin,
            [layer.keys for layer in layers],
            [layer.values for layer in layers],
            first.slots, first.copies, first.reads, *parts[0].numbers,
        )  # fmt: skip
        return output[None]

    def _find_parts(self) -> list[_Parts]:
        found: dict[WholeBlock, _Parts] = {}
        block: WholeBlock | None = self
        while block is not None and block not in found:
            parts = _parts_of(block._block[0])
            if parts is None or (found and not parts.alike(found[self])):
                break
            found[block] = parts
            block = block._next
        return list(found.values())


class Chain:
    """Notes which of a model's blocks follow each other, with nothing between."""

    def __init__(self) -> None:
        self._last: tuple[WholeBlock, torch.Tensor, Embeddings | None] | None = None

    def note(
        self,
        block: WholeBlock,
        inputs: torch.Tensor,
        embeddings: Embeddings | None,
        output: torch.Tensor,
    ) -> None:
        """A block was computed by itself; where a model is only being looked at."""
        if running_step() is not None:
            return
        if self._last is not None:
            before, handed_on, same = self._last
            follows = inputs is handed_on and embeddings is same
            before.followed_by(block if follows else None)
        self._last = block, output, embeddings


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
        [linear.bias for linear in linears[:1] if linear.bias is not None],
        [linear.bias for linear in linears[1:2] if linear.bias is not None],
        (block.scaling, first.eps, of_heads[0].eps if of_heads else 0.0, block.residual_scale),
        block.rotates,
    )


def _one_eps(norms: list[Norm]) -> bool:
    return len({norm.eps for norm in norms}) <= 1
