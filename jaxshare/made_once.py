"""A cache of what is made once, whichever threads ask for it."""

import functools
import threading
from collections.abc import Callable
from typing import cast


def made_once[F: Callable[..., object]](maxsize: int) -> Callable[[F], F]:
    """Caches the results of a function, the last `maxsize` of them.

    Threads that ask for a result while it is being made wait for it, and get the same object:
    `functools.lru_cache` would make one for each.
    """

    def decorate(function: F) -> F:
        cached, lock = functools.lru_cache(maxsize)(function), threading.RLock()

        @functools.wraps(function)
        def call(*arguments, **named):
            with lock:
                return cached(*arguments, **named)

        return cast(F, call)

    return decorate
