"""Tiles: the tokens that attention reads in one pass, cut into windows of the arena.

A block that several rows see is read once for all of them: by all rows together, or by a group of
rows; a block that one row sees is read by that row alone.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Work items: pieces of blocks, each read as a window of `size` arena tokens. I items at most,
    Q rows that read an item, T new tokens of a row.

    A window that would extend past the arena's end starts earlier, so `first` is not always 0.

    Attributes:
      count: the number of items; no row sees the entries after them.
      start: arena index of each window.
      first: the first token of the window that belongs to the item.
      row: rows that read the item.
      slot: where each of them lists the item's block.
      last: exclusive end of the tokens in the window visible to each new token; 0 where it sees
        none.
      begin: the first token in the window visible to each new token; None where that is `first`,
        because attention has no sliding window.
      size: tokens of a window (static).
      at_once: how many items one product should take; it divides I (static).
    """

    count: Int32[Array, ""]
    start: Int32[Array, " I"]
    first: Int32[Array, " I"]
    row: Int32[Array, "I Q"]
    slot: Int32[Array, "I Q"]
    last: Int32[Array, "I Q T"]
    begin: Int32[Array, "I Q T"] | None
    size: int = dataclasses.field(metadata={"static": True})
    at_once: int = dataclasses.field(metadata={"static": True})

    @property
    def tokens(self) -> Int32[Array, ""]:
        """The number of tokens in all items, each item's counted once."""
        last = jnp.minimum(jnp.max(self.last, axis=(1, 2), initial=0), self.size)
        first = self.first
        if self.begin is not None:
            sees = self.begin < self.last
            first = jnp.min(jnp.where(sees, self.begin, self.size), axis=(1, 2), initial=self.size)
        return jnp.sum(jnp.maximum(last - first, 0))


class Tiling(NamedTuple):
    """Tokens of a tile, and tiles of a product."""

    size: int
    at_once: int


class Reads(NamedTuple):
    """The tokens that rows read in a pass, of those that this device keeps. R rows, N listed blocks
    of a row, T new tokens of a row, B blocks.

    Attributes:
      blocks: as in the layout.
      block: the same, clipped to blocks that there are.
      reads: True for listed blocks that the row reads: it brings a token, and they are not empty.
      fan_in: rows that read each block.
      offsets, lengths: where each block's tokens are in the arena, and how many.
      seen: how many of those each new token sees, the first ones.
      unseen: how many of the first ones it does not see, because of a sliding window; None without
        one.
      arena: tokens of the arena.
    """

    blocks: Int32[Array, "R N"]
    block: Int32[Array, "R N"]
    reads: Bool[Array, "R N"]
    fan_in: Int32[Array, " B"]
    offsets: Int32[Array, " B"]
    lengths: Int32[Array, " B"]
    seen: Int32[Array, "R N T"]
    unseen: Int32[Array, "R N T"] | None
    arena: int

    @property
    def begins(self) -> Int32[Array, " B"] | None:
        """The first token of each block that any row sees; None without a sliding window."""
        if self.unseen is None:
            return None
        never = jnp.iinfo(jnp.int32).max
        first = jnp.where(self.reads, self.unseen[..., 0], never)
        begins = jnp.full(self.lengths.shape, never).at[self.block].min(first)
        return jnp.minimum(begins, self.lengths)


def shared_tiles(reads: Reads, largest_group: int, tiling: Tiling | None) -> Tiles:
    """Tiles of the blocks that more rows than `largest_group` read; all rows read them together."""
    rows = reads.seen.shape[0]
    pieces = _cut(
        jnp.where(reads.fan_in > largest_group, reads.lengths, 0),
        tiling or _TILING,
        reads.arena,
        reads.begins,
    )
    match = reads.blocks == pieces.run[:, None, None]  # [I, R, N]
    slot = jnp.argmax(match, axis=2)
    row = jnp.broadcast_to(jnp.arange(rows), slot.shape)
    return _tiles(reads, pieces, reads.offsets[pieces.run], row, slot, jnp.any(match, axis=2))


def group_tiles(reads: Reads, smaller: int, group: int, tiling: Tiling | None) -> Tiles:
    """Tiles of the blocks that more than `smaller` and at most `group` rows read; those rows read
    them together."""
    pieces = _cut(
        jnp.where((reads.fan_in > smaller) & (reads.fan_in <= group), reads.lengths, 0),
        tiling or _group_tiling(group, reads.seen.shape[2]),
        reads.arena,
        reads.begins,
    )
    row, slot = (x[pieces.run] for x in _readers(reads, group))  # [I, group]
    is_reader = jnp.arange(group) < reads.fan_in[pieces.run][:, None]
    return _tiles(reads, pieces, reads.offsets[pieces.run], row, slot, is_reader)


def private_tiles(reads: Reads, tiling: Tiling | None) -> Tiles:
    """Tiles of the blocks that one row reads."""
    rows, slots, width = reads.seen.shape
    alone = reads.reads & (reads.fan_in[reads.block] == 1)
    begins = reads.begins
    pieces = _cut(
        jnp.where(alone, reads.lengths[reads.block], 0).reshape(-1),
        tiling or _private_tiling(width, rows),
        reads.arena,
        None if begins is None else begins[reads.block].reshape(-1),
    )
    row, slot = pieces.run[:, None] // slots, pieces.run[:, None] % slots
    offset = reads.offsets[reads.block[row[:, 0], slot[:, 0]]]
    return _tiles(reads, pieces, offset, row, slot, jnp.ones(row.shape, bool))


_TILING = Tiling(128, 4)
"""Of blocks that all rows read, and of those that one row reads with many queries. Larger tiles
read long blocks no faster, and short ones, of which steps of workers and pieces of prompts have
many, several times as slowly."""
_GROUP_TILE = 64
_MANY_AT_ONCE, _SOME_AT_ONCE, _FEW_AT_ONCE = 32, 16, 8
"""Of blocks that a group reads, or one row with few queries. A product for few queries is small, and
XLA runs a batch of many of them several times as fast as one of few. With more queries of a row
fewer are enough, and so they are where few rows would not fill a batch of many."""
_FEW_QUERIES, _FEW_ROWS = 8, 8
_GROUPED_ROWS = 256
"""Rows, those of all tiles of a batch together, from which on a larger batch is no faster. A large
group reads few tiles, and a batch's empty places cost as much as the others."""


def _group_tiling(group: int, queries: int) -> Tiling:
    if queries > _FEW_QUERIES:
        return Tiling(_GROUP_TILE, _FEW_AT_ONCE)
    at_once = _MANY_AT_ONCE if queries == 1 else _SOME_AT_ONCE
    return Tiling(_GROUP_TILE, max(1, min(at_once, _GROUPED_ROWS // group)))


def _private_tiling(queries: int, rows: int) -> Tiling:
    if queries > _FEW_QUERIES:
        return _TILING
    return Tiling(_GROUP_TILE, _FEW_AT_ONCE if rows < _FEW_ROWS else _MANY_AT_ONCE)


_FEW_COMPARISONS = 2**16
"""Pairs of an item and a run up to which all of them are compared to find each item's run."""


def _readers(reads: Reads, max_readers: int) -> tuple[Array, Array]:
    """The first `max_readers` rows that read each block, and where they list it: int32[B,
    max_readers] both, 0 after the last."""
    rows, slots = reads.block.shape
    num_blocks = reads.fan_in.shape[0]
    row = jnp.broadcast_to(jnp.arange(rows)[:, None], reads.block.shape)
    listed = (
        jnp.full((num_blocks, rows), -1)
        .at[jnp.where(reads.reads, reads.block, num_blocks), row]
        .set(jnp.broadcast_to(jnp.arange(slots), reads.block.shape), mode="drop")
    )
    column = jnp.where(listed >= 0, jnp.cumsum(listed >= 0, axis=1) - 1, max_readers)
    block = jnp.arange(num_blocks)[:, None]
    empty = jnp.zeros((num_blocks, max_readers), jnp.int32)
    return (
        empty.at[block, column].set(jnp.broadcast_to(jnp.arange(rows), listed.shape), mode="drop"),
        empty.at[block, column].set(listed, mode="drop"),
    )


class _Pieces(NamedTuple):
    """Runs of tokens cut into pieces.

    Attributes:
      run: int32[I], the run of each piece.
      first: int32[I], the first token of the piece in its run.
      count: int32[], the number of pieces.
      tiling: the size of a piece, and how many a product takes.
    """

    run: Array
    first: Array
    count: Array
    tiling: Tiling


def _cut(lengths: Array, tiling: Tiling, arena: int, begins: Array | None) -> _Pieces:
    """Cuts runs of int32[number of runs] tokens into pieces of a tile each; of a run that has a
    begin, the tiles before it are left out."""
    size, at_once = min(tiling.size, arena), tiling.at_once
    if begins is not None:
        begins = begins - begins % size  # tiles of a block are at the same places as without
        lengths = jnp.maximum(lengths - begins, 0)
    ends = jnp.cumsum(-(-lengths // size))
    # A run has at most one piece that is not full, so this many are enough.
    max_items = arena // size + lengths.shape[0]
    item = jnp.arange(-(-max_items // at_once) * at_once)
    # Both find the same. Comparing all is one kernel, and sorting a dozen: few items compile sooner.
    method = "compare_all" if item.shape[0] * ends.shape[0] <= _FEW_COMPARISONS else "sort"
    run = jnp.searchsorted(ends, item, side="right", method=method).astype(jnp.int32)
    run = jnp.minimum(run, lengths.shape[0] - 1)
    first = (item - jnp.where(run > 0, ends[run - 1], 0)) * size
    first = first if begins is None else first + begins[run]
    return _Pieces(run, first, ends[-1], Tiling(size, at_once))


def _tiles(
    reads: Reads, pieces: _Pieces, offset: Array, row: Array, slot: Array, is_reader: Array
) -> Tiles:
    """Windows over pieces of runs at `offset` [I]; row, slot and is_reader [I, Q] are the rows
    that read each, and where they list its block."""
    size, at_once = pieces.tiling
    real = (jnp.arange(pieces.run.shape[0]) < pieces.count)[:, None]
    # [I, Q, T], counted from the block's start
    seen = jnp.where((is_reader & real)[..., None], reads.seen[row, slot], 0)
    start = jnp.clip(offset + pieces.first, 0, reads.arena - size)
    first = offset + pieces.first - start
    begin = None
    if reads.unseen is not None:
        begin = reads.unseen[row, slot] - (start - offset)[:, None, None]
        begin = jnp.maximum(begin, first[:, None, None])
    return Tiles(
        pieces.count,
        start,
        first=first,
        row=row,
        slot=slot,
        last=jnp.where(seen > 0, jnp.maximum(seen - (start - offset)[:, None, None], 0), 0),
        begin=begin,
        size=size,
        at_once=at_once,
    )
