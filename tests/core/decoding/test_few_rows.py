"""Dispatches in which the first rows alone take part."""

import jax
import numpy as np
import pytest

from jaxshare.decoding.row_transfer import take_rows
from tests import helpers
from tests.core.decoding.test_sessions import PIECES, SAMPLED, Part, alone, run, together

SOON = 7


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [PIECES, None])
def test_the_first_rows_write_what_they_write_alone_while_the_others_wait(pieces):
    """A session of two rows and one row by itself; a row after them is in use, too."""
    parts = [Part(0, 2), Part(1, 1), Part(3, 1)]
    state, places = together(parts, [10**6] * 3)
    assert [rows.tolist() for rows in places] == [[0, 1], [3], [2]]
    waits = places[1]
    before = jax.tree.map(np.array, take_rows(state, waits))
    while bool(state.running[:3].any()):
        state = run(state, SOON, pieces=pieces, rows=3)
    for name in (*SAMPLED, "head", "num_pending", "pending", "has_logits"):
        np.testing.assert_array_equal(
            getattr(state, name)[waits], getattr(before, name), err_msg=name
        )
    state = run(state, pieces=pieces)
    block = 0
    for i, (part, rows) in enumerate(zip(parts, places, strict=True)):
        small = take_rows(state, rows, block=block, automaton=2 * i)
        for name in SAMPLED:
            expected = getattr(alone(part.number, part.rows), name)
            np.testing.assert_array_equal(getattr(small, name), expected, err_msg=f"{name} of {i}")
        block += len(part.capacities)
    assert int(state.cache.faults) == 0


@pytest.mark.slow
def test_the_log_has_the_first_rows_alone():
    prompts, passes = [[5, 7], [11], [13, 17, 19], [23]], 4
    whole, few = (
        helpers.run(helpers.tiny_state(prompts, record=passes), passes=passes, rows=rows)
        for rows in (None, 2)
    )
    for name in ("tokens", "counts"):
        found, expected = (np.asarray(getattr(each.record, name)) for each in (few, whole))
        np.testing.assert_array_equal(found[:, :2], expected[:, :2])
        assert expected[:, 2:4].any() and not found[:, 2:].any()


@pytest.mark.parametrize("rows", [0, 9])
def test_a_number_of_rows_that_there_is_not(rows):
    state, _ = together([Part(1, 1)], [10**6])
    with pytest.raises(ValueError, match=f"rows is {rows}; it must be from 1 to .* rows, 8"):
        run(state, rows=rows)
