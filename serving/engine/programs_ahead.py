"""Programs of the decode loop that are compiled while the loop runs another.

A request with options that none had before may need a larger decode state, and so another program,
which takes seconds to compile. It alone waits for that: the program is compiled in a thread, for all
such requests that wait at that time, while others are served; once it is there, the loop grows.

Rows that come to list many blocks, as those of long dialogues do, need another program, too. Once one
lists more than half of what it can, that program is compiled before any needs it. And so is one for
fewer rows, once it would have served many dispatches (`jaxshare.serving.engine.row_programs`).
"""

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence

from jaxshare.compile_time import Stopwatch
from jaxshare.serving.engine.decode_rows import DecodeRows
from jaxshare.serving.engine.loop_sizes import LoopSizes
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.request import Request

log = logging.getLogger("jaxshare.engine")


class ProgramsAhead:
    """Finds the requests that wait for a program. All but the compiling is in the engine's thread.

    Of the programs of an engine, for few rows and for all, the one in place of that which runs comes
    first; then those who wait enter, and the others are compiled beside them.

    Args:
      rows: of the decode loop.
      metrics: the engine's counters.
      on_end: called in another thread when a program is there.
    """

    def __init__(self, rows: DecodeRows, metrics: Metrics, on_end: Callable[[], None]):
        self._rows, self._metrics, self._on_end = rows, metrics, on_end
        self._job: _CompilerJob | None = None
        self._widened: _Shapes | None = None  # the last that were compiled for more blocks
        # Of a request for which there was room: sizes only grow, but for those of grammars.
        self._had_room: Hashable = None
        rows.before_dispatch = self._wait_for

    @property
    def compiling(self) -> bool:
        """True until the first of the programs is there that are being compiled; requests that need
        another one wait as well."""
        return self._job is not None and not self._job.first.is_set()

    def holds(self, request: Request, queue: Iterable[Request]) -> bool:
        """Returns whether a waiting request has to wait for a program; begins to compile it.

        Args:
          request: of the queue.
          queue: all that wait, for which the program is to be.
        """
        if request.fits or not self._rows.state:  # the first dispatch compiles in any case
            return False
        if self._job and request in self._job.requests:
            return True
        if self._has_room(request):
            request.fits = True
            return False
        if self._job is None:
            lacking = [r for r in queue if not r.fits and not self._has_room(r)]
            self._begin((self._rows.sizes_for(lacking), self._rows.view.width), requests=lacking)
        return True

    def _has_room(self, request: Request) -> bool:
        options = LoopSizes.read_by_grown(request)
        if request.sampler.grammar is None and options == self._had_room:
            return True
        has_room = self._rows.sizes_for([request]) == self._rows.sizes
        if has_room:
            self._had_room = options
        return has_room

    def _begin(
        self, shapes: "_Shapes", *, requests: Sequence[Request] = (), rows: int | None = None
    ) -> None:
        programs = self._rows.programs(*shapes, rows)
        self._job = job = _CompilerJob(shapes, requests, programs, rows, self._on_end)
        log.info("compiling the decode loop%s; other requests go on", job.purpose)

    def look(self) -> None:
        """Lets the loop grow once the first program is there, and the requests enter that wait for it;
        begins to compile the program for rows that list more blocks, or for fewer rows. Between two
        dispatches."""
        if self._job:
            self._take(self._job)
        if self._job or not self._rows.state:
            return
        view = self._rows.view
        is_half_full = 2 * max(map(len, view.blocks)) > view.width
        wider = self._rows.sizes, 2 * view.width
        if self._rows.is_warm and is_half_full and wider != self._widened:
            self._widened = wider
            self._begin(wider)
        elif rows := self._rows.row_programs.take_wanted():
            self._begin((self._rows.sizes, view.width), rows=rows)

    def _take(self, job: "_CompilerJob") -> None:
        if job.first.is_set() and not job.entered:
            job.entered = True
            if job.failure is None:
                self._rows.grow(job.shapes[0])
            for request in job.requests:
                request.fits = True
        if job.entered and not job.thread.is_alive():
            self._job = None
            self._metrics.compiled(job.seconds)
            if job.failure is None:
                log.info("compiled the decode loop%s: %.1f s", job.purpose, job.seconds)
            else:  # which they meet in the loop, and are told of
                what = "could not compile the decode loop%s"
                log.warning(what, job.purpose, exc_info=job.failure)

    def _wait_for(self, num_rows: int) -> None:
        """Waits for a program that is about to run, rather than to compile it once more."""
        job, rows = self._job, self._rows
        if job and job.lacks(num_rows) and job.shapes == (rows.sizes, rows.view.width):
            job.thread.join()


_Shapes = tuple[LoopSizes, int]
"""The sizes of a loop, and the blocks that its rows can list."""


class _CompilerJob:
    """Programs that are compiled in a thread.

    Args:
      shapes, requests: that they are for.
      programs: see `DecodeRows.programs`.
      rows: of the only one, where it is for fewer rows.
      on_end: called when the first program is there, and at the end.

    Attributes:
      first: set when the first program is there, or cannot be made.
      entered: whether the loop has grown, and the requests were let go.
      seconds, failure: of the compiler, at the end.
    """

    def __init__(
        self,
        shapes: _Shapes,
        requests: Sequence[Request],
        programs: dict[int, Callable[[], None]],
        rows: int | None,
        on_end: Callable[[], None],
    ):
        self.shapes, self.requests, self._rows = shapes, requests, rows
        self.first, self._there, self.entered = threading.Event(), set[int](), False
        self.seconds, self.failure = 0.0, None
        self._programs, self._on_end = programs, on_end
        # No daemon: the interpreter must not end in the midst of the compiler.
        self.thread = threading.Thread(target=self._run, name="jaxshare-compiler")
        self.thread.start()

    def lacks(self, num_rows: int) -> bool:
        """Returns whether the program of so many rows is still to be compiled."""
        return num_rows in self._programs and num_rows not in self._there

    @property
    def purpose(self) -> str:
        """The options that the requests have, or else the rows or the blocks, for a message."""
        if self._rows:
            return f" for {self._rows} rows"
        if not self.requests:
            return f" for {self.shapes[1]} blocks of a row"
        names = sorted({name for each in self.requests for name in each.options})
        return f" for {', '.join(names)}" if names else ""

    def _run(self) -> None:
        watch = Stopwatch.start()
        try:
            for num_rows, compile_program in self._programs.items():
                compile_program()
                self._there.add(num_rows)
                self.first.set()
                self._on_end()
        except Exception as error:
            self.failure = error
        self.seconds = sum(watch.split())
        self.first.set()
        self._on_end()
