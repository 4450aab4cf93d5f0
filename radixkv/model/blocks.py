"""Decoder blocks of the llama shape, rewritten with fewer and larger operators.

A small step spends more time between operators than in them. Here the projections of queries, keys
and values are one product, as are gate and up; rotation is three operators for queries and keys
together, and nothing is transposed or copied that attention does not ask for. transformers' own
block is the reference: it comes back when the model is given back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from radixkv.model.function_adapter import FunctionAdapter, paged_attention
from radixkv.model.layers import Model
from radixkv.model.operators import Gate, Norm, Rotary
from radixkv.model.whole_block import Chain, WholeBlock

# Their forward functions were read, and differ in nothing but what `FusedBlock` looks at.
FUSED_LAYERS = frozenset(
    f"{family}DecoderLayer"
    for family in (
        "Gemma",
        "Gemma2",
        "Gemma3",
        "Granite",
        "Llama",
        "Mistral",
        "Olmo2",
        "Olmo3",
        "Phi3",
        "Qwen2",
        "Qwen3",
        "SmolLM3",
    )
)

# Their attention reads the window off the configuration, for all layers alike.
ONE_WINDOW = frozenset({"MistralDecoderLayer", "Phi3DecoderLayer"})
# Gemma3's attention keeps a cap of its logits, and does not use it.
SOFT_CAPPED = frozenset({"Gemma2DecoderLayer"})

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


class FusedBlock(nn.Module):
    """Takes the place of one decoder layer whose class stands in `FUSED_LAYERS`."""

    def __init__(self, layer: Any, rotary: Rotary, chain: Chain) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        # In a tuple, so that its parameters are no longer the model's.
        self._own = (layer,)
        self.rotary = rotary
        self.chain = chain
        self.head_dim: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.rotates: bool = bool(getattr(attention, "use_rope", True))
        self.qkv_proj = _joined(attention, QKV, "qkv_proj")
        self.o_proj = attention.o_proj
        self.gate_up_proj = _joined(mlp, GATE_UP, "gate_up_proj")
        self.down_proj = mlp.down_proj
        self.gate = Gate(getattr(mlp, "act_fn", None) or mlp.activation_fn)
        config = attention.config
        self.key_width: int = config.num_key_value_heads * self.head_dim
        self.query_width: int = config.num_attention_heads * self.head_dim
        kind = type(layer).__name__
        windowed, capped = config if kind in ONE_WINDOW else attention, kind in SOFT_CAPPED
        self.keywords = {
            "sliding_window": getattr(windowed, "sliding_window", None),
            "softcap": attention.attn_logit_softcapping if capped else None,
        }
        self.query_norm, self.key_norm = _norm(attention, "q_norm"), _norm(attention, "k_norm")
        self.residual_scale = float(getattr(layer, "residual_multiplier", 1.0))
        self._place_norms(layer)
        self.whole = WholeBlock(self)
        # Last, for only from here on is the layer no longer whole.
        _empty(attention, QKV)
        _empty(mlp, GATE_UP)
        # What takes these layers' places later lets go of their weights.
        attention.o_proj = mlp.down_proj = None
        for parent, name in ((attention, "qkv_proj"), (mlp, "gate_up_proj")):
            if hasattr(parent, name):
                setattr(parent, name, None)

    def _place_norms(self, layer: Any) -> None:
        """Before, after, or on both sides of attention and of the feed-forward network."""
        between = _norm(layer, "post_attention_layernorm")
        self.norm_before_attention = _norm(layer, "input_layernorm")
        self.norm_after_mlp = _norm(layer, "post_feedforward_layernorm")
        if self.norm_after_mlp is None:
            self.norm_after_attention, self.norm_before_mlp = None, between
        else:
            self.norm_after_attention = between
            self.norm_before_mlp = _norm(layer, "pre_feedforward_layernorm")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # What a model reads off its layers, such as their type.
            return getattr(self.__dict__["_own"][0], name)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """As the layer's own forward, for one flattened row of tokens; (1, tokens, hidden)."""
        whole = self.whole(hidden_states, position_embeddings)
        if whole is not None:
            return whole
        hidden = hidden_states[0]
        inputs = self.norm_before_attention(hidden) if self.norm_before_attention else hidden
        outputs = self._attend(inputs, attention_mask, position_embeddings)
        if self.norm_after_attention:
            outputs = self.norm_after_attention(outputs)
        if self.norm_before_mlp:
            hidden, inputs = self.norm_before_mlp.after_adding(hidden, outputs, self.residual_scale)
        else:
            inputs = hidden = torch.add(hidden, outputs, alpha=self.residual_scale)
        outputs = self.down_proj(self.gate(self.gate_up_proj(inputs)))
        if self.norm_after_mlp:
            outputs = self.norm_after_mlp(outputs)
        output = torch.add(hidden, outputs, alpha=self.residual_scale)[None]
        self.chain.note(self.whole, hidden_states, position_embeddings, output)
        return output

    def _attend(
        self,
        inputs: torch.Tensor,
        attention_mask: torch.Tensor | None,
        embeddings: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        projected = self.qkv_proj(inputs)
        turning = self.query_width + self.key_width
        if self.query_norm is not None and self.key_norm is not None:
            queries = self._normed(projected[:, : self.query_width], self.query_norm)
            keys = self._normed(projected[:, self.query_width : turning], self.key_norm)
            heads = torch.cat((queries, keys), 1)
        else:
            heads = projected[:, :turning].unflatten(1, (-1, self.head_dim))
        if self.rotates and embeddings is not None:
            heads = self.rotary.rotate(heads, embeddings)
        values = projected[:, turning:].unflatten(1, (-1, self.head_dim)).transpose(0, 1)[None]
        heads = heads.transpose(0, 1)[None]
        queries, keys = heads.split((heads.shape[1] - values.shape[1], values.shape[1]), 1)
        attended, _ = paged_attention(
            self._own[0].self_attn, queries, keys, values, attention_mask, self.scaling,
            **self.keywords,
        )  # fmt: skip
        output: torch.Tensor = self.o_proj(attended[0].flatten(1))
        return output

    def _normed(self, flat: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Normalised over each head, or over all of them; (tokens, heads, dim)."""
        each = norm.weight.numel() == self.head_dim
        heads: torch.Tensor = (flat if each else norm(flat)).unflatten(1, (-1, self.head_dim))
        return norm(heads) if each else heads

    def restored(self) -> nn.Module:
        """The layer that this block replaced, with its weights."""
        layer = self._own[0]
        _split(layer.self_attn, QKV, "qkv_proj", self.qkv_proj)
        layer.self_attn.o_proj = self.o_proj
        _split(layer.mlp, GATE_UP, "gate_up_proj", self.gate_up_proj)
        layer.mlp.down_proj = self.down_proj
        own: nn.Module = layer
        return own


class FusedAdapter(FunctionAdapter):
    """A `FunctionAdapter` over fused blocks."""

    def __init__(self, model: Model) -> None:
        fuse_blocks(model)
        try:
            super().__init__(model)
        except BaseException:
            restore_blocks(model)
            raise

    def close(self) -> None:
        """Give the model its own attention and layers back."""
        super().close()
        restore_blocks(self.model)


def can_fuse(model: Model) -> bool:
    """Whether the model has decoder layers of the llama shape."""
    return any(_can_fuse(layer) for layers in _layer_lists(model) for layer in layers)


def fuse_blocks(model: Model) -> None:
    """Replace the model's decoder layers of the llama shape: all of them, or none if that fails."""
    rotary, chain = Rotary(), Chain()
    made: dict[nn.Module, FusedBlock] = {}  # A model may run through one layer several times.
    try:
        for layers in _layer_lists(model):
            for index, layer in enumerate(layers):
                if _can_fuse(layer):
                    if layer not in made:
                        made[layer] = FusedBlock(layer, rotary, chain)
                    layers[index] = made[layer]
    except BaseException:
        restore_blocks(model)
        raise


def restore_blocks(model: Model) -> None:
    """Give the model its own layers back, with the weights it has now."""
    own: dict[nn.Module, nn.Module] = {}
    for layers in _layer_lists(model):
        for index, layer in enumerate(layers):
            if isinstance(layer, FusedBlock):
                if layer not in own:
                    own[layer] = layer.restored()
                layers[index] = own[layer]


def _layer_lists(model: Model) -> list[nn.ModuleList]:
    return [module for module in model.modules() if isinstance(module, nn.ModuleList)]


def _can_fuse(layer: nn.Module) -> bool:
    kind = type(layer)
    known = kind.__name__ in FUSED_LAYERS and kind.__module__.startswith("transformers.models.")
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())
    return known and not layer.training and not hooked


def _norm(parent: Any, name: str) -> Norm | None:
    norm = getattr(parent, name, None)
    return None if norm is None else Norm(norm)


def _joined(parent: Any, names: tuple[str, ...], whole: str) -> nn.Module:
    """One linear layer in place of several that read the same input."""
    if hasattr(parent, whole):
        joined: nn.Module = getattr(parent, whole)
        return joined
    parts = [getattr(parent, name) for name in names]
    kinds = {(type(part), part.weight.dtype, part.bias is None) for part in parts}
    if len(kinds) > 1 or type(parts[0]) is not nn.Linear:
        raise TypeError(f"{', '.join(names)} are not linear layers of one kind")
    linear = nn.Linear(
        parts[0].in_features, sum(part.out_features for part in parts), bias=False, device="meta"
    )
    weight = torch.cat([part.weight.detach() for part in parts])
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if parts[0].bias is not None:
        bias = torch.cat([part.bias.detach() for part in parts])
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear.eval()


def _empty(parent: Any, names: tuple[str, ...]) -> None:
    """Let go of the weights that a joined layer has copies of."""
    for name in names:
        if (part := getattr(parent, name, None)) is not None:
            part.weight = part.bias = None


def _split(parent: Any, names: tuple[str, ...], whole: str, linear: Any) -> None:
    """Give linear layers their share of a joined one's weight back."""
    if hasattr(parent, whole):  # The model joins them itself.
        setattr(parent, whole, linear)
        return
    parts = [getattr(parent, name) for name in names]
    sizes = [part.out_features for part in parts]
    weights = linear.weight.detach().split(sizes)
    biases = [None] * len(parts) if linear.bias is None else linear.bias.detach().split(sizes)
    for part, weight, bias in zip(parts, weights, biases, strict=True):
        part.weight = nn.Parameter(weight, requires_grad=False)
        part.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
