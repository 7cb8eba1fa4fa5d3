"""Plans against the semantics written out in plain Python: starts, positions, what is visible,
fan-in, and the tiles to read."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare import Rope, make_plan
from jaxshare.attention.plan import Tiling
from jaxshare.cache import Fault
from tests.helpers import cache_with, mostly_slow, pad_rows

ROWS, LISTED, BLOCKS, ARENA = 5, 4, 7, 400
ROPE = Rope.yarn(8, 10_000.0, 4.0, 128)
SHARED, GROUP, PRIVATE = Tiling(8, 2), Tiling(5, 3), Tiling(3, 4)


@functools.partial(jax.jit, static_argnames=("width", "tiles"))
def planned(cache, layout, count, width, tiles=True):
    sizes = (
        {"shared_tiling": SHARED, "group_tiling": GROUP, "private_tiling": PRIVATE} if tiles else {}
    )
    return make_plan(cache, layout, count, width, **sizes)


def build(lengths, capacities, phases=None):
    blocks = [np.zeros((n, 1, 8)) for n in lengths]
    offsets = np.cumsum(capacities) - np.asarray(capacities)
    phases = [0] * len(lengths) if phases is None else phases
    return cache_with(
        blocks,
        blocks,
        rope=ROPE,
        offsets=offsets,
        capacities=capacities,
        tokens=ARENA,
        phases=phases,
    )


@st.composite
def cases(draw):
    """(rows, count, lengths, capacities, phases, width): any lists, ragged; rows without tokens,
    rows not in use, blocks unseen."""
    width = draw(st.sampled_from([1, 3]))
    writers = draw(st.permutations(range(BLOCKS)))[: draw(st.integers(1, ROWS))]
    rows = []
    for own in writers:
        others = draw(
            st.lists(
                st.sampled_from([b for b in range(BLOCKS) if b != own]),
                unique=True,
                max_size=LISTED - 1,
            )
        )
        rows.append([*others, own] if draw(st.integers(0, 6)) else [])
    lengths = draw(
        st.lists(st.sampled_from([0, 0, 1, 2, 3, 7, 8, 9, 20]), min_size=BLOCKS, max_size=BLOCKS)
    )
    count = [draw(st.integers(0, width)) if row else 0 for row in rows]
    capacities = [n + width + draw(st.integers(0, 5)) for n in lengths]
    phases = draw(st.lists(st.sampled_from([0, 5, 1000]), min_size=BLOCKS, max_size=BLOCKS))
    return rows, count, lengths, capacities, phases, width


def listed_pairs(rows):
    return [(r, n, b) for r, row in enumerate(rows) for n, b in enumerate(row)]


def lengths_after(rows, count, lengths):
    after = list(lengths)
    for row, c in zip(rows, count, strict=True):
        if row:
            after[row[-1]] += c
    return after


def run(case, groups=(), **more):
    rows, count, lengths, capacities, phases, width = case
    cache = build(lengths, capacities, phases)
    layout = dataclasses.replace(pad_rows(rows, ROWS, LISTED), groups=groups)
    plan = planned(
        cache, layout, jnp.asarray(count + [0] * (ROWS - len(rows)), jnp.int32), width, **more
    )
    return cache, jax.tree.map(np.asarray, plan)


@settings(max_examples=80)
@given(cases())
def test_starts_positions_and_visible_lengths(case):
    rows, count, lengths, _, _, width = case
    cache, plan = run(case)
    after = lengths_after(rows, count, lengths)
    np.testing.assert_array_equal(plan.before, lengths)
    np.testing.assert_array_equal(plan.lengths, after)
    assert int(plan.faults) == 0
    for r, row in enumerate(rows):
        assert plan.count[r] == count[r]
        for n, b in enumerate(row):
            start = sum(after[x] for x in row[:n])
            assert plan.starts[r, n] == start
            writes = n == len(row) - 1
            assert bool(plan.own[r, n]) == (writes and count[r] > 0)
            assert plan.visible[r, n] == (
                0 if not count[r] else lengths[b] + 1 if writes else after[b]
            )
            if writes:
                assert plan.positions[r].tolist() == [start + lengths[b] + t for t in range(width)]
                assert plan.write_at[r] == int(cache.offsets[b]) + lengths[b]
        assert not plan.visible[r, len(row) :].any() and not plan.own[r, len(row) :].any()
    assert (
        not plan.visible[len(rows) :].any()
        and not plan.count[len(rows) :].any()
        and not plan.own[len(rows) :].any()
    )


@settings(max_examples=40)
@given(cases())
def test_rotations(case):
    rows, count, lengths, _, phases, width = case
    _, plan = run(case)
    after = lengths_after(rows, count, lengths)
    frequencies = np.asarray(ROPE.frequencies)
    for r, n, b in listed_pairs(rows):
        own_start = sum(after[x] for x in rows[r][:-1])
        for t in range(width):
            position = own_start + lengths[rows[r][-1]] + t
            rotation = position - sum(after[x] for x in rows[r][:n]) + phases[b]
            np.testing.assert_allclose(
                plan.query_cos[r, n, t],
                np.cos(rotation * frequencies) * ROPE.attention_factor,
                atol=1e-6,
            )
            np.testing.assert_allclose(
                plan.query_sin[r, n, t],
                np.sin(rotation * frequencies) * ROPE.attention_factor,
                atol=1e-6,
            )
            if n == len(rows[r]) - 1:
                index = phases[b] + lengths[b] + t
                np.testing.assert_allclose(
                    plan.key_cos[r, t],
                    np.cos(index * frequencies) * ROPE.attention_factor,
                    atol=1e-6,
                )
                np.testing.assert_allclose(
                    plan.key_sin[r, t],
                    np.sin(index * frequencies) * ROPE.attention_factor,
                    atol=1e-6,
                )


def arena_tokens_read(plan, rows, count) -> dict[tuple[int, int, int], int]:
    """The number of items that show each (row, new token, arena index); entries after the last item
    must show nothing."""
    read: dict[tuple[int, int, int], int] = {}
    for tiles in (plan.shared, *plan.grouped, plan.private):
        assert tiles.start.shape[0] % tiles.at_once == 0
        assert not tiles.last[int(tiles.count) :].any()
        for i in range(int(tiles.count)):
            assert 0 <= tiles.start[i] <= ARENA - tiles.size
            for r, slot, last in zip(tiles.row[i], tiles.slot[i], tiles.last[i], strict=True):
                for t in range(count[r] if r < len(rows) else 0):
                    for token in range(int(tiles.first[i]), min(int(last[t]), tiles.size)):
                        place = int(r), t, int(tiles.start[i]) + token
                        read[place] = read.get(place, 0) + 1
                        # and it is rotated towards the block that it is read as
                        offset = int(plan.offsets[rows[r][slot]])
                        assert offset <= place[2] < offset + plan.lengths[rows[r][slot]]
    return read


@pytest.mark.parametrize(
    ("tiles", "groups"),
    mostly_slow([(True, (2, 4)), (True, ()), (False, (3,)), (False, ())], several=True),
    ids=["small tiles in groups", "small tiles", "default tiles in groups", "default tiles"],
)
@settings(max_examples=60)
@given(cases())
def test_tiles_show_everything_visible_exactly_once(tiles, groups, case):
    rows, count, lengths, _, _, _ = case
    _, plan = run(case, tiles=tiles, groups=groups)
    after = lengths_after(rows, count, lengths)
    expected = {}
    for r, n, b in listed_pairs(rows):
        for t in range(count[r]):
            seen = lengths[b] + t + 1 if n == len(rows[r]) - 1 else after[b]
            expected |= {(r, t, int(plan.offsets[b]) + token): 1 for token in range(seen)}
    assert arena_tokens_read(plan, rows, count) == expected


def seen_by(rows, count, after):
    """Block -> the (row, slot) pairs that read it: rows that bring a token, blocks that hold
    one."""
    readers = {b: [] for b in range(BLOCKS)}
    for r, n, b in listed_pairs(rows):
        if count[r] and after[b]:
            readers[b].append((r, n))
    return readers


@pytest.mark.parametrize(
    "groups", [pytest.param((), marks=pytest.mark.slow), (2, 4)], ids=["no groups", "groups"]
)
@settings(max_examples=60)
@given(cases())
def test_what_a_pass_reads_is_what_is_seen_each_block_once(groups, case):
    rows, count, lengths, _, _, _ = case
    _, plan = run(case, groups=groups)
    after = lengths_after(rows, count, lengths)
    assert int(plan.read_tokens) == sum(
        after[b] for b, pairs in seen_by(rows, count, after).items() if pairs
    )


@settings(max_examples=60)
@given(cases())
def test_a_block_goes_to_the_smallest_group_that_holds_its_readers(case):
    rows, count, lengths, _, _, _ = case
    _, plan = run(case, groups=(2, 4))
    after = lengths_after(rows, count, lengths)
    tiles = {
        size: [
            math.ceil(after[b] / size.size)
            for b, pairs in seen_by(rows, count, after).items()
            if low < len(pairs) <= high
        ]
        for size, low, high in ((PRIVATE, 0, 1), (SHARED, 4, ROWS))
    }
    assert int(plan.private.count) == sum(tiles[PRIVATE]) and int(plan.shared.count) == sum(
        tiles[SHARED]
    )
    readers = [
        len(pairs)
        for b, pairs in seen_by(rows, count, after).items()
        for _ in range(math.ceil(after[b] / GROUP.size))
    ]
    assert [int(t.count) for t in plan.grouped] == [
        sum(n == 2 for n in readers),
        sum(2 < n <= 4 for n in readers),
    ]


@settings(max_examples=60)
@given(cases())
def test_the_number_of_tiles_follows_fan_in_and_real_lengths(case):
    rows, count, lengths, _, _, _ = case
    _, plan = run(case)
    after = lengths_after(rows, count, lengths)
    readers = seen_by(rows, count, after)
    assert int(plan.shared.count) == sum(
        math.ceil(after[b] / SHARED.size) for b, pairs in readers.items() if len(pairs) > 1
    )
    assert int(plan.private.count) == sum(
        math.ceil(after[b] / PRIVATE.size) for b, pairs in readers.items() if len(pairs) == 1
    )


def test_cost_does_not_follow_capacities():
    """The default tiles: a long capacity costs nothing, a long length does, and sharing divides the
    cost by the rows."""
    lengths = [60, 60, 60, 0, 0, 0, 0]
    small, large = (
        build(lengths, [64, 64, 64, 4, 4, 4, 4]),
        build(lengths, [100, 100, 100, 20, 20, 20, 20]),
    )
    layout = pad_rows([[0, 1], [0, 2]], ROWS, LISTED)
    count = jnp.asarray([1, 1, 0, 0, 0], jnp.int32)
    for cache in (small, large):
        plan = planned(cache, layout, count, 1)
        assert int(plan.shared.count) == math.ceil(60 / SHARED.size) and int(
            plan.private.count
        ) == 2 * math.ceil(61 / PRIVATE.size)
    # No row brings a token: nothing is read.
    idle = planned(large, layout, jnp.zeros(5, jnp.int32), 1)
    assert int(idle.shared.count) == int(idle.private.count) == 0
    # One row alone: what was shared is private. The other's own block is not read.
    alone = planned(large, layout, jnp.asarray([1, 0, 0, 0, 0], jnp.int32), 1)
    assert int(alone.shared.count) == 0
    assert int(alone.private.count) == math.ceil(60 / PRIVATE.size) + math.ceil(61 / PRIVATE.size)


def test_many_rows_over_one_prefix_read_it_once():
    rows = [[0, r + 1] for r in range(5)]
    cache = build([200, 1, 1, 1, 1, 1, 0], [200, 4, 4, 4, 4, 4, 4])
    plan = planned(cache, pad_rows(rows, ROWS, LISTED), jnp.ones(5, jnp.int32), 1, tiles=False)
    assert int(plan.shared.count) == math.ceil(200 / plan.shared.size)
    assert int(plan.private.count) == 5
    assert int(plan.read_tokens) == 200 + 5 * 2


def test_rows_that_bring_nothing_see_nothing_but_their_blocks_still_count():
    cache = build([10, 4, 6, 0, 0, 0, 0], [20] * BLOCKS)
    plan = planned(
        cache,
        pad_rows([[0, 1, 2], [2, 0, 1]], ROWS, LISTED),
        jnp.asarray([0, 2, 0, 0, 0], jnp.int32),
        3,
    )
    np.testing.assert_array_equal(plan.visible[:2, :3], [[0, 0, 0], [6, 10, 5]])
    np.testing.assert_array_equal(plan.starts[:2, :3], [[0, 10, 16], [0, 6, 16]])


def test_a_token_sees_what_others_append_in_the_same_pass():
    cache = build([10, 4, 6, 0, 0, 0, 0], [20] * BLOCKS)
    plan = planned(
        cache,
        pad_rows([[0, 2, 1], [0, 1, 2]], ROWS, LISTED),
        jnp.asarray([1, 3, 0, 0, 0], jnp.int32),
        3,
    )
    np.testing.assert_array_equal(plan.visible[:2, :3], [[10, 9, 5], [10, 5, 7]])
    np.testing.assert_array_equal(plan.positions[:2, 0], [10 + 9 + 4, 10 + 5 + 6])


@pytest.mark.parametrize(
    ("lengths", "count", "kept", "fault"),
    [
        ([5, 3, 0], [3, 0], [3, 0], 0),
        ([5, 3, 0], [1, 3], [1, 2], Fault.OVERFLOW),
        ([6, 3, 0], [3, 0], [2, 0], Fault.OVERFLOW),
        ([8, 5, 0], [2, 1], [0, 0], Fault.OVERFLOW),
    ],
)
def test_overflow_takes_tokens_off_and_sets_a_fault(lengths, count, kept, fault):
    cache = build(lengths + [0] * 4, [8, 5, 9, 0, 0, 0, 0])
    plan = planned(
        cache,
        pad_rows([[2, 0], [0, 1]], ROWS, LISTED),
        jnp.asarray([*count, 0, 0, 0], jnp.int32),
        3,
    )
    assert np.asarray(plan.count).tolist() == [*kept, 0, 0, 0]
    assert int(plan.faults) == fault
    assert np.asarray(plan.lengths).tolist()[:3] == [lengths[0] + kept[0], lengths[1] + kept[1], 0]


def test_count_is_held_to_the_width():
    cache = build([0] * BLOCKS, [20] * BLOCKS)
    plan = planned(
        cache, pad_rows([[0], [1]], ROWS, LISTED), jnp.asarray([7, -2, 0, 0, 0], jnp.int32), 3
    )
    assert np.asarray(plan.count).tolist() == [3, 0, 0, 0, 0]


def test_rows_not_in_use_write_nothing():
    cache = build([3] * BLOCKS, [20] * BLOCKS)
    plan = planned(
        cache, pad_rows([[], [1]], ROWS, LISTED), jnp.asarray([2, 1, 3, 0, 0], jnp.int32), 3
    )
    assert np.asarray(plan.count).tolist() == [0, 1, 0, 0, 0]
    assert np.asarray(plan.lengths).tolist() == [3, 4, 3, 3, 3, 3, 3]
