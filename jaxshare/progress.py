"""Progress of work that takes more than two seconds, on stderr.

    with progress.work("reading weights", total=size, unit="B") as weights:
        ...
        weights.update(piece)

On a terminal one line has what is under way, and is cleared in the end. Where stderr is no terminal,
such as in a log, a line a minute has it. Nothing is on stdout. `JAXSHARE_PROGRESS=off` turns all of
it off, and so does `--quiet` of the commands.
"""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Self, TextIO

from jaxshare.switches import is_on

VARIABLE = "JAXSHARE_PROGRESS"
"""The environment variable that turns progress off."""
DELAY = 2.0
"""The seconds that work takes before it is named."""
INTERVAL = 60.0
"""The seconds between two lines where there is no terminal."""
_REDRAW = 0.5
"""The seconds between two states of the line on a terminal."""
_CLEAR = "\r\x1b[K"
_BYTES = "B"


class Activity:
    """A piece of work under way; see `work`.

    Attributes:
      what: it is, in a few words; it may change.
      done, total: in units; without a total there is no end to compare with.
      unit: "B" for bytes, or a plural such as "tokens".
      note: further words on its state.
    """

    def __init__(self, display: "Display", what: str, total: float | None, unit: str, done: float):
        self.what, self.total, self.unit, self.done, self.note = what, total, unit, done, ""
        self._display, self._start, self._first = display, display.clock(), done

    def update(self, done: float = 1) -> None:
        """Adds to what is done."""
        self.done += done

    def turn_to(self, what: str, total: float | None = None, unit: str = "") -> None:
        """Goes on with other work, whose time and units start here; see `work`."""
        if what != self.what:
            self.what, self.total, self.unit, self.note = what, total, unit, ""
            self.done = self._first = 0.0
            self._start = self._display.clock()

    def close(self) -> None:
        """Ends the work; it is no longer named."""
        self._display.end(self)

    def seconds(self) -> float:
        """The time since it began."""
        return self._display.clock() - self._start

    def line(self) -> str:
        """The state in words."""
        seconds = self.seconds()
        parts = [f"{seconds:.0f} s"]
        if self.total is not None or self.done:
            parts.insert(0, _amount(self.done, self.total, self.unit))
            if seconds > 0 and (made := self.done - self._first) > 0:
                parts.append(f"{_number(made / seconds, self.unit)}/s")
        return f"{self.what}: {', '.join([*parts, *([self.note] if self.note else [])])}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Display:
    """The work under way of a process, and where it is shown.

    Attributes:
      clock: seconds that only grow.
    """

    def __init__(
        self,
        stream: Callable[[], TextIO | None],
        clock: Callable[[], float] = time.monotonic,
        *,
        ticks: bool = True,
    ):
        """Makes a display.

        Args:
          stream: gives the stream to write to, which may be another one each time.
          clock: see the class.
          ticks: call `tick` from a thread as long as there is work.
        """
        self.clock, self._stream, self._ticks = clock, stream, ticks
        self._lock = threading.RLock()
        self._works: list[Activity] = []
        self._named: set[str] = set()
        self._sessions = self._plain = self._muted = 0
        self._is_drawn = self._has_thread = False
        self._last_line = clock()

    @property
    def under_way(self) -> list[str]:
        """The names of the work under way, in the order of their beginnings."""
        with self._lock:
            return [work.what for work in self._works]

    def begin(
        self, what: str, total: float | None = None, unit: str = "", done: float = 0
    ) -> Activity:
        """Adds a piece of work.

        Raises:
          ValueError: JAXSHARE_PROGRESS is neither on nor off.
        """
        made = Activity(self, what, total, unit, done)
        with self._lock:
            starts = self._ticks and not self._has_thread and self._shows()
            if not self._works and not self._sessions:
                self._last_line = self.clock()
            self._works.append(made)
            if starts:
                self._has_thread = True
                threading.Thread(target=self._run, name="progress", daemon=True).start()
        return made

    def end(self, work: Activity) -> None:
        """Removes a piece of work, if it is there."""
        with self._lock:
            if work in self._works:
                self._works.remove(work)
                if not self._works:
                    self._erase()

    def tick(self) -> None:
        """Shows what is due."""
        with self._lock:
            due = [work for work in self._works if work.seconds() >= DELAY]
            if not due or not self._shows():
                self._erase()
            elif self._plain and self._is_terminal():
                for work in due:
                    if work.what not in self._named:
                        self._named.add(work.what)
                        self._write(f"jaxshare: {work.what} ...\n")
            elif self._is_terminal():
                width = shutil.get_terminal_size((80, 24)).columns - 1
                self._write(_CLEAR + "; ".join(work.line() for work in due)[:width])
                self._is_drawn = True
            elif self.clock() - self._last_line >= INTERVAL:
                self._last_line = self.clock()
                self._write(f"jaxshare: {'; '.join(work.line() for work in due)}\n")

    def say(self, line: str) -> None:
        """Writes a line above the state; also where progress is off."""
        with self._lock:
            self._erase()
            self._write(f"{line}\n")

    @contextlib.contextmanager
    def session(self, quiet: bool = False) -> Iterator[None]:
        """Counts minutes from here, across pieces of work, for the duration of a with statement.

        Args:
          quiet: show nothing meanwhile.
        """
        with self._lock:
            if not self._sessions:
                self._last_line = self.clock()
            self._sessions, self._muted = self._sessions + 1, self._muted + quiet
        try:
            yield
        finally:
            with self._lock:
                self._sessions, self._muted = self._sessions - 1, self._muted - quiet

    @contextlib.contextmanager
    def lines(self, on: bool = True) -> Iterator[None]:
        """Names work once, in a line of its own, where something else draws on the
        terminal for the duration of a with statement."""
        with self._lock:
            self._erase()
            self._named.clear()
            self._plain += on
        try:
            yield
        finally:
            with self._lock:
                self._plain -= on

    def after_fork(self) -> None:
        """Makes the display usable in a new process, which has no thread of this one."""
        self._lock = threading.RLock()
        self._is_drawn = self._has_thread = False

    def _shows(self) -> bool:
        return not self._muted and is_on(VARIABLE)

    def _is_terminal(self) -> bool:
        with contextlib.suppress(ValueError):  # it is closed
            stream = self._stream()
            return stream is not None and stream.isatty()
        return False

    def _erase(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            self._write(_CLEAR)

    def _write(self, text: str) -> None:
        # What is told of the work must not end it: the terminal may be gone.
        with contextlib.suppress(OSError, ValueError):
            if (stream := self._stream()) is not None:
                stream.write(text)
                stream.flush()

    def _run(self) -> None:
        while True:
            time.sleep(_REDRAW)
            with self._lock:
                if not self._works:
                    self._has_thread = False
                    return
                self.tick()


def _amount(done: float, total: float | None, unit: str) -> str:
    if total is None:
        return _number(done, unit)
    if unit == _BYTES:
        scale, name = _scale(total)
        return f"{done / scale:.1f} of {total / scale:.1f} {name}"
    return f"{done:,.0f} of {total:,.0f}{f' {unit}' if unit else ''}"


def _number(value: float, unit: str) -> str:
    if unit == _BYTES:
        return size(value)
    digits = 0 if value >= 10 or value == int(value) else 1
    return f"{value:,.{digits}f}{f' {unit}' if unit else ''}"


def size(count: float) -> str:
    """The words for a number of bytes, such as "8.0 GB"."""
    scale, name = _scale(count)
    return f"{count / scale:.1f} {name}"


def _scale(count: float) -> tuple[float, str]:
    names = ((1e9, "GB"), (1e6, "MB"))
    return next(((scale, name) for scale, name in names if count >= scale), (1e3, "kB"))


DISPLAY = Display(lambda: sys.stderr)
"""The display of this process."""
os.register_at_fork(after_in_child=DISPLAY.after_fork)


def work(what: str, total: float | None = None, unit: str = "", done: float = 0) -> Activity:
    """Begins a piece of work that may take more than two seconds; a with statement ends it.

    Args:
      what: it is, in a few words, such as "reading weights".
      total: units in all, or None if that is not known.
      unit: "B" for bytes, or a plural such as "tokens".
      done: units that are done already.
    """
    return DISPLAY.begin(what, total, unit, done)


def each[T](items: Iterable[T], what: str, unit: str) -> Iterator[T]:
    """Yields the items, each of which is a unit of work; see `work`."""
    with work(what, len(items) if isinstance(items, Sized) else None, unit) as made:
        for item in items:
            yield item
            made.update()
