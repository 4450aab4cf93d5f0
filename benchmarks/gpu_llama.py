"""A Llama with random weights, made here and served, for the GPU benchmarks: nothing is fetched.

Without a GPU the engine is served by the same kernels in Triton's interpreter, and a function that
is called again stands for a CUDA graph.
"""

from __future__ import annotations

from unittest import mock

import torch
from gpu import DEVICE, HAS_GPU
from transformers import LlamaConfig, LlamaForCausalLM

from radixkv.attention import CostModel, KVStore, TritonBackend
from radixkv.engine.graphs import DecodeGraphs, Graph, Run
from radixkv.llm import LLM
from radixkv.model.loading import LoadedModel

# The shape of Llama 3's 8B.
EIGHT_BILLION = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
# Shares whatever can be shared, and cuts what is long for the interpreter's tiles.
INTERPRETERS_COST = CostModel(per_item=0, tile=32, programs=4)


def random_llama(shape: dict[str, int], dtype: torch.dtype) -> LoadedModel:
    """A Llama of this shape, always the same; its tokens depend on all that come before."""
    torch.manual_seed(0)
    config = LlamaConfig(**shape, rope_theta=500000.0, tie_word_embeddings=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with DEVICE:
            model = LlamaForCausalLM(config).eval().requires_grad_(False)
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    # Wide enough that attention is not uniform, and logits not all alike.
                    parameter.normal_(0, 1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
    finally:
        torch.set_default_dtype(before)
    return LoadedModel(
        model=model,
        tokenizer=None,
        config=config,
        name="random Llama",
        eos_token_ids=(),
        max_model_len=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        dtype=dtype,
    )


def serve(loaded: LoadedModel, *, graphs: bool, **settings: object) -> LLM:
    """The model behind the engine, on the Triton kernels.

    Parameters
    ----------
    loaded : LoadedModel
    graphs : bool
        Whether decode steps are played by CUDA graphs.
    **settings
        For `LLM`.
    """
    if HAS_GPU:
        return LLM(loaded, cuda_graphs=graphs, **settings)  # type: ignore[arg-type]
    with mock.patch("radixkv.llm.choose_backend", _interpreted):
        llm = LLM(loaded, **settings)  # type: ignore[arg-type]
    runner = llm.engine.runner
    for cache in (*runner.backend.store.keys, *runner.backend.store.values):
        # What nobody wrote must not matter to anyone.
        cache.fill_(torch.nan)
    if graphs:
        runner.forward = DecodeGraphs(
            *(runner.adapter, runner.backend), max_rows=16, max_blocks=32, capture=_called_again
        ).forward
    return llm


def replays(llm: LLM) -> int:
    """Steps that a graph has run."""
    forward = getattr(llm.engine.runner.forward, "__self__", None)
    return forward.replays if isinstance(forward, DecodeGraphs) else 0


def _interpreted(store: KVStore) -> TritonBackend:
    return TritonBackend(store, cost=INTERPRETERS_COST)


class _Again:
    """Stands for a CUDA graph: computes anew, into the same tensor."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.out = run().clone()

    def replay(self) -> None:
        self.out.copy_(self.run())


def _called_again(run: Run) -> tuple[Graph, torch.Tensor]:
    graph = _Again(run)
    return graph, graph.out
