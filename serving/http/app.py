"""The application: all endpoints, and what every request goes through."""

import logging
import time
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxshare import __version__
from jaxshare.serving.engine.tracing import RequestTracer
from jaxshare.serving.http import errors, request_log
from jaxshare.serving.http.auth import ApiKeys, is_open
from jaxshare.serving.http.batches.running import Batches
from jaxshare.serving.http.endpoints import (
    adapters,
    batches,
    chat,
    completions,
    engine,
    files,
    models,
    page,
    responses,
    tokens,
    trees,
    weights,
    workers,
)
from jaxshare.serving.http.endpoints.response_store import ResponseStore
from jaxshare.serving.http.endpoints.tree_store import TreeStore
from jaxshare.serving.http.limits import BodyLimits, KnownHosts
from jaxshare.serving.http.metrics import HttpMetrics
from jaxshare.serving.http.observer import Observer
from jaxshare.serving.http.service import Service
from jaxshare.serving.http.settings import ServerSettings
from jaxshare.serving.http.tracing import Traced

log = logging.getLogger("jaxshare.http")

_GONE = 499
"""The status of requests whose clients have gone before there was one."""
_PARTS = (
    *(page, models, completions, chat, responses, tokens, workers, engine, trees, files, batches),
    adapters,
    weights,
)
NO_TELEMETRY: Any = dict.fromkeys(("tracing", "metrics", "logs", "operation_spans"), False)
"""FastAPI would make spans of its own, with the messages of errors in them; see `Traced`."""
ROUTERS = tuple(part.router for part in _PARTS)
"""The endpoints of a server."""
_ERROR = {
    "description": "An error in OpenAI's shape",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type", "param", "code"],
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": ["string", "null"]},
                        },
                    }
                },
            }
        }
    },
}


def create_app(service: Service, *, is_local: bool = False) -> FastAPI:
    """Makes the application.

    Args:
      service: that its endpoints share.
      is_local: it listens on a loopback address, so that requests name this machine.
    """
    app = create_endpoints(service)
    guard(app, service.settings, service.metrics, is_local=is_local, tracer=service.tracer)
    return app


def create_endpoints(service: Service) -> FastAPI:
    """Makes the application without what stands before it: keys, limits and counters.

    Args:
      service: that its endpoints share.
    """
    app = FastAPI(
        title="jaxshare",
        version=__version__,
        docs_url=None,  # these pages load programs from elsewhere
        redoc_url=None,
        responses={"default": _ERROR},
        telemetry=NO_TELEMETRY,
    )
    app.state.service = service
    settings = service.settings
    app.state.responses = ResponseStore(settings.max_responses, settings.max_response_bytes)
    files = service.files
    app.state.batches = files and Batches(service, app.state.responses, files)
    app.state.observer, app.state.trees = Observer(service), TreeStore()
    errors.add_handlers(app)
    for router in ROUTERS:
        app.include_router(router)
    return app


def guard(
    app: FastAPI,
    settings: ServerSettings,
    metrics: HttpMetrics,
    *,
    is_local: bool,
    tracer: RequestTracer | None = None,
) -> None:
    """Puts keys, limits, counters and traces before an application.

    Args:
      app: that requests come to.
      settings: with the keys and the limits.
      metrics: that count the requests.
      is_local: see `create_app`.
      tracer: makes spans of the requests, or None.
    """
    # The last one that is added sees a request first.
    app.add_middleware(
        BodyLimits,
        max_bytes=settings.max_body_bytes,
        max_held_bytes=settings.max_held_bytes,
        seconds=settings.body_seconds,
        streamed=files.PATH,
    )
    app.add_middleware(ApiKeys, keys=settings.api_keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type"],
        )
    if is_local or settings.allowed_hosts:
        app.add_middleware(KnownHosts, allowed=settings.allowed_hosts)
    app.add_middleware(_Counted, metrics=metrics, most=settings.max_open)
    if tracer is not None:
        app.add_middleware(Traced, tracer=tracer)


class _Counted:
    """Counts requests, and logs each by its endpoint, its status and its time; never by its text.

    Answers have an `x-request-id`, the request's own or a new one, which is in the log. Requests that come while `most` are open get
    503, but for those of probes.
    """

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, most: int):
        self._app, self._metrics, self._most = app, metrics, most
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status, begin = _GONE, time.perf_counter()
        identity = request_log.begin_request(scope["headers"])

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (request_log.HEADER, identity.encode())]
            await send(message)

        self._metrics.begun()
        self._open += 1
        try:
            if self._open > self._most and not is_open(scope["path"]):
                await _too_many().response()(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        except Exception:
            status = 500
            raise
        finally:
            self._open -= 1
            path, seconds = _path_of(scope), time.perf_counter() - begin
            self._metrics.ended(path, status, seconds)
            client = (scope.get("client") or (None,))[0]
            facts = {"client": client, **request_log.noted()}
            fields = {"path": path, "status": status, "seconds": round(seconds, 6)}
            log.info(
                "%s %s: %d after %.3f s (%s) %s",
                *(scope["method"], path, status, seconds, identity),
                " ".join(f"{name}={value}" for name, value in facts.items()),
                extra={"fields": {"method": scope["method"], **fields, **facts}},
            )


def _too_many() -> errors.ApiError:
    return errors.ApiError(
        503,
        "as many requests are open as may be; try again in a moment",
        code="too_many_requests",
        headers={"Retry-After": "1"},
    )


def _path_of(scope: Scope) -> str:
    """The path of an endpoint as it is written here; paths that clients make up are all one."""
    route = scope.get("route")
    if route is None:  # it was refused before
        routes = (each for router in ROUTERS for each in router.routes)
        route = next((each for each in routes if each.matches(scope)[0] is not Match.NONE), None)
    return getattr(route, "path", "other")
