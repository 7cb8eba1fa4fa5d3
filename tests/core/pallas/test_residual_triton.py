"""The kernel that adds and normalises, interpreted on the CPU, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare.pallas.device import Device
from jaxshare.pallas.residual_triton import add_and_normalise
from tests.helpers import on_device

INTERPRETED = Device("interpreted", 90, multiprocessors=3, interpret=True)
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-24}
"""Relative, of one rounding."""
EPS = 1e-5

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


def inputs(tokens: int, width: int, pieces: int, dtype: str, of_pieces: str, seed: int = 0):
    rng = np.random.default_rng(seed)
    return (
        on_device(rng.standard_normal((tokens, width)), dtype),
        on_device(rng.standard_normal((pieces, tokens, width)), of_pieces),
        on_device(rng.uniform(0.5, 2, width), dtype),
    )


def check(device, x, pieces, scale, **options) -> None:
    """Each sum and norm is as near as its roundings let it be."""
    added, normed = jax.jit(lambda *given: add_and_normalise(*given, EPS, device, **options))(
        x, pieces, scale
    )
    assert added.dtype == normed.dtype == x.dtype
    unit = ROUNDING[str(x.dtype)]
    wide, parts, factors, found, of_sum = (
        np.asarray(each, np.float64) for each in (x, pieces, scale, added, normed)
    )
    part = parts.sum(0) * options.get("multiplier", 1)
    # float32 sums of pieces, then the sum of them, its multiple and the sum with x, each rounded.
    bound = 2**-22 * np.abs(parts).sum(0) + unit * (2.1 * np.abs(part) + np.abs(wide + part))
    assert (np.abs(found - wide - part) <= bound).all()
    factors = 1 + factors if options.get("adds_one") else factors
    expected = found / np.sqrt(np.square(found).mean(-1, keepdims=True) + EPS) * factors
    np.testing.assert_allclose(of_sum, expected, rtol=2.1 * unit + 2**-20)


@pytest.mark.parametrize(
    ("tokens", "width", "pieces"),
    [(1, 64, 1), (3, 64, 16), (2, 96, 2), (1, 5120, 8), (5, 1, 3), (2, 2880, 1)],
)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_sum_and_norm(tokens, width, pieces, dtype):
    check(INTERPRETED, *inputs(tokens, width, pieces, dtype, "float32"))


@pytest.mark.parametrize(("adds_one", "multiplier"), [(True, 0.22), (False, 0.22), (True, 1.0)])
def test_multiples_and_norms_that_add_one(adds_one, multiplier):
    given = inputs(3, 96, 2, "bfloat16", "bfloat16")
    check(INTERPRETED, *given, adds_one=adds_one, multiplier=multiplier)


def test_a_token_that_is_not_finite_changes_no_other():
    x, pieces, scale = inputs(4, 64, 2, "bfloat16", "float32")
    clean = add_and_normalise(x, pieces, scale, EPS, INTERPRETED)
    wrong = add_and_normalise(x, pieces.at[1, 2, 5].set(jnp.inf), scale, EPS, INTERPRETED)
    others = np.arange(4) != 2
    for one, other in zip(clean, wrong, strict=True):
        np.testing.assert_array_equal(other[others], one[others])
    assert not np.isfinite(np.asarray(wrong[1][2], np.float32)).all()
