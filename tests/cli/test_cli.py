"""The console script as a user runs it: output, exit codes, one line for an error, Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Inside = Callable[..., subprocess.CompletedProcess[str]]
SCRIPT = Path(sys.executable).with_name("radixkv")
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny random Llama, a byte tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    net = LlamaForCausalLM(config).eval()
    # Letters alone, so that what is printed can be compared line by line.
    with torch.no_grad():
        net.lm_head.weight.normal_(0, 0.3)
    net.save_pretrained(folder)
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
    fast.save_pretrained(folder)
    return str(folder)


def radixkv(
    *arguments: str, stdin: str = "", timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=ENVIRONMENT,
        check=False,
    )


def assert_one_line(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("radixkv: ")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in lines[0]


# -- generate --------------------------------------------------------------------------------------


def test_generate_is_the_same_with_the_same_seed(model: str, inside: Inside) -> None:
    command = ("generate", "-m", model, "-p", "Once", "-n", "4", "--max-tokens", "12")
    first, second = radixkv(*command, "--seed", "7"), inside(*command, "--seed", "7")
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    parts = [f"[{number}] Once" for number in range(1, 5)]
    places = [first.stdout.index(part) for part in parts]
    assert places == sorted(places)
    other = inside(*command, "--seed", "8")
    assert other.stdout != first.stdout


def test_generate_from_file_to_file(model: str, tmp_path: Path, inside: Inside) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    records: list[dict[str, Any]] = [
        {"prompt": "One line\u2028of text", "id": 1},
        {"messages": [{"role": "user", "content": "A question"}], "id": 2},
        {"prompt": [5, 6, 7], "id": 3},
    ]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    source.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    done = radixkv(
        "generate", "-m", model, "--prompts", str(source), "--output", str(target),
        "-n", "2", "--seed", "1", "--max-tokens", "5",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "6/6" in done.stderr
    results = [json.loads(line) for line in target.read_text(encoding="utf-8").split("\n") if line]
    assert [result["id"] for result in results] == [1, 2, 3]
    for record, result in zip(records, results, strict=True):
        assert record.items() <= result.items()
        assert len(result["outputs"]) == 2
        assert {output["finish_reason"] for output in result["outputs"]} <= {"length", "stop"}
    assert results[2]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--nope"], "--nope"),
        ([], "--prompts"),
        (["-p", "a", "--prompts", __file__], "either"),
        (["-p", "a", "--output", "x"], "together"),
        (["--prompts", "/no/such/file", "--output", "x"], "/no/such/file"),
        (["-p", "a", "-n", "0"], "-n"),
        (["-p", "a", "--top-p", "2"], "top_p"),
        (["-p", "a", "--temperature", "-1"], "--temperature"),
        (["-p", "a", "--dtype", "float31"], "float32"),
        (["-p", "a", "--device", "abacus"], "cuda:N"),
        (["-p", "a", "--quantization", "int4"], "did you mean int8"),
        (["-p", "a", "--quantization", "int8", "--dtype", "float32"], "bfloat16"),
        (["-p", "a", "--kv-memory", "lots"], "2GiB"),
        (["-p", "a", "--kv-memory", "12"], "no block"),
        (["-p", "a", "--block-size", "0"], "--block-size"),
        (["-p", ""], "empty"),
        (["-p", "a" * 600], "context of 512"),
    ],
)
def test_bad_usage(model: str, inside: Inside, arguments: list[str], word: str) -> None:
    assert_one_line(inside("generate", "-m", model, *arguments), 2, word)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "no JSON"),
        ("[1]", "needs a 'prompt'"),
        ('{"prompt": 5}', "5"),
        ('{"messages": "hello"}', "messages"),
        ('{"messages": [{"role": "king", "content": "x"}]}', "king"),
        ('{"prompt": [1, 999]}', "999"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_lost(
    model: str, tmp_path: Path, inside: Inside, line: str, word: str
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    target.write_text("of an earlier run\n")
    done = inside("generate", "-m", model, "--prompts", str(source), "--output", str(target))
    assert_one_line(done, 2, word, "line 3")
    assert target.read_text() == "of an earlier run\n"


def test_failures(model: str, tmp_path: Path, inside: Inside) -> None:
    assert_one_line(radixkv("generate", "-p", "a", "-m", "no/such-model"), 1, "no/such-model")
    assert_one_line(inside("chat", "-m", str(tmp_path)), 1, "config.json")
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')
    target = tmp_path / "no" / "out.jsonl"
    done = inside("generate", "-m", model, "--prompts", str(source), "--output", str(target))
    assert_one_line(done, 1, str(target))


def test_a_broken_gguf(tmp_path: Path, inside: Inside) -> None:
    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"GGUF" + bytes(40))
    done = inside("generate", "-p", "a", "-m", str(gguf))
    progress, error = done.stderr.splitlines()
    assert progress.startswith("converting broken.gguf")
    assert error.startswith("radixkv: ")
    assert "cut off or damaged" in error
    assert done.returncode == 1


def test_a_reader_that_leaves(model: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{SCRIPT} generate -m {model} -p a -n 40 --max-tokens 30 | head -c 5"],
        capture_output=True,
        text=True,
        errors="replace",
        env=ENVIRONMENT,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["demo"],
        ["chat"],
        ["generate"],
        ["bench"],
        ["bench", "serve"],
        ["inspect"],
        ["lint"],
    ],
)
def test_help_fits_a_screen(
    command: list[str], inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    done = inside(*command, "--help")
    assert done.returncode == 0
    assert done.stderr == ""
    assert len(done.stdout.rstrip().splitlines()) <= 40
    assert all(len(line.rstrip()) <= 100 for line in done.stdout.splitlines())


def test_version() -> None:
    done = radixkv("--version")
    assert (done.returncode, done.stdout) == (0, "radixkv 0.1.0\n")


# -- chat ------------------------------------------------------------------------------------------


def test_chat_with_piped_input(model: str) -> None:
    lines = [
        "/help", "Hello", "/fork", "More", "/branches", "/switch 1", "/switch 9", "/tree",
        "/stats", "/nope", "/reset", "/branches", "",
    ]  # fmt: skip
    done = radixkv("chat", "-m", model, "--seed", "1", "--max-tokens", "6", stdin="\n".join(lines))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for word in (
        "/switch N", "branch 2, from here", "* 2  4 messages", "branch 1\n", "from 1 to 2",
        "root\n", "prompt tokens ", "no /nope; /help", "* 1  0 messages",
    ):  # fmt: skip
        assert word in done.stdout


def test_chat_goes_on_after_a_refusal(model: str, inside: Inside) -> None:
    done = inside("chat", "-m", model, stdin="x" * 600 + "\n/stats\n/quit\nnever read\n")
    assert done.returncode == 0, done.stderr
    assert "context of 512" in done.stdout
    assert "prompt tokens 0" in done.stdout


class Terminal:
    """A pseudo-terminal with the console script in it."""

    def __init__(self, *arguments: str) -> None:
        self.file, inner = pty.openpty()
        self.process = subprocess.Popen(
            [str(SCRIPT), *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=ENVIRONMENT,
            start_new_session=True,
        )
        os.close(inner)
        self.output = ""

    def read(self, seconds: float) -> bool:
        """Read what comes; False at the end."""
        if select.select([self.file], [], [], seconds)[0]:
            try:
                self.output += os.read(self.file, 4096).decode(errors="replace")
            except OSError:
                return False
        return True

    def until(self, text: str, seconds: float = 90) -> str:
        """Read until some text comes; returns what came before and forgets it."""
        end = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < end, f"{text!r} never came, but {self.output!r}"
            assert self.read(0.1), f"it ended, with {self.output!r}"
        before, _, self.output = self.output.partition(text)
        return before

    def send(self, text: str) -> None:
        os.write(self.file, text.encode())

    def interrupt(self) -> None:
        """What a terminal does when Ctrl-C is pressed."""
        self.process.send_signal(signal.SIGINT)

    def end(self, seconds: float = 60) -> int:
        """Read to the end; the exit code."""
        end = time.monotonic() + seconds
        while self.read(0.1):
            assert time.monotonic() < end, f"it does not end: {self.output!r}"
        return self.process.wait(seconds)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    started: list[Terminal] = []
    yield started
    for terminal in started:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.file)


def test_chat_in_a_terminal(model: str, terminals: list[Terminal]) -> None:
    terminal = Terminal("chat", "-m", model, "--seed", "1", "--max-tokens", "450")
    terminals.append(terminal)
    terminal.until("/help lists the commands")
    terminal.until("1> ")
    terminal.send("/fork\n")
    terminal.until("2> ")
    # Ctrl-C stops an answer and drops the turn, but not the conversation.
    terminal.send("Hello\n")
    terminal.until("Hello\r\n")
    time.sleep(0.2)
    terminal.interrupt()
    terminal.until("the turn is dropped")
    terminal.until("2> ")
    terminal.send("/branches\n")
    assert "* 2  0 messages" in terminal.until("2> ")
    terminal.send("\x04")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.output


def test_ctrl_c_leaves_at_the_prompt(model: str, terminals: list[Terminal]) -> None:
    terminal = Terminal("chat", "-m", model)
    terminals.append(terminal)
    terminal.until("1> ")
    time.sleep(0.2)
    terminal.interrupt()
    assert terminal.end() == 130
    assert "Traceback" not in terminal.output
    assert "stopped" in terminal.output


@pytest.mark.parametrize("running", [False, True])
def test_ctrl_c_during_generate(model: str, running: bool) -> None:
    # So much that it cannot be done before it is stopped.
    prompts = ["-p", "a"] * 100
    command = [str(SCRIPT), "generate", "-m", model, *prompts, "-n", "200", "--max-tokens", "500"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    # Once torch is being imported, the command is under way.
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.05)
    time.sleep(6 if running else 0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert err.strip() == "stopped"


# -- the demo model --------------------------------------------------------------------------------


@pytest.mark.model
def test_generate_with_the_demo_model() -> None:
    done = radixkv(
        "generate", "-p", "The capital of France is", "--temperature", "0", "--max-tokens", "8"
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
