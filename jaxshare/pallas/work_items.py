"""Work items of the GPU backends: the reads of one pass, cut into equal pieces.

They are made from the plan, inside jit. The queries of all rows that see a block are put next to
each other: a block's queries are cut into segments of at most `span`, and each segment reads the
block's keys once for all of them (Hydragen section 3.2). A segment's keys are cut into tiles of
`tile` tokens. All tiles of all segments of all kv heads, concatenated, are cut into `num_items`
items of equal cost, cuts inside a block allowed, so that every multiprocessor has the same amount
of work whatever the lengths are; many short private blocks share an item. The cost is that of the
tiles and, for each segment, of its start and its end. The part of an item that
belongs to one segment is a piece; each piece leaves partial results, which are merged by
log-sum-exp.

Everything is a sum over pairs of (row, listed block) or over segments, so that XLA makes a few
small kernels of it and sorts nothing.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int

from jaxshare.attention.plan import Plan
from jaxshare.pallas.segments import ItemCuts, Segments, ceil_div, sum_before

ROW_ALIGNMENT = 8
"""The queries of a block start at a multiple of this, so that partial results can be stored in bulk
copies of eight rows."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Work:
    """The work of a pass.

    R rows, N listed blocks, T new tokens, G query heads of a kv head, Q queries of a kv head, P
    items.

    Attributes:
      totals: int32[2], segments, and tiles of all segments of one kv head.
      segments: the segments.
      items: int32[P, 4], for each item its first tile and its end, and its first segment and its
        end, both exclusive. Tiles and segments are counted over the kv heads: head * total + tile,
        head * count + segment.
      source: int32[Q + span], the origin of each query: ((row * N + slot) * T + token) * G + group
        member; -1 for padding.
      taken, turned: int32[Q + span], of it (row * T + token) * G + member, and (row * N + slot) * T
        + token; 0 for padding.
      limits: int32[Q + span], tokens of its block that each query sees, the first ones.
      unseen: int32[Q + span], how many of those it does not see, because they are outside its
        sliding window; None without one.
      listed: int32[R, N, 4], the properties `query`, `segment` and `member` below in this order, of
        each block that a row lists, and 0.
      pieces: int32[K, S, 2], for each kv head and segment the first item that reads it, and the end
        (exclusive).
      num_queries: Q (static).
      span, tile: queries and tokens of a tile (static).
    """

    totals: Array
    segments: Segments
    items: Array
    source: Array
    taken: Array
    turned: Array
    limits: Array
    unseen: Array | None
    listed: Array
    pieces: Array
    num_queries: int = dataclasses.field(metadata={"static": True})
    span: int = dataclasses.field(metadata={"static": True})
    tile: int = dataclasses.field(metadata={"static": True})

    @property
    def count(self) -> Int[Array | np.ndarray, ""]:
        """Segments."""
        return self.totals[..., 0]

    @property
    def total(self) -> Int[Array | np.ndarray, ""]:
        """Tiles of all segments, for one kv head."""
        return self.totals[..., 1]

    @property
    def query(self) -> Int[Array | np.ndarray, "R N"]:
        """The index of the first query of each row towards each listed block; -1 where the row does
        not see it. T * G follow."""
        return self.listed[..., 0]

    @property
    def segment(self) -> Int[Array | np.ndarray, "R N"]:
        """The block's first segment."""
        return self.listed[..., 1]

    @property
    def member(self) -> Int[Array | np.ndarray, "R N"]:
        """Queries of the block before those of the row."""
        return self.listed[..., 2]

    @property
    def partial_rows(self) -> int:
        """Rows of the buffer of partial results: above `partial_row` of any piece and query."""
        return self.pieces.shape[0] * self.num_queries + self.items.shape[0] * self.span


def partial_row(work: Work, item: Array, head: Array, query: Array) -> Array:
    """The row of partial results that `item` writes for a query of a kv head.

    From item to item neither the segment's place nor `item` decreases, so no two pieces share a
    row.
    """
    return head * work.num_queries + query + item * work.span


class WorkForm(NamedTuple):
    """The numbers that the work of a pass depends on beside its plan.

    Attributes:
      group: G, query heads of a kv head.
      kv_heads: K.
      span: the most queries of a segment.
      tile: tokens of a tile.
      num_items: P, the number of items.
      alignment: tiles start at multiples of it in the arena, for hardware whose bulk copies do.
      setup: the tiles that take as long as the start and the end of a segment.
    """

    group: int
    kv_heads: int
    span: int
    tile: int
    num_items: int
    alignment: int = 1
    setup: int = 0


def keep_work(plan: Plan, form: WorkForm) -> Plan:
    """The plan with the work of this form in it, so that layers need not make it."""
    return dataclasses.replace(plan, work={**plan.work, form: make_work(plan, form)})


def work_of(plan: Plan, form: WorkForm) -> Work:
    """The work of this form: the plan's, or one that is made here."""
    return plan.work[form] if form in plan.work else make_work(plan, form)


@functools.partial(jax.jit, static_argnames=("form",))
def make_work(plan: Plan, form: WorkForm) -> Work:
    """The work of a pass. Jitted by itself, so that plans share one trace."""
    group, kv_heads, span, tile, num_items, alignment, setup = form
    rows, slots = plan.blocks.shape
    per_row = plan.positions.shape[1] * group
    pairs = _pairs(plan, per_row, span)
    segments, count = _segments(plan, pairs, group=group, span=span, tile=tile, alignment=alignment)
    total = segments.tiles_before[-1] + segments.tiles[-1]
    cuts = ItemCuts.of(segments, setup, kv_heads, num_items)
    num_queries = rows * slots * (per_row + -per_row % ROW_ALIGNMENT)
    source, limits, unseen = _sources(pairs, group, num_queries + span)
    real = jnp.maximum(source, 0)
    turned, width = lax.div(real, group), plan.positions.shape[1]
    token = lax.div(turned, slots * width) * width + lax.rem(turned, width)
    query = jnp.where(pairs.sees, pairs.query, -1)
    listed = jnp.stack([query, pairs.segment, pairs.member, jnp.zeros_like(query)], axis=1)
    return Work(
        totals=jnp.stack([count, total]),
        segments=segments,
        items=_items(segments, count, total, cuts),
        source=source,
        taken=token * group + lax.rem(real, group),
        turned=turned,
        limits=limits,
        unseen=unseen,
        listed=listed.reshape(rows, slots, 4),
        pieces=_pieces(segments, cuts),
        num_queries=num_queries,
        span=span,
        tile=tile,
    )


class _Pairs(NamedTuple):
    """All pairs of a row and a block that it lists, R * N, as arrays of one entry a pair.

    Attributes:
      block: the block; a real one where none is listed.
      count: the row's real new tokens.
      seen: int32[R * N, T], tokens of the block that each new token sees, the first ones.
      unseen: int32[R * N, T], how many of those it does not see; None without a sliding window.
      sees: False where none of them sees any.
      queries: queries of the block, of all rows.
      min_seen: the fewest tokens of the block that any row's first new token sees.
      min_unseen, max_unseen: the fewest and the most of them that any real new token does not see;
        None without a sliding window.
      member: queries of the block that precede the row's.
      first_query, query: index of the block's first query, and of the row's first.
      segment: the block's first segment.
    """

    block: Array
    count: Array
    seen: Array
    unseen: Array | None
    sees: Array
    queries: Array
    min_seen: Array
    min_unseen: Array | None
    max_unseen: Array | None
    member: Array
    first_query: Array
    query: Array
    segment: Array


def _pairs(plan: Plan, per_row: int, span: int) -> _Pairs:
    """The pairs, and the order of their queries: by block, and within a block by row."""
    rows, slots = plan.blocks.shape
    width, num_blocks = plan.positions.shape[1], plan.lengths.shape[0]
    block = jnp.clip(plan.blocks, 0, num_blocks - 1).reshape(-1)
    seen = plan.seen.reshape(rows * slots, width)
    count = jnp.repeat(plan.count, slots)
    last = jnp.maximum(count - 1, 0)[:, None]
    most = jnp.take_along_axis(seen, last, axis=1)[:, 0]
    unseen = None if plan.unseen is None else plan.unseen.reshape(rows * slots, width)
    # Later tokens of a row see as many first tokens or more, and leave out as many or more.
    sees = most > (0 if unseen is None else unseen[:, 0])

    # Pairs against pairs, [pair, other]: the ranks of a sort by block, without a sort.
    same = (block[:, None] == block[None]) & sees[None]
    earlier = (block[None] < block[:, None]) & sees[None]
    index = jnp.arange(rows * slots)
    readers = jnp.sum(same, axis=1, dtype=jnp.int32)
    rank = jnp.sum(same & (index[None] < index[:, None]), axis=1, dtype=jnp.int32)
    never = jnp.iinfo(jnp.int32).max
    min_seen = jnp.min(jnp.where(same, seen[None, :, 0], never), axis=1)
    min_unseen = max_unseen = None
    if unseen is not None:
        min_unseen = jnp.min(jnp.where(same, unseen[None, :, 0], never), axis=1)
        most_unseen = jnp.take_along_axis(unseen, last, axis=1)[:, 0]
        max_unseen = jnp.max(jnp.where(same, most_unseen[None], 0), axis=1)
    # One pair counts for all that read its block.
    counts = earlier & (rank == 0)[None]
    padded = ceil_div(readers * per_row, ROW_ALIGNMENT) * ROW_ALIGNMENT
    first_query = jnp.sum(jnp.where(counts, padded[None], 0), axis=1)
    segment = jnp.sum(jnp.where(counts, ceil_div(readers * per_row, span)[None], 0), axis=1)
    return _Pairs(
        block=block,
        count=count,
        seen=seen,
        unseen=unseen,
        sees=sees,
        queries=readers * per_row,
        min_seen=min_seen,
        min_unseen=min_unseen,
        max_unseen=max_unseen,
        member=rank * per_row,
        first_query=first_query,
        query=first_query + rank * per_row,
        segment=segment,
    )


def _sources(pairs: _Pairs, group: int, size: int) -> tuple[Array, Array, Array | None]:
    """`Work.source`, `Work.limits` and `Work.unseen`, int32[size] all."""
    num_pairs, width = pairs.seen.shape
    per_row = width * group
    index = jnp.where(pairs.sees, pairs.query, size)[:, None] + jnp.arange(per_row)
    source = (
        jnp.full(size, -1, jnp.int32)
        .at[index]
        .set(
            jnp.arange(num_pairs * per_row, dtype=jnp.int32).reshape(index.shape),
            mode="drop",
            unique_indices=True,
        )
    )
    real = jnp.maximum(source, 0)
    token, pair = lax.rem(lax.div(real, group), width), lax.div(real, per_row)
    limits, unseen = (
        None if x is None else jnp.where(source >= 0, x[pair, token], 0)
        for x in (pairs.seen, pairs.unseen)
    )
    assert limits is not None
    return source, limits, unseen


def _segments(
    plan: Plan, pairs: _Pairs, *, group: int, span: int, tile: int, alignment: int
) -> tuple[Segments, Array]:
    """The segments, and the number of them.

    Each pair makes the segments that start within its queries, and puts them at their places.
    """
    per_row = pairs.seen.shape[1] * group
    # [pair, chunk], the number of the segment within its block
    number = ceil_div(pairs.member, span)[:, None] + jnp.arange(-(-per_row // span))
    # its queries, counted from the pair's first
    begin = number * span - pairs.member[:, None]
    end = jnp.minimum(number * span + span, pairs.queries[:, None]) - pairs.member[:, None]
    real = (begin < per_row) & pairs.sees[:, None]
    min_seen, seen = _visible(plan, pairs, begin, end, group)
    start = plan.offsets[pairs.block][:, None]
    if pairs.unseen is None:
        lead = lax.rem(start, alignment)
        start = start - lead
        tiles = jnp.where(seen > 0, ceil_div(lead + seen, tile), 0)
        turn = (lead > 0).astype(jnp.int32)
    else:
        min_unseen, max_unseen = _out_of_sight(pairs, begin, end, group)
        lead = lax.rem(start + min_unseen, alignment) - min_unseen
        start = start - lead
        tiles = jnp.where(seen > min_unseen, ceil_div(lead + seen, tile), 0)
        turn = jnp.minimum(ceil_div(lead + max_unseen, tile), tiles)
    # The first tiles that are not full are read last.
    full = lax.div(lead + jnp.minimum(min_seen, seen), tile) - turn

    first_query = pairs.first_query[:, None] + number * span
    fields = (first_query, end - begin, start, lead, tiles, jnp.maximum(full, 0), turn)
    fields = [jnp.broadcast_to(x, real.shape).reshape(-1) for x in fields]
    size = real.size
    to = jnp.where(real, pairs.segment[:, None] + number, size).reshape(-1)
    placed = (
        jnp.zeros((size, len(fields)), jnp.int32)
        .at[to]
        .set(jnp.stack(fields, axis=1), mode="drop", unique_indices=True)
    )
    tiles_before = sum_before(placed[:, 4])[:, None]
    table = jnp.concatenate([placed[:, :6], tiles_before, placed[:, 6:]], axis=1)
    return Segments(table), jnp.sum(real, dtype=jnp.int32)


def _visible(
    plan: Plan, pairs: _Pairs, begin: Array, end: Array, group: int
) -> tuple[Array, Array]:
    """The fewest and the most tokens of the block that queries `begin` to `end` of a pair see.

    A segment of one row alone need not read what its last token does not see, and nothing if it is
    all padding. One of several rows reads the whole block.
    """
    width, count = pairs.seen.shape[1], pairs.count[:, None]
    alone = end <= width * group
    first, last = lax.div(begin, group), jnp.minimum(lax.div(end - 1, group), count - 1)
    first_sees, last_sees = (
        jnp.take_along_axis(pairs.seen, jnp.clip(token, 0, width - 1), axis=1)
        for token in (first, last)
    )
    min_seen = jnp.where(alone, first_sees, pairs.min_seen[:, None])
    last_sees = jnp.where(first >= count, 0, last_sees)
    return min_seen, jnp.where(alone, last_sees, plan.local_lengths[pairs.block][:, None])


def _out_of_sight(pairs: _Pairs, begin: Array, end: Array, group: int) -> tuple[Array, Array]:
    """The fewest and the most first tokens of the block that queries `begin` to `end` of a pair do
    not see, because they are outside their sliding windows.

    Of a segment of several rows those of all rows that see any of the block: that is at most a
    window's length too few.
    """
    assert pairs.unseen is not None
    assert pairs.min_unseen is not None and pairs.max_unseen is not None
    width = pairs.unseen.shape[1]
    last = jnp.minimum(lax.div(end - 1, group), pairs.count[:, None] - 1)
    fewest, most = (
        jnp.take_along_axis(pairs.unseen, jnp.clip(token, 0, width - 1), axis=1)
        for token in (lax.div(begin, group), last)
    )
    alone = end <= width * group
    return (
        jnp.where(alone, fewest, pairs.min_unseen[:, None]),
        jnp.where(alone, jnp.maximum(fewest, most), pairs.max_unseen[:, None]),
    )


def _items(segments: Segments, count: Array, total: Array, cuts: ItemCuts) -> Array:
    """`Work.items`: the cuts of all tiles into items, and the segments on both sides of each."""
    cut = cuts.tiles(segments, total)
    real = jnp.arange(segments.tiles_before.shape[0]) < count
    ends = segments.tiles_before + segments.tiles

    def segment(tile: Array) -> Array:
        """The segment, counted over the heads, that a tile belongs to."""
        head = lax.div(tile, jnp.maximum(total, 1))
        before = jnp.sum(real & (ends <= (tile - head * total)[:, None]), axis=1, dtype=jnp.int32)
        return head * count + before

    first_tile, end_tile = cut[:-1], cut[1:]
    end = segment(jnp.maximum(end_tile - 1, 0)) + 1
    first = segment(first_tile)
    end = jnp.where(end_tile > first_tile, end, first)
    return jnp.stack([first_tile, end_tile, first, end], axis=1)


def _pieces(segments: Segments, cuts: ItemCuts) -> Array:
    """`Work.pieces`."""
    of_head = jnp.arange(cuts.kv_heads)[:, None] * cuts.whole
    first_tile = of_head + cuts.before + cuts.setup
    first, end = cuts.item(first_tile), cuts.item(first_tile + segments.tiles - 1) + 1
    return jnp.stack([first, jnp.where(segments.tiles > 0, end, first)], axis=2)
