"""A check that parameters are numbers that a model can compute with."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool

from jaxshare.quantised import QuantisedTensor


def is_sound(value: Any) -> Bool[Array, ""]:
    """Returns whether all numbers of a parameter are finite, and none of its scales is 0; for jit."""
    if not isinstance(value, QuantisedTensor):
        return jnp.isfinite(value).all()
    sound = (jnp.isfinite(value.scales) & (value.scales != 0)).all()
    is_float = jnp.issubdtype(value.codes.dtype, jnp.floating)
    return sound & jnp.isfinite(value.codes).all() if is_float else sound
