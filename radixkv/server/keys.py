"""API keys: who may call, told apart in constant time."""

from __future__ import annotations

import hmac
from typing import Annotated

from fastapi import Depends, HTTPException, Request

from radixkv.server.service import Service


async def service_of(request: Request) -> Service:
    """The service that an application serves."""
    service: Service = request.app.state.service
    return service


async def api_key(request: Request, service: Annotated[Service, Depends(service_of)]) -> str | None:
    """The caller's key, None where none is asked for; 401 for who has none that is known."""
    keys = service.config.api_keys
    if not keys:
        return None
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # All are compared, each in constant time: how long it takes says nothing of how near it was.
    matches = [hmac.compare_digest(given.encode(), key.encode()) for key in keys]
    if scheme.lower() != "bearer" or not any(matches):
        raise HTTPException(
            401, "give a valid API key: Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"}
        )
    return given


async def page_key(request: Request, service: Annotated[Service, Depends(service_of)]) -> None:
    """For the page and metrics: 401 for who has no key, if they were told to ask for one."""
    if service.config.protect_page:
        await api_key(request, service)


TheService = Annotated[Service, Depends(service_of)]
ApiKey = Annotated[str | None, Depends(api_key)]
