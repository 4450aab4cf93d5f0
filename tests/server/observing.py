"""An application with a route that generates, talked to in its own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from prometheus_client.parser import text_string_to_metric_families

from radixkv.decoding import SamplingParams
from radixkv.llm import LLM
from radixkv.server.app import create_app
from radixkv.server.config import ServerConfig
from radixkv.server.keys import TheService
from radixkv.server.service import Service

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)

router = APIRouter()


@router.post("/chat/{name}")
async def _chat(name: str, request: Request, service: TheService) -> dict[str, Any]:
    answer = await service.worker.submit(await request.body(), GREEDY)
    output = await answer.end()
    return {"text": output.text, "request_id": request.state.request_id}


@router.post("/stream")
async def _stream(request: Request, service: TheService) -> StreamingResponse:
    answer = await service.worker.submit(await request.body(), GREEDY)

    async def pieces() -> AsyncIterator[str]:
        async for piece in answer:
            yield piece.delta.text

    return StreamingResponse(pieces())


@router.get("/boom")
async def _boom() -> None:
    raise ZeroDivisionError


Use = Callable[[httpx.AsyncClient, Service], Awaitable[None]]


def with_app(llm: LLM, use: Use, **settings: Any) -> None:
    """Run ``use`` with a client of an application over the LLM."""

    async def main() -> None:
        settings.setdefault("log_stats_seconds", 0)
        service = Service(llm, ServerConfig(**settings))
        app = create_app(service)
        app.include_router(router)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            await use(client, service)

    asyncio.run(main())


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(client: httpx.AsyncClient) -> Samples:
    """All samples, by name and by labels other than the model's."""
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    samples: Samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name", "tiny") == "tiny"
            key = (sample.name.removeprefix("radixkv:"), tuple(sorted(labels.items())))
            assert key not in samples
            samples[key] = sample.value
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]
