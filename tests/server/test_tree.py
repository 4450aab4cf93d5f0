"""The tree as JSON, and `radixkv inspect`, which shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx
import pytest

from radixkv.cache import EPHEMERAL
from radixkv.cli import main
from radixkv.cli.tree import render
from radixkv.decoding import SamplingParams
from radixkv.errors import RadixKVError
from radixkv.llm import LLM
from radixkv.server.service import Service

T = TypeVar("T")
Serve = Callable[..., tuple[str, Service]]

SYSTEM = "You are the library's assistant, and you know all of its books. "
ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def on(service: Service, work: Coroutine[Any, Any, T]) -> T:
    """Run something on the server's event loop."""
    loop = service.worker._loop
    assert loop is not None
    return asyncio.run_coroutine_threadsafe(work, loop).result(30)


def call(service: Service, function: Callable[[LLM], T]) -> T:
    return on(service, service.worker.call(function))


def generate(service: Service, text: str, **more: Any) -> None:
    async def run() -> None:
        answer = await service.worker.submit(service.llm.tokenize(text), ONE, **more)
        assert (await answer.end()).error is None

    on(service, run())


def inspect(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ending:
        main(["inspect", *arguments])
    out, err = capsys.readouterr()
    return int(str(ending.value.code)), out, err


def test_nodes_are_those_of_the_tree(serve: Serve) -> None:
    url, service = serve(64)
    empty = httpx.get(f"{url}/v1/tree").json()
    assert empty["nodes"] == []
    assert empty["pool"]["free"] == empty["pool"]["num_blocks"] == 64
    generate(service, SYSTEM + "Which of them is about volcanoes?")
    generate(service, SYSTEM + "Do you have anything that is printed large?")
    generate(service, "Something else that is asked once", retention=EPHEMERAL)
    sequence = call(service, lambda llm: llm.cache.acquire(llm.tokenize(SYSTEM)))
    answer = httpx.get(f"{url}/v1/tree").json()
    call(service, lambda llm: llm.cache.release(sequence))
    nodes = {node["text"]: node for node in answer["nodes"]}
    questions = ("Which of them is about v", "Do you have anything tha")
    assert set(nodes) == {SYSTEM[:24], *questions, "Something else that is a"}
    shared, once = nodes[SYSTEM[:24]], nodes["Something else that is a"]
    assert (shared["tokens"], shared["blocks"], shared["start"]) == (64, 4, 0)
    assert (shared["held"], shared["parent"], shared["hidden_children"]) == (1, None, 0)
    assert not shared["open"]
    for text in questions:
        assert nodes[text]["parent"] == shared["id"]
        assert nodes[text]["start"] == 64
        assert nodes[text]["held"] == 0
        assert nodes[text]["last_used"] <= shared["last_used"] <= answer["clock"]
    assert once["ephemeral"]
    assert once["open"] == (once["tokens"] % 16 != 0)
    cached = sum(node["blocks"] for node in answer["nodes"])
    pool = answer["pool"]
    assert pool["cached_only"] + pool["held_and_cached"] == cached
    assert sum(pool[name] for name in ("free", "held_only", "cached_only", "held_and_cached")) == 64
    counters = call(service, lambda llm: llm.stats().cache.counters)
    assert (answer["query_tokens"], answer["hit_tokens"]) == (
        counters.query_tokens, counters.hit_tokens,
    )  # fmt: skip


def test_the_answer_is_bounded(serve: Serve) -> None:
    url, service = serve(256)
    for number in range(12):
        generate(service, f"{number:02} begins a prompt of its own, with nothing shared")
    answer = httpx.get(f"{url}/v1/tree", params={"limit": 5}).json()
    shown = [node["text"][:2] for node in answer["nodes"]]
    assert sorted(shown) == ["07", "08", "09", "10", "11"]
    for limit in ("0", "5001", "many"):
        refused = httpx.get(f"{url}/v1/tree", params={"limit": limit})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "query.limit"


def test_a_key_is_needed_and_sees_its_own(
    serve: Serve, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    url, service = serve(256, api_keys=("mine", "yours"), isolate_keys=True)
    assert httpx.get(f"{url}/v1/tree").status_code == 401
    for key in ("mine", "yours"):
        generate(service, f"a secret that is only {key}", namespace=service.namespace(key, "s"))
    code, out, err = inspect(capsys, url)
    assert (code, out) == (1, "")
    assert "HTTP 401" in err
    assert "RADIXKV_API_KEY" in err
    code, out, _ = inspect(capsys, url, "--api-key", "mine")
    assert code == 0
    assert "a secret that is only mi" in out
    assert "only yo" not in out
    monkeypatch.setenv("RADIXKV_API_KEY", "yours")
    code, out, _ = inspect(capsys, url)
    assert "a secret that is only yo" in out
    assert "only mi" not in out
    assert "/salt:s" in out


def test_inspect_shows_the_tree(
    serve: Serve, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    url, service = serve(64)
    code, out, _ = inspect(capsys, url)
    assert code == 0
    assert "(empty)" in out
    generate(service, SYSTEM + "Which of them is about volcanoes?")
    generate(service, SYSTEM + "Do you have anything that is printed large?")
    code, out, _ = inspect(capsys, url + "/")
    assert code == 0
    lines = out.splitlines()
    assert lines[1].startswith("64 blocks of 16 tokens: 0 held, ")
    assert lines[2].startswith("204 prompt tokens, ")
    assert lines[3] == "root"
    assert lines[4].startswith("└── 64 tokens in 4 blocks, held by 0, hits ")
    assert lines[4].endswith(f"used 0 uses ago: {SYSTEM[:24]!r}")
    # The youngest stands first.
    assert "Do you have anything tha" in lines[5]
    assert "Which of them is about v" in lines[6]
    assert len(lines) == 7


def test_inspect_says_what_it_leaves_out(
    serve: Serve, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    url, service = serve(64)
    for number in range(4):
        generate(service, f"{SYSTEM}{number} is asked")
    code, out, _ = inspect(capsys, url, "--limit", "2")
    assert code == 0
    assert "… 3 more" in out


def test_watching_looks_again(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    url, service = serve(64)
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt
        generate(service, f"{len(looks)} is something new that has come in between")

    monkeypatch.setattr("radixkv.cli.tree.time.sleep", sleep)
    with pytest.raises(SystemExit) as ending:
        main(["inspect", url, "--watch", "--interval", "0.5"])
    assert ending.value.code == 130
    assert looks == [0.5, 0.5, 0.5]


def test_inspect_and_what_is_no_server_of_ours(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = serve(64)
    for address, word in (
        ("http://127.0.0.1:9", "cannot reach"),
        ("nonsense", "cannot reach"),
        (f"{url}/v2", "HTTP 404"),
    ):
        code, out, err = inspect(capsys, address)
        assert (code, out) == (1, "")
        assert word in err
        assert len(err.splitlines()) == 1
    with pytest.raises(RadixKVError, match="not known here"):
        render({"model": "another"})
