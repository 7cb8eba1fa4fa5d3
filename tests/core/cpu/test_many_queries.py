"""Attention of many queries over blocks against sums in float64."""

import math

import numpy as np
import pytest

from jaxshare import cpu
from tests.core.cpu.one_layer import KV_HEADS, Blocks
from tests.helpers import mostly_slow

pytestmark = pytest.mark.skipif(not cpu.available(), reason="kernels are not for this machine")
CASES = [
    (3, 64, 70),
    (1, 80, 5),
    (8, 16, 3),
    (2, 128, 40),
    (1, 256, 33),
    (5, 48, 20),
    (9, 32, 1),
    (4, 24, 130),
]
"""Query heads of a kv head, their dimension, and the tokens that a row feeds."""


def random_blocks(group: int, dim: int, width: int, lengths: list[int]) -> Blocks:
    """Rows that share the first block, and one with a block of its own alone."""
    rng = np.random.default_rng(dim)
    lengths = [1100, *(width + length for length in lengths)]
    keys, values = (
        [rng.standard_normal((KV_HEADS, length, dim)) for length in lengths] for _ in range(2)
    )
    listed = [[0, i] for i in range(1, len(lengths))]
    listed[-1] = listed[-1][1:]
    q = rng.standard_normal((len(listed), width, KV_HEADS * group, dim))
    return Blocks(keys, values, listed, q, dim**-0.5)


@pytest.mark.parametrize(("group", "dim", "width"), mostly_slow(CASES, 3, several=True))
def test_each_width_is_that_of_sums_in_float64(group, dim, width):
    blocks = random_blocks(group, dim, width, [0, 1, 63, 64, 950, 0, 65])
    # Weights and the result are rounded to bfloat16, of 2**-9.
    np.testing.assert_allclose(blocks.of_kernel(), blocks.of_sums(), atol=0.02)


@pytest.mark.parametrize("step", [5, -5, 12, -12])
def test_scores_that_rise_and_fall_from_tile_to_tile(step):
    """Weights are relative to a score that may have to be replaced: 2 ** 200 is none of float32's
    numbers, and neither is 2 ** -200."""
    rng, dim, tokens = np.random.default_rng(0), 32, 1024 + 64
    keys = np.zeros((KV_HEADS, tokens, dim))
    # Whole numbers of at most 8 bits, which bfloat16 holds: half of a score each.
    keys[:, :, 0] = np.arange(tokens) // 64 * step // 2
    keys[:, :, 1:4] = rng.integers(-2, 3, (KV_HEADS, tokens, 3))
    own = np.zeros((KV_HEADS, 1, dim))
    values = [rng.standard_normal(each.shape) for each in (keys, own, own)]
    q = np.zeros((2, 1, KV_HEADS * 12, dim))
    q[..., 0], q[..., 1:4] = 2.0, rng.integers(-1, 2, (2, 1, KV_HEADS * 12, 3))
    # Of powers of two, so that no query is rounded.
    blocks = Blocks([keys, own, own], values, [[0, 1], [0, 2]], q, math.log(2))
    np.testing.assert_allclose(blocks.of_kernel(), blocks.of_sums(), atol=0.02)


@pytest.mark.parametrize("group", [1, 2, 7, 12])
@pytest.mark.parametrize("place", [0, 63, 200, 1099])
def test_a_key_that_is_no_number_is_seen_by_the_rows_that_see_it(group, place):
    blocks = random_blocks(group, 64, 1, [0, 70, 70])
    right = blocks.of_kernel()
    blocks.keys[0][:, place] = np.nan
    found = blocks.of_kernel()
    assert np.isnan(found[:2]).all()
    np.testing.assert_array_equal(found[2], right[2])


@pytest.mark.parametrize("group", [1, 2, 7, 12])
def test_a_row_of_which_no_score_is_a_number(group):
    blocks = random_blocks(group, 64, 1, [0, 70, 70])
    blocks.q[0] = np.nan
    found = blocks.of_kernel()
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1:]).all()
