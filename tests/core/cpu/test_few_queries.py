"""Attention of one to four queries over blocks of many lengths against sums in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import KVCache, Layout, Rope, block_attention, cpu, make_plan
from tests.helpers import mostly_slow

pytestmark = pytest.mark.skipif(not cpu.available(), reason="kernels are not for this machine")
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 130, 577, 1023, 1024, 1025, 1090)
"""Of tiles and segments, one less and one more."""
CASES = [(3, 64), (4, 32), (1, 48), (2, 128), (1, 64), (2, 64), (4, 48), (3, 128), (4, 128)]
"""Query heads of a kv head, and their dimension."""


@dataclasses.dataclass(frozen=True)
class OneLayer:
    """A cache of two kv heads whose keys are not rotated by their tokens' places."""

    head_dim: int
    num_layers: int = 1
    num_kv_heads: int = 2
    layer_ropes: tuple[Rope, ...] = ()

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def rope(self) -> Rope:
        return Rope.none()


@pytest.mark.parametrize(("group", "dim"), mostly_slow(CASES, 2, several=True))
def test_each_length_is_that_of_sums_in_float64(group, dim):
    rng, config = np.random.default_rng(group), OneLayer(dim)
    rows, heads = len(LENGTHS), 2 * group
    cache = KVCache.create(config, [length + 3 for length in LENGTHS], jnp.bfloat16)
    # What no token has been written to may hold anything.
    keys, values = (np.full(cache.keys[0].shape, np.nan, np.float32) for _ in range(2))
    offsets, found = np.asarray(cache.offsets), []
    for offset, length in zip(offsets, LENGTHS, strict=True):
        for each in (keys, values):
            each[:, offset : offset + length] = rng.standard_normal((2, length, dim))
    kept = [jnp.asarray(each, jnp.bfloat16) for each in (keys, values)]
    q = jnp.asarray(rng.standard_normal((rows, 1, heads, dim)), jnp.bfloat16)
    lengths = jnp.asarray(LENGTHS, jnp.int32) - 1  # a pass has appended the last one
    cache = dataclasses.replace(cache, keys=(kept[0],), values=(kept[1],), lengths=lengths)
    layout = Layout.from_blocks([[row] for row in range(rows)])
    plan = make_plan(cache, layout, jnp.ones(rows, jnp.int32), 1, rope=config.rope)
    out = block_attention(q, *kept, plan, scale=dim**-0.5, implementation="cpu")
    exact_keys, exact_values, exact_q = (np.asarray(each, np.float64) for each in (*kept, q))
    for row, (offset, length) in enumerate(zip(offsets, LENGTHS, strict=True)):
        for head in range(heads):
            taken = slice(offset, offset + length)
            scores = exact_keys[head // group, taken] @ exact_q[row, 0, head] * dim**-0.5
            weights = np.exp(scores - scores.max())
            found.append(weights @ exact_values[head // group, taken] / weights.sum())
    expected = np.asarray(found).reshape(out.shape)
    # Weights and the result are rounded to bfloat16, of 2**-9.
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=0.02)
