"""The arenas that hold the keys and values of all blocks, [K, tokens, D] each: their sizes, the
extents of blocks in them, and how tokens are written, copied, read and put back."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int, Int32, Integer

from jaxshare import sharding
from jaxshare.quantised_cache import Arena, as_stored, rotated_further
from jaxshare.rope import rotate
from jaxshare.sharding import CyclicSharding

Arenas = tuple[tuple[Arena, ...], tuple[Arena, ...]]
"""Keys [K, tokens, D] and values [K, tokens, _] of all layers."""

Windows = tuple[tuple[Arena, ...], tuple[Arena, ...]]
"""Keys [K, N, D] and values [K, N, _] of N tokens in all layers."""

Angles = tuple[tuple[Float32[Array, " _"], Float32[Array, " _"]], ...]
"""cos and sin by which the pairs of each layer's keys are rotated."""


@runtime_checkable
class Appends(Protocol):
    """The part of a pass's plan about appends to blocks; `jaxshare.attention.Plan` documents each
    array."""

    @property
    def count(self) -> Int32[Array, " R"]: ...
    @property
    def write_at(self) -> Int32[Array, " R"]: ...
    @property
    def write_to(self) -> Int32[Array, "R T"]: ...
    @property
    def key_cos(self) -> Float32[Array, "R T P"]: ...
    @property
    def key_sin(self) -> Float32[Array, "R T P"]: ...
    @property
    def lengths(self) -> Int32[Array, " B"]: ...
    @property
    def faults(self) -> Int32[Array, ""]: ...
    @property
    def token_sharding(self) -> CyclicSharding: ...


ALIGNMENT = 128
"""Tokens of a tile."""


LARGE_TILE = 512
"""Tokens of a large tile. Long arenas are a whole number of large tiles, which are read where few
rows share long blocks."""


ARENA = ("kv_heads", "tokens", None)
"""The names of an arena's dimensions, for a mesh."""


_COPY_TILE = 128


_UNROLLED_ROWS = 8


def alignment(capacity: int) -> int:
    """The alignment of a block's offset. Blocks of a tile or more start on a tile, so that backends
    can read the arena without gathering; smaller ones are packed, so that many small blocks take
    little."""
    return ALIGNMENT if capacity >= ALIGNMENT else 1


def arena_size(tokens: int) -> int:
    """The size of an arena that holds this many tokens: a whole number of tiles, of large tiles if
    it is long."""
    tile = LARGE_TILE if tokens >= 4 * LARGE_TILE else ALIGNMENT if tokens >= ALIGNMENT else 1
    return max(1, tokens + -tokens % tile)


def extents(capacities: Int[np.ndarray, " B"]) -> tuple[Int[np.ndarray, " B"], int]:
    """The offsets of blocks that are laid out side by side, and the size of an arena for them."""
    offsets, end = np.zeros_like(capacities), 0
    for b, capacity in enumerate(capacities):
        end += -end % alignment(capacity)
        offsets[b] = end
        end += capacity
    return offsets, arena_size(int(end))


def check_capacities(capacities: Any) -> Int[np.ndarray, " B"]:
    """The capacities of new blocks as an array; raises ValueError for anything but numbers of at
    least 0, one or more."""
    sizes = np.asarray(capacities, np.int64)
    if sizes.ndim != 1 or not sizes.size:
        raise ValueError(
            f"capacities must list the size of at least one block, in tokens; got {capacities!r}"
        )
    if (sizes < 0).any():
        first = int(np.argmax(sizes < 0))
        raise ValueError(
            f"the capacity of block {first} is {int(sizes[first])}; it must be at least 0"
        )
    return sizes


def check_extents(
    blocks: Sequence[int],
    offsets: Sequence[int],
    capacities: Sequence[int],
    *,
    num_blocks: int,
    arena: int,
) -> None:
    """Raises ValueError unless each block is named once and its new extent is inside the arena.

    Args:
      blocks: the blocks that get new extents.
      offsets, capacities: the new extent of each, in tokens.
      num_blocks: blocks of the cache.
      arena: tokens of the arena.
    """
    if not len(blocks) == len(offsets) == len(capacities):
        raise ValueError(
            f"{len(blocks)} blocks, {len(offsets)} offsets and {len(capacities)} capacities "
            "are given; give one of each a block"
        )
    if len(set(blocks)) < len(blocks):
        raise ValueError(f"blocks must name each block once; got {list(blocks)}")
    for i, block in enumerate(blocks):
        check_block(f"blocks[{i}]", block, num_blocks)
    for block, offset, capacity in zip(blocks, offsets, capacities, strict=True):
        if offset < 0 or capacity < 0 or offset + capacity > arena:
            raise ValueError(
                f"block {block} would take tokens {offset} to {offset + capacity}, but the arena "
                f"has {arena} tokens"
            )


def check_block(name: str, block: int, num_blocks: int) -> None:
    """Raises ValueError for a block that the cache does not have; `name` is what named it."""
    if not 0 <= block < num_blocks:
        raise ValueError(f"{name} is {block}, but the cache has blocks 0 to {num_blocks - 1}")


def check_disjoint(offsets: Int[np.ndarray, " B"], capacities: Int[np.ndarray, " B"]) -> None:
    """Raises ValueError where two of the blocks' extents overlap."""
    order = np.argsort(offsets, kind="stable")
    order = order[capacities[order] > 0]
    ends = offsets[order] + capacities[order]
    if (over := np.flatnonzero(offsets[order][1:] < ends[:-1])).size:
        low, high = order[over[0]], order[over[0] + 1]
        raise ValueError(
            f"blocks {low} and {high} would overlap, at {offsets[low]} to "
            f"{offsets[low] + capacities[low]} and from {offsets[high]}"
        )


def copy_order(
    blocks: Sequence[int],
    old: Int[np.ndarray, " B"],
    new: Int[np.ndarray, " B"],
    lengths: Int[np.ndarray, " B"],
) -> list[int]:
    """The order in which blocks are copied from old to new offsets, such that none overwrites
    tokens of one that is not copied yet.

    Args:
      blocks: those that may be copied; one whose offset does not change, or that is empty, is not.
      old, new: the offset of every block before and after.
      lengths: tokens of every block.

    Raises:
      ValueError: there is no such order.
    """
    left = [block for block in blocks if new[block] != old[block] and lengths[block]]
    order = []
    while left:
        free = [
            b
            for b in left
            if all(
                new[b] + lengths[b] <= old[o] or old[o] + lengths[o] <= new[b]
                for o in left
                if o != b
            )
        ]
        if not free:
            raise ValueError(
                f"blocks {left} would overwrite each other, whichever is moved first; relocate "
                "them in several calls"
            )
        order.append(free[0])
        left.remove(free[0])
    return order


def append_tokens(
    keys: Arena,
    values: Arena,
    k: Float[Array, "R T K D"],
    v: Float[Array, "R T K _"],
    plan: Appends,
) -> tuple[Arena, Arena]:
    """One layer's arenas with new keys and values, the keys rotated; see `KVCache.append`."""
    k = rotate(k, plan.key_cos[:, :, None], plan.key_sin[:, :, None])
    return write_tokens(keys, k, plan), write_tokens(values, v, plan)


def write_tokens(arena: Arena, new: Float[Array, "R T K D"], plan: Appends) -> Arena:
    """The arena with each row's real new tokens written where the plan puts them."""

    def written(arena: Array, new: Array) -> Array:
        # On a GPU one kernel places all rows at once; on a CPU XLA's scatter goes element by
        # element, and windows are copied faster.
        return jax.lax.platform_dependent(
            arena,
            new,
            cuda=functools.partial(_scatter, plan),
            default=functools.partial(_write_windows, plan),
        )

    # Backends read whole tiles and give what a row does not see a weight of 0; 0 times what is not
    # finite would reach that row.
    return jax.tree.map(written, arena, as_stored(new, arena))


def _scatter(plan: Appends, arena: Array, new: Array) -> Array:
    rows, width, kv_heads, dim = new.shape
    return arena.at[:, plan.write_to.reshape(-1)].set(
        new.transpose(2, 0, 1, 3).reshape(kv_heads, rows * width, dim),
        mode="drop",
        unique_indices=True,
        wrap_negative_indices=False,
    )


def _write_windows(plan: Appends, arena: Array, new: Array) -> Array:
    sharded, write_at = plan.token_sharding, plan.write_at
    new = new.swapaxes(1, 2)  # [R, K, T, D]
    width = min(new.shape[2], arena.shape[1])

    def write_row(r, arena: Array) -> Array:
        # A window of static size is read, the real tokens laid over it and the window written back.
        # Where it would extend past the arena's end it is shifted left, and the tokens in it right.
        start = jnp.minimum(sharded.local_count(write_at[r]), arena.shape[1] - width)
        token = sharded.global_index(start + jnp.arange(width)) - write_at[r]
        window = _window(arena, start, width)
        shifted = (
            new[r]
            if new.shape[2] == 1
            else jnp.take(new[r], jnp.clip(token, 0, new.shape[2] - 1), axis=1)
        )
        window = jnp.where(((token >= 0) & (token < plan.count[r]))[:, None], shifted, window)
        return _with_window(arena, start, window)

    if new.shape[0] <= _UNROLLED_ROWS:
        # The barrier keeps what made the new tokens out of each row's kernel, where it would be
        # compiled again.
        new = jax.lax.optimization_barrier(new)
        for r in range(new.shape[0]):
            arena = write_row(r, arena)
        return arena
    return jax.lax.fori_loop(0, new.shape[0], write_row, arena)


def _window(arena: Array, start: Array, size: int) -> Array:
    """The `size` tokens from `start` on, which is not negative."""
    sizes = arena.shape[0], size, arena.shape[2]
    return jax.lax.dynamic_slice(arena, (0, start, 0), sizes, allow_negative_indices=False)


def _with_window(arena: Array, start: Array, window: Array) -> Array:
    """The arena with other tokens from `start` on, which is not negative."""
    at = (0, start, 0)
    return jax.lax.dynamic_update_slice(arena, window, at, allow_negative_indices=False)


def copy_tokens(
    arenas: Arenas,
    source: Int32[Array, ""],
    target: Int32[Array, ""],
    count: Int32[Array, ""],
    angles: Angles,
) -> Arenas:
    """Copies `count` tokens from `source` to `target`, which may overlap, keys rotated further by
    one angle per pair."""
    tokens = arenas[0][0].shape[1]
    tile = min(_COPY_TILE, tokens)

    def copy_tile(done: Array, arenas: Arenas) -> Arenas:
        left = jnp.minimum(count - done, tile)
        read, write = (jnp.minimum(start + done, tokens - tile) for start in (source, target))
        # Window index i of the target holds token i - (target + done - write) of this tile.
        token = jnp.arange(tile) - (target + done - write)
        real = ((token >= 0) & (token < left))[:, None]
        pick = jnp.clip(token + (source + done - read), 0, tile - 1)

        def taken(arena: Array) -> Array:
            found = _window(arena, read, tile).at[:, pick]
            return found.get(mode="promise_in_bounds", wrap_negative_indices=False)

        def written(arena: Array, piece: Array) -> Array:
            new = jnp.where(real, piece, _window(arena, write, tile))
            return _with_window(arena, write, new)

        def copied(arena: Arena, angle: tuple[Array, Array] | None = None) -> Arena:
            piece = jax.tree.map(taken, arena)
            piece = piece if angle is None else rotated_further(piece, *angle)
            return jax.tree.map(written, arena, piece)

        return tuple(map(copied, arenas[0], angles)), tuple(map(copied, arenas[1]))

    return _by_tiles(copy_tile, arenas, source, target, count, tile)


def copy_tokens_over(
    sharded: CyclicSharding,
    arenas: Arenas,
    source: Int32[Array, ""],
    target: Int32[Array, ""],
    count: Int32[Array, ""],
    angles: Angles,
) -> Arenas:
    """Copies as `copy_tokens` does, where tokens are spread over devices: every device reads what
    any of them keeps, and writes what it is to keep."""

    def copy_tile(done: Array, arenas: Arenas) -> Arenas:
        token = done + jnp.arange(_COPY_TILE)
        # Indices after the last token are -1: neither read nor written.
        keys, values = take(sharded, arenas, jnp.where(token < count, source + token, -1))
        new = tuple(rotated_further(k, *a) for k, a in zip(keys, angles, strict=True)), values
        return put(sharded, arenas, jnp.where(token < count, target + token, -1), new)

    return _by_tiles(copy_tile, arenas, source, target, count, _COPY_TILE)


def _by_tiles(
    copy_tile: Callable[[Array, Arenas], Arenas],
    arenas: Arenas,
    source: Array,
    target: Array,
    count: Array,
    tile: int,
) -> Arenas:
    """Copies tile by tile, the last one first where the target comes after the source: tokens are
    read before they are overwritten."""
    tiles = -(-count // tile)

    def step(state: tuple[Array, Arenas]) -> tuple[Array, Arenas]:
        number, arenas = state
        return number + 1, copy_tile(
            jnp.where(target > source, tiles - 1 - number, number) * tile, arenas
        )

    return jax.lax.while_loop(
        lambda state: state[0] < tiles, step, (jnp.zeros((), jnp.int32), arenas)
    )[1]


def take(sharded: CyclicSharding, arenas: Arenas, index: Integer[Array, " N"]) -> Windows:
    """The tokens at these indices of the arenas, on every device that runs this; 0 where the index
    is negative.

    Args:
      sharded: of the cache.
      arenas: one device's keys and values.
      index: in the whole arenas, over all devices.
    """
    here = (sharded.is_local(index) & (index >= 0))[:, None]
    local = jnp.where(here[:, 0], sharded.local_count(index), 0)

    def taken(arena: Array) -> Array:
        found = jnp.where(here, arena[:, local], 0)
        if arena.dtype.itemsize > 1:
            return sharding.psum(found, sharded.axis)
        # Not all devices add numbers of eight bits, but all add those of an integer dtype.
        bits = jax.lax.bitcast_convert_type(found, jnp.uint8)
        return jax.lax.bitcast_convert_type(sharding.psum(bits, sharded.axis), arena.dtype)

    return jax.tree.map(taken, arenas)


def put(
    sharded: CyclicSharding, arenas: Arenas, index: Integer[Array, " N"], new: Windows
) -> Arenas:
    """The arenas with `new` at these indices, each given once; nothing is written where the index
    is negative. Arguments as in `take`."""
    local = jnp.where(
        sharded.is_local(index) & (index >= 0), sharded.local_count(index), arenas[0][0].shape[1]
    )
    return jax.tree.map(
        lambda arena, piece: arena.at[:, local].set(piece, mode="drop"), arenas, new
    )
