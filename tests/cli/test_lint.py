"""`radixkv lint`: planted faults of each kind are named and measured to the token; clean logs pass.

The tokenizer has a token a byte, so that every count can be read off the texts.
"""

from __future__ import annotations

import json
import random
import subprocess
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixkv.cli.lint.divergence import Divergence, common_length, next_run, windows
from radixkv.cli.lint.kinds import classify, kind_of_reordering, reordered_json
from radixkv.cli.lint.prompts import Renderer
from radixkv.cli.lint.report import lint
from radixkv.cli.lint.requests import LoggedRequest
from radixkv.model.loading import load_tokenizer
from radixkv.workloads import demo_workload

Inside = Callable[..., subprocess.CompletedProcess[str]]
Body = dict[str, Any]

TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REST = " Answer in the visitor's own language, briefly, and never make up a book that is not there."
QUESTIONS = ("And is it open?", "Borrow how many?", "Can I fly?", "Do you print?")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokens = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<eos>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def found(tokenizer: str, tmp_path: Path, inside: Inside) -> Callable[..., dict[str, Any]]:
    """What is found in a log of these bodies, as JSON."""

    def run(bodies: Sequence[Body], *arguments: str) -> dict[str, Any]:
        path = tmp_path / "log.jsonl"
        path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
        done = inside("lint", str(path), "-m", tokenizer, "--json", *arguments)
        assert done.returncode == 0, done.stderr
        verdict: dict[str, Any] = json.loads(done.stdout)
        return verdict

    return run


def chat(system: str, *turns: str, **more: Any) -> Body:
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": system}]
    messages += [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]
    return {"messages": messages, **more}


# -- each kind of fault ----------------------------------------------------------------------------

UUIDS = [str(uuid.UUID(int=random.Random(seed).getrandbits(128))) for seed in range(3)]
VOLATILE = {
    "timestamp": ("2026-11-30T04:57:25Z", "2026-11-30T04:58:11Z", "2026-12-01T00:00:00Z"),
    "timestamp ": ("1795928245", "1795928301", "1795929002"),
    "timestamp  ": ("Mon, 30 Nov 2026 04:57:25 GMT", "Tue, 1 Dec 2026 04:57:25 GMT") * 1
    + ("Wed, 2 Dec 2026 14:05:01 GMT",),
    "timestamp   ": (
        "30 November 2026, 04:57",
        "30 November 2026, 04:58",
        "1 December 2026, 04:57",
    ),
    "date": ("2026-11-30", "2026-12-01", "2027-01-01"),
    "date ": ("November 30, 2026", "December 1, 2026", "January 1, 2027"),
    "date  ": ("30.11.2026", "1.12.2026", "02.12.2026"),
    "time": ("04:57", "04:58", "11:02"),
    "time ": ("4:57 am", "4:58 am", "11:02 pm"),
    "random id": tuple(UUIDS),
    "random id ": ("req_8f2Kq91x", "req_77aB0zz1", "req_Qm3xx81p"),
    "random id  ": ("f00dfeed01", "0ddba11c0d", "deadbeef42"),
    "counter": ("7", "8", "11"),
    "number": ("3", "52", "17"),
}


@pytest.mark.parametrize("name", VOLATILE)
def test_what_changes_by_its_nature(found: Callable[..., dict[str, Any]], name: str) -> None:
    values = VOLATILE[name]
    bodies = [
        chat(f"You help visitors ({value}).{REST}", question)
        for value, question in zip(values, QUESTIONS, strict=False)
    ]
    verdict = found(bodies)
    (finding,) = verdict["findings"]
    assert finding["kinds"] == [name.strip()]
    assert finding["role"] == "system"
    assert finding["requests"] == 2
    assert finding["values"] == list(values)
    # All that stands behind it is the same up to the question.
    behind = len(f").{REST}\n<user>")
    assert finding["tokens_lost"] == verdict["tokens_lost"] == 2 * behind
    assert finding["most_tokens_lost"] == behind
    assert (finding["lines"], finding["earlier_lines"]) == ([2, 3], [1, 1])
    prefix = "<system>You help visitors ("
    equal = len(prefix) + common_length(
        np.frombuffer(values[0].encode(), np.uint8).astype(np.int64),
        np.frombuffer(values[1].encode(), np.uint8).astype(np.int64),
    )
    assert finding["token"] == equal
    assert finding["token_text"] == (prefix + values[1])[equal]
    assert finding["before"] == prefix[-60:]
    assert finding["after"] == f").{REST}"[:60]
    texts = [
        f"{prefix}{v}).{REST}\n<user>{q}\n<assistant>"
        for v, q in zip(values, QUESTIONS, strict=False)
    ]
    assert verdict["prompt_tokens"] == sum(map(len, texts))


def test_two_that_stand_side_by_side(found: Callable[..., dict[str, Any]]) -> None:
    bodies = [chat(f"It is {10 + n}:00, session {UUIDS[n]}.{REST}", QUESTIONS[n]) for n in range(3)]
    (finding,) = found(bodies)["findings"]
    assert finding["kinds"] == ["time", "random id"]
    assert finding["values"][1] == f"11:00, session {UUIDS[1]}"


def test_two_apart_are_two_and_each_has_its_own(found: Callable[..., dict[str, Any]]) -> None:
    bodies = [
        chat(
            f"It is {10 + n}:00.{REST} Your session is {UUIDS[n]}, and all else is the same.", "Hi"
        )
        for n in range(3)
    ]
    verdict = found(bodies)
    by_kind = {tuple(finding["kinds"]): finding for finding in verdict["findings"]}
    assert set(by_kind) == {("time",), ("random id",)}
    first, second = by_kind[("time",)], by_kind[("random id",)]
    shared = common_length(
        *(np.frombuffer(v.encode(), np.uint8).astype(np.int64) for v in UUIDS[:2])
    )
    between = len(f".{REST} Your session is ")
    assert first["most_tokens_lost"] == between + shared
    assert second["most_tokens_lost"] == len(", and all else is the same.\n<user>Hi\n<assistant>")
    assert verdict["tokens_lost"] == first["tokens_lost"] + second["tokens_lost"]


@pytest.mark.parametrize(
    "names",
    [
        ("Alice", "Bob", "Carol"),
        ("Alice Wong", "Bob", "Dr. No"),
        ("al@x.org", "bo@y.org", "c@z.eu"),
    ],
)
def test_a_user_name(found: Callable[..., dict[str, Any]], names: tuple[str, ...]) -> None:
    bodies = [
        chat(f"You talk with {name} today.{REST}", question)
        for name, question in zip(names, QUESTIONS, strict=False)
    ]
    (finding,) = found(bodies)["findings"]
    assert finding["kinds"] == ["user name"]
    assert finding["values"] == list(names)
    # It says something of the request, so that only its own message could be turned round.
    assert finding["tokens_lost"] == 2 * len(f" today.{REST}")


@pytest.mark.parametrize(("one", "two"), [(" ", "  "), ("\n", "\n\n"), ("\t", "    ")])
def test_whitespace(found: Callable[..., dict[str, Any]], one: str, two: str) -> None:
    bodies = [chat(f"You help visitors.{space}{REST}", "Hi") for space in (one, two, one, two)]
    (finding,) = found(bodies)["findings"]
    assert finding["kinds"] == ["whitespace"]
    # The third and the fourth find what the first two have left.
    assert finding["requests"] == 1


def tool(name: str, **properties: str) -> dict[str, Any]:
    parameters = {key: {"type": kind} for key, kind in properties.items()}
    function = {
        "name": name,
        "description": f"It will {name} what is there",
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


TOOLS = [tool("find", title="string"), tool("lend", book="integer"), tool("return", book="integer")]


def test_tool_order(found: Callable[..., dict[str, Any]]) -> None:
    orders = [(0, 1, 2), (2, 0, 1), (1, 0, 2)]
    bodies = [
        chat(f"You help.{REST}", question, tools=[TOOLS[n] for n in order])
        for order, question in zip(orders, QUESTIONS, strict=False)
    ]
    verdict = found(bodies)
    assert {tuple(finding["kinds"]) for finding in verdict["findings"]} == {("tool order",)}
    tools = "".join(json.dumps(each) + "\n" for each in TOOLS)
    whole = len(f"<tools>{tools}<system>You help.{REST}\n<user>")
    # What each could share, and what it shares as it is.
    second = common_length(*(encoded(f"<tools>{json.dumps(TOOLS[n])}") for n in (0, 2)))
    assert verdict["findings"][0]["values"][:2] == ["find, lend, return", "return, find, lend"]
    assert verdict["tokens_lost"] + verdict["shared_tokens"] == 2 * whole
    assert verdict["shared_tokens"] >= second


def encoded(text: str) -> Any:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64)


def test_json_key_order_of_tools(found: Callable[..., dict[str, Any]]) -> None:
    flat = TOOLS[0]
    turned = {"function": dict(reversed(flat["function"].items())), "type": "function"}
    bodies = [chat(f"You help.{REST}", "Hi", tools=[each]) for each in (flat, turned)]
    (finding,) = found(bodies)["findings"]
    assert finding["kinds"] == ["JSON key order"]
    # transformers' tojson keeps the order of keys, so all behind "{" was lost, to the end.
    text = f"<tools>{json.dumps(flat)}\n<system>You help.{REST}\n<user>Hi\n<assistant>"
    assert finding["tokens_lost"] == len(text) - len('<tools>{"')


def test_json_in_a_text(found: Callable[..., dict[str, Any]]) -> None:
    one = {"name": "Ashmere", "open": [9, 18], "rooms": {"large": 2, "small": 5}}
    two = dict(reversed(one.items()))
    for first, second, kind in (
        (json.dumps(one), json.dumps(two), "JSON key order"),
        (json.dumps(one), json.dumps(one, separators=(",", ":")), "whitespace"),
    ):
        bodies = [chat(f"The library: {data}.{REST}", "Hi") for data in (first, second)]
        (finding,) = found(bodies)["findings"]
        assert finding["kinds"] == [kind]
        equal = common_length(encoded(first), encoded(second))
        assert finding["tokens_lost"] == len(first) - equal + len(f".{REST}\n<user>Hi\n<assistant>")


def test_what_changes_before_instructions(found: Callable[..., dict[str, Any]]) -> None:
    texts = ("the cat sat on the mat", "a dog was seen in town", "nobody knows which bird")
    bodies = [chat("You help.", f"Sum up: {text} <end>{REST}") for text in texts]
    (finding,) = found(bodies)["findings"]
    assert (finding["kinds"], finding["role"]) == (["text"], "user")
    assert finding["requests"] == 2
    assert finding["most_tokens_lost"] >= len(REST)
    # The same instructions first: nothing is left to be found.
    bodies = [chat("You help.", f"{REST} Sum up: {text}") for text in texts]
    assert found(bodies)["findings"] == []


# -- nothing that could not be shared --------------------------------------------------------------


def conversations(count: int) -> list[Body]:
    """Clean chats over the demo's handbook, turn by turn, interleaved."""
    demo = demo_workload()
    bodies = []
    for turn in range(2):
        for number in range(count):
            turns = [demo.questions[number]]
            if turn:
                turns += [f"Yes, of course: number {number}.", demo.follow_ups[number]]
            bodies.append(chat(demo.system_prompt, *turns))
    return bodies


def test_a_clean_log_passes(
    tokenizer: str, tmp_path: Path, inside: Inside, found: Callable[..., dict[str, Any]]
) -> None:
    bodies = conversations(16)
    verdict = found(bodies, "--strict")
    assert (verdict["findings"], verdict["tokens_lost"]) == ([], 0)
    assert verdict["requests"] == 32
    done = inside("lint", str(tmp_path / "log.jsonl"), "-m", tokenizer, "--strict")
    assert done.returncode == 0
    assert "Nothing keeps prompts that should share from sharing, or it costs each less than " in (
        done.stdout
    )
    assert "--min-tokens (" in done.stdout


def test_a_reply_that_is_the_same_is_no_fault(found: Callable[..., dict[str, Any]]) -> None:
    reply = "I am sorry, but I can only help with questions about the library and its books."
    bodies = [
        chat("You help.", f"Seats for {n} at {n}:30 please", reply, "Why not?") for n in (2, 4, 5)
    ]
    # Neither can the answer go before the question, nor the times of a question behind it.
    assert found(bodies)["findings"] == []


def test_other_tools_are_no_fault(found: Callable[..., dict[str, Any]]) -> None:
    bodies = [chat(f"You help.{REST}", "Hi", tools=[each]) for each in TOOLS]
    assert found(bodies)["findings"] == []


def test_a_conversation_that_dates_its_first_message(found: Callable[..., dict[str, Any]]) -> None:
    turns = ["Where is the nearest branch?", "In Mill Lane, beside the bakery.", "Is it open?"]
    bodies = [chat("You help.", f"[12:0{n}] {turns[0]}", *turns[1 : 2 * n + 1]) for n in range(2)]
    (finding,) = found(bodies)["findings"]
    assert (finding["kinds"], finding["role"]) == (["time"], "user")
    # Up to where the first request ended.
    assert finding["tokens_lost"] == len(f"] {turns[0]}\n<assistant>")


def test_what_is_little_does_not_matter(found: Callable[..., dict[str, Any]]) -> None:
    bodies = [chat(f"It is {10 + n}:00. Help everybody who asks.", QUESTIONS[n]) for n in range(2)]
    lost = len(". Help everybody who asks.\n<user>")
    assert lost == 33
    assert len(found(bodies, "--min-tokens", str(lost))["findings"]) == 1
    assert found(bodies, "--min-tokens", str(lost + 1))["findings"] == []


def test_who_comes_again_pays_once(found: Callable[..., dict[str, Any]]) -> None:
    bodies = [chat(f"It is {10 + n // 3}:00.{REST}", QUESTIONS[n % 4]) for n in range(9)]
    (finding,) = found(bodies)["findings"]
    # Of nine requests in three hours, the first of the second and of the third.
    assert (finding["lines"], finding["requests"]) == ([4, 7], 2)


def test_random_logs_lose_no_more_than_they_have(tokenizer: str) -> None:
    rng = random.Random(5)
    words = [*QUESTIONS, REST, *UUIDS, "12:05", "2026-01-02", "Alice", "Bob", '{"a": 1, "b": [2]}',
             '{"b": [2], "a": 1}', "7", "8", " ", "\n\n", "ü€"]  # fmt: skip
    loaded, name = load_tokenizer(tokenizer)
    for _ in range(60):
        requests = []
        for line in range(8):
            turns = [" ".join(rng.choices(words, k=rng.randint(1, 5))) for _ in range(4)]
            roles = ("system", "user", "assistant", "user")[: rng.randint(1, 4)]
            messages = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]
            tools = rng.choices(TOOLS, k=rng.randint(0, 3))
            if rng.random() < 0.3:
                requests.append(LoggedRequest(line, (), (), " ".join(turns)))
            else:
                requests.append(LoggedRequest(line, tuple(messages), tuple(tools), None))
        verdict = lint(requests, Renderer(loaded, name), 1)
        assert verdict.shared_tokens + verdict.tokens_lost <= verdict.prompt_tokens
        for finding in verdict.findings:
            assert finding.tokens_lost >= finding.requests
            # Whoever comes first can have lost nothing.
            assert 0 not in finding.lines


# -- forms of a log --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        lambda body: body,
        lambda body: {"request": body, "response": {"id": 1}},
        lambda body: {"custom_id": "a", "method": "POST", "body": body},
        lambda body: {"request": {"url": "/v1", "body": json.dumps(body)}},
    ],
)
def test_wrappers(found: Callable[..., dict[str, Any]], wrap: Callable[[Body], Body]) -> None:
    bodies = [wrap(chat(f"It is {10 + n}:00.{REST}", QUESTIONS[n])) for n in range(3)]
    assert [finding["kinds"] for finding in found(bodies)["findings"]] == [["time"]]


def test_plain_prompts_batches_and_tokens(found: Callable[..., dict[str, Any]]) -> None:
    prompts = [f"It is {10 + n}:00.{REST} Q: {QUESTIONS[n]}" for n in range(3)]
    expected = 2 * len(f".{REST} Q: ")
    for bodies in (
        [{"prompt": prompt} for prompt in prompts],
        [{"prompt": prompts}],
    ):
        (finding,) = found(bodies)["findings"]
        assert (finding["kinds"], finding["role"]) == (["time"], None)
        assert finding["tokens_lost"] == expected
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = [[alphabet.index("Ġ" if c == " " else c) for c in prompt] for prompt in prompts]
    (finding,) = found([{"prompt": each} for each in ids])["findings"]
    assert (finding["kinds"], finding["tokens_lost"]) == (["time"], expected)


def test_contents_in_parts_and_calls_of_tools(found: Callable[..., dict[str, Any]]) -> None:
    def body(n: int) -> Body:
        parts = [{"type": "text", "text": f"It is {10 + n}:00."}, {"type": "text", "text": REST}]
        call = {"id": "c", "function": {"name": "find", "arguments": '{"title": "x"}'}}
        messages = [
            {"role": "system", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": QUESTIONS[n]},
        ]
        return {"messages": messages}

    (finding,) = found([body(n) for n in range(3)])["findings"]
    assert finding["kinds"] == ["time"]
    assert finding["most_tokens_lost"] == len(f".\n{REST}\n<assistant>\n<tool>")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "line 2"),
        ("[]", "needs 'messages' or a 'prompt'"),
        ('{"body": {"input": 1}}', "needs 'messages'"),
        ('{"body": "nonsense"}', "line 2"),
        ('{"messages": []}', "empty"),
        ('{"messages": "hi"}', "list of objects"),
        ('{"messages": [{"content": "hi"}]}', "no role"),
        ('{"messages": [{"role": "user", "content": 5}]}', "no text"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "no text"),
        ('{"prompt": ""}', "none empty"),
        ('{"prompt": [true]}', "none empty"),
    ],
)
def test_a_line_that_is_no_request(
    tokenizer: str, tmp_path: Path, inside: Inside, line: str, word: str
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    done = inside("lint", str(path), "-m", tokenizer)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "line 2" in done.stderr
    assert word in done.stderr


def test_other_refusals(tokenizer: str, tmp_path: Path, inside: Inside) -> None:
    empty, latin = tmp_path / "empty.jsonl", tmp_path / "latin.jsonl"
    empty.write_text("\n")
    latin.write_bytes(b'{"prompt": "\xff"}')
    for path, code, word in ((empty, 2, "holds no requests"), (latin, 2, "no UTF-8")):
        done = inside("lint", str(path), "-m", tokenizer)
        assert (done.returncode, word in done.stderr) == (code, True), done.stderr
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt": "fine"}\n')
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    done = inside("lint", str(path), "-m", str(nothing))
    assert (done.returncode, "no tokenizer" in done.stderr) == (1, True)


# -- what people read ------------------------------------------------------------------------------


def test_the_report_for_people(tokenizer: str, tmp_path: Path, inside: Inside) -> None:
    path = tmp_path / "log.jsonl"
    bodies = [chat(f"It is {10 + n}:00.{REST}", QUESTIONS[n]) for n in range(4)]
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    done = inside("lint", str(path), "-m", tokenizer)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith("4 requests, ")
    assert lines[3] == "1. time in a system message"
    assert lines[4] == "   token 15 '1' of line 2, against line 1"
    assert lines[5] == f"   …<system>It is 11:00{('.' + REST)[:60]}…"
    assert lines[6] == "   '10:00', '11:00', '12:00', …"
    each = len(f".{REST}\n<user>")
    assert lines[7] == f"   3 requests recomputed {each} tokens each, {3 * each} in all"
    assert inside("lint", str(path), "-m", tokenizer, "--strict").returncode == 1


def test_tools_that_the_template_does_not_show(
    tokenizer: str, tmp_path: Path, inside: Inside
) -> None:
    other = tmp_path / "other"
    fast = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    fast.chat_template = TEMPLATE.partition("{% endif %}")[2]
    fast.save_pretrained(other)
    path = tmp_path / "log.jsonl"
    orders = [TOOLS, TOOLS[::-1]]
    bodies = [chat(f"You help.{REST}", "Hi", tools=order) for order in orders]
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    done = inside("lint", str(path), "-m", str(other), "--strict")
    assert done.returncode == 0
    assert "2 have tools, which this model's template does not show." in done.stdout
    fast.chat_template = None
    bare = tmp_path / "bare"
    fast.save_pretrained(bare)
    done = inside("lint", str(path), "-m", str(bare))
    assert (done.returncode, "no chat template" in done.stderr) == (2, True)


# -- parts -----------------------------------------------------------------------------------------


def test_divergence_against_all_pairs() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        prompts = [rng.integers(0, 2, rng.integers(1, 12)) for _ in range(30)]
        divergence = Divergence(2)
        for number, tokens in enumerate(prompts):
            shared, likest = divergence.add(tokens)
            lengths = [common_length(tokens, other) for other in prompts[:number]]
            assert shared == max(lengths, default=0)
            if likest is not None:
                assert lengths[likest] == shared < len(tokens)
                behind = windows(prompts[likest][shared:], 2), windows(tokens[shared:], 2)
                assert set(behind[0].tolist()) & set(behind[1].tolist())


def test_next_run_is_drawn_out_to_both_sides() -> None:
    left = np.array([1, 2, 9, 9, 5, 6, 7, 8, 3], np.int64)
    right = np.array([1, 2, 4, 5, 6, 7, 8, 1], np.int64)
    assert next_run(left, right, 2, 2) == (4, 3, 4)
    assert next_run(left, right, 2, 4) == (4, 3, 4)
    assert next_run(left, right, 2, 5) is None
    assert len(windows(left, 10)) == 0


def test_kinds_of_differences() -> None:
    def kinds(left: str, right: str) -> tuple[str, ...]:
        start = common_length(encoded(left), encoded(right))
        return classify(left, right, start, len(left), len(right)).kinds

    assert kinds("user 12 is here", "user 34 is gone") == ("text",)
    assert kinds("a 5", "a 6") == ("number",)
    assert kinds("on Monday", "on Friday") == ("date",)
    assert kinds("May 3", "May 4") == ("date",)
    assert kinds("Maya", "Mays") == ("user name",)
    assert kinds("the cat", "the dog") == ("text",)


def test_json_that_does_not_say_the_same() -> None:
    assert kind_of_reordering({"a": 1}, {"a": 1.0}) is None
    assert kind_of_reordering([1, 2, 2], [2, 1, 1]) is None
    # The order of a list may be what it says.
    assert kind_of_reordering([4, 5, 6], [6, 4, 5]) is None
    assert kind_of_reordering([{"name": "a"}, {"name": "b"}], [{"name": "b"}, {"name": "a"}]) == (
        "tool order"
    )
    assert reordered_json('x {"a": 1} y', 'x {"a": 2} y', 8) is None
    assert reordered_json("x {a} y", "x {b} y", 3) is None


# -- the demo model --------------------------------------------------------------------------------


@pytest.mark.model
def test_with_the_demo_model(tmp_path: Path, inside: Inside) -> None:
    demo = demo_workload()
    path = tmp_path / "log.jsonl"
    bodies = [
        chat(f"The time is 2026-11-30 {10 + n}:17:{20 + n}.\n{demo.system_prompt}", question)
        for n, question in enumerate(demo.questions[:6])
    ]
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    done = inside("lint", str(path), "--json")
    (finding,) = json.loads(done.stdout)["findings"]
    assert (finding["kinds"], finding["requests"]) == (["timestamp"], 5)
    # The handbook has 1,676 tokens for this model, and the user's turn begins with a few more.
    assert 1600 < finding["tokens_lost"] / 5 < 1750
    path.write_text("".join(json.dumps(body) + "\n" for body in conversations(16)))
    assert json.loads(inside("lint", str(path), "--json").stdout)["findings"] == []
