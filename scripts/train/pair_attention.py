"""Attention of packed traces for training on a CPU: all pairs of queries and keys that see each
other at once, in one product.

`jaxshare.trace.attention.trace_attention` goes over tiles one by one, so that memory stays small at
any length. Here a batch has a few thousand tokens of many sessions, and most pairs of a chunk of
queries and a tile of keys belong to different ones. The pairs that matter are found on the host,
once for all layers.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare.models.layers import Decoder, Params
from jaxshare.rope import rotate
from jaxshare.trace.attention import TraceBatch

SIDE = 64
"""Queries and keys of a pair: they divide those of a `TraceBatch`."""
_MULTIPLE = 64
_LOWEST = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pairs:
    """P pairs of a chunk of queries and a tile of stays, padded with those of a chunk that is not
    there.

    Attributes:
      chunks: int32[P], ascending; tiles: int32[P].
    """

    chunks: Array | np.ndarray
    tiles: Array | np.ndarray

    @classmethod
    def of(cls, batch: TraceBatch, multiple: int = _MULTIPLE) -> "Pairs":
        """Those of a batch of one trace in which a query sees a key.

        Args:
          batch: of one trace.
          multiple: to which their number is rounded up. Batches of one number share a program.
        """
        blocks, indices, begins, ends = (np.asarray(x) for x in _tiles(batch)[1:])
        seen, passes = np.asarray(batch.seen[0]), np.asarray(batch.passes[0])
        found = []
        for tile, block in enumerate(blocks):
            used = ends[tile] > 0
            index, begin, end = (x[tile][used] for x in (indices, begins, ends))
            when = passes[:, None]
            visible = ((index < seen[:, block, None]) & (begin <= when) & (when < end)).any(1)
            found += [(chunk, tile) for chunk in np.flatnonzero(visible.reshape(-1, SIDE).any(1))]
        chunks, tiles = np.asarray(sorted(found), np.int32).reshape(-1, 2).T
        room = -len(chunks) % multiple
        return cls(
            np.pad(chunks, (0, room), constant_values=len(passes) // SIDE), np.pad(tiles, (0, room))
        )


def logits(module: Decoder, params: Params, batch: TraceBatch, pairs: Pairs, at: Array) -> Array:
    """The logits of `jaxshare.models.reencode_logits`, of one trace.

    Args:
      module: of the model; params: what it takes.
      batch: of one trace; pairs: of it.
      at: int32[1, A], numbers of the tokens whose logits are wanted.

    Returns:
      float32[1, A, V].
    """
    return module.apply(params, batch, pairs, at, method=_logits)  # pyright: ignore[reportReturnType]


def _logits(module: Decoder, batch: TraceBatch, pairs: Pairs, at: Array) -> Array:
    rope = module.config.rope
    tokens, blocks, indices, begins, ends = _tiles(batch)
    chunks = jnp.minimum(pairs.chunks, batch.shape[1] // SIDE - 1)

    def of_pairs(per_token: Array) -> Array:
        """[T, B] -> [P, C], of the block of each pair's tile."""
        there = per_token.reshape(-1, SIDE, per_token.shape[-1])[chunks]
        return jnp.take_along_axis(there, blocks[pairs.tiles][:, None, None], axis=2)[..., 0]

    index, begin, end = (x[pairs.tiles][:, None] for x in (indices, begins, ends))
    when = batch.passes[0].reshape(-1, SIDE)[chunks][..., None]
    visible = (index < of_pairs(batch.seen[0])[..., None]) & (begin <= when) & (when < end)
    visible &= (pairs.chunks < batch.shape[1] // SIDE)[:, None, None]
    turns, places = (
        rope.cos_sin(of_pairs(batch.rotations[0])[..., None]),
        rope.cos_sin(indices[..., None]),
    )

    @jax.checkpoint
    def attend(q: Array, k: Array, v: Array) -> Array:
        q, k, v = q[0], k[0], v[0]
        keys, values = rotate(k[tokens], *places)[pairs.tiles], v[tokens][pairs.tiles]
        queries = rotate(q.reshape(-1, SIDE, *q.shape[1:])[chunks], *turns)
        return _attention(queries, keys, values, visible, pairs, batch.shape[1] // SIDE).astype(
            q.dtype
        )[None]

    x = module._trunk(batch.tokens, lambda _, q, k, v, sinks: attend(q, k, v))
    return module._logits(jnp.take_along_axis(x, at[..., None], axis=1))


def _attention(q: Array, k: Array, v: Array, visible: Array, pairs: Pairs, chunks: int) -> Array:
    """q [P, C, H, D], k and v [P, S, K, D], visible [P, C, S] -> [chunks * C, H, D], each chunk's
    softmax over all of its pairs."""
    many, side, heads, dim = q.shape
    kv_heads = k.shape[2]
    q = (
        (q * jnp.asarray(dim**-0.5, q.dtype))
        .reshape(many, side, kv_heads, -1, dim)
        .transpose(0, 2, 3, 1, 4)
    )
    q = q.reshape(many, kv_heads, -1, dim)  # [P, K, G C, D]
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)  # [P, K, S, D]
    scores = jax.lax.dot_general(
        q, k, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32
    )
    hidden = jnp.where(visible, 0.0, _LOWEST)[:, None, None]
    scores = (scores.reshape(many, kv_heads, -1, side, side) + hidden).reshape(scores.shape)
    # The largest score cancels out of the result, so no gradient goes through it.
    top = jax.ops.segment_max(
        jax.lax.stop_gradient(jnp.max(scores, axis=-1)),
        pairs.chunks,
        chunks + 1,
        indices_are_sorted=True,
    )
    weights = jnp.exp(scores - top[pairs.chunks][..., None])
    mixed = jax.lax.dot_general(
        weights.astype(v.dtype),
        v,
        (((3,), (2,)), ((0, 1), (0, 1))),
        preferred_element_type=jnp.float32,
    )
    total, mixed = (
        jax.ops.segment_sum(x, pairs.chunks, chunks + 1, indices_are_sorted=True)[:-1]
        for x in (jnp.sum(weights, axis=-1), mixed)
    )
    out = (mixed / jnp.maximum(total, 1e-30)[..., None]).reshape(chunks, kv_heads, -1, side, dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(chunks * side, heads, dim)


def _tiles(batch: TraceBatch) -> tuple[Array, Array, Array, Array, Array]:
    """The stays of a batch of one trace in tiles of SIDE: tokens [J, S], blocks [J], indices,
    begins and ends [J, S]."""
    tokens, indices, begins, ends = (
        x[0].reshape(-1, SIDE)
        for x in (
            batch.placement_tokens,
            batch.placement_indices,
            batch.placement_starts,
            batch.placement_ends,
        )
    )
    return (
        tokens,
        batch.tile_blocks[0].repeat(batch.placement_tokens.shape[2] // SIDE),
        indices,
        begins,
        ends,
    )
