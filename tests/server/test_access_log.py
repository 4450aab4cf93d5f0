"""The access log, request ids, and the line that says how the engine does."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import httpx
import pytest
from observing import GREEDY, with_app

from radixkv.errors import ConfigError
from radixkv.server.access_log import log_plainly
from radixkv.server.config import ServerConfig
from radixkv.server.logs import show_logs
from radixkv.server.record import CURRENT, Record, Records
from radixkv.server.service import Service
from radixkv.server.stats_log import log_stats, stats_line

PROMPT = b"once upon a time"


@pytest.fixture
def lines(caplog):
    """What the access log says."""
    caplog.set_level(logging.INFO, logger="radixkv")

    def said(logger: str = "radixkv.access") -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == logger]

    return said


def test_a_line_for_a_person(make_llm, lines) -> None:
    async def use(client: httpx.AsyncClient, service: Service) -> None:
        headers = {"X-Request-Id": "mine-1"}
        await client.post("/chat/x?key=secret", content=PROMPT, headers=headers)
        await client.post("/stream", content=PROMPT + b"!", headers=headers)
        await client.get("/nothing/a%0Ab c%22", headers=headers)

    with_app(make_llm(64), use)
    first, second, third = lines()
    seconds = r"\d+\.\d{3} s"
    assert re.fullmatch(
        rf'127\.0\.0\.1 "POST /chat/x" 200, {seconds}, '
        "prompt 16, cached 0, generated 12, id mine-1",
        first,
    )
    # A streamed answer is logged once it is over, with all its tokens.
    assert re.fullmatch(
        rf'127\.0\.0\.1 "POST /stream" 200, {seconds}, '
        "prompt 17, cached 16, generated 12, id mine-1",
        second,
    )
    assert re.fullmatch(
        rf'127\.0\.0\.1 "GET /nothing/a%0Ab%20c%22" 404, {seconds}, id mine-1', third
    )


def test_a_line_for_a_program(make_llm, lines) -> None:
    async def use(client: httpx.AsyncClient, service: Service) -> None:
        await client.post("/chat/x", content=PROMPT, headers={"X-Request-Id": "mine-2"})
        await client.get("/boom", headers={"X-Request-Id": "mine-3"})

    with_app(make_llm(64), use, access_log="json")
    first, second = map(json.loads, lines())
    assert first.pop("seconds") > 0
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/chat/x",
        "route": "/chat/{name}",
        "status": 200,
        "complete": True,
        "prompt_tokens": 16,
        "cached_tokens": 0,
        "generated_tokens": 12,
        "request_id": "mine-2",
    }
    assert (second["status"], second["request_id"]) == (500, "mine-3")
    assert "prompt_tokens" not in second


def test_no_line_if_told_so(make_llm, lines) -> None:
    async def use(client: httpx.AsyncClient, service: Service) -> None:
        await client.get("/health")

    with_app(make_llm(64), use, access_log=False)
    assert lines() == []


def test_requests_to_the_engine_are_named_by_it(
    serve: Callable[..., tuple[str, Service]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, service = serve()
    names: list[str] = []
    add = service.llm.engine.add_request

    def noted(*arguments: Any, **named: Any) -> Any:
        request = add(*arguments, **named)
        names.append(request.request_id)
        return request

    monkeypatch.setattr(service.llm.engine, "add_request", noted)
    with httpx.Client(base_url=url, headers={"X-Request-Id": "mine"}) as client:
        body = {"prompt": ["a", "b"], "max_tokens": 2}
        told = [client.post("/v1/completions", json=body).json()["id"] for _ in range(2)]
        context = client.post("/v1/contexts", json={"content": "a"}).json()["id"]
        client.post(f"/v1/contexts/{context}/generate", json={"max_tokens": 2})
        client.post(f"/v1/contexts/{context}/choose", json={"options": ["x", "y"]})
    assert [re.sub("mine-[0-9a-f]{8}", "mine", name) for name in names] == [
        *("mine", "mine-1"),
        *("mine", "mine-1"),
        *("mine", "mine", "mine"),
    ]
    assert len(set(names)) == 7
    assert told == [f"cmpl-{names[0]}", f"cmpl-{names[2]}"]


def test_a_request_id_is_honoured_or_made(make_llm) -> None:
    async def use(client: httpx.AsyncClient, service: Service) -> None:
        async def ask(given: str | None, path: str = "/health") -> str:
            headers = {} if given is None else {"X-Request-Id": given}
            (named,) = (await client.get(path, headers=headers)).headers.get_list("x-request-id")
            return named

        for good in ("a", "7f3e-2.b_c:D", "x" * 128):
            assert await ask(good) == good
        for bad in ("x" * 129, "", "-a", "a b", "a\tb", "ä", "a;b", None):
            made = await ask(bad and bad.encode("latin-1"))
            assert re.fullmatch("[0-9a-f]{24}", made), bad
        assert await ask(None) != await ask(None)
        # The layer outside answers what nobody foresaw; it knows the id, too.
        assert await ask("mine", "/boom") == "mine"
        assert await ask("mine", "/nothing") == "mine"
        headers = {"X-Request-Id": "mine"}
        body = await client.post("/chat/x", content=PROMPT, headers=headers)
        assert body.json()["request_id"] == "mine"

    with_app(make_llm(64), use)


@pytest.mark.parametrize(
    ("sent", "error", "status", "complete"),
    [
        (2, None, 200, True),
        (1, asyncio.CancelledError(), 200, False),
        (0, asyncio.CancelledError(), 499, False),
        (1, ZeroDivisionError(), 200, False),
        (0, ZeroDivisionError(), 500, False),
    ],
)
def test_how_an_answer_ended(lines, sent, error, status, complete) -> None:
    async def app(scope, receive, send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": []}
        body = {"type": "http.response.body", "body": b"x"}
        for message in [start | {}, body | {"more_body": True}][: 2 if sent else 0]:
            await send(message)
        if error is not None:
            raise error
        await send(body)

    async def send(message) -> None:
        said.append(message)

    said: list = []
    seen: list[Record] = []
    scope = {"type": "http", "method": "GET", "path": "/x", "headers": [], "client": ("a", 1)}
    records = Records(app, [seen.append, log_plainly])
    with suppress(type(error)) if error is not None else nullcontext():
        asyncio.run(records(scope, None, send))  # type: ignore[arg-type]
    (record,) = seen
    assert (record.status, record.complete) == (status, complete)
    assert ("client left" in lines()[0]) is (not complete and status < 500)
    assert record.seconds >= 0
    if said:
        assert (b"x-request-id", record.request_id.encode()) in said[0]["headers"]
    assert CURRENT.get() is None


def test_the_stats_line_is_vllms_with_what_is_shared(make_llm, lines) -> None:
    async def use(client: httpx.AsyncClient, service: Service) -> None:
        logging_ = asyncio.create_task(log_stats(service.observed.snapshot, 0.05))
        await asyncio.sleep(0.12)
        assert lines("radixkv.server") == [], "an idle engine has nothing to say"
        answer = await service.worker.submit(PROMPT, GREEDY)
        await answer.end()
        while not lines("radixkv.server"):
            await asyncio.sleep(0.01)
        logging_.cancel()

    with_app(make_llm(64), use)
    number = r"\d+\.\d"
    assert re.fullmatch(
        rf"Avg prompt throughput: {number} tokens/s, "
        rf"Avg generation throughput: {number} tokens/s, "
        r"Running: \d+ reqs, Waiting: 0 reqs, "
        rf"KV cache usage: {number}%, Prefix cache hit rate: 0\.0%, "
        r"Blocks shared: \d+, Copies on write: \d+",
        lines("radixkv.server")[0],
    )


def test_the_figures_of_a_stats_line(make_llm) -> None:
    async def use(client: httpx.AsyncClient, service: Service) -> None:
        await client.post("/chat/x", content=PROMPT * 2)
        before = await service.observed.snapshot()
        await client.post("/chat/x", content=PROMPT * 2)
        now = await service.observed.snapshot()
        assert stats_line(before, now, 2.0) == (
            "Avg prompt throughput: 16.0 tokens/s, Avg generation throughput: 6.0 tokens/s, "
            "Running: 0 reqs, Waiting: 0 reqs, KV cache usage: 0.0%, "
            "Prefix cache hit rate: 100.0%, Blocks shared: 0, "
            f"Copies on write: {now.cache.copies_on_write - before.cache.copies_on_write}"
        )
        # Without a prompt in between, that of all.
        assert "hit rate: 50.0%" in stats_line(now, now, 2.0)

    with_app(make_llm(64), use)


@pytest.mark.parametrize(
    "settings",
    [{"access_log": "xml"}, {"log_stats_seconds": -1}, {"log_stats_seconds": float("nan")}],
)
def test_settings_are_checked(settings) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ServerConfig(**settings)


@pytest.fixture
def fresh_loggers():
    """radixkv's loggers, given back as they were."""
    loggers = [logging.getLogger(name) for name in ("radixkv", "radixkv.access")]
    before = [(logger, logger.level, logger.handlers[:], logger.propagate) for logger in loggers]
    yield
    for logger, level, handlers, propagate in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers
        logger.propagate = propagate


def test_where_logs_go(fresh_loggers, capsys) -> None:
    show_logs("json")
    show_logs("json")  # Twice is once.
    logging.getLogger("radixkv.access").info("%s", '{"a": 1}')
    logging.getLogger("radixkv.server").info("stats")
    out, err = capsys.readouterr()
    assert out == '{"a": 1}\n'
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO stats\n", err)
    show_logs(True)
    logging.getLogger("radixkv.access").info("line")
    out, err = capsys.readouterr()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d line\n", out)
    assert err == ""
