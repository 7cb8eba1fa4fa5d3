"""Truncation of distributions: top-k, top-p, min-p and typical-p, exact and without a sort.

Each cut is a threshold: the largest number such that the tokens at or above it are enough, by how
many they are or by their mass. All tokens that tie with the last one that is kept are kept. A CPU
finds the thresholds in one call (`jaxshare.cpu.truncation`). Elsewhere they are found from the
first bits of the logits to the last ones, some at a time: each pass adds up what is at or above
each of several thresholds.

Masses are float32, relative to the likeliest token. A CPU's call adds them up in float64. Elsewhere
sums are of float32: of runs of 256 tokens, and then of these. Either way a row's result depends on
that row alone.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from jaxshare import cpu
from jaxshare.pallas.device import current_device
from jaxshare.pallas.truncated_draws import draws_on, kept_bounds

_NO_KEY = np.int32(-(2**31))
"""Below the key of every number."""
_OF_MINUS_INFINITY = np.int32(-0x7F800000)
"""The key of -inf."""
_RUN = 256
"""Tokens whose weights are added up at once."""
_BITS, _BITS_ON_CPU = 4, 2
"""Bits of a threshold that a pass finds. The more, the fewer passes and the more sums: reading is
what takes a GPU's time, and adding a CPU's."""


def truncation_bounds(
    scaled: Float[Array, "R V"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    min_p: Float[Array, " R"],
    typical_p: Float[Array, " R"] | None = None,
) -> tuple[Float[Array, "R 1"], Float[Array, "R 1"]]:
    """The bounds of the logits that truncation leaves in: of each row the smallest and the largest.

    A token is kept if its logit is at least the first and at most the second. The cuts apply in the
    order of the arguments, each to what those before it have left.

    Args:
      scaled: float32 logits after the temperature, all V of each row.
      top_k: int32; keeps the k likeliest tokens. 0 or V and more keep all.
      top_p: float32; keeps the smallest set of likeliest tokens with at least this share of the
        mass. At least 2**-126; 1 keeps all.
      min_p: float32; keeps tokens at least this fraction as likely as the likeliest. 0 keeps all.
      typical_p: float32; keeps the smallest set of tokens with at least this share of the mass whose
        surprise, -log p, is nearest to the entropy (Meister et al. 2022, "Locally Typical
        Sampling", section 4). 1 keeps all, as None does for all rows.

    Returns:
      Two arrays float32[R, 1]: -inf and inf where nothing is cut.
    """
    if device := draws_on(scaled):
        share = jnp.ones_like(top_p) if typical_p is None else typical_p
        floor, ceiling = kept_bounds(scaled, top_k, top_p, min_p, share, device)
        return floor[:, None], ceiling[:, None]
    floor, top = _top_k_top_p(scaled, top_k, top_p)
    by_min_p = top + jnp.log(min_p)
    # By keys, since a maximum of floats takes subnormal numbers for zeros on some devices.
    floor = _keys_inverse(jnp.maximum(_keys_of(floor), _keys_of(by_min_p)))
    ceiling = jnp.full_like(floor, jnp.inf)
    if typical_p is not None:
        floor, ceiling = lax.cond(
            jnp.any(typical_p < 1),
            lambda: _typical(scaled, top, floor, typical_p),
            lambda: (floor, ceiling),
        )
    return floor[:, None], ceiling[:, None]


def _top_k_top_p(scaled: Array, top_k: Array, top_p: Array) -> tuple[Array, Array]:
    """The smallest logit of each row that top_k and top_p leave in, and the largest, float32[R]."""
    found = cpu.floor_and_top(scaled, top_k, top_p)
    if found is not None:
        return found
    top, keys = jnp.max(scaled, axis=-1, keepdims=True), _keys_of(scaled)
    everything = jnp.full_like(keys[:, :1], _OF_MINUS_INFINITY)

    def kept_by_k() -> Array:
        k = jnp.where(top_k > 0, top_k, scaled.shape[1])[:, None].astype(jnp.float32)
        return _threshold(keys, jnp.ones_like(scaled), lambda _: k)

    by_k = lax.cond(jnp.any(top_k > 0), kept_by_k, lambda: everything)

    def kept_by_p() -> Array:
        mass = jnp.where(keys >= by_k, jnp.exp(scaled - top), 0.0)
        found = _threshold(keys, mass, lambda total: top_p[:, None] * total)
        return jnp.where(top_p[:, None] < 1, found, everything)

    by_p = lax.cond(jnp.any(top_p < 1), kept_by_p, lambda: everything)
    floor = _keys_inverse(jnp.maximum(jnp.maximum(by_k, by_p), everything))
    return floor[:, 0], top[:, 0]


def _typical(scaled: Array, top: Array, floor: Array, typical_p: Array) -> tuple[Array, Array]:
    """The smallest and the largest logit of each row, float32[R], that typical_p leaves in of those
    from `floor` up.

    With y a logit less the largest one, and m the mean of y under the distribution, -log p is less
    than the entropy by y - m: the tokens whose logits are nearest to m are kept.
    """
    found = cpu.typical(scaled, top, floor, typical_p)
    if found is not None:
        return found
    share = typical_p[:, None]
    keys, below = _keys_of(scaled), scaled - top[:, None]
    kept = keys >= _keys_of(floor)[:, None]
    mass = jnp.where(kept, jnp.exp(below), 0.0)
    moment = jnp.where(mass > 0, mass * below, 0.0)
    mean = jnp.sum(moment, axis=-1, keepdims=True) / jnp.sum(mass, axis=-1, keepdims=True)
    nearness = _keys_of(-jnp.abs(below - mean))
    nearest = nearness >= _threshold(nearness, mass, lambda total: share * total)
    keys = jnp.where(kept & nearest, keys, _NO_KEY)
    high = jnp.max(keys, axis=-1)
    low = jnp.min(jnp.where(keys == _NO_KEY, high[:, None], keys), axis=-1)
    cuts = typical_p < 1
    return (
        jnp.where(cuts, _keys_inverse(low), floor),
        jnp.where(cuts, _keys_inverse(high), jnp.inf),
    )


def _keys_of(x: Array) -> Array:
    """Maps float32 numbers to int32 in the same order, with one key for -0 and 0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, _NO_KEY - bits, bits)


def _keys_inverse(keys: Array) -> Array:
    return lax.bitcast_convert_type(jnp.where(keys < 0, _NO_KEY - keys, keys), jnp.float32)


def _threshold(keys: Array, weights: Array, target: Callable[[Array], Array]) -> Array:
    """The largest threshold, int32[R, 1], such that the keys at or above it have enough weight.

    `target` gives from the sum of all weights, [R, 1], how much is enough. It is `_NO_KEY` where
    rounded sums do not reach that.
    """
    keys, weights = _in_runs(keys, _NO_KEY), _in_runs(weights, 0)
    on_cpu = jax.default_backend() == "cpu" and current_device() is None
    bits = _BITS_ON_CPU if on_cpu else _BITS
    found = jnp.full((len(keys), 1), _NO_KEY)
    enough = None
    for shift in range(32 - bits, -1, -bits):
        steps = [found + _int32(step << shift) for step in range(2**bits)]
        sums = _sums_from(keys, weights, steps if enough is None else steps[1:])
        if enough is None:
            total, *sums = sums
            enough = target(total)
        reached = sum((each >= enough).astype(jnp.int32) for each in sums)
        found = found + (reached << shift)
    # XLA computes both branches of a conditional that has nothing but sums and the like in it. This
    # is something else, so that a cut that no row asks for is left out.
    return lax.optimization_barrier(found)


def _in_runs(x: Array, fill: int | np.int32) -> Array:
    """Cuts [R, V] into [R, runs, _RUN], with `fill` after the last."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % _RUN)), constant_values=fill)
    return padded.reshape(len(x), -1, _RUN)


def _sums_from(keys: Array, weights: Array, thresholds: list[Array]) -> list[Array]:
    """The weights at or above each threshold, [R, 1] each, from one pass over keys and weights."""
    parts = [jnp.where(keys >= each[:, :, None], weights, 0.0) for each in thresholds]
    # Runs, and then these: each time one operation, and so one kernel, for all thresholds.
    for _ in range(2):
        parts = lax.reduce(
            parts,
            [np.float32(0)] * len(parts),
            lambda a, b: [x + y for x, y in zip(a, b, strict=True)],
            (parts[0].ndim - 1,),
        )
    return [each[:, None] for each in parts]


def _int32(number: int) -> np.int32:
    """A number below 2**32 as the int32 of the same bits, which adds up to the same."""
    return np.uint32(number).view(np.int32)
