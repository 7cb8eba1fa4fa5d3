"""The part of an engine that sessions of workers use: memory for their blocks, and passes."""

from collections.abc import Sequence

import numpy as np

from jaxshare.arena import extents
from jaxshare.argument_checks import INT32_MAX, as_integer, as_list, shown
from jaxshare.serving.engine.engine_loop import EngineLoop
from jaxshare.serving.engine.session_passes import SessionPasses
from jaxshare.serving.kvcache.lease import KVLease


class SessionHost(EngineLoop):
    """An engine's loop that sessions take part in."""

    def lease(self, capacities: Sequence[int], name: str = "") -> KVLease:
        """Leases memory for the blocks of a session.

        Waits for requests that do not fit beside it. Later requests that need more than the rest of
        the memory are refused.

        Args:
          capacities: of the blocks, in tokens.
          name: what several processes find the session by: a digest of all that it is made from.

        Raises:
          TooLongError: the session needs more memory than the engine has.
          EngineError: other sessions have too much of it.
          ClosedError: the engine was shut down.
        """
        given = as_list("capacities", capacities)
        capacities = [as_integer("capacities", size, 0, INT32_MAX) for size in given]
        if not isinstance(name, str):
            raise TypeError(f"name is {shown(name)}; it must be a text")
        offsets, tokens = extents(np.asarray(capacities, np.int64))
        leases, name = self._leases, f"{name} {capacities}"
        with leases.exclusive(f"reserve {name}") if leases.shared else self._changed:
            self._check_open()
            leases.reserve(tokens)
        try:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._closed
                        or not leases.decides
                        or all(r.max_tokens <= leases.available for r in self._requests)
                    )
                )
        except BaseException:
            leases.cancel(tokens)
            raise
        return leases.lease(capacities, tokens, offsets, name)

    def run_session(self, session: SessionPasses) -> BaseException | None:
        """Runs passes of a session's rows, at most `rows`, in a dispatch with all that runs besides.

        Returns:
          An interrupt, to raise when the results have been taken, or None.

        Raises:
          ClosedError: the engine was shut down or has failed, or the session's memory is gone.
        """
        with self._changed:
            self._check_open()
            self._start_thread()
            self._sessions.submit(session)
            return self._sessions.wait(session)

    def forget_session(self, lease: KVLease) -> None:
        """Lets the next dispatch not wait for a session that asks for no more passes."""
        with self._changed:
            self._sessions.forget(lease)
