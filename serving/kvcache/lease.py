"""Leases: sessions of workers whose blocks are in the engine's memory, and whose passes alternate
with those of its requests."""

import collections
import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from jaxshare import KVCache
from jaxshare.decoding.array_rows import filled
from jaxshare.serving.errors import ClosedError, EngineError, TooLongError
from jaxshare.serving.kvcache.device_lock import Agreed, DeviceLock, Turn
from jaxshare.serving.kvcache.manager import KVManager
from jaxshare.serving.kvcache.pool import Extent

STEP = "step"
"""The name of the scheduler's steps."""


def _nothing() -> None:
    """Where nothing is under way after a step."""


class LeaseTable:
    """All leases of an engine's memory, and the device lock.

    Args:
      kv: the memory.
      lock: the device lock; by default one for this process alone.

    Attributes:
      settle: called before every use of the device but a step of the scheduler, whose passes may be
        under way still.
      num_waiting: sessions that wait for memory. No requests are admitted meanwhile, or there would
        never be enough.
    """

    def __init__(self, kv: KVManager, lock: DeviceLock | None = None):
        self.num_waiting, self.settle = 0, _nothing
        self._kv, self._lock = kv, lock or DeviceLock()
        self._changed = threading.Condition()
        self._closed = False
        self._num_unlocks = self._reserved = self._num_leases = 0
        self._extents: dict[int, Extent] = {}  # by the lease's number
        self._released: collections.deque[int] = collections.deque()  # not given back yet

    @contextlib.contextmanager
    def exclusive(
        self,
        name: str = "",
        propose: Callable[[], Agreed] = dict,
        prepare: Callable[[Agreed], None] = lambda agreed: None,
    ) -> Iterator[Agreed]:
        """Acquires the device lock: exclusive use of memory and device, in the order of arrival.

        Memory that was released before is given back first.

        Args:
          name, propose, prepare: see `Turn`.

        Returns:
          What this use is about.
        """

        # Every process gives the same memory back before anything else of the turn.
        def propose_all() -> Agreed:
            released = list(self._released)
            self._give_back(released)
            return {**propose(), "released": released}

        def prepare_all(agreed: Agreed) -> None:
            self._give_back(agreed["released"])
            prepare(agreed)

        with self._lock.held(Turn(name, propose_all, prepare_all)) as agreed:
            try:
                if name != STEP:
                    self.settle()
                yield agreed
            finally:
                with self._changed:
                    self._num_unlocks += 1
                    self._changed.notify_all()

    def _give_back(self, numbers: Sequence[int]) -> None:
        """Ends leases that were released."""
        with self._changed:  # so that no thread counts the tokens twice
            for number in numbers:
                self._kv.end_lease(self._extents.pop(number))
                if number in self._released:
                    self._released.remove(number)

    @property
    def shared(self) -> bool:
        """True if several processes run the engine."""
        return self._lock.shared

    @property
    def decides(self) -> bool:
        """True if this process decides what the engine does, as one that is alone does."""
        return self._lock.decides

    def fail(self, error: Exception) -> None:
        """Ends the engine in all processes, after an error of this one."""
        self._lock.fail(error)
        self.close()

    @property
    def available(self) -> int:
        """Tokens that are neither leased nor reserved."""
        with self._changed:
            # Several processes count what they release only when all give it back.
            released = [] if self._lock.shared else [*self._released]
            unused = sum(self._leased_tokens(number) for number in released)
            return self._kv.pool.tokens - self._kv.leased_tokens - self._reserved + unused

    def _leased_tokens(self, number: int) -> int:
        extent = self._extents[number]
        return extent.capacity if extent in self._kv.leased else 0

    def reserve(self, tokens: int) -> None:
        """Reserves tokens for a session; `lease` or `cancel` has to follow.

        Raises:
          TooLongError: they would never fit.
          EngineError: other sessions have leased them, for an unknown time.
        """
        pool, available = self._kv.pool, self.available
        if tokens > pool.tokens:
            size = pool.bytes_per_token
            raise TooLongError(
                f"the session's blocks take {tokens} tokens, {tokens * size} bytes, but the engine "
                f"has room for {pool.tokens}, {pool.tokens * size} bytes; raise kv_bytes, or lower "
                "the session's budget or the capacities"
            )
        if tokens > available:
            raise EngineError(
                f"the session's blocks take {tokens} tokens, but other sessions have "
                f"{pool.tokens - available} of the engine's {pool.tokens}; close one of them, or "
                "raise kv_bytes"
            )
        with self._changed:
            self._reserved += tokens

    def cancel(self, tokens: int) -> None:
        """Cancels a reservation."""
        with self._changed:
            self._reserved -= tokens

    def lease(
        self, capacities: Sequence[int], tokens: int, offsets: np.ndarray, name: str = ""
    ) -> "KVLease":
        """Leases reserved tokens; waits until requests that use them have finished.

        Args:
          capacities: of the blocks.
          tokens: of all blocks together, with gaps.
          offsets: of the blocks within these tokens.
          name: of the session, the same in every process.

        Raises:
          ClosedError: the engine was shut down.
        """
        extent, number = None, -1
        with self._changed:
            self.num_waiting += 1
        try:
            while not extent:
                with self.exclusive(f"lease {name}"):
                    if self._closed:
                        raise ClosedError("the engine is shut down; make another")
                    with self._changed:  # so that no thread counts the tokens twice
                        if extent := self._kv.lease(tokens):
                            self._reserved -= tokens
                            number = self._num_leases
                            self._num_leases += 1
                            self._extents[number] = extent
                        seen = self._num_unlocks + 1  # this lock itself counts
                with self._changed:
                    self._changed.wait_for(
                        lambda seen=seen: extent or self._closed or self._num_unlocks > seen
                    )
        finally:
            with self._changed:
                self.num_waiting -= 1
                self._reserved -= 0 if extent else tokens
        assert extent
        return KVLease(self, self._kv, number, extent, offsets, capacities)

    def release(self, number: int) -> None:
        """Releases a lease. Safe from any thread, even while another holds the lock."""
        self._released.append(number)

    def close(self) -> None:
        """Ends all leases."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed


class KVLease:
    """The leased blocks of a session; released when it is closed or garbage-collected.

    Outside of `exclusive` the arrays of a cache from here do not belong to the session: other
    passes write to them, and blocks may be moved.

    Attributes:
      number: of the lease, in the order in which they were granted.
    """

    def __init__(
        self,
        table: LeaseTable,
        kv: KVManager,
        number: int,
        extent: Extent,
        offsets: np.ndarray,
        capacities: Sequence[int],
    ):
        self._table, self._kv, self.number, self._extent = table, kv, number, extent
        self._offsets, self._capacities = offsets.astype(np.int32), np.asarray(capacities, np.int32)
        self.close = weakref.finalize(self, table.release, number)
        self.close.atexit = False

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Acquires the device lock; see `LeaseTable.exclusive`.

        Raises:
          ClosedError: the lease has ended.
        """
        with self._table.exclusive(f"session {self.number}"):
            self._check()
            yield

    def _check(self) -> None:
        """Raises ClosedError if the lease has ended."""
        if self._table.closed or not self.close.alive or self._extent not in self._kv.leased:
            raise ClosedError(
                "the session's memory is gone: it was closed, or its engine was shut down or has "
                "failed"
            )

    def blocks(self, cache: KVCache) -> list[Extent]:
        """Where the session's blocks are now, and what is in them. Under the lock.

        Raises:
          ClosedError: the lease has ended.
        """
        self._check()
        offsets = self._offsets + self._extent.offset
        table = jax.device_get((cache.capacities, cache.lengths, cache.phases))
        return [Extent(*map(int, block)) for block in zip(offsets, *table, strict=True)]

    def attach(self, cache: KVCache | None = None) -> KVCache:
        """The session's cache with the current arrays; empty blocks for None. Under the lock."""
        arenas, rows = self._kv.pool.cache, len(self._offsets)
        if cache is None:
            cache = dataclasses.replace(
                arenas,
                lengths=filled(rows),
                capacities=jax.device_put(self._capacities),
                phases=filled(rows),
                faults=filled(()),
            )
        offsets = jax.device_put(self._offsets + self._extent.offset)
        cache = _on_device(cache)
        return dataclasses.replace(cache, keys=arenas.keys, values=arenas.values, offsets=offsets)

    def detach(self, cache: KVCache) -> None:
        """Gives the arrays back after passes over them. Under the same lock."""
        self._kv.pool.cache = dataclasses.replace(
            self._kv.pool.cache, keys=cache.keys, values=cache.values
        )
        # Long steps are moved to other offsets for a time.
        self._offsets = np.asarray(cache.offsets) - self._extent.offset

    def snapshot(self, cache: KVCache) -> KVCache:
        """A copy of the session's blocks alone, to look at."""
        with self.exclusive():
            keys, values = self._kv.pool.copy(self._extent)
            offsets = jax.device_put(self._offsets)
            return dataclasses.replace(_on_device(cache), keys=keys, values=values, offsets=offsets)


def _on_device(cache: KVCache) -> KVCache:
    """The cache with all of its arrays on the device. Between passes the host has some of a session's,
    which it reads and changes there."""
    lengths, phases = jax.device_put((cache.lengths, cache.phases))
    return dataclasses.replace(cache, lengths=lengths, phases=phases)
