"""Choosing tokens: greedy, temperature, top-k, top-p, min-p, bias and forbidden tokens, each row its own way.

Randomness is counter-based: a draw depends on (row seed, position) alone, never on who else is in the batch. Truncation is
exact and needs no sort: thresholds are found by bisecting the ordered bits of the logits.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_CHUNK = 256


@dataclasses.dataclass(frozen=True)
class Sampler:
    """How one row chooses its tokens. The cuts apply in the order temperature, top_k, top_p, min_p.

    Attributes:
      temperature: logits are divided by it; 0 takes the likeliest token.
      top_k: keep the k likeliest tokens, and those that tie with the last; 0 keeps all.
      top_p: keep the smallest set of likeliest tokens with at least this probability, and what ties; in (0, 1].
      min_p: keep tokens at least this fraction as likely as the likeliest; in [0, 1].
      bias: added to the logits of single tokens.
      forbidden: tokens that are never chosen.

    Raises:
      ValueError: a value out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    forbidden: tuple[int, ...] = ()

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}; it must be at least 0 (0 takes the likeliest token)")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 0 (0 keeps all tokens)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (1 keeps all tokens)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it must be between 0 and 1 (0 keeps all tokens)")
        if negative := [t for t in (*self.bias, *self.forbidden) if t < 0]:
            raise ValueError(f"a bias or a ban names token {negative[0]}; tokens are numbered from 0")
        if odd := [t for t, value in self.bias.items() if not math.isfinite(value)]:
            raise ValueError(f"the bias of token {odd[0]} is {self.bias[odd[0]]}; it must be finite (forbidden tokens are listed apart)")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Samplers:
    """The samplers of R rows as arrays, so that changing a setting never recompiles.

    Attributes:
      temperature, top_p, min_p: float32[R]; top_k: int32[R].
      bias_tokens, bias_values: int32 and float32[R, X], additions to single logits; an unused place has token -1.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    bias_tokens: Array
    bias_values: Array

    @classmethod
    def stack(cls, samplers: Sequence[Sampler], *, bias_slots: int | None = None) -> "Samplers":
        """One row for each sampler. `bias_slots` is X, to leave room for later rows; default what these need.

        Raises:
          ValueError: a sampler has more biased and forbidden tokens than `bias_slots`.
        """
        edits = [{**s.bias, **dict.fromkeys(s.forbidden, -math.inf)} for s in samplers]
        slots = max((len(e) for e in edits), default=0) if bias_slots is None else bias_slots
        if over := [i for i, e in enumerate(edits) if len(e) > slots]:
            raise ValueError(f"sampler {over[0]} has {len(edits[over[0]])} biased or forbidden tokens; bias_slots is {slots}")
        tokens, values = np.full((len(edits), slots), -1, np.int32), np.zeros((len(edits), slots), np.float32)
        for r, edit in enumerate(edits):
            tokens[r, :len(edit)], values[r, :len(edit)] = list(edit), list(edit.values())
        return cls(*jax.device_put((
            np.asarray([s.temperature for s in samplers], np.float32), np.asarray([s.top_k for s in samplers], np.int32),
            np.asarray([s.top_p for s in samplers], np.float32), np.asarray([s.min_p for s in samplers], np.float32), tokens, values)))

    def sample(self, logits: Array, seeds: Array, positions: Array) -> Array:
        """One token a row.

        Args:
          logits: float32[R, V].
          seeds: uint32[R].
          positions: int32[R], the counter: the same seed and position always draw alike.

        Returns:
          int32[R].
        """
        logits = self._biased(logits)
        likeliest = _argmax(logits)

        def drawn() -> Array:
            # The largest becomes 0 before the division, so that no temperature overflows it.
            below = logits - jnp.max(logits, axis=-1, keepdims=True)
            scaled = below / jnp.where(self.temperature > 0, self.temperature, 1.0)[:, None]
            cuts = (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)
            floor = jax.lax.cond(jnp.any(cuts), self._floor, lambda x: jnp.full((x.shape[0], 1), -jnp.inf), scaled)
            weights = jnp.where(scaled >= floor, jnp.exp(scaled), 0.0)
            return jnp.where(self.temperature > 0, _draw(weights, uniforms(seeds, positions)), likeliest)

        return jax.lax.cond(jnp.any(self.temperature > 0), drawn, lambda: likeliest)

    def _biased(self, logits: Array) -> Array:
        if not self.bias_tokens.shape[1]:
            return logits
        place = jnp.where(self.bias_tokens < 0, logits.shape[1], self.bias_tokens)
        return logits.at[jnp.arange(logits.shape[0])[:, None], place].add(self.bias_values, mode="drop")

    def _floor(self, scaled: Array) -> Array:
        """float32[R, 1]: the smallest scaled logit that the cuts leave in."""
        top = jnp.max(scaled, axis=-1, keepdims=True)
        order = _ordered(scaled)
        k = jnp.where(self.top_k > 0, self.top_k, scaled.shape[1])[:, None].astype(jnp.float32)
        kept_by_k = _threshold(order, jnp.ones_like(scaled), k)
        mass = jnp.where(order >= kept_by_k, jnp.exp(scaled - top), 0.0)
        p = jnp.where(self.top_p < 1, self.top_p, 0.0)[:, None] * jnp.sum(mass, axis=-1, keepdims=True)
        kept_by_p = jnp.where(self.top_p[:, None] < 1, _threshold(order, mass, p), kept_by_k)
        min_p = top + jnp.log(self.min_p)[:, None]
        return jnp.maximum(_unordered(jnp.maximum(kept_by_k, kept_by_p)), min_p)


def logprob(logits: Array, tokens: Array) -> Array:
    """float32[R]: the model's own log-probability of each row's token, before temperature, cuts and bias."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def uniforms(seeds: Array, positions: Array) -> Array:
    """float32[R] in [0, 1), each from its own (seed, position) alone."""
    draw = jax.vmap(lambda seed, position: jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position)))
    return draw(seeds, positions)


def _argmax(logits: Array) -> Array:
    """The first of the largest, as jnp.argmax; two plain reductions, which XLA vectorises on the CPU, where it does not argmax."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    place = jnp.where(logits == top, jnp.arange(logits.shape[-1]), logits.shape[-1] - 1)
    return jnp.min(place, axis=-1).astype(jnp.int32)


def _draw(weights: Array, uniform: Array) -> Array:
    """Inverts the cumulative sum of weights [R, V] at uniform [R], in two levels: a chunk of tokens, then one of them."""
    rows, vocab = weights.shape
    padded = jnp.pad(weights, ((0, 0), (0, -vocab % _CHUNK))).reshape(rows, -1, _CHUNK)
    sums = jnp.sum(padded, axis=-1)
    cumulative = jnp.cumsum(sums, axis=-1)
    chunk, rest = _invert(sums, cumulative, uniform * cumulative[:, -1])
    inside = jnp.take_along_axis(padded, chunk[:, None, None], axis=1)[:, 0]
    token, _ = _invert(inside, jnp.cumsum(inside, axis=-1), rest)
    return chunk * _CHUNK + token


def _invert(weights: Array, cumulative: Array, target: Array) -> tuple[Array, Array]:
    """The first place of positive weight where the cumulative sum exceeds the target, and what of the target lies within it.

    Sums are rounded, and on some devices not even monotone: where the target reaches the whole sum, it is the last place of
    positive weight, and a place of weight 0 is never taken.
    """
    places = jnp.arange(weights.shape[1])
    reached = (weights > 0) & (cumulative > target[:, None])
    first = jnp.min(jnp.where(reached, places, weights.shape[1]), axis=-1)
    last = jnp.max(jnp.where(weights > 0, places, 0), axis=-1)
    place = jnp.minimum(first, last).astype(jnp.int32)
    below = jnp.where(place > 0, jnp.take_along_axis(cumulative, jnp.maximum(place - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    return place, target - below


def _ordered(x: Array) -> Array:
    """int32 in the order of the float32 values (its own inverse with `_unordered`)."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _unordered(order: Array) -> Array:
    return jax.lax.bitcast_convert_type(order ^ ((order >> 31) & 0x7FFFFFFF), jnp.float32)


def _threshold(order: Array, weights: Array, wanted: Array) -> Array:
    """int32[R, 1]: the largest threshold at which the weights of what is at or above it reach `wanted` [R, 1]."""

    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # reached at low, not reached at high
        middle = (low & high) + ((low ^ high) >> 1)
        reached = jnp.sum(jnp.where(order >= middle, weights, 0.0), axis=-1, keepdims=True) >= wanted
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    low = jnp.min(order, axis=-1, keepdims=True)
    return jax.lax.fori_loop(0, 32, halve, (low, jnp.max(order, axis=-1, keepdims=True) + 1))[0]
