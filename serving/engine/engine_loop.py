"""The loop of an engine: its thread, and the steps that it runs."""

import contextlib
import functools
import logging
import sys
import threading
import time

from jaxshare.compile_time import compile_seconds
from jaxshare.models.config_fields import first_line
from jaxshare.serving.engine.decisions import StepDecisions
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.programs_ahead import ProgramsAhead
from jaxshare.serving.engine.scheduler import Scheduler
from jaxshare.serving.engine.submitted_sessions import SubmittedSessions
from jaxshare.serving.engine.tracing import RequestTracer
from jaxshare.serving.errors import ClosedError, EngineError, QueueFullError
from jaxshare.serving.kvcache.lease import STEP, LeaseTable

log = logging.getLogger("jaxshare.engine")

_LONG_SECONDS = 1.0
"""The time of compiling that is logged."""

_COMPILER_SECONDS = 0.05
"""How long a step waits for a program where nothing else is to be done, before it looks for requests
that were cancelled."""


class EngineLoop:
    """Runs steps of a scheduler in a thread, as long as there is something to do.

    Args:
      scheduler, leases, metrics: of the engine.
    """

    def __init__(self, scheduler: Scheduler, leases: LeaseTable, metrics: Metrics):
        self.metrics, self._scheduler, self._leases = metrics, scheduler, leases
        self.tracer: RequestTracer | None = None
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._sessions = SubmittedSessions(lock, self._changed)
        self._decisions = StepDecisions(scheduler, leases, self._sessions, self._changed)
        self._submitted, self._requests = self._decisions.submitted, self._decisions.requests
        self._closed, self._step_seconds = False, 0.0  # of the last step
        self._is_warm, self._options = False, set[str]()  # those that requests have had
        leases.settle = scheduler.settle
        self._is_held = False  # requests that have not begun wait for other weights
        if not leases.shared:  # several processes must grow in the same step
            scheduler.ahead = ProgramsAhead(scheduler.decode_rows, metrics, self._wake)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def max_request_tokens(self) -> int:
        """The most tokens that a prompt and its output may have together, beside what is leased."""
        pool, leases = self._scheduler.kv.pool, self._leases
        room = pool.tokens if leases.shared else leases.available
        return min(self._scheduler.model.config.max_positions, room)

    @property
    def kv_bytes(self) -> int:
        """The bytes of accelerator memory for keys and values."""
        pool = self._scheduler.kv.pool
        return pool.tokens * pool.bytes_per_token

    def _start_thread(self) -> None:
        """Starts the thread, unless it runs. It ends when there is nothing to do.

        Raises:
          EngineError: the system gives no thread; what was submitted last must be taken back.
        """
        if self._thread is None:
            # It is no daemon: the program must not end in the midst of a pass.
            thread = threading.Thread(target=self._work, name="jaxshare-engine")
            try:
                thread.start()
            except RuntimeError as error:  # too many, or the program is about to end
                raise EngineError(f"the engine's thread cannot be started ({error})") from error
            self._thread = thread

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error() from self._failure

    def _closed_error(self) -> ClosedError:
        if self._failure is None:
            return ClosedError("the engine is shut down; make another")
        return ClosedError(
            f"the engine has failed and could not go on ({type(self._failure).__name__}: "
            f"{first_line(self._failure)}); make another"
        )

    def _wait_for_place(self, max_queue: int) -> None:
        """Refuses a request where the queue is full, or waits where processes could differ."""

        def waiting() -> int:
            queue = self._scheduler.queue
            if (count := len(self._submitted) + len(queue)) < max_queue:
                return count
            # The cancelled ones leave with the next step, for which a program may be compiled.
            queued = queue.unordered()
            return sum(not request.cancel_wanted for request in (*self._submitted, *queued))

        if self._leases.shared and self._leases.decides:
            self._changed.wait_for(lambda: self._closed or waiting() < max_queue)
            self._check_open()
        elif not self._leases.shared and (count := waiting()) >= max_queue:
            raise QueueFullError(
                f"{count} requests wait already, which is max_queue; try again when some "
                "have finished, or make the engine with a larger max_queue"
            )

    def _work(self) -> None:
        try:
            self._scheduler.kv.speeds.interrupted()  # nothing has run since the last thread ended
            while self._step():
                self._cancel_if_interrupted()
        except BaseException as failure:  # no request may hang because of it, whatever it is
            log.exception("the engine has failed and could not go on")
            self._end_for_good(failure)

    def _cancel_if_interrupted(self) -> None:
        """Cancels all requests if the program's main thread has ended by an exception.

        The program ends when this thread does: after Ctrl-C it must not wait for requests that
        nothing will read.
        """
        if not threading.main_thread().is_alive() and getattr(sys, "last_value", None) is not None:
            with self._changed:
                for request in self._requests:
                    request.cancel_wanted = True

    def _step(self) -> bool:
        """Runs one step; False if there was nothing to do, so that the thread may end."""
        decides = self._leases.decides
        with self._changed:
            if decides and not self._closed:
                self._sessions.linger(self._step_seconds)
            idle = self._leases.shared and decides and not self._decisions.has_work
        compiled, begun = compile_seconds(), time.perf_counter()
        try:
            busy, closed = (False, self._closed) if idle else self._run_step()
        except Exception as failure:  # while it was decided on, or of several processes
            if self._failure is not None:  # it could not be reset
                raise
            busy, closed = False, self._closed
            if self._leases.shared:
                self._leases.fail(failure)
            with self._leases.exclusive() if not self._leases.shared else contextlib.nullcontext():
                self._recover(failure)
        compiled = compile_seconds() - compiled
        self._step_seconds = time.perf_counter() - begun - compiled
        self.metrics.compiled(compiled)
        with self._changed:
            self._tell_of_compiling(compiled)
            sessions = self._scheduler.sessions
            for each in (*sessions.feeds, *sessions.running):
                each.compile_seconds += compiled
            self._sessions.end(sessions.running)
            if closed:
                waiting = [*self._scheduler.sessions.clear(), *self._sessions.take()]
                self._sessions.fail(waiting, self._closed_error())
            self._decisions.forget_finished()
            self._changed.notify_all()  # a session may wait for requests to finish
            # Where others decide, the sessions of the last dispatch need not be waited for.
            more = self._sessions.expected if decides else self._sessions.submitted
            if busy and self._only_compiles:
                self._changed.wait(_COMPILER_SECONDS)
            if busy or self._submitted or more:
                return True
            self._thread = None
            return False

    @property
    def _only_compiles(self) -> bool:
        """True if nothing runs, as all that is left waits for a program."""
        scheduler = self._scheduler
        running = scheduler.live or len(scheduler.sessions)
        return not running and scheduler.ahead is not None and scheduler.ahead.compiling

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _tell_of_compiling(self, seconds: float) -> None:
        """Logs that requests waited for a program, with the options that they have and earlier ones
        had not; as a warning where the engine was warmed up, after which it is a surprise."""
        if seconds < _LONG_SECONDS:
            return
        new = {name for each in self._requests for name in each.options} - self._options
        self._options |= new
        log.log(
            logging.WARNING if self._is_warm else logging.INFO,
            "compiled the decode loop%s: %.1f s, in which all requests waited",
            f" for {', '.join(sorted(new))}" if new else "",
            seconds,
        )

    def _run_step(self) -> tuple[bool, bool]:
        """Runs one step that was decided on.

        Returns:
          Whether anything is left to do, and whether the engine was shut down before the step.
        """
        steps = self._decisions
        propose = functools.partial(steps.propose, lambda: self._closed, lambda: self._is_held)
        with self._leases.exclusive(STEP, propose, steps.prepare) as agreed:
            try:
                steps.apply(agreed)
                busy = self._scheduler.step(agreed["admit"], agreed["only_begun"])
                return busy, agreed["closed"]
            except Exception as failure:
                if self._leases.shared:
                    raise
                self._recover(failure)
                return False, agreed["closed"]

    def _recover(self, failure: Exception) -> None:
        """Ends all requests and sessions that the failed scheduler had, and resets it.

        In the turn of the failure, which may have consumed the arrays of the cache: the next turn
        must not find them so. No request may hang because of it, whatever it was: a bug, or the
        device. Where several processes run the engine, it ends: the others may have gone on.
        """
        log.error("the engine's scheduler failed", exc_info=failure)
        with self._changed:
            joining = self._decisions.take_joining()
            self._sessions.fail([*self._scheduler.sessions.clear(), *joining], failure)
            if self._leases.shared:
                self._closed = True
                self._submitted.clear()
                self._sessions.fail(self._sessions.take(), failure)
            for request, state in self._requests.items():
                if state.output is None and request not in self._submitted:
                    self._scheduler.output.abort(request, failure)
            if self._leases.shared:
                return
            try:
                self._scheduler.reset()
            except BaseException as error:
                self._closed, self._failure = True, error
                self._leases.close()
                raise

    def _end_for_good(self, failure: BaseException) -> None:
        """Ends all requests and sessions after a failure that the engine could not handle."""
        with self._changed:
            self._closed, self._failure = True, failure
            error = self._closed_error()
            error.__cause__ = failure
            for request, state in self._requests.items():
                if state.output is None:
                    with contextlib.suppress(Exception):  # of one; the others have to end as well
                        self._scheduler.output.abort(request, error)
            self._requests.clear()
            self._submitted.clear()
            running = [*self._scheduler.sessions.clear(), *self._decisions.take_joining()]
            self._sessions.fail([*running, *self._sessions.take()], error)
            self._thread = None
            self._changed.notify_all()
        if self._leases.shared:
            self._leases.fail(error)
        self._leases.close()
