"""The top-K logits of a distribution and the exact mass of the rest.

They are enough to resample without the model. A full row of logits is 600 KB at a vocabulary of
150,000. Only its largest logits are kept, and the exact mass of all other tokens, at the places
where an inverse of the cumulative sum needs it: before each kept token. That tells whether a draw
falls on a kept token, and on which; a draw between them needs the model. Host code that draws is in
`jaxshare.serving.logits_cache.replay`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxshare import cpu
from jaxshare.decoding.array_rows import filled

_CHUNK = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopLogits:
    """The top K logits of distributions of any leading shape, here [...].

    Arrays of JAX on a device, of numpy on the host. Mass is relative to the largest logit: the mass
    of some tokens at temperature t is the sum of exp((logit - largest) / t) over them.

    Attributes:
      tokens: int32[..., K], the tokens of the K largest logits, ascending; of logits that tie with
        the smallest of them, the lower tokens.
      logits: float32[..., K], their logits, as the model gave them.
      below: float32[..., K], for each kept token the mass, at `kept_at`, of the tokens before it
        that are not kept.
      rest: float32[...], the mass of all tokens that are not kept, at `kept_at`.
      rest_at_1: float32[...], the same at temperature 1.
      kept_at: float32[...], the temperature of `below` and `rest`.
      vocab: V, the number of tokens in the vocabulary (static).
    """

    tokens: Array | np.ndarray
    logits: Array | np.ndarray
    below: Array | np.ndarray
    rest: Array | np.ndarray
    rest_at_1: Array | np.ndarray
    kept_at: Array | np.ndarray
    vocab: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def empty(cls, shape: tuple[int, ...], k: int, vocab: int) -> "TopLogits":
        """Zeros for distributions [*shape] of `k` tokens each.

        Of the whole vocabulary where it is smaller.
        """
        per_token = (*shape, min(k, vocab))
        # An array each, so that all can be donated.
        reals = functools.partial(filled, dtype=np.float32)
        return cls(
            filled(per_token),
            reals(per_token),
            reals(per_token),
            reals(shape),
            reals(shape),
            reals(shape),
            vocab,
        )


def largest_logprobs(top: TopLogits, count: int) -> list[tuple[tuple[int, float], ...]]:
    """The likeliest tokens of distributions [X] on the host and their log-probabilities at
    temperature 1, the likeliest first, of equal ones the lower token; at most `count` of each, and
    none without a chance."""
    tokens, logits = np.asarray(top.tokens), np.asarray(top.logits, np.float64)
    largest = logits.max(axis=-1, keepdims=True)
    mass = np.exp(logits - largest).sum(axis=-1) + np.asarray(top.rest_at_1, np.float64)
    logprobs = logits - largest - np.log(mass)[:, None]
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    found = [np.take_along_axis(each, order, axis=-1).tolist() for each in (tokens, logprobs)]
    pairs = [zip(*pair, strict=True) for pair in zip(*found, strict=True)]
    return [tuple((token, value) for token, value in each if value > -np.inf) for each in pairs]


def compress_logits(
    logits: Float[Array, "R V"], temperature: Float[Array, " R"], k: int
) -> TopLogits:
    """The top logits of R distributions. Pure, for use under jit; a row with a NaN has NaN masses.

    Args:
      logits: of each row.
      temperature: at which each row will most likely be sampled again; 0 counts as 1.
      k: tokens to keep, K = min(k, V). Static.

    Raises:
      ValueError: `k` below 1.
    """
    if k < 1:
        raise ValueError(f"k is {k}; at least 1 token has to be kept")
    rows, vocab = logits.shape
    k = min(k, vocab)
    row = jnp.arange(rows)[:, None]
    kept_at = jnp.where(temperature > 0, temperature, 1.0)
    if (found := cpu.largest_logits(logits, kept_at, k)) is not None:
        return TopLogits(*found, kept_at, vocab)
    if k == vocab:
        tokens = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32), logits.shape)
    else:
        tokens = jnp.sort(jax.lax.top_k(logits, k)[1].astype(jnp.int32), axis=-1)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    others = (
        jnp.ones(logits.shape, bool)
        .at[row, tokens]
        .set(False, unique_indices=True, indices_are_sorted=True)
    )
    below_largest = logits - largest

    def chunks(t: Array) -> Array:
        mass = jnp.where(others, jnp.exp(below_largest / t[:, None]), 0.0)
        return jnp.pad(mass, ((0, 0), (0, -vocab % _CHUNK))).reshape(rows, -1, _CHUNK)

    # Summed in two levels, as a draw does: chunks of tokens, then the tokens before the kept one in
    # its own chunk.
    mass = chunks(kept_at)
    sums = jnp.sum(mass, axis=-1)
    cumulative = jnp.cumsum(sums, axis=-1)
    before = jnp.pad(cumulative, ((0, 0), (1, 0)))[:, :-1]
    inside = jnp.cumsum(mass, axis=-1).reshape(rows, -1)
    # The mass at a kept token is 0, so that a sum up to it is a sum before it.
    below = jnp.take_along_axis(before, tokens // _CHUNK, axis=1) + jnp.take_along_axis(
        inside, tokens, axis=1
    )
    rest_at_1 = jnp.sum(jnp.sum(chunks(jnp.ones_like(kept_at)), axis=-1), axis=-1)
    return TopLogits(
        tokens,
        jnp.take_along_axis(logits, tokens, axis=1),
        below,
        cumulative[:, -1],
        rest_at_1,
        kept_at,
        vocab,
    )
