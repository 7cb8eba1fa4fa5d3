"""Changes of logits by the text so far: penalties, and tokens that would complete what must not come.

They are those of transformers, and the presence and frequency penalties of the OpenAI API.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from jaxshare.decoding.history import History


def penalised(logits: Float[Array, "R V"], history: History, samplers: Any) -> Array:
    """The logits after the penalties of samplers; those of rows without stay as they are.

    Tokens of the whole text count for the repetition penalty (Keskar et al. 2019, section 4.1), and
    sampled ones alone for presence and frequency.
    """
    sampled = history.counts > 0
    repetition = samplers.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(history.prompt | sampled, repeated, logits)
    logits = logits - samplers.frequency[:, None] * history.counts.astype(logits.dtype)
    return logits - jnp.where(sampled, samplers.presence[:, None], 0.0)


def without_repeats(
    logits: Float[Array, "R V"], history: History, ngram: Int32[Array, " R"], first: Array | int = 0
) -> Array:
    """The logits without tokens that would make the last `ngram` tokens come a second time; 0 allows
    it. `first`: the token of the first logit."""
    place = jnp.arange(history.tokens.shape[1])

    def ban(logits: Array) -> Array:
        def compare(back: Array, same: Array) -> Array:
            before = jnp.where(place >= back, jnp.roll(history.tokens, back, axis=1), -1)
            return same & ((before == history.last(back)[:, None]) | (back >= ngram[:, None]))

        # The places whose token came after what now are the last tokens.
        same = (place < history.size[:, None]) & (place + 1 >= ngram[:, None])
        same &= (ngram > 0)[:, None] & (history.size + 1 >= ngram)[:, None]
        same = lax.fori_loop(1, jnp.max(ngram), compare, same)
        return _without(logits, history.tokens, same, first)

    return lax.cond(jnp.any(ngram > 0), ban, lambda x: x, logits)


def with_word_values(
    logits: Float[Array, "R V"],
    history: History,
    words: Int32[Array, "R W L"],
    values: Float[Array, "R W"],
    first: Array | int = 0,
) -> Array:
    """The logits with each value added to that of a token that would complete its sequence, of two
    tokens or more; minus infinity bans it. `first`: the token of the first logit."""
    if not words.shape[1]:
        return logits
    end = jnp.sum(words >= 0, axis=2, dtype=jnp.int32) - 1

    def before_end(back: int) -> Array:
        """The token so many before the last one of each sequence, -1 where it is shorter."""
        place = jnp.maximum(end - back, 0)[:, :, None]
        token = jnp.take_along_axis(words, place, axis=2)[:, :, 0]
        return jnp.where(end >= back, token, -1)

    begun = end >= 0
    for back in range(1, words.shape[2]):
        token = before_end(back)
        begun &= (token < 0) | (token == history.last(back)[:, None])

    def add(logits: Array) -> Array:
        row, index = _places(logits, before_end(0), begun, first)
        return logits.at[row, index].add(values.astype(logits.dtype), mode="drop")

    return lax.cond(jnp.any(begun), add, lambda x: x, logits)


def _without(
    logits: Array, tokens: Int32[Array, "R N"], banned: Bool[Array, "R N"], first: Array | int
) -> Array:
    """The logits without the banned of each row's tokens."""
    return logits.at[_places(logits, tokens, banned, first)].set(-jnp.inf, mode="drop")


def _places(
    logits: Array, tokens: Int32[Array, "R N"], chosen: Bool[Array, "R N"], first: Array | int
) -> tuple[Array, Array]:
    """The rows and columns of each row's chosen tokens in the logits; the others are outside."""
    index = tokens - first
    index = jnp.where(chosen & (index >= 0), index, logits.shape[1])
    return jax.lax.broadcasted_iota(jnp.int32, index.shape, 0), index
