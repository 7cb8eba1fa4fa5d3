"""A change of the decode state that is made where a condition holds, without a copy of the cache."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from jaxshare.decoding.state import DecodeState
from jaxshare.pallas.device import current_device


def apply_if(
    condition: Array, state: DecodeState, change: Callable[[DecodeState], DecodeState]
) -> DecodeState:
    """The changed state where bool[] `condition` holds, and else the same."""
    if current_device() is not None:
        # Conditionals are a part of XLA's graphs, and loops are not.
        return jax.lax.cond(condition, change, lambda s: s, state)
    # A loop of one iteration or none, because a conditional would copy the cache on a CPU.
    return jax.lax.while_loop(
        lambda s: s[1], lambda s: (change(s[0]), jnp.zeros((), bool)), (state, condition)
    )[0]
