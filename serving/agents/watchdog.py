"""A watchdog over the code of agents: one that never waits would block the event loop for ever.

A thread looks now and then whether the same piece of code still runs: it warns, with the line, and
later ends the code by an error. Code in C, such as `time.sleep`, is ended once it comes back.
"""

import ctypes
import logging
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

from jaxshare.argument_checks import as_timeout
from jaxshare.serving.agents.errors import AgentError

PATIENCE = 10
"""The code is ended after so many times the seconds of the warning."""

_log = logging.getLogger("jaxshare.agents")


class InterruptedByWatchdog(BaseException):
    """Raised in an agent's code that runs for too long; no `except Exception` catches it."""


class Watchdog:
    """Watches the code of one runtime's agents.

    Attributes:
      seconds: of code between two waits, after which there is a warning; None for no watching.
    """

    def __init__(self, seconds: float | None):
        self.seconds = as_timeout("watchdog", seconds)
        if self.seconds is not None and self.seconds <= 0:
            raise ValueError(
                f"watchdog is {seconds}; give seconds above 0, or None to let agents run for ever"
            )
        self._lock = threading.Lock()
        # What runs: a list of its own with the agent; and that of a piece that is being ended.
        self._piece: list[Any] | None = None
        self._ended: list[Any] | None = None
        self._why = ""
        self._watched_thread = 0
        self._over = threading.Event()

    def start(self) -> None:
        """Begins to watch the thread that calls this."""
        self._watched_thread = threading.get_ident()
        if self.seconds is not None:
            threading.Thread(target=self._watch, daemon=True, name="jaxshare-watchdog").start()

    def stop(self) -> None:
        """Ends the watching."""
        self._over.set()

    def run(self, agent: Any, go: Callable[..., Any], value: Any, error: Any) -> Any:
        """Returns go(value, error), which runs the code of an agent.

        Raises:
          AgentError: the code was ended, since it has run for too long.
        """
        outer, piece = self._piece, [agent]
        self._piece = piece
        try:
            try:
                return go(value, error)
            finally:
                with self._lock:
                    self._piece = outer
                if self._ended is piece:  # and has caught the error, or gets it only now
                    _interrupt(self._watched_thread, None)
                    raise InterruptedByWatchdog
        except InterruptedByWatchdog as interrupted:
            with self._lock:
                self._piece = outer
            raise AgentError(self._why) from interrupted

    def _watch(self) -> None:
        seconds = self.seconds
        assert seconds is not None
        seen, since, began, is_warned = None, 0.0, 0.0, False
        while not self._over.wait(seconds / 4):
            piece, now = self._piece, time.monotonic()
            if piece is None or piece is not seen:
                seen, since, began, is_warned = piece, now, now, False
            elif now - since >= seconds * PATIENCE:
                self._end(piece, now - began)
                since = now  # it may catch the error and go on
            elif now - began >= seconds and not is_warned:
                is_warned = True
                where = _where(piece[0], sys._current_frames().get(self._watched_thread))
                _log.warning(
                    "%s has run for %.3g seconds without waiting, and everything else waits for it; "
                    "%s",
                    where,
                    now - began,
                    _REMEDY,
                )

    def _end(self, piece: list[Any], seconds: float) -> None:
        with self._lock:
            frame = sys._current_frames().get(self._watched_thread)
            if self._piece is not piece or frame is None or _is_debugged(frame):
                return
            self._why = (
                f"{_where(piece[0], frame)} was ended after {seconds:.3g} seconds without waiting; "
                f"{_REMEDY}, or give the runtime a larger `watchdog`"
            )
            self._ended = piece
            _interrupt(self._watched_thread, InterruptedByWatchdog)


_REMEDY = "await something in its loops, or make a tool of what takes long"


def _where(agent: Any, frame: types.FrameType | None) -> str:
    """The agent with the file and the line that its thread is in, for the start of a message."""
    while frame is not None and frame.f_code.co_filename != agent.file:
        frame = frame.f_back
    return f"agent {agent.name} in line {frame.f_lineno if frame else '?'} of {agent.file}"


def _is_debugged(frame: types.FrameType | None) -> bool:
    """True if a person looks at the code in Python's debugger."""
    while frame is not None:
        if frame.f_globals.get("__name__") in ("bdb", "pdb"):
            return True
        frame = frame.f_back
    return False


def _interrupt(thread: int, error: type[BaseException] | None) -> None:
    """Has a thread raise an error at its next step in Python; None takes that back."""
    given = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), given)
