"""Server-sent events, and clients that go away while something is computed for them."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxshare.serving.http.errors import ClientGoneError, api_error

_log = logging.getLogger("jaxshare.http")

DONE = b"data: [DONE]\n\n"
"""The end of a stream of chunks."""
KEEP_ALIVE = b": waiting\n\n"
"""A comment, which clients leave out, so that proxies do not take a connection for a dead one."""
_KEEP_ALIVE_SECONDS = 15.0
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def event(data: Any, name: str | None = None) -> bytes:
    """Returns an event with JSON as its data, which has no line break in it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {text}\n\n".encode("utf-8", "replace")


async def disconnected(receive: Receive) -> None:
    """Waits until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone[Value](
    work: Awaitable[Value], *ends: Awaitable[None], seconds: float | None = None
) -> Value:
    """Awaits a value as long as the client is there.

    Args:
      work: cancelled where the client goes away or the time is over.
      ends: each of which returns when the client has gone, such as `disconnected`.
      seconds: the most that it may take; None for no limit.

    Raises:
      ClientGoneError: the client has gone.
      TimeoutError: it took too long.
    """
    task = asyncio.ensure_future(work)
    watchers = [asyncio.ensure_future(end) for end in ends]
    try:
        done, _ = await asyncio.wait(
            {task, *watchers}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if task in done:
            return task.result()
        raise ClientGoneError if done else TimeoutError
    finally:
        for each in (task, *watchers):
            each.cancel()
        await asyncio.wait({task, *watchers})
        for each in (task, *watchers):
            if not each.cancelled():
                each.exception()  # looked at, so that asyncio does not report it


class EventStream(Response):
    """An answer of events, which ends with its client.

    Args:
      events: the bytes of each; closed where the client goes away, or takes nothing for
        `stall_seconds`.
      stall_seconds: see there.
      on_gone: called where the client did not wait for the end.
      on_end: called at the end, however it came.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        stall_seconds: float,
        *,
        on_gone: Callable[[], None],
        on_end: Callable[[], None],
    ):
        super().__init__(headers=_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events, self._stall_seconds = events, stall_seconds
        self._on_gone, self._on_end = on_gone, on_end
        self._is_sending, self._last = False, time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(self._write(send), disconnected(receive), self._tend(send))
        except (ClientGoneError, OSError):
            self._on_gone()
        finally:
            self._on_end()

    async def _write(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await self._send(send, {"type": "http.response.start", **start})
        async with contextlib.aclosing(self._events) as events:
            try:
                async for part in events:
                    await self._send_part(send, part)
            except (OSError, asyncio.CancelledError):
                raise
            except Exception as error:  # the status is sent already
                _log.error("a stream has failed", exc_info=error)
                await self._send_part(send, event(api_error(error).body(), "error"))
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_part(self, send: Send, part: bytes) -> None:
        await self._send(send, {"type": "http.response.body", "body": part, "more_body": True})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        self._is_sending, self._last = True, time.monotonic()
        await send(message)
        self._is_sending, self._last = False, time.monotonic()

    async def _tend(self, send: Send) -> None:
        """Sends comments while there are no events; returns when the client takes nothing."""
        # One task that looks now and then, because a timer for each event would cost more.
        pause = min(_KEEP_ALIVE_SECONDS, self._stall_seconds) / 4
        while True:
            await asyncio.sleep(pause)
            idle = time.monotonic() - self._last
            if self._is_sending and idle >= self._stall_seconds:
                return
            if not self._is_sending and idle >= _KEEP_ALIVE_SECONDS:
                await self._send_part(send, KEEP_ALIVE)
