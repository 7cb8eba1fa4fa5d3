"""An engine whose steps a test runs itself, and clients of it that take turns.

A client is a thread that runs only in its turns, which end where it waits for the engine. So a
schedule of sessions and calls is the same every time.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxshare.arena import extents
from jaxshare.models import LoadedModel
from jaxshare.serving.engine import Engine, prefill, running_request
from jaxshare.serving.kvcache import manager
from jaxshare.serving.kvcache.speeds import FixedSpeeds
from jaxshare.serving.logits_cache.payoff import Payoff

_PATIENCE = 300  # seconds after which a turn is not to come back


SMALL_PIECES = (
    (manager, "GROWTH", 16),
    (prefill, "SMALL", prefill.PassShape(1, 8)),
    (prefill, "SHORT", prefill.PassShape(4, 8)),
    (running_request, "WIDTH", 2),
)
"""Settings that make few tokens many pieces: extents, chunks of a prompt, and tokens that the
decode loop feeds."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """`SMALL_PIECES`, for the tests of a module that imports this."""
    for module, name, value in SMALL_PIECES:
        monkeypatch.setattr(module, name, value)


class Client:
    """Runs a function in turns.

    Attributes:
      over: whether the function has ended; result: its value; failure: its error, or None.
    """

    def __init__(self, work: Callable[[], Any]):
        self._work = work
        self._go, self._parked = threading.Semaphore(0), threading.Semaphore(0)
        self.over, self.result = False, None
        self.failure: BaseException | None = None
        self.waits: Callable[[], bool] = lambda: False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def turn(self, *, raises: bool = True) -> None:
        """Lets the function go on until it waits or ends; raises its error, if it should."""
        if self.over or self.waits():
            return
        self._go.release()
        assert self._parked.acquire(timeout=_PATIENCE), "a client does not come back"
        if self.failure and raises:
            raise self.failure

    def wait_while(self, waits: Callable[[], bool]) -> None:
        """Ends the turn; the next one comes when `waits` is false. For the function itself."""
        self.waits = waits
        self._parked.release()
        self._go.acquire()
        self.waits = lambda: False

    def _run(self) -> None:
        self._go.acquire()
        _running.client = self
        try:
            self.result = self._work()
        except BaseException as error:
            self.failure = error
        self.over = True
        self._parked.release()


_running = threading.local()


def current() -> Client:
    """The client whose turn it is, for its own function."""
    return _running.client


def use_always(engine: Engine) -> None:
    """Lets every request with `resample` use the Logits Cache, whether it pays or not."""
    engine._scheduler.output.payoff = Payoff((1, 1, 1), None)


class Stepped(Engine):
    """An engine without a thread and without a clock."""

    def __init__(self, model: LoadedModel, **options: Any):
        super().__init__(model, **options)
        # What copies and passes take decides what is evicted; it must not be measured.
        self._scheduler.kv.speeds = FixedSpeeds(1e-4, 1e-5)
        self._scheduler.ahead = None  # a request must not wait for a thread
        use_always(self)
        self._thread = threading.current_thread()

    def step(self) -> bool:
        self._step_seconds = 0.0
        self._sessions._recent.clear()  # or else it waits for them
        if self._leases.shared and not self._decisions.has_work:
            with self._leases.exclusive("nothing"):  # gives back what was released
                return False
        busy = self._step()
        self._thread = threading.current_thread()
        return busy

    def run_session(self, session: Any) -> BaseException | None:
        with self._changed:
            self._check_open()
            self._sessions.submit(session)
        current().wait_while(lambda: not session.done)
        return self._sessions.wait(session)

    def lease(self, capacities: Any, name: str = "") -> Any:
        tokens = extents(np.asarray(capacities, np.int64))[1]
        if not self._fits(tokens):
            self._leases.num_waiting += 1  # nothing is admitted, as where a thread waits for memory
            current().wait_while(lambda: not self._fits(tokens))
            self._leases.num_waiting -= 1
        return super().lease(capacities, name)

    def _fits(self, tokens: int) -> bool:
        """Returns whether a session would be given so many tokens at once."""
        left, kv = self._leases.available - tokens, self._scheduler.kv
        return kv.tree.can_be_free(tokens) and all(
            call.max_tokens <= left for call in self._requests
        )
