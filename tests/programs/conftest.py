"""The engine's tiny models and fake, for programs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from tiny_model import _one_thread, make_llm, reference, tiny, tiny_llama

__all__ = ["_one_thread", "make_llm", "reference", "tiny"]


@pytest.fixture(scope="session")
def plain_model() -> LlamaForCausalLM:
    """The tiny model as transformers runs it."""
    return tiny_llama()
