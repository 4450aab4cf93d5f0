"""Loading models from folders, GGUF files and hub names, on tiny random models."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
)
from transformers.utils import logging as hf_logging

from radixkv.errors import ConfigError, ModelLoadError, RadixKVError, RequestError
from radixkv.model import demo, loading
from radixkv.model.loading import LoadedModel, load_model, render_chat

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}{{ '<|' + m.role + '|> ' + m.content + ' <|end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)
WORDS = ["<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "hello", "world", "why"]
HELLO = {"role": "user", "content": "hello world"}


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 260,
        "max_position_embeddings": 128,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|end|>", unk_token="<unk>")
    fast.chat_template = template
    fast.save_pretrained(folder)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own; nothing here may reach the user's."""
    monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "tiny"
    llama().save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(checkpoint)


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be broken."""
    return Path(shutil.copytree(checkpoint, tmp_path / "tiny"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(1, 40)[None]).logits


def failure(call: Callable[[], object], kind: type[RadixKVError] = ModelLoadError) -> str:
    """The message of the error that `call` must raise; it is one line."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestFolder:
    def test_everything_is_reported(self, checkpoint: Path) -> None:
        loaded = load_model(checkpoint)
        assert loaded.name == "tiny"
        assert loaded.eos_token_ids == (257, 4)
        assert loaded.max_model_len == 128
        assert loaded.vocab_size == 260
        assert loaded.dtype is torch.float32
        assert loaded.tokenizer is not None
        assert not loaded.model.training
        assert not any(p.requires_grad for p in loaded.model.parameters())
        assert torch.equal(logits_of(loaded.model), logits_of(llama()))

    def test_is_frozen_and_short_to_print(self, checkpoint: Path) -> None:
        loaded = load_model(str(checkpoint))
        with pytest.raises(dataclasses.FrozenInstanceError):
            loaded.name = "other"  # type: ignore[misc]
        assert repr(loaded) == (
            "LoadedModel(name='tiny', eos_token_ids=(257, 4), max_model_len=128, vocab_size=260, "
            "dtype=torch.float32)"
        )

    def test_without_tokenizer(self, tmp_path: Path) -> None:
        llama().save_pretrained(tmp_path / "bare")
        loaded = load_model(tmp_path / "bare")
        assert loaded.tokenizer is None
        assert loaded.eos_token_ids == (257,)

    def test_several_eos_tokens(self, folder: Path) -> None:
        (folder / "generation_config.json").write_text('{"eos_token_id": [4, 9, 257, -1, 260]}')
        assert load_model(folder).eos_token_ids == (257, 4, 9)

    def test_no_eos_token(self, tmp_path: Path) -> None:
        llama(eos_token_id=None).save_pretrained(tmp_path / "bare")
        assert load_model(tmp_path / "bare").eos_token_ids == ()

    def test_context_length_from_the_tokenizer_or_assumed(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Bare:
            model_max_length = 10**30

        assert loading._max_model_len(Bare(), Bare()) == 2048
        assert "2048 tokens are assumed" in caplog.text
        limited = Bare()
        limited.model_max_length = 77
        assert loading._max_model_len(Bare(), limited) == 77

    def test_users_settings_and_screen_stay_as_they_were(
        self, checkpoint: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def hook(factory: Any, args: Any, kwargs: Any) -> Any:
            return factory(*args, **kwargs)

        before = hf_logging.get_verbosity()
        try:
            hf_logging.set_verbosity_info()
            hf_logging.set_tqdm_hook(hook)
            load_model(checkpoint)
            with pytest.raises(ModelLoadError):
                load_model(checkpoint.parent)
            assert hf_logging.get_verbosity() == logging.INFO
            assert hf_logging.set_tqdm_hook(None) is hook
        finally:
            hf_logging.set_tqdm_hook(None)
            hf_logging.set_verbosity(before)
        assert capfd.readouterr() == ("", "")


class TestDtype:
    @pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "float16", "float32"])
    def test_as_asked(self, checkpoint: Path, dtype: str | torch.dtype) -> None:
        wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        loaded = load_model(checkpoint, dtype)
        assert loaded.dtype is wanted
        assert {p.dtype for p in loaded.model.parameters()} == {wanted}
        assert torch.equal(loaded.model.lm_head.weight, llama().lm_head.weight.to(wanted))

    @pytest.mark.parametrize(
        ("stored", "capabilities", "chosen"),
        [
            (torch.bfloat16, {"amx_bf16": True}, torch.bfloat16),
            (torch.bfloat16, {"avx512_bf16": True}, torch.bfloat16),
            (torch.bfloat16, {"bf16": True}, torch.bfloat16),
            (torch.bfloat16, {"avx2": True}, torch.float32),
            (torch.float16, {"amx_bf16": True, "avx512_fp16": True}, torch.float32),
            (torch.float32, {"amx_bf16": True}, torch.float32),
        ],
    )
    def test_auto(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        stored: torch.dtype,
        capabilities: dict[str, bool],
        chosen: torch.dtype,
    ) -> None:
        llama().to(stored).save_pretrained(tmp_path / "half")
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
        loaded = load_model(tmp_path / "half")
        assert loaded.dtype is chosen
        assert {p.dtype for p in loaded.model.parameters()} == {chosen}
        assert torch.equal(
            loaded.model.lm_head.weight, llama().lm_head.weight.to(stored).to(chosen)
        )

    def test_auto_with_a_torch_that_cannot_tell(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
        assert not loading.is_native(torch.bfloat16)

    def test_converting_keeps_tied_weights_tied(self, tmp_path: Path) -> None:
        llama(tie_word_embeddings=True).half().save_pretrained(tmp_path / "tied")
        model = load_model(tmp_path / "tied").model
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()

    @pytest.mark.parametrize(
        ("dtype", "near"),
        [("bf16", "'bf16'; did you mean bfloat16?"), (torch.int8, "torch.int8; did you mean")],
    )
    def test_unknown(self, checkpoint: Path, dtype: Any, near: str) -> None:
        assert f"unknown dtype {near}" in failure(
            lambda: load_model(checkpoint, dtype), ConfigError
        )

    def test_unknown_device(self, checkpoint: Path) -> None:
        message = failure(lambda: load_model(checkpoint, device="abacus"), ConfigError)
        assert message == "unknown device 'abacus'; use auto, cpu, cuda or cuda:N"


class TestBrokenFolder:
    def test_no_such_path(self, tmp_path: Path) -> None:
        assert failure(lambda: load_model(tmp_path / "none")) == (
            f"there is no folder or file {tmp_path / 'none'}"
        )
        assert failure(lambda: load_model("./none.gguf")) == "there is no folder or file none.gguf"

    def test_no_config(self, tmp_path: Path) -> None:
        assert failure(lambda: load_model(tmp_path)) == (
            f"{tmp_path} is no model: it has no config.json"
        )
        (tmp_path / "some.gguf").write_bytes(b"GGUF")
        assert failure(lambda: load_model(tmp_path)).endswith(
            f"; for the GGUF, name the file: {tmp_path / 'some.gguf'}"
        )

    @pytest.mark.parametrize("text", ["{oops", "[]", "{}", ""])
    def test_malformed_config(self, folder: Path, text: str) -> None:
        (folder / "config.json").write_text(text)
        assert failure(lambda: load_model(folder)).startswith(
            f"cannot use {folder / 'config.json'}: "
        )

    def test_unknown_model_type(self, folder: Path) -> None:
        edit_config(folder, model_type="nonesuch")
        assert "has model type `nonesuch` but" in failure(lambda: load_model(folder))

    def test_code_from_the_model_is_not_run(self, folder: Path) -> None:
        edit_config(folder, model_type="nonesuch", auto_map={"AutoConfig": "code.Config"})
        (folder / "code.py").write_text("raise SystemExit('this was run')")
        assert "contains custom code" in failure(lambda: load_model(folder))

    def test_not_causal(self, tmp_path: Path) -> None:
        small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        BertForMaskedLM(BertConfig(**small, vocab_size=50)).save_pretrained(tmp_path / "bert")
        assert failure(lambda: load_model(tmp_path / "bert")) == (
            f"{tmp_path / 'bert'} holds BertForMaskedLM, which is not a causal language model"
        )
        T5Config().save_pretrained(tmp_path / "t5")
        assert "holds T5Config, which is not a causal" in failure(
            lambda: load_model(tmp_path / "t5")
        )

    def test_no_head(self, folder: Path) -> None:
        edit_config(folder, architectures=["LlamaModel"])
        assert "holds LlamaModel, which is not a causal" in failure(lambda: load_model(folder))

    @pytest.mark.parametrize("keep", [0, 4, 5000, -10])
    def test_cut_off_weights(self, folder: Path, keep: int) -> None:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:keep])
        message = failure(lambda: load_model(folder))
        assert message.startswith(f"cannot read the weights in {folder}: Error while deserializing")

    def test_no_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        assert "no file named model.safetensors" in failure(lambda: load_model(folder))

    def test_missing_weights(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"], weights["model.norm.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        assert failure(lambda: load_model(folder)) == (
            f"{folder} lacks 2 weights, the first is model.layers.1.mlp.up_proj.weight"
        )

    def test_weights_that_do_not_fit(self, folder: Path) -> None:
        edit_config(folder, vocab_size=300)
        assert failure(lambda: load_model(folder)) == (
            f"2 weights in {folder} do not fit its config.json, the first is lm_head.weight: "
            "(260, 64) in the file, (300, 64) by the configuration"
        )

    def test_broken_tokenizer(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{oops")
        assert failure(lambda: load_model(folder)).startswith(
            f"cannot read the tokenizer in {folder}: "
        )


class TestHub:
    def test_a_name_becomes_a_folder(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []

        def snapshot_download(name: str, **_: Any) -> str:
            asked.append(name)
            return str(checkpoint)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        assert load_model("someone/tiny-model").name == "someone/tiny-model"
        assert asked == ["someone/tiny-model"]

    def test_neither_here_nor_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def snapshot_download(*_: Any, **__: Any) -> str:
            raise OSError("Got: ConnectError: no route\nAn error happened while trying to locate")

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        assert failure(lambda: load_model("someone/nothing")) == (
            "cannot find the model 'someone/nothing': there is no folder or file of that name, and "
            "neither the hub nor its local cache has it: Got: ConnectError: no route"
        )

    def test_impossible_name(self) -> None:
        assert "cannot find the model 'two words'" in failure(lambda: load_model("two words"))


def write_gguf(path: Path, model: LlamaForCausalLM, quant: Quant, arch: str = "llama") -> None:
    """Write a model as llama.cpp would, and give it the weights that its blocks hold."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    byte_tokens = [chr(b) if 33 <= b < 127 else chr(256 + b) for b in range(256)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*byte_tokens, "<|begin|>", "<|end|>", "he", "hel"])
    writer.add_token_types([1] * 256 + [3, 3, 1, 1])
    writer.add_token_merges(["h e", "he l"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        stem, suffix = name.rsplit(".", 1)
        kind = quant if weight.ndim == 2 else Quant.F32
        packed = gguf.quants.quantize(weight.numpy(), kind)
        weight.copy_(torch.from_numpy(gguf.quants.dequantize(packed, kind)))
        if ".q_proj." in name or ".k_proj." in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = packed.reshape(heads, 2, packed.shape[0] // heads // 2, -1)
            packed = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(packed.shape))
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class TestGGUF:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        write_gguf(tmp_path / "small.gguf", llama(), Quant.Q8_0)
        return tmp_path / "small.gguf"

    @pytest.mark.parametrize("quant", [Quant.F32, Quant.F16, Quant.Q4_1, Quant.Q8_0])
    def test_has_exactly_the_files_weights(self, tmp_path: Path, quant: Quant) -> None:
        original = llama()
        write_gguf(tmp_path / "small.gguf", original, quant)
        loaded = load_model(tmp_path / "small.gguf")
        assert loaded.dtype is torch.float32
        assert torch.equal(logits_of(loaded.model), logits_of(original))

    def test_equals_what_transformers_makes_of_it(self, path: Path) -> None:
        with demo.quiet_transformers():
            where = {"gguf_file": path.name, "dtype": torch.float32}
            direct = AutoModelForCausalLM.from_pretrained(
                path.parent, quantization_config=GgufConfig(dequantize=True), **where
            )
        loaded = load_model(path)
        assert torch.equal(logits_of(loaded.model), logits_of(direct))
        ids = torch.tensor([[5, 6, 7]])
        settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20}
        settings |= {"do_sample": False, "pad_token_id": 0}
        assert torch.equal(loaded.model.generate(ids, **settings), direct.generate(ids, **settings))

    def test_everything_is_reported(self, path: Path) -> None:
        loaded = load_model(path)
        assert loaded.name == "small"
        assert loaded.eos_token_ids == (257,)
        assert loaded.max_model_len == 128
        assert loaded.vocab_size == 260
        assert loaded.tokenizer is not None
        assert loaded.tokenizer.encode("hello") == [259, 108, 111]
        tokens = render_chat(loaded, [{"role": "user", "content": "hello"}])
        assert loaded.tokenizer.decode(tokens) == "<|user|> hello <|end|> <|assistant|> "

    def test_second_start_converts_nothing(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        said: list[str] = []
        first = logits_of(load_model(path, progress=said.append).model)
        monkeypatch.setattr(demo, "_convert", None)
        assert torch.equal(first, logits_of(load_model(path, progress=said.append).model))
        assert said == ["converting small.gguf (once; later starts take seconds)"]
        assert capfd.readouterr() == ("", "")

    def test_the_bar_of_transformers_comes_back(self, path: Path) -> None:
        from transformers import modeling_gguf_pytorch_utils as module

        before = module.tqdm
        load_model(path)
        assert module.tqdm is before

    def test_bad_magic(self, path: Path, cache: Path) -> None:
        path.write_bytes(b"GGML" + path.read_bytes()[4:])
        assert failure(lambda: load_model(path)) == (
            f"{path} is not a GGUF file (nor the folder of a model)"
        )
        assert not cache.exists()

    @pytest.mark.parametrize("keep", [4, 20, 300, 5000, -100])
    def test_cut_off(self, path: Path, cache: Path, keep: int) -> None:
        path.write_bytes(path.read_bytes()[:keep])
        assert failure(lambda: load_model(path)).startswith(
            f"cannot convert {path}: the file is cut off or damaged ("
        )
        assert [p.name for p in (cache / "models").iterdir()] == [".lock"]

    def test_unsupported_architecture(self, tmp_path: Path) -> None:
        path = tmp_path / "other.gguf"
        write_gguf(path, llama(), Quant.F32, arch="nonesuch")
        assert failure(lambda: load_model(path)) == (
            f"cannot convert {path}: GGUF model with architecture nonesuch is not supported yet."
        )

    def test_no_space_for_the_copy(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from safetensors import SafetensorError

        def save(*_: Any, **__: Any) -> None:
            raise SafetensorError("I/O error: No space left on device (os error 28)")

        monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", save)
        assert "there is no space left on the disk; free some" in failure(lambda: load_model(path))


class TestRenderChat:
    def test_tokens(self, loaded: LoadedModel) -> None:
        assert render_chat(loaded, [HELLO]) == [2, 5, 6, 4, 3]
        assert render_chat(loaded, [HELLO], add_generation_prompt=False) == [2, 5, 6, 4]

    def test_longer_conversation_begins_with_the_shorter(self, loaded: LoadedModel) -> None:
        talk = [
            {"role": "system", "content": "hello"},
            HELLO,
            {"role": "assistant", "content": "why"},
            {"role": "user", "content": "why why"},
        ]
        short = render_chat(loaded, talk[:2])
        assert short == [1, 5, 4, 2, 5, 6, 4, 3]
        assert render_chat(loaded, talk) == [*short, 7, 4, 2, 7, 7, 4, 3]

    def test_messages_are_left_alone(self, loaded: LoadedModel) -> None:
        message = dict(HELLO)
        render_chat(loaded, (message,))
        assert message == HELLO

    @pytest.mark.parametrize(
        ("messages", "why"),
        [
            ([], "at least one"),
            ("hello", "messages must be a list"),
            (HELLO, "messages must be a list"),
            (None, "messages must be a list"),
            (["hello"], "messages[0] must be a dict, not str"),
            ([HELLO, {"content": "hello"}], "messages[1] has the role None, not one of"),
            ([{"role": "robot", "content": "x"}], "messages[0] has the role 'robot', not one of"),
            ([{"role": ["user"], "content": "x"}], "messages[0] has the role ['user']"),
            ([{"role": "user"}], "messages[0] needs a 'content' that is a string"),
            ([{"role": "user", "content": None}], "messages[0] needs a 'content'"),
            ([{"role": "tool", "content": "x"}], "tiny's template refuses this: no tools here"),
        ],
    )
    def test_malformed(self, loaded: LoadedModel, messages: Any, why: str) -> None:
        assert why in failure(lambda: render_chat(loaded, messages), RequestError)

    def test_calls_may_stand_for_content(self, loaded: LoadedModel) -> None:
        call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
        why = failure(lambda: render_chat(loaded, [HELLO, call | {"role": "user"}]), RequestError)
        assert "messages[1] needs a 'content'" in why
        assert render_chat(loaded, [HELLO, call])[:4] == render_chat(loaded, [HELLO])[:4]

    def test_what_a_template_does_not_read_is_refused(self, loaded: LoadedModel) -> None:
        tool = {"type": "function", "function": {"name": "f"}}
        for given in ({"tools": [tool]}, {"variables": {"enable_thinking": False}}):
            why = failure(lambda g=given: render_chat(loaded, [HELLO], **g), RequestError)
            assert "tiny's chat template takes no notice of" in why

    def test_what_a_template_reads_it_is_told(
        self, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        template = "{% generation %}{{ mood }}{% endgeneration %}{% for t in tools or [] %}"
        template += "{{ t.name }}{% if t.stop %}{% break %}{% endif %}{% endfor %}"
        monkeypatch.setattr(loaded.tokenizer, "chat_template", template)
        assert render_chat(loaded, [HELLO], variables={"mood": "why"}) == [7]
        assert render_chat(loaded, [HELLO], tools=[{"name": "hello"}]) == [5]
        monkeypatch.setattr(loaded.tokenizer, "chat_template", "{% if %}")
        why = failure(lambda: render_chat(loaded, [HELLO], variables={"mood": 1}), RequestError)
        assert "tiny's template is broken" in why

    def test_no_template(self, loaded: LoadedModel, folder: Path) -> None:
        bare = dataclasses.replace(loaded, tokenizer=None)
        assert failure(lambda: render_chat(bare, [HELLO]), RequestError) == (
            "tiny has no chat template; send it a plain prompt instead"
        )
        (folder / "chat_template.jinja").unlink()
        without = load_model(folder)
        assert "has no chat template" in failure(
            lambda: render_chat(without, [HELLO]), RequestError
        )


def test_config_of_a_gguf_is_saved_whole(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", llama(), Quant.F32)
    saved = AutoConfig.from_pretrained(demo.converted_gguf(tmp_path / "small.gguf"))
    assert (saved.num_key_value_heads, saved.head_dim) == (2, 16)
    assert not hasattr(saved, "quantization_config")
