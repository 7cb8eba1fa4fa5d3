"""Products with the matrices of experts, interpreted on the CPU, against float64 numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare.pallas.device import Device, assume_device
from jaxshare.pallas.expert_products import gpu_expert_products, in_order
from jaxshare.quantised import QuantisedTensor, packed_codes, quantised
from tests.helpers import mostly_slow, on_device

pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)

INTERPRETED = Device("interpreted", 90, multiprocessors=3, interpret=True)


def found(x, expert, kernel, dtype=jnp.float32, device=INTERPRETED):
    with assume_device(device):
        run = jax.jit(lambda *a: gpu_expert_products(*a, dtype))
        return np.asarray(run(x, on_device(expert, jnp.int32), kernel)).astype(np.float64)


def expected(x, expert, matrices):
    """Row by row."""
    x, matrices = (np.asarray(a).astype(np.float64) for a in (x, matrices))
    return {
        (n, k): matrices[e] @ x[n] for (n, k), e in np.ndenumerate(expert) if 0 <= e < len(matrices)
    }


def compare(x, expert, kernel, matrices, tolerance=1e-5, **how):
    results, wanted = found(x, expert, kernel, **how), expected(x, expert, matrices)
    for place, line in wanted.items():
        # Sums of float32, of numbers whose products are exact in it.
        bound = tolerance * max(np.abs(line).max(), 1)
        np.testing.assert_allclose(results[place], line, rtol=0, atol=bound)
    return wanted


def random(seed, rows, inputs, experts, outputs, chosen, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seed)
    x = on_device(rng.normal(size=(rows, inputs)), dtype)
    expert = rng.integers(-1, experts + 1, size=(rows, chosen))
    return x, expert, rng.normal(size=(experts, outputs, inputs)).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    mostly_slow(
        [
            ((23, 192, 5, 40, 3), jnp.bfloat16),
            ((1, 128, 3, 16, 2), jnp.float16),  # a single row, of which each expert has one
            ((70, 72, 2, 33, 2), jnp.bfloat16),  # blocks of one expert, tiles that are not full
            ((9, 8, 130, 7, 8), jnp.bfloat16),  # more experts than choices
        ],
        several=True,
    ),
)
def test_each_row_gets_the_products_of_its_experts(shape, dtype):
    x, expert, matrices = random(0, *shape, dtype)
    kernel = on_device(matrices, dtype)
    assert compare(x, expert, kernel, kernel)


def test_choices_of_no_expert_and_experts_without_choices():
    x, expert, matrices = random(1, 6, 64, 4, 16, 2)
    kernel = on_device(matrices, jnp.bfloat16)
    expert[:] = [[4, -1], [2, 4], [2, 2], [4, 4], [-7, 99], [2, 0]]
    assert len(compare(x, expert, kernel, kernel)) == 5
    expert[:] = 4
    assert not compare(x, expert, kernel, kernel)


def test_results_do_not_depend_on_other_rows():
    x, expert, matrices = random(2, 40, 96, 4, 24, 2)
    kernel = on_device(matrices, jnp.bfloat16)
    expert = np.clip(expert, 0, 3)
    among, crowded = found(x, expert, kernel), expert.copy()
    crowded[1:] = 3
    beside = found(x, crowded, kernel)
    np.testing.assert_array_equal(among[0], beside[0])


def test_results_are_rounded_to_the_dtype_that_is_asked_for():
    x, expert, matrices = random(3, 5, 64, 3, 16, 2)
    kernel = on_device(matrices, jnp.bfloat16)
    compare(x, expert, kernel, kernel, dtype=jnp.bfloat16, tolerance=2**-8)


@pytest.mark.parametrize(
    ("format", "group"),
    mostly_slow(
        [
            ("fp8", 64),
            ("mxfp4", 32),
            ("int4", 64),
            ("int8", None),
            ("int8", 48),
            ("mxfp4", 64),
            ("nf4", 64),
            ("int4", None),
        ],
        several=True,
    ),
)
def test_quantised_matrices(format, group):
    x, expert, matrices = random(4, 7, 192, 3, 24, 2)
    tensor = quantised(matrices, format, group)
    # The right numbers are those of the tensor's own host code, rounded as x is.
    numbers = on_device(tensor.dequantised(np.float32), jnp.bfloat16)
    compare(x, expert, jax.device_put(tensor), numbers)


def test_scales_that_are_powers_of_two():
    """As gpt-oss stores them: one byte, an exponent."""
    x, expert, matrices = random(8, 5, 64, 3, 16, 2)
    tensor = quantised(matrices, "mxfp4", 32)
    exponents = np.random.default_rng(9).integers(-3, 4, tensor.scales.shape)
    values = np.asarray(dataclasses.replace(tensor, scales=np.ones_like(tensor.scales)).numbers())
    powers = (2.0**exponents).astype(np.float32).astype(jnp.float8_e8m0fnu)
    stored = dataclasses.replace(tensor, scales=powers)
    wanted = (values * 2.0 ** exponents[..., None]).reshape(matrices.shape)
    compare(x, expert, jax.device_put(stored), wanted)


def test_zeros_offsets_and_an_order_of_inputs():
    x, expert, _ = random(5, 6, 64, 3, 16, 2)
    rng = np.random.default_rng(6)
    numbers = rng.integers(0, 16, size=(3, 16, 64))
    zeros = rng.integers(0, 16, size=(3, 16, 2)).astype(np.int32)
    scales, offsets = rng.uniform(0.5, 1.5, size=(2, 3, 16, 2)).astype(np.float32)
    order = rng.permutation(64).astype(np.int32)
    tensor = QuantisedTensor(
        packed_codes(numbers, 32), scales, zeros, offsets, order, "int4", np.dtype(np.float32)
    )
    grouped = numbers.reshape(3, 16, 2, 32) - zeros[..., None]
    grouped = grouped * scales[..., None] - offsets[..., None]
    matrices = np.empty((3, 16, 64))
    matrices[..., order] = grouped.reshape(3, 16, 64)
    rounded = on_device(matrices.astype(np.float32), jnp.bfloat16)
    compare(x, expert, jax.device_put(tensor), rounded)


@pytest.mark.parametrize("choices", [1, 37, 5000])
def test_choices_are_put_in_order(choices):
    """Up to some number without a sort, and then with one."""
    expert = np.random.default_rng(choices).integers(-2, 9, choices).astype(np.int32)
    order, ends = map(np.asarray, jax.jit(in_order, static_argnums=1)(expert, 7))
    key = np.where((expert < 0) | (expert >= 7), 7, expert)
    np.testing.assert_array_equal(order, np.argsort(key, kind="stable"))
    np.testing.assert_array_equal(ends, np.cumsum(np.bincount(key, minlength=8)[:7]))


def test_what_it_does_not_serve():
    x, expert, matrices = random(7, 2, 64, 2, 16, 1)
    kernel = on_device(matrices, jnp.bfloat16)

    def refused(message, kernel=kernel, x=x, device=INTERPRETED):
        with pytest.raises(NotImplementedError, match=message):
            found(x, expert, kernel, device=device)

    fp8 = jax.device_put(quantised(matrices, "fp8"))
    refused("compute capability 8.0", device=Device("old", 75, 3, True))
    refused("8.9 on", fp8, device=Device("A100", 80, 3, True))
    refused("are float32", x=x.astype(jnp.float32))
    refused("matrices float32", on_device(matrices))
