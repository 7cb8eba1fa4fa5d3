"""Measured seconds of prefill, of copies, of passes, and of the host between two dispatches.

From them follow whether tokens are computed again or fetched, and kept as a block of their own or
not, and how many passes a dispatch has. The scheduler and the KV manager read no clock. What they
decide follows from these numbers, so several processes that are given the same numbers decide
alike.
"""

import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterator

USUAL_PASSES = 16
"""Passes of a dispatch before any was measured."""
_DISPATCH_SECONDS, _HOST_TIMES, _MOST_SECONDS = 0.02, 8, 0.25
"""The time of a dispatch, how many times the host's time before it that it takes at least, and the
most seconds that it takes for that."""


class FixedSpeeds:
    """Speeds that stay as they are given.

    Attributes:
      feed_seconds: per prefilled token; 0 where it is not known.
      copy_seconds: per token fetched from host memory; 0 where it is not known.
      pass_seconds: of a pass of the decode loop; 0 where it is not known.
      host_seconds: for which the device waits between two dispatches; 0 where it is not known.
      last_pass_seconds: of a pass of the last dispatch, with its part of the dispatch itself; 0
        where it is not measured.
    """

    last_pass_seconds = 0.0

    def __init__(
        self,
        feed_seconds: float = 0.0,
        copy_seconds: float = 0.0,
        pass_seconds: float = 0.0,
        host_seconds: float = 0.0,
    ):
        self.use(feed_seconds, copy_seconds, pass_seconds, host_seconds)

    @property
    def measured(self) -> tuple[float, float, float, float]:
        """The measured values of the attributes, in their order, for `use`."""
        return self.feed_seconds, self.copy_seconds, self.pass_seconds, self.host_seconds

    def use(
        self, feed_seconds: float, copy_seconds: float, pass_seconds: float, host_seconds: float
    ) -> None:
        """Takes over speeds that were measured, by this process or by another one."""
        self.feed_seconds, self.copy_seconds = feed_seconds, copy_seconds
        self.pass_seconds, self.host_seconds = pass_seconds, host_seconds

    def feeding(self, tokens: int) -> Callable[[], None]:
        """Tells that a prefill of this many tokens is about to be dispatched; to be called when its
        results have arrived. Passes of the decode loop that were dispatched meanwhile begin then."""
        return lambda: None

    @contextlib.contextmanager
    def copying(self, tokens: int) -> Iterator[None]:
        """Surrounds a copy of this many tokens out of host memory."""
        yield

    def passes(self, most: int, *, is_followed: bool = False) -> int:
        """The passes of a dispatch, at most so many.

        Few where they take long, so that tokens are streamed and requests admitted; many where the
        host would take much of the time else.

        Args:
          most: the most passes.
          is_followed: whether the host does its part while another dispatch runs.
        """
        if not self.pass_seconds:
            return min(most, USUAL_PASSES)
        idle = 0.0 if is_followed else self.host_seconds
        seconds = max(_DISPATCH_SECONDS, min(_HOST_TIMES * idle, _MOST_SECONDS))
        return min(most, math.ceil(seconds / self.pass_seconds))

    def idle_passes(self, rows: int) -> int:
        """The passes that some of these rows may idle in a dispatch, until it pays to end it.

        They then have cost as much as the host's time before another dispatch.
        """
        return round(rows * self.host_seconds / self.pass_seconds) if self.pass_seconds else 0

    def dispatching(self) -> None:
        """Tells that passes of the decode loop are about to be dispatched."""

    def dispatched(self) -> None:
        """Tells that passes of the decode loop were dispatched."""

    def fetched(self, passes: int) -> None:
        """Tells that the results of this many passes have arrived since they were dispatched."""

    def interrupted(self) -> None:
        """Tells that the device does something else, or nothing, before the next dispatch."""


class MeasuredSpeeds(FixedSpeeds):
    """Speeds that are measured; decisions follow from them once they are taken over with `use`.

    Args:
      clock: the seconds now.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        super().__init__()
        self._clock, self._feed, self._copy, self._pass, self._host = clock, 0.0, 0.0, 0.0, 0.0
        # When each dispatch whose results have not arrived began, and when it was made.
        self._under_way = collections.deque[tuple[float, float]]()
        self._dispatching = self._last_fetched = 0.0  # the latter also of a prefill
        self._fetched: float | None = None  # unless interrupted since

    @property
    def measured(self) -> tuple[float, float, float, float]:
        return self._feed, self._copy, self._pass, self._host

    def feeding(self, tokens: int) -> Callable[[], None]:
        self.interrupted()
        start = self._clock()

        def fed() -> None:
            self._last_fetched = self._clock()
            self._feed = _ema(self._feed, (self._last_fetched - start) / tokens)

        return fed

    @contextlib.contextmanager
    def copying(self, tokens: int) -> Iterator[None]:
        self.interrupted()
        start = self._clock()
        yield
        self._copy = _ema(self._copy, (self._clock() - start) / tokens)

    def dispatching(self) -> None:
        self._dispatching = self._clock()

    def dispatched(self) -> None:
        dispatched = self._clock()
        is_idle = not self._under_way  # else the host's time is no time of the device
        self._under_way.append((self._dispatching, dispatched))
        if self._fetched is not None and is_idle:
            seconds = dispatched - self._fetched
            # What holds the host up once, a compilation or a checkpoint, must not count as usual.
            self._host = _ema(self._host, min(seconds, 2 * self._host or seconds))

    def fetched(self, passes: int) -> None:
        now, before = self._clock(), self._last_fetched
        self._fetched = self._last_fetched = now
        begun, dispatched = self._under_way.popleft() if self._under_way else (before, before)
        if passes:
            # Those of a dispatch before come first.
            begun, dispatched = max(begun, before), max(dispatched, before)
            # From before the dispatch, which a CPU may end only after the passes.
            self.last_pass_seconds = (now - begun) / passes
            seconds = (now - dispatched) / passes
            # No minimum as below: a pass takes longer where more rows take part.
            self._pass = seconds if not self._pass else 0.7 * self._pass + 0.3 * seconds

    def interrupted(self) -> None:
        self._fetched = None
        self._under_way.clear()


def _ema(before: float, now: float) -> float:
    """Moving average with weight 0.1.

    A decrease replaces it, because the first sample includes compilation.
    """
    return now if not before else min(now, 0.9 * before + 0.1 * now)
