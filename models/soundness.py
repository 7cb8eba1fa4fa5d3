"""A check that parameters are numbers that a model can compute with."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool

from jaxshare.quantised import QuantisedTensor


def is_sound(value: Any) -> Bool[Array, ""]:
    """Returns whether all numbers of a parameter are finite, and none of its scales is 0; for jit."""
    if not isinstance(value, QuantisedTensor):
        return _all_finite(value)
    sound = (jnp.isfinite(value.scales) & (value.scales != 0)).all()
    is_float = jnp.issubdtype(value.codes.dtype, jnp.floating)
    return sound & jnp.isfinite(value.codes).all() if is_float else sound


def _all_finite(value: Array) -> Bool[Array, ""]:
    # 0 * x is 0, or NaN where x is NaN or infinite. XLA adds vectors at a time on a CPU, but not
    # truth values, which takes it four times as long; and its maximum may pass over NaN.
    return jnp.isfinite(jnp.sum(value * 0))
