"""The triton backend over quantised keys and values, interpreted on the CPU, against float64 numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import KVCache, Layout, Rope, block_attention, make_plan
from jaxshare.pallas.device import H200, Device, assume_device
from tests.core.pallas.interpreted import TOLERANCE
from tests.core.test_quantised_cache import attention_in_numpy
from tests.helpers import TINY, mostly_slow

pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)
INTERPRETED = Device("interpreted", 90, multiprocessors=3, interpret=True)
ROPE = Rope(tuple(1e4 ** -(np.arange(0, 40, 2) / 40)), 1.1)
HEADS, KV_HEADS = 4, 2


def filled(format: str, dim: int) -> tuple[KVCache, jax.Array]:
    """A cache in which two rows write tokens, and queries of their last ones."""
    config = dataclasses.replace(
        TINY, num_layers=1, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=dim, rope=ROPE
    )
    cache, rng = KVCache.create(config, [180, 70], approximate=format), np.random.default_rng(0)
    layout, count = Layout.from_blocks([[0], [1]]), jnp.asarray([150, 40], jnp.int32)
    k, v = (jnp.asarray(rng.normal(size=(2, 150, KV_HEADS, dim)), jnp.bfloat16) for _ in "kv")

    @jax.jit
    def written(cache):
        plan = make_plan(cache, layout, count, 150)
        return cache.append(0, k, v, plan).advance(plan)

    return written(cache), jnp.asarray(rng.normal(size=(2, 5, HEADS, dim)), jnp.bfloat16)


@pytest.mark.parametrize(
    ("format", "dim"), mostly_slow([("fp8", 64), ("int8", 80), ("fp8", 80)], several=True)
)
def test_attention_is_that_over_the_numbers_of_the_codes(format, dim):
    cache, q = filled(format, dim)
    rows, count = [[1, 0], [0, 1]], [5, 5]

    @jax.jit
    def attended(cache, q):
        plan = make_plan(cache, Layout.from_blocks(rows), jnp.asarray(count, jnp.int32), 5)
        cache = cache.append(0, q[..., ::2, :], q[..., 1::2, :], plan)
        arenas = cache.keys[0], cache.values[0]
        return block_attention(q, *arenas, plan, implementation="triton"), cache.advance(plan)

    with assume_device(INTERPRETED):
        out, cache = attended(cache, q)
    expected = attention_in_numpy(cache, rows, count, q)
    np.testing.assert_allclose(
        np.asarray(out).astype(np.float64), expected, atol=TOLERANCE[jnp.bfloat16]
    )


def test_what_a_backend_cannot_do_is_said():
    cache, q = filled("fp8", 64)
    planned = jax.jit(make_plan, static_argnums=3)
    plan = planned(cache, Layout.from_blocks([[0], [1]]), jnp.ones(2, jnp.int32), 5)
    arenas = cache.keys[0], cache.values[0]
    with (
        assume_device(H200),
        pytest.raises(NotImplementedError, match="keys and values as they are, not as codes"),
    ):
        block_attention(q, *arenas, plan, implementation="mosaic_gpu")
    old = Device("old", 80, multiprocessors=3, interpret=True)
    with assume_device(old), pytest.raises(NotImplementedError, match=r"capability 8\.9"):
        block_attention(q, *arenas, plan, implementation="triton")
