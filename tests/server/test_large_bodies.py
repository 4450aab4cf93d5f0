"""Bodies that are large, or made to be slow: refused before anything is made of them, or served."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.errors import RequestError
from radixkv.server.body import BYTES_A_PART, BYTES_A_VALUE, check_parts, counted
from radixkv.server.connections import READ_BYTES, Connection
from radixkv.server.service import Service

Serve = Callable[..., tuple[str, Service]]
MOST_BYTES = 2 << 20
TALK = [{"role": "user", "content": "hi"}]

TEXTS = st.text(max_size=8) | st.text('\\"[]{}:,n')
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=20,
)


def walked(value: Any) -> tuple[int, int]:
    """The same as `counted`, of the value itself."""
    if isinstance(value, dict):
        commas, parts, inner = max(len(value) - 1, 0), 1 + len(value), list(value.values())
    elif isinstance(value, list):
        commas, parts, inner = max(len(value) - 1, 0), 1, value
    else:
        return 0, 0
    counts = [walked(each) for each in inner]
    return commas + sum(its[0] for its in counts), parts + sum(its[1] for its in counts)


@given(VALUES, st.booleans())
def test_what_is_counted_is_what_will_be_made(value: Any, ascii_alone: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_alone).encode(errors="surrogatepass")
    assert counted(raw) == walked(value)


def test_as_much_as_is_allowed_passes_and_one_more_does_not() -> None:
    values, parts = 1600 // BYTES_A_VALUE, 1600 // BYTES_A_PART
    check_parts(b"," * values, 1600)
    check_parts(b"[" * parts, 1600)
    with pytest.raises(
        RequestError, match="201 values in lists and objects; this server takes 200"
    ):
        check_parts(b"," * (values + 1), 1600)
    with pytest.raises(RequestError, match="13 objects, lists and fields; this server takes 12"):
        check_parts(b":" * (parts + 1), 1600)


@pytest.fixture
def url(serve: Serve) -> Iterator[str]:
    url, service = serve()
    yield url
    assert service.worker.num_unfinished == service.worker.num_reserved == 0
    told = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2})
    assert told.status_code == 200


def repeated(head: str, part: str, tail: str) -> bytes:
    count = (MOST_BYTES - len(head) - len(tail)) // (len(part) + 1)
    return (head + ",".join([part] * count) + tail).encode()


FIELDS = ",".join(f'"k{place}":1' for place in range(160_000))


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", repeated('{"prompt":[', "[]", "]}"), "values in lists"),
        ("/v1/completions", f"{{{FIELDS}}}".encode(), "160001 objects, lists and fields"),
        (
            "/v1/completions",
            f'{{"prompt":"a","guided_json":{{{FIELDS}}}}}'.encode(),
            "160004 objects, lists and fields",
        ),
        ("/v1/chat/completions", repeated('{"messages":[', '{"a":{}}', "]}"), "objects, lists"),
        ("/v1/contexts", repeated('{"content":[', '{"a":[]}', "]}"), "objects, lists"),
        ("/detokenize", repeated('{"tokens":[', "1", "]}"), "takes 262144 in one request"),
        ("/v1/completions", b"[" * MOST_BYTES, "2097152 objects, lists and fields"),
    ],
)
def test_bodies_of_too_many_parts_are_refused(url: str, path: str, body: bytes, words: str) -> None:
    told = httpx.post(url + path, content=body)
    assert told.status_code == 400
    error = told.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


def test_texts_may_hold_as_many_signs_as_they_like(url: str) -> None:
    body = json.dumps({"prompt": '[{"a":1},' * 100_000}).encode()
    told = httpx.post(f"{url}/v1/completions", content=body)
    assert "the prompt has 900000 characters" in told.json()["error"]["message"]


def test_as_many_token_ids_as_a_large_body_holds_are_served(url: str) -> None:
    told = httpx.post(f"{url}/detokenize", json={"tokens": [65, 66, 67] * 80_000})
    letters = httpx.post(f"{url}/detokenize", json={"tokens": [65, 66, 67]}).json()["prompt"]
    assert told.json() == {"prompt": letters * 80_000}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "k" * 1_000_000: 1}),
        ("/v1/completions", {"prompt": "a", "model": "k" * 1_000_000}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"k" * 1_000_000: 1}}),
        ("/v1/chat/completions", {"messages": TALK, "tool_choice": {"a": ["k"] * 200_000}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [["k"] * 200_000]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "k" * 1_000_000, "content": ""}]}),
    ],
)
def test_what_was_sent_is_quoted_in_short(url: str, path: str, body: dict[str, Any]) -> None:
    told = httpx.post(url + path, json=body)
    assert told.status_code in (400, 404)
    message = told.json()["error"]["message"]
    assert "k" in message
    assert len(message) < 5000


def test_a_long_unknown_field_is_told_without_looking_for_what_is_near(url: str) -> None:
    told = httpx.post(f"{url}/detokenize", json={"tokens": [], "x" * 100_000: 1})
    assert told.json()["error"]["message"] == (
        f"unknown field '{'x' * 12}...{'x' * 13}'; the fields are model, tokens"
    )


def test_a_body_in_chunks_of_a_byte_is_read_little_by_little(url: str) -> None:
    body = json.dumps({"tokens": [72, 73] * 500}).encode()
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as line:
        line.sendall(b"POST /detokenize HTTP/1.1\r\nHost: x\r\nConnection: close\r\n")
        line.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        line.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        told = b"".join(iter(lambda: line.recv(1 << 16), b""))
    whole = httpx.post(f"{url}/detokenize", content=body)
    assert told.startswith(b"HTTP/1.1 200 OK")
    assert told.endswith(whole.content)


def test_a_connection_takes_so_much_at_a_time(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = serve()
    taken: list[int] = []
    receive = Connection.data_received

    def noted(self: Connection, data: bytes) -> None:
        taken.append(len(data))
        receive(self, data)

    monkeypatch.setattr(Connection, "data_received", noted)
    body = json.dumps({"prompt": "a" * 50_000}).encode()
    assert httpx.post(f"{url}/v1/completions", content=body).status_code == 400
    assert sum(taken) > 50_000
    assert max(taken) == READ_BYTES


def test_a_request_has_a_thousand_operations_at_the_most(url: str) -> None:
    one = {"context": "ctx-" + "a" * 22, "read": {}}
    told = httpx.post(f"{url}/v1/contexts/operations", json={"operations": [one] * 1025})
    assert "operations: List should have at most 1024 items" in told.json()["error"]["message"]
