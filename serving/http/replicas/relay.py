"""Answers of replicas on their way to clients; one that is lost before it has begun comes again."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Protocol

from starlette.types import Message, Send

from jaxshare.serving.http import sse
from jaxshare.serving.http.errors import ApiError
from jaxshare.serving.http.replicas.routes import ForwardedRequest, Route

_log = logging.getLogger("jaxshare.http")

MOST_DEATHS = 3
"""Replicas that may die over one request before it is given up: it may be what they die of."""


class ReplicaLostError(Exception):
    """The replica of a request has died, or cannot be reached."""


class ReplicaAnswers(Protocol):
    """The replicas as a relay sees them."""

    def answer(self, request: ForwardedRequest, route: Route) -> AsyncGenerator[list[Message]]:
        """Yields the messages of ASGI of the answer, some at a time.

        Raises:
          ReplicaLostError: the replica has died.
        """
        ...


class Relay:
    """Sends one answer to its client.

    An answer that is no stream is sent when all of it is there. A stream has begun with its first
    event: comments before it are sent, and change nothing.

    Args:
      request, route: of the client.
      send: of ASGI.
    """

    def __init__(self, request: ForwardedRequest, route: Route, send: Send):
        self._request, self._route, self._send = request, route, send
        self._is_stream = self._has_start = self._has_begun = self._is_done = False
        self._start: Message = {}
        self._body = b""

    async def run(self, replicas: ReplicaAnswers) -> None:
        """Sends the answer, of another replica where one dies before it has begun."""
        for death in range(1, MOST_DEATHS + 1):
            self._is_stream, self._body = False, b""
            try:
                answer = replicas.answer(self._request, self._route)
                async with contextlib.aclosing(answer) as all_messages:
                    async for messages in all_messages:
                        for message in messages:
                            await self._take(message)
                return None
            except ReplicaLostError as error:
                if self._is_done:
                    return None
                _log.warning("a replica is lost (%s)", error)
                if self._has_begun:
                    return await self.fail(
                        _lost("the replica that wrote this answer is lost; ask again")
                    )
                if death < MOST_DEATHS:
                    await asyncio.sleep(0.1 * death)
        await self.fail(
            _lost(f"{MOST_DEATHS} replicas were lost over this request; ask again, or another one")
        )

    async def fail(self, error: ApiError) -> None:
        """Ends the answer with an error: as an event where a stream has a start already."""
        made = error.response()
        self._is_stream, self._body = False, bytes(made.body)
        self._start = {
            "type": "http.response.start",
            "status": made.status_code,
            "headers": made.raw_headers,
        }
        await self._end()

    async def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            return
        part, more = message.get("body", b""), message.get("more_body", False)
        if not self._is_stream:
            self._body += part
            return None if more else await self._end()
        if part:
            await self._send_start()
            self._has_begun = self._has_begun or not part.startswith(b":")
            await self._send_part(part)
        if not more:
            await self._send_start()
            await self._send_part(b"", more=False)

    async def _end(self) -> None:
        """Sends an answer that is no stream; as an event where one has a start already."""
        if self._has_start:
            name = None if self._request.path.endswith("completions") else "error"
            self._body = sse_event(self._body, name) + sse.DONE
        await self._send_start()
        await self._send_part(self._body, more=False)

    async def _send_start(self) -> None:
        if not self._has_start:
            self._has_start = True
            await self._send(self._start)

    async def _send_part(self, part: bytes, *, more: bool = True) -> None:
        self._is_done = not more
        await self._send({"type": "http.response.body", "body": part, "more_body": more})


def sse_event(body: bytes, name: str | None) -> bytes:
    """Returns an event whose data is JSON as it is.

    Args:
      body: JSON in one line.
      name: of the event, or None.
    """
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + body + b"\n\n"


def _lost(message: str) -> ApiError:
    return ApiError(502, message, code="replica_lost", headers={"Retry-After": "1"})
