"""The device lock: exclusive use of an engine's memory and device, one turn at a time."""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Agreed = Mapping[str, Any]
"""What a turn is about, as plain data for JSON."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """One use of the device.

    Attributes:
      name: the same in every process for the same turn, such as "step".
      propose: called when the turn has come, where it is decided; returns what is decided.
      prepare: called where that was decided by another process, before anything is computed. It
        raises where this process cannot do the same.
    """

    name: str
    propose: Callable[[], Agreed] = dict
    prepare: Callable[[Agreed], None] = lambda agreed: None


class DeviceLock:
    """Gives turns in the order of arrival, for one process.

    `jaxshare.serving.engine.agreement` has those for several processes, which must use their
    devices in the same order.

    Attributes:
      shared: whether other processes have the same turns.
      decides: whether this process decides what its turns are about.
    """

    shared, decides = False, True

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # A condition of its own for each thread that waits: the next one alone is woken.
        self._tickets: collections.deque[threading.Condition] = collections.deque()
        self._busy = False

    @contextlib.contextmanager
    def held(self, turn: Turn) -> Iterator[Agreed]:
        """Waits for the turn, and has it; gives what it is about."""
        with self._exclusive():
            yield turn.propose()

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        ticket = threading.Condition(self._lock)
        with self._lock:
            self._tickets.append(ticket)
            try:
                ticket.wait_for(lambda: not self._busy and self._tickets[0] is ticket)
                self._busy = True
            finally:
                # An interrupted wait must not block the later tickets.
                self._tickets.remove(ticket)
                self._wake_next()
        try:
            yield
        finally:
            with self._lock:
                self._busy = False
                self._wake_next()

    def _wake_next(self) -> None:
        if self._tickets and not self._busy:
            self._tickets[0].notify()

    def fail(self, error: Exception) -> None:
        """Ends the use of the device in all processes, after an error of this one."""
