"""Limits of what a client sends: the size of a body, the time it takes, the hosts it may name."""

import asyncio
import ipaddress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxshare.serving.http.errors import ApiError


class BodyLimits:
    """Refuses bodies that are too large (413) or too slow (408).

    Args:
      app: that is asked.
      max_bytes: of a body.
      seconds: in which it has to be there.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float):
        self._app, self._max_bytes, self._seconds = app, max_bytes, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared[:20]) > self._max_bytes:
            return await self._too_large().response()(scope, receive, send)
        try:
            body = await asyncio.wait_for(self._read(receive), self._seconds)
        except TimeoutError:
            error = ApiError(
                408, f"the body did not come within {self._seconds:g} seconds", code="timeout"
            )
            return await error.response()(scope, receive, send)
        except ApiError as error:
            return await error.response()(scope, receive, send)
        if body is not None:
            await self._app(scope, _replayed(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None where the client has gone."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size > self._max_bytes:
                raise self._too_large()
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body has more than {self._max_bytes:,} bytes; send less, or start the server "
            "with a larger --max-body",
            code="body_too_large",
            headers={"Connection": "close"},
        )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives the body first, and then what the client sends: that it has gone."""
    given = False

    async def next_message() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message


class LocalHosts:
    """Refuses requests to other names than this machine's own, for a server on a loopback address.

    A page of another site whose name is made to point at 127.0.0.1 could read the answers (DNS
    rebinding): its requests have its own name as the host.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_local(dict(scope["headers"]).get(b"host", b"")):
            error = ApiError(
                403, "this server is for this machine; call it as localhost or by its address"
            )
            return await error.response()(scope, receive, send)
        await self._app(scope, receive, send)


def _is_local(header: bytes) -> bool:
    host = header.decode("latin-1").strip().lower()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
