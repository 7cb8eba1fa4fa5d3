"""Attention share: how much of its attention each new token gives to each block that its row lists.
For inspection, not for speed."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32

from jaxshare.attention.plan import Plan
from jaxshare.quantised_cache import Arena, wide
from jaxshare.rope import rotate
from jaxshare.sharding import pmax, psum
from jaxshare.softcap import soft_capped

_TILE = 512


def block_attention_share(
    q: Float[Array, "R T H D"],
    keys: Arena,
    plan: Plan,
    scale: float,
    softcap: float = 0.0,
) -> Float32[Array, "R T H N"]:
    """The share of the softmax that falls on each listed block: exp(lse_b) / sum_b exp(lse_b), as
    in merging (Hydragen section 3.1).

    One block of one row at a time, a tile of keys after the other: temporary memory does not grow
    with the cache.

    Args:
      q: not rotated.
      keys: one layer's arena, this pass's keys already in it (`KVCache.append`).
      plan: of this pass.
      scale: of the scores.
      softcap: as in `block_attention`. What a sink takes is left out.

    Returns:
      Shares in the order in which the row lists its blocks, that sum to 1 over N. All 0 for a row
      that brings no token; padding is finite and means nothing.
    """
    rows, width, heads, dim = q.shape
    kv_heads, arena, _ = keys.shape
    slots = plan.blocks.shape[1]
    tile = min(_TILE, arena)
    grouped = q.reshape(rows, width, kv_heads, heads // kv_heads, dim).astype(jnp.float32) * scale

    def block_lse(listed: Array) -> Array:
        """float32[T, K, G] of one block as one row sees it."""
        r, n = listed // slots, listed % slots
        query = rotate(
            grouped[r], *(wave[r, n][:, None, None] for wave in (plan.query_cos, plan.query_sin))
        )
        first = plan.offsets[jnp.maximum(plan.blocks[r, n], 0)]
        seen = plan.seen[r, n]  # [T]

        def add(i: Array, lse: Array) -> Array:
            # A tile that would extend past the arena's end starts earlier; the tokens that were
            # counted before are masked.
            start = jnp.minimum(first + i * tile, arena - tile)
            token = start + jnp.arange(tile) - first
            k = _tile(keys, start, tile)
            scores = jnp.einsum("tkgd,ksd->tkgs", query, k, precision="highest")
            scores = soft_capped(scores, softcap)
            real = (token >= i * tile) & (token < seen[:, None])
            if plan.unseen is not None:
                real &= token >= plan.unseen[r, n][:, None]
            return jnp.logaddexp(
                lse, jax.nn.logsumexp(jnp.where(real[:, None, None], scores, -jnp.inf), axis=-1)
            )

        return jax.lax.fori_loop(
            0, -(-jnp.max(seen) // tile), add, jnp.full(query.shape[:-1], -jnp.inf)
        )

    lse = jax.lax.map(block_lse, jnp.arange(rows * slots)).reshape(rows, slots, width, heads)
    return _shares(_over_devices(lse, plan.token_sharding.axis)).transpose(0, 2, 3, 1)


def _tile(keys: Arena, start: Array, size: int) -> Float32[Array, "K S D"]:
    """Some keys of an arena, in float32."""
    return wide(jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, size, axis=1), keys))


def _shares(lse: Array) -> Array:
    """The share of each block, axis 1, from their log-sum-exps; 0 where nothing is seen."""
    top = jnp.max(lse, axis=1, keepdims=True)
    share = jnp.exp(lse - jnp.where(jnp.isneginf(top), 0.0, top))
    # at least 1 where anything is seen
    return share / jnp.maximum(jnp.sum(share, axis=1, keepdims=True), 1.0)


def _over_devices(lse: Array, axis: str | None) -> Array:
    """The log-sum-exp over the keys that all devices of an axis keep."""
    if axis is None:
        return lse
    top = pmax(lse, axis)
    finite = jnp.where(jnp.isneginf(top), 0.0, top)
    return jnp.log(psum(jnp.exp(lse - finite), axis)) + finite


def last_tokens(q: Float[Array, "R T H D"], plan: Plan) -> tuple[Float[Array, "R 1 H D"], Plan]:
    """The arguments of `block_attention_share` for each row's last real token alone. The plan is
    valid for nothing else."""
    last = jnp.maximum(plan.count - 1, 0)

    def picked(x: Array, axis: int) -> Array:
        return jnp.take_along_axis(x, last.reshape(-1, *[1] * (x.ndim - 1)), axis=axis)

    return picked(q, 1), dataclasses.replace(
        plan,
        seen=picked(plan.seen, 2),
        unseen=None if plan.unseen is None else picked(plan.unseen, 2),
        query_cos=picked(plan.query_cos, 2),
        query_sin=picked(plan.query_sin, 2),
        work={},
    )
