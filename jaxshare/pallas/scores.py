"""The scale of scores in the kernels, which are to base 2, and their softcap."""

import math

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32


def query_scale(scale: float, softcap: float) -> float:
    """The factor of queries before their product with keys: the product is the score to base 2, or
    what `capped` takes."""
    return scale * math.log2(math.e) * (2.0 / softcap if softcap else 1.0)


def capped(
    products: Float32[Array, "..."], softcap: float, *, few_registers: bool = False
) -> Float32[Array, "..."]:
    """The scores to base 2 of products with queries of `query_scale`.

    softcap * tanh(score / softcap), as 1 - 2 / (1 + exp(2 x)) for tanh(x): one exponential, and an
    error of 2**-23 of the softcap. `few_registers`: by the GPU's own tanh, which has one of 2**-11
    of the score.
    """
    if not softcap:
        return products
    highest = softcap * math.log2(math.e)
    if few_registers:
        return highest * jnp.tanh(products * (math.log(2) / 2))
    return highest - 2.0 * highest / (1.0 + jnp.exp2(products))
