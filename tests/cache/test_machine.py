"""The state machine, and that it does what it is for."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from machine import CacheMachine

EXAMPLES = 200
STEPS = 60
LONG = 100
EXTRA_ROUNDS = 4

# Under mutmut the machine runs once for each of some three thousand changes to the code.
MUTATED = "MUTANT_UNDER_TEST" in os.environ
UNDER_MUTATION = 25

# What must have happened in a run, or the machine shows nothing.
SITUATIONS = [
    "abort",
    "abort of nothing",
    "acquire at a block",
    "acquire diverging",
    "acquire extending",
    "acquire fresh",
    "acquire twin",
    "append",
    "commit",
    "commit with the open end",
    "copy on write",
    "deduplication",
    "eviction",
    "extend",
    "fork",
    "fork of a promise",
    "fork of all",
    "fork of an unfinished prompt",
    "hidden open end",
    "injected failure",
    "late copy",
    "out of blocks",
    "pressure",
    "release",
    "release of a promise",
    "release with a hint",
    "reset",
    "reuse",
    "reuse inside a block",
    "reuse that gained",
    "run a step",
    "schedule",
    "schedule twins",
    "schedule two",
    "truncate",
    "truncate in the tree",
    "truncate inside a tree's block",
    "withdraw",
    "withdrawn with another",
    "withdrawn with the promise of another",
]


def run_machine(examples: int, seed: int | None = None) -> None:
    """Run the machine; a failure shows the shortest sequence of calls that leads to it."""
    CacheMachine._hypothesis_internal_use_seed = seed  # type: ignore[attr-defined]
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=seed is None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_laws_content_and_dictionary_agree(long_run: bool) -> None:
    CacheMachine.fired.clear()
    if not long_run:
        run_machine(UNDER_MUTATION if MUTATED else EXAMPLES)
        # What is rare may need another round, but not many.
        for seed in range(0 if MUTATED else EXTRA_ROUNDS):
            if all(CacheMachine.fired[situation] for situation in SITUATIONS):
                break
            run_machine(EXAMPLES, seed)
        return
    # In portions: hypothesis keeps all that it has tried in memory.
    for seed in range(LONG):
        run_machine(EXAMPLES, seed)
        print(f"{(seed + 1) * EXAMPLES} examples of up to {STEPS} steps", flush=True)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_machine_reached(situation: str) -> None:
    if MUTATED or not CacheMachine.fired:
        pytest.skip("the machine was not run")
    assert CacheMachine.fired[situation], "never happened: the machine does not test it"
