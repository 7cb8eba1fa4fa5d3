"""A session of workers that runs in a thread, and what its clients see of it."""

import asyncio
import concurrent.futures
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from jaxshare.models.config_fields import first_line
from jaxshare.serving.errors import ClosedError
from jaxshare.serving.http.errors import ApiError
from jaxshare.serving.workers import Workers
from jaxshare.serving.workers.results import Answer

_log = logging.getLogger("jaxshare.http")

RUNNING, WAITING, ENDED, FAILED, CLOSED = "running", "waiting", "ended", "failed", "closed"
"""States of a session.

One that waits has workers that could go on, but all of them are paused, or no client looks at it.
"""

_SHUTDOWN = "the server shuts down"

_Command = tuple[Callable[[Workers], Any], concurrent.futures.Future]


class RunningSession:
    """A session in a thread of its own, which alone touches it.

    What clients ask for is done between two dispatches, in the order in which it comes. Events stay
    here, numbered from 0, for as long as the session does, so that a client may come late or again.

    Args:
      identity: of the session, which clients name.
      owner: the hash of the key that made it.
      make: creates the session; in the thread.
      idle_seconds: after which a session that no client looks at waits for one.
      finish_at: budgets of forward passes at which the answer is taken.

    Attributes:
      identity, owner, finish_at: as given; the budgets in order.
      status: one of the states.
      ready: done when the session is made, with its description, or with the error that hinders it.
      num_sampled: tokens that its workers have sampled so far.
    """

    def __init__(
        self,
        identity: str,
        owner: str,
        make: Callable[[], Workers],
        idle_seconds: float = math.inf,
        finish_at: Sequence[int] = (),
    ):
        self.identity, self.owner, self.status = identity, owner, RUNNING
        self.finish_at = tuple(sorted({*finish_at}))
        self.ready: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        self.ready.set_running_or_notify_cancel()  # a client that goes away does not cancel it
        self.num_sampled, self._idle_seconds = 0, idle_seconds
        self._seen = time.monotonic()
        self._make, self._commands = make, queue.SimpleQueue[_Command | None]()
        self._events: list[dict[str, Any]] = []
        self._changed = threading.Lock()
        self._readers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._is_closing = self._is_abandoned = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"jaxshare-{identity}", daemon=True)
        self._thread.start()

    # In any thread.

    def ask(self, work: Callable[[Workers], Any]) -> concurrent.futures.Future:
        """Lets the session's thread do something between two dispatches."""
        future: concurrent.futures.Future = concurrent.futures.Future()
        with self._changed:
            self._seen = time.monotonic()
            if self._is_closing:
                future.set_exception(self._closed_error())
            else:
                self._commands.put((work, future))
        return future

    def close(self, wait: bool = True) -> None:
        """Ends the session, and frees its memory."""
        with self._changed:
            self._is_closing = True
        self._commands.put(None)
        if wait:
            self._thread.join()

    def abandon(self) -> None:
        """Ends the events at once with an error, and the session when the engine lets it."""
        event = {"type": "error", "message": _SHUTDOWN, "code": "shutting_down"}
        self._tell(CLOSED, event, last=True)
        self.close(wait=False)

    async def events(self, after: int) -> AsyncGenerator[dict[str, Any]]:
        """Yields the events from a number on as they come, up to the end of the session."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        reader = loop, changed
        with self._changed:
            self._readers.add(reader)
        self.ask(lambda workers: None)  # wakes one that waits for a client
        try:
            while True:
                with self._changed:
                    changed.clear()
                    new, status = self._events[after:], self.status
                for each in new:
                    yield each
                after += len(new)
                if not new and status in (ENDED, FAILED, CLOSED):
                    return
                if not new:
                    await changed.wait()
        finally:
            with self._changed:
                self._readers.discard(reader)
                self._seen = time.monotonic()

    def _is_forgotten(self) -> bool:
        """True if no client has looked at the session for a time."""
        with self._changed:
            return not self._readers and time.monotonic() - self._seen > self._idle_seconds

    # In the session's thread, but for `_tell`.

    def _run(self) -> None:
        try:
            workers = self._make()
        except BaseException as error:
            self.status = FAILED
            self.ready.set_exception(error)
            return
        with workers:
            self.ready.set_result(describe(workers))
            try:
                self._write(workers)
            except ClosedError:
                self._tell(CLOSED, {})
            except Exception as error:
                _log.error("a session of workers has failed", exc_info=error)
                self._failure = first_line(error)
                self._tell(FAILED, {"type": "error", "message": str(error)})
        with self._changed:
            self._is_closing = True
        while not self._commands.empty():
            if command := self._commands.get():
                command[1].set_exception(self._closed_error())

    def _closed_error(self) -> Exception:
        if self._failure is None:
            return ClosedError("the session has been closed")
        return ApiError(
            410, f"the session has failed ({self._failure}); make another", code="session_failed"
        )

    def _write(self, workers: Workers) -> None:
        self._tell(RUNNING)
        while True:
            budget = self._next_budget(workers)
            for event in workers.stream(budget):
                self._tell(
                    RUNNING,
                    {
                        "type": "text",
                        "worker": event.worker,
                        "step": event.step,
                        "text": event.text,
                        "passes": event.passes,
                        "ends": event.ends,
                    },
                )
                self.num_sampled = sum(workers.drawn.values())
                forgotten = self._is_forgotten()
                if forgotten:
                    self._tell(WAITING, {"type": "waiting", "passes": workers.passes})
                if not self._obey(workers, wait=forgotten):
                    return self._tell(CLOSED)
            has_ended = workers.finish_reason is not None or workers.passes >= workers.budget
            if budget is not None and (has_ended or workers.passes >= budget):
                found = workers.finish(at=budget)
                self._tell(RUNNING, {"type": "answer", **answer_json(budget, found)})
                continue
            if has_ended:
                if self.status != ENDED:
                    self._tell(ENDED, {"type": "end", **describe(workers)})
            elif self.status != WAITING:
                self._tell(WAITING, {"type": "waiting", "passes": workers.passes})
            if not self._obey(workers, wait=True):
                return self._tell(CLOSED)

    def _next_budget(self, workers: Workers) -> int | None:
        """The next of the budgets whose answer has not been taken."""
        return next((each for each in self.finish_at if each not in workers.answers), None)

    def _obey(self, workers: Workers, wait: bool) -> bool:
        """Does what clients have asked for; False where the session is to end.

        Args:
          workers: the session.
          wait: for the next one; else those that are there.
        """
        while wait or not self._commands.empty():
            command, wait = self._commands.get(), False
            if command is None:
                return False
            work, future = command
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work(workers))
            except BaseException as error:
                future.set_exception(error)
        return True

    def _tell(
        self, status: str, event: dict[str, Any] | None = None, *, last: bool = False
    ) -> None:
        """Sets the state, and tells readers of an event; nothing comes after one that is `last`."""
        with self._changed:
            if self._is_abandoned:
                return
            self._is_abandoned = last
            self.status = status
            if event:
                self._events.append({"number": len(self._events), **event})
            readers = [*self._readers]
        for loop, changed in readers:
            if not loop.is_closed():
                loop.call_soon_threadsafe(changed.set)


def describe(workers: Workers) -> dict[str, Any]:
    """A session as JSON: its workers, its steps, and how far it is."""
    reason = workers.finish_reason
    return {
        "names": [*workers.names],
        "passes": workers.passes,
        "budget": workers.budget,
        "finish_reason": None if reason is None else str(reason),
        "workers": {
            name: {"state": str(workers.reasons[name]), "sees": [*workers.layout.sees[name]]}
            for name in workers.names
        },
        "blocks": workers.block_lengths,
        "moves": dict(workers.layout.moves),
        "answers": [answer_json(*each) for each in sorted(workers.answers.items())],
        "steps": [
            {
                "worker": step.worker,
                "step": step.number,
                "text": step.text,
                "began": step.began,
                "ended": step.ended,
                "asked": step.asked,
                "answers": step.answer,
            }
            for step in workers.steps
        ],
    }


def answer_json(budget: int, found: Answer) -> dict[str, Any]:
    """An answer at a budget of forward passes as JSON."""
    return {
        "budget": budget,
        "value": found.value,
        "text": found.text,
        "passes": found.passes,
        "extra_passes": found.extra_passes,
    }
