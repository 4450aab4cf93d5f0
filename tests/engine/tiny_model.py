"""Fixtures: tiny real models behind the whole engine. Other rooms' tests have them too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from radixkv.llm import LLM
from radixkv.model.loading import LoadedModel

VOCABULARY = 259


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>"
    )
    fast.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return fast


def tiny_llama() -> LlamaForCausalLM:
    """A random two-layer Llama whose logits depend on everything before them; always the same."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    return model.requires_grad_(False)


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    """`tiny_llama`, to be served."""
    model, tokenizer = tiny_llama(), byte_tokenizer()
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=model.config,
        name="tiny",
        eos_token_ids=(tokenizer.eos_token_id,),
        max_model_len=512,
        vocab_size=VOCABULARY,
        dtype=torch.float32,
    )


@pytest.fixture
def make_llm(tiny: LoadedModel) -> Iterator[Callable[..., LLM]]:
    """LLMs over the tiny model, one at a time.

    Slots start as NaN; in the end every LLM must hold nothing and obey all laws.
    """
    made: list[LLM] = []

    def make(num_blocks: int = 256, **settings: Any) -> LLM:
        finish()
        size = settings.get("block_size", 16)
        bytes_per_token = 2 * 2 * 2 * 16 * 4
        llm = LLM(tiny, kv_memory=num_blocks * size * bytes_per_token, **settings)
        assert llm.cache.pool.num_blocks == num_blocks
        store = llm.engine.runner.backend.store
        for cache in (*store.keys, *store.values):
            cache.fill_(torch.nan)
        made.append(llm)
        return llm

    def finish() -> None:
        for llm in made:
            assert not llm.engine.has_work
            assert not llm.cache.sequences
            llm.cache.check()
            llm.cache.reset()
            assert llm.cache.pool.num_free == llm.cache.pool.num_blocks
            llm.close()
        made.clear()

    yield make
    finish()


@pytest.fixture(scope="session")
def reference(tiny: LoadedModel) -> Callable[[list[int], int], list[int]]:
    """Hugging Face's own greedy continuation of one prompt."""
    model = tiny_llama()  # The one that is served has other layers meanwhile.

    @torch.inference_mode()
    def continue_(prompt: list[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=tiny.eos_token_ids[0],
            pad_token_id=tiny.eos_token_ids[0],
        )
        return out[0, len(prompt) :].tolist()

    return continue_
