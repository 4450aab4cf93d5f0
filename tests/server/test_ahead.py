"""What contexts are given over HTTP is tokenized before it reaches the engine's thread."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tokenizers.processors import TemplateProcessing

from radixkv.llm import LLM
from radixkv.programs import Host
from radixkv.server.contexts.registry import Contexts, Left, Standing, new_id
from radixkv.server.service import Service

Serve = Callable[..., tuple[str, Service]]

GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
FIRST = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
NEXT = [{"role": "user", "content": "and now?"}]
LAST = [{"role": "user", "content": "bye"}]


class Caller:
    """A client, and on which threads its server has made tokens meanwhile."""

    def __init__(self, url: str, service: Service) -> None:
        self.service = service
        self.threads: list[str] = []
        self._http = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, **body: Any) -> Any:
        answer = self._http.post(f"/v1/contexts{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def run(self, context: str, *operations: dict[str, Any]) -> list[Any]:
        """The outcomes of a list of operations on one context."""
        body = {"operations": [{"context": context} | each for each in operations]}
        answer = self._http.post("/v1/contexts/operations", json=body)
        line = answer.text.split("\n\n")[0]
        outcomes: list[Any] = json.loads(line.removeprefix("data: "))["outcomes"]
        return outcomes

    def tokens(self, context: str) -> list[int]:
        found: list[int] = self._http.get(f"/v1/contexts/{context}").json()["tokens"]
        return found


@pytest.fixture
def caller(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Iterator[Caller]:
    """A caller of a server whose model begins a text with a token of its own."""
    url, service = serve()
    tokenizer = copy.deepcopy(service.llm.loaded.tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A",
        pair="<bos> $A $B",
        special_tokens=[("<bos>", tokenizer.bos_token_id)],
    )
    service.llm.loaded = dataclasses.replace(service.llm.loaded, tokenizer=tokenizer)
    caller = Caller(url, service)
    for name in ("tokenize", "checked", "render_first", "render_next"):
        make = getattr(Host, name)

        def noted(self: Host, *args: Any, make: Any = make, **options: Any) -> Any:
            thread = threading.current_thread()
            if thread is not threading.main_thread():
                caller.threads.append(thread.name.removesuffix("_0"))
            return make(self, *args, **options)

        monkeypatch.setattr(Host, name, noted)
    yield caller
    caller._http.close()


def in_process(llm: LLM, *contents: Any) -> list[int]:
    """What a context of a program in the engine's process says behind the same."""
    context = Host(llm.engine, llm.loaded)
    tokens: list[int] = []
    history: list[Any] = []
    for content in contents:
        tokens += context.tokens_behind(content, first=not tokens, history=history)
        history += content if isinstance(content[0], dict) else ()
    return tokens


def test_each_operation_of_its_own_is_tokenized_with_the_texts(caller: Caller) -> None:
    talk = caller.post("", content=FIRST)["id"]
    caller.post(f"/{talk}/generate", **GREEDY)
    (branch,) = caller.post(f"/{talk}/fork", n=1)["branches"]
    for name in (talk, branch):
        caller.post(f"/{name}/append", content=NEXT)
        caller.post(f"/{name}/append", content="a text")
        caller.post(f"/{name}/append", content=[5, 6])
        caller.post(f"/{name}/score", content="b text")
        caller.post(f"/{name}/choose", options=["c", "d text", [7, 8]])
    empty = caller.post("", content="")["id"]
    caller.post(f"/{empty}/append", content=FIRST)
    assert set(caller.threads) == {"radixkv-texts"}
    assert caller.tokens(talk) == caller.tokens(branch)
    caller.threads.clear()
    assert caller.tokens(empty) == in_process(caller.service.llm, FIRST)


@pytest.mark.parametrize(
    "contents", [("ab", "c"), (FIRST, NEXT), (FIRST, NEXT, "c", NEXT), ([5, 6], "ab"), ("", "ab")]
)
def test_a_list_of_operations_is_followed(caller: Caller, contents: tuple[Any, ...]) -> None:
    opened, later, fork = new_id(), new_id(), new_id()
    caller.run(
        opened,
        {"open": {"content": contents[0]}},
        *({"append": {"content": c}} for c in contents[1:]),
    )
    caller.run(later, {"open": {}}, *({"append": {"content": c}} for c in contents))
    caller.run(later, {"fork": {"n": 1, "ids": [fork]}})
    assert set(caller.threads) == {"radixkv-texts"}
    wanted = in_process(caller.service.llm, *filter(None, contents))
    assert caller.tokens(opened) == caller.tokens(later) == caller.tokens(fork) == wanted


def test_behind_a_rollback_it_is_as_it_was_at_the_checkpoint(caller: Caller) -> None:
    bos = caller.service.llm.loaded.tokenizer.bos_token_id
    a, c = caller.service.llm.loaded.tokenizer("ac", add_special_tokens=False).input_ids
    empty, begun = caller.post("", content="")["id"], caller.post("", content="a")["id"]
    for name in (empty, begun):
        append = {"append": {"content": "b"}}
        caller.run(name, {"checkpoint": {}}, append, {"rollback": {}}, {"append": {"content": "c"}})
    assert caller.threads == ["radixkv-texts"] * 5
    assert caller.tokens(empty) == [bos, c]
    assert caller.tokens(begun) == [bos, a, c]


def test_behind_a_rollback_messages_are_what_they_were(caller: Caller) -> None:
    talk = caller.post("", content=FIRST)["id"]
    append = {"append": {"content": NEXT}}
    (_, _, _, last) = caller.run(talk, {"checkpoint": {}}, append, {"rollback": {}}, append)
    wanted = in_process(caller.service.llm, FIRST, NEXT)
    assert last == {"result": {"num_tokens": len(wanted)}}
    assert set(caller.threads) == {"radixkv-texts"}
    assert caller.tokens(talk) == wanted


def test_checkpoints_of_earlier_requests_are_known(caller: Caller) -> None:
    talk = caller.post("", content="")["id"]
    caller.post(f"/{talk}/checkpoint", name="empty")
    caller.post(f"/{talk}/append", content=FIRST)
    caller.post(f"/{talk}/checkpoint", name="greeted")
    caller.post(f"/{talk}/append", content=NEXT)
    caller.post(f"/{talk}/checkpoint", name="asked")
    again = {"append": {"content": LAST}}
    caller.run(talk, {"rollback": {"checkpoint": "greeted"}}, again, {"rollback": {}}, again)
    kept = caller.tokens(talk)
    caller.run(talk, {"rollback": {"checkpoint": "empty"}}, {"append": {"content": LAST}})
    assert set(caller.threads) == {"radixkv-texts"}
    assert kept == in_process(caller.service.llm, FIRST, LAST)
    assert caller.tokens(talk) == in_process(caller.service.llm, LAST)


def test_behind_a_checkpoint_that_is_not_there_nothing_is_done(caller: Caller) -> None:
    talk = caller.post("", content=FIRST)["id"]
    told = caller.run(
        talk,
        {"checkpoint": {"name": "early"}},
        {"checkpoint": {"name": "late"}},
        {"rollback": {"checkpoint": "early"}},
        {"rollback": {"checkpoint": "late"}},
        {"append": {"content": NEXT}},
    )
    assert ["error" in its for its in told] == [False] * 3 + [True] * 2
    assert caller.tokens(talk) == in_process(caller.service.llm, FIRST)


@pytest.mark.parametrize("winner", [0, 1, 2])
def test_behind_a_join_messages_follow_the_winners(caller: Caller, winner: int) -> None:
    talk = caller.post("", content=FIRST)["id"]
    names = caller.post(f"/{talk}/fork", n=3)["branches"]
    caller.post(f"/{names[1]}/append", content=NEXT)
    caller.post(f"/{names[2]}/append", content="c")
    scores = [float(place == winner) for place in range(3)]
    join = {"branches": names, "by": {"scores": scores}}
    caller.run(talk, {"checkpoint": {}}, {"join": join}, {"append": {"content": LAST}})
    said = ((FIRST,), (FIRST, NEXT), (FIRST, "c"))[winner]
    assert caller.tokens(talk) == in_process(caller.service.llm, *said, LAST)
    caller.run(talk, {"rollback": {}}, {"append": {"content": NEXT}})
    assert caller.tokens(talk) == in_process(caller.service.llm, FIRST, NEXT)
    assert set(caller.threads) == {"radixkv-texts"}


def test_what_one_winner_would_refuse_another_takes(caller: Caller) -> None:
    empty = caller.post("", content="")["id"]
    for scores, taken in (([0, 1], True), ([1, 0], False)):
        host = caller.post(f"/{empty}/fork", n=1)["branches"][0]
        its = [new_id(), new_id()]
        told = caller.run(
            host,
            {"fork": {"n": 2, "ids": its}},
            {"append": {"content": "a"}, "context": its[0]},
            {"join": {"branches": its, "by": {"scores": scores}}},
            {"append": {"content": FIRST}},
        )
        assert ("result" in told[-1]) == taken
        if not taken:
            assert "messages cannot follow plain text" in told[-1]["error"]["message"]
        wanted = in_process(caller.service.llm, FIRST if taken else "a")
        assert caller.tokens(host) == wanted
    assert set(caller.threads) == {"radixkv-texts"}


@pytest.mark.parametrize(("template", "first"), [("", True), ("b", False)])
def test_behind_joined_texts_a_context_may_still_be_empty(
    caller: Caller, template: str, first: bool
) -> None:
    empty = caller.post("", content="")["id"]
    branch = new_id()
    join = {"branches": [branch], "mode": "append", "template": template}
    caller.run(
        empty,
        {"fork": {"n": 1, "ids": [branch]}},
        {"join": join},
        {"append": {"content": "c"}},
    )
    assert caller.threads[:2] == ["radixkv-texts"] * 2  # Both ways; what is joined comes later.
    assert caller.threads[2:] == ["radixkv-engine"] * (not first)
    assert caller.tokens(empty) == in_process(caller.service.llm, *([] if first else ["b"]), "c")


class Drawn:
    """Operations drawn by chance, on a context and its branches, which numbers stand for."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.parents: dict[int, int | None] = {0: None}
        self.open = {0}

    def operation(self) -> tuple[int, str, Any]:
        """A context, what is done with it, and what is given."""
        chance = self.chance
        one = chance.choice(sorted(self.open))
        branches = [b for b in sorted(self.open) if self.parents[b] == one]
        kind = chance.choice(["append"] * 4 + ["checkpoint", "rollback", "fork", "join"])
        if kind == "append":
            return one, kind, chance.choice([FIRST, NEXT, LAST, "a", "bc", "", [5, 6]])
        if kind == "fork":
            return one, kind, [len(self.parents) + n for n in range(chance.choice([1, 2, 3]))]
        if kind == "join" and branches:
            return one, kind, branches
        return one, "rollback" if kind == "rollback" else "checkpoint", None

    def note(self, one: int, kind: str, given: Any) -> None:
        """It went well."""
        if kind == "fork":
            self.parents |= dict.fromkeys(given, one)
            self.open |= set(given)
        if kind == "join":
            gone = set(given)
            while more := {b for b in self.open - gone if self.parents[b] in gone}:
                gone |= more
            self.open -= gone


def as_operation(ids: dict[int, str], one: int, kind: str, given: Any) -> dict[str, Any]:
    if kind == "fork":
        ids |= {branch: new_id() for branch in given}
        body = {"n": len(given), "ids": [ids[branch] for branch in given]}
    elif kind == "join":
        scores = [(7 * branch) % 5 for branch in given]
        body = {"branches": [ids[branch] for branch in given], "by": {"scores": scores}}
    else:
        body = {"content": given} if kind == "append" else {}
    return {"context": ids[one], kind: body}


@pytest.mark.parametrize("seed", range(12))
def test_any_list_says_what_its_operations_say_one_by_one(caller: Caller, seed: int) -> None:
    drawn, done = Drawn(seed), []
    alone = {0: caller.post("", content="")["id"]}
    for _ in range(30):
        operation = drawn.operation()
        (told,) = caller.run(alone[0], as_operation(alone, *operation))
        if "result" in told:
            drawn.note(*operation)
            done.append(operation)
    together = {0: caller.post("", content="")["id"]}
    caller.threads.clear()
    told = caller.run(together[0], *(as_operation(together, *each) for each in done))
    assert [each for each in told if "result" not in each] == []
    assert set(caller.threads) <= {"radixkv-texts"}
    for one in drawn.open:
        assert caller.tokens(together[one]) == caller.tokens(alone[one])
    assert len(done) > 10


def test_of_too_many_ways_none_is_followed(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.server.contexts.ahead.MOST_WAYS", 1)
    talk = caller.post("", content=FIRST)["id"]
    names = caller.post(f"/{talk}/fork", n=2)["branches"]
    caller.post(f"/{names[1]}/append", content=NEXT)
    join = {"branches": names, "by": {"scores": [0, 1]}}
    caller.run(talk, {"join": join}, {"append": {"content": LAST}})
    assert caller.threads[-1] == "radixkv-engine"
    assert caller.tokens(talk) == in_process(caller.service.llm, FIRST, NEXT, LAST)


@pytest.mark.parametrize("believed", [Standing(False), Standing(True, tuple(FIRST))])
def test_who_was_overtaken_has_the_right_tokens(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, believed: Standing
) -> None:
    monkeypatch.setattr(
        Contexts, "left", lambda self, owner, ids: dict.fromkeys(ids, Left(believed))
    )
    text, talk = caller.post("", content="")["id"], caller.post("", content="")["id"]
    caller.post(f"/{text}/append", content="ab")
    caller.post(f"/{talk}/append", content=FIRST)
    assert caller.tokens(talk) == in_process(caller.service.llm, FIRST)
    assert caller.tokens(text) == in_process(caller.service.llm, "ab")


def test_how_another_callers_context_stands_is_not_told(serve: Serve) -> None:
    _, service = serve(api_keys=("a", "b"))
    contexts = service.contexts
    owned, left = new_id(), Left(Standing(True))

    async def add() -> None:
        contexts.add_tree("a", owned).left = left

    asyncio.run(add())
    assert contexts.left("a", [owned, new_id()]) == {owned: left}
    assert contexts.left("b", [owned]) == {}


def test_a_contexts_text_is_made_with_the_texts(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    decode = Host.decode

    def noted(self: Host, tokens: Any) -> str:
        threads.append(threading.current_thread().name.removesuffix("_0"))
        return decode(self, tokens)

    monkeypatch.setattr(Host, "decode", noted)
    name = caller.post("", content="a text")["id"]
    told = caller.run(name, {"read": {}}, {"append": {"content": "!"}}, {"read": {}})
    assert [its["result"].get("text") for its in told] == ["<bos>a text", None, "<bos>a text!"]
    assert threads == ["radixkv-texts"] * 2


def test_a_list_reads_so_many_tokens_at_the_most(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.server.contexts.operations.MOST_READ", 20)
    name = caller.post("", content="a text")["id"]
    told = caller.run(name, *([{"read": {}}] * 3))
    assert [len(its["result"]["tokens"]) for its in told[:2]] == [7, 7]
    assert "more than 20 tokens are read at a time" in told[2]["error"]["message"]
