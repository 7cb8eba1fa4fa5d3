"""The loop of an engine: its thread, and the steps that it runs."""

import functools
import logging
import threading
import time

from jaxshare.compile_time import compile_seconds
from jaxshare.serving.engine.decisions import StepDecisions
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.scheduler import Scheduler
from jaxshare.serving.engine.submitted_sessions import SubmittedSessions
from jaxshare.serving.errors import ClosedError
from jaxshare.serving.kvcache.lease import LeaseTable

log = logging.getLogger("jaxshare.engine")


class EngineLoop:
    """Runs steps of a scheduler in a thread, as long as there is something to do.

    Args:
      scheduler, leases, metrics: of the engine.
    """

    def __init__(self, scheduler: Scheduler, leases: LeaseTable, metrics: Metrics):
        self.metrics, self._scheduler, self._leases = metrics, scheduler, leases
        self._changed = threading.Condition()
        self._sessions = SubmittedSessions(self._changed)
        self._decisions = StepDecisions(scheduler, leases, self._sessions, self._changed)
        self._submitted, self._requests = self._decisions.submitted, self._decisions.requests
        self._closed, self._step_seconds = False, 0.0  # of the last step
        self._thread: threading.Thread | None = None

    def _start_thread(self) -> None:
        """Starts the thread, unless it runs. It ends when there is nothing to do."""
        if self._thread is None:
            # It is no daemon: the program must not end in the midst of a pass.
            self._thread = threading.Thread(target=self._work, name="jaxshare-engine")
            self._thread.start()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine is shut down; make another")

    def _work(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Runs one step; False if there was nothing to do, so that the thread may end."""
        decides, error = self._leases.decides, None
        with self._changed:
            if decides and not self._closed:
                self._sessions.linger(self._step_seconds)
            idle = self._leases.shared and decides and not self._decisions.has_work
        compiled, begun = compile_seconds(), time.perf_counter()
        try:
            busy, closed = (False, self._closed) if idle else self._run_step()
        except Exception as failure:  # a bug, or the device: no request may hang because of it
            log.exception("the engine's scheduler failed")
            busy, closed, error = False, self._closed, failure
        compiled = compile_seconds() - compiled
        self._step_seconds = time.perf_counter() - begun - compiled
        self.metrics.compiled(compiled)
        if error and self._leases.shared:
            self._leases.fail(error)
        with self._changed:
            if error:
                self._abort_running(error)
            self._sessions.end(self._scheduler.sessions.running, compiled)
            if closed:
                waiting = [*self._scheduler.sessions.clear(), *self._sessions.take()]
                self._sessions.fail(waiting, ClosedError("the engine is shut down; make another"))
            self._decisions.forget_finished()
            self._changed.notify_all()  # a session may wait for requests to finish
            # Where others decide, the sessions of the last dispatch need not be waited for.
            more = self._sessions.expected if decides else self._sessions.submitted
            if busy or self._submitted or more:
                return True
            self._thread = None
            return False

    def _run_step(self) -> tuple[bool, bool]:
        """Runs one step that was decided on.

        Returns:
          Whether anything is left to do, and whether the engine was shut down before the step.
        """
        steps = self._decisions
        propose = functools.partial(steps.propose, lambda: self._closed)
        with self._leases.exclusive("step", propose, steps.prepare) as agreed:
            steps.apply(agreed)
            return self._scheduler.step(admit=agreed["admit"]), agreed["closed"]

    def _abort_running(self, error: Exception) -> None:
        """Ends all requests and sessions that the failed scheduler had, and resets it.

        Where several processes run the engine, it ends: the others may have gone on.
        """
        self._sessions.fail(self._scheduler.sessions.clear(), error)
        if self._leases.shared:
            self._closed = True
            self._submitted.clear()
            self._sessions.fail(self._sessions.take(), error)
        for request, state in self._requests.items():
            if state.output is None and request not in self._submitted:
                self._scheduler.output.abort(request, error)
        if not self._leases.shared:
            with self._leases.exclusive():
                self._scheduler.reset()
