"""What a pass computes in the places of rows that feed nothing, and of shorter texts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import KVCache, Layout, cpu
from jaxshare.models import EMBEDDED, load

COUNT = np.asarray([3, 0, 1, 2, 0, 3], np.int32)
REAL = np.arange(3) < COUNT[:, None]
TOKENS = np.random.default_rng(0).integers(3, 300, (6, 3)).astype(np.int32)


def states(rows: np.ndarray, fill: int = 0) -> jax.Array:
    """The states after the last layer, of a pass of these rows; padding is of this token."""
    model = load(EMBEDDED)
    model = model.for_context(64)
    cache = KVCache.create(model.config, [16] * len(rows), jnp.float32)
    layout = model.adapted(Layout.from_blocks([[block] for block in range(len(rows))]))
    tokens = np.where(REAL, TOKENS, fill)[rows]
    given = jnp.asarray(tokens), jnp.asarray(COUNT[rows]), cache, layout
    return model.module.apply(model.variables, *given, method="hidden")[0]


@pytest.mark.slow
@pytest.mark.skipif(not cpu.available(), reason="XLA multiplies padding as it does all else")
def test_padding_is_zero_in_all_layers_where_products_of_zeros_cost_nothing():
    found = np.asarray(states(np.arange(6)))
    assert not found[~REAL].any() and found[REAL].any(axis=-1).all()


def test_tokens_are_the_same_beside_any_padding():
    whole = np.asarray(states(np.arange(6)))
    np.testing.assert_array_equal(whole[REAL], np.asarray(states(np.arange(6), fill=9))[REAL])
    used = np.flatnonzero(COUNT)
    np.testing.assert_allclose(
        np.asarray(states(used))[REAL[used]], whole[REAL], rtol=1e-5, atol=1e-5
    )
