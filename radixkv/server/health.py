"""Whether the server lives, whether it takes requests, and what it is."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

import radixkv
from radixkv.server.keys import TheService

router = APIRouter(tags=["health"])


@router.get("/health")
async def health(service: TheService) -> JSONResponse:
    """200 while the engine takes steps, 503 once it has stopped."""
    alive = service.worker.alive
    return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)


@router.get("/ready")
async def ready(service: TheService) -> JSONResponse:
    """200 if a request would be taken now."""
    service.worker.check_open()
    return JSONResponse({"status": "ready"})


@router.get("/version")
async def version() -> dict[str, str]:
    """The server's version."""
    return {"version": radixkv.__version__}
