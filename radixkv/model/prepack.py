"""Weights in the order in which they are multiplied, so that none is reordered at every step.

For bfloat16 on a CPU. oneDNN's order is 1.2 to 1.5 times as fast as a plain weight below 256 tokens
a step, with the same bits. Its operators are private to torch: they are tried on every layer before
one is replaced, and where they are missing or differ the model stays as it was.

Where `radixkv.native` has them, steps of few tokens use weights in AMX tiles, which whole decoder
blocks are computed from: see `radixkv.model.whole_block`. That is a second copy, made only where
there is plenty of room for it. Sums in another order: of 10,000 products one may differ in its last
bit from oneDNN's.
"""

from __future__ import annotations

import torch
from torch import nn

from radixkv import native
from radixkv.memory import available_memory, prefer_large_pages, return_freed_memory
from radixkv.model.layers import Model
from radixkv.model.loading import is_native

TRIED_ROWS = 3
# Most tokens of a step whose products are made from tiles. Up to 64 they took 0.5 to 1 of oneDNN's
# CPU time at the demo model's shapes, at 256 1 to 1.3, at 2,048 1.2 to 1.7.
TILED_ROWS = 128
# Both dimensions of a weight in tiles are multiples of this.
TILE_MULTIPLE = 32
# Share of the available memory that the tiles may take.
TILES_SHARE = 1 / 8


class ReplacedLinear(nn.Module):
    """What stands in an `nn.Linear`'s place, over its weight in another form.

    Attributes
    ----------
    tiles : tensor (outputs / 16, inputs / 32, 16, 32) or None
        The weight in tiles: row r of each holds inputs 2r and 2r + 1 of sixteen outputs.
    scales : float32 tensor (outputs,) or None
        What a product with each output's int8 weights is multiplied by.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.tiles: torch.Tensor | None = None
        self.scales: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """The weight as the model has it, made anew; (out_features, in_features)."""
        raise NotImplementedError

    @property
    def num_bytes(self) -> int:
        """Of the weight, in all the forms that are kept."""
        kept = [tensor for tensor in (self.tiles, self.scales) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def unpacked(self) -> nn.Linear:
        """A plain layer with this one's weight."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(self.weight, requires_grad=False)
        linear.bias = self.bias
        return linear.eval()


class PackedLinear(ReplacedLinear):
    """An `nn.Linear` over a reordered weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(
            linear.weight.detach(), None
        )

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it was, made anew; (out_features, in_features)."""
        return self._packed.to_dense()

    @property
    def num_bytes(self) -> int:
        """Of the weight, in both orders."""
        return super().num_bytes + 2 * self.in_features * self.out_features

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """As `nn.Linear.forward`."""
        output: torch.Tensor
        if self.tiles is not None and inputs.numel() <= TILED_ROWS * self.in_features:
            output = torch.ops.radixkv.linear(inputs, self.tiles, self.bias)
        else:
            output = torch.ops.mkldnn._linear_pointwise(
                inputs, self._packed, self.bias, "none", [], ""
            )
        return output

    def tile(self, room: torch.Tensor) -> None:
        """Keep the weight in tiles too, in ``room``; bfloat16 (outputs * inputs,)."""
        self.tiles = room.view(self.out_features // 16, self.in_features // 32, 16, 32)
        self.tiles.copy_(tiled(self.weight))


def tiled(weight: torch.Tensor) -> torch.Tensor:
    """A weight (outputs, inputs) in tiles; (outputs / 16, inputs / 32, 16, 32)."""
    outputs, inputs = weight.shape
    pairs = weight.reshape(outputs // 16, 16, inputs // 32, 16, 2)
    return pairs.permute(0, 2, 3, 1, 4).reshape(outputs // 16, inputs // 32, 16, 32).contiguous()


def pack_linears(model: Model) -> int:
    """Replace the model's linear layers where that is faster and oneDNN's order changes no bit.

    Returns how many were replaced: 0 on anything but a CPU with bfloat16 instructions. A weight
    that other modules use as well (a head tied to the embedding) stays with them too.
    """
    replaced = []
    for parent, name, child in linears_of(model):
        if can_pack(child) and (packed := _packed(child)) is not None:
            setattr(parent, name, packed)
            replaced.append(packed)
    _tile(replaced)
    return_freed_memory()
    return len(replaced)


def unpack_linears(model: Model) -> None:
    """Give the model its own linear layers back; weights that were tied are tied again."""
    for parent, name, child in _children(model):
        if isinstance(child, ReplacedLinear):
            setattr(parent, name, child.unpacked())
    model.tie_weights()


def weight_bytes(model: Model) -> int:
    """Bytes of the model's weights as they are kept now, in all forms; shared ones count once."""
    tensors = {each.data_ptr(): each for each in (*model.parameters(), *model.buffers())}
    plain = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    replaced = {m for m in model.modules() if isinstance(m, ReplacedLinear)}
    return int(plain) + sum(linear.num_bytes for linear in replaced)


def linears_of(model: Model) -> list[tuple[nn.Module, str, nn.Linear]]:
    """The model's plain linear layers, each with its parent and its name there."""
    return [
        (parent, name, child)
        for parent, name, child in _children(model)
        if type(child) is nn.Linear
    ]


def _children(model: Model) -> list[tuple[nn.Module, str, nn.Module]]:
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
    ]


def can_pack(linear: nn.Linear) -> bool:
    """Whether the layer is of bfloat16, on a CPU that computes in it."""
    weight = linear.weight
    return (
        weight.dtype is torch.bfloat16 and weight.device.type == "cpu" and is_native(weight.dtype)
    )


@torch.inference_mode()
def _packed(linear: nn.Linear) -> PackedLinear | None:
    inputs = torch.linspace(-1, 1, TRIED_ROWS * linear.in_features, dtype=torch.bfloat16)
    inputs = inputs.view(TRIED_ROWS, -1)
    try:
        packed = PackedLinear(linear)
        same = torch.equal(packed(inputs), linear(inputs))
    except (AttributeError, RuntimeError, TypeError):
        # Another torch may not have these operators, or take other arguments.
        return None
    return packed if same else None


def _tile(linears: list[PackedLinear]) -> None:
    """Keep weights in tiles too: all that can be, if there is room."""
    fit = [
        linear
        for linear in linears
        if not (linear.in_features % TILE_MULTIPLE or linear.out_features % TILE_MULTIPLE)
    ]
    sizes = [linear.in_features * linear.out_features for linear in fit]
    if fit and native.has_attention() and 2 * sum(sizes) <= TILES_SHARE * available_memory():
        # All in one piece, of which a step reads every byte.
        room = torch.empty(sum(sizes), dtype=torch.bfloat16)
        prefer_large_pages(room.data_ptr(), 2 * sum(sizes))
        for linear, part in zip(fit, room.split(sizes), strict=True):
            linear.tile(part)
