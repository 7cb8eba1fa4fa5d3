"""cpu_products against float64 NumPy, at the edges of its tiles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import cpu
from jaxshare.models.linear import product, products
from jaxshare.pallas.device import H200, assume_device
from tests.helpers import on_device

if not cpu.available():
    pytest.skip("there are no kernels for this machine", allow_module_level=True)

from jaxshare.cpu.amx import FEATURES as AMX
from jaxshare.cpu.compiled import this_machine
from jaxshare.cpu.matrices.call import cpu_products, few_rows

EPSILON = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}
"""Half the distance from 1 to the next number."""

needs_amx = pytest.mark.skipif(
    not this_machine().features >= AMX, reason="this machine has no matrix unit"
)


@functools.partial(jax.jit, static_argnames="dtype")
def multiplied(x, kernels, dtype):
    return cpu_products(x, kernels, dtype)


def operands(rows: int, width: int, sizes: tuple[int, ...], dtype: str):
    rng = np.random.default_rng(rows * 1000 + width)
    x = on_device(rng.normal(size=(rows, width)), dtype)
    return x, [on_device(rng.normal(size=(n, width)), dtype) for n in sizes]


def check(rows: int, width: int, sizes: tuple[int, ...], given: str, result: str) -> None:
    x, kernels = operands(rows, width, sizes, given)
    found = multiplied(x, kernels, result)
    assert len(found) == len(kernels)
    for y, kernel in zip(found, kernels, strict=True):
        a, b = (np.asarray(each, np.float64) for each in (x, kernel))
        # Sums of `width` products, each of which may be rounded, and the rounding of the result.
        bound = width * EPSILON["float32"] * (np.abs(a) @ np.abs(b).T)
        bound += EPSILON[result] * np.abs(a @ b.T)
        assert y.shape == (rows, kernel.shape[0]) and y.dtype == result
        assert (np.abs(np.asarray(y, np.float64) - a @ b.T) <= bound).all()


MOST = {dtype: few_rows(dtype, this_machine()) for dtype in EPSILON}
"""The rows that the vector unit multiplies on this machine."""


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        (dtype, rows)
        for dtype, most in MOST.items()
        for rows in (1, 2, 3, 5, 8, 13, 16, 31, 64)
        if rows <= most
    ],
)
@pytest.mark.parametrize("result", ["given", "float32"])
def test_few_rows(given, rows, result):
    """Widths and numbers of outputs on the vectors, beside them, and smaller than one."""
    for width, sizes in [(64, (48,)), (1, (1,)), (7, (3, 70)), (33, (17, 5, 1)), (769, (40, 129))]:
        check(rows, width, sizes, given, given if result == "given" else result)


@needs_amx
@pytest.mark.parametrize("rows", [3, 4, 16, 17, 31, 64, 65, 200, 513])
@pytest.mark.parametrize("result", ["bfloat16", "float32"])
def test_many_rows_on_the_matrix_unit(rows, result):
    for width, sizes in [(2, (16,)), (64, (32, 64)), (34, (17, 95)), (770, (40, 129, 32))]:
        check(rows, width, sizes, "bfloat16", result)


def test_a_row_is_the_same_whatever_is_beside_it():
    """Up to the number of rows at which another kernel takes over."""
    for dtype, most in MOST.items():
        x, kernels = operands(most, 300, (70,), dtype)
        (whole,) = multiplied(x, kernels, "float32")
        for count in (1, most // 2):
            (part,) = multiplied(x[:count], kernels, "float32")
            np.testing.assert_array_equal(part, whole[:count])


@pytest.mark.parametrize("dtype", EPSILON)
def test_rows_of_zeros_have_results_of_zeros_and_change_no_others(dtype):
    """Wherever they are, with either sign; some widths are no multiple of eight bytes."""
    rng = np.random.default_rng(3)
    for width, sizes in [(300, (70, 3)), (33, (5,)), (1, (1,))]:
        x, kernels = operands(MOST[dtype], width, sizes, dtype)
        for used in (0, 1, len(x) // 2, len(x) - 1):
            kept = np.sort(rng.permutation(len(x))[:used])
            signs = on_device(rng.choice([-1, 1], x.shape), dtype)
            given = (0 * signs).at[kept].set(x[kept])
            alone = multiplied(x[kept], kernels, "float32") if used else ()
            for i, y in enumerate(multiplied(given, kernels, "float32")):
                assert not np.delete(y, kept, axis=0).any()
                if used:
                    np.testing.assert_array_equal(np.asarray(y)[kept], alone[i])


def test_a_row_that_is_nearly_zero_is_none_of_zeros():
    x, kernels = operands(5, 64, (33,), "float32")
    last = jnp.zeros_like(x).at[2, -1].set(x[2, -1])
    (y,) = multiplied(last, kernels, "float32")
    np.testing.assert_allclose(y[2], x[2, -1] * kernels[0][:, -1], rtol=1e-6)


def test_what_is_not_a_number_stays_in_its_row():
    x, kernels = operands(4, 40, (33,), "float32")
    (y,) = multiplied(x.at[1, 3].set(jnp.nan).at[2, 0].set(jnp.inf), kernels, "float32")
    np.testing.assert_array_equal(np.isfinite(y).all(axis=1), [True, False, False, True])
    assert np.isnan(y[1]).all() and np.isinf(y[2]).all()


@pytest.mark.parametrize(
    ("rows", "dtype", "kernel_dtype", "reason"),
    [
        (MOST["float32"] + 1, "float32", "float32", "XLA is as fast for .* rows of float32"),
        (1, "float64", "float64", "no kernel for float64"),
        (1, "float32", "bfloat16", "differ in dtype"),
    ],
)
def test_what_it_leaves_to_xla(rows, dtype, kernel_dtype, reason):
    with jax.enable_x64(dtype == "float64"):
        x, kernel = jnp.ones((rows, 8), dtype), jnp.ones((4, 8), kernel_dtype)
        with pytest.raises(NotImplementedError, match=reason):
            cpu_products(x, [kernel], "float32")
        if dtype == kernel_dtype:  # which the layers do
            (y,) = products(x, [kernel], "float32", None)
            assert y.dtype == "float32" and (y == 8).all()


@needs_amx
def test_small_matrices_are_left_to_xla():
    x, (large, small) = operands(20, 16, (40, 15), "bfloat16")
    with pytest.raises(NotImplementedError, match="less than 16 rows"):
        cpu_products(x, [large, small], "float32")
    found = products(x, [large, small], "float32", None)
    for y, kernel in zip(found, (large, small), strict=True):
        np.testing.assert_allclose(y, np.float32(x) @ np.float32(kernel).T, rtol=1e-5, atol=1e-4)


def test_only_a_pass_that_may_use_them_does():
    x, kernels = operands(2, 8, (4,), "float32")

    def calls(implementation):
        program = jax.make_jaxpr(lambda x, k: products(x, k, "float32", implementation))
        return "ffi_call" in str(program(x, kernels))

    assert calls(None) and calls("cpu") and calls(("cpu", "xla"))
    assert not calls("xla") and not calls("reference")
    with assume_device(H200):  # for which programs are compiled here
        assert not calls(None)


@pytest.mark.parametrize(("rows", "dtype"), [(1, "bfloat16"), (1, "float32"), (2, "bfloat16")])
def test_xla_multiplies_one_row_as_two_on_a_cpu_alone(rows, dtype):
    x, [kernel] = operands(rows, 8, (4,), dtype)

    def multiplied_rows() -> int:
        program = jax.make_jaxpr(lambda x, k: product(x, k))(x, kernel)
        return 2 * rows if "concatenate" in str(program) else rows

    assert multiplied_rows() == (2 if dtype == "bfloat16" else rows)
    with assume_device(H200):
        assert multiplied_rows() == rows
        found = product(x, kernel)
    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64).T
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
