"""The smallest form of every benchmark, end to end, and what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import control_plane
import measure
import plots
import pytest
import serving
import traces
import waste
import workloads

RunMain = Callable[..., dict[str, Any]]
BENCHMARKS = Path(measure.__file__).parent
TINY = ("--short", "--dtype", "float32", "--threads", "1")


def test_chat(run_main: RunMain, tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours and Hugging Face's in turn: cold, warm, second turn, with equal tokens."""
    cases = ("--prefixes", "0,40", "--users", "2", "--new-tokens", "3")
    engines = ("--engines", "radixkv,hf,vllm,llama")
    written = run_main("chat", *TINY, *cases, *engines, "--model", str(tiny_folder))
    results = written["results"]
    assert list(results) == ["prefix 0, 2 users", "prefix 40, 2 users"]
    for case in results.values():
        assert list(case) == ["cold", "warm", "second turn"]
        for phase in case.values():
            assert phase["hf"]["equal_share"] == phase["radixkv"]["equal_share"] == 1
            assert phase["hf"]["new_tokens"] == phase["radixkv"]["new_tokens"] == 6
            assert (
                phase["vllm"]["failure"] == phase["llama"]["failure"] == "not installed: no wheel"
            )
    shared = results["prefix 40, 2 users"]
    assert shared["warm"]["radixkv"]["cached_tokens"] == shared["warm"]["radixkv"]["prompt_tokens"]
    assert shared["cold"]["hf"]["cached_tokens"] == 0
    assert shared["warm"]["hf"]["cached_tokens"] == 80
    assert results["prefix 0, 2 users"]["cold"]["radixkv"]["cached_tokens"] == 0
    printed = capsys.readouterr().out
    assert "warm: vLLM (CPU): not installed: no wheel" in printed
    assert "gave other tokens" not in printed


def test_single(run_main: RunMain, tiny_folder: Path, in_process: None) -> None:
    options = ("--prefix", "40", "--new-tokens", "3", "--engines", "radixkv")
    written = run_main("single", *TINY, *options, "--model", str(tiny_folder))
    ((_, phases),) = written["results"].items()
    kept = phases["prefix cached"]["radixkv"]
    assert kept["cached_tokens"] == 40
    assert 0 < kept["first_token_s"] < kept["wall_s"][0]
    assert 0 < kept["between_tokens_s"] < kept["wall_s"][0]


def test_branches(run_main: RunMain, tiny_folder: Path, in_process: None) -> None:
    engines = ("--engines", "radixkv")
    written = run_main("branches", *TINY, *engines, "--model", str(tiny_folder))
    beams, samples = written["results"].values()
    assert beams["cold"]["radixkv"]["new_tokens"] == 2 * 4 * 4
    assert samples["cold"]["radixkv"]["new_tokens"] == 2 * 4 * 8
    assert samples["cold"]["radixkv"]["equal_share"] is None


def test_no_sharing(run_main: RunMain, tiny_folder: Path, in_process: None) -> None:
    engines = ("--engines", "radixkv")
    written = run_main("no_sharing", *TINY, *engines, "--model", str(tiny_folder))
    ((_, phases),) = written["results"].items()
    assert phases["cold"]["radixkv"]["cached_tokens"] == 0
    assert phases["cold"]["radixkv"]["prompt_tokens"] == 4 * 32


def test_startup(run_main: RunMain, tiny_folder: Path) -> None:
    engines = ("--engines", "radixkv,llama")
    written = run_main("startup", *TINY, *engines, "--model", str(tiny_folder))
    (turn,) = written["results"]["radixkv"]["turns"]
    assert turn["load_s"] < turn["to_loaded_s"] < turn["to_first_token_s"]
    assert "failure" in written["engines"]["llama"]


def test_a_benchmark_fails_if_ours_does(
    run_main: RunMain, tmp_path: Path, in_process: None
) -> None:
    config = {"vocab_size": 500, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="radixkv failed: ModelLoadError"):
        run_main("startup", *TINY, "--engines", "radixkv", "--model", str(tmp_path))


def test_an_unknown_engine_is_refused(run_main: RunMain, tiny_folder: Path) -> None:
    with pytest.raises(SystemExit, match="no such engine: vlm; there are radixkv, vllm"):
        run_main("chat", *TINY, "--engines", "vlm", "--model", str(tiny_folder))


def test_control_plane(
    run_main: RunMain, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [
        control_plane.Workload("chat", {"kind": "chat", "conversations": 12}, 0.5),
        control_plane.Workload("RAG", {"kind": "rag", "documents": 3, "requests": 8}, 1.0),
    ]
    monkeypatch.setattr(control_plane, "all_workloads", lambda short: small)
    written = run_main("control_plane", "--runs", "1", "--peers", "vllm")
    kept = written["results"]["chat"]["radixkv"]
    assert kept["requests"] == 60
    assert 0 < kept["hit_rate"] < 1
    assert kept["whole_p50_us"] > kept["match_p50_us"] > 0
    assert kept["evicted_blocks"] > 0
    assert written["engines"] == {"vllm": {"failure": "not installed: no wheel"}}
    assert "vLLM block pool: not installed: no wheel" in capsys.readouterr().out


def test_a_sweep_is_timed_on_a_full_cache() -> None:
    """Once timing starts there is no room for another conversation, however much was left over."""
    spec = {"leaves": 40, "timed": 10}
    fill, timed = workloads.make("sweep", **spec)
    more = workloads.further("sweep", **spec)
    spare = 500
    num_blocks = control_plane.blocks_for(fill, 1.0) + spare
    *_, evicted = control_plane.one_run(fill, timed, num_blocks, more=more)
    # Five new conversations and five second turns, of some 100 to 200 tokens each.
    assert 5 <= evicted <= 13
    *_, without = control_plane.one_run(fill, timed, num_blocks)
    assert without == 0
    numbers = {request.conversation for request in fill + timed}
    assert next(workloads.further("sweep", **spec)).conversation not in numbers
    assert list(workloads.further("chat", conversations=3)) == []


def test_a_workload_that_is_not_there_is_refused(
    run_main: RunMain, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_main("control_plane", "--only", "cats")
    assert "no workload has 'cats' in its name; there are chat, sweep" in capsys.readouterr().err


def test_replay(run_main: RunMain) -> None:
    options = ("--traces", "tot_game24", "--requests", "60", "--policies", "lru,lru-hinted")
    written = run_main("replay", "--short", "--parts", "cache", *options)
    kept = written["results"]["tot_game24"]["10%"]
    assert kept["lru"]["cpu_us"] > 0
    assert set(kept) == {"blocks", "optimum", "lru", "lru, hinted"}


def test_replay_against_the_engine(run_main: RunMain) -> None:
    import engine_replay

    options = ("--parts", "engine", "--traces", "mtbench101_chat", "--engine-requests", "24")
    kept = run_main("replay", *options)["results"]["mtbench101_chat, engine"]["50%"]
    rows = engine_replay.reduced(traces.load("mtbench101_chat", 24), 4)
    alone, in_order, at_once = kept["cache alone"], kept["engine, in order"], list(kept.values())[3]
    assert in_order["requests"] + in_order["too_large"] == 24
    assert in_order["prompt_tokens"] == sum(row.prompt for row in rows)
    assert in_order["output_tokens"] == at_once["output_tokens"] == sum(row.output for row in rows)
    assert 0 < alone["prefilled"] == in_order["prefilled"] < in_order["prompt_tokens"]
    assert at_once["prefilled"] > 0


def test_an_engine_that_prefills_otherwise_fails_its_replay(
    run_main: RunMain, monkeypatch: pytest.MonkeyPatch
) -> None:
    import engine_replay

    real = engine_replay.cache_alone

    def one_more(*arguments: Any) -> dict[str, Any]:
        said = real(*arguments)
        return said | {"prefilled": said["prefilled"] + 1}

    monkeypatch.setattr(engine_replay, "cache_alone", one_more)
    options = ("--parts", "engine", "--traces", "mtbench101_chat", "--engine-requests", "4")
    with pytest.raises(SystemExit, match="tokens prefilled, not"):
        run_main("replay", *options)


def test_waste(run_main: RunMain, monkeypatch: pytest.MonkeyPatch) -> None:
    real = waste.measure
    monkeypatch.setattr(waste, "measure", lambda size, conversations: real(size, 20))
    written = run_main("waste", "--short")
    one, _, large = written["results"].values()
    # With blocks of one token nothing is held in vain but what is not shared.
    assert one["shared"] == 1
    assert one["shared"] < large["shared"] < large["unshared"]
    assert one["unshared"] < one["contiguous"]


def test_what_is_held_by_hand() -> None:
    """Two requests share 6 tokens, have 4 of their own, and answer with 2; blocks of 4."""
    tokens = [list(range(6)) + [10 * own + i for i in range(6)] for own in (1, 2)]
    running = [
        workloads.Request(i, 0, 0, workloads.np.array(each), 10) for i, each in enumerate(tokens)
    ]
    held = waste.hold(running, 4)
    points = waste.POINTS + 1
    lengths = [10 + 2 * point // waste.POINTS for point in range(points)]
    assert held.contiguous == points * 2 * 12
    assert held.unshared == points * 2 * 12
    assert held.needed == sum(6 + 2 * (length - 6) for length in lengths)
    # One block of four is shared; both have two more.
    assert held.shared == points * 5 * 4


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_plots(run_main: RunMain, tmp_path: Path, kind: str) -> None:
    """What is drawn is a picture, with the series' names in it."""
    picture = tmp_path / "plots" / f"replay.{kind}"
    traces = ("--traces", "tot_game24", "--requests", "40", "--policies", "fifo")
    run_main("replay", "--short", *traces, "--plot", str(picture))
    drawn = picture.read_bytes()
    if kind == "png":
        assert drawn.startswith(b"\x89PNG")
    else:
        assert b"<!-- fifo -->" in drawn
        assert b"<!-- optimum -->" in drawn


def test_bars_show_where_there_is_nothing(tmp_path: Path) -> None:
    picture = tmp_path / "bars.svg"
    plots.bars(
        picture, "Speed", "tokens/s", ["a", "b"], {"ours": [2.5, 3.0], "theirs": [None, 1.0]}
    )
    drawn = picture.read_text()
    assert "<!-- none -->" in drawn
    assert "<!-- 2.5 -->" in drawn


def test_memory(run_main: RunMain, on_demo: None) -> None:
    written = run_main("memory", "--prompts", "2", "--scale", "40", "--threads", "1")
    for name, kept in written["results"].items():
        assert 0 <= kept["saved"] < 1, name
        assert kept["shared"] <= kept["alone"]


def test_shared_prompt(run_main: RunMain, on_demo: None) -> None:
    small = ("--conversations", "2", "--max-tokens", "2", "--turns", "1", "--threads", "1")
    written = run_main("shared_prompt", *small)
    assert len(written["results"]) == 3


def test_metadata(run_main: RunMain, monkeypatch: pytest.MonkeyPatch) -> None:
    import metadata

    monkeypatch.setattr(metadata, "BLOCK_SIZES", (16,))
    written = run_main("metadata", "--short")
    assert 4 < written["results"]["16"]["bytes_per_token"] < 20


def test_programs(run_main: RunMain, on_demo: None) -> None:
    small = ("--short", "--root", "90", "--new-tokens", "4", "--dtype", "float32", "--threads", "1")
    results = run_main("programs", *small, "--tokens", "64", "--runs", "2")["results"]
    assert results["context.fork(1)"]["p50_us"] > 0
    forked, cached, computed = results["tree of thought, 2 branches"].values()
    # Two levels of two thoughts of 4 tokens, and an answer, however they come about.
    assert forked["sampled"] == cached["sampled"] == computed["sampled"] == 20
    assert cached["same_text"]
    assert computed["same_text"]
    # The root is computed once, or once for each of the five calls.
    assert 140 < forked["prefilled"] < 210
    assert 140 < cached["prefilled"] < 210
    assert computed["prefilled"] > 5 * 140
    forked, cached, computed = results["best of n, 2 branches"].values()
    assert 2 * forked["prefilled"] == 2 * cached["prefilled"] == computed["prefilled"]


def test_control_step(run_main: RunMain, on_demo: None) -> None:
    small = ("--prefix", "40", "--vocabulary", "250", "--steps", "4", "--turns", "1")
    results = run_main("control_step", *small, "--rows", "1,3")["results"]
    assert set(results) == {"1", "3"}
    for kept in results.values():
        assert all(cost > 0 for cost in kept["us_a_step_and_row"].values())
        calls = kept["calls_a_step"]
        # Rows that only go on are not planned again; every other phase is met once for all of them.
        assert calls.pop("plan") == 0
        assert calls == dict.fromkeys(calls, 1)


def test_scaling(run_main: RunMain, on_demo: None) -> None:
    small = ("--rows", "1,3", "--contexts", "40,400", "--steps", "2", "--chunk", "32")
    # A block is 16 tokens of 256 bytes: three contexts of 400 tokens of their own do not fit.
    options = ("--threads", "1", "--dtype", "float32", "--kv-memory", "200KiB")
    results = run_main("scaling", *small, *options)["results"]
    assert results["left out"] == ["3 rows of 400 tokens of their own"]
    points = {(p["rows"], p["context"], p["shared"]): p for p in results["decode"]}
    assert set(points) == {
        (1, 40, False), (1, 400, False), (3, 40, True), (3, 40, False), (3, 400, True),
    }  # fmt: skip
    # Contexts of their own are read once for each; so is a run that is too short to pay.
    for alone in ((3, 40, False), (3, 40, True)):
        assert points[alone]["kv_read"] == points[alone]["pairs"]
    # Two warm steps, and the first and the second of those that count, behind the first token.
    assert points[1, 40, False]["pairs"] == 40 + 3.5
    # Not all of these were admitted in the same step.
    assert 3 * 403.5 <= points[3, 400, True]["pairs"] <= 3 * 405.5
    assert [p["context"] for p in results["prefill"]] == [0, 40]
    assert set(results["slopes, ms"]["steps"]) == {"wall", "CPU"}


def test_slopes_of_a_known_line() -> None:
    import scaling

    points = [
        scaling.Point(rows, 0, True, read, pairs, 7 + 2 * rows + 0.5 * read + 0.25 * pairs, 1.0)
        for rows, read, pairs in [(1, 10, 10), (4, 10, 40), (4, 40, 40), (16, 30, 500), (9, 9, 20)]
    ]
    found = scaling.fit_steps(points, "wall")
    assert found.slopes == pytest.approx((7, 2, 0.5, 0.25))
    assert found.worst == pytest.approx(0, abs=1e-9)
    assert scaling.fit_steps([*points, replace(points[0], wall_ms=20.0)], "wall").worst > 0.1
    prompts = [
        scaling.Point(1, context, False, 0, 8 * context + 36, 8 * 3 + 2 * (8 * context + 36), 1.0)
        for context in (0, 5, 9)
    ]
    assert scaling.fit_prompts(prompts, 8, "wall").slopes == pytest.approx((3, 2))


def test_what_was_measured_says_on_what() -> None:
    """The figures of the documentation: each file names its command and its machine."""
    files = sorted((BENCHMARKS / "results").glob("*.json"))
    assert files
    for file in files:
        measure.check_results(json.loads(file.read_text()))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"command": None}, "no command"),
        ({"machine": {}}, "no machine"),
        ({"results": {}}, "no results"),
        ({"engines": {"vllm": {}}}, "vllm neither ran nor"),
    ],
)
def test_results_that_do_not_say_what_they_are(change: dict[str, Any], what: str) -> None:
    machine = {"processor": "x", "python": "3", "numpy": "2"}
    good = {"command": "python benchmarks/x.py", "machine": machine, "results": {"a": 1}}
    measure.check_results(good)
    with pytest.raises(ValueError, match=what):
        measure.check_results(good | change)


def test_prompts_share_what_they_are_said_to(tiny_folder: Path) -> None:
    texts = serving.Texts(tiny_folder)
    assert len(texts.prefix(4000)) == 4000
    assert texts.prefix(4000)[:1700] == texts.prefix(1700)
    firsts = [texts.question(i)[0] for i in range(64)] + [texts.alone(64, 9)[0]]
    assert len(set(firsts)) == 65
    assert all(len(texts.alone(i, 256)) == 256 for i in (0, 63))


def test_the_page_runs_every_benchmark() -> None:
    """A new file with a question must be on the page, or be known as a helper."""
    import runpy

    page = runpy.run_path(str(BENCHMARKS / "__main__.py"))
    helpers = {"__main__", "measure", "plots", "serving", "workloads", "traces", "optimum"}
    helpers |= {"engine_replay", "stream_reader"}  # parts of others
    helpers |= {"compile", "event_loop", "flood", "online", "soak"}  # minutes each
    programs = {file.stem for file in BENCHMARKS.glob("*.py")} - helpers
    # Those for a GPU stand apart: docs/kernels.md says how to run them.
    assert {name for name in programs if not name.startswith("gpu")} == set(page["SHORT"])


def test_the_page_names_what_failed(tmp_path: Path) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "benchmarks", "--only", "single,metadata"]
    done = subprocess.run(
        [*command, "--", "--engines", "nobody"],
        cwd=BENCHMARKS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "failed: single" in done.stderr
    assert "Metadata of a full cache" in done.stdout


def test_serve_overhead(run_main: RunMain) -> None:
    """Every token of every stream arrives, and costs the event loop something."""
    written = run_main("serve_overhead", "--streams", "3", "--tokens", "12", "--turns", "1")
    medians = written["results"]["medians"]
    assert medians["microseconds_a_token"] > 0
    assert 1 <= medians["tokens_an_event"] <= 12
    assert medians["bytes_a_token"] > 100
