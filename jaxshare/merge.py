"""Merging attention over parts of a sequence by log-sum-exp (Hydragen section 3.1 and appendix)."""

import functools

import jax.numpy as jnp
from jax import Array

Partial = tuple[Array, Array]
"""(out [..., D], lse [...]) of attention over some of the keys, both float32. lse is -inf where there were no keys."""


def merge(*parts: Partial) -> Partial:
    """Attention over the union of the parts' keys: sum_b exp(lse_b - max) out_b / sum_b exp(lse_b - max)."""
    top = functools.reduce(jnp.maximum, (lse for _, lse in parts))
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = [jnp.exp(lse - top) for _, lse in parts]
    total = functools.reduce(jnp.add, weights)
    out = functools.reduce(jnp.add, (w[..., None] * out for w, (out, _) in zip(weights, parts, strict=True)))
    return out / jnp.where(total == 0, 1.0, total)[..., None], jnp.log(total) + top
