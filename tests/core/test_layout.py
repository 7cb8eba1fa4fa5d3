"""Layouts: what is listed, what is written, forks, groups, and every refusal."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare import Layout


def rows_of(layout: Layout) -> list[list[int]]:
    return [[int(b) for b in row if b >= 0] for row in np.asarray(layout.blocks)]


def test_rows_blocks_and_what_they_write():
    layout = Layout.from_blocks([[0, 2, 1], [0, 1, 2], [], [4]], num_rows=6, width=5)
    np.testing.assert_array_equal(
        layout.blocks,
        [[0, 2, 1, -1, -1], [0, 1, 2, -1, -1], [-1] * 5, [4, -1, -1, -1, -1], [-1] * 5, [-1] * 5],
    )
    assert layout.blocks.dtype == jnp.int32 and layout.num_rows == 6
    np.testing.assert_array_equal(layout.listed, [3, 3, 0, 1, 0, 0])
    np.testing.assert_array_equal(layout.written, [1, 2, -1, 4, -1, -1])


def test_default_shape_is_as_small_as_it_can_be():
    assert Layout.from_blocks([[3], [1, 2]]).blocks.shape == (2, 2)
    assert Layout.from_blocks([[]]).blocks.shape == (1, 1)


def test_a_layout_is_a_frozen_pytree():
    layout = Layout.from_blocks([[0, 1]])
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.blocks = layout.blocks
    leaves, tree = jax.tree.flatten(layout)
    assert len(leaves) == 1 and isinstance(jax.tree.unflatten(tree, leaves), Layout)
    np.testing.assert_array_equal(jax.jit(lambda x: x.written)(layout), [1])


def test_groups_are_static_and_sorted():
    """They choose a program, and are no leaf: the only data is the blocks."""
    plain, grouped = Layout.from_blocks([[0, 1]]), Layout.from_blocks([[0, 1]], groups=[8, 2, 8])
    assert plain.groups == () and grouped.groups == (2, 8)
    leaves, tree = jax.tree.flatten(grouped)
    assert (
        len(leaves) == 1
        and jax.tree.unflatten(tree, leaves).groups == (2, 8)
        and tree != jax.tree.structure(plain)
    )
    seen = []

    @jax.jit
    def traced(layout):
        seen.append(layout.groups)
        return layout.written

    for layout in (
        plain,
        grouped,
        Layout.from_blocks([[1, 0]], groups=[2, 8]),
        Layout.from_blocks([[0, 1]], groups=[2]),
    ):
        traced(layout)
    assert seen == [(), (2, 8), (2,)]


def test_a_fork_keeps_the_groups():
    layout = Layout.from_blocks([[0, 1], [0, 2]], width=3, groups=[2, 4])
    assert layout.fork(0, 3).groups == (2, 4) and rows_of(layout.fork(0, 3)) == [
        [0, 3, 1],
        [0, 3, 2],
    ]
    assert jax.jit(Layout.fork)(layout, jnp.int32(0), jnp.int32(3)).groups == (2, 4)


@pytest.mark.parametrize(
    ("rows", "more", "words"),
    [
        (
            [[0], [1]],
            {"groups": [4, 1]},
            r"groups has 1; a group that reads a block together has at least 2 rows",
        ),
        ([[0], [1]], {"groups": [0]}, r"groups has 0"),
        ([[0], [1]], {"groups": [-2, 2]}, r"groups has -2"),
        ([[0, 1, 0]], {}, r"row 0 lists block 0 twice: \[0, 1, 0\]"),
        ([[5], [2, 2]], {}, r"row 1 lists block 2 twice"),
        ([[0, -1]], {}, r"row 0 lists block -1; blocks are numbered from 0"),
        ([[0, 1], [2, 1]], {}, r"rows 0 and 1 both write block 1"),
        ([[1], [], [0], [2, 0]], {}, r"rows 2 and 3 both write block 0"),
        ([[0], [1, 2, 3]], {"width": 2}, r"row 1 lists 3 blocks, but width is 2"),
        ([[0], [1]], {"num_rows": 1}, r"num_rows is 1, but 2 rows are given"),
        (
            [],
            {},
            r"num_rows is 0, but 0 rows are given; ask for at least that many, and at least 1",
        ),
    ],
)
def test_from_blocks_refuses(rows, more, words):
    with pytest.raises(ValueError, match=words):
        Layout.from_blocks(rows, **more)


def test_check_knows_the_blocks_of_a_cache():
    layout = Layout.from_blocks([[0, 3], [1, 2]])
    layout.check(4)
    with pytest.raises(ValueError, match="row 0 lists block 3, but the cache has blocks 0 to 2"):
        layout.check(3)


def test_check_is_silent_while_tracing_and_loud_before():
    wrong = Layout(jnp.asarray([[0, 1], [2, 1]], jnp.int32))

    @jax.jit
    def traced(layout):
        layout.check(2)
        return layout.blocks

    traced(wrong)
    with pytest.raises(ValueError, match="both write block 1"):
        wrong.check()


def inserted(row: list[int], block: int, tail: int) -> list[int]:
    if block not in row:
        return row
    at = row.index(block) + 1
    return [*row[:at], tail, *row[at:]]


ROWS = st.lists(st.lists(st.integers(0, 8), max_size=4, unique=True), min_size=1, max_size=5)


def distinct_writers(rows: list[list[int]]) -> bool:
    last = [row[-1] for row in rows if row]
    return len(last) == len(set(last))


@settings(max_examples=50)
@given(ROWS.filter(distinct_writers), st.integers(0, 8))
def test_fork_lists_the_tail_right_after_its_block(rows, block):
    layout = Layout.from_blocks(rows, num_rows=5, width=5)
    expected = [inserted(row, block, 9) for row in rows] + [[]] * (5 - len(rows))
    assert rows_of(layout.fork(block, 9)) == expected
    traced = jax.jit(Layout.fork)(layout, jnp.int32(block), jnp.int32(9))
    assert rows_of(traced) == expected
    assert rows_of(layout) == rows + [[]] * (5 - len(rows))


def test_fork_refuses_a_row_without_room():
    layout = Layout.from_blocks([[2], [0, 1]])
    with pytest.raises(
        ValueError,
        match=r"row that lists block 1 lists 2 blocks and has no room for its tail.*width=3",
    ):
        layout.fork(1, 3)
    assert rows_of(layout.fork(2, 3)) == [[2, 3], [0, 1]]
    assert rows_of(layout.fork(7, 3)) == [[2], [0, 1]]
