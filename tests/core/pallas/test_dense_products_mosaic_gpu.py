"""Products with quantised matrices in the kernel for Hopper, interpreted on the CPU, against float64
numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare.models.linear import products
from jaxshare.pallas.dense_products import gpu_dense_product
from jaxshare.pallas.device import H200, Device, assume_device
from jaxshare.pallas.matrix_codes import in_arrays
from jaxshare.pallas.product_tiles import choose_product_tiles, registers_of
from jaxshare.quantised import QuantisedTensor, packed_codes, quantised
from tests.core.pallas.products import INTERPRETED, compare, product, random_case
from tests.helpers import mostly_slow

pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)


@pytest.fixture(autouse=True, scope="module")
def races():
    """They are not looked for: tiles of outputs, and blocks of rows, that overlap are meant to, and
    write the same."""


@pytest.mark.parametrize(
    ("shape", "format", "group", "zeros", "ordered"),
    mostly_slow(
        [
            # Three groups, tiles of outputs that overlap, fewer rows than a tile has.
            ((5, 136, 384), "int4", 128, True, True),
            ((1, 128, 320), "int8", None, False, False),  # one scale a row, steps of 64 bytes
            ((4, 144, 1024), "int4", 64, False, False),  # groups of half a part, pieces
            ((64, 264, 256), "int4", None, True, False),  # halves of a row are far apart
            ((130, 136, 256), "int8", 128, True, False),  # blocks of rows that overlap
            ((130, 200, 256), "int4", 128, False, False),
            ((4, 136, 768), "int4", 192, True, True),  # groups of three parts
            ((64, 128, 128), "int8", 32, False, False),
            ((1, 520, 2048), "int4", 256, True, False),  # groups of several parts
            ((5, 200, 448), "int8", 64, True, True),
        ],
        2,
        several=True,
    ),
)
def test_integers(shape, format, group, zeros, ordered):
    compare(*random_case(0, *shape, format, group, zeros, ordered), backend="mosaic_gpu")


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 150),
    st.integers(16, 40),
    st.integers(1, 4),
    st.sampled_from([("int4", 64), ("int4", 128), ("int8", 32), ("int8", 128), ("int8", None)]),
    st.booleans(),
)
def test_random_shapes(rows, eights, steps, kind, zeros):
    format, group = kind
    case = random_case(rows, rows, 8 * eights, 128 * steps, format, group, zeros)
    compare(*case, backend="mosaic_gpu")


@pytest.mark.parametrize(
    ("rows", "group", "dtype"),
    mostly_slow(
        [
            (4, 128, jnp.bfloat16),  # blocks of 128 inputs, as DeepSeek and Qwen ship them
            (1, None, jnp.bfloat16),  # per channel
            (64, 128, jnp.float16),
            (130, None, jnp.bfloat16),
        ],
        1,
        several=True,
    ),
)
def test_fp8(rows, group, dtype):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(rows, 384)), dtype)
    tensor = quantised(rng.normal(size=(136, 384)).astype(np.float32), "fp8", group)
    if group is None:  # per tensor: all scales are the same
        tensor.scales[:] = tensor.scales.max()
    numbers = tensor.codes.astype(np.float64).reshape(*tensor.scales.shape, -1)
    matrix = (numbers * tensor.scales[..., None].astype(np.float64)).reshape(136, 384)
    compare(x, tensor, matrix, backend="mosaic_gpu")


def served_by(x, kernel, implementation=None, device=INTERPRETED):
    """The kernels in the trace of a layer's product."""
    with assume_device(device):
        # a function of its own each time, which JAX has not traced yet
        text = str(jax.make_jaxpr(lambda x: products(x, [kernel], x.dtype, implementation))(x))
    names = {"mosaic_gpu": "barrier_wait", "triton": "pallas_call"}
    return {name for name, sign in names.items() if sign in text}


def test_the_first_kernel_that_serves_a_product_is_taken():
    x, tensor, _ = random_case(4, 6, 128, 256, "int4", 128)
    kernel = jax.tree.map(jnp.asarray, tensor)
    for implementation in (None, "mosaic_gpu", ("mosaic_gpu", "xla")):
        assert served_by(x, kernel, implementation) == {"mosaic_gpu"}
    assert served_by(x, kernel, "triton") == {"triton"}
    assert served_by(x, kernel, ("triton", "xla")) == {"triton"}
    assert served_by(x, kernel, "xla") == set()
    for device in (Device("A100", 80, 108, True), Device("B200", 100, 148, True)):
        assert served_by(x, kernel, device=device) == {"triton"}
    # What Hopper's kernel does not serve is Triton's, where it is named itself too.
    fewer = kernel[:120]
    assert served_by(x, fewer) == served_by(x, fewer, "mosaic_gpu") == {"triton"}


def test_what_it_does_not_serve():
    def refused(message, tensor, rows=2, device=INTERPRETED, **more):
        x = jnp.ones((rows, tensor.shape[-1]), more.get("dtype", jnp.bfloat16))
        with pytest.raises(NotImplementedError, match=message):
            product(x, tensor, device=device, backend="mosaic_gpu")

    ones = np.ones((128, 256), np.float32)
    served = quantised(ones, "int8")
    refused("capability 9.0", served, device=Device("B200", 100, 148, True))
    refused("are float32", served, dtype=jnp.float32)
    refused("int4, int8 and fp8", quantised(ones, "nf4", 64))
    refused("int4, int8 and fp8", quantised(ones, "mxfp4", 32))
    offsets = np.ones((128, 2), np.float32)
    codes = packed_codes(ones.astype(np.uint8), 128)
    refused("without offsets", QuantisedTensor(codes, offsets, None, offsets, format="int4"))
    refused("from 128 on", quantised(ones[:120], "int8"))
    refused("multiple of 8 outputs", quantised(np.ones((132, 256), np.float32), "int8"))
    refused("multiple of 64 bytes", quantised(ones[:, :96], "int4"))
    refused("groups of a multiple of 32", quantised(ones, "int4", 32))
    with assume_device(INTERPRETED), pytest.raises(NotImplementedError, match=r"mosaic.*; triton"):
        gpu_dense_product(jnp.ones((2, 256)), served, jnp.float32)


@pytest.mark.parametrize("rows", [1, 8, 17, 64, 130, 2048])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(6144, 4096), (5120, 27648), (128256, 4096), (136, 128), (128, 64)]
)
@pytest.mark.parametrize("format", ["int4", "fp8"])
def test_tiles_fit_into_a_multiprocessor_and_cover_all_inputs(rows, outputs, inputs, format):
    group = min(inputs, 128)
    stored = inputs // 2 if format == "int4" else inputs
    if stored % 64:
        return
    dtype = jnp.uint8 if format == "int4" else jnp.float8_e4m3fn
    shapes = [(stored, dtype), (inputs // group, jnp.float16)]
    codes, scales = (jax.ShapeDtypeStruct((outputs, n), dtype) for n, dtype in shapes)
    form, _ = in_arrays(QuantisedTensor(codes, scales, format=format))
    tiles = choose_product_tiles(rows, outputs, form, stored, H200)
    steps = stored // tiles.stored
    assert tiles.stored * steps == stored
    assert (tiles.pieces - 1) * tiles.steps < steps <= tiles.pieces * tiles.steps
    assert tiles.rows % 8 == tiles.rows % tiles.chunk == 0 and tiles.outputs <= outputs
    # Shared memory of a block, and registers of a multiprocessor and of a thread.
    shared = tiles.stages * sum(tiles.step_bytes(form)) + tiles.outputs * tiles.chunk * 4
    assert shared + 1024 <= 227 * 1024
    fetching, computing = registers_of(tiles.warpgroups)
    at_launch = 65536 // 128 // (tiles.warpgroups + 1) // 8 * 8
    assert fetching + tiles.warpgroups * computing <= (tiles.warpgroups + 1) * at_launch
    assert computing % 8 == 0 and computing <= 255
