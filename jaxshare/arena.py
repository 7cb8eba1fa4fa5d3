"""The arenas that hold the keys and values of all blocks, [K, tokens, D] each: their sizes, and how
tokens are written, copied, read and put back."""

import functools
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare import sharding
from jaxshare.rope import rotate
from jaxshare.sharding import CyclicSharding

Arenas = tuple[tuple[Array, ...], tuple[Array, ...]]
"""Keys and values of all layers, [K, tokens, D] each."""


class Appends(Protocol):
    """The part of a pass's plan that says what is appended to blocks; `jaxshare.attention.Plan`
    documents each array."""

    @property
    def count(self) -> Array: ...
    @property
    def write_at(self) -> Array: ...
    @property
    def key_cos(self) -> Array: ...
    @property
    def key_sin(self) -> Array: ...
    @property
    def lengths(self) -> Array: ...
    @property
    def faults(self) -> Array: ...
    @property
    def stripes(self) -> CyclicSharding: ...


ALIGNMENT = 128
"""Tokens of a tile."""


LARGE_TILE = 512
"""Tokens of a large tile: long arenas are whole numbers of them, and are read so where few rows
share long blocks."""


ARENA = ("kv_heads", "tokens", None)
"""What the dimensions of an arena are called, for a mesh."""


_MOVE_TILE = 128


_UNROLLED_ROWS = 8


def alignment(capacity: int) -> int:
    """Of a block's offset. Blocks of a tile or more begin on a tile, so that backends can read the
    arena as it lies; smaller ones are packed, so that many small blocks stay small."""
    return ALIGNMENT if capacity >= ALIGNMENT else 1


def arena_size(tokens: int) -> int:
    """The size of an arena that holds so many: it ends with a tile, and with a large one if it is
    long."""
    tile = LARGE_TILE if tokens >= 4 * LARGE_TILE else ALIGNMENT if tokens >= ALIGNMENT else 1
    return max(1, tokens + -tokens % tile)


def extents(capacities: np.ndarray) -> tuple[np.ndarray, int]:
    """Offsets of blocks that lie side by side, and the size of an arena for them."""
    offsets, end = np.zeros_like(capacities), 0
    for b, capacity in enumerate(capacities):
        end += -end % alignment(capacity)
        offsets[b] = end
        end += capacity
    return offsets, arena_size(int(end))


def write_tokens(arena: Array, new: Array, plan: Appends) -> Array:
    """arena [K, tokens, D], new [R, T, K, D]: each row's real tokens to their place; all else
    stays."""
    # Backends read whole tiles and give what a row does not see a weight of 0; 0 times what is not
    # finite would reach that row.
    new = finite(new.astype(arena.dtype)).swapaxes(1, 2)  # [R, K, T, D]
    # On a GPU one kernel places all rows at once; on a CPU XLA's scatter goes element by element,
    # and windows are copied faster.
    return jax.lax.platform_dependent(
        arena,
        new,
        plan.write_at,
        plan.count,
        cuda=functools.partial(_scatter, plan.stripes),
        default=functools.partial(_write_windows, plan.stripes),
    )


def finite(x: Array) -> Array:
    """What is not finite as 0, or as the largest number of the dtype."""
    most = float(jnp.finfo(x.dtype).max)
    return jnp.nan_to_num(x, nan=0.0, posinf=most, neginf=-most)


def _scatter(
    stripes: CyclicSharding, arena: Array, new: Array, write_at: Array, count: Array
) -> Array:
    rows, kv_heads, width, dim = new.shape
    step = jnp.arange(width)
    index = write_at[:, None] + step
    to = jnp.where(
        (step < count[:, None]) & stripes.mine(index), stripes.held(index), arena.shape[1]
    ).reshape(-1)
    return arena.at[:, to].set(
        new.swapaxes(0, 1).reshape(kv_heads, rows * width, dim), mode="drop", unique_indices=True
    )


def _write_windows(
    stripes: CyclicSharding, arena: Array, new: Array, write_at: Array, count: Array
) -> Array:
    width = min(new.shape[2], arena.shape[1])

    def write_row(r, arena: Array) -> Array:
        # A window of static size is read, the real tokens laid over it and the window written back.
        # Where it would hang over the arena's end it is shifted left, and the tokens in it right.
        start = jnp.minimum(stripes.held(write_at[r]), arena.shape[1] - width)
        token = stripes.index(start + jnp.arange(width)) - write_at[r]
        window = jax.lax.dynamic_slice_in_dim(arena, start, width, axis=1)
        shifted = (
            new[r]
            if new.shape[2] == 1
            else jnp.take(new[r], jnp.clip(token, 0, new.shape[2] - 1), axis=1)
        )
        window = jnp.where(((token >= 0) & (token < count[r]))[:, None], shifted, window)
        return jax.lax.dynamic_update_slice_in_dim(arena, window, start, axis=1)

    if new.shape[0] <= _UNROLLED_ROWS:
        for r in range(new.shape[0]):
            arena = write_row(r, arena)
        return arena
    return jax.lax.fori_loop(0, new.shape[0], write_row, arena)


def copy_tokens(
    arenas: Arenas, source: Array, target: Array, count: Array, cos: Array, sin: Array
) -> Arenas:
    """Copies `count` tokens from `source` to `target`, which may overlap, keys rotated further by
    one angle a pair."""
    tokens = arenas[0][0].shape[1]
    tile = min(_MOVE_TILE, tokens)

    def copy_tile(done: Array, arenas: Arenas) -> Arenas:
        left = jnp.minimum(count - done, tile)
        read, write = (jnp.minimum(at + done, tokens - tile) for at in (source, target))
        # Window index i of the target holds token i - (target + done - write) of this tile.
        token = jnp.arange(tile) - (target + done - write)
        real = ((token >= 0) & (token < left))[:, None]
        pick = jnp.clip(token + (source + done - read), 0, tile - 1)

        def copied(arena: Array, turn: bool) -> Array:
            piece = jnp.take(jax.lax.dynamic_slice_in_dim(arena, read, tile, axis=1), pick, axis=1)
            piece = rotate(piece, cos, sin) if turn else piece
            window = jax.lax.dynamic_slice_in_dim(arena, write, tile, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(
                arena, jnp.where(real, piece, window), write, axis=1
            )

        return tuple(copied(k, True) for k in arenas[0]), tuple(copied(v, False) for v in arenas[1])

    return _by_tiles(copy_tile, arenas, source, target, count, tile)


def copy_tokens_over(
    stripes: CyclicSharding,
    arenas: Arenas,
    source: Array,
    target: Array,
    count: Array,
    cos: Array,
    sin: Array,
) -> Arenas:
    """`copy_tokens` where tokens are spread over devices: who keeps them tells the others, and who
    is to keep them writes."""

    def copy_tile(done: Array, arenas: Arenas) -> Arenas:
        token = done + jnp.arange(_MOVE_TILE)
        # What lies behind the last token is read and written nowhere.
        keys, values = take(stripes, arenas, jnp.where(token < count, source + token, -1))
        new = tuple(rotate(k, cos, sin) for k in keys), values
        return put(stripes, arenas, jnp.where(token < count, target + token, -1), new)

    return _by_tiles(copy_tile, arenas, source, target, count, _MOVE_TILE)


def _by_tiles(
    copy_tile: Callable[[Array, Arenas], Arenas],
    arenas: Arenas,
    source: Array,
    target: Array,
    count: Array,
    tile: int,
) -> Arenas:
    """Copies tile by tile, from the end where the target lies behind the source: tokens are read
    before they are overwritten."""
    tiles = -(-count // tile)

    def step(state: tuple[Array, Arenas]) -> tuple[Array, Arenas]:
        number, arenas = state
        return number + 1, copy_tile(
            jnp.where(target > source, tiles - 1 - number, number) * tile, arenas
        )

    return jax.lax.while_loop(
        lambda state: state[0] < tiles, step, (jnp.zeros((), jnp.int32), arenas)
    )[1]


def take(stripes: CyclicSharding, arenas: Arenas, index: Array) -> Arenas:
    """The tokens at these places of the arenas, [K, N, D] each, on every device that runs this; 0
    where the index is negative.

    Args:
      stripes: of the cache.
      arenas: one device's keys and values, [K, tokens, D] each.
      index: int32[N].
    """
    here = (stripes.mine(index) & (index >= 0))[:, None]
    place = jnp.where(here[:, 0], stripes.held(index), 0)
    return sharding.psum(
        jax.tree.map(lambda arena: jnp.where(here, arena[:, place], 0), arenas), stripes.axis
    )


def put(stripes: CyclicSharding, arenas: Arenas, index: Array, new: Arenas) -> Arenas:
    """The arenas with `new` at these places, each once, nothing where the index is negative;
    arguments as in `take`."""
    place = jnp.where(
        stripes.mine(index) & (index >= 0), stripes.held(index), arenas[0][0].shape[1]
    )
    return jax.tree.map(
        lambda arena, piece: arena.at[:, place].set(piece, mode="drop"), arenas, new
    )
