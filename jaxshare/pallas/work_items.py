"""Work items of the GPU backends: what one pass reads, cut into equal pieces, made from the plan
inside jit.

The queries of all rows that see a block stand side by side, whatever rows they come from: a block's
queries are cut into segments of at most `span`, and each segment reads the block's keys once for
all of them (Hydragen section 3.2). A segment's keys are cut into tiles of `tile` tokens. All tiles
of all segments of all kv heads, laid end to end, are cut into `num_items` items of equal length,
cuts inside a block allowed, so that every multiprocessor has the same to do whatever the lengths
are; short private blocks are so packed, many to an item. What an item computes of one segment is a
piece; each piece leaves partial results, which are merged by log-sum-exp.

Everything is a sum over pairs of (row, listed block) or over segments, so that XLA makes a few
small kernels of it and sorts nothing.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from jaxshare.attention.plan import Plan

ROW_ALIGNMENT = 8
"""The queries of a block begin at a multiple of this, so that partial results can be stored in bulk
copies of eight rows."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """int32[S] each, S segments at most; those behind `Work.count` have no tiles. A segment's tiles
    are the same for every kv head.

    query: index of the first of its queries among all queries of the pass (`Work.source`).
    queries: how many it has, at most the span.
    start: arena index of its first tile: its block's first token, rounded down to the alignment.
    lead: tokens of the first tile that stand before the block.
    tiles: how many tiles it reads. Where there is a lead, the first tile is read last.
    full: of its tiles in the order in which they are read, how many from the first on all of its
      queries see whole; in the others each query has its limit.
    begin: tiles of all segments before it.

    Attributes:
      table: int32[S, 8], these in this order, and a column of zeros: a row is one aligned read of
        32 bytes.
    """

    table: Array

    @property
    def query(self) -> Array:
        return self.table[:, 0]

    @property
    def queries(self) -> Array:
        return self.table[:, 1]

    @property
    def start(self) -> Array:
        return self.table[:, 2]

    @property
    def lead(self) -> Array:
        return self.table[:, 3]

    @property
    def tiles(self) -> Array:
        return self.table[:, 4]

    @property
    def full(self) -> Array:
        return self.table[:, 5]

    @property
    def begin(self) -> Array:
        return self.table[:, 6]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Work:
    """What a pass has to do. R rows, N listed blocks, T new tokens, G query heads of a kv head, Q
    queries of a kv head, P items.

    Attributes:
      count: int32[], segments.
      total: int32[], tiles of all segments, for one kv head.
      segments: the segments.
      items: int32[P, 4], for each item its first tile and the one behind its last, and its first
        segment and the one behind its last. Tiles and segments are counted over the kv heads: head
        * total + tile, head * count + segment.
      source: int32[Q + span], where each query comes from: ((row * N + slot) * T + token) * G +
        group member; -1 for padding.
      limits: int32[Q + span], tokens of its block that each query sees.
      query: int32[R, N], index of the first query of each row towards each listed block; -1 where
        it does not see it. T * G follow.
      segment: int32[R, N], the block's first segment.
      member: int32[R, N], how many of the block's queries stand before those of the row.
      pieces: int32[K, S, 2], for each kv head and segment the first item that reads it and the one
        behind the last.
      num_queries: Q (static).
      span, tile: queries and tokens of a tile (static).
    """

    count: Array
    total: Array
    segments: Segments
    items: Array
    source: Array
    limits: Array
    query: Array
    segment: Array
    member: Array
    pieces: Array
    num_queries: int = dataclasses.field(metadata={"static": True})
    span: int = dataclasses.field(metadata={"static": True})
    tile: int = dataclasses.field(metadata={"static": True})

    @property
    def partial_rows(self) -> int:
        """Rows of the buffer of partial results: `partial_row` of any piece and query stays
        below."""
        return self.pieces.shape[0] * self.num_queries + self.items.shape[0] * self.span


def partial_row(work: Work, item: Array, head: Array, query: Array) -> Array:
    """The row of partial results that `item` writes for a query of a kv head.

    Along the items both the place of the segment and `item` can only grow, so no two pieces share a
    row.
    """
    return head * work.num_queries + query + item * work.span


@functools.partial(
    jax.jit, static_argnames=("group", "kv_heads", "span", "tile", "num_items", "alignment")
)
def make_work(
    plan: Plan,
    *,
    group: int,
    kv_heads: int,
    span: int,
    tile: int,
    num_items: int,
    alignment: int = 1,
) -> Work:
    """The work of a pass.

    Jitted by itself, so that layers share one trace, and the compiler one computation.

    Args:
      plan: of the pass.
      group: G, query heads of a kv head.
      kv_heads: K.
      span: most queries of a segment.
      tile: tokens of a tile.
      num_items: P, into how many items to cut.
      alignment: tiles begin at multiples of it in the arena, for hardware whose bulk copies do.
    """
    rows, slots = plan.blocks.shape
    width, num_blocks = plan.positions.shape[1], plan.lengths.shape[0]
    per_row = width * group
    pairs = rows * slots

    block = jnp.clip(plan.blocks, 0, num_blocks - 1).reshape(-1)
    after = plan.local_lengths[block]
    seen = plan.seen.reshape(pairs, width)
    count = jnp.repeat(plan.count, slots)
    most = jnp.take_along_axis(seen, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    sees = most > 0

    # Pairs against pairs: who stands before whom, by block. [pair, other].
    same = (block[:, None] == block[None]) & sees[None]
    earlier = (block[None] < block[:, None]) & sees[None]
    index = jnp.arange(pairs)
    readers = jnp.sum(same, axis=1, dtype=jnp.int32)
    rank = jnp.sum(same & (index[None] < index[:, None]), axis=1, dtype=jnp.int32)
    # what each of a block's queries sees at least
    least = jnp.min(jnp.where(same, seen[None, :, 0], jnp.iinfo(jnp.int32).max), axis=1)
    leads = earlier & (rank == 0)[None]
    first_query = jnp.sum(jnp.where(leads, _up(readers * per_row, ROW_ALIGNMENT)[None], 0), axis=1)
    first_segment = jnp.sum(jnp.where(leads, -(-readers * per_row // span)[None], 0), axis=1)
    member = rank * per_row
    query = first_query + member

    segments, seg_count = _segments(
        jnp.where(sees, first_segment, -1),
        first_query,
        member,
        readers * per_row,
        plan.offsets[block],
        after,
        seen,
        least,
        count,
        per_row=per_row,
        group=group,
        span=span,
        tile=tile,
        alignment=alignment,
    )
    total = segments.begin[-1] + segments.tiles[-1]

    num_queries = pairs * _up(per_row, ROW_ALIGNMENT)
    place = jnp.where(sees, query, num_queries + span)[:, None] + jnp.arange(per_row)
    source = (
        jnp.full(num_queries + span, -1, jnp.int32)
        .at[place]
        .set(
            jnp.arange(pairs * per_row, dtype=jnp.int32).reshape(place.shape),
            mode="drop",
            unique_indices=True,
        )
    )
    token = source // group % width
    pair = source // per_row
    limits = jnp.where(source >= 0, seen[pair, token], 0)

    return Work(
        count=seg_count,
        total=total,
        segments=segments,
        items=_items(segments, seg_count, total, kv_heads, num_items),
        source=source,
        limits=limits,
        query=jnp.where(sees, query, -1).reshape(rows, slots),
        segment=first_segment.reshape(rows, slots),
        member=member.reshape(rows, slots),
        pieces=_pieces(segments, total, kv_heads, num_items),
        num_queries=num_queries,
        span=span,
        tile=tile,
    )


def _segments(
    first_segment: Array,
    first_query: Array,
    member: Array,
    queries: Array,
    start: Array,
    after: Array,
    seen: Array,
    least: Array,
    count: Array,
    *,
    per_row: int,
    group: int,
    span: int,
    tile: int,
    alignment: int,
) -> tuple[Segments, Array]:
    """The segments that begin within each pair's queries, and how many there are; first_segment is
    -1 for pairs that see nothing."""
    chunks = -(-per_row // span)
    number = -(-member // span)[:, None] + jnp.arange(chunks)  # which segment of its block
    begins = number * span
    # counted from the pair's first
    begin, end = (
        begins - member[:, None],
        jnp.minimum(begins + span, queries[:, None]) - member[:, None],
    )
    real = (begin < per_row) & (first_segment >= 0)[:, None]
    # A segment of one row alone need not read what its last token does not see, nor anything if it
    # is all padding.
    alone = end <= per_row
    first, last = begin // group, jnp.minimum((end - 1) // group, count[:, None] - 1)
    tokens = seen.shape[1] - 1
    first_sees, last_sees = (
        jnp.take_along_axis(seen, jnp.clip(token, 0, tokens), axis=1) for token in (first, last)
    )
    least = jnp.where(alone, first_sees, least[:, None])
    seen = jnp.where(alone, jnp.where(first >= count[:, None], 0, last_sees), after[:, None])
    lead = start[:, None] % alignment
    tiles = jnp.where(seen > 0, -(-(lead + seen) // tile), 0)
    # A first tile with a lead is not whole, and read last.
    full = jnp.maximum((lead + jnp.minimum(least, seen)) // tile - (lead > 0).astype(jnp.int32), 0)

    size = real.size
    to = jnp.where(real, first_segment[:, None] + number, size).reshape(-1)
    fields = [
        jnp.broadcast_to(x, real.shape).reshape(-1)
        for x in (
            first_query[:, None] + begins,
            end - begin,
            start[:, None] - lead,
            lead,
            tiles,
            full,
        )
    ]
    placed = (
        jnp.zeros((size, len(fields)), jnp.int32)
        .at[to]
        .set(jnp.stack(fields, axis=1), mode="drop", unique_indices=True)
    )
    table = jnp.concatenate(
        [placed, _sum_before(placed[:, 4])[:, None], jnp.zeros((size, 1), jnp.int32)], axis=1
    )
    return Segments(table), jnp.sum(real, dtype=jnp.int32)


def _items(segments: Segments, count: Array, total: Array, kv_heads: int, num_items: int) -> Array:
    share, rest = total * kv_heads // num_items, total * kv_heads % num_items
    item = jnp.arange(num_items + 1)
    cut = item * share + jnp.minimum(item, rest)
    real = jnp.arange(segments.begin.shape[0]) < count
    ends = segments.begin + segments.tiles

    def segment(tile: Array) -> Array:
        """The segment, counted over the heads, that a tile belongs to."""
        head = tile // jnp.maximum(total, 1)
        before = jnp.sum(real & (ends <= (tile - head * total)[:, None]), axis=1, dtype=jnp.int32)
        return head * count + before

    first, last = cut[:-1], cut[1:]
    behind = segment(jnp.maximum(last - 1, 0)) + 1
    begin = segment(first)
    return jnp.stack([first, last, begin, jnp.where(last > first, behind, begin)], axis=1)


def _pieces(segments: Segments, total: Array, kv_heads: int, num_items: int) -> Array:
    share, rest = total * kv_heads // num_items, total * kv_heads % num_items
    long = rest * (share + 1)

    def item(tile: Array) -> Array:
        return jnp.where(
            tile < long, tile // (share + 1), rest + (tile - long) // jnp.maximum(share, 1)
        )

    first = jnp.arange(kv_heads)[:, None] * total + segments.begin
    begin, behind = item(first), item(first + segments.tiles - 1) + 1
    return jnp.stack([begin, jnp.where(segments.tiles > 0, behind, begin)], axis=2)


def _sum_before(x: Array) -> Array:
    """The exclusive sum along one axis, as two small sums in place of a chain of them."""
    run = 64
    padded = jnp.pad(x, (0, -x.shape[0] % run)).reshape(-1, run)
    within = jnp.sum(
        jnp.where(jnp.arange(run)[:, None] > jnp.arange(run), padded[:, None], 0), axis=2
    )
    whole = jnp.sum(padded, axis=1)
    runs = jnp.arange(whole.shape[0])
    before = jnp.sum(jnp.where(runs[:, None] > runs, whole[None], 0), axis=1)
    return (within + before[:, None]).reshape(-1)[: x.shape[0]]


def _up(x, multiple: int):
    """x, rounded up."""
    return -(-x // multiple) * multiple
