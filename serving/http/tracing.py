"""Spans of requests over HTTP, which continue the trace that a client's `traceparent` names."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxshare.serving.engine.tracing import OPERATION, RequestTracer
from jaxshare.serving.http import request_log
from jaxshare.serving.http.auth import is_open

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
}
"""The names of OpenTelemetry's semantic conventions for what endpoints do."""
_METHODS = {"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"}

Headers = Sequence[tuple[bytes, bytes]]


class Traced:
    """Makes a span of each request, but for those of probes; requests of the engine are in it.

    It has the names of OpenTelemetry's semantic conventions for HTTP, and no text of a request: not
    even a path that a client has made up.

    Args:
      app: that answers.
      tracer: see `RequestTracer`.
    """

    def __init__(self, app: ASGIApp, tracer: RequestTracer):
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"]):
            return await self._app(scope, receive, send)
        from opentelemetry import context, trace

        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        parent = _context_of(scope["headers"], scope["path"])
        span = self._tracer.tracer.start_span(
            method,
            parent,
            kind=trace.SpanKind.SERVER,
            attributes={"http.request.method": method, "url.scheme": scope["scheme"]},
        )

        async def traced(message: Message) -> None:
            if message["type"] == "http.response.start":
                _tell_answer(span, message)
            await send(message)

        before = context.attach(trace.set_span_in_context(span, parent))
        try:
            await self._app(scope, receive, traced)
        except Exception as error:
            span.set_attribute("error.type", type(error).__qualname__)
            span.set_status(trace.StatusCode.ERROR)
            raise
        finally:
            context.detach(before)
            if route := getattr(scope.get("route"), "path", ""):
                span.update_name(f"{method} {route}")
                span.set_attributes({"http.route": route, "url.path": scope["path"]})
            span.end()


def _tell_answer(span: Any, message: Message) -> None:
    """Writes the status of an answer, and the identity of its request, into a span."""
    from opentelemetry import trace

    span.set_attribute("http.response.status_code", message["status"])
    for name, value in message["headers"]:
        if name == request_log.HEADER:
            span.set_attribute("http.response.header.x-request-id", (value.decode(),))
    if message["status"] >= 500:
        span.set_attribute("error.type", str(message["status"]))
        span.set_status(trace.StatusCode.ERROR)


def _context_of(headers: Headers, path: str) -> Any:
    """The context that a request brings, with the name of its operation."""
    from opentelemetry import context, propagate

    texts = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    return context.set_value(OPERATION, _OPERATIONS.get(path), propagate.extract(texts))


def carried(tracer: RequestTracer | None) -> tuple[tuple[bytes, bytes], ...]:
    """Returns headers that take the current span to a replica; none where nothing is traced."""
    if tracer is None:
        return ()
    from opentelemetry import propagate

    found: dict[str, str] = {}
    propagate.inject(found)
    return tuple((name.encode(), value.encode()) for name, value in found.items())


@contextlib.contextmanager
def continued(tracer: RequestTracer | None, headers: Headers, path: str) -> Iterator[None]:
    """Has what runs in here belong to the span that `carried` has put into headers."""
    if tracer is None:
        yield
        return
    from opentelemetry import context

    before = context.attach(_context_of(headers, path))
    try:
        yield
    finally:
        context.detach(before)
