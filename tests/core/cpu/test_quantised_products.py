"""Products with quantised matrices against float64 NumPy with their dequantised numbers."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxshare import cpu
from jaxshare.models.linear import products
from jaxshare.quantised import FORMATS, QuantisedTensor, packed_codes
from tests.helpers import mostly_slow, on_device

if not cpu.available():
    pytest.skip("there are no kernels for this machine", allow_module_level=True)

from jaxshare.cpu import compiled, runtime
from jaxshare.cpu.amx import FEATURES as AMX
from jaxshare.cpu.compiled import this_machine
from jaxshare.cpu.experts.call import cpu_expert_products
from jaxshare.cpu.machine import Machine
from jaxshare.cpu.quantised import call, codes
from jaxshare.cpu.quantised.call import cpu_quantised_products
from jaxshare.cpu.quantised.lines import serves

EPSILON = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}
"""Half the distance from 1 to the next number."""
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def is_rounded(
    rows: int, dtype: str, *matrices: QuantisedTensor, machine: Machine | None = None
) -> bool:
    """Whether a product's kernel rounds the numbers of matrices to bfloat16 first."""
    machine = machine or this_machine()
    if dtype != "bfloat16" or machine.features >= AMX:
        return dtype == "bfloat16" and rows > call.few_rows(dtype, machine)
    whole = all(serves(call.Codes.of(each)) for each in matrices)
    return machine.dots_bf16 and rows > call.FEW and whole


needs_amx = pytest.mark.skipif(
    not this_machine().features >= AMX, reason="this machine has no matrix unit"
)


@functools.partial(jax.jit, static_argnames="dtype")
def multiplied(x, kernels, dtype):
    return cpu_quantised_products(x, kernels, dtype)


def random_matrix(
    shape: tuple[int, ...],
    format: str,
    group: int,
    *,
    scales: np.dtype | str = "float32",
    zeros: str | None = None,
    offsets: str | None = None,
    order: bool = False,
) -> QuantisedTensor:
    """Every code is as likely as any other; scales differ by row and group."""
    rng = np.random.default_rng(shape[-1] * 1000 + group)
    kind, groups = FORMATS[format], (*shape[:-1], shape[-1] // group)
    if kind.bits == 4:
        codes = packed_codes(rng.integers(0, 16, shape, np.uint8), group)
    elif format == "fp8":
        bits = rng.integers(0, 127, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7
        codes = bits.view(ml_dtypes.float8_e4m3fn)
    else:
        codes = rng.integers(-128, 128, shape, np.int8)
    exponents = rng.integers(-5, 3, groups).astype(np.float32)
    mantissas = 1 if scales == E8M0 else rng.uniform(1, 2, groups)
    signed = zeros is not None and not zeros.startswith("u")
    return QuantisedTensor(
        codes,
        (np.exp2(exponents) * mantissas).astype(scales),
        None if zeros is None else rng.integers(-5 if signed else 0, 16, groups).astype(zeros),
        None if offsets is None else rng.normal(size=groups).astype(offsets),
        rng.permutation(shape[-1]) if order else None,
        format=format,
    )


@pytest.mark.parametrize(
    ("format", "is_served"), [("nf4", False), ("mxfp4", False), ("int4", True)]
)
def test_machines_that_cannot_look_numbers_up_leave_formats_with_tables_to_xla(
    monkeypatch, format, is_served
):
    machine = Machine(4, 32, frozenset({"neon"}))
    monkeypatch.setattr(codes, "this_machine", lambda: machine)
    matrix = random_matrix((8, 64), format, 32)
    with (
        contextlib.nullcontext() if is_served else pytest.raises(NotImplementedError, match="look")
    ):
        codes.Codes.of(matrix)


def rows_of(count: int, width: int, dtype: str) -> jax.Array:
    rng = np.random.default_rng(count)
    return on_device(rng.normal(size=(count, width)), dtype)


def check(y: jax.Array, x: jax.Array, matrix: QuantisedTensor, *, rounded: bool = False) -> None:
    """Compares with the product with a matrix's numbers, which a kernel may have `rounded` first."""
    numbers = np.float64(matrix.dequantised(ml_dtypes.bfloat16 if rounded else np.float32))
    # Sums of zeros and offsets are taken away from sums of codes, which may be larger than numbers.
    largest = np.abs(numbers)
    if not rounded and (matrix.zeros is not None or matrix.offsets is not None):
        plain = dataclasses.replace(matrix, zeros=None, offsets=None)
        largest = np.abs(np.float64(plain.dequantised(np.float32))) * 2 + largest
    a = np.float64(x)
    exact = a @ numbers.T
    bound = (x.shape[1] + 2) * EPSILON["float32"] * (np.abs(a) @ largest.T)
    bound += EPSILON[str(y.dtype)] * np.abs(exact)
    assert y.shape == exact.shape
    assert (np.abs(np.float64(y) - exact) <= bound).all()


def found(x: jax.Array, matrix: QuantisedTensor, dtype: str = "float32") -> jax.Array:
    (y,) = multiplied(x, [jax.device_put(matrix)], dtype)
    return y


WAYS = [
    ("int8", 0),
    ("int4", 64),
    ("fp8", 128),
    ("mxfp4", 32),
    ("nf4", 64),
    ("int8", 128),
    ("int4", 32),
    ("int4", 128),
    ("fp8", 0),
    ("int8", 20),
    ("int4", 24),
    ("nf4", 32),
    ("int4", 320),
]
"""Formats and sizes of groups; 0 for all of a row."""


@pytest.mark.parametrize(
    ("format", "group", "dtype"),
    [
        *mostly_slow([(*way, "bfloat16") for way in WAYS], 2, several=True),
        *mostly_slow([(*way, "float32") for way in WAYS[1:]], 1, several=True),
        *mostly_slow([(*way, "float16") for way in WAYS], 0, several=True),
    ],
)
def test_few_rows(format, group, dtype):
    """Numbers of outputs beside those of a step; a last group that begins within a vector."""
    for out, width in ((37, 1920), (4, group or 769), (1, 3 * group or 7)):
        matrix = random_matrix((out, width), format, group or width)
        for rows in (1, 2):
            x = rows_of(rows, width, dtype)
            check(found(x, matrix), x, matrix)
    check(found(x, matrix, dtype), x, matrix)


@pytest.mark.parametrize(
    ("format", "group", "options"),
    mostly_slow(
        [
            ("int4", 64, {"zeros": "uint8", "scales": "float16"}),
            ("int4", 32, {"zeros": "int8", "offsets": "float32", "order": True}),
            ("int8", 64, {"zeros": "int32", "scales": ml_dtypes.bfloat16}),
            ("mxfp4", 32, {"scales": E8M0}),
            ("int4", 128, {"offsets": "float16"}),
            ("int8", 0, {"zeros": "int16", "offsets": ml_dtypes.bfloat16}),
            ("fp8", 64, {"offsets": "float32", "zeros": "int8"}),
        ],
        1,
        several=True,
    ),
)
def test_zeros_offsets_orders_and_dtypes_of_scales(format, group, options):
    matrix = random_matrix((21, 640), format, group or 640, **options)
    for dtype, rows in (("bfloat16", 1), ("float32", 3), ("bfloat16", 9)):
        x = rows_of(rows, 640, dtype)
        if rows <= call.few_rows(dtype, this_machine()) or this_machine().features >= AMX:
            check(found(x, matrix), x, matrix, rounded=is_rounded(rows, dtype, matrix))


@pytest.mark.parametrize(
    ("format", "group"),
    mostly_slow([way for way in WAYS if way[1] % 32 == 0], 3, several=True),
)
def test_some_rows(format, group):
    """Lines that are dequantised once, whole ones and such as end within 32 numbers, whose outputs are
    beside those of a step, and rows beside those of a block."""
    for out, width in ((37, 3 * 640), (4, group or 769), (1, 3 * group or 7)):
        matrix = random_matrix((out, width), format, group or width)
        for rows in (6, 8, 15):
            if rows <= call.few_rows("bfloat16", this_machine()):
                x = rows_of(rows, width, "bfloat16")
                rounded = is_rounded(rows, "bfloat16", matrix)
                check(found(x, matrix), x, matrix, rounded=rounded)


@needs_amx
@pytest.mark.parametrize(
    ("format", "group"),
    mostly_slow([way for way in WAYS if way[1] % 32 == 0 and way[1] < 320], 2, several=True),
)
def test_many_rows_on_the_matrix_unit(format, group):
    """More inputs than are dequantised at once, and more rows than are multiplied at once."""
    for out, width in ((37, 1152), (16, group or 770), (100, 5 * group or 2)):
        matrix = random_matrix((out, width), format, group or width)
        for rows in (3, 8, 17, 65, 300):
            x = rows_of(rows, width, "bfloat16")
            check(found(x, matrix), x, matrix, rounded=True)
    check(found(x, matrix, "bfloat16"), x, matrix, rounded=True)


@pytest.mark.parametrize("rows", [1, 40])
def test_matrices_of_several_kinds_in_one_product(rows):
    """Plain ones beside those of several formats, and one that has an order."""
    kernels = [
        random_matrix((40, 256), "int4", 64),
        np.random.default_rng(0).normal(size=(33, 256)).astype(ml_dtypes.bfloat16),
        random_matrix((17, 256), "int8", 256),
        random_matrix((48, 256), "int4", 64, order=True),
        random_matrix((16, 256), "int4", 64, zeros="uint8"),
    ]
    x = rows_of(rows, 256, "bfloat16")
    multiply = jax.jit(lambda x, kernels: products(x[None], kernels, "float32", None))
    ys = multiply(x, jax.device_put(kernels))
    packed = [each for each in kernels if isinstance(each, QuantisedTensor)]
    # What is left to XLA is rounded, too.
    left = rows > call.few_rows("bfloat16", this_machine())
    rounded = left or is_rounded(rows, "bfloat16", *packed)
    for y, kernel in zip(ys, kernels, strict=True):
        if isinstance(kernel, QuantisedTensor):
            check(y[0], x, kernel, rounded=rounded)
        else:
            np.testing.assert_allclose(y[0], np.float64(x) @ np.float64(kernel).T, atol=1e-3)


def test_a_row_is_the_same_whatever_is_beside_it():
    for dtype in ("bfloat16", "float32"):
        most = call.few_rows(dtype, this_machine())
        matrix = random_matrix((21, 192), "int4", 64, zeros="uint8")
        x = rows_of(most, 192, dtype)
        by_kind = [count for count in (1, call.FEW, call.FEW + 1, most // 2, most) if count <= most]
        whole = {is_rounded(count, dtype, matrix): found(x[:count], matrix) for count in by_kind}
        for count in by_kind:
            same = whole[is_rounded(count, dtype, matrix)]
            np.testing.assert_array_equal(found(x[:count], matrix), same[:count])


@pytest.mark.parametrize("rows", [4, 13])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_of_zeros_have_results_of_zeros_and_change_no_others(dtype, rows):
    """By both kernels of few rows, with zeros of the codes that would be taken away."""
    matrix = random_matrix((21, 192), "int4", 64, zeros="uint8")
    if not this_machine().features >= AMX:  # more are left to XLA
        rows = min(rows, call.few_rows(dtype, this_machine()))
    x = rows_of(rows, 192, dtype)
    whole = found(x, matrix)
    for kept in ([], [2], [*range(0, rows, 2)]):
        used = np.isin(np.arange(rows), kept)
        y = np.asarray(found(jnp.where(used[:, None], x, -0.0), matrix))
        assert not y[~used].any()
        np.testing.assert_array_equal(y[used], np.asarray(whole)[used])


@pytest.mark.parametrize(
    ("rows", "dtype", "matrix", "reason"),
    [
        (65, "float32", random_matrix((40, 64), "int8", 64), "XLA is as fast for 65 rows"),
        (
            1,
            "float32",
            random_matrix((4, 64), "int8", 64, scales="float64"),
            "no kernel for float64",
        ),
        pytest.param(
            9, "bfloat16", random_matrix((40, 640), "int4", 320), "groups of 320", marks=needs_amx
        ),
        pytest.param(
            9, "bfloat16", random_matrix((9, 64), "int4", 64), "less than 16 rows", marks=needs_amx
        ),
    ],
)
def test_what_it_leaves_to_xla(rows, dtype, matrix, reason):
    x = rows_of(rows, matrix.shape[-1], dtype)
    with pytest.raises(NotImplementedError, match=reason):
        cpu_quantised_products(x, [matrix], "float32")
    (y,) = products(x, [jax.device_put(matrix)], "float32", None)
    check(y, x, matrix, rounded=dtype == "bfloat16")


# Experts.


def check_experts(rows: int, experts: int, dtype: str, kernels: list) -> None:
    rng = np.random.default_rng(rows)
    width = kernels[0].shape[-1]
    x = rows_of(rows, width, dtype)
    expert = on_device(rng.integers(-1, experts + 1, (rows, 2)), jnp.int32)
    multiply = jax.jit(lambda x, e, k: cpu_expert_products(x, e, k, "float32"))
    ys = multiply(x, expert, jax.device_put(kernels))
    # The matrix unit takes groups of whole tiles; with others products stay exact.
    packed = [each for each in kernels if isinstance(each, QuantisedTensor)]
    on_unit = all(each.group % 32 == 0 or each.group == width for each in packed)
    many = dtype == "bfloat16" and this_machine().features >= AMX and rows * 2 >= 6 * experts
    many = many and on_unit
    for y, kernel in zip(ys, kernels, strict=True):
        for e in range(experts):
            at, slot = np.nonzero(np.asarray(expert) == e)
            if isinstance(kernel, QuantisedTensor):
                check(y[at, slot], x[at], kernel[e], rounded=many)
            else:
                exact = np.float64(x[at]) @ np.float64(kernel[e]).T
                np.testing.assert_allclose(y[at, slot], exact, atol=1e-3)


@pytest.mark.parametrize(
    ("format", "group", "dtype", "options"),
    mostly_slow(
        [
            ("mxfp4", 32, "bfloat16", {}),
            ("int4", 64, "bfloat16", {"zeros": "uint8", "scales": "float16"}),
            ("int8", 0, "float32", {"offsets": "float32"}),
            ("fp8", 64, "bfloat16", {}),
            ("int4", 24, "bfloat16", {}),
            ("nf4", 64, "float16", {}),
        ],
        1,
        several=True,
    ),
)
def test_matrices_of_experts(format, group, dtype, options):
    """Few rows an expert, many, and more than are multiplied at once."""
    width = 9 * group or 200
    kernels = [random_matrix((3, 37, width), format, group or width, **options)] * 2
    for rows in (1, 5, 40, 450):
        check_experts(rows, 3, dtype, kernels)


def test_experts_whose_matrices_are_of_several_kinds():
    plain = np.random.default_rng(0).normal(size=(4, 20, 64)).astype(ml_dtypes.bfloat16)
    kernels = [
        random_matrix((4, 20, 64), "int4", 32),
        plain,
        random_matrix((4, 20, 64), "int8", 64),
    ]
    for rows in (2, 60):
        check_experts(rows, 4, "bfloat16", kernels)


def test_experts_that_have_an_order_are_left_to_xla():
    matrix = random_matrix((2, 8, 64), "int4", 32, order=True)
    with pytest.raises(NotImplementedError, match="an order"):
        cpu_expert_products(rows_of(1, 64, "float32"), jnp.zeros((1, 1), int), [matrix], "float32")


# Other machines.


@pytest.mark.parametrize(
    ("lacks", "lanes"),
    mostly_slow(
        [(("amx-", "avx512"), 8), (("amx-", "avx512bf16"), 16), (("amx-",), 16)], several=True
    ),
)
def test_lesser_machines_find_the_same(monkeypatch, lacks, lanes):
    whole = this_machine()
    if whole.lanes < lanes:
        pytest.skip("this machine is a lesser one")
    features = frozenset(f for f in whole.features if not f.startswith(lacks))
    machine = Machine(lanes, 2 * lanes, features)
    for module in (runtime, compiled, call):
        monkeypatch.setattr(module, "this_machine", lambda: machine)
    monkeypatch.setattr(
        call, "register", lambda name, kernel: runtime.register(f"{name}.{lacks}", kernel)
    )
    compiled._target_machine.cache_clear()
    try:
        for format, group in (("int4", 64), ("int8", 20), ("fp8", 64), ("nf4", 32)):
            matrix = random_matrix((9, 320 if group != 20 else 300), format, group, zeros="int8")
            rows = min(7, call.few_rows("bfloat16", machine))
            x = rows_of(rows, matrix.shape[-1], "bfloat16")
            device = jax.device_put(matrix)
            rounded = is_rounded(rows, "bfloat16", matrix, machine=machine)
            check(cpu_quantised_products(x, [device], "float32")[0], x, matrix, rounded=rounded)
    finally:
        compiled._target_machine.cache_clear()
