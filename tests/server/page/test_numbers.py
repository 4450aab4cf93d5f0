"""Times, delays, rates and removals, from a clock that the test turns."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from radixkv.cache import DEFAULT_RETENTION, Removal
from radixkv.engine import TokenDelta
from radixkv.llm import LLM
from radixkv.server.page.clocks import MOST_READINGS, ClockTimes
from radixkv.server.page.pulse import Delays, Pulse
from radixkv.server.page.removals import MOST_REMOVALS, RemovalLog
from radixkv.server.page.texts import Labels, spell


def test_a_reading_of_the_tree_s_clock_has_a_time() -> None:
    times = ClockTimes()
    for clock, seconds in (3, 1.0), (3, 2.0), (7, 4.0):
        times.note(clock, seconds)
    assert [times.when(clock, 9.0) for clock in (1, 3, 4, 7, 8)] == [1.0, 1.0, 4.0, 4.0, 9.0]
    assert times.when_each([8, 3, 7], 9.04) == [9.0, 1.0, 4.0]


def test_old_readings_are_thinned_and_stay_in_order() -> None:
    times = ClockTimes()
    for clock in range(5 * MOST_READINGS):
        times.note(clock, float(clock))
    late = 5 * MOST_READINGS - 1
    assert times.when(late, 0.0) == late
    found = [times.when(clock, 1e9) for clock in range(0, late, 97)]
    assert found == sorted(found)
    assert all(seconds >= clock for clock, seconds in zip(range(0, late, 97), found, strict=True))
    assert len(times._clocks) <= MOST_READINGS


def test_percentiles_are_of_the_last_minute() -> None:
    delays = Delays()
    assert delays.percentiles(0.0) == (None, None, None, 0)
    delays.add(0.0, 99.0)
    for value in range(1, 102):
        delays.add(50.0, value / 100)
    p50, p90, p99, number = delays.percentiles(61.0)
    assert (round(p50 or 0, 6), round(p90 or 0, 6), round(p99 or 0, 6)) == (0.51, 0.91, 1.0)
    assert number == 101


def llm_with(requests: dict[str, Any]) -> Any:
    engine = SimpleNamespace(sampled_tokens=0, prefilled_tokens=0, kv_tokens_read=0)
    engine.kv_tokens_unshared = 0
    cache = SimpleNamespace(query_tokens=0, hit_tokens=0)
    return SimpleNamespace(
        cache=SimpleNamespace(tree=SimpleNamespace(clock=0), counters=cache),
        engine=SimpleNamespace(requests=requests, has_work=bool(requests), counters=engine),
    )


def request_of(name: str, arrived: float, first: float, ending: str | None = None) -> Any:
    branch = SimpleNamespace(index=0, stream=SimpleNamespace(finish_reason=ending))
    return SimpleNamespace(
        request_id=name, arrived_at=arrived, first_token_at=first, branches=[branch]
    )


def test_the_first_token_counts_once_and_gaps_are_between_steps() -> None:
    now = 10.0
    pulse = Pulse(lambda: now)
    request = request_of("a", 9.0, 10.0)
    llm = llm_with({"a": request})
    pulse.stepped(llm, [TokenDelta("a", 0, 5, "x")], 0.1)
    now = 10.25
    pulse.stepped(llm, [TokenDelta("a", 0, 6, "y")], 0.1)
    now = 10.75
    request.branches[0].stream.finish_reason = "length"
    del llm.engine.requests["a"]
    pulse.ended(request)  # Comes before the step's deltas.
    pulse.stepped(llm, [TokenDelta("a", 0, 7, "z", "length")], 0.1)
    assert pulse.first_token.percentiles(now) == (1.0, 1.0, 1.0, 1)
    assert pulse.between_tokens.percentiles(now)[3] == 2
    assert pulse.between_tokens.percentiles(now)[0] == 0.375
    assert [mark.seconds for mark in pulse.history] == [10.75]


def test_a_request_of_one_token_has_a_first_one() -> None:
    pulse = Pulse(lambda: 3.0)
    request = request_of("a", 1.0, 3.0, "stop")
    pulse.ended(request)
    pulse.stepped(llm_with({}), [TokenDelta("a", 0, 5, "x", "stop")], 0.1)
    assert pulse.first_token.percentiles(3.0) == (2.0, 2.0, 2.0, 1)
    assert pulse.between_tokens.percentiles(3.0)[3] == 0


def test_tokens_that_come_at_once_have_no_time_between_them() -> None:
    pulse = Pulse(lambda: 3.0)
    deltas = [TokenDelta("a", 0, token, "") for token in range(3)]
    pulse.stepped(llm_with({"a": request_of("a", 1.0, 2.0)}), deltas, 0.1)
    assert pulse.between_tokens.percentiles(3.0)[3] == 0


def removal(reason: Any, blocks: int = 1) -> Removal:
    return Removal((), reason, blocks, b"", 0, 5, 1, 0, DEFAULT_RETENTION)


def test_what_was_superseded_pushes_out_no_other() -> None:
    now = 2.0
    pulse = Pulse(lambda: now)
    pulse.clocks.note(5, 0.5)
    log = RemovalLog(pulse)
    log(removal("evicted", 3))
    for _ in range(2 * MOST_REMOVALS):
        log(removal("superseded"))
    assert log.num_blocks == {"evicted": 3, "superseded": 2 * MOST_REMOVALS}
    kept = log.newest()
    assert [its.removal.reason for its in kept] == ["superseded"] * MOST_REMOVALS + ["evicted"]
    assert (kept[-1].number, kept[-1].at, kept[-1].unused_for) == (1, 2.0, 1.5)


def test_labels_are_decoded_once_while_they_are_shown() -> None:
    asked: list[list[int]] = []

    def decode(ids: list[int]) -> str:
        asked.append(ids)
        return "a\n" * 60

    labels = Labels(decode)
    for _ in range(3):
        assert labels.of(b"\1\0\0\0") == "a⏎" * 32
        labels.turn()
    assert asked == [[1]]
    labels.turn()
    assert labels.of(b"\1\0\0\0", end=True) == "a⏎" * 32
    assert asked == [[1], [1]]


def test_a_character_of_several_tokens_is_spelled_whole(
    make_llm: Callable[..., LLM],
) -> None:
    tokenizer = make_llm().loaded.tokenizer
    assert tokenizer is not None
    ids = list(tokenizer("aé€").input_ids)
    assert spell(ids, tokenizer.decode) == [("a", 1), ("é", 2), ("€", 3)]
    assert spell(ids[:2], tokenizer.decode) == [("a", 1), ("�", 1)]
