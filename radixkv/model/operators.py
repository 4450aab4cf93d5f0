"""What lies between the matrix products of a decoder block.

Each has two forms of the same meaning: torch's operators, and the compiled ones of
`radixkv.native`, which take one pass where torch takes up to eight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from radixkv import native


def takes(tensor: torch.Tensor) -> bool:
    """Whether the compiled operators are there, and take tensors like this one."""
    known = tensor.device.type == "cpu" and tensor.dtype in (torch.bfloat16, torch.float32)
    return known and native.is_available()


class Norm:
    """RMSNorm over the last axis."""

    def __init__(self, norm: nn.Module) -> None:
        module: Any = norm
        weight = module.weight.detach()
        self._compiled = takes(weight)
        # Gemma keeps the weight's distance from 1.
        self.weight = 1.0 + weight.float() if type(norm).__name__.startswith("Gemma") else weight
        self.eps = float(getattr(module, "variance_epsilon", None) or module.eps)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._compiled:
            normed: torch.Tensor = torch.ops.radixkv.add_rms_norm(
                inputs.contiguous(), None, 1.0, self.weight, self.eps
            )[1]
            return normed
        shape = self.weight.shape
        if self.weight.dtype == inputs.dtype:
            return F.rms_norm(inputs, shape, self.weight, self.eps)
        return F.rms_norm(inputs.float(), shape, self.weight.float(), self.eps).to(inputs.dtype)

    def after_adding(
        self, hidden: torch.Tensor, added: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden + scale × added``, and that normalised."""
        if self._compiled:
            total: torch.Tensor
            normed: torch.Tensor
            total, normed = torch.ops.radixkv.add_rms_norm(
                hidden, added, scale, self.weight, self.eps
            )
            return total, normed
        total = torch.add(hidden, added, alpha=scale)
        return total, self(total)


class Rotary:
    """Rotation of heads by their positions, with what all blocks of a step share made once."""

    def __init__(self) -> None:
        self._made_of: torch.Tensor | None = None
        self._cos = self._sin = torch.empty(0)

    def angles(
        self, embeddings: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines as the compiled operators take them; (tokens, 1, rotated dim)."""
        if self._made_of is not embeddings[0]:
            cos, sin = (part[0].unsqueeze(1).to(dtype) for part in embeddings)
            self._cos, self._sin = cos.contiguous(), sin.contiguous()
            self._made_of = embeddings[0]
        return self._cos, self._sin

    def rotate(
        self, heads: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Rotate halves against each other, as transformers' ``apply_rotary_pos_emb``.

        Parameters
        ----------
        heads : tensor (tokens, heads, dim)
            May be overwritten.
        embeddings : cos and sin, tensors (1, tokens, rotated dim)
            What lies behind the rotated dimensions stays as it is.
        """
        if takes(heads):
            torch.ops.radixkv.rotate_(heads, *self.angles(embeddings, heads.dtype))
            return heads
        if self._made_of is not embeddings[0]:
            cos, sin = (part[0].unsqueeze(1).to(heads.dtype) for part in embeddings)
            half = sin.shape[-1] // 2
            self._cos, self._sin = cos, torch.cat((-sin[..., :half], sin[..., half:]), -1)
            self._made_of = embeddings[0]
        width = self._cos.shape[-1]
        if width == heads.shape[-1]:
            return torch.addcmul(heads * self._cos, heads.roll(width // 2, -1), self._sin)
        turned = heads[..., :width]
        turned = torch.addcmul(turned * self._cos, turned.roll(width // 2, -1), self._sin)
        return torch.cat((turned, heads[..., width:]), -1)


class Gate:
    """``activation(gate) × up``, of rows that hold gate and up side by side."""

    def __init__(self, activation: nn.Module) -> None:
        self.activation = activation
        self.is_silu = type(activation).__name__ in ("SiLU", "SiLUActivation")

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self.is_silu and takes(gate_up):
            output: torch.Tensor = torch.ops.radixkv.silu_mul(gate_up)
            return output
        gate, up = gate_up.chunk(2, -1)
        activated: torch.Tensor = self.activation(gate)
        return activated.mul_(up)
