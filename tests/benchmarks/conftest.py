"""The benchmarks on a tiny random model, so that they cannot rot. Nothing here asserts a time."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from radixkv import LLM
from radixkv.model.loading import LoadedModel, load_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# They are programs, and find each other in their own folder.
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "peers")]


@pytest.fixture(autouse=True)
def _no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed here, tests meet a machine on which nothing is."""
    nothing = {"installed": False, "reason": "no wheel"}
    for module in ("peers.engines", "control_plane"):
        monkeypatch.setattr(importlib.import_module(module), "status_of", lambda name: nothing)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a tokenizer: two layers, random weights, long contexts."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, and messages one behind the other."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={b: i for i, b in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    return fast


@pytest.fixture
def on_demo(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a benchmark asks for the demo model, it gets the tiny one, with a token a byte."""
    tokenizer = byte_tokenizer()

    def load(source: str, dtype: str) -> LoadedModel:
        loaded = load_model(tiny_folder, "float32")
        return replace(loaded, tokenizer=tokenizer, eos_token_ids=(tokenizer.eos_token_id,))

    def demo(dtype: str, kv_memory: str = "64MiB", **settings: Any) -> LLM:
        return LLM(load("demo", dtype), kv_memory=kv_memory, **settings)

    monkeypatch.setattr(LLM, "demo", demo)
    monkeypatch.setattr(importlib.import_module("shared_prompt"), "load_model", load)
    control_step = importlib.import_module("control_step")
    monkeypatch.setattr(control_step, "load_tokenizer", lambda source: (tokenizer, "tiny"))


class InProcess:
    """Our own driver without a process of its own: a start costs seconds of imports."""

    def __init__(self, name: str, *_: object) -> None:
        self.name = name
        self.driver = importlib.import_module("drive_radixkv").RadixKV()

    def ask(self, **request: Any) -> dict[str, Any]:
        answer = importlib.import_module("driver").answer
        reply: dict[str, Any] = json.loads(json.dumps(answer(self.driver, request)))
        if "error" in reply:
            raise importlib.import_module("peers.process").PeerError(reply["error"])
        return reply

    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        if hasattr(self.driver, "llm"):
            self.driver.llm.close()


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our engine runs here; `test_chat` and `test_startup` start it as users do."""
    monkeypatch.setattr(importlib.import_module("peers.engines"), "PeerProcess", InProcess)


@pytest.fixture
def run_main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a benchmark's ``main`` with arguments; what it wrote as JSON."""

    def run(name: str, *arguments: str) -> dict[str, Any]:
        module = importlib.import_module(name)
        output = tmp_path / f"{name}.json"
        command = [str(BENCHMARKS / f"{name}.py"), *arguments, "--output", str(output)]
        monkeypatch.setattr(sys, "argv", command)
        module.main()
        written = json.loads(output.read_text())
        importlib.import_module("measure").check_results(written)
        assert written["command"].startswith(f"python benchmarks/{name}.py")
        return written

    return run
