"""Sampling from logits; `jaxshare.decoding.samplers` has the settings of rows.

Randomness is counter-based: a draw depends on (row key, position) alone, never on the rest of the
batch; `jaxshare.seeds` makes the keys. `jaxshare.decoding.truncation` has what top_k, top_p, min_p
and typical_p keep.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Bool, Float, Int, UInt32

from jaxshare.decoding.history import History
from jaxshare.decoding.truncation import truncation_bounds
from jaxshare.pallas.truncated_draws import drawn, draws_on
from jaxshare.sharding import (
    MODEL_AXES,
    Axis,
    axis_in_use,
    axis_size,
    gathered,
    inside,
    on_each,
    pmax,
    psum,
    spec,
)

_CHUNK = 256


def history_after(
    history: History, token: Int[Array, " R"], sampled: Bool[Array, " R"], mesh: Mesh | None
) -> History:
    """The history after bool[R] rows have sampled. `mesh`: as in `Samplers.sample`."""
    if not history.is_kept:
        return history
    width = history.counts.shape[1]
    axis, none = vocab_axis(mesh, width) if width else None, PartitionSpec()
    return on_each(
        functools.partial(_history_after, axis),
        mesh,
        in_specs=(history_spec(axis), none, none),
        out_specs=history_spec(axis),
    )(history, token, sampled)


def _history_after(axis: Axis | None, history: History, token: Array, sampled: Array) -> History:
    first = 0 if axis is None else lax.axis_index(axis) * history.counts.shape[1]
    return history.after(token, sampled, first)


def vocab_axis(mesh: Mesh | None, vocab: int) -> Axis | None:
    """The axis of a mesh along which rows of logits are sharded.

    None where every device has all of them.

    Args:
      mesh: of the model.
      vocab: the length of the rows, as the caller sees them. A vocabulary that the axis does not
        divide is not sharded.
    """
    axis = axis_in_use(mesh, MODEL_AXES)
    # Inside a shard_map the caller sees one device's part, whose length says nothing.
    return axis if axis and (inside() or vocab % axis_size(mesh, MODEL_AXES) == 0) else None


def vocab_spec(axis: Axis | None) -> PartitionSpec:
    """The partition spec of logits [R, V] that are sharded along `axis`."""
    return spec((None, "vocab")) if axis else PartitionSpec()


def history_spec(axis: Axis | None) -> History:
    """The partition specs of a history beside logits that are sharded along `axis`."""
    counts, none = vocab_spec(axis), PartitionSpec()
    return History(counts, counts, none, none)  # pyright: ignore[reportArgumentType]


def sample_rows(
    axis: Axis | None,
    samplers: Any,
    logits: Array,
    history: History,
    masks: Array,
    seeds: Array,
    positions: Array,
) -> Array:
    """Samples on one device, which has the logits of its part of the vocabulary; -1 where none is
    left."""
    first = _first_token(axis, logits)
    logits = samplers.changed(logits, history, masks, positions, first)
    if axis is None and (device := draws_on(logits)):
        cuts = samplers.top_k, samplers.top_p, samplers.min_p, samplers.typical_p
        return drawn(logits, samplers.temperature, *cuts, uniforms(seeds, positions), device)
    top = pmax(jnp.max(logits, axis=-1, keepdims=True), axis)
    likeliest = _argmax(top, logits, first, axis)

    def draw() -> Array:
        weights = _weights(axis, samplers, logits, top)
        return jnp.where(
            samplers.temperature > 0, _draw(weights, uniforms(seeds, positions), axis), likeliest
        )

    token = lax.cond(jnp.any(samplers.temperature > 0), draw, lambda: likeliest)
    return jnp.where(top[:, 0] > -jnp.inf, token, -1)


def chances_of_rows(
    axis: Axis | None,
    samplers: Any,
    logits: Array,
    history: History,
    masks: Array,
    positions: Array,
) -> Array:
    """The chances of tokens on one device, which has the logits of its part of the vocabulary."""
    first = _first_token(axis, logits)
    logits = samplers.changed(logits, history, masks, positions, first)
    top = pmax(jnp.max(logits, axis=-1, keepdims=True), axis)
    weights = _weights(axis, samplers, logits, top)
    token = first + jnp.arange(logits.shape[1])
    is_likeliest = token == _argmax(top, logits, first, axis)[:, None]
    weights = jnp.where(
        samplers.temperature[:, None] > 0, weights, is_likeliest.astype(weights.dtype)
    )
    return weights / psum(jnp.sum(weights, axis=-1, keepdims=True), axis)


def _first_token(axis: Axis | None, logits: Array) -> Array | int:
    return 0 if axis is None else lax.axis_index(axis) * logits.shape[1]


def _weights(axis: Axis | None, samplers: Any, logits: Array, top: Array) -> Array:
    """Weights of the tokens that temperature and truncation leave; the likeliest one has 1."""
    # The largest becomes 0 before the division, so that no temperature overflows it.
    scaled = (logits - top) / jnp.where(samplers.temperature > 0, samplers.temperature, 1.0)[
        :, None
    ]
    cuts = (samplers.top_k > 0) | (samplers.top_p < 1) | (samplers.typical_p < 1)
    # The largest is 0 now, so that min_p alone needs no other logit.
    least = jnp.log(samplers.min_p)[:, None]
    floor, ceiling = lax.cond(
        jnp.any(cuts & (samplers.temperature > 0)),
        lambda x: truncation_bounds(
            gathered(x, axis), samplers.top_k, samplers.top_p, samplers.min_p, samplers.typical_p
        ),
        lambda _: (least, jnp.full_like(least, jnp.inf)),
        scaled,
    )
    return jnp.where((scaled >= floor) & (scaled <= ceiling), jnp.exp(scaled), 0.0)


def largest(logits: Float[Array, "R V"], mesh: Mesh | None) -> Float[Array, " R"]:
    """The largest logit of each row, NaN where one is. `mesh`: as in `Samplers.sample`."""
    axis = vocab_axis(mesh, logits.shape[-1])
    return on_each(
        functools.partial(_largest, axis),
        mesh,
        in_specs=(vocab_spec(axis),),
        out_specs=PartitionSpec(),
    )(logits)


def whole_rows(logits: Float[Array, "R part"], mesh: Mesh | None) -> Float[Array, "R V"]:
    """The logits over the whole vocabulary: gathered inside a shard_map, elsewhere unchanged."""
    return gathered(logits, vocab_axis(mesh, logits.shape[-1])) if inside() else logits


def _largest(axis: Axis | None, logits: Array) -> Array:
    top = jnp.max(logits, axis=-1)
    if axis is None:
        return top
    # Not every library that reduces over devices passes a NaN on.
    is_nan = jnp.isnan(top)
    top, is_nan = pmax(
        jnp.stack([jnp.where(is_nan, -jnp.inf, top), is_nan.astype(top.dtype)]), axis
    )
    return jnp.where(is_nan > 0, jnp.nan, top)


def logprob(
    logits: Float[Array, "R V"], tokens: Int[Array, " R"], *, mesh: Mesh | None = None
) -> Float[Array, " R"]:
    """The model's own log-probability of each row's token, before temperature, truncation and bias.
    `mesh`: as in `Samplers.sample`."""
    axis, none = vocab_axis(mesh, logits.shape[-1]), PartitionSpec()
    return on_each(
        functools.partial(_logprob, axis), mesh, in_specs=(vocab_spec(axis), none), out_specs=none
    )(logits, tokens)


def _logprob(axis: Axis | None, logits: Array, tokens: Array) -> Array:
    if axis is None:
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)
    index = tokens - lax.axis_index(axis) * logits.shape[1]
    here = (index >= 0) & (index < logits.shape[1])
    chosen = jnp.take_along_axis(logits, jnp.clip(index, 0, logits.shape[1] - 1)[:, None], axis=1)[
        :, 0
    ]
    top = pmax(jnp.max(logits, axis=-1), axis)
    total = jnp.sum(jnp.exp(logits - top[:, None]), axis=-1)
    chosen, total = psum((jnp.where(here, chosen, 0.0), total), axis)
    return chosen - top - jnp.log(total)


def uniforms(
    seeds: UInt32[Array | np.ndarray, "R 2"], positions: Int[Array | np.ndarray, " R"]
) -> Float[Array, " R"]:
    """Uniform numbers in [0, 1), each from its own (key, position) alone.

    They are those of `jax.random.uniform(jax.random.fold_in(key, position))` for keys of threefry,
    which on a CPU runs a loop of small programs for what is one here.
    """
    words, zero = jnp.asarray(seeds), jnp.zeros(positions.shape, jnp.uint32)
    key = _threefry(words[:, 0], words[:, 1], zero, jnp.asarray(positions).astype(jnp.uint32))
    high, low = _threefry(*key, zero, zero)
    # 23 random bits as the fraction of a number from 1 to 2.
    bits = ((high ^ low) >> np.uint32(9)) | np.uint32(0x3F800000)
    return lax.bitcast_convert_type(bits, jnp.float32) - 1.0


_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


def _threefry(key_0: Array, key_1: Array, x_0: Array, x_1: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds: Salmon et al., Parallel random numbers: as easy as 1, 2, 3."""
    keys = key_0, key_1, key_0 ^ key_1 ^ np.uint32(0x1BD11BDA)
    x_0, x_1 = x_0 + keys[0], x_1 + keys[1]
    for i in range(5):
        for by in _ROTATIONS[i % 2]:
            x_0 = x_0 + x_1
            x_1 = ((x_1 << np.uint32(by)) | (x_1 >> np.uint32(32 - by))) ^ x_0
        x_0 = x_0 + keys[(i + 1) % 3]
        x_1 = x_1 + keys[(i + 2) % 3] + np.uint32(i + 1)
    return x_0, x_1


def _argmax(top: Array, logits: Array, first: Array | int, axis: Axis | None) -> Array:
    """The index of the first of the largest logits, as jnp.argmax.

    It uses plain reductions: XLA vectorises those on the CPU, and not argmax.
    """
    index = jnp.where(logits == top, jnp.arange(logits.shape[-1]), logits.shape[-1])
    index = jnp.min(index, axis=-1).astype(jnp.int32)
    if axis is not None:
        index = lax.pmin(
            jnp.where(index < logits.shape[-1], first + index, jnp.iinfo(jnp.int32).max), axis
        )
        return jnp.minimum(index, logits.shape[-1] * lax.axis_size(axis) - 1)
    return jnp.minimum(index, logits.shape[-1] - 1)


def _draw(weights: Array, uniform: Array, axis: Axis | None = None) -> Array:
    """Inverts the cumulative sum of weights [R, V] at uniform [R].

    It has two levels: a chunk of tokens, then one of them. Devices with parts of the vocabulary
    exchange the sums of all chunks, and then the weights of the one chunk.
    """
    rows, vocab = weights.shape
    padded = jnp.pad(weights, ((0, 0), (0, -vocab % _CHUNK))).reshape(rows, -1, _CHUNK)
    chunks = padded.shape[1]
    sums = gathered(jnp.sum(padded, axis=-1), axis)
    cumulative = jnp.cumsum(sums, axis=-1)
    chunk, rest = _invert(sums, cumulative, uniform * cumulative[:, -1])
    device, chunk = chunk // chunks, chunk % chunks
    within = jnp.take_along_axis(padded, chunk[:, None, None], axis=1)[:, 0]
    if axis is not None:
        within = psum(jnp.where((device == lax.axis_index(axis))[:, None], within, 0.0), axis)
    token, _ = _invert(within, jnp.cumsum(within, axis=-1), rest)
    return device * vocab + chunk * _CHUNK + token


def _invert(weights: Array, cumulative: Array, target: Array) -> tuple[Array, Array]:
    """The first index of positive weight where the cumulative sum exceeds the target.

    Returns also the target less the sum before that index. Sums are rounded, and on some devices
    not even monotone: where the target reaches the whole sum, it is the last index of positive
    weight, and an index of weight 0 is never taken.
    """
    indices = jnp.arange(weights.shape[1])
    reached = (weights > 0) & (cumulative > target[:, None])
    first = jnp.min(jnp.where(reached, indices, weights.shape[1]), axis=-1)
    last = jnp.max(jnp.where(weights > 0, indices, 0), axis=-1)
    index = jnp.minimum(first, last).astype(jnp.int32)
    below = jnp.where(
        index > 0,
        jnp.take_along_axis(cumulative, jnp.maximum(index - 1, 0)[:, None], axis=1)[:, 0],
        0.0,
    )
    return index, target - below
