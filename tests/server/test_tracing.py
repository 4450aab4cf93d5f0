"""Traces: a request's spans, in memory."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import httpx
from observing import with_app
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import radixkv.server
from radixkv.server.service import Service
from radixkv.server.tracing import Tracing

PROMPT = b"once upon a time"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def spans_of(make_llm, use):
    """Spans by name, of what ``use`` does."""
    exporter = InMemorySpanExporter()
    tracing = Tracing("tiny", exporter)

    async def main(client: httpx.AsyncClient, service: Service) -> None:
        service.observed.reporters.append(tracing.report)
        await use(client, service)

    with_app(make_llm(64), main)
    tracing._provider.force_flush()
    spans = exporter.get_finished_spans()
    tracing.close()
    return spans


def test_a_request_is_a_trace_with_its_phases(make_llm) -> None:
    async def use(client: httpx.AsyncClient, service: Service) -> None:
        await client.post("/chat/x", content=PROMPT)
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
        await client.post("/chat/x", content=PROMPT, headers=headers)

    spans = spans_of(make_llm, use)
    assert len(spans) == 10
    ours = {span.name: span for span in spans if format(span.context.trace_id, "032x") == TRACE}
    assert set(ours) == {"POST /chat/{name}", "chat tiny", "queue", "prefill", "decode"}
    request, run = ours["POST /chat/{name}"], ours["chat tiny"]
    assert format(request.parent.span_id, "016x") == PARENT
    assert request.kind is SpanKind.SERVER
    assert dict(request.attributes) == {
        "http.request.method": "POST",
        "http.route": "/chat/{name}",
        "http.response.status_code": 200,
        "url.path": "/chat/x",
        "radixkv.request_id": "mine",
    }
    assert run.parent.span_id == request.context.span_id
    attributes = dict(run.attributes)
    assert attributes.pop("gen_ai.response.id").startswith("request-")
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "radixkv",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.choice.count": 1,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 16,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "gen_ai.usage.output_tokens": 12,
        "radixkv.preemptions": 0,
    }
    phases = [ours[name] for name in ("queue", "prefill", "decode")]
    assert all(phase.parent.span_id == run.context.span_id for phase in phases)
    times = [run.start_time, phases[0].start_time]
    for phase in phases:
        times += [phase.start_time, phase.end_time]
    times += [run.end_time]
    assert times == sorted(times)
    assert phases[0].end_time == phases[1].start_time
    assert phases[1].end_time == phases[2].start_time
    assert request.start_time <= run.start_time
    assert run.end_time <= request.end_time
    assert request.resource.attributes["service.name"] == "radixkv"


def test_an_error_is_marked_and_a_bad_parent_is_none(make_llm) -> None:
    async def use(client: httpx.AsyncClient, service: Service) -> None:
        await client.get("/boom", headers={"traceparent": "nonsense"})
        await client.get("/nothing")

    boom, nothing = spans_of(make_llm, use)
    assert (boom.name, boom.parent) == ("GET /boom", None)
    assert boom.status.status_code is StatusCode.ERROR
    assert (nothing.name, nothing.attributes["http.response.status_code"]) == ("GET unmatched", 404)
    assert nothing.status.status_code is StatusCode.UNSET


def test_traces_go_where_they_are_told_over_http(make_llm, monkeypatch) -> None:
    received: list[bytes] = []

    async def use(client: httpx.AsyncClient, service: Service) -> None:
        await client.get("/health")

    async def collector(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(collector, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        llm = make_llm(64)
        async with server:
            await asyncio.to_thread(with_app, llm, use, otlp_endpoint=f"http://127.0.0.1:{port}")

    asyncio.run(main())
    assert received[0].startswith(b"POST /v1/traces HTTP/1.1")


def test_only_who_is_asked_for_imports_what_is_optional() -> None:
    optional = {"opentelemetry", "zmq", "msgspec"}
    allowed = {"tracing.py": {"opentelemetry"}, "kv_events.py": optional, "kv_wire.py": optional}
    for path in sorted(Path(radixkv.server.__file__).parent.rglob("*.py")):
        at_once = ast.parse(path.read_text(encoding="utf-8")).body
        names = set()
        for node in at_once:
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
        assert not {name.split(".")[0] for name in names} & (
            optional - allowed.get(path.name, set())
        ), path
        if path.name not in allowed:
            assert not {f"radixkv.server.{name[:-3]}" for name in allowed} & names, path
