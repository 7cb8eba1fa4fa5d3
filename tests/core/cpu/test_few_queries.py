"""Attention of few queries over blocks of many lengths against sums in float64."""

import numpy as np
import pytest

from jaxshare import cpu
from tests.core.cpu.one_layer import KV_HEADS, Blocks
from tests.helpers import mostly_slow

pytestmark = pytest.mark.skipif(not cpu.available(), reason="kernels are not for this machine")
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 130, 577, 1023, 1024, 1025, 1090)
"""Of tiles and segments, one less and one more."""
CASES = [
    (3, 64),
    (4, 32),
    (7, 64),
    (40, 32),
    (1, 48),
    (2, 128),
    (1, 64),
    (2, 64),
    (4, 48),
    (3, 128),
    (4, 128),
    (5, 128),
    (16, 32),
    (17, 64),
    (8, 96),
    (12, 256),
    (33, 128),
]
"""Query heads of a kv head, and their dimension: up to 4 go over a segment as they are, others in
groups of 16, and several groups over a short segment otherwise than over a long one."""


@pytest.mark.parametrize(("group", "dim"), mostly_slow(CASES, 4, several=True))
def test_each_length_is_that_of_sums_in_float64(group, dim):
    rng = np.random.default_rng(group)
    keys, values = (
        [rng.standard_normal((KV_HEADS, length, dim)) for length in LENGTHS] for _ in range(2)
    )
    q = rng.standard_normal((len(LENGTHS), 1, KV_HEADS * group, dim))
    blocks = Blocks(keys, values, [[row] for row in range(len(LENGTHS))], q, dim**-0.5)
    # Weights and the result are rounded to bfloat16, of 2**-9.
    np.testing.assert_allclose(blocks.of_kernel(), blocks.of_sums(), atol=0.02)
