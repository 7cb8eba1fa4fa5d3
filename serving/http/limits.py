"""Limits of what a client sends: the size of a body, the time it takes, the hosts it may name."""

import asyncio
import ipaddress
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxshare.serving.http.auth import OPEN_PATHS
from jaxshare.serving.http.errors import ApiError

MAX_HEAD_BYTES = 64 * 1024
"""The most bytes of the head of a request."""


class BodyLimits:
    """Refuses heads that are too large (400), and bodies that are too large (413), too slow (408), or
    too much together (503).

    Args:
      app: that is asked.
      max_bytes: of a body.
      max_held_bytes: of all bodies whose requests are not answered yet.
      seconds: in which a body has to be there.
      streamed: the path of uploads, which are bounded where they are read.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, max_held_bytes: int, seconds: float, streamed: str
    ):
        self._app, self._max_bytes, self._seconds = app, max_bytes, seconds
        self._streamed = streamed
        self._max_held_bytes, self._held = max_held_bytes, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _head_bytes(scope) > MAX_HEAD_BYTES:
            return await _too_long_head().response()(scope, receive, send)
        if scope["type"] != "http" or scope["path"] == self._streamed:
            return await self._app(scope, receive, send)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or len(declared) > 18 or int(declared) > self._max_bytes:
            return await self._too_large().response()(scope, receive, send)
        held: list[int] = []
        try:
            body = await asyncio.wait_for(self._read(receive, held), self._seconds)
        except TimeoutError:
            self._held -= sum(held)
            return await self._too_slow().response()(scope, receive, send)
        except _BodyError as refused:
            self._held -= sum(held)
            return await refused.error.response()(scope, receive, send)
        try:
            if body is not None:
                await self._app(scope, _replayed(body, receive), send)
        finally:
            self._held -= sum(held)

    async def _read(self, receive: Receive, held: list[int]) -> bytes | None:
        """The whole body; None where the client has gone. `held` gets the sizes of its pieces."""
        parts = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            held.append(len(part))
            self._held += len(part)
            if sum(held) > self._max_bytes:
                raise _BodyError(self._too_large())
            if self._held > self._max_held_bytes:
                raise _BodyError(_too_much())
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)

    def _too_slow(self) -> ApiError:
        return ApiError(
            408,
            f"the body did not come within {self._seconds:g} seconds",
            code="timeout",
            headers={"Connection": "close"},
        )

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body has more than {self._max_bytes:,} bytes; send less, or start the server "
            "with a larger --max-body",
            code="body_too_large",
            headers={"Connection": "close"},
        )


class _BodyError(Exception):
    """A body is refused while it is read."""

    def __init__(self, error: ApiError):
        self.error = error


def _head_bytes(scope: Scope) -> int:
    """The bytes of a head; the parser bounds those alone that come in pieces."""
    line = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    return line + sum(len(name) + len(value) + 4 for name, value in scope["headers"])


def _too_long_head() -> ApiError:
    return ApiError(
        400,
        f"the head has more than {MAX_HEAD_BYTES:,} bytes; send less in its path and headers",
        code="head_too_large",
        headers={"Connection": "close"},
    )


def _too_much() -> ApiError:
    return ApiError(
        503,
        "the bodies of all open requests together are too large; try again in a moment",
        headers={"Retry-After": "1", "Connection": "close"},
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


class KnownHosts:
    """Refuses requests to other names than this machine's own and those that are allowed.

    A page of another site whose name is made to point at 127.0.0.1 could read the answers (DNS
    rebinding): its requests have its own name as the host. Probes, whose answers say nothing, may
    use any name.

    Args:
      app: that is asked.
      allowed: further names, in lower case and without ports, such as a proxy passes on.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str] = ()):
        self._app, self._allowed = app, frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            name = _host_of(dict(scope["headers"]).get(b"host", b""))
            if name not in self._allowed and not _is_local(name):
                return await _unknown_host(name).response()(scope, receive, send)
        await self._app(scope, receive, send)


def _unknown_host(name: str) -> ApiError:
    return ApiError(
        403,
        f"this server does not answer to the host {name[:256]!r}; call it as localhost or by its "
        "address, or start it with --allowed-host NAME for the name that a proxy passes on",
        code="host_not_allowed",
    )


def _host_of(header: bytes) -> str:
    """The name in a header Host, without its port."""
    host = header.decode("latin-1").strip().lower()
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _is_local(name: str) -> bool:
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
