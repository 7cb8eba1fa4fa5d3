"""Passes that feed several tokens of a row, whose texts are cut into pieces.

Rows with few tokens then need few places, beside rows with many.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxshare.cache import KVCache
from jaxshare.decoding.state import DecodeModel, DecodeState
from jaxshare.layout import Layout

PIECE = 4
"""Tokens of a piece."""


def num_pieces(rows: int, width: int) -> int:
    """The pieces that rows with up to `width` tokens each can take in a pass."""
    return rows * -(-width // PIECE)


def count_pieces(count: Array) -> Array:
    """The pieces that so many tokens of a row are cut into."""
    return -(-count // PIECE)


def feed_in_pieces(
    model: DecodeModel, params: Any, state: DecodeState, tokens: Array, count: Array, pieces: int
) -> tuple[Array, KVCache]:
    """The logits and the cache after int32[R] `count` of the int32[R, W] tokens, fed in pieces."""
    num_rows, width = tokens.shape
    taken = count_pieces(count)
    ends = jnp.cumsum(taken)
    place = jnp.arange(pieces)
    # The row of each piece; the places after the last are rows not in use.
    row = jnp.searchsorted(ends, place, side="right", method="compare_all")
    part = functools.partial(jnp.take, indices=row, axis=0, mode="fill")
    number = place - part(ends - taken, fill_value=0)
    ahead = number * PIECE
    size = jnp.clip(part(count, fill_value=0) - ahead, 0, PIECE)
    cut = jnp.pad(tokens, ((0, 0), (0, -width % PIECE))).reshape(num_rows, -1, PIECE)
    # A session's row that opens a step brings several pieces, which read what its other rows do.
    groups = tuple(2 * group for group in state.layout.groups if 2 * group < pieces)
    layout, adapters = state.layout, state.layout.adapters
    adapters = None if adapters is None else part(jnp.asarray(adapters), fill_value=0)
    new, cache = model.apply(
        params,
        cut.at[row, number].get(mode="fill", fill_value=0),
        size,
        state.cache,
        Layout(part(layout.blocks, fill_value=-1), groups, ahead=ahead, adapters=adapters),
    )
    # A row's logits are those of its last piece, and no numbers where those of any piece are none.
    last = jnp.where(place + 1 == part(ends, fill_value=-1), row, num_rows)
    failed = jnp.where(jnp.isnan(new).any(axis=1), row, num_rows)
    logits = state.logits.at[last].set(new, mode="drop")
    return logits.at[failed].set(jnp.nan, mode="drop"), cache
