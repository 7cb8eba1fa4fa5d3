"""GET /v1/engine/stats and /v1/engine/cache: what the engine does, and what is in its memory."""

import asyncio
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxshare.serving.http import sse
from jaxshare.serving.http.answers import json_response, service_of
from jaxshare.serving.http.errors import ApiError
from jaxshare.serving.http.observer import Observer

_SECONDS = 0.5
"""Seconds between two events of a stream."""

router = APIRouter()


def _observer(request: Request) -> Observer:
    return request.app.state.observer


@router.get("/v1/engine/stats", tags=["engine"])
async def stats(request: Request, stream: bool = False) -> Response:
    """Tells rows, queue, tokens a second, hit rate and memory; with `stream` twice a second."""
    service, observer = service_of(request), _observer(request)
    if not stream:
        return json_response(await observer.stats())

    async def events() -> AsyncGenerator[bytes]:
        while not service.is_draining:
            try:
                yield sse.event(await observer.stats(), "stats")
            except ApiError as error:
                yield sse.event(error.body(), "error")
                break
            await asyncio.sleep(_SECONDS)
        yield sse.DONE

    seconds = service.settings.stall_seconds
    return sse.EventStream(events(), seconds, on_gone=service.client_gone, on_end=lambda: None)


@router.get("/v1/engine/cache", tags=["engine"])
async def cache(request: Request) -> Response:
    """Tells which runs of tokens are cached, where they are, and how many requests read them."""
    return json_response(await _observer(request).cache())
