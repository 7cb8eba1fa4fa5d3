"""Seconds a token of prefill and of copies: whether tokens are computed again or fetched, and kept
as a block of their own or not.

The scheduler and the KV manager read no clock. What they decide follows from these numbers, so
several processes that are given the same numbers decide alike.
"""

import contextlib
import time
from collections.abc import Callable, Iterator


class FixedSpeeds:
    """Speeds that stay as they are given.

    Attributes:
      feed_seconds: per prefilled token; 0 where it is not known.
      copy_seconds: per token fetched from host memory; 0 where it is not known.
    """

    def __init__(self, feed_seconds: float = 0.0, copy_seconds: float = 0.0):
        self.feed_seconds, self.copy_seconds = feed_seconds, copy_seconds

    @property
    def measured(self) -> tuple[float, float]:
        """The measured values of `feed_seconds` and `copy_seconds`, for `use`."""
        return self.feed_seconds, self.copy_seconds

    def use(self, feed_seconds: float, copy_seconds: float) -> None:
        """Takes over speeds that were measured, by this process or by another one."""
        self.feed_seconds, self.copy_seconds = feed_seconds, copy_seconds

    @contextlib.contextmanager
    def feeding(self, tokens: int) -> Iterator[None]:
        """Surrounds a prefill of this many tokens, from its dispatch to its results."""
        yield

    @contextlib.contextmanager
    def copying(self, tokens: int) -> Iterator[None]:
        """Surrounds a copy of this many tokens out of host memory."""
        yield


class MeasuredSpeeds(FixedSpeeds):
    """Speeds that are measured; decisions follow from them once they are taken over with `use`.

    Args:
      clock: the seconds now.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        super().__init__()
        self._clock, self._feed, self._copy = clock, 0.0, 0.0

    @property
    def measured(self) -> tuple[float, float]:
        return self._feed, self._copy

    @contextlib.contextmanager
    def feeding(self, tokens: int) -> Iterator[None]:
        start = self._clock()
        yield
        self._feed = _ema(self._feed, (self._clock() - start) / tokens)

    @contextlib.contextmanager
    def copying(self, tokens: int) -> Iterator[None]:
        start = self._clock()
        yield
        self._copy = _ema(self._copy, (self._clock() - start) / tokens)


def _ema(before: float, now: float) -> float:
    """Moving average with weight 0.1.

    A decrease replaces it, because the first sample includes compilation.
    """
    return now if not before else min(now, 0.9 * before + 0.1 * now)
