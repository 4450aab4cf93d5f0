"""int8 weights: half the bytes of bfloat16, which is what a step of few rows waits for.

Each output of a linear layer has one scale, the largest of its weights' absolute values over 127;
activations stay in bfloat16. Steps of up to `INT8_TILED_ROWS` tokens are computed from the bytes:
they become bfloat16 on their way into the tiles, exactly, and sums in float32 are scaled last.
Longer ones go through oneDNN, over weights that are made for one product and let go of.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from radixkv import native
from radixkv.devices import resolve_device
from radixkv.errors import ConfigError
from radixkv.model.layers import Model
from radixkv.model.loading import DTYPES
from radixkv.model.prepack import TILE_MULTIPLE, ReplacedLinear, can_pack, linears_of, tiled

logger = logging.getLogger(__name__)

QUANTIZATIONS = ("int8",)
LARGEST = 127
# Most tokens of a step whose products are made from the bytes. At the demo model's shapes 512 took
# 0.93 of the CPU time of weights made for oneDNN, 2,048 took 1.4.
INT8_TILED_ROWS = 512
# Outputs that are quantised, or made for a long step, at one time.
OUTPUTS_AT_ONCE = 4096


class Int8Linear(ReplacedLinear):
    """An `nn.Linear` over int8 weights, with a scale for each output.

    Tiles have outputs in multiples of 32; what the layer lacks to that is made and left out.
    """

    tiles: torch.Tensor
    scales: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        padding = -self.out_features % TILE_MULTIPLE
        tiles, scales = [], []
        for part in linear.weight.detach().split(OUTPUTS_AT_ONCE):
            short = -len(part) % TILE_MULTIPLE
            whole, its_scales = quantized(functional.pad(part, (0, 0, 0, short)))
            tiles.append(tiled(whole))
            scales.append(its_scales)
        self.tiles, self.scales = torch.cat(tiles), torch.cat(scales)
        self._padded_bias = None if self.bias is None else functional.pad(self.bias, (0, padding))

    @property
    def weight(self) -> torch.Tensor:
        """What is computed with, rounded to bfloat16 and made anew; (out_features, in_features)."""
        return torch.cat([weight for weight, _ in self._dequantized()])[: self.out_features]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """As `nn.Linear.forward`."""
        output: torch.Tensor
        if inputs.numel() <= INT8_TILED_ROWS * self.in_features:
            output = torch.ops.radixkv.linear(inputs, self.tiles, self._padded_bias, self.scales)
        else:
            parts = [functional.linear(inputs, *each) for each in self._dequantized()]
            output = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return output[..., : self.out_features]

    def _dequantized(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """The weight in bfloat16 and the bias, some outputs at a time."""
        for start in range(0, self.scales.numel(), OUTPUTS_AT_ONCE):
            end = start + OUTPUTS_AT_ONCE
            weight = torch.ops.radixkv.dequantize(
                self.tiles[start // 16 : end // 16], self.scales[start:end]
            )
            bias = self._padded_bias
            yield weight, None if bias is None else bias[start:end]


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight (outputs, inputs) in int8, and the float32 scale of each output."""
    wide = weight.float()
    scales = wide.abs().amax(1) / LARGEST
    # Outputs that are all zero, or as good as that, may have any scale.
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scales[:, None]).round().to(torch.int8), scales


def check_quantization(
    name: str | None, dtype: str | torch.dtype, device: str | torch.device, *, loaded: bool
) -> None:
    """See, before anything is loaded, whether a model can be served with such weights.

    Parameters
    ----------
    name : str or None
        None, for weights as they are, can always be had.
    loaded : bool
        Whether the model was loaded by somebody else.

    Raises
    ------
    ConfigError
        For a name that is none of `QUANTIZATIONS`; and on a GPU, in another dtype than bfloat16,
        without the compiled operators, and for a loaded model, whose weights are not ours to
        replace.
    """
    if name is None:
        return
    if name not in QUANTIZATIONS:
        near = difflib.get_close_matches(str(name), QUANTIZATIONS, n=1) or QUANTIZATIONS
        raise ConfigError(f"unknown quantization {name!r}; did you mean {' or '.join(near)}?")
    this = f"quantization={name!r}"
    if loaded:
        raise ConfigError(
            f"{this} needs the name or folder of a model: of one that is loaded already the "
            "weights would have to stay too"
        )
    if resolve_device(device).type != "cpu":
        raise ConfigError(f"{this} is for CPUs; use device='cpu', or leave it out")
    if dtype != "auto" and DTYPES.get(str(dtype), dtype) is not torch.bfloat16:
        raise ConfigError(f"{this} computes in bfloat16; leave dtype={str(dtype)!r} out")
    if (reason := _not_native()) is not None:
        raise ConfigError(f"{this} needs the compiled operators: {reason}; or leave it out")


def _not_native() -> str | None:
    """Why there are no products of int8 weights here; None if there are."""
    if native.has_attention():
        return None
    if (reason := native.missing_feature()) is not None:
        return reason
    if not torch.cpu.get_capabilities().get("amx_bf16"):
        return "they need a CPU with AMX for bfloat16"
    return "build them with python -m radixkv.native.build"


def quantize_linears(model: Model) -> int:
    """Replace the model's linear layers by such with int8 weights, and let go of theirs.

    Layers whose inputs are no multiple of 32 stay, and so does what is no `nn.Linear`: embeddings,
    experts that are one tensor. A head that is tied to the embedding is quantised; the embedding
    is not.

    Returns
    -------
    int
        How many were replaced.

    Raises
    ------
    ConfigError
        If none can be.
    """
    linears = linears_of(model)
    total, replaced = len(linears), 0
    while linears:
        # Nothing but the model may hold a layer, so that its weight goes before the next is read.
        parent, name, linear = linears.pop()
        if can_pack(linear) and linear.in_features % TILE_MULTIPLE == 0:
            setattr(parent, name, Int8Linear(linear))
            replaced += 1
    if not replaced:
        raise ConfigError(
            f"{type(model).__name__} has no linear layer whose weights could be int8; leave "
            "quantization out"
        )
    if replaced < total:
        logger.warning("%d of the model's %d linear layers have no int8", total - replaced, total)
    return replaced
