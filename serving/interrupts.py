"""Interrupts of a terminal or a notebook that come at a bad time."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Holds an interrupt (SIGINT) back until the end, while something must not be left half done:
    an object whose arrays a program has been given, and which has not got the new ones yet.

    Other threads than the main one are not interrupted by signals.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *given: held.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[-1])
