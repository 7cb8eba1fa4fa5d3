"""The server's life: its socket, its warm-up, and its end, which lets running requests finish."""

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from jaxshare.serving.errors import ClosedError
from jaxshare.serving.http.app import create_app
from jaxshare.serving.http.limits import MAX_HEAD_BYTES
from jaxshare.serving.http.protocol import timed_protocol
from jaxshare.serving.http.settings import is_loopback

_log = logging.getLogger("jaxshare.http")

_BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 5
_LAST_SECONDS = 5
"""The time that answers have to be sent once their requests are cancelled."""


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to an address; port 0 takes a free one.

    Raises:
      ValueError: there is no such address, or it is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"--host {host} is no address here ({error}); try 127.0.0.1") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(
                f"--host {host} is no address of this machine; give 127.0.0.1, or 0.0.0.0 for all "
                "that it has"
            ) from error
        raise ValueError(
            f"{host} port {port} cannot be listened at ({error.strerror or error}); give another "
            "--port, or 0 for a free one"
        ) from error
    return made


def url_of(listening: socket.socket) -> str:
    """Returns the address of a socket as the start of a URL."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class DrainingServer(uvicorn.Server):
    """Serves an engine until it is told to end, and then what has begun.

    SIGTERM or SIGINT: new requests get 503, running ones have the time of `grace`; then they are
    cancelled. A second signal ends the server at once.

    Attributes:
      service: as given.
      on_start: called when it listens.
      on_warm: called when the engine is warm, or has failed to be; in another thread.
      on_drain: called when it takes no more requests.
      on_forced: called with a second signal, after which nothing is waited for any more.
    """

    def __init__(self, service: Any, listening: socket.socket, app: FastAPI | None = None):
        """Makes a server that does not listen yet.

        Args:
          service: a `Service`, or a `Front` before several.
          listening: a socket that is bound.
          app: what answers; by default all endpoints of `service`.
        """
        host = listening.getsockname()[0]
        app = app or create_app(service, is_local=is_loopback(host))
        config = uvicorn.Config(
            app,
            http=timed_protocol(service.settings.body_seconds),
            ws="none",
            lifespan="off",  # whose task would be cut off by a second signal
            loop="auto",  # uvloop where it is installed, which sends pieces of answers faster
            log_config=None,
            access_log=False,  # the application logs its own
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_LAST_SECONDS,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        super().__init__(config)
        self.service, self._listening = service, listening
        self._batches = getattr(app.state, "batches", None)
        self.on_start: Callable[[], None] = lambda: None
        self.on_warm: Callable[[], None] = lambda: None
        self.on_drain: Callable[[], None] = lambda: None
        self.on_forced: Callable[[int], None] = lambda sig: None
        self._is_draining = False
        self._deadline: float | None = None

    def serve_until_told(self, *, warm_up: bool = True) -> None:
        """Serves; returns when the server has ended. The engine is the caller's to shut down."""
        if warm_up:
            threading.Thread(target=self._warm_up, name="jaxshare-warm-up", daemon=True).start()
        else:
            self.service.is_warm = True
        try:
            self.run(sockets=[self._listening])
        finally:
            self.service.close()

    def drain(self) -> None:
        """Takes no more requests, and ends when those that run have finished; from any thread."""
        self._deadline = self._deadline or time.monotonic() + self.service.settings.grace
        self.service.is_draining = True

    def end(self) -> None:
        """Ends at once; from any thread."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal."""
        if self._deadline is None:
            return self.drain()
        self.service.cancel_all()
        self.should_exit = self.force_exit = True
        self.on_forced(sig)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen."""
        await super().startup(sockets)
        if self._batches is not None:
            self._batches.start()
        self.on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes what is open."""
        if self._batches is not None:
            await self._batches.stop()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Looks, every tenth of a second, whether the server may end."""
        if self._deadline is not None and not self._is_draining:
            self._is_draining = True
            self.on_drain()
        if self._deadline is not None and not self.should_exit:
            late = time.monotonic() >= self._deadline
            if late and not self.service.is_idle:
                _log.warning(
                    "requests (%d) and sessions that have not finished in time are ended",
                    self.service.num_running,
                )
                self.service.cancel_all()
            self.should_exit = late or self.service.is_idle
        return await super().on_tick(counter)

    def _warm_up(self) -> None:
        try:
            begin = time.monotonic()
            self.service.warm_up()
        except ClosedError:
            return
        except Exception:
            _log.exception("the engine could not be warmed up; requests compile what they need")
        else:
            _log.info("the engine is warm after %.1f seconds", time.monotonic() - begin)
        self.on_warm()
        self.service.is_warm = True
