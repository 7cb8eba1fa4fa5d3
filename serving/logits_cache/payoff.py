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
from jaxshare.serving.logits_cache.evidence import Evidence, Watched, way_of

_REPEATS = 2
"""Requests that came again, or beside another one of their state, until a kind is known."""
_MARGIN = 3.0
"""Times the cost that has to be spared. The cost is measured apart from a pass, which hides some."""
_TRIED_STATES, _RETRIED_STATES = 8, 64
"""One state of so many is tried until hotspots were measured twice, and from then on."""
_TRIED_DRAFTS = 3
"""Passes over drafts before there may be no more. They often do not pay where passes are short."""
_FIRST_DRAFTS, _RETRIED_DRAFTS = 8, 64
"""One lookup of so many may draft before it is known what drafts give, and where they do not pay."""
_RUN_BEFORE_DRAFTS = 60.0
"""Seconds of passes after which drafts are compiled without a warm-up."""
_WEIGHT = 0.1
"""Of the latest number in a moving average, once there are more numbers than its inverse."""
_FOLLOWED_STEPS, _FOLLOWING_SECONDS = 5, 5e-4
"""Steps of the scheduler in which a request follows another one, about, and the host's seconds in
each of them before they were measured."""
_WRITING_SECONDS = 2e-4
"""The host's seconds for the distributions of a request before they were measured."""
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
        self.value = 0.0  # until there are some
        self._times: collections.deque[float] = collections.deque(maxlen=_TIMES)

    def add(self, seconds: float) -> None:
        self._times.append(seconds)
        if len(self._times) >= _FEWEST_TIMES:
            self.value = statistics.median(self._times)


class _Rate:
    """The recent requests of one kind, in means.

    Attributes:
      tokens: of a request; repeats: the share whose state had an output before.
      told: tokens that a replay would give these, as the outputs tell.
      found, expected: tokens that replays gave where something was kept, and that outputs told then.
      followed: tokens that a request can take from others under way.
      num_told: requests that shared tokens with another one of their state.
    """

    def __init__(self) -> None:
        self.tokens, self.repeats, self.told = _Mean(), _Mean(), _Mean()
        self.found, self.expected, self.followed = _Mean(), _Mean(), _Mean()
        self.num_told = 0

    @property
    def is_measured(self) -> bool:
        """True once some replays were found."""
        return self.found.count >= _REPEATS

    def replayed(self, way: str) -> float:
        """The tokens that a replay should give a request whose state had an output before."""
        if not self.is_measured:
            return self.told.value
        if way == "hotspot":  # further than outputs tell
            return self.found.value
        return self.told.value * min(1.0, self.found.value / max(self.expected.value, 1e-9))


class Payoff:
    """The balance of the Logits Cache, and of drafts from it, by kinds of requests.

    Args:
      shape: rows, vocabulary and kept logits of a pass, for the measurement of what keeping costs.
      clock: the seconds now; None lets every request use the cache, as where several processes have
        to decide alike.

    Attributes:
      num_ended: requests that were counted.
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
        self.num_ended = 0
        self._spent = 0.0  # seconds of all passes

    def watch(self, kind: Hashable, state: bytes) -> Watched:
        """Watches a request that begins now, for `ended`.

        Args:
          kind: of the request: its agent, temperature and way to sample again, the last of all.
          state: the digest of its prompt.
        """
        watched, rate = self._evidence.watch(kind, state), self._rates.get(kind)
        followed = rate.followed.value if rate else 0.0
        watched.follows = self.following_pays(followed)
        return watched

    def pays(self, watched: Watched, is_cached: bool) -> bool:
        """Returns whether a request should use the cache.

        Args:
          watched: the request.
          is_cached: whether its state is cached: a kind that is not known uses what there is.
        """
        if self._clock is None:
            return True
        rate = self._known_rate(watched.kind)
        if rate is None:
            return is_cached
        if self.kind_pays(watched.kind):
            return True
        way, tokens, repeats = watched.way, rate.tokens.value, rate.repeats.value
        one_of = _TRIED_STATES if way == "hotspot" and not rate.is_measured else _RETRIED_STATES
        most = tokens if way == "hotspot" else rate.told.value
        is_tried = watched.state[0] % one_of == 0
        return is_tried and self.balance(repeats, most, 0, tokens, None) > 0

    def kind_pays(self, kind: Hashable) -> bool:
        """Returns whether the cache is known to pay for the requests of a kind."""
        rate = self._known_rate(kind)
        if rate is None:
            return False
        way, tokens, repeats = way_of(kind), rate.tokens.value, rate.repeats.value
        return self.balance(repeats, rate.replayed(way), rate.followed.value, tokens, way) > 0

    def _known_rate(self, kind: Hashable) -> "_Rate | None":
        """The rate of a kind, if there is enough to judge by."""
        rate = self._rates.get(kind)
        is_known = rate is not None and rate.num_told >= _REPEATS and self._known_passes()
        return rate if is_known else None

    def balance(
        self,
        repeats: float,
        found: float,
        followed: float,
        tokens: float,
        way: str | None = "stepwise",
    ) -> float:
        """Seconds that keeping spares a request in the mean, beyond what is enough to be sure.

        Args:
          repeats: the share of requests whose state had an output before.
          found: tokens that a replay gives these.
          followed: tokens that a request may take from another one under way.
          tokens: of a request.
          way: "stepwise" or "hotspot"; None counts no replay's host seconds, to measure them anew.
        """
        host = self._hosts[way].value if way else 0.0
        spared = repeats * (found * self._token_seconds() - host)
        if self.following_pays(followed):
            spared += followed * self._row_seconds()
        else:
            followed = 0.0
        cost = self._hosts["write"].value or _WRITING_SECONDS
        if spared <= _MARGIN * cost:
            return spared - _MARGIN * cost
        computed = max(0.0, tokens - repeats * found - followed)
        return spared - _MARGIN * (cost + computed * self.keeping_seconds())

    def following_pays(self, followed: float) -> bool:
        """Returns whether a request should wait for what another one of its state computes, rather
        than compute it in a row of its own: where rows are short, as others wait for them, or a row
        takes long, and that is more than the host's seconds meanwhile.

        Args:
          followed: tokens that it may take from another one.
        """
        if self._clock is None:
            return True
        known = self._known_passes()
        if not known or not followed:
            return False
        is_long = self._pass_seconds() > _LONGER * known[min(known)]
        cost = _FOLLOWED_STEPS * (self._hosts["follow"].value or _FOLLOWING_SECONDS)
        is_short = self._crowded.value > 0.5
        return (is_short or is_long) and followed * self._row_seconds() > _MARGIN * cost

    def ended(self, watched: Watched, tokens: Sequence[int], replayed: int | None) -> None:
        """Counts a request.

        Args:
          watched: as of `watch`.
          tokens: of its output.
          replayed: those that came from the cache; None where it was left by itself.
        """
        if self._clock is None:
            return
        self.num_ended += 1
        found, followed = self._evidence.add(watched, tokens, replayed is not None)
        is_repeat = watched.num_known > 0
        rate = self._rates.pop(watched.kind, None) or _Rate()
        self._rates[watched.kind] = rate
        rate.tokens.add(len(tokens))
        rate.repeats.add(is_repeat)
        rate.followed.add(followed)
        rate.num_told += is_repeat or followed > 0
        if is_repeat:
            rate.told.add(found)
        if replayed is not None and (watched.any_kept or watched.found):
            rate.found.add(watched.found or 0)
            rate.expected.add(found)
        if len(self._rates) > _MAX_KEYS:
            self._rates.popitem(last=False)

    @contextlib.contextmanager
    def hosting(self, what: str) -> Iterator[None]:
        """Surrounds what the host does for one request: its "stepwise" or "hotspot" replay where
        there is one, a step in which it can "follow" another one, or the "write" of its
        distributions."""
        if self._clock is None:
            yield
            return
        begun = self._clock()
        yield
        self._hosts[what].add(self._clock() - begun)

    def ran(self, rows: int, seconds: float, passes: int = 1, is_crowded: bool = False) -> None:
        """Counts a dispatch of the decode loop.

        Args:
          rows: in it.
          seconds: of a pass; 0 where it was not measured.
          passes: of the dispatch.
          is_crowded: whether requests wait for rows.
        """
        if seconds and rows:
            self._spent += seconds * passes
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

    def drafting(self, begun: float, tokens: int | None = None) -> None:
        """Counts a pass over drafts that began then, and the tokens that it gave; None for a pass of
        a warm-up, which is to be measured only."""
        if self._clock is not None:
            self._draft_seconds.add(self._clock() - begun)
            if tokens is not None:
                self._draft_tokens.add(tokens)

    def now(self) -> float:
        """The seconds now, for `drafting`."""
        return self._clock() if self._clock is not None else 0.0

    def drafts_pay(self, host_seconds: float, most: int) -> bool:
        """Returns whether a pass over drafts takes less time than its tokens do in the decode loop.

        Before one was measured, in a warm-up or later, there are none until the engine has run for
        as long as makes up for compiling them.

        Args:
          host_seconds: that it costs to leave the decode loop.
          most: tokens of a row that such a pass gives at most.
        """
        if self._clock is None:
            return True
        self._lookups += 1
        cost, is_known = self._draft_seconds.value, self._draft_tokens.count >= _TRIED_DRAFTS
        one_of = _RETRIED_DRAFTS if is_known else _FIRST_DRAFTS
        if not cost or not self._known_passes():
            return self._spent > _RUN_BEFORE_DRAFTS and self._lookups % one_of == 0
        least = (cost + host_seconds) / self._token_seconds()
        if is_known and self._draft_tokens.value > least:
            return True
        return most > least and self._lookups % one_of == 0


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
