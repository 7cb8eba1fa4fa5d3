"""Merging attention over parts of a sequence by log-sum-exp (Hydragen section 3.1 and appendix)."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32

from jaxshare.sharding import pmax, psum

Partial = tuple[Float32[Array, "*rows D"], Float32[Array, "*rows"]]
"""(out, lse) of attention over some of the keys. lse is -inf where there were no keys."""


def merge(*parts: Partial) -> Partial:
    """Attention over the union of the parts' keys: sum_b exp(lse_b - max) out_b / sum_b exp(lse_b -
    max)."""
    top = functools.reduce(jnp.maximum, (lse for _, lse in parts))
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = [jnp.exp(lse - top) for _, lse in parts]
    total = functools.reduce(jnp.add, weights)
    out = functools.reduce(
        jnp.add, (w[..., None] * out for w, (out, _) in zip(weights, parts, strict=True))
    )
    return out / jnp.where(total == 0, 1.0, total)[..., None], jnp.log(total) + top


def sink_part(
    sinks: Float[Array, "..."],
    out: Float32[Array, "*rows D"],
    lse: Float32[Array, "*rows"],
    axis: str | None,
) -> Partial:
    """The part of attention sinks: a score for each head beside those of all keys, with no value
    (gpt-oss). It is merged once, whatever the blocks.

    Args:
      sinks: broadcast against lse.
      out, lse: of any other part, for the shapes.
      axis: the mesh axis over which tokens are spread; the first device has the part.
    """
    return jnp.zeros_like(out), jnp.broadcast_to(
        sinks_here(sinks.astype(jnp.float32), axis), lse.shape
    )


def sinks_here(sinks: Float[Array, "..."], axis: str | None) -> Float[Array, "..."]:
    """The sinks, and -inf on all devices of the axis but the first, so that they count once."""
    if axis is None:
        return sinks
    return jnp.where(jax.lax.axis_index(axis) == 0, sinks, -jnp.inf)


def merge_over(
    axis: str | None, out: Float[Array, "*rows D"], lse: Float[Array, "*rows"]
) -> Float[Array, "*rows D"]:
    """Attention over the union of the keys that the devices of an axis of the mesh keep: `merge`
    with one part per device.

    Two all-reduces, one of a number a query. Every device has all queries, so that none has to be
    sent (Hogwild! appendix B sends the queries to the blocks, and leaves the merging open).
    """
    if axis is None:
        return out
    top = pmax(lse, axis)
    weight = jnp.exp(lse - jnp.where(jnp.isneginf(top), 0.0, top))[..., None]
    mixed = psum(jnp.concatenate([out * weight, weight], axis=-1), axis)
    total = mixed[..., -1:]
    return mixed[..., :-1] / jnp.where(total == 0, 1.0, total)
