"""Schemathesis over our own OpenAPI document: whatever it makes of it, no answer is a 5xx.

Half of what it draws is what the document allows, half is not. Of what is allowed much is filled
in, or nearly all of it would end at the first door: contexts that exist, prompts that are not
empty, the model that is served. ``pytest tests/server/test_openapi.py --long`` has 5,405 cases and
takes eight minutes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from radixkv.server.service import Service

Serve = Callable[..., tuple[str, Service]]

OPENS = "POST /v1/contexts"
SEED = 20_240_607
CASES, CASES_LONG = 8, 300
"""Of each operation, of which there are 23."""

PROMPTS: st.SearchStrategy[Any] = st.sampled_from(
    ["a", ["a", "b c"], [5, 6], [[1], [2, 3]], "é" * 60]
)
CONTENTS: st.SearchStrategy[Any] = st.sampled_from(
    ["a", [5, 6], [{"role": "user", "content": "hi"}], "<eos>", "b" * 50]
)
TALKS: st.SearchStrategy[Any] = st.sampled_from(
    [
        [{"role": "user", "content": "hi"}],
        [
            {"role": "system", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
        ],
    ]
)
FILLED = {
    "prompt": PROMPTS,
    "content": CONTENTS,
    "messages": TALKS,
    "tokens": st.lists(st.integers(0, 258), max_size=5),
    "options": st.lists(st.sampled_from(["a", "bc", [7]]), min_size=1, max_size=3),
    "n": st.integers(1, 4),
    "max_tokens": st.integers(0, 8),
    "max_completion_tokens": st.none(),
    "model": st.sampled_from([None, "tiny"]),
    "template": st.sampled_from(["{text}", "{index}{text}\n", ""]),
    "checkpoint": st.just("here"),
}
"""By the name of a field."""

GENERATES = st.fixed_dictionaries(
    {"max_tokens": st.integers(0, 6)},
    optional={
        "temperature": st.floats(-1, 3),
        "top_p": st.floats(0, 1.5),
        "top_k": st.integers(-1, 300),
        "min_p": st.floats(0, 1),
        "seed": st.integers(-1, 2**65),
        "stop": st.sampled_from(["a", ["b", "c"], "", [""]]),
        "logprobs": st.integers(-1, 21),
        "prompt_logprobs": st.integers(-1, 3),
        "logit_bias": st.dictionaries(st.integers(-1, 300).map(str), st.floats(-120, 120)),
        "repetition_penalty": st.floats(0, 3),
        "regex": st.sampled_from(["[a-c]+", "("]),
        "json_object": st.booleans(),
        "stream": st.booleans(),
        "n": st.integers(0, 2),
    },
)
"""The document says no more of a context's generation than that it has fields."""


def test_nothing_that_is_asked_for_is_answered_with_5xx(serve: Serve, long_run: bool) -> None:
    url, service = serve(num_blocks=512, max_contexts=8192)
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) == 23
    statuses: Counter[int] = Counter()
    print(f"seed {SEED}")
    with httpx.Client(base_url=url, timeout=60) as client:
        for operation in operations:
            its = ask(client, operation, CASES_LONG if long_run else CASES)
            print(f"{operation.label}: {dict(sorted(its.items()))}")
            statuses += its
    print(f"{sum(statuses.values())} cases, by status: {dict(sorted(statuses.items()))}")
    assert statuses[200] > sum(statuses.values()) / 5
    assert service.worker.num_unfinished == service.worker.num_reserved == 0


def ask(client: httpx.Client, operation: Any, cases: int) -> Counter[int]:
    """Send an operation so many cases; the answers' statuses."""
    statuses: Counter[int] = Counter()
    drawn = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if operation.body:
        drawn |= operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

    @seed(SEED)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn, st.data())
    def sent(case: Any, data: st.DataObject) -> None:
        opened = client.post("/v1/contexts", json={"content": "ab"}).json()["id"]
        client.post(f"/v1/contexts/{opened}/checkpoint", json={"name": "here"})
        forked = client.post(f"/v1/contexts/{opened}/fork", json={"n": 2}).json()["branches"]
        known = {
            "context": st.just(opened),
            "branches": st.just(forked),
            "operations": listed(opened, forked),
            **FILLED,
        }
        case.path_parameters = filled(case.path_parameters, known, data)
        case.body = filled(case.body, known, data)
        if operation.label.endswith("/generate") and data.draw(st.booleans()):
            case.body = data.draw(GENERATES)
        told = case.call(timeout=60)  # An answer without an end in sight fills the context.
        statuses[told.status_code] += 1
        assert told.status_code < 500, case.as_curl_command()
        assert '"type":"server_error"' not in told.text, case.as_curl_command()
        if told.status_code >= 400:
            assert set(told.json()["error"]) == {"message", "type", "param", "code"}
        for one in (
            opened,
            *([told.json()["id"]] if operation.label == OPENS and told.status_code == 200 else []),
        ):
            client.delete(f"/v1/contexts/{one}")

    sent()
    return statuses


def listed(context: str, branches: list[str]) -> st.SearchStrategy[Any]:
    """Lists of operations on a context: of all the fields one alone may be given."""
    operands: list[dict[str, Any]] = [
        {"open": {"content": "a"}},
        {"append": {"content": "b"}},
        {"append": {"content": [{"role": "user", "content": "hi"}]}},
        {"generate": {"max_tokens": 3}, "name": "one"},
        {"score": {"content": "cd"}},
        {"choose": {"options": ["e", [6, 7]]}},
        {"fork": {"n": 2}},
        {"join": {"branches": branches, "mode": "append"}},
        {"checkpoint": {"name": "here"}},
        {"rollback": {"checkpoint": "here"}},
        {"cancel": {"name": "one"}},
        {"close": {}},
        {"read": {}},
    ]
    names = st.sampled_from([context, *branches, "ctx-" + "a" * 22])
    one = st.tuples(names, st.sampled_from(operands)).map(lambda its: {"context": its[0], **its[1]})
    return st.lists(one, min_size=1, max_size=6)


def filled(value: Any, known: dict[str, st.SearchStrategy[Any]], data: st.DataObject) -> Any:
    """A case's part, with what is known in some of its fields."""
    if isinstance(value, list):
        return [filled(each, known, data) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: data.draw(known[name])
        if name in known and data.draw(st.integers(0, 7))
        else filled(inner, known, data)
        for name, inner in value.items()
    }
