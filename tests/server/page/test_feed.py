"""The page's server side, over HTTP: what is sent, to whom, and what is left behind."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from radixkv.decoding import SamplingParams
from radixkv.engine import RequestOutput
from radixkv.llm import LLM
from radixkv.server.page import feed as feeds
from radixkv.server.page.pulse import Pulse
from radixkv.server.page.removals import RemovalLog
from radixkv.server.page.snapshot import Look
from radixkv.server.service import Service

Serve = Callable[..., tuple[str, Service]]
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


def answer(service: Service, text: str, params: SamplingParams = GREEDY) -> RequestOutput:
    """A request from start to end, through the server's own loop."""

    async def run() -> RequestOutput:
        prompt = await service.on_texts(lambda llm: llm.tokenize(text))
        return await (await service.worker.submit(prompt, params)).end()

    return on_loop(service, run())


def on_loop(service: Service, coroutine: Any) -> Any:
    loop = service.worker._loop
    assert loop is not None
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)


def events_of(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


def until(events: Iterator[tuple[str, Any]], name: str, good: Callable[[Any], bool]) -> Any:
    for its_name, data in events:
        if its_name == name and good(data):
            return data
    raise AssertionError("the feed has ended")


def test_the_feed_shows_what_the_cache_holds(serve: Serve) -> None:
    url, service = serve()
    with httpx.stream("GET", f"{url}/page/feed", timeout=30) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        events = events_of(response.iter_lines())
        hello = until(events, "hello", bool)
        assert (hello["model"], hello["num_blocks"], hello["block_size"]) == ("tiny", 256, 16)
        empty = until(events, "tree", lambda _: True)
        assert empty["nodes"] == []
        output = answer(service, "once upon a time there was a tree")
        tree = until(events, "tree", lambda tree: len(tree["nodes"]) > 0)
        stats = until(events, "stats", lambda stats: stats["totals"][1] == 40)
        assert stats["first_token"][3] == 1
        assert stats["between_tokens"][3] == 39
    assert output.num_cached_tokens == 0
    assert tree["texts"][0] == "once upon a time there was a tree"[:24]
    _, parent, space = tree["nodes"][0][:3]
    assert (parent, tree["spaces"][space]) == (0, "")
    assert tree["nodes"][0][3] == 0


def test_a_snapshot_says_who_holds_what(serve: Serve) -> None:
    url, service = serve()
    prompt = list(b"a prompt of more than thirty-two bytes, say")
    long = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True, n=2)
    with httpx.stream("GET", f"{url}/page/feed", timeout=30) as response:
        events = events_of(response.iter_lines())
        begun = on_loop(service, service.worker.submit(prompt, long, request_id="mine"))
        part = until(events, "holders", lambda part: len(part["holders"]) == 2)
        assert {its["name"] for its in part["holders"]} == {"mine/0", "mine/1"}
        assert {its["kind"] for its in part["holders"]} == {"request"}
        assert all(its["node"] > 0 for its in part["holders"])
        assert part["num_running"] == 1
        pool = until(events, "pool", lambda pool: pool["counts"][3] > 0)
        assert len(pool["states"]) == len(pool["refs"]) == 256
        assert [pool["states"].count(str(state)) for state in range(4)] == pool["counts"]
        begun.cancel()
        until(events, "holders", lambda part: not part["holders"] and not part["num_running"])


def test_evictions_are_told_with_their_reason(serve: Serve) -> None:
    url, service = serve(num_blocks=12)
    for letter in "abcd":
        answer(service, letter * 48)
    with httpx.stream("GET", f"{url}/page/feed", timeout=30) as response:
        part = until(events_of(response.iter_lines()), "removals", lambda part: part["removals"])
    evicted = [its for its in part["removals"] if its["reason"] == "evicted"]
    assert evicted
    assert all(its["unused"] >= 0 and its["blocks"] > 0 for its in evicted)
    assert any(its["text"].startswith("aaaa") for its in evicted)


def test_one_node_is_spelled_token_by_token(serve: Serve) -> None:
    url, service = serve()
    text = "this is what a node says, at length"
    answer(service, text, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    with httpx.stream("GET", f"{url}/page/feed", timeout=30) as response:
        events = events_of(response.iter_lines())
        tree = until(events, "tree", lambda tree: len(tree["nodes"]) > 0)
        serial, blocks = tree["nodes"][0][0], tree["nodes"][0][4]
        found = httpx.get(f"{url}/page/nodes/{serial}").json()
        assert "".join(piece for piece, _ in found["pieces"]) == text
        assert found["ids"] == service.llm.tokenize(text)
        assert len(found["blocks"]) == blocks == 3
        missing = httpx.get(f"{url}/page/nodes/999999")
        assert (missing.status_code, missing.json()) == (200, None)


def wait_for(good: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not good():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nothing_is_taken_while_nobody_looks_or_nothing_happens(
    serve: Serve, monkeypatch: Any
) -> None:
    monkeypatch.setattr(feeds, "INTERVAL_SECONDS", 0.01)
    made: list[feeds.Feed] = []
    begin = feeds.Feed.__init__

    def remember(self: feeds.Feed, service: Service) -> None:
        begin(self, service)
        made.append(self)

    monkeypatch.setattr(feeds.Feed, "__init__", remember)
    url, service = serve()
    (feed,) = made
    answer(service, "nobody looks")
    assert feed.num_snapshots == 0
    assert not feed._watchers
    with httpx.stream("GET", f"{url}/page/feed", timeout=30) as response:
        events = events_of(response.iter_lines())
        until(events, "tree", lambda tree: len(tree["nodes"]) > 0)
        wait_for(lambda: feed.num_snapshots == 1)
        calls = service.worker.call(lambda _: feed.num_snapshots)
        assert on_loop(service, calls) == 1
        time.sleep(0.2)  # Twenty times the interval.
        assert feed.num_snapshots == 1
        answer(service, "somebody looks")
        until(events, "stats", lambda stats: stats["requests"] == 2)
        assert feed.num_snapshots >= 2
    wait_for(lambda: not feed._watchers and feed._task is None)
    assert feed._look.shown == {}
    assert feed._parts == {}


def test_many_watchers_see_the_same_and_leave_nothing(serve: Serve) -> None:
    url, service = serve()
    answer(service, "one snapshot for all of them")
    seen = []
    for _ in range(3):
        with httpx.stream("GET", f"{url}/page/feed", timeout=30) as response:
            events = events_of(response.iter_lines())
            seen.append(until(events, "tree", lambda tree: len(tree["nodes"]) > 0)["nodes"])
    assert seen[0] == seen[1] == seen[2]


def test_the_feed_ends_when_the_server_shuts_down(serve: Serve) -> None:
    url, service = serve()
    with httpx.stream("GET", f"{url}/page/feed", timeout=30) as response:
        events = events_of(response.iter_lines())
        until(events, "hello", bool)
        service.worker.draining = True
        assert [name for name, _ in events if name == "hello"] == []


def test_a_protected_page_shows_itself_and_no_data_without_a_key(serve: Serve) -> None:
    url, _ = serve(api_keys=("right",), protect_page=True)
    assert httpx.get(f"{url}/").status_code == 200
    for path in ("/page/feed", "/page/nodes/1"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic right"}):
            refused = httpx.get(f"{url}{path}", headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["type"] == "authentication_error"
    headers = {"Authorization": "Bearer right"}
    assert httpx.get(f"{url}/page/nodes/1", headers=headers).status_code == 200
    with httpx.stream("GET", f"{url}/page/feed", headers=headers, timeout=30) as response:
        assert response.status_code == 200
        assert next(events_of(response.iter_lines()))[1]["needs_key"] is True


def test_an_open_page_needs_no_key_though_requests_do(serve: Serve) -> None:
    url, _ = serve(api_keys=("right",))
    with httpx.stream("GET", f"{url}/page/feed", timeout=30) as response:
        assert response.status_code == 200


def test_the_page_runs_nothing_but_its_own(serve: Serve) -> None:
    url, _ = serve()
    page = httpx.get(f"{url}/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert "<script>" not in page.text
    assert "style=" not in page.text
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert page.headers["x-content-type-options"] == "nosniff"
    for name in ("d3-hierarchy.min.js", "d3-selection.min.js", "LICENSES.txt"):
        assert httpx.get(f"{url}/page/static/vendor/{name}").status_code == 200
    assert httpx.get(f"{url}/page/static/../routes.py").status_code == 404
    assert "/page/feed" not in httpx.get(f"{url}/openapi.json").json()["paths"]


def test_a_snapshot_of_nothing_new_is_none(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    pulse = Pulse()
    look = Look(pulse, RemovalLog(pulse))
    assert look.take(llm) is not None
    assert look.take(llm) is None
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert look.take(llm) is not None
    assert look.take(llm) is None
    look.forget()
    assert look.take(llm) is not None
