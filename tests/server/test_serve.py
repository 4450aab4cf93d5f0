"""`radixkv serve`: how it starts, what stops it, and what it says of what cannot be."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from clients import client_of, wait_for
from typer.testing import CliRunner

from radixkv.cli import main
from radixkv.cli.serve import LoadingFlags, ServingFlags
from radixkv.decoding import SamplingParams
from radixkv.llm import LLM
from radixkv.model.loading import LoadedModel
from radixkv.server.address import bound, url_of
from radixkv.server.config import ServerConfig
from radixkv.server.run import run_server

SCRIPT = Path(sys.executable).with_name("radixkv")
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
TALK: list[Any] = [{"role": "user", "content": "Once upon a time"}]


@pytest.fixture(scope="session")
def folder(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model as a checkpoint."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny.model.save_pretrained(path)
    assert tiny.tokenizer is not None
    tiny.tokenizer.save_pretrained(path)
    return str(path)


class Process:
    """A server's process, with the URL that it printed."""

    def __init__(self, command: list[str], **environment: str) -> None:
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**ENVIRONMENT, **environment},
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        found = re.search(r"http://\S+", self.line)
        assert found is not None, self.ended()
        self.url = found[0]

    def ended(self, timeout: float = 60) -> tuple[int, str]:
        """Its exit code, and what it wrote to stderr."""
        _, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, errors


Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """Processes that are killed in the end, should they still run."""
    made: list[Process] = []

    def begin(command: list[str], **environment: str) -> Process:
        made.append(Process(command, **environment))
        return made[-1]

    yield begin
    for its in made:
        if its.process.poll() is None:
            its.process.kill()
            its.process.communicate()


def served(folder: str, *options: str) -> list[str]:
    return [str(SCRIPT), "serve", folder, "--port", "0", "--kv-memory", "16MiB", *options]


def test_a_process_serves_until_it_is_told_to_stop(
    start: Start, folder: str, make_llm: Callable[..., LLM]
) -> None:
    process = start(
        served(folder, "--api-key", "one", "--served-model-name", "org/small", "--seed", "1"),
        RADIXKV_API_KEY="two, three",
    )
    assert process.line == f"radixkv serves org/small at {process.url}\n"
    expected = make_llm().generate("Once upon a time", SamplingParams(**GREEDY))[0].text
    for key in ("one", "two", "three"):
        with client_of(process.url, api_key=key) as client:
            told = client.completions.create(model="org/small", prompt="Once upon a time", **GREEDY)
            assert client.models.retrieve("org/small").id == "org/small"
        assert told.choices[0].text == expected
    with (
        client_of(process.url, api_key="four") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    curl = [
        *("curl", "-sN", f"{process.url}/v1/chat/completions", "-H", "Authorization: Bearer one"),
        *("-H", "Content-Type: application/json"),
        *("-d", json.dumps({"messages": TALK, "stream": True, **GREEDY})),
    ]
    done = subprocess.run(curl, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("data: [DONE]\n\n")
    lines = [line for line in done.stdout.splitlines() if line.startswith("data: {")]
    text = "".join(json.loads(line[6:])["choices"][0]["delta"]["content"] for line in lines)
    assert text == make_llm().chat(TALK, SamplingParams(**GREEDY))[0].text
    process.process.send_signal(signal.SIGTERM)
    code, errors = process.ended()
    assert code == 0, errors
    assert errors.endswith(
        "radixkv: stopping; 0 requests have 30 s to end (again to stop at once)\n"
    )


def serve_here(llm: LLM, drain: float, use: Callable[[str], None]) -> int:
    """Serve on this thread, with slow steps, while ``use`` goes on on another, and ends it."""
    schedule = llm.engine.scheduler.schedule

    def slowly() -> Any:
        time.sleep(0.01)
        return schedule()

    llm.engine.scheduler.schedule = slowly  # type: ignore[method-assign]
    listener = bound("127.0.0.1", 0)
    url = url_of(listener, "127.0.0.1")
    failures: list[BaseException] = []

    def client() -> None:
        try:
            wait_for(lambda: up(url))
            use(url)
        except BaseException as failure:
            failures.append(failure)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=client)
    thread.start()
    code = run_server(llm, ServerConfig(drain_seconds=drain), listener)
    thread.join()
    assert not failures, failures
    return code


def up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def streaming(url: str, max_tokens: int, n: int = 1) -> tuple[list[Any], threading.Thread]:
    """A stream that is read on a thread: what has come, with the error that ended it."""
    got: list[Any] = []

    def read() -> None:
        with client_of(url) as client:
            try:
                for chunk in client.completions.create(
                    model="tiny",
                    prompt="Once",
                    max_tokens=max_tokens,
                    n=n,
                    stream=True,
                    extra_body={"ignore_eos": True},
                ):
                    got.append(chunk)
            except openai.APIError as error:
                got.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    wait_for(lambda: bool(got))
    return got, thread


@pytest.mark.parametrize("said", [b"", b"GET /health HTTP/1.1\r\nHo"])
def test_who_asks_for_nothing_is_not_kept(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr("radixkv.server.run.KEEP_ALIVE_SECONDS", 0.2)

    def use(url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as line:
            line.sendall(said)
            assert line.recv(1) == b""
        with httpx.Client(base_url=url) as client:
            for _ in range(2):
                assert client.get("/health").status_code == 200
        stop()

    assert serve_here(make_llm(), 5, use) == 0


def test_what_runs_may_end_while_others_are_sent_away(make_llm: Callable[..., LLM]) -> None:
    got: list[Any] = []

    def use(url: str) -> None:
        its, thread = streaming(url, 100)
        stop()
        wait_for(lambda: not up(url))
        with client_of(url) as client, pytest.raises(openai.InternalServerError) as failure:
            client.completions.create(model="tiny", prompt="Once")
        assert failure.value.status_code == 503
        thread.join(60)
        got.extend(its)

    assert serve_here(make_llm(), 30, use) == 0
    assert got[-1].choices[0].finish_reason == "length"


def test_what_does_not_end_in_time_is_told_so(make_llm: Callable[..., LLM]) -> None:
    got: list[Any] = []

    def use(url: str) -> None:
        its, thread = streaming(url, 400)
        stop()
        thread.join(60)
        got.extend(its)

    assert serve_here(make_llm(), 0.1, use) == 0
    assert isinstance(got[-1], openai.APIError)
    assert "shut down" in str(got[-1])


def test_a_dead_engine_ends_the_process(
    make_llm: Callable[..., LLM], capfd: pytest.CaptureFixture[str]
) -> None:
    llm = make_llm()

    def use(url: str) -> None:
        got, thread = streaming(url, 400)

        def broken() -> Any:
            raise AssertionError("a law of the cache is broken")

        llm.engine.scheduler.schedule = broken  # type: ignore[method-assign]
        thread.join(60)
        assert isinstance(got[-1], openai.APIError)

    assert serve_here(llm, 30, use) == 1
    assert "the engine has stopped; nothing can be served" in capfd.readouterr().err


def test_a_second_signal_ends_at_once(start: Start, folder: str) -> None:
    process = start(served(folder, "--drain-seconds", "300"))
    got, thread = streaming(process.url, 490, n=64)
    process.process.send_signal(signal.SIGINT)
    assert process.process.stderr is not None
    while "1 requests have 300 s" not in (line := process.process.stderr.readline()):
        assert line, "it never said that it stops"
    process.process.send_signal(signal.SIGINT)
    assert process.ended()[0] == 128 + signal.SIGINT
    thread.join(60)
    assert isinstance(got[-1], openai.APIConnectionError | httpx.HTTPError)


def failed(*command: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        env={**ENVIRONMENT, **environment},
        check=False,
    )
    assert done.stdout == ""
    assert done.stderr.startswith("radixkv: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.returncode, done.stderr


def test_a_port_that_is_taken_is_one_line_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        code, line = failed(str(SCRIPT), "serve", "/nowhere", "--port", port)
    assert code == 1
    assert f"cannot serve at 127.0.0.1:{port}: Address already in use; choose another" in line


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("/nowhere", "--port", "0"), 1, "there is no folder or file /nowhere"),
        (("/nowhere", "--host", "256.1.1.1"), 1, "cannot serve at 256.1.1.1:8000"),
        (("/nowhere", "--port", "99999"), 2, "port must be in 0 to 65535"),
        (("/nowhere", "--isolate-keys"), 2, "need api_keys"),
        (("/nowhere", "--eviction", "magic", "--port", "0"), 2, "'magic' is not one of"),
    ],
)
def test_what_cannot_be_is_one_line(
    options: tuple[str, ...],
    code: int,
    words: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["serve", *options])
    assert ending.value.code == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("radixkv: ")
    assert err.count("\n") == 1
    assert words in err


def test_an_empty_key_in_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RADIXKV_API_KEY", "")
    with pytest.raises(SystemExit) as ending:
        main(["serve", "/nowhere", "--port", "0"])
    assert ending.value.code == 2
    assert "RADIXKV_API_KEY holds an empty key" in capfd.readouterr().err


def shown_help() -> list[str]:
    from radixkv.cli.app import app

    done = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "80"})
    return done.stdout.strip().splitlines()


def test_help_fits_a_screen_by_groups() -> None:
    lines = shown_help()
    assert len(lines) <= 45
    groups = [line.split()[1:-1] for line in lines if line.startswith("╭")]
    assert [" ".join(words).rstrip(" ─") for words in groups] == [
        "Arguments",
        "Options",
        "Model",
        "Batches and cache",
        "Server",
        "Watching",
    ]
    rows = [line for line in lines if line.startswith("│")]
    assert all(row.startswith(("│ --", "│   MODEL")) for row in rows)  # None takes two lines.


def test_flags_have_vllms_names_and_are_documented() -> None:
    flags = set(re.findall(r"│ (--[a-z-]+)", "\n".join(shown_help()))) - {"--help"}
    alike = "host port dtype max-model-len max-num-seqs max-num-batched-tokens block-size"
    alike += " kv-cache-dtype served-model-name api-key seed"
    assert {f"--{name}" for name in alike.split()} < flags
    page = Path(__file__).parents[2] / "docs" / "serving.md"
    table = page.read_text().split("## Endpoints")[0]
    assert {flag for flag in flags if f"`{flag}" not in table} == set()


def test_what_can_be_set_has_a_flag() -> None:
    kept = {"max_n", "max_contexts"}
    settings = {field.name for field in fields(ServerConfig)} - kept
    assert {field.name for field in fields(ServingFlags)} == settings
    assert {field.name for field in fields(LoadingFlags)} < set(
        inspect.signature(LLM.__init__).parameters
    )
