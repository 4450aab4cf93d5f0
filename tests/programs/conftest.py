"""The engine's tiny models and fake, for programs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

ENGINE = Path(__file__).parents[1] / "engine"
sys.path.insert(0, str(ENGINE))


def _engine_fixtures() -> Any:
    spec = importlib.util.spec_from_file_location("engine_fixtures", ENGINE / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_fixtures = _engine_fixtures()
_one_thread = _fixtures._one_thread
tiny = _fixtures.tiny
make_llm = _fixtures.make_llm
reference = _fixtures.reference


@pytest.fixture(scope="session")
def plain_model() -> LlamaForCausalLM:
    """The tiny model as transformers runs it."""
    model: LlamaForCausalLM = _fixtures.tiny_llama()
    return model
