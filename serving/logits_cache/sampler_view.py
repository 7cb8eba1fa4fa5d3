"""Distributions under a sampler: the weights of the kept tokens after its bias and cuts, and bounds
of the weight of the tokens that are not kept."""

import dataclasses

import jax
import numpy as np

from jaxshare.decoding.sampling_params import Sampler
from jaxshare.decoding.top_logits import TopLogits

_Numbers = np.ndarray | jax.Array
GUARD = 4e-6
"""The largest error, as a share of the whole mass, of a device's float32 sums: on a CPU they are
below half of it, as a test asserts; the exponentials' own rounding and sums of 256 and of 600 terms
allow for that."""
_STORED = 1e-5
"""The same for the stored masses, as a share of the mass of the tokens that are not kept."""
_TIE = 1e-6
"""Logits closer than this share of their distance to the largest may be equal on the device, or
not."""
TINY = 2.0**-126
"""A float32 smaller than this may have been stored as 0."""


@dataclasses.dataclass(frozen=True)
class SamplerView:
    """n distributions under a sampler, relative to the largest biased logit `top`.

    Attributes:
      top_logits, sampler: the distributions and the sampler.
      logits: float32[n, K], biased as on the device; top: float32[n], the largest.
      largest, smallest: float64[n], the largest and the smallest of the kept logits before the
        bias.
      ceiling: float32[n], the upper bound of the biased logit of a token that is not kept; -inf
        where all are kept.
      unkept: the number of tokens that are not kept.
      certain, possible: float64[n, K], the weights of kept tokens that the cuts certainly, and
        possibly, leave in; 0 elsewhere.
      open: bool[n], whether the cuts may leave in a token that is not kept; cut: whether they may
        cut any off.
      edits: token and bias of those that are biased or forbidden; absent: bool[n, X], which of them
        are not kept.
    """

    top_logits: TopLogits
    sampler: Sampler
    logits: np.ndarray
    top: np.ndarray
    largest: np.ndarray
    smallest: np.ndarray
    ceiling: np.ndarray
    unkept: int
    certain: np.ndarray
    possible: np.ndarray
    open: np.ndarray
    cut: bool
    edits: list[tuple[int, float]]
    absent: np.ndarray

    @classmethod
    def of(cls, top_logits: TopLogits, sampler: Sampler) -> "SamplerView":
        """The view of distributions, with weights unless the temperature is 0."""
        tokens, logits = np.asarray(top_logits.tokens), np.asarray(top_logits.logits, np.float32)
        n, k = tokens.shape
        edits = [
            (t, b)
            for t, b in {**sampler.bias, **dict.fromkeys(sampler.forbidden, -np.inf)}.items()
            if t < top_logits.vocab
        ]
        unkept = top_logits.vocab - k
        largest, smallest = logits.max(axis=1), logits.min(axis=1)
        ceiling = smallest if unkept else np.full(n, -np.inf, np.float32)
        absent = np.zeros((n, len(edits)), bool)
        if edits:
            bias = np.zeros(top_logits.vocab, np.float32)
            bias[[t for t, _ in edits]] = [b for _, b in edits]
            logits = logits + bias[tokens]
            first = np.arange(n)[:, None] * top_logits.vocab
            edited = first + np.asarray([t for t, _ in edits])
            flat = (first + tokens).ravel()  # ascending
            nearest = np.minimum(np.searchsorted(flat, edited), flat.size - 1)
            absent = flat[nearest] != edited
            for x, (_, b) in enumerate(edits):
                ceiling = np.where(
                    absent[:, x] & (unkept > 0),
                    np.maximum(ceiling, smallest + np.float32(b)),
                    ceiling,
                )
        top = logits.max(axis=1) if edits else largest
        empty = np.zeros((n, 0))
        view = cls(
            top_logits,
            sampler,
            logits,
            top,
            largest.astype(np.float64),
            smallest.astype(np.float64),
            ceiling,
            unkept,
            empty,
            empty,
            np.full(n, unkept > 0),
            False,
            edits,
            absent,
        )
        return view if sampler.temperature == 0 else view._cut()

    @property
    def beta(self) -> float:
        """1 / temperature, rounded as on the device."""
        return 1 / max(float(np.float32(self.sampler.temperature)), 1e-300)

    def _cut(self) -> "SamplerView":
        """The view with weights, after top-k, top-p and min-p.

        Thresholds are intervals of logits relative to the largest, since tokens that are not kept
        are only bounded.
        """
        s, k = self.sampler, self.logits.shape[1]
        below = self.logits - self.top[:, None].astype(np.float64)
        weights = below * self.beta
        np.exp(weights, out=weights)
        view = dataclasses.replace(self, certain=weights, possible=weights)
        by_k, by_p, by_fraction = 0 < s.top_k < self.top_logits.vocab, s.top_p < 1, s.min_p > 0
        if not (by_k or by_p or by_fraction):
            return view
        ceiling = (self.ceiling.astype(np.float64) - self.top)[:, None]
        all_kept = np.ones(below.shape, bool)
        cuts = _Cuts(all_kept, all_kept, np.full(ceiling.shape, self.unkept > 0))
        if by_k or by_p:
            order = np.sort(self.logits, axis=1)[:, ::-1].astype(np.float64) - self.top[:, None]
            certain = possible = np.ones(order.shape, bool)  # of the sorted logits
            if by_k:
                # The k-th largest of all is between the k-th largest of the kept, and that or the
                # ceiling of the others.
                none = np.full(ceiling.shape, -np.inf)
                low = order[:, s.top_k - 1 : s.top_k] if s.top_k <= k else none
                high = np.maximum(low, ceiling)
                cuts = cuts.narrowed(below, ceiling, low, high)
                certain, possible = order >= high, _may_reach(order, low)
            if by_p:
                others = dataclasses.replace(view, open=cuts.open[:, 0], cut=by_k).others()
                low, high = self._top_p_threshold(order, ceiling, certain, possible, others)
                cuts = cuts.narrowed(below, ceiling, low, high)
        if by_fraction:
            cuts = self._cut_min_p(cuts, below, ceiling)
        return dataclasses.replace(
            view,
            certain=weights * cuts.certain,
            possible=weights * cuts.possible,
            open=cuts.open[:, 0],
            cut=True,
        )

    def _top_p_threshold(
        self,
        order: np.ndarray,
        ceiling: np.ndarray,
        certain: np.ndarray,
        possible: np.ndarray,
        others: tuple[np.ndarray, np.ndarray],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bounds, [n, 1], of the smallest logit that top-p leaves in.

        Args:
          order: float64[n, K], the kept logits relative to the largest, in descending order.
          ceiling: [n, 1], as of the view, relative to the largest.
          certain, possible: bool[n, K], those of `order` that earlier cuts leave in.
          others: bounds of the weight of all tokens that are not kept.
        """
        p = float(np.float32(self.sampler.top_p))
        rest_low, rest_high = (bound[:, None] for bound in others)
        weights = np.exp(order * self.beta)
        sum_low, sum_high = (
            np.cumsum(weights * certain, axis=1),
            np.cumsum(weights * possible, axis=1),
        )
        total_low, total_high = sum_low[:, -1:] + rest_low, sum_high[:, -1:] + rest_high
        slack = GUARD * total_high
        low = _first_where(order, sum_low >= p * total_high + slack, -np.inf)
        with_rest = sum_high + np.where(_may_reach(ceiling, order), rest_high, 0)
        high = _first_where(order, with_rest >= p * total_low - slack, np.inf)
        return low, np.maximum(np.where(np.isinf(high), ceiling, high), ceiling)

    def _cut_min_p(self, cuts: "_Cuts", below: np.ndarray, ceiling: np.ndarray) -> "_Cuts":
        """Narrows cuts by min-p."""
        floor = np.log(float(np.float32(self.sampler.min_p)))
        slack = 1e-6 * abs(floor) + 5e-7 if floor else 0.0
        scaled, edge = below * self.beta, ceiling * self.beta
        return _Cuts(
            cuts.certain & ((scaled >= floor + slack) | (below == 0)),
            cuts.possible & (scaled >= floor - slack),
            cuts.open & (edge >= floor - slack),
        )

    def others(self) -> tuple[np.ndarray, np.ndarray]:
        """Bounds, float64[n], of the weight of all tokens that are not kept and stay in.

        Their mass is known at temperature 1 as well as at `kept_at`, and between the two its
        logarithm is convex.
        """
        low, high = self._moved(
            self.top_logits.rest,
            self.top_logits.rest,
            self.top_logits.kept_at,
            np.asarray(self.unkept),
        )
        if np.any(self.top_logits.kept_at != np.float32(self.sampler.temperature)):
            low_1, high_1 = self._moved(
                self.top_logits.rest_at_1,
                self.top_logits.rest_at_1,
                np.ones(len(low)),
                np.asarray(self.unkept),
            )
            whole, whole_1 = (
                np.log(np.asarray(m, np.float64) * (1 + _STORED) + self.unkept * TINY)
                for m in (self.top_logits.rest, self.top_logits.rest_at_1)
            )
            share = (self.beta - 1) / (1 / np.asarray(self.top_logits.kept_at, np.float64) - 1)
            convex = np.where(
                (share >= 0) & (share <= 1), share * whole + (1 - share) * whole_1, np.inf
            )
            low, high = np.maximum(low, low_1), np.minimum(np.minimum(high, high_1), convex)
        return self._weights(low, high, self.absent, np.asarray(self.unkept))

    def between(
        self, mass: np.ndarray, start: np.ndarray, end: np.ndarray, count: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same for the tokens in [start, end) alone, [n] each.

        `count` of them are not kept, and `mass` is their stored mass.
        """
        tokens = np.asarray([token for token, _ in self.edits], np.int64)
        here = self.absent & (start[:, None] <= tokens) & (tokens < end[:, None])
        return self._weights(
            *self._moved(mass, self.top_logits.rest, self.top_logits.kept_at, count), here, count
        )

    def _moved(
        self, mass: _Numbers, whole: _Numbers, temperature: _Numbers, count: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bounds of the logarithm of a mass at this temperature, from its value at another.

        The mass is a part of `whole`. Of m masses x^b, each at most c^b <= 1, with sum S(b), and
        with p = b / b0: S(b) is at most S(b0) c^(b - b0) where b >= b0, and at least that where
        b <= b0; it is at most m^(1 - p) S(b0)^p where p <= 1, and at least that where p >= 1
        (Jensen). At b = b0 all of these are S(b0).
        """
        own_beta, span = 1 / np.asarray(temperature, np.float64), self.smallest - self.largest
        steeper, power = self.beta >= own_beta, self.beta / own_beta
        error = _STORED * np.asarray(whole, np.float64)
        stored, log_count = np.asarray(mass, np.float64), np.log(np.maximum(count, 1))

        def moved(log_mass: np.ndarray, highest: bool) -> np.ndarray:
            return np.where(
                steeper == highest,
                (self.beta - own_beta) * span + log_mass,
                (1 - power) * log_count + power * log_mass,
            )

        high = np.minimum(
            moved(np.log(stored + error + count * TINY), True), log_count + self.beta * span
        )
        return moved(np.log(np.maximum(stored - error, 0)), False), high

    def _weights(
        self, low: np.ndarray, high: np.ndarray, here: np.ndarray, count: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Weights from logarithms of bounds: relative to the largest biased logit, with the bias,
        after the cuts.

        Args:
          low, high: the logarithms.
          here: bool[n, X], the edited tokens that belong to them.
          count: the number of tokens that belong to them.
        """
        shift = self.beta * (self.largest - self.top)
        low, high = np.exp(low + shift), np.exp(high + shift)
        for x, (_, bias) in enumerate(self.edits):
            # The stored mass contains, for a biased token that is not kept, between nothing and
            # the weight of the smallest kept one.
            before, after = (
                np.exp(self.beta * (self.smallest + b - self.top)) for b in (0.0, bias)
            )
            high = high + np.where(here[:, x], np.maximum(after - before, 0), 0)
            low = low - np.where(here[:, x], np.maximum(before - after, 0), 0)
        any_in = self.open & (count > 0) & np.isfinite(self.ceiling)
        return np.where(any_in & (not self.cut), np.maximum(low, 0), 0), np.where(any_in, high, 0)


@dataclasses.dataclass(frozen=True)
class _Cuts:
    """Tokens that the cuts leave in.

    Attributes:
      certain, possible: bool[n, K], kept tokens that certainly, and possibly, stay in.
      open: bool[n, 1], whether a token that is not kept may stay in.
    """

    certain: np.ndarray
    possible: np.ndarray
    open: np.ndarray

    def narrowed(
        self, below: np.ndarray, ceiling: np.ndarray, low: np.ndarray, high: np.ndarray
    ) -> "_Cuts":
        """These cuts and another one, whose threshold is in [low, high]."""
        return _Cuts(
            self.certain & (below >= high),
            self.possible & _may_reach(below, low),
            self.open & _may_reach(ceiling, low),
        )


def _may_reach(below: np.ndarray, threshold: np.ndarray) -> np.ndarray:
    """Returns whether a logit, relative to the largest, may be at or above the threshold."""
    return below * (1 - _TIE) >= threshold


def _first_where(order: np.ndarray, reached: np.ndarray, otherwise: float) -> np.ndarray:
    """[n, 1]: the first of each row of `order` where `reached`."""
    value = np.take_along_axis(order, np.argmax(reached, axis=1)[:, None], axis=1)
    return np.where(reached.any(axis=1, keepdims=True), value, otherwise)
