"""Log-probabilities of given tokens at some positions of a pass.

The logits of all positions are never in memory together: the head runs over a few positions at a
time, and their logits are reduced at once. So a long text takes no more memory than a short one.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Float32, Int, Int32

from jaxshare.cache import KVCache
from jaxshare.decoding.samplers import Samplers
from jaxshare.layout import Layout
from jaxshare.models.layers import Decoder, Params
from jaxshare.models.tensor_parallel import ShardedDecoder

CHUNK = 32
"""Positions whose logits are in memory at a time."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoredPositions:
    """The distributions at N positions, reduced.

    R rows, K tokens asked for at a position, P of the likeliest ones.

    Attributes:
      logprobs: the log-probability of each token that was asked for.
      likeliest: the token with the largest logit; of several, the lowest.
      top: the P likeliest tokens, in descending order; of equal ones the lower first.
      top_logprobs: their log-probabilities.
      finite: False for a row with a state that is not finite at any of its new tokens.
    """

    logprobs: Float32[Array, "N K"]
    likeliest: Int32[Array, " N"]
    top: Int32[Array, "N P"]
    top_logprobs: Float32[Array, "N P"]
    finite: Bool[Array, " R"]


@functools.partial(jax.jit, static_argnames=("module", "num_top"), donate_argnames="cache")
def score_positions(
    module: Decoder | ShardedDecoder,
    params: Params,
    tokens: Int[Array, "R T"],
    count: Int[Array, " R"],
    cache: KVCache,
    layout: Layout,
    at: Int[Array, " N"],
    asked: Int[Array, "N K"],
    used: Int[Array, ""],
    num_top: int,
    samplers: Samplers | None = None,
) -> tuple[ScoredPositions, KVCache]:
    """Runs one pass over a shared cache, and scores tokens after some of its positions.

    Args:
      module, params: of the model.
      tokens, count, cache, layout: as for `Decoder.__call__`; the cache is donated.
      at: positions, each as row * T + column; N is a multiple of `CHUNK`.
      asked: tokens of the vocabulary, whose log-probabilities after each position are wanted.
      used: of the N positions only the first `used` are computed; the rest is 0.
      num_top: P; static.
      samplers: of `CHUNK` rows, all alike, for the log-probabilities of the chances that they draw
        with; default those of the model itself.

    Returns:
      The scores, and the cache with the new tokens in it.
    """
    passed: Any = module.apply(params, tokens, count, cache, layout, method="hidden")
    hidden, cache = passed
    real = jnp.arange(tokens.shape[1]) < count[:, None]
    finite = jnp.all(jnp.isfinite(hidden) | ~real[..., None], axis=(1, 2))
    states = hidden.reshape(-1, hidden.shape[-1])[at]

    def chunk(number: Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
        start = number * CHUNK
        part = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=CHUNK)
        logits = _logits(module, params, part(states))
        if samplers is not None:
            positions = jnp.zeros(CHUNK, jnp.int32)
            logits = jnp.log(samplers.chances(logits, positions, mesh=cache.mesh))
        reduced = _reduce(logits, part(asked), num_top)
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(whole, new, start, axis=0)
            for whole, new in zip(found, reduced, strict=True)
        )

    places = at.shape[0]
    empty = (
        jnp.zeros(asked.shape, jnp.float32),
        jnp.zeros(places, jnp.int32),
        jnp.zeros((places, num_top), jnp.int32),
        jnp.zeros((places, num_top), jnp.float32),
    )
    found = jax.lax.fori_loop(0, (used + CHUNK - 1) // CHUNK, chunk, empty)
    return ScoredPositions(*found, finite=finite), cache


def _logits(module: Any, params: Params, states: Float[Array, "N M"]) -> Float32[Array, "N V"]:
    if isinstance(module, ShardedDecoder):
        return module.logits(params, states)
    return module.apply(params, states, method="logits")


def _reduce(
    logits: Float32[Array, "N V"], asked: Int[Array, "N K"], num_top: int
) -> tuple[Array, ...]:
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    top_logits, top = jax.lax.top_k(logits, num_top)
    return (
        jnp.take_along_axis(logits, asked, axis=-1) - total,
        jnp.argmax(logits, axis=-1).astype(jnp.int32),
        top.astype(jnp.int32),
        top_logits - total,
    )
