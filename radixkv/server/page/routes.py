"""The page, and what it asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import FileResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles

from radixkv.server.keys import page_key
from radixkv.server.page.feed import Feed
from radixkv.server.service import Service

STATIC = Path(__file__).parent / "static"

# The page runs its own scripts, speaks with its own server, and is shown in no other page.
HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}

# Not in the document of the API: these are the page's own, and change with it.
router = APIRouter(include_in_schema=False)


def install(app: FastAPI, service: Service) -> None:
    """Serve the page, and look on from now on; before the service's worker is started."""
    app.state.feed = Feed(service)
    app.include_router(router)
    app.mount("/page/static", StaticFiles(directory=STATIC), name="page")


async def feed_of(request: Request) -> Feed:
    """The application's feed."""
    feed: Feed = request.app.state.feed
    return feed


TheFeed = Annotated[Feed, Depends(feed_of)]
Protected = [Depends(page_key)]


@router.get("/")
async def page() -> FileResponse:
    """The page; it shows nothing before its feed does, and that may ask for a key."""
    return FileResponse(STATIC / "index.html", headers=HEADERS)


@router.get("/page/feed", dependencies=Protected)
async def watch(feed: TheFeed) -> StreamingResponse:
    """What is seen on the page, as server-sent events."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(feed.watch(), media_type="text/event-stream", headers=headers)


@router.get("/page/nodes/{serial}", dependencies=Protected)
async def node(serial: int, feed: TheFeed) -> dict[str, Any] | None:
    """The tokens of one node; null if it has just gone, which is no fault of who asked."""
    return await feed.spell_node(serial)
