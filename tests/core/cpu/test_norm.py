"""cpu_rms_norm against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import cpu
from jaxshare.models.layers import RMSNorm
from tests.helpers import on_device

if not cpu.available():
    pytest.skip("there are no kernels for this machine", allow_module_level=True)

from jaxshare.cpu.norm import cpu_rms_norm

EPSILON = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}
"""Half the distance from 1 to the next number."""

normed = jax.jit(cpu_rms_norm, static_argnames="eps")


def expected(x, scale, eps: float) -> np.ndarray:
    a, b = (np.asarray(each, np.float64) for each in (x, scale))
    return a / np.sqrt((a * a).mean(-1, keepdims=True) + eps) * b


@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 32, 64, 80, 144, 769, 4096])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_widths(width, rows):
    rng = np.random.default_rng(width)
    x = on_device(rng.normal(size=(rows, width)) * 3, "float32")
    scale = on_device(rng.normal(size=width), "float32")
    np.testing.assert_allclose(
        normed(x, scale, eps=1e-6), expected(x, scale, 1e-6), rtol=2e-6, atol=1e-30
    )


@pytest.mark.parametrize("given", EPSILON)
@pytest.mark.parametrize("kind", EPSILON)
def test_dtypes(given, kind):
    """The result has x's dtype, and is rounded before the scale, the scale, and after it."""
    rng = np.random.default_rng(0)
    x = on_device(rng.normal(size=(5, 96)), given)
    scale = on_device(rng.normal(size=96), kind)
    found = normed(x, scale, eps=1e-5)
    assert found.dtype == given
    tolerance = 4 * EPSILON[given]
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected(x, scale, 1e-5), rtol=tolerance, atol=1e-30
    )


def test_a_row_is_the_same_whatever_is_beside_it():
    x = on_device(np.random.default_rng(2).normal(size=(300, 200)), "float32")
    scale = jnp.ones(200)
    whole = normed(x, scale, eps=1e-6)
    np.testing.assert_array_equal(normed(x[7:8], scale, eps=1e-6), whole[7:8])


def test_zeros_and_what_is_not_a_number():
    x = jnp.zeros((4, 40)).at[1, 5].set(jnp.nan).at[2, 39].set(jnp.inf)
    found = np.asarray(normed(x, jnp.ones(40), eps=1e-6))
    assert (found[[0, 3]] == 0).all() and np.isnan(found[1]).all() and np.isnan(found[2, 39])


def test_the_module_gives_the_same_with_either_implementation():
    """Of any shape, and with a dtype that there is no kernel for."""
    x = on_device(np.random.default_rng(3).normal(size=(2, 3, 4, 24)), "bfloat16")
    ours, others = (RMSNorm(1e-6, implementation) for implementation in ("cpu", "xla"))
    params = others.init(jax.random.key(0), x)
    np.testing.assert_allclose(
        *(np.asarray(each.apply(params, x), np.float32) for each in (ours, others)), rtol=2**-7
    )
    with jax.enable_x64(True):
        wide = jnp.ones((2, 8), "float64")
        params = ours.init(jax.random.key(0), wide)
        assert ours.apply(params, wide).dtype == "float64"
