"""The protocol with peers, against a peer that only pretends."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peers import engines, install
from peers.driver import common_length
from peers.engines import Engine, Field, Setting, equal_share
from peers.process import PeerError, PeerProcess

FAKE = str(Path(__file__).parent / "fake_peer.py")
SETTING = Setting(
    model="none", dtype="float32", threads=1, max_len=64, max_seqs=2, kv_bytes=1, seconds=20
)
LOAD = {"do": "load", "dtype": "float32", "threads": 1}


@pytest.fixture
def start() -> Any:
    """Start the fake, misbehaving in one way; all are ended afterwards."""
    started: list[PeerProcess] = []

    def begin(how: str = "", seconds: float = 20) -> PeerProcess:
        process = PeerProcess("fake", [sys.executable, FAKE, how], seconds=seconds)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.close()
        assert not process.is_alive()


def ask_run(process: PeerProcess, width: int = 1) -> dict[str, Any]:
    return process.ask(do="run", prompts=[[1, 2], [7]], kind="greedy", width=width, max_tokens=3)


def test_a_run_gives_tokens_times_and_what_was_cached(start: Callable[..., PeerProcess]) -> None:
    process = start()
    said = process.ask(**LOAD)
    assert said["note"] == "float32, 1 threads"
    first, second = ask_run(process), ask_run(process, width=2)
    assert first["tokens"] == [[[3, 4, 5]], [[8, 9, 10]]]
    assert second["tokens"] == [[[3, 4, 5]] * 2, [[8, 9, 10]] * 2]
    assert (first["cached_tokens"], second["cached_tokens"]) == ([0, 0], [2, 1])
    assert [len(times) for times in first["times"]] == [2, 2]
    assert first["wall_s"] >= first["times"][0][-1] > 0
    assert first["cpu_s"] >= 0
    assert first["peak_mib"] > 1
    assert process.ask(do="reset") == {}
    assert ask_run(process)["cached_tokens"] == [0, 0]


def test_an_error_is_an_answer_and_the_peer_goes_on(start: Callable[..., PeerProcess]) -> None:
    process = start("fails")
    process.ask(**LOAD)
    with pytest.raises(PeerError, match="ValueError: cannot do this"):
        ask_run(process)
    with pytest.raises(PeerError, match="no such request: 'dance'"):
        process.ask(do="dance")
    assert process.is_alive()
    assert process.ask(do="reset") == {}


def test_a_peer_that_dies_leaves_its_last_words(start: Callable[..., PeerProcess]) -> None:
    process = start("dies")
    process.ask(**LOAD)
    with pytest.raises(PeerError, match="ended at 'run': something broke"):
        ask_run(process)
    assert not process.is_alive()
    with pytest.raises(PeerError, match="ended at 'reset'"):
        process.ask(do="reset")


def test_a_peer_that_hangs_is_ended(start: Callable[..., PeerProcess]) -> None:
    process = start("hangs", seconds=1.5)
    process.ask(**LOAD)
    with pytest.raises(PeerError, match="no answer to 'run' in 2 s"):
        ask_run(process)
    assert not process.is_alive()


def test_what_is_no_reply_is_refused(start: Callable[..., PeerProcess]) -> None:
    with pytest.raises(PeerError, match="answered 'load' with 'hello"):
        start("babbles").ask(**LOAD)


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(PeerError, match="fake cannot be started"):
        PeerProcess("fake", ["/nowhere/python"])


@pytest.fixture
def field(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Field]:
    """A field of fakes: a name a way to misbehave."""

    def of(*names: str) -> Field:
        fakes = {name: Engine(name, (FAKE, name), slow=name == "slow") for name in names}
        monkeypatch.setattr(engines, "ENGINES", fakes)
        return Field(names, SETTING)

    return of


def run_phase(process: PeerProcess, before: dict[str, Any]) -> dict[str, Any]:
    return ask_run(process)


def test_engines_take_turns_and_failures_are_kept(field: Callable[..., Field]) -> None:
    order: list[str] = []

    def noted(process: PeerProcess, before: dict[str, Any]) -> dict[str, Any]:
        order.append(process.name)
        return ask_run(process)

    with field("good", "slow", "fails", "dies", "unloadable") as entered:
        assert entered.facts["good"]["note"] == "float32, 1 threads"
        assert entered.facts["unloadable"] == {"failure": "OSError: there is no such model"}
        outcomes = entered.turns({"cold": noted, "warm": run_phase}, 3, 1)
        assert "dies" not in entered.processes
        again = entered.turns({"cold": run_phase}, 1, 1)
    assert order == ["good", "slow", "fails", "dies", "good", "fails", "good", "fails"]
    assert [len(outcomes["good"][phase].replies) for phase in ("cold", "warm")] == [3, 3]
    assert len(outcomes["slow"]["warm"].replies) == 1
    assert outcomes["good"]["warm"].replies[0]["cached_tokens"] == [2, 1]
    for phase in ("cold", "warm"):
        assert outcomes["fails"][phase].failure == "ValueError: cannot do this"
        assert outcomes["dies"][phase].failure == "ended at 'run': something broke"
        assert outcomes["unloadable"][phase].failure == "OSError: there is no such model"
    assert again["dies"]["cold"].failure == "ended at 'run': something broke"
    assert not entered.processes


def test_a_phase_stands_on_those_before_it(field: Callable[..., Field]) -> None:
    def second(process: PeerProcess, before: dict[str, Any]) -> dict[str, Any]:
        return {"seen": before["cold"]["tokens"]}

    with field("good", "fails") as entered:
        outcomes = entered.turns({"cold": run_phase, "second": second}, 1, 1)
    assert outcomes["good"]["second"].replies == [{"seen": [[[3, 4, 5]], [[8, 9, 10]]]}]
    assert outcomes["fails"]["second"].failure == "ValueError: cannot do this"


def test_all_run_on_as_many_cores_as_threads() -> None:
    before = os.sched_getaffinity(0)
    with engines.on_cores(1):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


def test_the_share_of_equal_outputs() -> None:
    assert equal_share([[[1]], [[2], [3]]], [[[1]], [[2], [3]]]) == 1
    assert equal_share([[[1]], [[2], [3]]], [[[1]], [[2], [4]]]) == 0.5


def test_common_length() -> None:
    assert common_length([[1, 2, 3], [1, 2, 4], [1, 2]]) == 2
    assert common_length([[1, 2, 3], [2], [1, 5]]) == 0
    assert common_length([[4, 4]]) == 2


def test_why_a_peer_is_not_there(tmp_path: Path) -> None:
    said = install.status_of("vllm", tmp_path)
    assert said == {"installed": False, "reason": "`make peers` has not been run"}
    (tmp_path / "vllm.json").write_text("{")
    assert "cannot be read" in str(install.status_of("vllm", tmp_path)["reason"])
    (tmp_path / "vllm.json").write_text(json.dumps({"installed": True, "versions": {}}))
    assert "is gone" in str(install.status_of("vllm", tmp_path)["reason"])
    python = install.python_of("vllm", tmp_path)
    python.parent.mkdir(parents=True)
    python.touch()
    assert install.status_of("vllm", tmp_path)["installed"]


def test_an_installation_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "print('Collecting x'); print('ERROR: no x for this machine'); raise SystemExit(1)"
    real = install.run

    def pip_fails(command: list[str], deadline: float) -> str:
        return "" if "venv" in command else real([sys.executable, "-c", code], deadline)

    monkeypatch.setattr(install, "run", pip_fails)
    peer = install.Peer("x", (("x",),), ("x",), "import x")
    reason = {"installed": False, "reason": "ERROR: no x for this machine"}
    assert install.install(peer, tmp_path, 1) == reason


def test_an_installation_that_takes_too_long() -> None:
    with pytest.raises(install.InstallError, match="the time for it was up"):
        install.run([sys.executable, "-c", "import time; time.sleep(30)"], 0)


def test_what_is_not_installed_is_reported() -> None:
    with Field(["vllm"], SETTING) as entered:
        assert entered.facts == {"vllm": {"failure": "not installed: no wheel"}}
        outcomes = entered.turns({"cold": run_phase}, 1, 1)
    assert outcomes["vllm"]["cold"].failure == "not installed: no wheel"
