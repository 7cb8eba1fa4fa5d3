"""cpu_expert_products against float64 NumPy, and the bits of a row beside others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import cpu
from tests.helpers import on_device

if not cpu.available():
    pytest.skip("there are no kernels for this machine", allow_module_level=True)

from jaxshare.cpu.experts.call import cpu_expert_products

EPSILON = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}
"""Half the distance from 1 to the next number."""


@functools.partial(jax.jit, static_argnames="dtype")
def multiplied(x, expert, kernels, dtype):
    return cpu_expert_products(x, expert, kernels, dtype)


def operands(rows: int, share: int, shape: tuple[int, int, int], dtype: str, most: int):
    """Rows whose experts are -1 to `most`, where those below 0 and above the last are none."""
    rng = np.random.default_rng(rows * 1000 + shape[2])
    x = on_device(rng.normal(size=(rows, shape[2])), dtype)
    expert = on_device(rng.integers(-1, most + 1, (rows, share)), jnp.int32)
    return x, expert, [on_device(rng.normal(size=shape), dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("result", ["given", "float32"])
@pytest.mark.parametrize(
    ("rows", "share", "shape"),
    [
        (1, 2, (4, 8, 64)),
        (5, 3, (3, 5, 7)),
        (1, 1, (1, 1, 1)),
        (130, 2, (2, 17, 33)),  # more rows of an expert than pass over a piece at once
        (64, 8, (16, 129, 40)),
        (0, 2, (4, 8, 8)),
    ],
)
def test_products_with_the_matrices_of_experts(rows, share, shape, dtype, result):
    result = dtype if result == "given" else result
    x, expert, kernels = operands(rows, share, shape, dtype, shape[0])
    found = multiplied(x, expert, kernels, result)
    given = (np.asarray(expert) >= 0) & (np.asarray(expert) < shape[0])
    at, slot = np.nonzero(given)
    for y, kernel in zip(found, kernels, strict=True):
        assert y.shape == (rows, share, shape[1]) and y.dtype == result
        a, b = (np.asarray(each, np.float64) for each in (x, kernel))
        chosen = b[np.asarray(expert)[given]]
        exact = np.einsum("sm,sfm->sf", a[at], chosen)
        bound = shape[2] * EPSILON["float32"] * np.einsum("sm,sfm->sf", abs(a[at]), abs(chosen))
        bound += EPSILON[result] * np.abs(exact)
        assert (np.abs(np.asarray(y.astype("float32"))[at, slot] - exact) <= bound).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [5, 67])  # of both kinds, where there is a matrix unit
def test_the_bits_of_a_row_are_the_same_beside_any_others(dtype, rows):
    x, expert, kernels = operands(rows, 2, (4, 21, 50), dtype, 3)
    whole = multiplied(x, expert, kernels, "float32")[0]
    for start, count in ((0, 1), (3, 2), (1, rows - 1)):
        some = slice(start, start + count)
        alone = jnp.full_like(expert, -1).at[some].set(expert[some])
        crowded = jnp.full_like(expert, 1).at[some].set(expert[some])
        used = np.asarray(expert[some]) >= 0
        for others in (alone, crowded):
            part = multiplied(x, others, kernels, "float32")[0]
            assert np.array_equal(np.asarray(whole[some])[used], np.asarray(part[some])[used])


def test_few_rows_are_the_same_whatever_their_number():
    x, expert, kernels = operands(7, 2, (4, 21, 50), "bfloat16", 3)
    whole = multiplied(x, expert, kernels, "float32")[0]
    for some in (slice(0, 1), slice(3, 5), slice(1, 7)):
        part = multiplied(x[some], expert[some], kernels, "float32")[0]
        used = np.asarray(expert[some]) >= 0
        assert np.array_equal(np.asarray(whole[some])[used], np.asarray(part)[used])


def test_what_there_is_no_kernel_for():
    x, expert, (kernel, other) = operands(2, 2, (4, 8, 16), "float32", 3)
    with pytest.raises(NotImplementedError, match="dtype"):
        cpu_expert_products(x, expert, [kernel.astype(jnp.bfloat16)], "float32")
    with pytest.raises(NotImplementedError, match="shape"):
        cpu_expert_products(x, expert, [kernel, other[:, :4]], "float32")
