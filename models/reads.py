"""What Orbax reads, read to its end also where it fails."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from jaxshare.models.fields import first_line

_PATIENCE = 60.0
"""Seconds that reads under way are waited for."""
_one_at_a_time = threading.RLock()


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that does not close before its tasks have ended."""

    def close(self) -> None:
        tasks = set() if self.is_closed() else asyncio.all_tasks(self)
        if tasks:
            self.run_until_complete(asyncio.wait(tasks, timeout=_PATIENCE))
        super().close()


@contextlib.contextmanager
def ended_reads() -> Iterator[None]:
    """Where Orbax is to restore something: a read that fails leaves no others under way.

    Orbax closes its event loop at the first error while other reads still run, and each of those
    then complains by itself, after the error that says what is wrong, at whatever moment it ends or
    is collected.
    """
    with _one_at_a_time:  # so that each thread puts back what it has found
        here, others = threading.get_ident(), asyncio.new_event_loop
        asyncio.new_event_loop = lambda: _Loop() if threading.get_ident() == here else others()
        try:
            yield
        finally:
            asyncio.new_event_loop = others


def why(error: BaseException) -> str:
    """What was wrong at first: Orbax wraps what TensorStore says in errors that name the index of
    an array alone."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
