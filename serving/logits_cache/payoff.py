"""Decides whether the Logits Cache pays for a request: whether what it spares is more than it costs.

A replayed token spares its row's part of a pass. The cost is the largest logits of every token that
is computed, and the host's time. How many tokens are replayed depends on the agent and its
temperature. That is known from tokens alone, without anything being kept: see
`jaxshare.serving.logits_cache.evidence`. So a kind of requests begins without the cache, and is
kept once its outputs show that replays would have spared clearly more than they cost; then what
replays give is counted as well. Hotspots go further than tokens tell, so a few states are tried.
"""

import collections
import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare.decoding.top_logits import compress_logits
from jaxshare.serving.logits_cache.evidence import Evidence, Watched

_REPEATS = 2
"""Requests whose state had an output before, until a kind is known."""
_MARGIN = 2.0
"""Times the cost that has to be spared. The cost is measured apart from a pass, which hides some."""
_TRIED_STATES, _RETRIED_STATES = 8, 64
"""One state of so many is tried until hotspots were measured twice, and from then on."""
_TRIED_DRAFTS = 3
"""Passes over drafts before there may be no more. They often do not pay where passes are short."""
_RETRIED_DRAFTS = 64
"""One lookup of so many may always draft."""
_WEIGHT = 0.1
"""Of the latest number in a moving average, once there are more numbers than its inverse."""
_MAX_KEYS = 1024
REPEATS = 32
"""Times that the largest logits are found for a measurement."""
_TIMES, _FEWEST_TIMES = 9, 3
"""Times of which the median is taken, at most and at least."""
_LONGER = 1.5
"""Times that a pass with the others takes longer than one without, where it pays to follow: one that
follows waits for the end of a dispatch in which it has parted, in the mean for half of its passes."""


@dataclasses.dataclass
class _Mean:
    """A mean of the first numbers, which becomes a moving average."""

    value: float = 0.0
    count: int = 0

    def add(self, number: float) -> None:
        self.count += 1
        self.value += max(_WEIGHT, 1 / self.count) * (number - self.value)


class _Seconds:
    """The median of recent times: the first ones compile, and any one may be held up."""

    def __init__(self) -> None:
        self._times: collections.deque[float] = collections.deque(maxlen=_TIMES)

    @property
    def value(self) -> float:
        """The median; 0 until there are some."""
        return statistics.median(self._times) if len(self._times) >= _FEWEST_TIMES else 0.0

    def add(self, seconds: float) -> None:
        self._times.append(seconds)


class _Rate:
    """The recent requests of one kind: their tokens, the share whose state had an output before,
    the tokens that a replay gives these, and those that one can take from others under way."""

    def __init__(self) -> None:
        self.tokens, self.repeats = _Mean(), _Mean()
        self.found, self.followed = _Mean(), _Mean()
        self.num_repeats = 0

    def add(self, tokens: int, found: int | None, followed: int, is_repeat: bool) -> None:
        self.tokens.add(tokens)
        self.repeats.add(is_repeat)
        self.followed.add(followed)
        self.num_repeats += is_repeat
        if found is not None:
            self.found.add(found)


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
        self._evidence = Evidence()
        self._rates: collections.OrderedDict[Hashable, _Rate] = collections.OrderedDict()
        # Seconds of a pass, by its rows.
        self._passes: dict[int, _Seconds] = collections.defaultdict(_Seconds)
        self._rows, self._crowded = _Mean(), _Mean()
        self._hosts: dict[str, _Seconds] = collections.defaultdict(_Seconds)
        self._draft_seconds, self._draft_tokens, self._lookups = _Seconds(), _Mean(), 0

    def watch(self, kind: Hashable, state: bytes) -> Watched:
        """Watches a request that begins now, for `ended`.

        Args:
          kind: of the request: its agent, temperature and way to sample again, the last of all.
          state: the digest of its prompt.
        """
        watched = self._evidence.watch(kind, state)
        watched.follows = self.following_pays()
        return watched

    def pays(self, watched: Watched, is_cached: bool) -> bool:
        """Returns whether a request should use the cache.

        Args:
          watched: the request.
          is_cached: whether its state is cached: a kind that is not known uses what there is.
        """
        if self._clock is None:
            return True
        rate = self._rates.get(watched.kind)
        if rate is None or rate.num_repeats < _REPEATS or not self._known_passes():
            return is_cached
        way, tokens = _way_of(watched.kind), rate.tokens.value
        if way == "hotspot":
            is_measured = rate.found.count >= _REPEATS
            one_of = _RETRIED_STATES if is_measured else _TRIED_STATES
            if watched.state[0] % one_of == 0:
                return self.balance(rate.repeats.value, tokens, 0, tokens, way) > 0
            if not is_measured:
                return False
        found, followed = rate.found.value, rate.followed.value
        return self.balance(rate.repeats.value, found, followed, tokens, way) > 0

    def balance(
        self, repeats: float, found: float, followed: float, tokens: float, way: str = "stepwise"
    ) -> float:
        """Seconds that keeping spares a request in the mean, beyond what is enough to be sure.

        Args:
          repeats: the share of requests whose state had an output before.
          found: tokens that a replay gives these.
          followed: tokens that a request may take from another one under way.
          tokens: of a request.
          way: "stepwise" or "hotspot".
        """
        spared = repeats * (found * self._token_seconds() - self._hosts[way].value)
        if self.following_pays():
            spared += followed * self._row_seconds()
        else:
            followed = 0.0
        cost = self._hosts["write"].value
        if spared <= _MARGIN * cost:
            return spared - _MARGIN * cost
        computed = max(0.0, tokens - repeats * found - followed)
        return spared - _MARGIN * (cost + computed * self.keeping_seconds())

    def following_pays(self) -> bool:
        """Returns whether a request should wait for what another one of its state computes, rather
        than compute it in a row of its own: where others wait for rows, or a row takes long."""
        if self._clock is None:
            return True
        known = self._known_passes()
        if not known:
            return False
        is_long = self._pass_seconds() > _LONGER * known[min(known)]
        return is_long or self._crowded.value > 0.5

    def ended(self, watched: Watched, tokens: Sequence[int], replayed: int | None) -> None:
        """Counts a request.

        Args:
          watched: as of `watch`.
          tokens: of its output.
          replayed: those that came from the cache; None where it was left by itself.
        """
        if self._clock is None:
            return
        found, followed = self._evidence.add(watched, tokens, replayed is not None)
        is_repeat = watched.num_known > 0
        rate = self._rates.pop(watched.kind, None) or _Rate()
        self._rates[watched.kind] = rate
        measured: int | None = found
        if replayed is not None and (watched.any_kept or watched.found):
            measured = watched.found or 0
        elif not is_repeat or _way_of(watched.kind) == "hotspot":
            measured = None
        rate.add(len(tokens), measured, followed, is_repeat)
        if len(self._rates) > _MAX_KEYS:
            self._rates.popitem(last=False)

    @contextlib.contextmanager
    def hosting(self, what: str) -> Iterator[None]:
        """Surrounds what the host does for one request: its "stepwise" or "hotspot" replay where
        there is one, or the "write" of its distributions."""
        if self._clock is None:
            yield
            return
        begun = self._clock()
        yield
        self._hosts[what].add(self._clock() - begun)

    def ran(self, rows: int, seconds: float, is_crowded: bool = False) -> None:
        """Counts a pass of the decode loop; 0 seconds are none that were measured. It is crowded
        where requests wait for rows."""
        if seconds and rows:
            self._passes[rows].add(seconds)
            self._rows.add(rows)
            self._crowded.add(is_crowded)

    def _pass_seconds(self) -> float:
        """Seconds of a pass with as many rows as there are in the mean."""
        known = self._known_passes()
        return known[min(known, key=lambda rows: abs(rows - self._rows.value))]

    def _known_passes(self) -> dict[int, float]:
        """Seconds of a pass, by its rows, where enough were measured."""
        return {rows: times.value for rows, times in self._passes.items() if times.value}

    def _token_seconds(self) -> float:
        """Seconds that a replayed token spares: its row's part of a pass, which ends sooner for the
        row, or serves another one."""
        return self._pass_seconds() / max(1.0, self._rows.value)

    def _row_seconds(self) -> float:
        """Seconds that a pass is shorter for a row less; its part of the pass if rows are short."""
        if self._crowded.value > 0.5:
            return self._token_seconds()
        known = self._known_passes()
        if len(known) < 2:
            return 0.0
        slope = float(np.polyfit([*known], [*known.values()], 1)[0])
        return float(np.clip(slope, 0, min(seconds / rows for rows, seconds in known.items())))

    def keeping_seconds(self) -> float:
        """Seconds in which the largest logits of a row's distribution are found; measured once."""
        if self._clock is None:
            return 0.0
        rows = self._shape[0]
        seconds = _compression_seconds(self._clock, *self._shape)
        return seconds / max(1.0, min(rows, self._rows.value))

    # Drafts.

    def drafted(self, begun: float, tokens: int, rows: int) -> None:
        """Counts a pass over drafts that began then and gave so many tokens to so many rows."""
        if self._clock is not None:
            self._draft_seconds.add(self._clock() - begun)
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
        is_known = self._draft_tokens.count >= _TRIED_DRAFTS and self._known_passes()
        if self._clock is None or not is_known or self._lookups % _RETRIED_DRAFTS == 0:
            return True
        spared = self._draft_tokens.value * self._pass_seconds()
        return spared > self._draft_seconds.value + host_seconds


def _way_of(kind: Hashable) -> str:
    """The way to sample again, the last part of a kind."""
    return kind[-1] if isinstance(kind, tuple) else "stepwise"


@functools.lru_cache(maxsize=64)
def _compression_seconds(clock: Callable[[], float], rows: int, vocab: int, kept: int) -> float:
    """Seconds in which the largest logits of all rows of a pass are found."""
    logits, ones, seconds = jnp.zeros((rows, vocab)), jnp.ones(rows), []
    for _ in range(4):  # the first one compiles
        begun = clock()
        jax.block_until_ready(_compress_often(logits, ones, kept))
        seconds.append((clock() - begun) / REPEATS)
    return min(seconds)


@functools.partial(jax.jit, static_argnums=2)
def _compress_often(logits: jax.Array, temperature: jax.Array, kept: int) -> jax.Array:
    """Does what a pass does to keep logits, REPEATS times, as a program of its own takes time to be
    called."""

    def once(_: int, logits: jax.Array) -> jax.Array:
        return logits + compress_logits(logits, temperature, kept).rest[:, None]

    return jax.lax.fori_loop(0, REPEATS, once, logits)
