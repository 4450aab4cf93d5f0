"""What is refused: with a status, a message that says why, and nothing lost behind it."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from clients import client_of

from radixkv.server.body import Body, documented
from radixkv.server.openai.chat import ChatBody
from radixkv.server.openai.completions import CompletionBody
from radixkv.server.service import Service

Serve = Callable[..., tuple[str, Service]]
TALK = [{"role": "user", "content": "hi"}]


@pytest.fixture
def url(serve: Serve) -> Iterator[str]:
    """A server that must be as it was, whatever it was asked for."""
    url, service = serve(num_blocks=16, max_body_bytes=100_000, max_n=8)
    yield url
    assert service.worker.num_unfinished == service.worker.num_reserved == 0
    told = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2})
    assert told.status_code == 200


def refused(url: str, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    told = httpx.post(url + path, content=content)
    assert told.status_code == status, told.text
    error: dict[str, Any] = told.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "Invalid JSON"),
        (b'{"prompt": ', "Invalid JSON"),
        (b'{"prompt": "\xff"}', "invalid unicode"),
        (b'{"prompt": "\\ud800"}', "Invalid JSON"),
        (b"[" * 5000, "Invalid JSON"),
        ([], "should be an object"),
        ({}, "prompt: Field required"),
        ({"promt": "a"}, "prompt: Field required; unknown field 'promt'; did you mean 'prompt'?"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "prompt: must be a text, token ids"),
        ({"prompt": [[]] * 5000}, "5000 prompts; 4096 are the most"),
        ({"prompt": [1, "a"]}, "prompt: must be a text, token ids"),
        ({"prompt": [[1], []]}, "the prompt is empty"),
        ({"prompt": [-1]}, "at least 0"),
        ({"prompt": [999]}, "outside the vocabulary of 259"),
        ({"prompt": [10**30]}, "outside the vocabulary of 259"),
        ({"prompt": "a", "temperature": -1}, "temperature must be a number in [0, inf)"),
        ({"prompt": "a", "temperature": "1"}, "temperature: Input should be a valid number"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature must be"),
        ({"prompt": "a", "n": True}, "n: Input should be a valid integer"),
        ({"prompt": "a", "n": 0}, "n must be an int of at least 1"),
        ({"prompt": "a", "n": 9}, "n may be at most 8"),
        ({"prompt": ["a"] * 9}, "9 prompts"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be an int of at least 1"),
        ({"prompt": "a", "logprobs": 21}, "less than or equal to 20"),
        ({"prompt": "a", "stop": [""]}, "stop must not hold an empty string"),
        ({"prompt": "a", "stop": ["x"] * 65}, "at most 64 items"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "'x' is no token id"),
        ({"prompt": "a", "logit_bias": {"1": 101}}, "each bias of logit_bias"),
        ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "at most 1024 items"),
        ({"prompt": "a", "guided_regex": "("}, "regex"),
        ({"prompt": "a", "guided_json": {"type": "nonsense"}}, "nonsense"),
        ({"prompt": "a", "guided_regex": "a", "guided_grammar": "b"}, "exclude each other"),
        ({"prompt": "a", "beam_width": 3}, "needs use_beam_search"),
        ({"prompt": "a", "use_beam_search": True, "beam_width": 2, "seed": 1}, "not sampled"),
        ({"prompt": "a", "store": True}, "nothing is stored"),
        ({"prompt": "a", "cache_retention": "long"}, "cache_retention: must be"),
        ({"prompt": "a", "cache_retention": 60}, "--eviction priority"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "needs stream"),
        ({"prompt": "a", "stream": True, "echo": True, "logprobs": 1}, "does not go with stream"),
        ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "does not go with stream"),
        ({"prompt": "a", "best_of": 2, "temperature": 0}, "same text each time"),
    ],
)
def test_what_is_wrong_is_400(url: str, body: Any, words: str) -> None:
    assert words in refused(url, "/v1/completions", body)["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": ["hi"]}, "messages.0: Input should be an object"),
        ({"messages": [{"content": "hi"}]}, "the role None"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "the role 'robot'"),
        ({"messages": [{"role": "user"}]}, "needs a 'content'"),
        ({"messages": [{"role": "user", "content": 5}]}, "must be a string or a list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "only parts of type 'text'",
        ),
        ({"messages": [{"role": "user", "content": "x", "mood": "y"}]}, "unknown field 'mood'"),
        ({"messages": TALK, "top_logprobs": 2}, "needs logprobs: true"),
        ({"messages": TALK, "max_tokens": 3, "max_completion_tokens": 4}, "give one"),
        ({"messages": TALK, "tool_choice": "required"}, "cannot be forced"),
        ({"messages": TALK, "tools": [{"type": "function"}]}, "tools[0] must be"),
        (
            {"messages": TALK, "tools": [{"type": "function", "function": {"name": "f"}}]},
            "tiny's chat template takes no notice of tools",
        ),
        (
            {"messages": TALK, "chat_template_kwargs": {"enable_thinking": False}},
            "takes no notice of enable_thinking",
        ),
        ({"messages": TALK, "response_format": {"type": "json_schema"}}, "json_schema is missing"),
        (
            {"messages": TALK, "response_format": {"type": "text", "schema": {}}},
            "unknown field 'schema'; did you mean 'json_schema'?",
        ),
    ],
)
def test_what_is_wrong_with_a_chat_is_400(url: str, body: Any, words: str) -> None:
    assert words in refused(url, "/v1/chat/completions", body)["message"]


@pytest.mark.parametrize(
    ("path", "field", "words"),
    [
        ("/v1/completions", "temprature", "did you mean 'temperature'?"),
        ("/v1/completions", "max_new_tokens", "did you mean 'max_tokens'?"),
        ("/v1/completions", "num_beams", "did you mean 'beam_width'?"),
        ("/v1/completions", "messages", "use /v1/chat/completions"),
        ("/v1/completions", "suffix", "not filled in"),
        ("/v1/chat/completions", "functions", "use tools"),
        ("/v1/chat/completions", "chat_template", "own template only"),
        ("/v1/chat/completions", "zzzz", "the fields are add_generation_prompt"),
        ("/tokenize", "text", "it is prompt"),
    ],
)
def test_unknown_fields_are_refused_by_name(url: str, path: str, field: str, words: str) -> None:
    body = {"prompt": "a"} if path != "/v1/chat/completions" else {"messages": TALK}
    error = refused(url, path, {**body, field: 1})
    assert words in error["message"]
    assert error["code"] == "unsupported_parameter"


def test_of_many_unknown_fields_a_few_are_named(url: str) -> None:
    told = refused(url, "/v1/completions", {"prompt": "a", **{f"temp{i}": 1 for i in range(5000)}})
    assert told["message"].count("unknown field") == 4


def test_of_a_long_list_the_first_fault_is_told(url: str) -> None:
    told = refused(url, "/detokenize", {"tokens": [1, *["a"] * 10_000]})
    assert told["message"] == "tokens.1: Input should be a valid integer"


def test_routes_that_are_not_there(url: str) -> None:
    for path, method, status in (("/v1/chat", "POST", 404), ("/v1/completions", "GET", 405)):
        told = httpx.request(method, url + path)
        assert told.status_code == status
        assert (
            told.json()["error"]["message"]
            == f"there is no {method} {path} here; see /openapi.json"
        )


def test_what_can_never_fit_is_400_with_the_reason(url: str) -> None:
    long = refused(url, "/v1/completions", {"prompt": "a" * 512})
    assert long["code"] == "context_length_exceeded"
    assert "model's context of 512" in long["message"]
    large = refused(url, "/v1/completions", {"prompt": "a" * 100, "max_tokens": 200})
    assert large["code"] == "context_length_exceeded"
    assert "the pool has 16" in large["message"]
    hopeless = refused(url, "/v1/completions", {"prompt": "a" * 50_000})
    assert "50000 characters" in hopeless["message"]


def test_large_bodies_are_413(url: str) -> None:
    body = json.dumps({"prompt": "a" * 200_000}).encode()
    assert "larger than this server takes" in refused(url, "/tokenize", body, 413)["message"]

    def parts() -> Iterator[bytes]:
        for _ in range(20):
            yield body[:10_000]

    told = httpx.post(f"{url}/v1/completions", content=parts())
    assert told.status_code == 413
    assert told.json()["error"]["type"] == "invalid_request_error"


def test_bodies_are_not_unpacked(url: str) -> None:
    packed = gzip.compress(b'{"prompt": "a"}')
    told = httpx.post(f"{url}/v1/completions", content=packed, headers={"Content-Encoding": "gzip"})
    assert told.status_code == 415
    assert told.json()["error"]["message"] == "bodies in 'gzip' are not taken; send JSON"
    plain = {"Content-Encoding": "identity"}
    body = {"prompt": "a", "max_tokens": 1}
    assert httpx.post(f"{url}/v1/completions", json=body, headers=plain).status_code == 200


@pytest.mark.parametrize(("salt", "words"), [("", "at least 1"), ("a" * 257, "at most 256")])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "a"}), ("/v1/contexts", {"content": "a"})]
)
def test_salts_are_the_same_everywhere(
    url: str, path: str, body: dict[str, Any], salt: str, words: str
) -> None:
    told = refused(url, path, body | {"cache_salt": salt})
    assert (told["param"], words in told["message"]) == ("cache_salt", True)


def test_a_body_that_does_not_come_is_408(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.server.body.BODY_SECONDS", 0.1)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        assert line.recv(64).startswith(b"HTTP/1.1 408 ")


def test_errors_have_the_classes_of_openais_client(serve: Serve) -> None:
    url, service = serve(api_keys=("secret",), max_queued=1)
    with client_of(url, api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError, match="valid API key"):
            client.models.list()
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model="tiny", messages=[])
    with client_of(url, api_key="secret") as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="gpt-4", prompt="a")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("org/other")
        with pytest.raises(openai.BadRequestError, match="temperature must be") as wrong:
            client.completions.create(model="tiny", prompt="a", temperature=-1)
        assert wrong.value.type == "invalid_request_error"
        with pytest.raises(openai.RateLimitError, match="1 requests are unfinished") as busy:
            client.completions.create(model="tiny", prompt=["a", "b"])
        assert busy.value.response.headers["retry-after"] == "1"
        assert service.worker.num_unfinished == 0


def test_the_queue_is_full_for_who_waits_to_be_read_too(serve: Serve) -> None:
    _, service = serve(max_queued=2)
    with service.worker.reserved(2), pytest.raises(Exception, match="2 of at most 2"):
        service.worker.check_open()
    service.worker.check_open(2)


@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
def test_the_document_has_every_field(body: type[Body], url: str) -> None:
    path = "/v1/chat/completions" if body is ChatBody else "/v1/completions"
    told = httpx.get(f"{url}/openapi.json").json()["paths"][path]["post"]["requestBody"]
    schema = told["content"]["application/json"]["schema"]
    assert set(schema["properties"]) == set(body.model_fields)
    assert schema["additionalProperties"] is False
    assert "$ref" not in json.dumps(documented(body))
