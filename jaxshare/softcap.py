"""Softcaps: bounds of scores and logits that leave small ones as they are (Gemma 2)."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32


def soft_capped(x: Float32[Array, "*shape"], softcap: float) -> Float32[Array, "*shape"]:
    """softcap * tanh(x / softcap); x itself where softcap is 0."""
    return softcap * jnp.tanh(x / softcap) if softcap else x
