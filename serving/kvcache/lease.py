"""Guests: sessions of workers whose blocks are in the engine's memory, and whose passes take turns
with those of its calls."""

import collections
import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from jaxshare import KVCache
from jaxshare.serving.errors import ClosedError, EngineError, TooLongError
from jaxshare.serving.kvcache.manager import KVManager
from jaxshare.serving.kvcache.pool import Extent


class LeaseTable:
    """The host of all guests of an engine.

    Attributes:
      waiting: sessions that wait for memory. Calls are not admitted meanwhile, or there would never
        be enough.
    """

    def __init__(self, memory: KVManager):
        self.waiting = 0
        self._memory = memory
        self._changed = threading.Condition()
        self._tickets: collections.deque[object] = collections.deque()
        self._busy = self._closed = False
        self._rounds = self._wanted = 0
        # of guests that nobody has any more
        self._gone: collections.deque[Extent] = collections.deque()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """The memory and the device are the caller's alone. Who has waited longest comes first."""
        ticket = object()
        with self._changed:
            self._tickets.append(ticket)
            try:
                self._changed.wait_for(lambda: not self._busy and self._tickets[0] is ticket)
                self._busy = True
            finally:
                # whoever interrupts the wait must not leave it to those behind
                self._tickets.remove(ticket)
                self._changed.notify_all()
        try:
            while self._gone:
                self._memory.take_back(self._gone.popleft())
            yield
        finally:
            with self._changed:
                self._busy = False
                self._rounds += 1
                self._changed.notify_all()

    @property
    def room(self) -> int:
        """Tokens that calls may need beside all sessions, those that wait for memory included. Not
        for use in a turn."""
        if self._gone:
            with self.turn():
                pass
        with self._changed:
            return self._memory.pool.tokens - self._memory.lent_tokens - self._wanted

    def announce(self, tokens: int) -> None:
        """A session will want so many tokens; `invite` or `cancel` has to follow.

        Raises:
          TooLongError: they would never fit.
          EngineError: other sessions have what is wanted, and nobody can say for how long.
        """
        pool, room = self._memory.pool, self.room
        if tokens > pool.tokens:
            size = pool.bytes_a_token
            raise TooLongError(
                f"the session's blocks take {tokens} tokens, {tokens * size} bytes, but the engine "
                f"has room for {pool.tokens}, {pool.tokens * size} bytes; raise kv_bytes or lower "
                "the session's budget"
            )
        if tokens > room:
            raise EngineError(
                f"the session's blocks take {tokens} tokens, but other sessions have "
                f"{pool.tokens - room} of the engine's {pool.tokens}; close one of them, or raise "
                "kv_bytes"
            )
        with self._changed:
            self._wanted += tokens

    def cancel(self, tokens: int) -> None:
        """A session wants nothing any more."""
        with self._changed:
            self._wanted -= tokens

    def invite(self, capacities: Sequence[int], tokens: int, offsets: np.ndarray) -> "KVLease":
        """Memory for blocks of these capacities at these offsets of so many tokens; waits until
        calls that are in the way have ended.

        Raises:
          ClosedError: the engine was shut down.
        """
        extent = None
        with self._changed:
            self.waiting += 1
        try:
            while not extent:
                with self.turn():
                    if self._closed:
                        raise ClosedError("the engine is shut down; make another")
                    with self._changed:  # so that nobody sees it counted twice
                        if extent := self._memory.lend(tokens):
                            self._wanted -= tokens
                        seen = self._rounds + 1  # this turn itself counts
                with self._changed:
                    self._changed.wait_for(
                        lambda seen=seen: extent or self._closed or self._rounds > seen
                    )
        finally:
            with self._changed:
                self.waiting -= 1
                self._wanted -= 0 if extent else tokens
        assert extent
        return KVLease(self, self._memory, extent, offsets, capacities)

    def dismiss(self, extent: Extent) -> None:
        """A guest is gone; from any thread, even in the midst of a turn."""
        self._gone.append(extent)

    def close(self) -> None:
        """Nobody has memory here any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed


class KVLease:
    """Blocks of a session. Their memory goes back when it is closed, or when nobody has it any
    more.

    Between turns the arrays of a cache that came from here are not the session's: others write to
    them, and blocks may be moved.
    """

    def __init__(
        self,
        host: LeaseTable,
        memory: KVManager,
        extent: Extent,
        offsets: np.ndarray,
        capacities: Sequence[int],
    ):
        self._host, self._memory, self._extent = host, memory, extent
        self._offsets, self._capacities = offsets.astype(np.int32), np.asarray(capacities, np.int32)
        self.close = weakref.finalize(self, host.dismiss, extent)
        self.close.atexit = False

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """As `LeaseTable.turn`.

        Raises:
          ClosedError: the memory is not the session's any more.
        """
        with self._host.turn():
            if self._host.closed or not self.close.alive or self._extent not in self._memory.lent:
                raise ClosedError(
                    "the session's memory is gone: it was closed, or its engine was shut down or "
                    "has failed"
                )
            yield

    def attach(self, cache: KVCache | None = None) -> KVCache:
        """The session's cache with the arrays as they are now; empty blocks for None. In a turn."""
        arenas, none = self._memory.pool.cache, jnp.zeros(len(self._offsets), jnp.int32)
        if cache is None:
            cache = dataclasses.replace(
                arenas,
                lengths=none,
                capacities=jnp.asarray(self._capacities),
                phases=none + 0,
                faults=jnp.zeros((), jnp.int32),
            )
        offsets = jnp.asarray(self._offsets + self._extent.offset)
        return dataclasses.replace(cache, keys=arenas.keys, values=arenas.values, offsets=offsets)

    def detach(self, cache: KVCache) -> None:
        """Gives the arrays back after passes over them. In the same turn."""
        self._memory.pool.cache = dataclasses.replace(
            self._memory.pool.cache, keys=cache.keys, values=cache.values
        )
        # long steps lie elsewhere for a time
        self._offsets = np.asarray(cache.offsets) - self._extent.offset

    def snapshot(self, cache: KVCache) -> KVCache:
        """A copy of the session's blocks alone, to look at."""
        with self.turn():
            keys, values = self._memory.pool.copy(self._extent)
            return dataclasses.replace(
                cache, keys=keys, values=values, offsets=jnp.asarray(self._offsets)
            )
