"""The work items of the GPU backends, alone, checked token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare import KVCache, Rope, make_plan
from jaxshare.pallas.work_items import WorkForm, make_work, partial_row
from tests.helpers import mostly_slow, pad_rows


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static sizes, and how the work is cut.

    R rows, T tokens, N listed, B blocks, G query heads of each of K kv heads.
    """

    rows: int
    width: int
    listed: int
    blocks: int
    group: int
    kv_heads: int
    span: int
    tile: int
    items: int
    alignment: int = 1
    window: int = 0
    setup: int = 0

    num_layers = 1
    head_dim = value_dim = 8

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads

    @property
    def layer_ropes(self) -> tuple[Rope, ...]:
        return ()

    @property
    def rope(self) -> Rope:
        return Rope.default(8, 10_000.0)


SHAPES = {
    "decode": Shape(5, 1, 3, 9, 4, 2, span=128, tile=64, items=7, alignment=8, setup=1),
    "many items": Shape(5, 1, 3, 9, 4, 2, span=16, tile=16, items=132),
    "pending": Shape(4, 7, 3, 6, 5, 2, span=16, tile=8, items=13, alignment=8, setup=2),
    "prompt": Shape(3, 40, 2, 5, 4, 1, span=64, tile=64, items=5),
    "many rows": Shape(40, 1, 3, 45, 8, 2, span=128, tile=64, items=13, alignment=8, setup=3),
    "window": Shape(5, 1, 3, 9, 4, 2, span=16, tile=16, items=7, alignment=8, window=70),
    "narrow window": Shape(4, 7, 3, 6, 5, 2, span=16, tile=8, items=13, window=3),
    "window of a prompt": Shape(
        3, 40, 2, 5, 4, 1, span=64, tile=16, items=5, alignment=8, window=30
    ),
    "one row": Shape(1, 1, 2, 2, 1, 1, span=128, tile=64, items=3),
}


@dataclasses.dataclass(frozen=True)
class Case:
    rows: list[list[int]]
    count: list[int]
    lengths: list[int]


@st.composite
def cases(draw, shape: Shape):
    writers = iter(draw(st.permutations(range(shape.blocks))))
    rows = []
    for _ in range(min(shape.rows, shape.blocks)):
        own = next(writers)
        others = draw(
            st.lists(st.sampled_from(range(shape.blocks)), unique=True, max_size=shape.listed - 1)
        )
        rows.append([*(b for b in others if b != own), own] if draw(st.integers(0, 6)) else [])
    count = [draw(st.integers(0, shape.width)) if row else 0 for row in rows]
    return Case(
        rows,
        count,
        draw(
            st.lists(
                st.sampled_from([0, 0, 1, 5, 15, 16, 63, 64, 65, 130, 200]),
                min_size=shape.blocks,
                max_size=shape.blocks,
            )
        ),
    )


jitted_plan = jax.jit(make_plan, static_argnames=("width", "window"))


def planned(shape: Shape, case: Case, start: int = 3):
    """The work as numpy, the offset of each block, and its length after the pass."""
    grown = list(case.lengths)
    for row, count in zip(case.rows, case.count, strict=True):
        if row:
            grown[row[-1]] += count
    # One arena for all cases, so that one program plans them; blocks follow each other in it
    # without gaps, from any offset.
    cache = KVCache.create(shape, [max(256, *case.lengths) + shape.width] * shape.blocks)
    offsets = np.cumsum([start, *grown])[:-1]
    cache = dataclasses.replace(
        cache,
        lengths=jnp.asarray(case.lengths, jnp.int32),
        capacities=jnp.asarray(grown, jnp.int32),
        offsets=jnp.asarray(offsets, jnp.int32),
    )
    count = jnp.asarray(case.count + [0] * (shape.rows - len(case.rows)), jnp.int32)
    plan = jitted_plan(
        cache,
        pad_rows(case.rows, shape.rows, shape.listed),
        count,
        width=shape.width,
        window=shape.window,
    )
    form = WorkForm(
        group=shape.group,
        kv_heads=shape.kv_heads,
        span=shape.span,
        tile=shape.tile,
        num_items=shape.items,
        alignment=shape.alignment,
        setup=shape.setup,
    )
    work = make_work(plan, form)
    return jax.tree.map(np.asarray, work), offsets, grown


def segment(work, number: int):
    """The kv head and the fields of a segment that is counted over the kv heads."""
    head, at = divmod(number, int(work.count))
    return head, {
        name: int(getattr(work.segments, name)[at])
        for name in ("query", "queries", "start", "lead", "tiles", "tiles_before", "full", "turn")
    }


def tokens(
    shape: Shape, fields: dict[str, int], i: int, limit: int, unseen: int
) -> tuple[int, int]:
    """The arena tokens, from the first to an exclusive end, of the i-th tile that a segment reads.

    They are for a query that sees the first `limit` tokens of the block, less the first `unseen`.
    """
    nth = (i + fields["turn"]) % fields["tiles"]
    start, lead = fields["start"], fields["lead"]
    low = max(nth * shape.tile, lead + unseen)
    return start + low, start + max(low, min((nth + 1) * shape.tile, lead + limit))


@pytest.mark.parametrize(
    "name",
    mostly_slow(dict.fromkeys(["window", *SHAPES])),
)
@settings(max_examples=15)
@given(st.data())
def test_every_token_of_every_query_is_read_once(name, data):
    shape = SHAPES[name]
    case = data.draw(cases(shape))
    work, offsets, grown = planned(shape, case)
    expected = {}
    for r, (row, count) in enumerate(zip(case.rows, case.count, strict=True)):
        for n, block in enumerate(row):
            for t in range(count):
                sees = grown[block] if n < len(row) - 1 else case.lengths[block] + t + 1
                before = sum(grown[b] for b in row[:n])
                position = sum(grown[b] for b in row[:-1]) + case.lengths[row[-1]] + t
                first = max(0, position + 1 - shape.window - before) if shape.window else 0
                for g in range(shape.group if sees > first else 0):
                    for k in range(shape.kv_heads):
                        expected[k, r, n, t, g] = list(
                            range(offsets[block] + first, offsets[block] + sees)
                        )
    found, counts = {}, case.count + [0] * shape.rows
    for first_tile, end_tile, first, end in work.items:
        for number in range(first, end):
            k, fields = segment(work, number)
            at = k * int(work.total) + fields["tiles_before"]
            for i in range(max(first_tile - at, 0), min(end_tile - at, fields["tiles"])):
                for query in range(fields["query"], fields["query"] + fields["queries"]):
                    r, n, t, g = np.unravel_index(
                        work.source[query], (shape.rows, shape.listed, shape.width, shape.group)
                    )
                    if t < counts[r]:
                        unseen = 0 if work.unseen is None else int(work.unseen[query])
                        read = range(*tokens(shape, fields, i, int(work.limits[query]), unseen))
                        assert i >= fields["full"] or len(read) == shape.tile
                        found.setdefault((k, int(r), int(n), int(t), int(g)), []).extend(read)
    assert {key: sorted(read) for key, read in found.items() if read} == expected


@pytest.mark.parametrize(
    "name",
    mostly_slow(dict.fromkeys(["many rows", "prompt", "window of a prompt", *SHAPES])),
)
@settings(max_examples=15)
@given(st.data())
def test_items_cost_the_same_and_follow_each_other(name, data):
    shape = SHAPES[name]
    work, _, _ = planned(shape, data.draw(cases(shape)))
    first, end = work.items[:, 0], work.items[:, 1]
    assert (
        first[0] == 0 and (first[1:] == end[:-1]).all() and end[-1] == work.total * shape.kv_heads
    )
    cost = end - first
    for head in range(shape.kv_heads):
        for at, tiles in zip(work.segments.tiles_before, work.segments.tiles, strict=True):
            begin = head * work.total + at
            cost = cost + shape.setup * ((first <= begin) & (begin < end) & (tiles > 0))
    # No cut is inside a setup: it goes to the item in which its segment starts.
    assert np.ptp(cost) <= 1 + 2 * shape.setup and (shape.setup or np.ptp(end - first) <= 1)


@pytest.mark.parametrize(
    "name", mostly_slow(dict.fromkeys(["pending", "window of a prompt", *SHAPES]), 2)
)
@settings(max_examples=15)
@given(st.data())
def test_partial_results_are_found_where_they_were_left(name, data):
    """No two pieces share a row of partial results.

    The merge finds all pieces of a query and no others.
    """
    shape = SHAPES[name]
    case = data.draw(cases(shape))
    work, _, _ = planned(shape, case)
    left, taken = {}, set()
    for item, (first_tile, end_tile, first, end) in enumerate(work.items):
        for number in range(first, end):
            k, fields = segment(work, number)
            at = k * int(work.total) + fields["tiles_before"]
            reads = max(first_tile - at, 0) < min(end_tile - at, fields["tiles"])
            rows = {
                query: int(partial_row(work, item, k, query))
                for query in range(fields["query"], fields["query"] + fields["queries"])
            }
            # Stored in eights: the rest of an eight must be of no other piece either.
            eights = range(min(rows.values()), min(rows.values()) + -(-fields["queries"] // 8) * 8)
            assert (
                taken.isdisjoint(eights) and eights[-1] < work.partial_rows and eights[0] % 8 == 0
            )
            taken.update(eights)
            for query, row in rows.items():
                if reads:
                    left.setdefault((k, int(work.source[query])), set()).add(row)
    followed = {}
    for r, n in zip(*np.nonzero(work.query >= 0), strict=True):
        for nth in range(shape.width * shape.group):
            for k in range(shape.kv_heads):
                number = work.segment[r, n] + (work.member[r, n] + nth) // shape.span
                first, end = work.pieces[k, number]
                source = int(
                    np.ravel_multi_index(
                        (r, n, 0, nth), (shape.rows, shape.listed, 1, shape.width * shape.group)
                    )
                )
                if end > first:
                    followed[k, source] = {
                        int(partial_row(work, item, k, work.query[r, n] + nth))
                        for item in range(first, end)
                    }
    assert followed == left


def test_a_block_that_all_rows_see_is_read_once_for_all_of_them():
    shape = Shape(32, 1, 2, 33, 4, 1, span=128, tile=64, items=132, alignment=8)
    work, _, _ = planned(
        shape, Case([[0, r + 1] for r in range(32)], [1] * 32, [4096] + [0] * 32), start=0
    )
    # 32 rows x 4 heads fill one segment: 64 tiles, and one for each row's own token.
    assert int(work.count) == 33 and int(work.total) == 64 + 32


def test_tiles_outside_all_windows_are_skipped():
    shape = Shape(32, 1, 2, 33, 4, 1, span=128, tile=64, items=132, alignment=8, window=129)
    work, _, _ = planned(
        shape, Case([[0, r + 1] for r in range(32)], [1] * 32, [4096] + [0] * 32), start=0
    )
    # The last 128 tokens of the shared block, and one of each row's own.
    assert int(work.total) == 2 + 32 and int(work.segments.full[0]) == 2
    assert int(work.segments.start[0]) == 4096 - 128


def test_a_long_block_is_shared_by_all_items():
    shape = Shape(1, 1, 1, 1, 4, 2, span=128, tile=64, items=132, alignment=8)
    work, _, _ = planned(shape, Case([[0]], [1], [132 * 64 - 1]), start=0)
    assert (work.items[:, 1] - work.items[:, 0] == 2).all()


def test_nothing_to_read():
    work, _, _ = planned(SHAPES["decode"], Case([], [], [0] * 9))
    assert int(work.total) == 0 and not work.items.any() and (work.source == -1).all()
