"""HTTP connections whose requests have to come in time."""

import asyncio
import functools
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedProtocol(H11Protocol):
    """Closes a connection whose client does not send the head of a request within a time.

    uvicorn closes connections that say nothing between two requests, but waits for ever for the
    first one, and for the rest of a head that has begun.
    """

    def __init__(self, head_seconds: float, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self._head_seconds = head_seconds
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts to wait for the first head."""
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Takes bytes; waits for the rest of a head, or for none."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._wait_for_head()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def timed_protocol(head_seconds: float) -> Any:
    """Returns what makes the protocol of a connection.

    Args:
      head_seconds: that a head may take.
    """
    return functools.partial(TimedProtocol, head_seconds)
