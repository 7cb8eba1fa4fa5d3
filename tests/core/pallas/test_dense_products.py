"""Products with quantised matrices in the kernel for Triton, interpreted on the CPU, against float64
numpy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxshare.models.linear import products
from jaxshare.pallas.dense_products_triton import choose_tiles
from jaxshare.pallas.device import H200, Device, assume_device
from jaxshare.pallas.matrix_codes import e4m3_bytes, in_arrays, nibbles, signed_bytes
from jaxshare.quantised import QuantisedTensor, packed_codes, quantised
from jaxshare.sharding import make_mesh, on_each
from tests.core.pallas.products import INTERPRETED, compare, product, random_case
from tests.helpers import mostly_slow, on_device

pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)


@pytest.mark.parametrize(
    ("shape", "format", "group", "zeros", "ordered"),
    mostly_slow(
        [
            # Three groups of the least that are scaled as sums, two blocks of outputs.
            ((5, 70, 384), "int4", 128, True, True),
            ((1, 33, 200), "int8", None, False, False),  # one scale a row, a tile that is not full
            ((3, 20, 2048), "int4", 64, False, False),  # pieces of the inputs
            ((17, 130, 256), "int8", 128, True, False),
            ((131, 40, 192), "int4", 32, True, False),  # small groups, two blocks of rows
            ((2, 20, 4096), "int8", None, True, False),  # pieces with one scale
            ((260, 140, 136), "int4", None, True, True),
        ],
        3,
        several=True,
    ),
)
def test_integers(shape, format, group, zeros, ordered):
    x, tensor, matrix = random_case(0, *shape, format, group, zeros, ordered)
    if group == 32:  # where numbers are rounded as the rows are
        matrix = np.asarray(on_device(matrix, jnp.float32).astype(jnp.bfloat16), np.float64)
    compare(x, tensor, matrix)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 150),
    st.integers(1, 150),
    st.integers(1, 5),
    st.sampled_from([("int4", 64), ("int4", 128), ("int8", 64), ("int8", 128)]),
    st.booleans(),
)
def test_random_shapes(rows, outputs, groups, kind, zeros):
    format, group = kind
    compare(*random_case(rows, rows, outputs, groups * group, format, group, zeros))


@pytest.mark.parametrize(
    ("format", "group", "dtype"),
    mostly_slow(
        [
            ("fp8", 128, jnp.bfloat16),
            ("nf4", 64, jnp.bfloat16),
            ("fp8", None, jnp.float16),
            ("mxfp4", 32, jnp.float16),
        ],
        2,
        several=True,
    ),
)
def test_floats(format, group, dtype):
    rng = np.random.default_rng(1)
    x = on_device(rng.normal(size=(3, 384)), dtype)
    tensor = quantised(rng.normal(size=(40, 384)).astype(np.float32), format, group)
    # The right numbers are those of the tensor's own host code.
    matrix = np.asarray(tensor.dequantised(np.float32))
    if format != "fp8":  # whose codes are exact in the rows' dtype
        matrix = np.asarray(on_device(matrix).astype(dtype))
    compare(x, tensor, matrix.astype(np.float64))


def test_offsets():
    rng = np.random.default_rng(2)
    x = on_device(rng.normal(size=(3, 64)), jnp.bfloat16)
    codes = rng.integers(0, 16, size=(20, 64))
    scales, offsets = rng.uniform(0.5, 1.5, size=(2, 20, 2)).astype(np.float32)
    tensor = QuantisedTensor(packed_codes(codes, 32), scales, None, offsets, format="int4")
    numbers = (codes.reshape(20, 2, 32) - 8) * scales[..., None] - offsets[..., None]
    rounded = on_device(numbers.reshape(20, 64), jnp.float32).astype(jnp.bfloat16)
    compare(x, tensor, np.asarray(rounded).astype(np.float64))


def test_results_are_rounded_to_the_dtype_that_is_asked_for():
    x, tensor, matrix = random_case(3, 4, 30, 2048, "int4", 128)
    compare(x, tensor, matrix, dtype=jnp.bfloat16, tolerance=2**-8)


def test_layers_use_it_on_a_gpu_and_xla_serves_the_rest():
    x, tensor, matrix = random_case(4, 6, 20, 128, "int4", 128)
    kernel = jax.device_put(tensor)

    def called(x, implementation=None, device=INTERPRETED):
        with assume_device(device):
            # a function of its own each time, which JAX has not traced yet
            text = str(jax.make_jaxpr(lambda x: products(x, [kernel], x.dtype, implementation))(x))
        return "pallas_call" in text

    batch = x.reshape(2, 3, 128)
    with assume_device(INTERPRETED):
        (y,) = products(batch, [kernel], jnp.float32, ("mosaic_gpu", "xla"))
    expected = (np.asarray(x).astype(np.float64) @ matrix.T).reshape(2, 3, 20)
    np.testing.assert_allclose(np.asarray(y), expected, atol=1e-6 * np.abs(expected).max())
    assert called(x) and called(x, "triton")
    assert not called(x, "xla")
    assert not called(x.astype(jnp.float32))
    assert not called(x, device=Device("old", 75, 3, True))


def test_tensor_parallel_parts_are_multiplied_where_they_are():
    """Each device has its rows of codes, or its groups, whose products are summed."""
    x, tensor, matrix = random_case(6, 3, 40, 256, "int4", 64, zeros=True)
    mesh, kernel = make_mesh(tensor=2), jax.device_put(tensor)

    def run(parts: P, summed: bool):
        def multiply(x, kernel):
            (y,) = products(x, [kernel], jnp.float32, "triton")
            return jax.lax.psum(y, "tensor") if summed else y

        ins, out = (P(None, "tensor"), P()) if summed else (P(), P(None, "tensor"))
        # Groups of bytes lie one after the other, so that a half of them is a half of the bytes.
        spec = jax.tree.map(lambda _: parts, kernel)
        with assume_device(INTERPRETED):
            return jax.jit(on_each(multiply, mesh, in_specs=(ins, spec), out_specs=out))(x, kernel)

    wanted = np.asarray(x).astype(np.float64) @ matrix.T
    for y in (run(P("tensor"), False), run(P(None, "tensor"), True)):
        np.testing.assert_allclose(np.asarray(y), wanted, atol=1e-6 * np.abs(wanted).max())


def test_what_it_does_not_serve():
    x, tensor, _ = random_case(5, 2, 16, 64, "int8", None)
    fp8 = quantised(np.ones((16, 64), np.float32), "fp8")

    def refused(message, kernel=tensor, x=x, device=INTERPRETED):
        with pytest.raises(NotImplementedError, match=message):
            product(x, kernel, device=device)

    refused("compute capability 8.0", device=Device("old", 75, 3, True))
    refused("8.9 on", fp8, device=Device("A100", 80, 3, True))
    refused("are float32", x=x.astype(jnp.float32))


@pytest.mark.parametrize("rows", [1, 17, 64, 256, 4096])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (5120, 27648), (128256, 4096)])
def test_pieces_are_whole_tiles_and_cover_all_inputs(rows, outputs, inputs):
    shapes = [(inputs // 2, jnp.uint8), (inputs // 128, jnp.float16)]
    codes, scales = (jax.ShapeDtypeStruct((outputs, n), dtype) for n, dtype in shapes)
    form, _ = in_arrays(QuantisedTensor(codes, scales, format="int4"))
    tiles = choose_tiles(rows, outputs, form, inputs // 2, H200)
    assert tiles.pieces * tiles.steps * tiles.stored >= inputs // 2
    assert (tiles.pieces - 1) * tiles.steps * tiles.stored < inputs // 2
    assert tiles.rows >= min(rows, 128)
    programs = -(-rows // tiles.rows) * -(-outputs // tiles.outputs) * tiles.pieces
    assert programs >= H200.multiprocessors or rows == 1


# What the interpreter does otherwise: instructions of PTX, carried out one by one.


def executed_ptx(code: str, operands: list[int]) -> tuple[int, int]:
    """The two results of code of few instructions, of 32 bits each.

    Args:
      code: with results $0 and $1.
      operands: the words that are $2, $3 and so on.
    """
    words = {f"${i + 2}": word for i, word in enumerate(operands)}
    halves = {"bf16x2": ml_dtypes.bfloat16, "f16x2": np.float16}

    def value(name: str) -> int:
        return words[name] if name in words else int(name, 0)

    def pair(word: int, dtype) -> np.ndarray:
        return np.array([word], np.uint32).view(dtype).astype(np.float64)

    for line in code.strip("{ }").split(";"):
        operation, _, rest = line.strip().partition(" ")
        if not operation or operation == ".reg":
            continue
        to, *given = (each.strip() for each in rest.split(","))
        a, *more = map(value, given)
        match operation.split("."):
            case ["mov", _]:
                words[to] = a
            case ["and", _]:
                words[to] = a & more[0]
            case ["or", _]:
                words[to] = a | more[0]
            case ["xor", _]:
                words[to] = a ^ more[0]
            case ["shr", _]:
                words[to] = a >> more[0]
            case ["prmt", _]:
                bytes_ = [(more[0] << 32 | a) >> 8 * i & 255 for i in range(8)]
                chosen = [bytes_[more[1] >> 4 * i & 7] for i in range(4)]
                words[to] = sum(byte << 8 * i for i, byte in enumerate(chosen))
            case ["fma", "rn", kind]:
                # Products and sums of such numbers are exact in float64, and rounded once.
                sums = pair(a, halves[kind]) * pair(more[0], halves[kind])
                sums = (sums + pair(more[1], halves[kind])).astype(halves[kind])
                words[to] = int(sums.view(np.uint32)[0])
            case _:
                raise AssertionError(f"{operation} is not known here")
    return words["$0"], words["$1"]


def word_of(numbers) -> int:
    return int(np.ascontiguousarray(numbers).view(np.uint32)[0])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("high", [False, True])
def test_ptx_makes_numbers_of_nibbles(dtype, high):
    """Each byte, with every zero from 0 to 16."""
    base = {ml_dtypes.bfloat16: 128, np.float16: 1024}[dtype]
    code = nibbles(np.dtype(dtype).name, high)
    for zero in range(17):
        add = word_of(np.array([-base - zero] * 2, dtype))
        for first in range(0, 256, 4):
            bytes_ = np.arange(first, first + 4, dtype=np.uint8)
            made = executed_ptx(code, [word_of(bytes_), add, add])
            found = np.array(made, np.uint32).view(dtype).astype(np.float64)
            wanted = (bytes_ // 16 if high else bytes_ % 16).astype(np.float64) - zero
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_ptx_makes_numbers_of_signed_bytes(dtype):
    for first in range(-128, 128, 4):
        bytes_ = np.arange(first, first + 4, dtype=np.int8)
        made = executed_ptx(signed_bytes(np.dtype(dtype).name), [word_of(bytes_)])
        found = np.array(made, np.uint32).view(dtype).astype(np.float64)
        np.testing.assert_array_equal(found, bytes_.astype(np.float64))


def test_ptx_makes_numbers_of_e4m3():
    """Each that is finite, subnormal ones included."""
    for first in range(0, 256, 4):
        bytes_ = np.arange(first, first + 4, dtype=np.uint8)
        made = executed_ptx(e4m3_bytes("bfloat16"), [word_of(bytes_)])
        found = np.array(made, np.uint32).view(ml_dtypes.bfloat16).astype(np.float64)
        wanted = bytes_.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        finite = np.isfinite(wanted)
        np.testing.assert_array_equal(found[finite], wanted[finite])
