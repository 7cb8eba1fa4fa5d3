"""Guesses: what a call that has left an earlier answer may say next, and the pass that finds out
how much of it is right.

Answers to the same prompt part at a token and often go on alike. So where the Logits Cache ends,
the earlier answer is guessed on, and one pass over all guessed tokens gives the distribution at
each of them. Each is drawn from with the call's own seed and position: what comes out is what one
pass a token would have drawn, as far as the guesses are right, and one token more (as in
speculative decoding, with the cache in the place of a draft model, and exact for each seed).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare import KVCache, Layout, Samplers
from jaxshare.decoding.state import DecodeModel
from jaxshare.decoding.top_logits import TopLogits, compress_logits

SHAPES = ((1, 16), (4, 16))
"""(rows, tokens of a row) of a pass over guesses."""
_ALIKE = 3
"""So many tokens in a row that an earlier answer has, too, say where in it a call is."""
_MOST_MISSES = 6
"""So many passes more that found nothing than found much, and a call guesses no more."""


class DraftLookup:
    """What an earlier answer says of what may come in a call that has parted from it.

    Args:
      answer: the earlier answer's tokens.
    """

    def __init__(self, answer: np.ndarray):
        self._answer = answer.tolist()
        self._places: dict[tuple[int, ...], list[int]] = {}
        for end in range(_ALIKE, len(self._answer)):
            self._places.setdefault(tuple(self._answer[end - _ALIKE : end]), []).append(end)
        self._misses = 0
        self._parted = False

    def next(self, said: Sequence[int], most: int) -> list[int]:
        """At most so many tokens that may follow what was said."""
        if self._misses >= _MOST_MISSES or most < 1:
            return []
        places = self._places.get(tuple(said[-_ALIKE:]))
        if places:
            place = min(places, key=lambda place: abs(place - len(said)))
        elif not self._parted:
            place = len(said)  # one token may have taken another's place
        else:
            return []
        self._parted = True
        return self._answer[place : place + most]

    def back(self, said: Sequence[int]) -> bool:
        """Whether what was said last is what the earlier answer has somewhere."""
        return self._misses < _MOST_MISSES and tuple(said[-_ALIKE:]) in self._places

    def told(self, right: int, guessed: int) -> None:
        """How many of the tokens that were guessed are right."""
        self._misses = max(0, self._misses + (1 if 4 * right < guessed else -1))


@functools.partial(jax.jit, static_argnames=("model", "kept"), donate_argnames="cache")
def verify(
    model: DecodeModel,
    params: Any,
    cache: KVCache,
    layout: Layout,
    tokens: Array,
    count: Array,
    samplers: Samplers,
    seeds: Array,
    positions: Array,
    kept: int,
) -> tuple[KVCache, Array, Array, TopLogits | None]:
    """One pass over R rows of T tokens, and a draw after each of them.

    Args:
      cache: donated.
      tokens: int32[R, T]; count: int32[R], how many of them are real.
      samplers: of the rows; seeds: uint32[R, 2]; positions: int32[R], of the draw after each row's
        first token.
      kept: how many of the largest logits to keep of each distribution; 0 for nothing.

    Returns:
      The cache, int32[R, T] drawn, bool[R] whether all of the row's logits are finite, and what is
        kept, [R, T].
    """
    logits, cache = model.apply(params, tokens, count, cache, layout, every=True)
    rows, width, vocab = logits.shape
    flat = logits.reshape(rows * width, vocab)
    each = jax.tree.map(lambda of_row: jnp.repeat(of_row, width, axis=0), samplers)
    drawn = each.sample(
        flat,
        jnp.repeat(seeds, width, axis=0),
        (positions[:, None] + jnp.arange(width)).reshape(-1),
        mesh=cache.mesh,
    ).reshape(rows, width)
    real = jnp.arange(width) < count[:, None]
    finite = jnp.all(jnp.isfinite(jnp.max(logits, axis=-1)) | ~real, axis=1)
    found = compress_logits(flat, each.temperature, kept) if kept else None
    return (
        cache,
        drawn,
        finite,
        jax.tree.map(lambda array: array.reshape(rows, width, *array.shape[1:]), found),
    )
