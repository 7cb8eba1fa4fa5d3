"""The seconds that JAX takes to compile: tracing, lowering and the compiler itself, as
`jax.monitoring` reports them.

    start = compile_seconds()
    ...
    compile_seconds() - start  # seconds that this thread has compiled meanwhile
"""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

from jax import monitoring

from jaxshare import progress

_EVENTS = frozenset(
    f"/jax/core/compile/{name}_duration"
    for name in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
)


class CompileClock:
    """The total of time spans without overlaps: of nested spans, such as a function traced inside
    another, the outer one counts."""

    def __init__(self) -> None:
        self.seconds = 0.0
        # (end, length in seconds) of spans that are not nested, in the order of time
        self._spans: list[tuple[float, float]] = []

    def add(self, seconds: float, now: float) -> None:
        """Adds a span that ended at `now`; calls must be in the order of ends."""
        counted = seconds
        while self._spans and self._spans[-1][0] > now - seconds:
            counted -= self._spans.pop()[1]
        self._spans.append((now, seconds))
        self.seconds += max(counted, 0.0)


class _Clocks(threading.local):
    """A clock for each thread: JAX compiles, and reports, in the thread that calls."""

    def __init__(self) -> None:
        self.own = CompileClock()


_clocks = _Clocks()


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    if event in _EVENTS:
        _clocks.own.add(duration_secs, time.perf_counter())


monitoring.register_event_duration_secs_listener(_listen)


def compile_seconds() -> float:
    """The seconds that this thread has spent compiling since this module was imported. A program
    that comes from JAX's persistent cache takes the seconds that tracing, lowering and reading it
    take."""
    return _clocks.own.seconds


_NAMES = {
    "_decode": "the decode loop",
    "_forward": "a forward pass",
    "place_adapter": "what puts adapters into their places",
}


_displays = set[progress.Display]()
"""Where compiling is shown now."""


@contextlib.contextmanager
def reported_compiles(display: progress.Display = progress.DISPLAY) -> Iterator[None]:
    """Shows each program that is traced, lowered and compiled as a piece of work, while it is. One
    that comes from JAX's persistent cache takes no time in the compiler, and so is not shown there.

    Where it is shown already, nothing is added."""
    if display in _displays:
        yield
        return
    stop = _report_to(display)
    try:
        yield
    finally:
        stop()


def report_compiles() -> None:
    """Does what `reported_compiles` does, from here to the end of the process."""
    if progress.DISPLAY not in _displays:
        _report_to(progress.DISPLAY)


def _report_to(display: progress.Display) -> Callable[[], None]:
    """Shows programs on a display from here on, until what it returns is called."""
    own = threading.local()

    def begin(event: str, value: float | int, **metadata: str | int) -> None:
        if event in _EVENTS:
            if not hasattr(own, "works"):
                own.works = []
            function = re.sub(r"^jit\((.*)\)$", r"\1", str(metadata.get("fun_name", "")))
            name = f"compiling {_NAMES.get(function, function)}"
            # Functions that are traced inside another are a part of it.
            own.works.append(None if own.works else display.begin(name))

    def end(event: str, duration_secs: float, **metadata: str | int) -> None:
        if event in _EVENTS and getattr(own, "works", None) and (work := own.works.pop()):
            work.close()

    def stop() -> None:
        _displays.remove(display)
        monitoring.unregister_scalar_listener(begin)
        monitoring.unregister_event_duration_listener(end)

    _displays.add(display)
    monitoring.register_scalar_listener(begin)
    monitoring.register_event_duration_secs_listener(end)
    return stop


class Stopwatch:
    """Times work of one thread: wall time, split into compilation and all else.

    watch = Stopwatch.start()
    seconds, compile_seconds = watch.split()
    """

    def __init__(self, start: float, compiled: float):
        self._start, self._compiled = start, compiled

    @classmethod
    def start(cls) -> Self:
        return cls(time.perf_counter(), compile_seconds())

    def split(self) -> tuple[float, float]:
        """(seconds without compilation, seconds of compilation) since the start; their sum is the
        wall time."""
        wall, compiled = time.perf_counter() - self._start, compile_seconds() - self._compiled
        compiled = min(compiled, wall)
        return wall - compiled, compiled
