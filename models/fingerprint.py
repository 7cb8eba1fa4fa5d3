"""Fingerprints of parameters: sums of their bits, whatever mesh they are on."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare.models.config import ModelConfig
from jaxshare.models.packed import kv_modules, unpack
from jaxshare.models.tensor_parallel import param_path


@functools.partial(jax.jit, static_argnums=(1, 2))
def bit_sums(params: dict[str, Any], config: ModelConfig, repeats: int) -> dict[str, Any]:
    """Sums the bits of each parameter as numbers: uint32[2], plain and weighted by the position.

    Sums, because they do not depend on the order, and so not on the mesh. Repeated heads count once.
    """

    def of_one(keys: Any, value: Array) -> Array:
        of_order = getattr(keys[-1], "name", "") == "order"
        if param_path(keys)[-2] in kv_modules(config) and not of_order:
            value = value.reshape(config.num_kv_heads, -1)[::repeats]
        bits = jax.lax.bitcast_convert_type(value, f"uint{8 * value.dtype.itemsize}")
        bits = bits.astype(jnp.uint32)
        # An odd weight for each position, so that every changed bit changes the sum.
        at = jnp.zeros((), jnp.uint32)
        for axis, size in enumerate(bits.shape):
            at = at * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        weights = at * np.uint32(2654435761)
        weights = (weights ^ (weights >> 15)) * np.uint32(2246822519) | np.uint32(1)
        zero = np.uint32(0)
        # In one reduction, which needs no copy of the parameter.
        sums = jax.lax.reduce((bits, bits * weights), (zero, zero), _add_pairs, range(bits.ndim))
        return jnp.stack(sums)

    return jax.tree.map_with_path(of_one, unpack(params, config))


def _add_pairs(left: Sequence[Array], right: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def same_fingerprint(saved: str, now: str) -> bool:
    """Returns whether a saved fingerprint is of the model that has this one now."""
    return saved == now or (len(saved) == 32 and now.startswith(saved))
