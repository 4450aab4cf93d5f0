"""Clients that leave, read slowly or meet faults: others never notice, and nothing stays behind."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch
from clients import client_of, wait_for

from radixkv.server.service import Service

Serve = Callable[..., tuple[str, Service]]

LONG: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 490,
    "temperature": 0,
    "ignore_eos": True,
}


def sent(url: str, body: dict[str, Any] | None, *, missing: int = 0) -> socket.socket:
    """A connection on which a request was sent, but for some bytes."""
    raw = json.dumps(body).encode()
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(raw)}\r\n\r\n".encode()
        + raw[: len(raw) - missing]
    )
    return connection


@pytest.fixture
def slow(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[tuple[str, Service]]:
    """A server whose steps take as long as those of a larger model, and how it must be left."""
    url, service = serve(max_queued=64, llm=getattr(request, "param", None))
    run = service.llm.engine.runner.run

    def slowly(step: Any) -> torch.Tensor:
        time.sleep(0.005)
        return run(step)

    monkeypatch.setattr(service.llm.engine.runner, "run", slowly)
    yield url, service
    wait_for(lambda: service.worker.num_unfinished == 0)
    assert service.worker.num_reserved == 0
    engine = service.llm.engine
    assert (len(engine.requests), len(service.llm.cache.sequences)) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_while_it_runs_frees_its_blocks_at_once(
    slow: tuple[str, Service], stream: bool
) -> None:
    url, service = slow
    counters = service.llm.engine.counters
    connection = sent(url, {**LONG, "stream": stream})
    wait_for(lambda: counters.sampled_tokens > 3)
    connection.close()
    wait_for(lambda: service.worker.num_unfinished == 0)
    assert counters.sampled_tokens < 200
    assert counters.requests_aborted == 1


def test_who_leaves_a_batch_frees_all_of_it(slow: tuple[str, Service]) -> None:
    url, service = slow
    counters = service.llm.engine.counters
    connection = sent(url, {**LONG, "prompt": ["a", "b", "c"], "n": 2, "stream": True})
    wait_for(lambda: counters.sampled_tokens > 12)
    connection.close()
    wait_for(lambda: service.worker.num_unfinished == 0)
    assert counters.requests_aborted == 3


@pytest.mark.parametrize("slow", [{"max_num_seqs": 1}], indirect=True)
def test_who_leaves_the_queue_is_never_run(slow: tuple[str, Service]) -> None:
    url, service = slow
    counters = service.llm.engine.counters
    connection = sent(url, LONG)
    wait_for(lambda: counters.sampled_tokens > 0)
    held = [sent(url, {**LONG, "prompt": "another"}) for _ in range(4)]
    wait_for(lambda: service.worker.num_unfinished == 5)
    for other in held:
        other.close()
    wait_for(lambda: service.worker.num_unfinished == 1)
    connection.close()
    wait_for(lambda: service.worker.num_unfinished == 0)
    assert counters.prefilled_tokens == len(LONG["prompt"])


def test_who_leaves_before_its_text_is_read_asks_for_nothing(slow: tuple[str, Service]) -> None:
    url, service = slow
    release = threading.Event()
    service._texts.submit(release.wait)
    connection = sent(url, LONG)
    wait_for(lambda: service.worker.num_reserved == 1)
    connection.close()
    wait_for(lambda: service.worker.num_reserved == 0)
    release.set()
    assert httpx.post(f"{url}/tokenize", json={"prompt": "a"}).status_code == 200
    assert service.llm.engine.counters.requests == 0


@pytest.mark.parametrize("missing", [1, 60])
def test_who_leaves_before_its_body_is_complete(
    slow: tuple[str, Service], missing: int, caplog: pytest.LogCaptureFixture
) -> None:
    url, service = slow
    connection = sent(url, LONG, missing=missing)
    connection.close()
    told = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert told.status_code == 200
    assert service.llm.engine.counters.requests == 1
    assert not [record for record in caplog.records if record.exc_info]


def test_slow_readers_get_all_of_it_and_hold_up_nobody(slow: tuple[str, Service]) -> None:
    url, service = slow
    body = LONG | {"max_tokens": 150}
    whole = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    sleepers = [sent(url, {**body, "stream": True}) for _ in range(20)]
    wait_for(lambda: service.worker.num_unfinished == 20)
    told = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=60)
    assert told.status_code == 200
    wait_for(lambda: service.worker.num_unfinished == 0)
    for connection in sleepers:
        raw = b""
        while b"[DONE]" not in raw:
            raw += connection.recv(65536)
        connection.close()
        events = [
            json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")
        ]
        text = "".join(event["choices"][0]["text"] for event in events)
        assert text == whole["choices"][0]["text"]


def test_many_come_and_go(slow: tuple[str, Service]) -> None:
    url, _ = slow

    def one(number: int) -> int:
        body = {"prompt": f"{number} times", "max_tokens": 30, "stream": bool(number % 2)}
        if number % 3:
            told = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            return told.status_code
        connection = sent(url, {**body, "ignore_eos": True})
        time.sleep(number % 7 * 0.01)
        connection.close()
        return 0

    with ThreadPoolExecutor(16) as pool:
        codes = list(pool.map(one, range(60)))
    assert codes.count(200) == 40
    assert codes.count(0) == 20


def test_a_crowd_is_turned_away_and_told_when_to_come_again(slow: tuple[str, Service]) -> None:
    url, service = slow
    release = threading.Event()
    service.worker.tell(lambda _: release.wait(60))  # Nothing ends meanwhile.
    body = {"prompt": "Once", "max_tokens": 2, "ignore_eos": True}

    def one(_: int) -> httpx.Response:
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60)

    with ThreadPoolExecutor(100) as pool:
        asked = [pool.submit(one, number) for number in range(100)]
        wait_for(lambda: sum(its.done() for its in asked) == 36)
        assert service.worker.num_unfinished == 64
        refused = [its.result() for its in asked if its.done()]
        release.set()
        codes = [its.result().status_code for its in asked]
    assert {(its.status_code, its.headers["retry-after"]) for its in refused} == {(429, "1")}
    assert (codes.count(200), codes.count(429)) == (64, 36)
    assert one(0).status_code == 200


# -- faults ----------------------------------------------------------------------------------------


def failing_after(service: Service, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward fails once, when so many tokens were sampled."""
    engine = service.llm.engine
    run, failed = engine.runner.run, []

    def fail(step: Any) -> torch.Tensor:
        if not failed and engine.counters.sampled_tokens >= tokens:
            failed.append(True)
            raise RuntimeError("the device is on fire")
        return run(step)

    monkeypatch.setattr(engine.runner, "run", fail)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_forward_is_500_and_the_server_goes_on(
    serve: Serve, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, service = serve()
    failing_after(service, 0, monkeypatch)
    with client_of(url) as client:
        with pytest.raises(openai.InternalServerError, match="on fire") as failure:
            client.completions.create(model="tiny", prompt="Once", stream=stream)
        assert failure.value.status_code == 500
        told = client.completions.create(model="tiny", prompt="Once", max_tokens=4)
    assert told.usage is not None
    assert told.usage.prompt_tokens_details is not None
    # What the failed step would have computed is not there.
    assert told.usage.prompt_tokens_details.cached_tokens == 0
    assert len(service.llm.cache.sequences) == 0


def test_a_fault_in_the_middle_of_a_stream_is_an_event(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, service = serve()
    failing_after(service, 5, monkeypatch)
    texts: list[str] = []
    with client_of(url) as client:
        stream = client.completions.create(
            model="tiny", prompt=["Once", "upon"], stream=True, temperature=0
        )
        with pytest.raises(openai.APIError, match="on fire") as failure:
            texts.extend(chunk.choices[0].text for chunk in stream)
    assert texts
    assert failure.value.type == "server_error"
    wait_for(lambda: service.worker.num_unfinished == 0)
    assert len(service.llm.cache.sequences) == 0


def test_a_poisoned_request_fails_alone(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    url, service = serve()
    run = service.llm.engine.runner.run

    def poison(step: Any) -> torch.Tensor:
        logits = run(step).clone()
        for place, row in enumerate(row for row in step.rows if row.samples):
            if row.branch.request.prompt[0] == row.branch.request.prompt[1]:
                logits[place] = torch.nan
        return logits

    monkeypatch.setattr(service.llm.engine.runner, "run", poison)
    bodies: list[dict[str, Any]] = [{**LONG, "prompt": prompt} for prompt in ("one", "xx", "two")]
    with ThreadPoolExecutor(3) as pool:
        told = list(pool.map(lambda body: httpx.post(f"{url}/v1/completions", json=body), bodies))
    assert [its.status_code for its in told] == [200, 500, 200]
    assert "NaN logits" in told[1].json()["error"]["message"]


def test_who_comes_while_it_drains_is_told_to_go_elsewhere(serve: Serve) -> None:
    url, service = serve()
    with client_of(url) as client:
        service.worker.draining = True
        with pytest.raises(openai.InternalServerError, match="shutting down") as failure:
            client.completions.create(model="tiny", prompt="Once")
    assert failure.value.status_code == 503
    assert failure.value.response.headers["retry-after"] == "1"
    assert httpx.get(f"{url}/ready").status_code == 503
    assert httpx.get(f"{url}/health").status_code == 200
