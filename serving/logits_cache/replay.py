"""Drawing again from what is kept of distributions: the same tokens that the device draws from the
full logits, or none.

A draw is the inverse of a cumulative sum at a number that depends on (seed, position) alone. So a
token found here is not merely distributed as a fresh one: it is the fresh one. What is kept decides
most draws; where it does not, because the draw falls between the kept tokens, or so close to one's
edge that rounding on the device could move it, or because a cut may reach tokens that are not kept,
the answer is that the model has to say. Everything here is numpy, in float64 where sums are taken.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare.decoding.sampling import Sampler, uniforms
from jaxshare.decoding.top_logits import TopLogits
from jaxshare.layout import bucket
from jaxshare.seeds import seed_words

UNDECIDED = -1
Numbers = np.ndarray | jax.Array
_GUARD = 4e-6
"""How far, as a share of the whole mass, the float32 sums of a device may be off the exact ones: on
a CPU they are below half of it, as a test asserts; the exponentials' own rounding and sums of 256
and of 600 terms allow for that."""
_STORED = 1e-5
"""The same for the stored masses, as a share of the mass of what is not kept."""
_TIE = 1e-6
"""Logits closer than this share of their distance to the largest may be one number to the device,
or two."""
_BLOCK = 128
"""Distributions looked at together, so that temporaries stay in a core's cache."""
FIELDS = tuple(field.name for field in dataclasses.fields(TopLogits) if field.name != "vocab")
"""The arrays of `TopLogits`."""
_TINY = 2.0**-126
"""A float32 smaller than this may have been stored as 0."""


def redraw(kept: TopLogits, sampler: Sampler, seed: int, position: int) -> np.ndarray:
    """What `sampler` draws from n distributions, at positions `position`, `position + 1`, ... of
    the row's randomness.

    Returns:
      int32[n]: the tokens that `Samplers.sample` draws from the full logits, or `UNDECIDED` where
        what is kept does not tell.
    """
    return decide(kept, sampler, uniform_run(seed, position, len(kept.tokens)))


def uniform_run(seed: int, position: int, count: int) -> np.ndarray:
    """float32[count]: the random numbers of a row with this seed at `count` positions from
    `position` on."""
    arguments = jax.device_put((seed_words([seed])[0], np.int32(position)), _host())
    return np.asarray(_uniform_run(*arguments, bucket(count)))[:count]


@functools.partial(jax.jit, static_argnums=2)
def _uniform_run(seed: jax.Array, position: jax.Array, count: int) -> jax.Array:
    return uniforms(
        jnp.broadcast_to(seed, (count, 2)), position + jnp.arange(count, dtype=jnp.int32)
    )


@functools.cache
def _host():
    """The CPU, so that a replay never waits for what runs on an accelerator; the numbers are the
    same everywhere."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return None


def decide(kept: TopLogits, sampler: Sampler, uniform: np.ndarray) -> np.ndarray:
    """What `sampler` draws from n distributions at the random numbers `uniform` [n]; int32[n], or
    `UNDECIDED`, as `redraw`."""
    drawn = np.full(len(uniform), UNDECIDED, np.int32)
    with np.errstate(all="ignore"):
        for begin in range(0, len(uniform), _BLOCK):
            some = slice(begin, begin + _BLOCK)
            view = _View.of(rows(kept, some), sampler)
            if sampler.temperature == 0:
                place = np.argmax(view.logits, axis=1)
                sure = np.isfinite(view.top) & (view.ceiling < view.top)
            else:
                place, sure = _invert(view, uniform[some].astype(np.float64))
            drawn[some] = np.where(
                sure, np.asarray(view.kept.tokens)[np.arange(len(place)), place], UNDECIDED
            )
    return drawn


def rows(kept: TopLogits, some: slice) -> TopLogits:
    """Some of n distributions on the host, without a copy."""
    return dataclasses.replace(
        kept, **{name: np.asarray(getattr(kept, name))[some] for name in FIELDS}
    )


def probabilities(kept: TopLogits, sampler: Sampler) -> tuple[np.ndarray, np.ndarray]:
    """Each kept token's chance, float64[n, K], and that of all others together, float64[n];
    temperature above 0.

    At the temperature that the distributions were kept at, and without cuts or a bias that reach
    tokens which are not kept, these are exact. Elsewhere the mass of what is not kept is only
    bounded, and the middle of the bounds is taken.
    """
    with np.errstate(all="ignore"):
        view = _View.of(kept, sampler)
        low, high = view.others()
        rest = (low + high) / 2
        total = view.possible.sum(axis=1) + rest
    return view.possible / total[:, None], rest / total


@dataclasses.dataclass(frozen=True)
class _View:
    """n distributions as a sampler sees them, relative to the largest biased logit `top`.

    Attributes:
      kept: what they are seen from. sampler: who looks.
      logits: float32[n, K], biased as the device does it; top: float32[n], the largest.
      largest, least: float64[n], the largest and the smallest of the kept logits before the bias.
      ceiling: float32[n], the most that the biased logit of a token can be that is not kept; -inf
        where all are kept.
      unkept: how many tokens are not kept.
      certain, possible: float64[n, K], the weights of kept tokens that the cuts certainly, and
        possibly, leave in; 0 elsewhere.
      open: bool[n], whether the cuts may leave in a token that is not kept. cut: whether they may
        cut any off.
      edits: token and bias of those that are biased or forbidden; absent: bool[n, X], which of them
        are not kept.
    """

    kept: TopLogits
    sampler: Sampler
    logits: np.ndarray
    top: np.ndarray
    largest: np.ndarray
    least: np.ndarray
    ceiling: np.ndarray
    unkept: int
    certain: np.ndarray
    possible: np.ndarray
    open: np.ndarray
    cut: bool
    edits: list[tuple[int, float]]
    absent: np.ndarray

    @classmethod
    def of(cls, kept: TopLogits, sampler: Sampler) -> "_View":
        tokens, logits = np.asarray(kept.tokens), np.asarray(kept.logits, np.float32)
        n, k = tokens.shape
        edits = [
            (t, b)
            for t, b in {**sampler.bias, **dict.fromkeys(sampler.forbidden, -np.inf)}.items()
            if t < kept.vocab
        ]
        unkept = kept.vocab - k
        largest, least = logits.max(axis=1), logits.min(axis=1)
        ceiling = least if unkept else np.full(n, -np.inf, np.float32)
        absent = np.zeros((n, len(edits)), bool)
        if edits:
            bias = np.zeros(kept.vocab, np.float32)
            bias[[t for t, _ in edits]] = [b for _, b in edits]
            logits = logits + bias[tokens]
            first = np.arange(n)[:, None] * kept.vocab
            places = first + np.asarray([t for t, _ in edits])
            flat = (first + tokens).ravel()  # ascending
            found = np.minimum(np.searchsorted(flat, places), flat.size - 1)
            absent = flat[found] != places
            for x, (_, b) in enumerate(edits):
                ceiling = np.where(
                    absent[:, x] & (unkept > 0), np.maximum(ceiling, least + np.float32(b)), ceiling
                )
        top = logits.max(axis=1) if edits else largest
        nothing = np.zeros((n, 0))
        view = cls(
            kept,
            sampler,
            logits,
            top,
            largest.astype(np.float64),
            least.astype(np.float64),
            ceiling,
            unkept,
            nothing,
            nothing,
            np.full(n, unkept > 0),
            False,
            edits,
            absent,
        )
        return view if sampler.temperature == 0 else view._cut()

    @property
    def beta(self) -> float:
        """1 / temperature, of the temperature as the device has it."""
        return 1 / max(float(np.float32(self.sampler.temperature)), 1e-300)

    def _cut(self) -> "_View":
        """With weights, after top-k, top-p and min-p. Thresholds are kept as intervals of logits
        relative to the largest."""
        s, k = self.sampler, self.logits.shape[1]
        below = self.logits - self.top[:, None].astype(np.float64)
        weights = below * self.beta
        np.exp(weights, out=weights)
        view = dataclasses.replace(self, certain=weights, possible=weights)
        by_k, by_p, by_fraction = 0 < s.top_k < self.kept.vocab, s.top_p < 1, s.min_p > 0
        if not (by_k or by_p or by_fraction):
            return view
        ceiling = self.ceiling.astype(np.float64) - self.top
        ceiling = ceiling[:, None]
        certain = possible = np.ones(below.shape, bool)
        reaches = np.full(ceiling.shape, self.unkept > 0)
        if by_k or by_p:
            order = np.sort(self.logits, axis=1)[:, ::-1].astype(np.float64) - self.top[:, None]
            sure, maybe = np.ones(order.shape, bool), np.ones(order.shape, bool)
        if by_k:
            # The k-th largest of all lies between the k-th largest of the kept, and that or the
            # most the others can be.
            low = (
                order[:, s.top_k - 1 : s.top_k] if s.top_k <= k else np.full(ceiling.shape, -np.inf)
            )
            high = np.maximum(low, ceiling)
            certain, possible, reaches = (
                below >= high,
                _reach(below, low),
                reaches & _reach(ceiling, low),
            )
            sure, maybe = order >= high, _reach(order, low)
        if by_p:
            p = float(np.float32(s.top_p))
            rest_low, rest_high = (
                r[:, None] for r in dataclasses.replace(view, open=reaches[:, 0], cut=by_k).others()
            )
            sorted_weights = np.exp(order * self.beta)
            least, most = (
                np.cumsum(sorted_weights * sure, axis=1),
                np.cumsum(sorted_weights * maybe, axis=1),
            )
            total_low, total_high = least[:, -1:] + rest_low, most[:, -1:] + rest_high
            slack = _GUARD * total_high
            low = _first(order, least >= p * total_high + slack, -np.inf)
            high = _first(
                order,
                most + np.where(_reach(ceiling, order), rest_high, 0) >= p * total_low - slack,
                np.inf,
            )
            high = np.maximum(np.where(np.isinf(high), ceiling, high), ceiling)
            certain, possible, reaches = (
                certain & (below >= high),
                possible & _reach(below, low),
                reaches & _reach(ceiling, low),
            )
        if by_fraction:
            floor = np.log(float(np.float32(s.min_p)))
            slack = 1e-6 * abs(floor) + 5e-7 if floor else 0.0
            scaled, edge = below * self.beta, ceiling * self.beta
            certain = certain & ((scaled >= floor + slack) | (below == 0))
            possible, reaches = (
                possible & (scaled >= floor - slack),
                reaches & (edge >= floor - slack),
            )
        return dataclasses.replace(
            view,
            certain=weights * certain,
            possible=weights * possible,
            open=reaches[:, 0],
            cut=True,
        )

    def others(self) -> tuple[np.ndarray, np.ndarray]:
        """Bounds, float64[n], of the weight of all tokens that are not kept and that the cuts leave
        in.

        Their mass is known at temperature 1 as well as at `kept_at`, and between the two its
        logarithm is convex.
        """
        low, high = self._moved(
            self.kept.rest, self.kept.rest, self.kept.kept_at, np.asarray(self.unkept)
        )
        if np.any(self.kept.kept_at != np.float32(self.sampler.temperature)):
            low_1, high_1 = self._moved(
                self.kept.rest_at_1, self.kept.rest_at_1, np.ones(len(low)), np.asarray(self.unkept)
            )
            whole, whole_1 = (
                np.log(np.asarray(m, np.float64) * (1 + _STORED) + self.unkept * _TINY)
                for m in (self.kept.rest, self.kept.rest_at_1)
            )
            share = (self.beta - 1) / (1 / np.asarray(self.kept.kept_at, np.float64) - 1)
            between = np.where(
                (share >= 0) & (share <= 1), share * whole + (1 - share) * whole_1, np.inf
            )
            low, high = np.maximum(low, low_1), np.minimum(np.minimum(high, high_1), between)
        return self._seen(low, high, self.absent, np.asarray(self.unkept))

    def between(
        self, mass: np.ndarray, begin: np.ndarray, end: np.ndarray, count: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same of the tokens in [begin, end) alone, [n] each; `mass` of them is stored, and
        `count` of them are not kept."""
        tokens = np.asarray([token for token, _ in self.edits], np.int64)
        here = self.absent & (begin[:, None] <= tokens) & (tokens < end[:, None])
        return self._seen(*self._moved(mass, self.kept.rest, self.kept.kept_at, count), here, count)

    def _moved(
        self, mass: Numbers, whole: Numbers, temperature: Numbers, count: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bounds of the logarithm of a mass at this temperature, from what it is at another; it is
        a part of the mass `whole`.

        Of m masses x^b, each at most c^b <= 1, with sum S(b), and with p = b / b0: S(b) is at most
        S(b0) c^(b - b0) where b >= b0, and at least that where b <= b0; it is at most m^(1 - p)
        S(b0)^p where p <= 1, and at least that where p >= 1 (Jensen). At b = b0 all of these are
        S(b0).
        """
        at, most = 1 / np.asarray(temperature, np.float64), self.least - self.largest
        steeper, power = self.beta >= at, self.beta / at
        error = _STORED * np.asarray(whole, np.float64)
        stored, log_count = np.asarray(mass, np.float64), np.log(np.maximum(count, 1))

        def moved(log_mass: np.ndarray, highest: bool) -> np.ndarray:
            return np.where(
                steeper == highest,
                (self.beta - at) * most + log_mass,
                (1 - power) * log_count + power * log_mass,
            )

        high = np.minimum(
            moved(np.log(stored + error + count * _TINY), True), log_count + self.beta * most
        )
        return moved(np.log(np.maximum(stored - error, 0)), False), high

    def _seen(
        self, low: np.ndarray, high: np.ndarray, here: np.ndarray, count: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logarithms of bounds as weights: relative to the largest biased logit, with the bias,
        after the cuts."""
        shift = self.beta * (self.largest - self.top)
        low, high = np.exp(low + shift), np.exp(high + shift)
        for x, (_, bias) in enumerate(self.edits):
            # Of a biased token that is not kept, the stored mass has between nothing and what the
            # least kept one has.
            before, after = (np.exp(self.beta * (self.least + b - self.top)) for b in (0.0, bias))
            high = high + np.where(here[:, x], np.maximum(after - before, 0), 0)
            low = low - np.where(here[:, x], np.maximum(before - after, 0), 0)
        some = self.open & (count > 0) & np.isfinite(self.ceiling)
        return np.where(some & (not self.cut), np.maximum(low, 0), 0), np.where(some, high, 0)


def _reach(below: np.ndarray, threshold: np.ndarray) -> np.ndarray:
    """Whether what is so far below the largest may be at or above the threshold."""
    return below * (1 - _TIE) >= threshold


def _first(order: np.ndarray, reached: np.ndarray, otherwise: float) -> np.ndarray:
    """[n, 1]: the first of each row of `order` where `reached`."""
    value = np.take_along_axis(order, np.argmax(reached, axis=1)[:, None], axis=1)
    return np.where(reached.any(axis=1, keepdims=True), value, otherwise)


def _invert(view: _View, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The place of the drawn token among the kept ones, [n], and whether it is certainly drawn,
    bool[n]."""
    kept = view.kept
    tokens, below, mass = (
        np.asarray(kept.tokens),
        np.asarray(kept.below),
        np.asarray(kept.rest, np.float64),
    )
    row = np.arange(len(tokens))
    certain = np.cumsum(view.certain, axis=1)
    possible = certain if view.possible is view.certain else np.cumsum(view.possible, axis=1)
    # A guess, which one look at both of its sides then confirms or not.
    guess = certain
    total = certain[:, -1]
    low = high = np.zeros(len(row))
    if view.open.any():
        low, high = view.others()
        scale = np.where(mass > 0, low / mass, 0)
        guess = below * scale[:, None]
        guess += certain
        total = total + low
    j = np.argmax(guess > (uniform * total)[:, None], axis=1)
    token = tokens[row, j]
    earlier = token - j  # as many tokens before it are not kept
    before = below[row, j].astype(np.float64)
    left_low, left_high = view.between(before, np.zeros_like(token), token, earlier)
    right_low, right_high = view.between(
        np.maximum(mass - before, 0),
        token + 1,
        np.full_like(token, kept.vocab),
        view.unkept - earlier,
    )
    # What lies on either side is bounded by itself, and by what the other side leaves of the whole.
    left_low, left_high, right_low, right_high = (
        np.maximum(left_low, low - right_high),
        np.minimum(left_high, high - right_low),
        np.maximum(right_low, low - left_high),
        np.minimum(right_high, high - left_low),
    )
    weight = view.certain[row, j]
    left_low, left_high = (
        left_low + certain[row, j] - weight,
        left_high + possible[row, j] - view.possible[row, j],
    )
    right_low, right_high = (
        right_low + certain[:, -1] - certain[row, j],
        right_high + possible[:, -1] - possible[row, j],
    )
    slack = _GUARD * (left_high + weight + right_high)
    # Drawn where left <= uniform * (left + weight + right) < left + weight, whatever left and right
    # are. An empty side has no edge.
    begins = (left_high == 0) | (
        uniform * (weight + right_low) - (1 - uniform) * left_high >= slack
    )
    ends = (right_high == 0) | ((1 - uniform) * (left_low + weight) - uniform * right_high >= slack)
    normal = float(np.float32(view.sampler.temperature)) >= _TINY
    known = np.isfinite(view.top) & (view.ceiling <= view.top) & normal & (weight > 0)
    return j, begins & ends & known & np.isfinite(slack)
