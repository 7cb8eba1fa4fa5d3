"""Decides whether the Logits Cache pays for a request: whether what it spares is more than it costs.

A replayed token spares its row's part of a pass. The cost is the largest logits of every token that
is computed, and the host's time. How many tokens are replayed depends on the agent and its
temperature, so that is counted from its recent requests; seconds are measured. Where the balance is
negative requests are left by themselves, but for those of a few states, from which a change shows.
"""

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Hashable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare.decoding.top_logits import compress_logits

_TRIALS = 8
"""Requests before any is left by itself."""
_TRIED_DRAFTS = 3
"""Passes over drafts before there may be no more. They often do not pay where passes are short."""
_RETRIED = 64
"""One state of so many is always tried."""
_WEIGHT = 0.1
"""Of the latest number in a moving average, once there are more numbers than its inverse."""
_MAX_KEYS = 1024
REPEATS = 32
"""Times that the largest logits are found for a measurement."""
_FEW_ROWS = 1.5
"""Rows in a dispatch, on average, below which a row that is spared spares its whole pass."""


@dataclasses.dataclass
class _Mean:
    """A mean of the first numbers, which becomes a moving average."""

    value: float = 0.0
    count: int = 0

    def add(self, number: float) -> None:
        self.count += 1
        self.value += max(_WEIGHT, 1 / self.count) * (number - self.value)


def _add_seconds(mean: _Mean, seconds: float) -> None:
    """Adds a time. The first one compiles, so less is believed at once, and more bit by bit."""
    mean.add(min(seconds, 2 * mean.value or seconds))
    if seconds < mean.value:
        mean.value = seconds


class _Rate:
    """Tokens of the recent requests of one kind: those that were replayed, and the others."""

    def __init__(self) -> None:
        self.replayed, self.computed = _Mean(), _Mean()


class Payoff:
    """The balance of the Logits Cache, and of drafts from it, by kinds of requests.

    Args:
      shape: rows, vocabulary and kept logits of a pass, for the measurement of what keeping costs.
      clock: the seconds now; None lets every request use the cache, as where several processes have
        to decide alike.
    """

    def __init__(
        self, shape: tuple[int, int, int], clock: Callable[[], float] | None = time.perf_counter
    ):
        self._shape, self._clock = shape, clock
        self._rates: collections.OrderedDict[Hashable, _Rate] = collections.OrderedDict()
        self._passes: dict[int, _Mean] = {}  # seconds of a pass, by its rows
        self._rows, self._host = _Mean(), _Mean()
        self._draft_seconds, self._draft_tokens, self._lookups = _Mean(), _Mean(), 0
        self._keeping: float | None = None

    def pays(self, kind: Hashable, state: bytes) -> bool:
        """Returns whether a request should use the cache.

        Args:
          kind: of the request: its agent, temperature and way to sample again.
          state: the digest of its prompt.
        """
        rate = self._rates.get(kind)
        is_known = rate is not None and rate.replayed.count >= _TRIALS and self._passes
        if self._clock is None or not is_known or state[0] % _RETRIED == 0:
            return True
        assert rate is not None
        return self.balance(rate.replayed.value, rate.computed.value) > 0

    def balance(self, replayed: float, computed: float) -> float:
        """Seconds that a request spares with so many replayed and so many computed tokens."""
        cost = self._host.value + computed * self._keeping_seconds()
        return replayed * self._row_seconds() - cost

    def ended(self, kind: Hashable, replayed: int, computed: int) -> None:
        """Counts the tokens of a request that used the cache."""
        rate = self._rates.pop(kind, None) or _Rate()
        self._rates[kind] = rate
        rate.replayed.add(replayed)
        rate.computed.add(computed)
        if len(self._rates) > _MAX_KEYS:
            self._rates.popitem(last=False)

    @contextlib.contextmanager
    def hosting(self) -> Iterator[None]:
        """Surrounds what the host does for one request's replay or for its distributions."""
        if self._clock is None:
            yield
            return
        begun = self._clock()
        yield
        _add_seconds(self._host, self._clock() - begun)

    def ran(self, rows: int, seconds: float) -> None:
        """Counts a pass of the decode loop; 0 seconds are none that were measured."""
        if seconds and rows:
            self._passes.setdefault(rows, _Mean()).add(seconds)
            self._rows.add(rows)

    def _row_seconds(self) -> float:
        """Seconds that a pass is shorter for a row less."""
        means = {rows: mean.value for rows, mean in self._passes.items()}
        if self._rows.value < _FEW_ROWS or len(means) < 2:
            few = min(means)
            return means[few] / few
        slope = float(np.polyfit([*means], [*means.values()], 1)[0])
        return float(np.clip(slope, 0, min(seconds / rows for rows, seconds in means.items())))

    def _keeping_seconds(self) -> float:
        """Seconds in which the largest logits of a row's distribution are found."""
        if self._keeping is None:
            assert self._clock is not None
            rows, vocab, kept = self._shape
            logits, ones, seconds = jnp.zeros((rows, vocab)), jnp.ones(rows), []
            for _ in range(4):  # the first one compiles
                begun = self._clock()
                jax.block_until_ready(_compress_often(logits, ones, kept))
                seconds.append((self._clock() - begun) / REPEATS)
            self._keeping = float(min(seconds)) / max(1.0, min(rows, self._rows.value))
        return self._keeping

    # Drafts.

    def drafted(self, begun: float, tokens: int, rows: int) -> None:
        """Counts a pass over drafts that began then and gave so many tokens to so many rows."""
        if self._clock is not None:
            _add_seconds(self._draft_seconds, self._clock() - begun)
            self._draft_tokens.add(tokens / rows)

    def now(self) -> float:
        """The seconds now, for `drafted`."""
        return self._clock() if self._clock is not None else 0.0

    def drafts_pay(self, host_seconds: float) -> bool:
        """Returns whether a pass over drafts takes less time than passes for its tokens.

        Args:
          host_seconds: that it costs to leave the decode loop.
        """
        self._lookups += 1
        is_known = self._draft_tokens.count >= _TRIED_DRAFTS and self._passes
        if self._clock is None or not is_known or self._lookups % _RETRIED == 0:
            return True
        rows = min(self._passes, key=lambda rows: abs(rows - self._rows.value))
        spared = self._draft_tokens.value * self._passes[rows].value
        return spared > self._draft_seconds.value + host_seconds


@functools.partial(jax.jit, static_argnums=2)
def _compress_often(logits: jax.Array, temperature: jax.Array, kept: int) -> jax.Array:
    """Does what a pass does to keep logits, REPEATS times, as a program of its own takes time to be
    called."""

    def once(_: int, logits: jax.Array) -> jax.Array:
        return logits + compress_logits(logits, temperature, kept).rest[:, None]

    return jax.lax.fori_loop(0, REPEATS, once, logits)
