"""The sessions of a running engine: threads that wait for passes or for texts to be fed, and the
thread that runs them."""

import threading
from collections.abc import Iterable

from jaxshare.serving.engine.session_feed import SessionRequest
from jaxshare.serving.kvcache.lease import KVLease

_LINGER, _MIN_LINGER = 0.2, 0.02
"""How long to wait for sessions that have just run: this part of the last step, and these seconds
at least."""


class SubmittedSessions:
    """Sessions that have asked for something, and are not in the scheduler yet.

    Args:
      lock: under which all of this is used.
      changed: a condition of it, which the engine's thread waits for.

    Attributes:
      submitted: what they have asked for.
    """

    def __init__(self, lock: threading.RLock, changed: threading.Condition):
        self._lock, self._changed = lock, changed
        self.submitted: list[SessionRequest] = []
        # Each thread has a condition of its own: to wake all for what one waits for takes longer than
        # what they do then.
        self._waiting: dict[SessionRequest, threading.Condition] = {}
        self._recent: set[KVLease] = set()  # of the last dispatch, which will ask for more

    @property
    def expected(self) -> bool:
        """Returns whether sessions wait, or have just run."""
        return bool(self.submitted or self._recent)

    def submit(self, session: SessionRequest) -> None:
        """Lets a session wait for what it asks for."""
        self.submitted.append(session)
        self._changed.notify_all()

    def wait(self, session: SessionRequest) -> BaseException | None:
        """Blocks the calling thread until what a session asks for is done.

        Returns:
          An interrupt that came in the midst of it, or None: a dispatch goes on to its end, and the
            rest of a text is not fed. One that comes before it is raised, and nothing is done.

        Raises:
          Exception: the error of the session.
        """
        interrupt: BaseException | None = None
        over = self._waiting[session] = threading.Condition(self._lock)
        try:
            while not session.done:
                try:
                    over.wait_for(lambda: session.done)
                except BaseException as error:
                    if session in self.submitted:
                        self.submitted.remove(session)
                        raise
                    interrupt, session.given_up = error, True
                    self._changed.notify_all()
        finally:
            del self._waiting[session]
        if session.error:
            raise session.error
        return interrupt

    def forget(self, owner: KVLease) -> None:
        """Expects no further passes of a session."""
        self._recent.discard(owner)
        self._changed.notify_all()

    def linger(self, step_seconds: float) -> None:
        """Lets the sessions of the last dispatch ask for their next one, for a part of its time.

        They would take turns otherwise: each would miss the dispatch that begins while it reads
        what it has written.
        """
        recent = self._recent
        if recent:
            self._changed.wait_for(
                lambda: recent <= {session.owner for session in self.submitted},
                max(_MIN_LINGER, _LINGER * step_seconds),
            )

    def take(self) -> list[SessionRequest]:
        """Gives the sessions that have been submitted, for the scheduler."""
        found, self.submitted = self.submitted, []
        return found

    def take_one(self, number: int) -> SessionRequest:
        """Gives the session whose lease has this number, for the scheduler."""
        found = next(each for each in self.submitted if each.owner.number == number)
        self.submitted.remove(found)
        return found

    def end(self, sessions: list[SessionRequest]) -> None:
        """Ends those that are over, and clears the list."""
        for session in sessions:
            self._wake(session)
        self._recent = {session.owner for session in sessions if not session.error}
        sessions.clear()

    def fail(self, sessions: Iterable[SessionRequest], error: Exception) -> None:
        """Ends sessions with an error, unless they have another one."""
        for session in sessions:
            session.error = session.error or error
            self._wake(session)

    def _wake(self, session: SessionRequest) -> None:
        """Lets the thread of a session go on."""
        session.done = True
        if over := self._waiting.get(session):
            over.notify_all()
