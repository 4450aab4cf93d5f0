"""GET /v1/models."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from radixkv.errors import ModelNotFoundError
from radixkv.server.keys import ApiKey, TheService
from radixkv.server.service import Service

router = APIRouter(tags=["openai"])
STARTED = int(time.time())


def check_model(service: Service, name: str | None) -> None:
    """Refuse a model that is not the one being served; None stands for it."""
    if name is not None and name != service.model_name:
        raise ModelNotFoundError(
            f"the model {name!r} does not exist here; this server has {service.model_name!r}"
        )


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": STARTED,
        "owned_by": "radixkv",
        "root": service.llm.loaded.name,
        "parent": None,
        "max_model_len": service.llm.engine.max_model_len,
    }


@router.get("/v1/models")
async def models(service: TheService, key: ApiKey) -> dict[str, Any]:
    """The one model that is served."""
    return {"object": "list", "data": [_card(service)]}


@router.get("/v1/models/{name:path}")
async def model(service: TheService, key: ApiKey, name: str) -> dict[str, Any]:
    """The same by its name."""
    check_model(service, name)
    return _card(service)
