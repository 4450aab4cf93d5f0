"""GET /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from radixkv.server.keys import TheService, page_key

router = APIRouter(tags=["health"])


@router.get("/metrics", dependencies=[Depends(page_key)])
async def metrics(service: TheService) -> Response:
    """All metrics, in Prometheus' text format."""
    snapshot = await service.observed.snapshot()
    return Response(await service.observed.metrics.render(snapshot), media_type=CONTENT_TYPE_LATEST)
