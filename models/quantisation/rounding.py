"""Numbers to codes with scales that are chosen for the error they leave.

Of each group a few scales are tried, from that of the largest magnitude down, and the best of them
is corrected by least squares. The error of an input counts by the mean square of what the layer
gets there, so that it is that of the layer's output where inputs are not correlated.

Axis letters: O outputs, I inputs, G groups of inputs, N inputs of a group.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxshare.quantised import FORMATS, CodeFormat, QuantisedTensor, packed_codes

_RATIOS = tuple(float(ratio) for ratio in np.linspace(1.0, 0.5, 21))
"""Of the scale by which the largest magnitude of a group is the format's largest."""
_LEAST_SQUARES = 2
"""How often the best scale is corrected."""
_NUMBERS_AT_ONCE = 2**25
"""Rows are rounded some at a time: several arrays of their numbers are needed."""
_LEAST_GROUP = 16
"""Smaller groups would have about as many bits of scales as of codes."""
_DEFAULT_GROUPS: Mapping[str, int] = {"int4": 64}
MADE = ("int8", "int4", "fp8")
"""The formats that models are quantised to."""


@dataclasses.dataclass(frozen=True)
class Rounding:
    """How matrices are quantised.

    Attributes:
      format: one of `MADE`.
      group: the most inputs that share a scale; None for all of a row.
      zeros: each group has a zero of its own ("int4" alone).
    """

    format: str
    group: int | None = None
    zeros: bool = False

    @classmethod
    def of(cls, format: str, group: int | None = None, *, zeros: bool = False) -> "Rounding":
        """Checks settings, and gives those that are None their defaults.

        Raises:
          ValueError: a format that is not made, a group that is too small, or zeros that the format
            does not have.
        """
        if format not in MADE:
            raise ValueError(
                f"{format} is no format that models are quantised to; these are {', '.join(MADE)}"
            )
        if group is not None and group < _LEAST_GROUP:
            raise ValueError(
                f"groups of {group} inputs are too small: give at least {_LEAST_GROUP}"
            )
        if zeros and format != "int4":
            raise ValueError(f"{format} has no zeros of groups; int4 has")
        return cls(format, group or _DEFAULT_GROUPS.get(format), zeros)

    def group_of(self, inputs: int) -> int | None:
        """The inputs that share a scale in a matrix with so many: the largest number up to `group`
        that divides them; None where there is none of at least 16."""
        if self.group is None:
            return inputs if inputs * FORMATS[self.format].bits % 8 == 0 else None
        sizes = range(min(self.group, inputs), _LEAST_GROUP - 1, -1)
        return next((n for n in sizes if inputs % n == 0 and n % 2 == 0), None)


def rounded(
    value: Float[np.ndarray, "O I"],
    rounding: Rounding,
    squares: Float[np.ndarray, " I"] | None = None,
    *,
    searched: bool = True,
) -> QuantisedTensor:
    """Quantises a matrix.

    Args:
      value: the matrix; its dtype is that of the scales.
      rounding: its group divides the inputs (`Rounding.group_of`).
      squares: the mean square of each input; default all alike.
      searched: False for the scale of the largest magnitude.
    """
    group = rounding.group_of(value.shape[-1])
    assert group is not None
    weights = np.ones(value.shape[-1], np.float32) if squares is None else squares
    # Inputs that were never seen still count a little.
    weights = np.maximum(weights, np.float32(1e-6) * max(float(weights.mean()), 1e-30))
    rows = max(1, _NUMBERS_AT_ONCE // value.shape[-1])
    found = [
        jax.tree.map(
            np.asarray,
            _rounded(
                value[start : start + rows]
                .astype(np.float32)
                .reshape(-1, weights.size // group, group),
                (weights / weights.mean()).astype(np.float32).reshape(-1, group),
                rounding,
                value.dtype.name,
                _RATIOS if searched else _RATIOS[:1],
            ),
        )
        for start in range(0, value.shape[0], rows)
    ]
    codes, scales, zeros = map(_joined, zip(*found, strict=True))
    codes = codes.reshape(value.shape)
    if FORMATS[rounding.format].bits == 4:
        codes = packed_codes(codes, group)
    return QuantisedTensor(codes, scales, zeros, format=rounding.format, dtype=value.dtype)


def _joined(parts: Sequence[Any]) -> Any:
    """Arrays of some rows each as one; None where there are none."""
    return None if parts[0] is None else np.concatenate(parts)


@functools.partial(jax.jit, static_argnames=("rounding", "dtype", "ratios"))
def _rounded(
    value: Float[Array, "O G N"],
    weights: Float[Array, "G N"],
    rounding: Rounding,
    dtype: str,
    ratios: tuple[float, ...],
) -> tuple[Array, Array, Array | None]:
    """Codes [O, G, N], scales [O, G] in `dtype`, and zeros [O, G] if there are any."""
    kind = FORMATS[rounding.format]

    def tried(ratio: Array) -> tuple[Array, Array, Array]:
        low = jnp.minimum(value.min(axis=-1), 0) * ratio
        high = jnp.maximum(value.max(axis=-1), 0) * ratio
        if not rounding.zeros:
            scales = _storable(jnp.maximum(-low, high) / kind.largest, dtype)
            return _error(value, weights, scales, 0.0, kind), scales, jnp.zeros_like(scales)
        scales = _storable((high - low) / 15, dtype)
        zeros = jnp.clip(jnp.rint(-low / scales), 0, 15) - kind.middle
        return _error(value, weights, scales, zeros, kind), scales, zeros

    def better(best: tuple[Array, ...], found: tuple[Array, ...]) -> tuple[Array, ...]:
        is_better = found[0] < best[0]
        return tuple(jnp.where(is_better, new, old) for new, old in zip(found, best, strict=True))

    best = tried(jnp.float32(1))
    if len(ratios) > 1:
        each = jnp.asarray(ratios[1:], jnp.float32)
        best = jax.lax.scan(lambda best, ratio: (better(best, tried(ratio)), None), best, each)[0]
        for _ in range(_LEAST_SQUARES):
            _, scales, zeros = best
            numbers = _numbers(value, scales, zeros, kind)
            over = jnp.sum(weights * numbers * value, axis=-1)
            under = jnp.sum(weights * numbers * numbers, axis=-1)
            scales = _storable(jnp.where(over > 0, over / jnp.maximum(under, 1e-30), scales), dtype)
            best = better(best, (_error(value, weights, scales, zeros, kind), scales, zeros))
    _, scales, zeros = best
    codes = _numbers(value, scales, zeros, kind)
    if kind.storage != ml_dtypes.float8_e4m3fn:
        codes = codes + kind.middle + zeros[..., None]
    stored = (zeros + kind.middle).astype(jnp.int8) if rounding.zeros else None
    return codes.astype(kind.storage), scales.astype(dtype), stored


def _storable(scales: Array, dtype: str) -> Array:
    """Scales as they are stored; 1 for those of groups that are zero, or nearly."""
    kept = scales.astype(dtype).astype(jnp.float32)
    return jnp.where(kept > 0, kept, 1)


def _numbers(value: Array, scales: Array, zeros: Array | float, kind: CodeFormat) -> Array:
    """The numbers that stand for values, before scaling; those of zero are 0. `zeros` are counted
    from the format's middle."""
    scaled = value / scales[..., None]
    if kind.storage == ml_dtypes.float8_e4m3fn:
        clipped = jnp.clip(scaled, -kind.largest, kind.largest)
        return clipped.astype(kind.storage).astype(jnp.float32)
    shift = jnp.asarray(zeros, jnp.float32)[..., None]
    return jnp.clip(jnp.rint(scaled) + shift, -kind.largest - 1, kind.largest) - shift


def _error(
    value: Array, weights: Array, scales: Array, zeros: Array | float, kind: CodeFormat
) -> Array:
    """The weighted squared error of each group."""
    off = value - _numbers(value, scales, zeros, kind) * scales[..., None]
    return jnp.sum(weights * off * off, axis=-1)
