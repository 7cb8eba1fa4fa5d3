"""Plan: what one forward pass does to the blocks, made once inside jit and used by every layer.

Starts, positions, rotations, visible lengths and the tiles to read follow from the cache's lengths,
the layout and how many new tokens each row brings (design: Hogwild! sections 3.4 and appendix B,
Hydragen section 3).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxshare.arena import LARGE_TILE
from jaxshare.cache import Fault, KVCache
from jaxshare.layout import Layout
from jaxshare.rope import Rope
from jaxshare.sharding import CyclicSharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """One pass over a cache. R rows, N listed blocks of a row, T new tokens of a row, B blocks, P
    rotated pairs.

    A row that brings no token sees nothing and costs nothing; what attention returns for it is
    finite and means nothing, as it does for the padding behind a row's last real token.

    Attributes:
      blocks: int32[R, N], as in the layout.
      count: int32[R], real new tokens of each row; what would overflow the written block is taken
        off.
      positions: int32[R, T] of the new tokens, each in its own row's order.
      starts: int32[R, N], where each listed block begins in its row's order.
      visible: int32[R, N], tokens of each listed block that the row's first new token sees.
      own: bool[R, N], the block the row writes: new token t sees t more of it than the first does.
      phases: int32[B], of the cache.
      before, lengths: int32[B], block lengths before and after this pass's appends.
      offsets, held: int32[B], where in the arenas each block's tokens are after the appends, and
        how many: those that this device keeps.
      seen: int32[R, N, T], how many of those each new token sees, the first ones.
      write_at: int32[R], arena index of each row's first new token, counted over all devices.
      key_cos, key_sin: float32[R, T, P], rotation of new keys to their index in their block.
      query_cos, query_sin: float32[R, N, T, P], rotation of new queries towards each listed block.
      shared: blocks that more rows see than the largest group has, as tiles that all rows read
        together.
      grouped: for each group of the layout, the other blocks that two rows or more see, as tiles
        that those rows read together.
      private: blocks that one row sees, as tiles that it reads alone.
      faults: int32[], `Fault` flags.
      rope, stripes: of the cache (static).
    """

    blocks: Array
    count: Array
    positions: Array
    starts: Array
    visible: Array
    own: Array
    phases: Array
    before: Array
    lengths: Array
    offsets: Array
    held: Array
    seen: Array
    write_at: Array
    key_cos: Array
    key_sin: Array
    query_cos: Array
    query_sin: Array
    shared: "Tiles"
    grouped: tuple["Tiles", ...]
    private: "Tiles"
    faults: Array
    rope: Rope = dataclasses.field(metadata={"static": True})
    stripes: CyclicSharding = dataclasses.field(metadata={"static": True})

    @property
    def read_tokens(self) -> Array:
        """int32[]: cached tokens that this device reads in each layer; a block that several rows
        read together counts once."""
        return sum((tiles.tokens for tiles in (*self.grouped, self.private)), self.shared.tokens)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Work items: pieces of blocks, each read as a window of `size` arena tokens. I items at most,
    Q rows that read an item.

    Where a window would hang over the arena's end it begins earlier, so `first` is not always 0.

    Attributes:
      count: int32[], how many items there are; those behind it are seen by nobody.
      start: int32[I], arena index of each window.
      first: int32[I], the first token of the window that belongs to the item.
      row: int32[I, Q], rows that read the item.
      slot: int32[I, Q], where each of them lists the item's block.
      last: int32[I, Q, T], one behind the last token of the window that each of their new tokens
        sees; 0 where it sees none.
      size: tokens of a window (static).
      at_once: how many items one product should take; it divides I (static).
    """

    count: Array
    start: Array
    first: Array
    row: Array
    slot: Array
    last: Array
    size: int = dataclasses.field(metadata={"static": True})
    at_once: int = dataclasses.field(metadata={"static": True})

    @property
    def tokens(self) -> Array:
        """int32[]: tokens in the items, each item's once."""
        last = jnp.minimum(jnp.max(self.last, axis=(1, 2), initial=0), self.size)
        return jnp.sum(jnp.maximum(last - self.first, 0))


class Tiling(NamedTuple):
    """Tokens of a tile, and tiles of a product."""

    size: int
    at_once: int


def make_plan(
    cache: KVCache,
    layout: Layout,
    count: Array,
    width: int,
    *,
    shared_tiling: Tiling | None = None,
    group_tiling: Tiling | None = None,
    private_tiling: Tiling | None = None,
) -> Plan:
    """Plans a pass of `width` tokens a row. Of a cache that is spread over a mesh it is for the
    device that runs this.

    Args:
      cache: as it stands before the pass.
      layout: what each row sees and writes.
      count: int32[R], real tokens of each row, the rest of `width` being padding on the right.
      width: T.
      shared_tiling, group_tiling, private_tiling: how to cut blocks that all rows, a group and one
        row read; default by the shape.
    """
    rows, slots = layout.blocks.shape
    blocks, listed = layout.blocks, layout.blocks >= 0
    block = jnp.clip(blocks, 0, cache.num_blocks - 1)
    written = layout.written
    target = jnp.clip(written, 0, cache.num_blocks - 1)

    wanted = jnp.where(written >= 0, jnp.clip(count, 0, width), 0)
    room = jnp.maximum(cache.capacities[target] - cache.lengths[target], 0)
    count = jnp.minimum(wanted, room)
    lengths = cache.lengths.at[target].add(count)

    # A row that brings nothing sees nothing, so finished rows cost no attention.
    sees = listed & (count > 0)[:, None]
    own = sees & (jnp.arange(slots)[None] == layout.listed[:, None] - 1)
    after = jnp.where(listed, lengths[block], 0)
    starts = jnp.cumsum(after, axis=1) - after
    before = cache.lengths[target]
    own_start = jnp.take_along_axis(starts, jnp.maximum(layout.listed - 1, 0)[:, None], axis=1)[
        :, 0
    ]
    step = jnp.arange(width)
    positions = (own_start + before)[:, None] + step
    visible = jnp.where(sees, jnp.where(own, before[:, None] + 1, after), 0)

    key_cos, key_sin = cache.rope.cos_sin((cache.phases[target] + before)[:, None] + step)
    turn = positions[:, None] - starts[:, :, None] + cache.phases[block][:, :, None]
    query_cos, query_sin = cache.rope.cos_sin(turn)

    fan_in = (
        jnp.zeros(cache.num_blocks, jnp.int32).at[block].add((sees & (after > 0)).astype(jnp.int32))
    )
    # [R, N, T]; padding sees no further
    seen = jnp.minimum(visible[..., None] + jnp.where(own[..., None], step, 0), after[..., None])
    # From here on a block is what this device keeps of it: a run, in order.
    stripes = cache.stripes
    offsets = stripes.held(cache.offsets)
    held = stripes.held(cache.offsets + lengths) - offsets
    seen = stripes.held(cache.offsets[block][..., None] + seen) - offsets[block][..., None]
    arena = cache.keys[0].shape[1]

    largest = layout.groups[-1] if layout.groups else 1
    size, at_once = shared_tiling or _shared_tiling(rows * width, arena)
    size = min(size, arena)
    run, at, items = _cut(jnp.where(fan_in > largest, held, 0), size, at_once, arena)
    match = blocks == run[:, None, None]  # [I, R, N]
    slot = jnp.argmax(match, axis=2)
    row = jnp.broadcast_to(jnp.arange(rows), slot.shape)
    reads = jnp.any(match, axis=2)[..., None] & (jnp.arange(run.shape[0]) < items)[:, None, None]
    shared = _tiles(
        items,
        offsets[run],
        at,
        row,
        slot,
        jnp.where(reads, seen[row, slot], 0),
        size,
        at_once,
        arena,
    )

    grouped = []
    for smaller, group in zip((1, *layout.groups), layout.groups, strict=False):
        size, at_once = group_tiling or _GROUP_TILING
        size = min(size, arena)
        run, at, items = _cut(
            jnp.where((fan_in > smaller) & (fan_in <= group), held, 0), size, at_once, arena
        )
        # [I, group]
        row, slot = (x[run] for x in _readers(block, sees & (after > 0), cache.num_blocks, group))
        reads = (jnp.arange(group) < fan_in[run][:, None])[..., None] & (
            jnp.arange(run.shape[0]) < items
        )[:, None, None]
        grouped.append(
            _tiles(
                items,
                offsets[run],
                at,
                row,
                slot,
                jnp.where(reads, seen[row, slot], 0),
                size,
                at_once,
                arena,
            )
        )

    size, at_once = private_tiling or _private_tiling(width, rows)
    size = min(size, arena)
    length = jnp.where(sees & (fan_in[block] == 1), held[block], 0)
    run, at, items = _cut(length.reshape(-1), size, at_once, arena)
    row, slot = run[:, None] // slots, run[:, None] % slots
    reads = (jnp.arange(run.shape[0]) < items)[:, None, None]
    private = _tiles(
        items,
        offsets[block[row[:, 0], slot[:, 0]]],
        at,
        row,
        slot,
        jnp.where(reads, seen[row, slot], 0),
        size,
        at_once,
        arena,
    )

    return Plan(
        blocks=blocks,
        count=count,
        positions=positions,
        starts=starts,
        visible=visible,
        own=own,
        phases=cache.phases,
        before=cache.lengths,
        lengths=lengths,
        offsets=offsets,
        held=held,
        seen=seen,
        write_at=cache.offsets[target] + before,
        key_cos=key_cos,
        key_sin=key_sin,
        query_cos=query_cos,
        query_sin=query_sin,
        shared=shared,
        grouped=tuple(grouped),
        private=private,
        faults=_faults(cache, blocks, written, wanted, count, rows),
        rope=cache.rope,
        stripes=stripes,
    )


def _shared_tiling(queries: int, arena: int) -> Tiling:
    """Few queries: several tiles in one batched product, large ones, read as they lie, where they
    fill the arena. Many: one large tile, whose product is big enough alone."""
    if queries > 8:
        return Tiling(LARGE_TILE, 1)
    return (
        Tiling(LARGE_TILE, 2)
        if arena >= 4 * LARGE_TILE and arena % LARGE_TILE == 0
        else Tiling(128, 4)
    )


def _private_tiling(queries: int, rows: int) -> Tiling:
    """The more queries a row brings, the larger its tiles, and the fewer of them in one product.
    Many rows take fewer turns with more."""
    return (
        Tiling(128, 4 if rows < 256 else 16)
        if queries <= 8
        else Tiling(256, 2)
        if queries <= 32
        else Tiling(LARGE_TILE, 1)
    )


_GROUP_TILING = Tiling(128, 4)
"""Blocks that a group reads are often short."""


def _readers(block: Array, sees: Array, num_blocks: int, most: int) -> tuple[Array, Array]:
    """The first `most` rows that see each block, and where they list it: int32[B, most] both, 0
    behind the last. block, sees [R, N]."""
    rows, slots = block.shape
    row = jnp.broadcast_to(jnp.arange(rows)[:, None], block.shape)
    listed = (
        jnp.full((num_blocks, rows), -1)
        .at[jnp.where(sees, block, num_blocks), row]
        .set(jnp.broadcast_to(jnp.arange(slots), block.shape), mode="drop")
    )
    place = jnp.where(listed >= 0, jnp.cumsum(listed >= 0, axis=1) - 1, most)
    at = jnp.arange(num_blocks)[:, None]
    empty = jnp.zeros((num_blocks, most), jnp.int32)
    return (
        empty.at[at, place].set(jnp.broadcast_to(jnp.arange(rows), listed.shape), mode="drop"),
        empty.at[at, place].set(listed, mode="drop"),
    )


def _cut(lengths: Array, size: int, at_once: int, arena: int) -> tuple[Array, Array, Array]:
    """Cuts runs of `lengths` tokens into tiles: each tile's run and first token in it, int32[I],
    and how many there are."""
    ends = jnp.cumsum(-(-lengths // size))
    most = arena // size + lengths.shape[0]
    item = jnp.arange(-(-most // at_once) * at_once)
    run = jnp.searchsorted(ends, item, side="right", method="sort").astype(jnp.int32)
    run = jnp.minimum(run, lengths.shape[0] - 1)
    return run, (item - jnp.where(run > 0, ends[run - 1], 0)) * size, ends[-1]


def _tiles(
    count: Array,
    offset: Array,
    at: Array,
    row: Array,
    slot: Array,
    seen: Array,
    size: int,
    at_once: int,
    arena: int,
) -> Tiles:
    """Windows over the tokens `at` and on of blocks at `offset`; seen [I, Q, T] counts from the
    block's begin."""
    start = jnp.clip(offset + at, 0, arena - size)
    return Tiles(
        count,
        start,
        first=offset + at - start,
        row=row,
        slot=slot,
        last=jnp.where(seen > 0, jnp.maximum(seen - (start - offset)[:, None, None], 0), 0),
        size=size,
        at_once=at_once,
    )


def _faults(
    cache: KVCache, blocks: Array, written: Array, wanted: Array, count: Array, rows: int
) -> Array:
    width = blocks.shape[1]
    pairs = (blocks[:, :, None] == blocks[:, None, :]) & (blocks >= 0)[:, :, None]
    writers = (written[:, None] == written[None, :]) & (written >= 0)[:, None]
    found = {
        Fault.OVERFLOW: jnp.any(wanted > count),
        Fault.UNKNOWN_BLOCK: jnp.any(blocks >= cache.num_blocks),
        Fault.REPEATED_BLOCK: jnp.any(pairs & ~jnp.eye(width, dtype=bool)),
        Fault.TWO_WRITERS: jnp.any(writers & ~jnp.eye(rows, dtype=bool)),
    }
    return sum(
        (jnp.where(there, fault.value, 0) for fault, there in found.items()),
        jnp.zeros((), jnp.int32),
    )
