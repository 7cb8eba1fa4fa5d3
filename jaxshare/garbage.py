"""The garbage collector of Python, which looks at new objects after every 700 of them by default.

Imports, traces of programs and trees of states make many objects that stay, and looking for garbage
among them took 8 % of the time until a command's first text and half of what agents cost.
"""

import atexit
import contextlib
import functools
import gc
import threading
from collections.abc import Iterator

NEW_OBJECTS = 50_000
"""Objects that Python makes before it looks for garbage among them."""
_lock = threading.Lock()
_inside = 0  # blocks that have not ended
_former: int | None = None  # the threshold before the first of them


def collect_seldom() -> None:
    """Lets Python look for garbage after `NEW_OBJECTS` new objects, unless it does so later or never."""
    threshold, *later = gc.get_threshold()
    if 0 < threshold < NEW_OBJECTS:
        gc.set_threshold(NEW_OBJECTS, *later)


@functools.cache
def leave_at_exit() -> None:
    """Lets Python end without looking for garbage among all that there is, which takes it half a
    second after a model has been traced."""
    atexit.register(gc.freeze)


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Does so until the block ends, or the last one of those that overlap; see `collect_seldom`."""
    global _inside, _former
    with _lock:
        if not _inside:
            _former = gc.get_threshold()[0]
            collect_seldom()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            threshold, *later = gc.get_threshold()
            # What the program has set meanwhile stays.
            if not _inside and _former is not None and threshold == NEW_OBJECTS:
                gc.set_threshold(_former, *later)
