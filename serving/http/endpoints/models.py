"""GET /v1/models, and what tells of the server: its health, its version, its counters."""

from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from jaxshare import __version__
from jaxshare.serving.http.answers import json_response, service_of
from jaxshare.serving.http.service import Service

router = APIRouter()


@router.get("/v1/models", tags=["OpenAI"])
async def list_models(request: Request) -> Response:
    """Lists the names of the model, and its adapters."""
    service = service_of(request)
    names = *service.settings.model_names, *service.adapter_names
    return json_response({"object": "list", "data": [_model(service, name) for name in names]})


@router.get("/v1/models/{name:path}", tags=["OpenAI"])
async def retrieve_model(name: str, request: Request) -> Response:
    """Describes the model under one of its names, or an adapter."""
    service = service_of(request)
    return json_response(_model(service, service.check_model(name)))


def _model(service: Service, name: str) -> dict[str, Any]:
    parent = service.settings.model_names[0]
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "jaxshare",
        "max_model_len": service.engine.max_request_tokens,
        **({"parent": parent} if service.adapter_for(name) else {}),
    }


@router.head("/health", include_in_schema=False)
@router.get("/health", tags=["server"])
async def health() -> Response:
    """Tells that the process answers."""
    return json_response({"status": "ok"})


@router.head("/ready", include_in_schema=False)
@router.get("/ready", tags=["server"])
async def ready(request: Request) -> Response:
    """Tells whether requests are served at once: 200, or 503 before and after."""
    service = service_of(request)
    status = "draining" if service.is_draining else "ready" if service.is_warm else "warming up"
    return json_response({"status": status}, 200 if status == "ready" else 503)


@router.get("/version", tags=["server"])
async def version() -> Response:
    """Tells the version of jaxshare."""
    return json_response({"version": __version__})


@router.get("/metrics", tags=["server"])
async def metrics(request: Request) -> Response:
    """Tells the counters of the engine and of the server, for Prometheus."""
    service = service_of(request)
    registries = service.engine.metrics.registry, service.metrics.registry
    text = b"".join(map(generate_latest, registries))
    return Response(text, media_type=CONTENT_TYPE_LATEST)
