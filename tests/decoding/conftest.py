"""Real tokenizers, trained here on a few sentences: byte-level BPE and three relatives."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# The tests share helpers that are no package: pytest imports test files by path.
sys.path.append(str(Path(__file__).parent))

CORPUS = [
    "Hello, world! The quick brown fox jumps over the lazy dog. The end.",
    "你好,世界。今天天气很好,我们去公园吧。",
    "Привет, мир! Как дела сегодня?",
    "naïve café façade – “quotes” … and   spaces\n\nnew lines\tand tabs",
    "😀 😃 🎉 family 👩‍👩‍👧 flags 🇩🇪 🇯🇵",
] * 4

SPECIAL = ["<s>", "</s>", "<unk>"]


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3, Qwen and SmolLM2 have it: tokens are byte strings."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrap(tokenizer)


@pytest.fixture(scope="session")
def by_bytes(byte_level: PreTrainedTokenizerFast) -> Tokenizer:
    """The fast tokenizer inside, as the engine takes it where transformers would only call it."""
    inner: Tokenizer = byte_level.backend_tokenizer
    return inner


@pytest.fixture(scope="session")
def metaspace() -> PreTrainedTokenizerFast:
    """SentencePiece-like: words begin with ▁, and a leading space is not decoded."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrap(tokenizer)


@pytest.fixture(scope="session")
def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2 and Gemma have it: what is not in the vocabulary becomes byte tokens."""
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlnortw.,"]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [("h", "e"), ("l", "l"), ("▁", "a"), ("▁", "t"), ("a", "n"), ("▁", "▁")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    bpe = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(SPECIAL)
    return _wrap(tokenizer)


@pytest.fixture(scope="session")
def byte_id(byte_level: PreTrainedTokenizerFast) -> Callable[[int], int]:
    """The byte-level tokenizer's token for one single byte."""
    table = byte_level.get_vocab()
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]

    def find(byte: int) -> int:
        letter = chr(byte) if byte in visible else chr(256 + hidden.index(byte))
        return int(table[letter])

    return find
