"""`radixkv bench serve` against a server whose every chunk is known."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_server import Behaviour, fake_server

from radixkv.cli.bench import datasets
from radixkv.cli.bench.app import serve
from radixkv.cli.bench.client import Record, server_sent, transcript
from radixkv.cli.bench.driver import Run, arrivals
from radixkv.cli.bench.report import lines_of, percentiles, summarize
from radixkv.errors import ConfigError, RequestError
from radixkv.server.config import ServerConfig
from radixkv.workloads import demo_workload
from radixkv.workloads.traces import HashTrace, read_trace
from radixkv.workloads.words import WORDS, words_of

TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"
Inside = Callable[..., subprocess.CompletedProcess[str]]


def bench(inside: Inside, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return inside("bench", "serve", "--url", url, *arguments)


# -- the whole, against a fake server --------------------------------------------------------------


def test_all_is_counted_exactly(inside: Inside, tmp_path: Path) -> None:
    behaviour = Behaviour(fail={2: "429", 5: "html", 7: "error", 8: "cut", 9: "nonsense"})
    target = tmp_path / "out.json"
    with fake_server(behaviour) as url:
        done = bench(
            inside, url, "--dataset", "shared-prefix", "--num-requests", "20", "--groups", "3",
            "--prefix-tokens", "40", "--concurrency", "1", "--json", str(target),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = json.loads(target.read_text())
    summary = written["summary"]
    assert (summary["completed"], summary["unfinished"]) == (15, 0)
    assert summary["errors"] == {
        "HTTP 429": 1,
        "HTTP 502": 1,
        "error in the stream": 1,
        "stream cut off": 1,
        "unreadable event": 1,
    }
    assert summary["output_tokens"] == 15 * 4
    assert summary["prompt_tokens"] == 15 * 100
    assert (summary["cached_tokens"], summary["hit_rate"]) == (15 * 60, 0.6)
    assert summary["tokens_per_chunk"] == 1
    assert len(behaviour.bodies) == 20
    assert behaviour.most_running == 1
    for word in (
        "15 completed, 5 failed", "cached tokens  900: hit rate 60.0%",
        "1 x HTTP 429: too many [31mrequests",
        "1 x error in the stream: it broke", "HTTP 502: <h1>no</h1>", "TTFT", "driver late",
        "20 requests all at once, at most 1 at a time, to fake (/v1/chat/completions)",
    ):  # fmt: skip
        assert word in done.stdout
    body = behaviour.bodies[0]
    assert body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["max_tokens"], body["stream"]) == ("fake", 64, True)
    assert "ignore_eos" not in body
    systems = [body["messages"][0]["content"] for body in behaviour.bodies]
    # Each of three groups has its own system prompt, and each user a question.
    assert systems[:3] == systems[3:6]
    assert len(set(systems)) == 3
    assert len({body["messages"][1]["content"] for body in behaviour.bodies}) == 20
    records = written["records"]
    assert [record["number"] for record in records] == list(range(20))
    assert [len(record["chunks"]) for record in records if record["error"] is None] == [3] * 15


def test_times_are_those_of_the_stream(inside: Inside, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    with fake_server(Behaviour(delay_s=0.05)) as url:
        done = bench(
            inside, url, "--dataset", "shared-prefix", "--num-requests", "1", "--json", str(target)
        )
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(target.read_text())["records"]
    first, second, third = (at for at, _ in record["chunks"])
    # The server sleeps before each piece, and nothing can come before it was sent.
    assert first - record["sent"] >= 0.049
    assert record["ended"] - record["sent"] >= 3 * 0.049
    assert second < third <= record["ended"]


def test_a_conversation_waits_for_its_answers(inside: Inside) -> None:
    behaviour = Behaviour(delay_s=0.002)
    with fake_server(behaviour) as url:
        done = bench(
            inside, url, "--dataset", "chat", "--num-requests", "60", "--concurrency", "5",
            "--max-tokens", "7", "--ignore-eos",
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert 2 <= behaviour.most_running <= 5
    conversations: dict[str, list[list[dict[str, str]]]] = {}
    for body in behaviour.bodies:
        assert (body["max_tokens"], body["ignore_eos"]) == (7, True)
        messages = body["messages"]
        assert messages[0] == {"role": "system", "content": demo_workload().system_prompt}
        assert [m["content"] for m in messages if m["role"] == "assistant"] == ["one two three"] * (
            len(messages) // 2 - 1
        )
        conversations.setdefault(messages[1]["content"], []).append(messages)
    assert len(conversations) >= 15
    for turns in conversations.values():
        assert [len(messages) for messages in turns] == [2 * n + 2 for n in range(len(turns))]
        for shorter, longer in pairwise(turns):
            assert longer[: len(shorter)] == shorter


def test_after_a_failed_turn_the_conversation_ends(inside: Inside, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    behaviour = Behaviour(fail=dict.fromkeys(range(1000), "429"))
    with fake_server(behaviour) as url:
        done = bench(
            inside, url, "--dataset", "chat", "--num-requests", "40", "--json", str(target)
        )
    assert done.returncode == 1
    summary = json.loads(target.read_text())["summary"]
    sent = len(behaviour.bodies)
    assert summary["errors"] == {"HTTP 429": sent, "turn before failed": 40 - sent}
    assert 16 <= sent < 40
    assert (summary["completed"], summary["ttft"], summary["hit_rate"]) == (0, None, None)


def test_what_a_server_does_not_say_is_said(inside: Inside) -> None:
    shared = ("--dataset", "shared-prefix", "--num-requests", "3")
    with fake_server(Behaviour(cached_tokens=None)) as url:
        done = bench(inside, url, *shared)
    assert "cached tokens  unknown: the server's usage has no" in done.stdout
    assert "prompt tokens  300" in done.stdout
    with fake_server(Behaviour(tokens=None)) as url:
        done = bench(inside, url, *shared)
    assert "output tokens  unknown: not all answers had a usage" in done.stdout
    assert done.returncode == 0


def test_a_trace_over_completions(inside: Inside, tmp_path: Path) -> None:
    trace = tmp_path / "small.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 40, "output_length": 9, "hash_ids": [7, 8, 9]},
        {"timestamp": 30, "input_length": 33, "output_length": 0, "hash_ids": [7, 8, 10]},
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    behaviour = Behaviour(tokens=3)
    with fake_server(behaviour) as url:
        done = bench(
            inside, url, "--dataset", "trace", str(trace), "--rate", "recorded",
            "--endpoint", "completions", "--model", "other",
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert behaviour.paths == ["/v1/completions"] * 2
    first, second = (body["prompt"].split() for body in behaviour.bodies)
    assert (len(first), len(second)) == (40, 33)
    assert first[:32] == second[:32]
    assert first[32:] != second[32:]
    assert [body["max_tokens"] for body in behaviour.bodies] == [9, 1]
    assert {body["model"] for body in behaviour.bodies} == {"other"}
    assert "trace small.jsonl: 2 requests at recorded times" in done.stdout


def test_the_key_is_sent_and_never_written(
    inside: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.json"
    shared = ("--dataset", "shared-prefix", "--num-requests", "2", "--json", str(target))
    with fake_server(Behaviour(key="hush-hush")) as url:
        refused = bench(inside, url, *shared)
        monkeypatch.setenv("RADIXKV_API_KEY", "hush-hush")
        done = bench(inside, url, *shared)
    assert refused.returncode == 1
    assert "2 x HTTP 401: a key is needed" in refused.stdout
    assert done.returncode == 0
    assert "hush" not in target.read_text() + done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["--dataset", "trace"], 2, "FILE"),
        (["--dataset", "chat", __file__], 2, "FILE"),
        (["--dataset", "poems"], 2, "poems"),
        (["--dataset", "chat", "--rate", "0"], 2, "--rate"),
        (["--dataset", "chat", "--rate", "nan"], 2, "--rate"),
        (["--dataset", "chat", "--rate", "recorded"], 2, "recorded arrivals"),
        (["--dataset", "trace", __file__], 2, "line 1"),
        (["--dataset", "chat"], 1, "cannot reach"),
    ],
)
def test_bad_usage(inside: Inside, arguments: list[str], code: int, word: str) -> None:
    done = bench(inside, "http://127.0.0.1:9", *arguments)
    assert done.returncode == code
    assert word in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("url", ["nonsense", "ftp://x.org", ""])
def test_what_is_no_url(inside: Inside, url: str) -> None:
    done = bench(inside, url, "--dataset", "chat", "--model", "m")
    assert done.returncode == 2
    assert "--url" in done.stderr


def test_a_server_of_ours_is_asked_unless_told_otherwise() -> None:
    url = inspect.signature(serve).parameters["url"].default
    assert url == f"http://{ServerConfig.host}:{ServerConfig.port}"


def test_a_server_that_is_not_there(inside: Inside) -> None:
    shared = ("--dataset", "shared-prefix", "--num-requests", "2", "--model", "m")
    done = bench(inside, "http://127.0.0.1:9/v1", *shared)
    assert done.returncode == 1
    assert "2 x ConnectError" in done.stdout


def test_no_model_is_loaded_to_measure_or_to_look() -> None:
    modules = "radixkv.cli.bench.serve, radixkv.cli.tree, radixkv.cli.lint.report"
    code = f"import sys, {modules}; print({{'torch', 'transformers', 'jax'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_server_without_models(inside: Inside) -> None:
    with fake_server(Behaviour(models=())) as url:
        done = bench(inside, url, "--dataset", "chat")
    assert done.returncode == 1
    assert "--model" in done.stderr


def test_ctrl_c_prints_what_was_measured() -> None:
    behaviour = Behaviour(delay_s=0.01)
    with fake_server(behaviour) as url:
        script = str(Path(sys.executable).with_name("radixkv"))
        process = subprocess.Popen(
            [script, "bench", "serve", "--url", url, "--dataset", "shared-prefix",
             "--num-requests", "20000", "--prefix-tokens", "4", "--concurrency", "4"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ},
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while len(behaviour.bodies) < 12:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert " 4 interrupted in " in out
    completed = int(out.partition(" completed")[0].split()[-1])
    assert 8 <= completed < 20_000
    assert f"cached tokens  {60 * completed:,}: hit rate 60.0%" in out


# -- parts -----------------------------------------------------------------------------------------


def test_percentiles_lie_between_neighbours() -> None:
    assert percentiles([]) is None
    assert percentiles([3.0]) == {"mean": 3, "p50": 3, "p90": 3, "p95": 3, "p99": 3}
    found = percentiles([float(value) for value in range(101)])
    assert found == {"mean": 50, "p50": 50, "p90": 90, "p95": 95, "p99": 99}
    found = percentiles([4.0, 1.0, 3.0, 2.0])
    assert found is not None
    assert found["p50"] == 2.5
    assert found["p90"] == pytest.approx(3.7)


def record_of(*chunks: tuple[float, int | None], **more: Any) -> Record:
    return Record(0, 0, 0.0, chunks=list(chunks), **more)


def test_a_gap_is_shared_by_the_tokens_that_it_brought() -> None:
    # The server says with each chunk how many there are.
    record = record_of((1.0, 1), (1.5, 2), (2.5, 6), output_tokens=6)
    assert record.gaps() == [0.5, 0.25, 0.25, 0.25, 0.25]
    # It says only at the end that there were six in three chunks.
    record = record_of((1.0, None), (1.5, None), (2.5, None), output_tokens=6)
    assert record.gaps() == [0.25, 0.5]
    # One more than chunks is the end of the sequence.
    record = record_of((1.0, None), (1.5, None), (2.5, None), output_tokens=4)
    assert record.gaps() == [0.5, 1.0]
    # It never says.
    record = record_of((1.0, None), (1.5, None), (2.5, None))
    assert record.gaps() == [0.5, 1.0]
    assert record_of((1.0, None), output_tokens=1).gaps() == []
    assert record_of().gaps() == []
    assert record_of().ttft is None


def test_usage_in_every_chunk_is_used(inside: Inside, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    behaviour = Behaviour(running_usage=(2, 3, 9), tokens=9, delay_s=0.01)
    with fake_server(behaviour) as url:
        done = bench(
            inside, url, "--dataset", "shared-prefix", "--num-requests", "1", "--json", str(target)
        )
    (record,) = json.loads(target.read_text())["records"]
    assert [tokens for _, tokens in record["chunks"]] == [2, 3, 9]
    assert "A chunk brought 3.00 tokens on average" in done.stdout


def test_summary_of_what_was_interrupted_and_late() -> None:
    run = Run(seconds=2.0, started=3)
    run.records = [
        record_of((0.5, None), sent=0.25, ended=1.0, late=0.25, prompt_tokens=10, cached_tokens=5,
                  output_tokens=2),
        record_of((0.5, None), sent=0.0, ended=1.0, held=0.5, prompt_tokens=30, output_tokens=2),
    ]  # fmt: skip
    summary = summarize(run)
    assert (summary.completed, summary.unfinished, summary.without_cached) == (2, 1, 1)
    assert (summary.prompt_tokens, summary.cached_tokens, summary.hit_rate) == (40, 5, 0.5)
    assert (summary.requests_per_s, summary.output_tokens_per_s) == (1.0, 2.0)
    assert summary.times["ttft"] == percentiles([0.25, 0.5])
    assert summary.times["held_back"] == percentiles([0.0, 0.5])
    lines = "\n".join(lines_of(summary))
    assert "1 interrupted" in lines
    assert "5: hit rate 50.0%, 1 answers did not say" in lines
    assert "The driver was behind its schedule" in lines


def test_arrivals() -> None:
    turns = datasets.shared_prefix(4000, 2, 1, 8, seed=0)
    times = arrivals(turns, 50.0, seed=1)
    assert times == arrivals(turns, 50.0, seed=1)
    assert times != arrivals(turns, 50.0, seed=2)
    gaps = np.diff(times)
    assert gaps.min() > 0
    # Mean and deviation of an exponential distribution are equal: 3 standard errors of 4,000.
    assert gaps.mean() == pytest.approx(0.02, rel=0.05)
    assert gaps.std() == pytest.approx(0.02, rel=0.08)
    assert arrivals(turns, math.inf, seed=1) == [0.0] * 4000
    with pytest.raises(ConfigError, match="recorded"):
        arrivals(turns, None, seed=1)
    recorded = datasets.recorded(TRACES / "tot_game24.lcp.jsonl.gz", 3, 20)
    assert arrivals(recorded, None, seed=1) == pytest.approx([0.0, 4.05, 4.07])
    assert [turn.max_tokens for turn in recorded] == [20, 20, 20]


def test_datasets_are_the_same_for_the_same_seed() -> None:
    assert datasets.chat(50, 8, seed=3) == datasets.chat(50, 8, seed=3)
    assert datasets.chat(50, 8, seed=3) != datasets.chat(50, 8, seed=4)
    again = datasets.shared_prefix(9, 2, 30, 8, seed=3)
    assert again == datasets.shared_prefix(9, 2, 30, 8, seed=3)
    assert len(again[0].messages[0][1].split()) == 30


@pytest.mark.parametrize("name", ["mooncake_conversation", "mtbench101_chat", "bbh_fewshot"])
def test_texts_share_what_the_trace_shares(name: str) -> None:
    path = TRACES / f"{name}.lcp.jsonl.gz"
    turns = datasets.recorded(path, 60, None)
    with_rows = read_trace(path, 60)
    assert not isinstance(with_rows, HashTrace)
    words = [turn.messages[0][1].split() for turn in turns]
    compared = 0
    for number, (_, _, parent, shared, prompt, _, _) in enumerate(with_rows.rows):
        assert len(words[number]) == prompt == turns[number].prompt_tokens
        if parent >= 0:
            common = min(shared, prompt, len(words[parent]))
            assert words[number][:common] == words[parent][:common]
            compared += common
    assert compared > 0


def test_words_are_spread() -> None:
    words = words_of(np.arange(20_000)).split()
    assert len(words) == 20_000
    counts = {word: words.count(word) for word in WORDS.tolist()}
    assert min(counts.values()) > 100
    assert words_of([5, 9, 5]).split()[0] == words_of([5]).strip()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "holds no requests"),
        ("[1, 2]\n", "line 1"),
        ('{"unit": 16, "outputs_known": false}\n[0,0,0,0,5,5,0]\n', "line 2"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}\n', "too small"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": 4}\n', "no list"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": []}\n', "block size"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(RequestError, match=word):
        read_trace(path)


def test_events_are_put_together() -> None:
    async def chunks() -> Any:
        for part in (
            b"data: a\r\n\r\nda",
            b"ta:b\n\n: ping\n\ndata: ",
            "ü".encode()[:1],
            b"\xbc\n",
        ):
            yield part

    async def read() -> list[str]:
        return [data async for data in server_sent(chunks())]

    assert asyncio.run(read()) == ["a", "b", "ü"]


def test_one_message_is_its_own_prompt() -> None:
    assert transcript([("user", "a b")]) == "a b"
    assert transcript([("system", "s"), ("user", "u")]) == "system: s\n\nuser: u\n\nassistant:"
