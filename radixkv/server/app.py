"""create_app: the application, of routers that each do one thing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

import radixkv
from radixkv.server import failures, health, tree
from radixkv.server.contexts import routes as contexts
from radixkv.server.limits import BodyLimit
from radixkv.server.metrics import route as metrics
from radixkv.server.openai import chat, completions, models, tokens
from radixkv.server.page import routes as page
from radixkv.server.record import Records
from radixkv.server.service import Service


def create_app(service: Service) -> FastAPI:
    """An ASGI application over a service, which starts and ends with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="radixkv",
        version=radixkv.__version__,
        lifespan=lifespan,
        # FastAPI's pages for it load their scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    failures.install(app)
    app.add_middleware(BodyLimit, most=service.config.max_body_bytes)
    app.include_router(health.router)
    app.include_router(metrics.router)
    app.include_router(contexts.router)
    app.include_router(tree.router)
    page.install(app, service)
    for module in (chat, completions, models, tokens):
        app.include_router(module.router)
    app.add_middleware(Records, reporters=service.observed.reporters)  # The last is the outermost.
    return app
