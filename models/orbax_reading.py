"""Reading with Orbax where reads may fail."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from jaxshare.models.config_fields import first_line

_READ_TIMEOUT = 60.0
"""Seconds to wait for pending reads when an event loop closes."""

_patching = threading.RLock()
"""Held while `asyncio.new_event_loop` is patched, so that each thread restores what it found."""


class _DrainingEventLoop(asyncio.SelectorEventLoop):
    """An event loop that waits for its pending tasks before it closes."""

    def close(self) -> None:
        tasks = set() if self.is_closed() else asyncio.all_tasks(self)
        if tasks:
            self.run_until_complete(asyncio.wait(tasks, timeout=_READ_TIMEOUT))
        super().close()


@contextlib.contextmanager
def waiting_for_reads() -> Iterator[None]:
    """Makes Orbax wait for its pending reads when one of them fails.

    Orbax closes its event loop at the first error while other reads still run. Each of those would
    later report an error of its own, when it ends or is garbage-collected.
    """
    with _patching:
        thread, original = threading.get_ident(), asyncio.new_event_loop
        asyncio.new_event_loop = lambda: (
            _DrainingEventLoop() if threading.get_ident() == thread else original()
        )
        try:
            yield
        finally:
            asyncio.new_event_loop = original


def root_cause(error: BaseException) -> str:
    """Returns the message of the first error in a chain.

    Orbax wraps TensorStore's errors in errors that name no more than the index of an array.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
