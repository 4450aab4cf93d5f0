"""Contexts over HTTP: what they say, whom they answer, and that nothing of them stays behind."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tokenizers.processors import TemplateProcessing

from radixkv.llm import LLM
from radixkv.server.contexts.registry import Tree
from radixkv.server.service import Service

PROMPT = "Once upon a time there was a cache of keys and values."
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
LONG = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}

Serve = Callable[..., tuple[str, Service]]
MakeLLM = Callable[..., LLM]


class Caller:
    """A plain client of one server, and what the tests ask of that behind its back."""

    def __init__(self, url: str, service: Service, key: str | None = None) -> None:
        self.url = url
        self.service = service
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=60)

    def post(self, path: str, status: int = 200, /, **body: Any) -> Any:
        answer = self.http.post(f"/v1/contexts{path}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def get(self, context: str, status: int = 200) -> Any:
        answer = self.http.get(f"/v1/contexts/{context}")
        assert answer.status_code == status, answer.text
        return answer.json()

    def delete(self, context: str) -> None:
        assert self.http.delete(f"/v1/contexts/{context}").status_code == 200

    def open(self, content: Any = PROMPT, **more: Any) -> str:
        return str(self.post("", content=content, **more)["id"])

    def run(self, operations: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The events of a list of operations."""
        answer = self.http.post("/v1/contexts/operations", json={"operations": operations})
        assert answer.status_code == 200, answer.text
        lines = [line for line in answer.text.split("\n\n") if line]
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def on_loop(self, function: Callable[[], Any]) -> Any:
        """A function's result on the server's event loop."""
        loop = self.service.worker._loop
        assert loop is not None

        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), loop).result(30)

    def on_engine(self, function: Callable[[LLM], Any]) -> Any:
        """A function's result on the engine's thread."""
        loop = self.service.worker._loop
        assert loop is not None
        call = self.service.worker.call(function)
        return asyncio.run_coroutine_threadsafe(call, loop).result(30)

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    @property
    def num_sequences(self) -> int:
        return int(self.on_engine(lambda llm: llm.stats().cache.sequences))


@pytest.fixture
def caller(serve: Serve) -> Iterator[Callable[..., Caller]]:
    made: list[Caller] = []

    def make(key: str | None = None, **settings: Any) -> Caller:
        made.append(Caller(*serve(**settings), key))
        return made[-1]

    yield make
    for each in made:
        each.http.close()


# -- what they say -----------------------------------------------------------------------------


def test_the_same_as_in_the_engines_process(
    make_llm: MakeLLM, caller: Callable[..., Caller]
) -> None:
    with make_llm(seed=7).context(PROMPT) as context:
        first = context.generate(**GREEDY).result()
        one, two = context.fork(2)
        drafts = [one.generate(max_tokens=6).result(), two.generate(max_tokens=6).result()]
        score = context.score(" and").result()
        place = context.checkpoint()
        context.append("away")
        context.rollback(place)
        winner = context.join([one, two], by="total_logprob")
        choice = context.choose([" yes", " no", [1, 2, 3]]).result()
        told = (context.text, context.tokens, context.generated, context.logprobs)

    http = caller(llm={"seed": 7})
    name = http.open()
    answer = http.post(f"/{name}/generate", **GREEDY)
    assert (answer["text"], tuple(answer["token_ids"])) == (first.text, first.token_ids)
    assert answer["finish_reason"] == "length"
    assert [entry["logprob"] for entry in answer["logprobs"]] == [
        entry.logprob for entry in first.outputs[0].logprobs or ()
    ]
    branches = http.post(f"/{name}/fork", n=2)["branches"]
    for branch, draft in zip(branches, drafts, strict=True):
        assert http.post(f"/{branch}/generate", max_tokens=6)["text"] == draft.text
    found = http.post(f"/{name}/score", content=" and")
    assert found == {"token_ids": list(score.token_ids), "logprobs": list(score.logprobs)}
    assert http.post(f"/{name}/checkpoint", name="here") == {"checkpoint": "here"}
    length = http.get(name)["stats"]["num_tokens"]
    assert http.post(f"/{name}/append", content="away") == {"num_tokens": length + 4}
    assert http.post(f"/{name}/rollback", checkpoint="here") == {"num_tokens": length}
    joined = http.post(f"/{name}/join", branches=branches, by="total_logprob")
    assert joined["winner"] == branches[winner is two]
    chosen = http.post(f"/{name}/choose", options=[" yes", " no", [1, 2, 3]])
    assert (chosen["index"], chosen["text"]) == (choice.index, choice.text)
    assert [each["logprobs"] for each in chosen["scores"]] == [
        list(each.logprobs) for each in choice.scores
    ]
    view = http.get(name)
    assert (
        view["text"],
        tuple(view["tokens"]),
        view["generated"],
        tuple(view["logprobs"]),
    ) == told
    http.delete(name)
    assert http.num_sequences == 0


def test_messages_are_turns_as_in_process(make_llm: MakeLLM, caller: Callable[..., Caller]) -> None:
    turns = [[{"role": "user", "content": "Hello!"}], [{"role": "user", "content": "And now?"}]]
    with make_llm().context(turns[0]) as context:
        context.generate(**GREEDY).result()
        context.append(turns[1])
        context.generate(**GREEDY).result()
        tokens = list(context.tokens)
    http = caller()
    name = http.open(turns[0])
    http.post(f"/{name}/generate", **GREEDY)
    http.post(f"/{name}/append", content=turns[1])
    http.post(f"/{name}/generate", **GREEDY)
    view = http.get(name)
    assert view["tokens"] == tokens
    assert view["messages"] == turns[0] + turns[1]


def test_only_what_begins_a_context_has_special_tokens(caller: Callable[..., Caller]) -> None:
    http = caller()
    tokenizer = copy.deepcopy(http.service.llm.loaded.tokenizer)
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", bos)]
    )
    a, b, c = tokenizer("abc", add_special_tokens=False).input_ids
    assert tokenizer("abc").input_ids == [bos, a, b, c]
    http.service.llm.loaded = dataclasses.replace(http.service.llm.loaded, tokenizer=tokenizer)
    whole, parts = http.open("ab"), http.open("")
    http.post(f"/{parts}/append", content="ab")
    for name in (whole, parts):
        http.post(f"/{name}/append", content="c")
        assert http.get(name)["tokens"] == [bos, a, b, c]
        assert http.post(f"/{name}/score", content="ab")["token_ids"] == [a, b]
        http.post(f"/{name}/choose", options=["ba"])
        assert http.get(name)["tokens"] == [bos, a, b, c, b, a]


def test_a_stream_adds_up(caller: Callable[..., Caller]) -> None:
    http = caller()
    name = http.open()
    (branch,) = http.post(f"/{name}/fork", n=1)["branches"]
    whole = http.post(f"/{branch}/generate", **{**GREEDY, "max_tokens": 30})
    answer = http.http.post(
        f"/v1/contexts/{name}/generate", json={**GREEDY, "max_tokens": 30, "stream": True}
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    assert len(events) > 3
    assert "".join(event["text"] for event in events[:-1]) == whole["text"]
    assert events[-1]["result"]["token_ids"] == whole["token_ids"]
    assert http.get(name)["tokens"] == http.get(branch)["tokens"]


def test_a_fork_recomputes_nothing(caller: Callable[..., Caller]) -> None:
    http = caller()
    name = http.open()
    http.post(f"/{name}/generate", **GREEDY)
    length = len(http.get(name)["tokens"])
    computed = http.on_engine(lambda llm: llm.stats().engine.prefilled_tokens)
    branches = http.post(f"/{name}/fork", n=3)["branches"]
    events = http.run([{"context": each, "generate": GREEDY} for each in branches])
    results = [event["result"] for event in events if "result" in event]
    # The last token that was sampled has never been an input: each branch reads it, and no more.
    assert [each["num_prompt_tokens"] for each in results] == [length] * 3
    assert {each["num_cached_tokens"] for each in results} <= {length - 1, length}
    assert http.on_engine(lambda llm: llm.stats().engine.prefilled_tokens) - computed <= 3
    assert len({each["text"] for each in results}) == 1
    assert http.get(name)["branches"] == branches
    http.post(f"/{name}/join", branches=branches, mode="all")
    assert http.get(name)["branches"] == []


# By what is joined, and the branches that may win: of several the likeliest.
JOINS: list[tuple[dict[str, Any], list[int]]] = [
    ({"scores": [0.5, 2, 1.5]}, [1]),
    ({"answers": ["a", "b", "a"]}, [0, 2]),
    ({"answers": [None, 7, None]}, [1]),
    ({"majority": "number"}, [1, 2]),
    ({"majority": "text"}, [0, 2]),
]


def test_joining_the_best(caller: Callable[..., Caller]) -> None:
    http = caller()
    for by, winner in JOINS:
        name = http.open()
        branches = http.post(f"/{name}/fork", n=3)["branches"]
        # What each branch "generated" is the option it chose: its only one.
        options = ["it is 4", " is 12!", "it is 4"]
        if by == {"majority": "number"}:
            options = ["12, no, 3", "6 or 12", "about 12.0"]
        means = []
        for branch, option in zip(branches, options, strict=True):
            (score,) = http.post(f"/{branch}/choose", options=[option])["scores"]
            means.append(sum(score["logprobs"]) / len(score["logprobs"]))
        best = max(winner, key=means.__getitem__)
        joined = http.post(f"/{name}/join", branches=branches, by=by)
        assert joined["winner"] == branches[best], by
        assert http.get(name)["text"] == PROMPT + options[best]
        # A joined branch can still be read, and not be used.
        assert http.get(branches[0])["closed"]
        assert http.get(branches[0])["generated"] == options[0]
        error = http.post(f"/{branches[0]}/append", 410, content="x")["error"]
        assert error["code"] == "context_closed"


def test_joining_all_and_appending(caller: Callable[..., Caller]) -> None:
    http = caller()
    name = http.open("a")
    for mode in ("all", "append"):
        branches = http.post(f"/{name}/fork", n=2)["branches"]
        for branch, option in zip(branches, ("x", "y"), strict=True):
            http.post(f"/{branch}/choose", options=[option])
        template = {"template": "<{index}:{text}>"} if mode == "append" else {}
        joined = http.post(f"/{name}/join", branches=branches, mode=mode, **template)
        assert joined["texts"] == ["x", "y"]
        assert http.get(name)["text"] == ("a" if mode == "all" else "a<0:x><1:y>")


# -- what is refused ---------------------------------------------------------------------------


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("generate", {"max_new_tokens": 3}, "use max_tokens"),
    ("generate", {"temperatur": 0}, "did you mean temperature?"),
    ("generate", {"max_tokens": "many"}, "max_tokens must be an int"),
    ("generate", {"n": 2}, "fork it for n > 1"),
    ("generate", {"self": 1}, "self"),
    ("generate", {"stop": ["\ud800"]}, "hex escape"),
    ("generate", {"logit_bias": {"999999": 1}}, "999999"),
    ("generate", {"regex": "("}, "regex"),
    ("generate", {"stream": "yes"}, "stream"),
    ("append", {"content": [999]}, "outside the vocabulary"),
    ("append", {"content": [1.5]}, "content"),
    ("append", {"content": [True]}, "content"),
    ("append", {"content": "\ud800"}, "hex escape"),
    ("", {"cache_salt": "\ud800"}, "hex escape"),
    ("", {"cache_retention": -1}, "cache_retention"),
    ("", {"cache_retention": "forever"}, "cache_retention"),
    ("append", {"content": 7}, "a list of token ids"),
    ("append", {"content": [{"role": "user", "content": "\ud800"}]}, "hex escape"),
    ("append", {"content": [{"role": "user", "content": "a"}]}, "cannot follow plain text"),
    ("", {"content": [{"role": "user"}]}, "content"),
    ("append", {"content": "a" * 600}, "may have 512"),
    ("append", {"text": "a"}, "content: Field required; unknown field 'text'"),
    ("append", {"content": "a", "role": "user"}, "unknown field 'role'; the fields are content"),
    ("append", {"content": "a" * 60_000}, "60000 characters"),
    ("choose", {"options": ["a", "b" * 60_000]}, "60000 characters"),
    ("append", {"content": [{"role": "user", "content": "a" * 60_000}]}, "60004 characters"),
    ("append", {"contents": "a"}, "did you mean 'content'?"),
    ("append", {}, "content"),
    ("fork", {"n": 0}, "n: "),
    ("fork", {"n": True}, "n: "),
    ("fork", {"n": 2, "ids": ["ctx-" + "a" * 22]}, "1 ids"),
    ("fork", {"n": 1, "ids": ["mine"]}, "ids"),
    ("score", {"content": ""}, "empty"),
    ("choose", {"options": []}, "options"),
    ("join", {"branches": [], "template": "{text:>999999999}", "mode": "append"}, "template"),
    ("join", {"branches": [], "template": "{text.__class__}", "mode": "append"}, "template"),
    ("join", {"branches": [], "by": {"scores": [1]}}, "0 branches"),
    ("join", {"branches": [], "by": "length"}, "by"),
    ("checkpoint", {"name": ""}, "name"),
]


def test_what_cannot_be_is_refused_and_changes_nothing(caller: Callable[..., Caller]) -> None:
    http = caller()
    name = http.open()
    http.post(f"/{name}/generate", **GREEDY)
    before = http.get(name)
    for path, body, said in REFUSED:
        raw = json.dumps(body)  # Escapes halves of surrogate pairs, as a client would.
        answer = http.http.post(
            f"/v1/contexts/{name}/{path}" if path else "/v1/contexts",
            content=raw,
            headers={"Content-Type": "application/json"},
        )
        assert answer.status_code == 400, (path, body, answer.text)
        error = answer.json()["error"]
        assert said in error["message"], (path, body)
        assert error["type"] == "invalid_request_error"
    assert http.get(name) == before
    assert len(http.service.contexts) == 1
    assert http.service.worker.num_unfinished == 0


def test_what_is_no_json_is_refused(caller: Callable[..., Caller]) -> None:
    http = caller()
    for content in (b"", b"\xff", b"{", b"[]", b'"text"', b"[" * 100_000):
        answer = http.http.post("/v1/contexts", content=content)
        assert answer.status_code == 400, content[:10]
    assert len(http.service.contexts) == 0


def test_conflicts(caller: Callable[..., Caller]) -> None:
    http = caller()
    name, stranger = http.open(), http.open()
    one, two = http.post(f"/{name}/fork", n=2)["branches"]
    before = http.get(name)
    for body in (
        {"branches": []},
        {"branches": [stranger]},
        {"branches": [one, one], "mode": "all"},
        {"branches": [name]},
        {"branches": [one, two]},  # Neither has generated anything.
    ):
        error = http.post(f"/{name}/join", 409, **body)["error"]
        assert error["code"] == "join_conflict"
    http.post(f"/{name}/append", content="!")
    http.post(f"/{one}/generate", **GREEDY)
    error = http.post(f"/{name}/join", 409, branches=[one])["error"]
    assert "the context has changed" in error["message"]
    assert http.get(name)["text"] == before["text"] + "!"
    assert http.post(f"/{name}/rollback", 409)["error"]["code"] == "context_conflict"
    http.post(f"/{name}/checkpoint", name="a")
    assert http.post(f"/{name}/checkpoint", 409, name="a")["error"]["code"] == "context_conflict"
    events = http.run([{"context": name, "open": {}}])
    assert "taken" in events[0]["outcomes"][0]["error"]["message"]
    http.delete(two)
    assert http.post(f"/{two}/generate", 410)["error"]["code"] == "context_closed"
    http.delete(name)
    for closed in (name, one):
        assert http.post(f"/{closed}/generate", 410)["error"]["code"] == "context_closed"
        assert http.get(closed, 410)["error"]["code"] == "context_closed"
    assert http.get("ctx-nothing", 404)["error"]["code"] == "context_not_found"


def test_a_context_does_one_thing_at_a_time(caller: Callable[..., Caller]) -> None:
    http = caller()
    name = http.open()
    with http.http.stream(
        "POST", f"/v1/contexts/{name}/generate", json={**LONG, "stream": True}
    ) as stream:
        lines = stream.iter_lines()  # Closes the stream once nobody refers to it.
        next(lines)
        for path, body in (("append", {"content": "x"}), ("generate", {}), ("fork", {"n": 1})):
            assert http.post(f"/{name}/{path}", 409, **body)["error"]["code"] == "context_busy"
        assert http.get(name)["text"] == PROMPT
    http.wait_for(lambda: http.service.worker.num_unfinished == 0)


def test_a_context_belongs_to_its_key(serve: Serve) -> None:
    url, service = serve(api_keys=("one", "two"))
    one, two = Caller(url, service, "one"), Caller(url, service, "two")
    name = one.open()
    one.post(f"/{name}/checkpoint", name="a")
    (branch,) = one.post(f"/{name}/fork", n=1)["branches"]
    mine = two.open()
    for path, body in (
        ("append", {"content": "x"}),
        ("generate", {}),
        ("fork", {"n": 1}),
        ("join", {"branches": [branch], "mode": "all"}),
        ("score", {"content": "x"}),
        ("choose", {"options": ["x"]}),
        ("checkpoint", {}),
        ("rollback", {}),
    ):
        error = two.post(f"/{name}/{path}", 404, **body)["error"]
        assert error == two.post(f"/ctx-none/{path}", 404, **body)["error"] | {
            "message": error["message"]
        }
    assert two.get(name, 404)
    assert two.post(f"/{mine}/join", 404, branches=[branch], mode="all")
    assert two.http.delete(f"/v1/contexts/{name}").status_code == 404
    one.delete(name)
    assert two.get(name, 404)
    assert one.get(name, 410)
    nobody = Caller(url, service)
    nobody.post("", 401)
    for each in (one, two, nobody):
        each.http.close()


def test_salts_separate_and_share_within(caller: Callable[..., Caller]) -> None:
    http = caller()

    def cached(**salt: str) -> int:
        name = http.open(**salt)
        found = int(http.post(f"/{name}/generate", **GREEDY)["num_cached_tokens"])
        http.post(f"/{name}/append", content="!")
        return found

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="b") == 0
    assert cached() == 0
    assert cached(cache_salt="a") >= len(PROMPT) - 1


def test_limits(caller: Callable[..., Caller]) -> None:
    http = caller(max_contexts=4, max_queued=2)
    name = http.open()
    for number in (4, 10**9):
        error = http.post(f"/{name}/fork", 429, n=number)["error"]
        assert error["code"] == "too_many_contexts"
        assert error["message"].startswith("1 of at most 4 contexts are open")
    branches = http.post(f"/{name}/fork", n=3)["branches"]
    answer = http.http.post("/v1/contexts", json={})
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
    # Three at once are one more than may be unfinished: none of them is begun.
    runs = [{"context": each, "generate": GREEDY} for each in branches]
    (event,) = http.run([{"context": name, "append": {"content": "x"}}, *runs])
    done, *refused = event["outcomes"]
    assert done["result"]["num_tokens"] == len(PROMPT) + 1
    assert [each["error"]["code"] for each in refused] == ["queue_full"] * 3
    error = http.post(f"/{name}/choose", 429, options=["a", "b", "c"])["error"]
    assert error["message"].startswith("0 of at most 2 requests")
    assert len(http.run(runs[:2])[0]["outcomes"]) == 2
    http.delete(name)
    assert len(http.service.contexts) == 0
    http.open()


# -- many operations in one go -----------------------------------------------------------------


def test_what_failed_stops_its_own_context_only(caller: Callable[..., Caller]) -> None:
    http = caller(max_queued=3)
    one, two, child = (f"ctx-{letter * 22}" for letter in "abc")
    events = http.run(
        [
            {"context": one, "open": {"content": "abc"}},
            {"context": two, "open": {"content": "abd"}},
            {"context": one, "append": {"content": [999]}},
            {"context": one, "fork": {"n": 1, "ids": [child]}},
            {"context": child, "generate": GREEDY},
            {"context": two, "generate": GREEDY},
            {"context": "ctx-" + "x" * 22, "append": {"content": "a"}},
            {"context": one, "close": {}},
        ]
    )
    outcomes = events[0]["outcomes"]
    for place in (2, 3, 4):
        assert "token id 999" in outcomes[place]["error"]["message"]
    assert [outcomes[place] for place in (0, 5, 7)] == [
        {"result": {"num_tokens": 3}},
        {"running": True},
        {"result": {}},
    ]
    assert outcomes[6]["error"]["code"] == "context_not_found"
    assert events[-1]["operation"] == 5
    assert events[-1]["result"]["num_tokens"] == 3 + 8
    assert http.get(one, 410)
    assert http.get(child, 404)
    assert (len(http.service.contexts), http.service.worker.num_unfinished) == (1, 0)


def test_cancelling_by_name(caller: Callable[..., Caller]) -> None:
    http = caller()
    name = http.open()
    events = http.run(
        [
            {"context": name, "name": "a", "score": {"content": "abc"}},
            {"context": name, "name": "b", "generate": LONG},
            {"context": name, "cancel": {"name": "c"}},
            {"context": name, "cancel": {"name": "b"}},
            {"context": name, "append": {"content": "!"}},
        ]
    )
    by_place = {event["operation"]: event for event in events[1:]}
    assert len(by_place[0]["result"]["logprobs"]) == 3
    assert by_place[1]["error"]["code"] == "cancelled"
    assert http.get(name)["text"] == PROMPT + "!"


@pytest.mark.parametrize(
    "operation",
    [
        {},
        {"append": {"content": "a"}, "fork": {"n": 1}},
        {"append": {"content": "a"}, "context": "mine"},
        {"appendix": {}},
    ],
)
def test_operations_that_are_none(caller: Callable[..., Caller], operation: Any) -> None:
    http = caller()
    whole = {"context": "ctx-" + "a" * 22, **operation}
    answer = http.http.post("/v1/contexts/operations", json={"operations": [whole]})
    assert answer.status_code == 400


# -- leaving -----------------------------------------------------------------------------------


def _raw(http: Caller, path: str, body: dict[str, Any], part: int = 1) -> socket.socket:
    """A request, or a part of it, on a connection of its own."""
    host, port = http.url.removeprefix("http://").split(":")
    line = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST /v1/contexts{path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    line.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data[: len(data) // part])
    return line


@pytest.mark.parametrize("stage", ["while sending", "running", "after a piece", "after three"])
@pytest.mark.parametrize("form", ["stream", "whole", "operations"])
def test_who_leaves_cancels_and_the_context_is_as_before(
    caller: Callable[..., Caller], form: str, stage: str
) -> None:
    http = caller()
    name = http.open()
    http.post(f"/{name}/generate", **GREEDY)
    before = http.get(name)
    started = http.on_engine(lambda llm: llm.stats().engine.requests_aborted)
    path, body = f"/{name}/generate", {**LONG, "stream": form == "stream"}
    if form == "operations":
        path, body = "/operations", {"operations": [{"context": name, "generate": LONG}]}
    line = _raw(http, path, body, part=2 if stage == "while sending" else 1)
    if stage != "while sending":
        http.wait_for(lambda: http.service.worker.num_unfinished == 1)
    if stage.startswith("after") and form != "whole":
        received, wanted = b"", 1 if stage == "after a piece" else 3
        while received.count(b'"text"') < wanted:
            received += line.recv(4096)
    line.close()
    http.wait_for(lambda: http.service.worker.num_unfinished == 0)
    aborted = http.on_engine(lambda llm: llm.stats().engine.requests_aborted)
    assert aborted == started + (stage != "while sending")
    after = http.get(name)
    assert (after["tokens"], after["logprobs"]) == (before["tokens"], before["logprobs"])
    http.post(f"/{name}/append", content="!")
    http.post(f"/{name}/generate", **GREEDY)
    http.delete(name)
    assert http.num_sequences == 0
    assert http.on_loop(lambda: [t.calls for t in http.service.contexts._trees]) == []


def test_who_leaves_a_choice_leaves_no_branches(caller: Callable[..., Caller]) -> None:
    http = caller()
    name = http.open()
    http.post(f"/{name}/generate", **GREEDY)
    # Two contexts' choices: a lot to read, so that there is something to leave.
    line = _raw(http, f"/{name}/choose", {"options": ["ab" * 200, "cd" * 200, "ef" * 200]})
    http.wait_for(lambda: http.service.worker.num_unfinished > 0 or not http.get(name)["branches"])
    line.close()
    http.wait_for(lambda: http.service.worker.num_unfinished == 0)
    http.wait_for(lambda: http.num_sequences == 1)
    http.delete(name)
    assert http.num_sequences == 0


# -- time --------------------------------------------------------------------------------------


def _tree(http: Caller) -> Tree:
    (tree,) = http.service.contexts._trees
    return tree


def test_a_context_that_nobody_calls_is_closed(caller: Callable[..., Caller]) -> None:
    http = caller(context_seconds=0.05)
    name = http.open()
    http.post(f"/{name}/generate", 200, **GREEDY)
    http.wait_for(lambda: len(http.service.contexts) == 0)
    error = http.get(name, 410)["error"]
    assert "0.05 seconds without a call" in error["message"]
    assert http.num_sequences == 0


def test_a_call_on_a_branch_renews_the_whole_tree(caller: Callable[..., Caller]) -> None:
    http = caller(context_seconds=1000)
    name = http.open()
    (branch,) = http.post(f"/{name}/fork", n=1)["branches"]
    http.post(f"/{branch}/generate", **GREEDY)
    contexts, tree = http.service.contexts, http.on_loop(lambda: _tree(http))

    def later() -> None:
        assert tree.timer is not None
        tree.timer.cancel()
        contexts._look(tree)

    def age() -> None:
        tree.renewed -= 2000

    http.on_loop(age)
    http.get(branch)
    http.on_loop(later)
    assert http.get(name)["branches"] == [branch]
    http.on_loop(age)
    http.on_loop(later)
    for each in (name, branch):
        assert "1000 seconds" in http.get(each, 410)["error"]["message"]
    assert (len(contexts), http.num_sequences) == (0, 0)


def test_no_context_expires_while_it_generates(caller: Callable[..., Caller]) -> None:
    http = caller(context_seconds=0)
    one = "ctx-" + "a" * 22
    events = http.run(
        [{"context": one, "open": {"content": PROMPT}}, {"context": one, "generate": LONG}]
    )
    assert events[-1]["result"]["finish_reason"] == "length"
    http.wait_for(lambda: len(http.service.contexts) == 0)
    assert http.num_sequences == 0


def test_what_is_remembered_of_closed_ones_is_bounded(caller: Callable[..., Caller]) -> None:
    http = caller(max_contexts=3)
    names = [http.open("a") for _ in range(3)]
    for name in names:
        http.delete(name)
    for _ in range(2):
        http.delete(http.open("a"))
    assert http.get(names[0], 404)
    assert http.get(names[2], 410)
    root = http.open("a")
    joined = []
    for _ in range(70):
        joined += http.post(f"/{root}/fork", n=1)["branches"]
        http.post(f"/{root}/join", branches=joined[-1:], mode="all")
    assert http.get(joined[-64])["closed"]
    assert http.get(joined[-65], 410)
    assert len(http.service.contexts) == 1


def test_a_server_that_ends_closes_all(serve: Serve) -> None:
    url, service = serve()
    http = Caller(url, service)
    name = http.open()
    http.post(f"/{name}/generate", **GREEDY)
    http.post(f"/{name}/fork", n=3)
    http.http.close()
    # The end of `make_llm` asserts that nothing is held, once the server has ended.
    assert service.llm.stats().cache.sequences == 4


def test_a_step_that_fails_leaves_the_context_as_it_was(caller: Callable[..., Caller]) -> None:
    http = caller()
    name = http.open()
    http.post(f"/{name}/generate", **GREEDY)
    before = http.get(name)["tokens"]

    def break_once(llm: LLM) -> None:
        forward = llm._adapter.forward

        def lost(*_: object) -> None:
            llm._adapter.forward = forward  # type: ignore[method-assign]
            raise ValueError("device lost")

        llm._adapter.forward = lost  # type: ignore[assignment, method-assign]

    for path, body in (("generate", GREEDY), ("score", {"content": "x"})):
        http.on_engine(break_once)
        error = http.post(f"/{name}/{path}", 500, **body)["error"]
        assert error["code"] == "engine_stopped"
        assert "device lost" in error["message"]
        assert http.get(name)["tokens"] == before
    http.post(f"/{name}/generate", **GREEDY)
