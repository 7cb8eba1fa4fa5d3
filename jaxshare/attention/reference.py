"""The oracle: attention written directly from its definition, regardless of speed.

Every row gathers the keys it sees, rotates each to its position in the row's order, and takes a
plain softmax in float32. It shares no helper with the fast paths: starts and masks are computed
again from the layout, and angles in another way. Memory grows with rows x arena tokens: it is for
tests and for small models.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxshare.attention.plan import Plan
from jaxshare.quantised import QuantisedTensor
from jaxshare.quantised_cache import Arena
from jaxshare.rope import Rope

_FINE = 1024


def reference_attention(
    q: Float[Array, "R T H D"],
    keys: Arena,
    values: Arena,
    plan: Plan,
    scale: float,
    softcap: float = 0.0,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "R T H _"]:
    """Attention of queries that are not rotated over arenas that hold this pass's keys and values
    already, in q's dtype.

    Raises:
      NotImplementedError: tokens that are spread over devices.
    """
    if plan.token_sharding.axis is not None:
        raise NotImplementedError(
            "it reads whole blocks, and here each device keeps a part of them"
        )
    # All of them are dequantised: the oracle takes the memory for it.
    keys, values = (
        a.dequantised(jnp.float32) if isinstance(a, QuantisedTensor) else a for a in (keys, values)
    )
    kv_heads, tokens, _ = keys.shape
    values = values if values.shape[2] else keys[..., plan.rope.rotary_dim :]
    rows, width, heads, dim = q.shape
    out = []
    for r in range(rows):
        sees, rotation, place, new_start = _seen_by(plan, r, tokens)
        at = new_start + jnp.arange(width)
        if plan.window:
            sees &= at[:, None] - place[None] < plan.window
        k = _rotated(keys.astype(jnp.float32), *_table(plan.rope, rotation))
        cos, sin = _table(plan.rope, at)
        factor = np.float32(plan.rope.attention_factor)
        # [H, T, D]
        query = _rotated(q[r].astype(jnp.float32).swapaxes(0, 1), cos * factor, sin * factor)
        scores = (
            jnp.einsum(
                "kgtd,ksd->kgts",
                query.reshape(kv_heads, heads // kv_heads, width, dim),
                k,
                precision="highest",
            )
            * scale
        )
        scores = jnp.tanh(scores / softcap) * softcap if softcap else scores
        weights = _softmax(jnp.where(sees, scores, -jnp.inf), sinks)
        mixed = jnp.einsum(
            "kgts,ksd->kgtd", weights, values.astype(jnp.float32), precision="highest"
        )
        out.append(mixed.reshape(heads, width, values.shape[2]).swapaxes(0, 1))
    return jnp.stack(out).astype(q.dtype)


def _seen_by(plan: Plan, r: int, tokens: int) -> tuple[Array, Array, Array, Array]:
    """The entries of the arena that each new token of a row sees, [T, tokens], by its blocks alone;
    by how much each entry's key is rotated, and its place in the row's order; and the place of the
    first new token."""
    width = plan.positions.shape[1]
    entry = jnp.arange(tokens)
    sees = jnp.zeros((width, tokens), bool)
    rotation, place = jnp.zeros(tokens, jnp.int32), jnp.zeros(tokens, jnp.int32)
    start, new_start = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    listed = [plan.blocks[r, n] for n in range(plan.blocks.shape[1])]
    last = sum((b >= 0).astype(jnp.int32) for b in listed) - 1
    for n, b in enumerate(listed):
        writes = n == last
        length = plan.before[b] + jnp.sum(jnp.where(_written(plan) == b, plan.count, 0))
        inside = (b >= 0) & (entry >= plan.offsets[b]) & (entry < plan.offsets[b] + length)
        index = entry - plan.offsets[b]
        causal = index[None] <= plan.before[b] + plan.ahead[r] + jnp.arange(width)[:, None]
        sees |= inside[None] & (causal | ~writes)
        rotation = jnp.where(inside, start - plan.phases[b], rotation)
        place = jnp.where(inside, start + index, place)
        new_start = jnp.where(writes, start + plan.before[b] + plan.ahead[r], new_start)
        start = start + jnp.where(b >= 0, length, 0)
    return sees, rotation, place, new_start


def _softmax(scores: Array, sinks: Array | None) -> Array:
    """The weights of keys from their scores [K, G, T, S]; 0 where a query sees none. A sink is one
    more key for each head, whose value is 0."""
    tokens = scores.shape[-1]
    if sinks is not None:
        sink = sinks.reshape(scores.shape[0], -1, 1, 1).astype(scores.dtype)
        sink = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jnp.exp(scores - jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), -1e30))
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
    return weights[..., :tokens]


def _written(plan: Plan) -> Array:
    rows, slots = plan.blocks.shape
    written = []
    for r in range(rows):
        last = jnp.asarray(-1, jnp.int32)
        for n in range(slots):
            last = jnp.where(plan.blocks[r, n] >= 0, plan.blocks[r, n], last)
        written.append(last)
    return jnp.stack(written)


def _table(rope: Rope, positions: Array) -> tuple[Array, Array]:
    """Computes cos and sin by the addition theorem from two float64 tables: multiples of 1024, and
    the remainder."""
    fine = np.arange(_FINE)[:, None] * np.asarray(rope.frequencies)
    coarse = np.arange(-_FINE, _FINE)[:, None] * np.asarray(rope.frequencies) * _FINE
    low, high = positions % _FINE, positions // _FINE + _FINE
    cos_a, sin_a = (jnp.asarray(f(fine), jnp.float32)[low] for f in (np.cos, np.sin))
    cos_b, sin_b = (jnp.asarray(f(coarse), jnp.float32)[high] for f in (np.cos, np.sin))
    return cos_a * cos_b - sin_a * sin_b, sin_a * cos_b + cos_a * sin_b


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    pairs = cos.shape[-1]
    a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos, x[..., 2 * pairs :]], axis=-1)
