"""Block attention in plain XLA: for CPUs, TPUs and any GPU.

Two loops whose trip counts follow the real lengths. Blocks that several rows see are read tile by tile, the queries of all
rows in one product (Hydragen section 3.2). Blocks that one row sees are read a group of tiles at a time, one batched product
a group, whatever row each tile belongs to. Both keep a running softmax; the two results are merged by log-sum-exp.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxshare.merge import Partial, merge
from jaxshare.plan import Plan
from jaxshare.rope import rotate


def xla_attention(q: Array, keys: Array, values: Array, plan: Plan, scale: float) -> Array:
    """q [R, T, H, D] not rotated, arenas [K, tokens, D] that hold this pass's keys already -> [R, T, H, D] in q's dtype."""
    rows, width, heads, dim = q.shape
    kv_heads = keys.shape[0]
    grouped = (q.astype(jnp.float32) * scale).reshape(rows, width, kv_heads, heads // kv_heads, dim)
    shared = _shared(grouped.transpose(2, 0, 1, 3, 4), keys, values, plan)
    private = _private(grouped.transpose(0, 2, 1, 3, 4), keys, values, plan)
    out, _ = merge(shared, private)  # [R, K, T, G, D]
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape).astype(q.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Running:
    """A softmax on its way: the largest score so far, the sum of exponentials and the mixed values under it."""

    top: Array
    total: Array
    mixed: Array

    @classmethod
    def start(cls, shape: tuple[int, ...], dim: int) -> "_Running":
        return cls(jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, dim)))

    def finish(self) -> Partial:
        empty = self.total == 0
        out = self.mixed / jnp.where(empty, 1.0, self.total)[..., None]
        return out, jnp.where(empty, -jnp.inf, self.top + jnp.log(jnp.where(empty, 1.0, self.total)))


def _shared(q: Array, keys: Array, values: Array, plan: Plan) -> Partial:
    """q [K, R, T, G, D] -> (out [R, K, T, G, D], lse [R, K, T, G]) over the blocks that several rows see."""
    kv_heads, rows, width, group, dim = q.shape
    tile = min(plan.shared.size, keys.shape[1])
    step = jnp.arange(width)

    def body(item: Array, running: _Running) -> _Running:
        block, first = plan.shared.find(item)
        at = plan.offsets[block] + first
        start = jnp.minimum(at, keys.shape[1] - tile)
        match = plan.blocks == block
        slot = jnp.argmax(match, axis=1)[:, None]
        cos, sin = (jnp.take_along_axis(t, slot[..., None, None], axis=1)[:, 0] for t in (plan.query_cos, plan.query_sin))
        visible = jnp.take_along_axis(jnp.where(match, plan.visible, 0), slot, axis=1)
        visible = visible + jnp.take_along_axis(plan.own & match, slot, axis=1) * step  # [R, T]
        token = jnp.arange(tile) + (start - plan.offsets[block])
        sees = (token >= first) & (token < visible[..., None])  # [R, T, tile]
        query = rotate(q, cos[:, :, None], sin[:, :, None]).astype(keys.dtype).reshape(kv_heads, -1, dim)
        k, v = (jax.lax.dynamic_slice_in_dim(a, start, tile, axis=1) for a in (keys, values))
        scores = _product(query, k, 2).reshape(kv_heads, rows, width, group, tile)
        scores = jnp.where(sees[None, :, :, None], scores, -jnp.inf).reshape(kv_heads, -1, tile)
        top = jnp.maximum(running.top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - _finite(top)[..., None])
        keep = jnp.exp(running.top - _finite(top))
        mixed = running.mixed * keep[..., None] + _product(weights.astype(v.dtype), v, 1)
        return _Running(top, running.total * keep + jnp.sum(weights, axis=-1), mixed)

    start = _Running.start((kv_heads, rows * width * group), dim)
    out, lse = jax.lax.fori_loop(0, plan.shared.count, body, start).finish()
    return out.reshape(q.shape).swapaxes(0, 1), lse.reshape(q.shape[:-1]).swapaxes(0, 1)


def _private(q: Array, keys: Array, values: Array, plan: Plan) -> Partial:
    """q [R, K, T, G, D] -> (out [R, K, T, G, D], lse [R, K, T, G]) over the blocks that one row sees."""
    rows, kv_heads, width, group, dim = q.shape
    tile = min(plan.private.size, keys.shape[1])
    items = _tiles_at_once(rows, width)
    slots = plan.blocks.shape[1]
    step = jnp.arange(width)

    def body(i: Array, running: _Running) -> _Running:
        item = i * items + jnp.arange(items)
        run, first = plan.private.find(item)
        row, slot = run // slots, run % slots
        block = plan.blocks[row, slot]
        base = plan.offsets[block]
        start = jnp.minimum(base + first, keys.shape[1] - tile)
        visible = plan.visible[row, slot][:, None] + plan.own[row, slot][:, None] * step  # [W, T]
        token = jnp.arange(tile) + (start - base)[:, None]
        sees = (token >= first[:, None])[:, None] & (token[:, None] < visible[..., None])  # [W, T, tile]
        sees &= (item < plan.private.count)[:, None, None]
        cos, sin = plan.query_cos[row, slot], plan.query_sin[row, slot]  # [W, T, P]
        query = rotate(q[row], cos[:, None, :, None], sin[:, None, :, None]).astype(keys.dtype)
        k, v = (jnp.stack([jax.lax.dynamic_slice_in_dim(a, start[w], tile, axis=1) for w in range(items)]) for a in (keys, values))
        scores = _product(query.reshape(items * kv_heads, -1, dim), k.reshape(items * kv_heads, tile, dim), 2)
        scores = jnp.where(sees[:, None, :, None], scores.reshape(items, kv_heads, width, group, tile), -jnp.inf)
        scores = scores.reshape(items, kv_heads, -1, tile)
        # Tiles of a group may belong to any rows, several to the same: one-hot products sum them into their rows.
        belongs = row == jnp.arange(rows)[:, None]  # [R, W]
        highest = jnp.max(scores, axis=-1)
        top = jnp.max(jnp.where(belongs[..., None, None], highest, -jnp.inf), axis=1)
        top = jnp.maximum(running.top, top)  # [R, K, T*G]
        weights = jnp.exp(scores - _finite(top)[row][..., None])
        mixed = _product(weights.astype(v.dtype).reshape(items * kv_heads, -1, tile), v.reshape(items * kv_heads, tile, dim), 1)
        keep = jnp.exp(running.top - _finite(top))
        total = _into_rows(belongs, jnp.sum(weights, axis=-1))
        return _Running(top, running.total * keep + total,
                        running.mixed * keep[..., None] + _into_rows(belongs, mixed.reshape(items, kv_heads, -1, dim)))

    start = _Running.start((rows, kv_heads, width * group), dim)
    out, lse = jax.lax.fori_loop(0, -(-plan.private.count // items), body, start).finish()
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def _tiles_at_once(rows: int, width: int) -> int:
    """How many private tiles one product takes: enough to fill it, few enough to waste little."""
    return max(1, min(4 * rows, 16) // width)


def _into_rows(belongs: Array, x: Array) -> Array:
    """belongs [R, W], x [W, ...] -> [R, ...], exact sums in float32."""
    flat = x.reshape(x.shape[0], -1)
    summed = jax.lax.dot(belongs.astype(jnp.float32), flat, precision=jax.lax.Precision.HIGHEST)
    return summed.reshape(belongs.shape[0], *x.shape[1:])


def _product(a: Array, b: Array, contract: int) -> Array:
    """Batched a [n, q, x] with b, contracting b's axis `contract`; float32 results, exact products for float32 input."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (((2,), (contract,)), ((0,), (0,))), precision=precision, preferred_element_type=jnp.float32)


def _finite(top: Array) -> Array:
    """Where nothing was seen yet there is nothing to subtract."""
    return jnp.where(jnp.isneginf(top), 0.0, top)
