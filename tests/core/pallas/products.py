"""The common part of the tests of products with quantised matrices on GPUs."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare.pallas.dense_products import gpu_dense_product
from jaxshare.pallas.device import Device, assume_device
from jaxshare.quantised import FORMATS, QuantisedTensor, packed_codes
from tests.helpers import on_device

INTERPRETED = Device("interpreted", 90, multiprocessors=3, interpret=True)


def product(x, kernel, dtype=jnp.float32, device=INTERPRETED, backend="triton"):
    """The result of one kernel, in float64."""
    with assume_device(device):
        run = jax.jit(lambda x, kernel: gpu_dense_product(x, kernel, dtype, (backend,)))
        return np.asarray(run(x, jax.device_put(kernel))).astype(np.float64)


def compare(x, kernel, matrix, tolerance=1e-6, **how):
    """A result with the product by a float64 matrix."""
    results, wanted = product(x, kernel, **how), np.asarray(x).astype(np.float64) @ matrix.T
    assert results.shape == wanted.shape
    # Sums of float32, of numbers whose products are exact in it.
    bound = tolerance * max(np.abs(wanted).max(), 1)
    np.testing.assert_allclose(results, wanted, rtol=0, atol=bound)


def random_case(seed, rows, outputs, inputs, format, group, zeros=False, ordered=False):
    """Random codes, and the matrix that they stand for in float64, by the formats' definition."""
    rng = np.random.default_rng(seed)
    x = on_device(rng.normal(size=(rows, inputs)), jnp.bfloat16)
    groups = inputs // (group or inputs)
    scales = rng.uniform(0.5, 1.5, size=(outputs, groups)).astype(np.float16)
    low = {"int8": -128, "int4": 0}[format]
    codes = rng.integers(low, low + 2 ** FORMATS[format].bits, size=(outputs, inputs))
    zero = rng.integers(low, low + 16, size=(outputs, groups)).astype(np.int8) if zeros else None
    middle = FORMATS[format].middle if zero is None else zero[..., None].astype(np.float64)
    numbers = (codes.reshape(outputs, groups, -1) - middle) * scales[..., None].astype(np.float64)
    matrix = numbers.reshape(outputs, inputs)
    order = rng.permutation(inputs).astype(np.int32) if ordered else None
    if ordered:
        matrix = matrix[:, np.argsort(order)]
    stored = packed_codes(codes, group or inputs) if format == "int4" else codes.astype(np.int8)
    tensor = QuantisedTensor(stored, scales, zero, None, order, format, np.dtype(np.float32))
    tensor.check("it")
    return x, tensor, matrix
