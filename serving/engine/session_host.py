"""The part of an engine that sessions of workers use: memory for their blocks, and passes."""

import weakref
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxshare.arena import extents
from jaxshare.argument_checks import INT32_MAX, as_integer, as_list, shown
from jaxshare.models import LoadedModel
from jaxshare.models.adapters.places import Adapter
from jaxshare.serving.engine.engine_loop import EngineLoop
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.scheduler import Scheduler
from jaxshare.serving.engine.session_feed import SessionRequest
from jaxshare.serving.errors import EngineError
from jaxshare.serving.kvcache.lease import KVLease, LeaseTable


class WeightsUser(Protocol):
    """A session on an engine, which computes with the engine's weights, and an adapter of these.

    Attributes:
      loaded: its model, with its adapter.
      lease: of its memory.
    """

    loaded: LoadedModel
    lease: KVLease | None

    def use_weights(self, model: LoadedModel) -> None:
        """Goes on with the weights and adapters of a model."""
        ...


class SessionHost(EngineLoop):
    """An engine's loop that sessions take part in.

    Args:
      scheduler, leases, metrics: of the engine.
    """

    def __init__(self, scheduler: Scheduler, leases: LeaseTable, metrics: Metrics):
        super().__init__(scheduler, leases, metrics)
        self._open_leases = weakref.WeakSet[KVLease]()  # of sessions that are not over
        self._weights_users = list[weakref.ref[WeightsUser]]()

    @property
    def params_version(self) -> int:
        """The version of the weights: 0 for those that the engine was made with."""
        return self._scheduler.output.version

    def follow_weights(self, session: WeightsUser) -> None:
        """Gives a session the weights, and those that come later, for as long as it exists.

        Raises:
          EngineError: its adapter is the engine's no more.
        """
        with self._changed:
            adapter, loaded = session.loaded.adapter, self._scheduler.model.adapters
            if adapter and (not loaded or loaded.loaded.get(adapter.name) != adapter):
                raise EngineError(
                    f"the adapter {adapter.name!r} of the session is not loaded in the engine, or "
                    "another is under this name; give the session engine.model.using(NAME)"
                )
            self._weights_users = [each for each in self._weights_users if each() is not None]
            self._weights_users.append(weakref.ref(session))
            session.use_weights(self._scheduler.model)

    def _adapters_of_sessions(self) -> list[Adapter | None]:
        """The adapters of the sessions that are not closed."""
        sessions = [each() for each in self._weights_users]
        is_open = [each for each in sessions if each and each.lease and each.lease.close.alive]
        return [session.loaded.adapter for session in is_open]

    def _num_open_sessions(self) -> int:
        """The sessions that are neither over nor closed."""
        return sum(lease.close.alive for lease in [*self._open_leases])

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
                        or (
                            not self._is_held
                            and all(r.max_tokens <= leases.available for r in self._requests)
                        )
                    )
                )
        except BaseException:
            leases.cancel(tokens)
            raise
        lease = leases.lease(capacities, tokens, offsets, name)
        with self._changed:
            self._open_leases.add(lease)
        return lease

    def run_session(self, session: SessionRequest) -> BaseException | None:
        """Feeds texts of a session, or runs passes of its rows, at most `rows`, with all that runs
        besides.

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
        """Lets neither the next dispatch nor an update of the weights wait for a session that is over."""
        with self._changed:
            self._open_leases.discard(lease)
            self._sessions.forget(lease)
