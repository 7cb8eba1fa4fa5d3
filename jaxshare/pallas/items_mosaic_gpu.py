"""The reads of one work item, as the kernels in Pallas on Mosaic GPU see them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxshare.pallas.registers_mosaic_gpu import columns_between
from jaxshare.pallas.work_items import ROW_ALIGNMENT

WARPGROUP = 64
"""Queries of a warpgroup: the rows of a wgmma product."""
ALIGNMENT = 8
"""Tokens, and queries, at which bulk copies into swizzled shared memory can start: the rows of one
swizzle pattern."""


class SegmentTiles(NamedTuple):
    """The part of a segment that an item reads: its tiles from `first` to `end` (exclusive)."""

    head: Array
    query: Array
    queries: Array
    start: Array
    lead: Array
    tiles: Array
    full: Array
    turn: Array
    first: Array
    end: Array


class ItemReads:
    """The segments and tiles of one item. Inside a kernel, whose refs it reads."""

    def __init__(
        self,
        item_ref: Any,
        segment_ref: Any,
        count_ref: Any,
        item: Array,
        *,
        tile: int,
        arena: int,
        constants: bool,
        hints: bool = True,
    ):
        """Reads which tiles and segments are the item's.

        Args:
          item_ref: int32[P, 4], as `Work.items`.
          segment_ref: int32[S, 8], as `Segments.table`.
          count_ref: int32[2], segments, and tiles of a kv head.
          item: the item's number.
          tile: tokens of a tile.
          arena: tokens of the arena.
          constants: masks have the numbers of columns in their instructions, and not in registers;
            not for the interpreter, nor for `mma.sync`, beside which ptxas spills more then.
          hints: JAX is told what starts are multiples of, for which it has no lowering where warps do
            work of their own.
        """
        self._first_tile, self._end_tile, self.first_segment, self.end_segment = (
            item_ref[item, i] for i in range(4)
        )
        self._count, self._total = count_ref[0], count_ref[1]
        self._segment_ref, self._tile, self._arena = segment_ref, tile, arena
        self._constants = constants
        self._multiple_of = pl.multiple_of if hints else lambda x, n: lax.div(x, n) * n

    def segment(self, number: Array) -> SegmentTiles:
        """The tiles of a segment, which is counted over the kv heads."""
        head = lax.div(number, self._count)
        query, queries, start, lead, tiles, full, tiles_before, turn = (
            self._segment_ref[number - head * self._count, i] for i in range(8)
        )
        before = head * self._total + tiles_before
        return SegmentTiles(
            head,
            self._multiple_of(query, ROW_ALIGNMENT),
            queries,
            self._multiple_of(start, ALIGNMENT),
            lead,
            tiles,
            full,
            turn,
            jnp.maximum(self._first_tile - before, 0),
            jnp.minimum(self._end_tile - before, tiles),
        )

    def window(self, now: SegmentTiles, i: Array) -> tuple[Array, Array]:
        """The arena index of the i-th tile read, and the segment's tokens before it."""
        i = i + now.turn
        before = jnp.where(i >= now.tiles, i - now.tiles, i) * self._tile
        start = jnp.minimum(now.start + before, self._arena - self._tile)
        return self._multiple_of(start, ALIGNMENT), before

    def bounds(
        self, plgpu: Any, now: SegmentTiles, refs: Sequence[Any], first: Any, rows: int, layout: Any
    ) -> list[Array]:
        """The numbers of tokens that some of a segment's queries see, and do not see, counted from the
        start of its first tile; plgpu is Pallas' Mosaic GPU module.

        Args:
          now: the segment.
          refs: `Work.limits`, and with a sliding window `Work.unseen`.
          first: the first of the queries, counted from the segment's.
          rows: how many.
          layout: of the results.
        """
        queries = pl.ds(now.query + first, rows)
        return [
            now.lead + plgpu.load(ref.at[queries], layout=layout, optimized=False) for ref in refs
        ]

    def seen(
        self,
        plgpu: Any,
        now: SegmentTiles,
        i: Array,
        limit: Array,
        unseen: Sequence[Array],
        layout: Any = None,
    ) -> Array:
        """True where a query sees a token of the i-th tile read, [queries, tile]; plgpu is Pallas'
        Mosaic GPU module.

        `limit`, and with a sliding window `unseen`, are those of the queries, from `bounds`. `layout` is
        that of the result, by default WGMMA, of which there are 64.
        """
        start, before = self.window(now, i)
        skipped = start - now.start
        first = before if unseen else jnp.maximum(before, now.lead)
        if self._constants:
            wgmma = plgpu.Layout.WGMMA
            begin = plgpu.layout_cast(jnp.full(WARPGROUP, first - skipped), wgmma.reduce(1))
            for each in unseen:
                begin = jnp.maximum(begin, each - skipped)
            return columns_between(plgpu, begin, limit - skipped, self._tile)
        shape = *limit.shape, self._tile
        layout = plgpu.Layout.WGMMA if layout is None else layout
        token = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout) + skipped
        seen = (token >= first) & (token < lax.broadcast_in_dim(limit, shape, [0]))
        for begin in unseen:
            seen = seen & (token >= lax.broadcast_in_dim(begin, shape, [0]))
        return seen
