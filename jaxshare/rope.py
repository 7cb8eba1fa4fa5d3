"""Rotary position embeddings: the frequencies of every variant, accurate angles, rotation.

A position becomes an angle without a float32 product of a large number: frequencies are 48-bit
fixed-point fractions of a full rotation, the product with the position is taken in integers modulo
a full rotation, and only the remainder, less than half a rotation, becomes a float. So angles at
position 1,000,000 are as accurate as at position 1.

Pairs are (i, i + rotary_dim / 2), as in Llama and Qwen checkpoints of Hugging Face.
Sources: RoFormer (Su et al.), Hogwild! Inference section 3.4 for rotating queries in place of keys.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int

_FRACTION_BITS = 48
"""Bits of a frequency as a fraction of a full rotation."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """The frequencies of one rotary embedding. Hashable, so that it can be static under jit.

    Attributes:
      frequencies: radians per position, one for each rotated pair: rotary_dim / 2 of them.
      attention_factor: cos and sin are multiplied by it when a query or a key is first rotated
        (YaRN, longrope), so that their product has its square as a factor. It is never applied
        again when a cached key is rotated further.
    """

    frequencies: tuple[float, ...]
    attention_factor: float = 1.0

    @property
    def rotary_dim(self) -> int:
        """The number of leading entries of a head that are rotated; the rest is unchanged (partial
        rotary)."""
        return 2 * len(self.frequencies)

    @classmethod
    def default(cls, rotary_dim: int, theta: float) -> "Rope":
        """The frequencies of RoFormer section 3.2: theta ** (-2 i / rotary_dim)."""
        return cls(_as_tuple(_base_frequencies(rotary_dim, theta)))

    @classmethod
    def none(cls) -> "Rope":
        """No rotation, for layers without positions."""
        return cls(())

    @classmethod
    def linear(cls, rotary_dim: int, theta: float, factor: float) -> "Rope":
        """Position interpolation: divides positions by `factor`."""
        return cls(_as_tuple(_base_frequencies(rotary_dim, theta) / factor))

    @classmethod
    def llama3(
        cls,
        rotary_dim: int,
        theta: float,
        factor: float,
        low_freq_factor: float,
        high_freq_factor: float,
        original_max_position: int,
    ) -> "Rope":
        """Llama 3.1: divides long wavelengths by `factor` and keeps short ones, with a linear ramp
        between."""
        frequencies = _base_frequencies(rotary_dim, theta)
        rotations = original_max_position * frequencies / (2 * math.pi)
        keep = np.clip(
            (rotations - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0
        )
        return cls(_as_tuple(keep * frequencies + (1 - keep) * frequencies / factor))

    @classmethod
    def yarn(
        cls,
        rotary_dim: int,
        theta: float,
        factor: float,
        original_max_position: int,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        attention_factor: float | None = None,
        mscale: float | None = None,
        mscale_all_dim: float | None = None,
        truncate: bool = True,
    ) -> "Rope":
        """YaRN (Peng et al.): interpolates pairs with fewer than `beta_slow` rotations in the
        original context, and none with more than `beta_fast`."""

        def pair_with(rotations: float) -> float:
            return (
                rotary_dim
                * math.log(original_max_position / (rotations * 2 * math.pi))
                / (2 * math.log(theta))
            )

        low, high = pair_with(beta_fast), pair_with(beta_slow)
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low == high:
            high += 0.001
        ramp = np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0.0, 1.0)
        frequencies = _base_frequencies(rotary_dim, theta)

        def scale(m: float) -> float:
            return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

        if attention_factor is None:
            attention_factor = (
                scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)
            )
        return cls(
            _as_tuple(ramp * frequencies / factor + (1 - ramp) * frequencies), attention_factor
        )

    @classmethod
    def longrope(
        cls, rotary_dim: int, theta: float, divisors: Sequence[float], attention_factor: float
    ) -> "Rope":
        """LongRoPE: divides the frequency of each pair by a number of its own. The caller chooses
        the short or the long list, once for a whole run."""
        if len(divisors) != rotary_dim // 2:
            raise ValueError(
                f"longrope needs {rotary_dim // 2} factors, one for each rotated pair; got "
                f"{len(divisors)}"
            )
        return cls(
            _as_tuple(_base_frequencies(rotary_dim, theta) / np.asarray(divisors, np.float64)),
            attention_factor,
        )

    def cos_sin(
        self, positions: Int[Array | np.ndarray, "*shape"], *, scaled: bool = True
    ) -> tuple[Float32[Array, "*shape P"], Float32[Array, "*shape P"]]:
        """Computes cos and sin of position x frequency, for P = rotary_dim / 2 pairs.

        Args:
          positions: of either sign; exact for magnitudes up to 2**24, to 1e-4 up to 2**31.
          scaled: multiply by `attention_factor`. False for keys that are rotated further.
        """
        angles = self._angles(positions)
        factor = self.attention_factor if scaled else 1.0
        return jnp.cos(angles) * factor, jnp.sin(angles) * factor

    def _angles(self, positions: Array | np.ndarray) -> Array:
        # The frequency in full rotations is f1 / 2**16 + f2 / 2**32 + f3 / 2**48, the position
        # p1 * 2**16 + p0, all limbs below 2**16: every product fits uint32, and the bits that a
        # shift or the sum loses at the top are whole rotations.
        fractions = [round(f / (2 * math.pi) * 2**_FRACTION_BITS) for f in self.frequencies]
        f1, f2, f3 = (
            jnp.asarray([f >> shift & 0xFFFF for f in fractions], jnp.uint32)
            for shift in (32, 16, 0)
        )
        size = jnp.abs(positions).astype(jnp.uint32)[..., None]
        p0, p1 = size & 0xFFFF, size >> 16
        fraction = (p0 * f1 << 16) + p0 * f2 + (p0 * f3 >> 16) + (p1 * f2 << 16) + p1 * f3
        signed = jax.lax.bitcast_convert_type(fraction, jnp.int32).astype(jnp.float32)
        return (
            jnp.where(positions < 0, -1.0, 1.0)[..., None]
            * signed
            * np.float32(2 * math.pi / 2**32)
        )


def rotate(
    x: Float[Array, "*shape D"], cos: Float32[Array, "... P"], sin: Float32[Array, "... P"]
) -> Float[Array, "*shape D"]:
    """Rotates the leading 2 P entries of the last axis; float32 inside, the result in x's dtype.

    cos and sin are broadcast against [*shape, P].
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    cos, sin = jnp.broadcast_to(cos, first.shape), jnp.broadcast_to(sin, first.shape)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), rest], axis=-1)


def _base_frequencies(rotary_dim: int, theta: float) -> np.ndarray:
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(
            "the rotated part of a head must be an even number of entries, at least 2; got "
            f"{rotary_dim}"
        )
    if not theta > 0:
        raise ValueError(f"the rope theta must be positive; got {theta}")
    return theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


def _as_tuple(frequencies: np.ndarray) -> tuple[float, ...]:
    return tuple(float(f) for f in frequencies)
