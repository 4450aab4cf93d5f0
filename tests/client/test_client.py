"""The client: errors as they were, accidents on the way, and what waits for what."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from radixkv import EPHEMERAL, Retention, SamplingParams, errors
from radixkv.client import Client, Context
from radixkv.client.failures import BY_CODE, error_of
from radixkv.client.results import floats
from radixkv.client.wire import params_json, retention_json, salt_of
from radixkv.llm import LLM
from radixkv.server.failures import body_of
from radixkv.server.service import Service

Serve = Callable[..., tuple[str, Service]]
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def client(serve: Serve) -> Iterator[Client]:
    url, service = serve()
    with Client(url) as client:
        client.service = service  # type: ignore[attr-defined]
        yield client
        service.worker.llm.cache.check()
    assert len(service.contexts) == 0


def wait_until_idle(client: Client) -> LLM:
    service: Service = client.service  # type: ignore[attr-defined]
    deadline = time.monotonic() + 30
    while service.worker.num_unfinished:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return service.llm


# -- errors --------------------------------------------------------------------------------------


def test_errors_come_back_as_the_classes_they_were() -> None:
    stopped = errors.EngineStoppedError("a step failed")
    stopped.__cause__ = ValueError()
    for error in (
        stopped,
        errors.EngineStoppedError("shutting down"),
        errors.RequestError("a"),
        errors.PromptTooLongError("b"),
        errors.UnsupportedParameterError("c"),
        errors.ContextClosedError("d"),
        errors.ContextNotFoundError("e"),
        errors.ContextBusyError("f"),
        errors.JoinError("g"),
        errors.ContextError("h"),
        errors.GenerationCancelledError("i"),
        errors.TooManyContextsError("j"),
        errors.NumericalError("k"),
        errors.QueueFullError(5, 4),
    ):
        back = error_of(body_of(error)[1])
        assert type(back) is type(error)
        assert str(back) == str(error)
        assert {**vars(back)} == {**vars(error)}
    assert {type(error_of({"error": {"message": "x", "code": code}})) for code in BY_CODE} == set(
        BY_CODE.values()
    )
    back = error_of(body_of(ZeroDivisionError("secret"))[1])
    assert type(back) is errors.RadixKVError
    assert str(back) == "the server has failed: internal error"


def test_errors_of_a_program(client: Client) -> None:
    with client.context("abc") as context:
        for settings, kind in (
            ({"max_new_tokens": 1}, errors.UnsupportedParameterError),
            ({"max_tokens": 0}, errors.RequestError),
            ({"n": 2}, errors.UnsupportedParameterError),
        ):
            with pytest.raises(kind) as caught:
                context.generate(**settings).result()
            assert type(caught.value) is kind
        with pytest.raises(errors.RequestError, match="cannot be sent"):
            context.generate(stop=object())
        with pytest.raises(errors.RequestError, match="takes SamplingParams"):
            context.generate(7)
        with pytest.raises(errors.RequestError, match="at least 1"):
            context.fork(0)
        with pytest.raises(errors.RequestError, match="no text"):
            context.append(7)  # type: ignore[arg-type]
        with pytest.raises(errors.JoinError, match="must be"):
            context.join(context.fork(1), "worst")  # type: ignore[call-overload]
        with pytest.raises(errors.ContextError, match="no such checkpoint"):
            context.rollback()
        assert context.text == "abc"
    with pytest.raises(errors.ContextClosedError):
        context.append("x")
    with pytest.raises(errors.ContextClosedError):
        _ = context.text


def test_what_nobody_waited_for_is_raised_by_the_next_that_waits(client: Client) -> None:
    with client.context("abc") as context:
        one, two = context.fork(2)
        one.append([999])
        (child,) = one.fork(1)
        with pytest.raises(errors.RequestError, match="token id 999"):
            child.generate(**GREEDY).result()
        # The others go on, and so does the one, once it was told.
        assert len(two.generate(**GREEDY).token_ids) == 8
        with pytest.raises(errors.RequestError, match="token id 999"):
            one.generate(**GREEDY)
        assert len(one.generate(**GREEDY).token_ids) == 8
        context.append([999])
        with pytest.raises(errors.RequestError, match="token id 999"):
            context.generate(**GREEDY).result()
        assert context.text == "abc"


def test_what_nobody_ever_waited_for_is_raised_at_the_end(client: Client) -> None:
    with (
        pytest.raises(errors.RequestError, match="token id 999"),
        client.context("abc") as context,
    ):
        context.append([999])

    def fails() -> None:
        with client.context("abc") as context:
            context.append([999])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()


def test_limits_are_told(serve: Serve) -> None:
    url, service = serve(max_contexts=3, max_queued=1)
    with Client(url) as client, client.context("abc") as context:
        many = context.fork(3)
        with pytest.raises(errors.TooManyContextsError, match="1 of at most 3"):
            many[0].generate(**GREEDY).result()
        with pytest.raises(errors.TooManyContextsError):
            _ = context.text
        branches = context.fork(2)
        with pytest.raises(errors.QueueFullError) as caught:
            client.run([branch.generate(**GREEDY) for branch in branches])
        assert (caught.value.unfinished, caught.value.limit) == (0, 1)
        # What asks for no place was done.
        assert len(branches[0].generate(**GREEDY).token_ids) == 8
        assert context.text == "abc"
    assert len(service.contexts) == 0


# -- the line ------------------------------------------------------------------------------------


def test_no_server() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with Client(url) as client:
        context = client.context("abc")
        with pytest.raises(errors.ServerUnreachableError, match="no connection to"):
            context.generate().result()
        with pytest.raises(errors.ServerUnreachableError):
            asyncio.run(_await(context.generate()))
    with pytest.raises(errors.ServerUnreachableError, match="was closed"):
        client.context("abc").generate().result()
    for nonsense in ("nonsense", "http://"):
        with Client(nonsense) as client, pytest.raises(errors.ServerUnreachableError):
            client.context("abc").generate().result()


async def _await(pending: Any) -> Any:
    return await pending


def test_another_key_or_none(serve: Serve) -> None:
    url, _ = serve(api_keys=("right",))
    for key in (None, "wrong"):
        with (
            Client(url, api_key=key) as client,
            pytest.raises(errors.RequestError, match="valid API key"),
        ):
            client.context("abc").generate().result()
    with Client(url, api_key="right") as client, client.context("abc") as context:
        assert len(context.generate(**GREEDY).token_ids) == 8
    with (
        Client(f"{url}/elsewhere", api_key="right") as client,
        pytest.raises(errors.ServerUnreachableError, match="is it a radixkv server"),
    ):
        client.context("abc").generate().result()


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """A server that gives these answers, one a connection, and hangs up after each."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for answer in answers:
            line, _ = listener.accept()
            with line, line.makefile("rb") as sent:
                # All of it: who hangs up on what it has not read breaks the connection.
                headers = list(iter(sent.readline, b"\r\n"))
                length = next(one for one in headers if one.lower().startswith(b"content-length"))
                sent.read(int(length.split(b":")[1]))
                line.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread.join(10)
    listener.close()
    assert not thread.is_alive()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (b"", errors.ServerUnreachableError, "no connection"),
        (HEAD, errors.ServerUnreachableError, "ended before"),
        (
            HEAD + b'data: {"outcomes":[{"result":{}},{"running":true}]}\n\n'
            b'data: {"operation":1,"text":"a"}\n\n',
            errors.ServerUnreachableError,
            "ended before",
        ),
        (HEAD + b"data: {]\n\n", errors.RadixKVError, "not understood"),
        (HEAD + b'data: {"outcomes":[]}\n\n', errors.RadixKVError, "not understood"),
        (b"SSH-2.0\r\n", errors.ServerUnreachableError, "no connection"),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 3\r\n\r\nbad", errors.ServerUnreachableError, "502"),
    ],
)
def test_a_line_that_breaks(answer: bytes, kind: type[Exception], said: str) -> None:
    # The second one answers what is to be closed.
    with answering(answer, b"") as url, Client(url) as client:
        generation = client.context("abc").generate()
        with pytest.raises(kind, match=said) as caught:
            generation.result()
        assert type(caught.value) is kind
        assert "".join(generation._pieces) in ("", "a")


# -- cancelling ----------------------------------------------------------------------------------


def test_cancelling(client: Client) -> None:
    with client.context("abc") as context:
        generation = context.generate(**LONG)
        with pytest.raises(errors.ContextBusyError):
            context.append("x")
        pieces = iter(generation)
        next(pieces)
        generation.cancel()
        assert generation.done
        with pytest.raises(errors.GenerationCancelledError):
            generation.result()
        assert (context.text, context.generated, context.logprobs) == ("abc", "", ())
        score, other = context.score("x"), context.score("y")
        score.cancel()
        assert len(other.logprobs) == 1
        never_sent = context.generate(**LONG)
        never_sent.cancel()
        again = context.generate(**GREEDY)
        again.cancel()
        assert len(context.generate(**GREEDY).token_ids) == 8
        done = context.generate(**GREEDY)
        done.result()
        done.cancel()
        assert len(done.token_ids) == 8


def test_a_cancelled_task_cancels_its_generation(client: Client) -> None:
    async def program() -> None:
        with client.context("abc") as context:
            one, two = context.fork(2)
            lost = asyncio.create_task(_await(one.generate(**LONG)))
            kept = asyncio.create_task(_await(two.generate(**{**LONG, "max_tokens": 20})))
            await asyncio.sleep(0.01)
            lost.cancel()
            with pytest.raises(asyncio.CancelledError):
                await lost
            assert one.text == "abc"
            assert len((await kept).token_ids) == 20
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(_await(one.generate(**LONG)), timeout=0.02)
            assert one.text == "abc"

            async def read() -> None:
                async for _ in one.generate(**LONG):
                    reading.set()

            reading = asyncio.Event()
            reader = asyncio.create_task(read())
            await reading.wait()
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            assert one.text == "abc"

            async def fails() -> None:
                async with asyncio.TaskGroup() as group:
                    group.create_task(_await(one.generate(**LONG)))
                    await asyncio.sleep(0.01)
                    raise ZeroDivisionError

            with pytest.raises(ExceptionGroup):
                await fails()
            assert one.text == "abc"

    asyncio.run(program())
    assert wait_until_idle(client).stats().cache.sequences == 0


def test_a_client_that_is_closed_leaves_nothing(serve: Serve) -> None:
    url, service = serve()
    client = Client(url)
    context = client.context("abc")
    (branch,) = context.fork(1)
    running = branch.generate(**LONG)
    next(iter(running))
    client.close()
    with pytest.raises(errors.GenerationCancelledError):
        running.result()
    client.close()
    assert len(service.contexts) == 0
    assert service.llm.stats().cache.sequences == 0
    assert not [each for each in threading.enumerate() if each.name == "radixkv-client"]


def test_a_client_that_vanishes_leaves_what_time_takes(serve: Serve) -> None:
    url, service = serve(context_seconds=0.05)
    client = Client(url)
    context = client.context("abc")
    generation = context.generate(**LONG)
    next(iter(generation))
    client._link.close()  # No operation says good-bye.
    with pytest.raises(errors.ServerUnreachableError, match="was closed"):
        generation.result()
    deadline = time.monotonic() + 30
    # An expired context is gone at once; its blocks follow with the engine's next call.
    while service.worker.num_unfinished or service.llm.stats().cache.sequences:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert len(service.contexts) == 0


# -- waiting -------------------------------------------------------------------------------------


def test_streaming_in_several_event_loops(client: Client) -> None:
    async def read(context: Context) -> list[str]:
        (twin,) = context.fork(1)
        pieces, other = await asyncio.gather(_pieces(context), _await(twin.generate(**GREEDY)))
        assert "".join(pieces) == other.text
        return pieces

    async def _pieces(context: Context) -> list[str]:
        return [piece async for piece in context.generate(**GREEDY)]

    with client.context("abc") as context:
        assert len(asyncio.run(read(context))) > 1
        asyncio.run(read(context))
        assert len(context) == 3 + 16


def test_what_is_known_here_is_not_asked_for(client: Client) -> None:
    with client.context("abc") as context:
        context.generate(**GREEDY).result()
        sent: list[int] = []
        send = client._link.send

        def noted(calls: Any) -> None:
            sent.append(len(calls))
            send(calls)

        client._link.send = noted  # type: ignore[method-assign]
        assert len(context.logprobs) == 8
        assert context.generated
        assert sent == []
        assert context.text == context.text
        assert len(context) == len(context.tokens) == 11
        assert sent == [1]
        context.append("!")
        assert context.text[-1] == "!"
        assert sent == [1, 2]


def test_stats_are_the_servers(client: Client) -> None:
    with client.context("a" * 40, retention=EPHEMERAL, namespace="tenant") as context:
        context.generate(**GREEDY).result()
        assert context.stats.shared_blocks == 0
        (branch,) = context.fork(1)
        stats = context.stats
        assert (stats.num_tokens, stats.num_computed, stats.shared_blocks) == (48, 47, 3)
        branch.close()
        assert context.stats.own_blocks == 3


# -- on the wire ---------------------------------------------------------------------------------


def test_parameters_on_the_wire() -> None:
    params = SamplingParams(max_tokens=4, stop="a", logit_bias={3: 1.5}, seed=2**64 - 1)
    assert params_json(params, {"temperature": 0}) == {
        "max_tokens": 4,
        "stop": ["a"],
        "logit_bias": {"3": 1.5},
        "seed": 2**64 - 1,
        "temperature": 0,
    }
    assert salt_of("a") == salt_of(("a",)) == "a"
    assert salt_of("") is salt_of(()) is None
    assert salt_of(("a", "b")) != salt_of(("ab",))
    assert retention_json(EPHEMERAL) == "ephemeral"
    assert retention_json(Retention()) == retention_json(None) == "default"
    assert 9 < float(retention_json(Retention.for_seconds(10))) <= 10
    with pytest.raises(errors.RequestError, match="time to live alone"):
        retention_json(Retention(priority=3))
    assert floats([None, -1.5]) == (-math.inf, -1.5)
