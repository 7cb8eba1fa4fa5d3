"""Quantised tensors against sums written out number by number."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxshare.quantised import FORMATS, QuantisedTensor, concatenated, packed_codes, quantised

rng = np.random.default_rng(0)


def numbers_by_hand(tensor: QuantisedTensor) -> np.ndarray:
    """The numbers of a tensor [O, I], one after the other."""
    outputs, inputs = tensor.shape
    groups = tensor.scales.shape[-1]
    size, kind = inputs // groups, FORMATS[tensor.format]
    found = np.zeros((outputs, inputs), np.float32)
    for row in range(outputs):
        for place in range(inputs):
            group, within = divmod(place, size)
            if kind.bits == 8:
                number = np.float32(tensor.codes[row, place])
            else:
                byte = int(tensor.codes[row, group * size // 2 + within % (size // 2)])
                code = byte >> 4 if within >= size // 2 else byte & 15
                number = np.float32(kind.table[code] if kind.table else code)
            zero = kind.middle if tensor.zeros is None else int(tensor.zeros[row, group])
            value = (number - np.float32(zero)) * np.float32(tensor.scales[row, group])
            if tensor.offsets is not None:
                value = value - np.float32(tensor.offsets[row, group])
            column = place if tensor.order is None else int(tensor.order[place])
            found[row, column] = value
    return found


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("group", [4, 8, 16])
def test_numbers_are_those_of_the_definition(format, group):
    made = quantised(rng.standard_normal((3, 16), np.float32), format, group)
    assert made.shape == (3, 16) and made.group == group
    np.testing.assert_array_equal(made.dequantised(), numbers_by_hand(made))


def test_zeros_offsets_and_an_order_are_those_of_the_definition():
    codes = rng.integers(0, 16, (3, 16), np.uint8)
    made = QuantisedTensor(
        packed_codes(codes, 8),
        rng.random((3, 2), np.float32) + 0.5,
        rng.integers(0, 16, (3, 2), np.uint8),
        rng.standard_normal((3, 2), np.float32),
        rng.permutation(16),
        format="int4",
    )
    made.check("w")
    np.testing.assert_array_equal(made.dequantised(), numbers_by_hand(made))
    on_device = jax.tree.map(jnp.asarray, made)
    np.testing.assert_allclose(
        jax.jit(lambda w: w.dequantised())(on_device), made.dequantised(), 1e-6
    )
    x = rng.standard_normal((2, 16), np.float32)
    unordered = QuantisedTensor(made.codes, made.scales, made.zeros, made.offsets, format="int4")
    by_order = np.asarray(made.ordered(jnp.asarray(x))) @ unordered.dequantised().T
    np.testing.assert_allclose(by_order, x @ made.dequantised().T, atol=1e-5)


@pytest.mark.parametrize(
    ("format", "bound"),
    # Half of a step at the largest number, as a part of the largest: of 127 steps, 7 steps, 3 bits
    # of mantissa, and the widest gaps of the tables.
    [("int8", 0.5 / 127), ("int4", 0.5 / 7), ("fp8", 1 / 16), ("mxfp4", 1 / 6), ("nf4", 0.152)],
)
def test_each_number_is_rounded_to_the_nearest_code(format, bound):
    value = rng.standard_normal((5, 64), np.float32)
    made = quantised(value, format, 32)
    found = np.asarray(made.dequantised())
    most = np.abs(value.reshape(5, 2, 32)).max(-1).repeat(32, -1)
    assert (np.abs(found - value) <= bound * most + 1e-6).all()
    again = quantised(found, format, 32)
    np.testing.assert_allclose(again.dequantised(), found, atol=1e-6)


def test_groups_of_zeros_stay_zero():
    for format in FORMATS:
        made = quantised(np.zeros((2, 8), np.float32), format, 4)
        made.check("w")
        assert not np.asarray(made.dequantised()).any()


def test_rows_and_matrices_are_taken_and_put_together():
    value = rng.standard_normal((2, 6, 16), np.float32)
    made = quantised(value, "int4", 8)
    np.testing.assert_array_equal(made[1].dequantised(), made.dequantised()[1])
    first, second = made[0][:2], made[0][2:]
    joined = concatenated([first, second])
    assert joined is not None
    np.testing.assert_array_equal(joined.dequantised(), made[0].dequantised())
    assert concatenated([first, quantised(value[0], "int8", 8)]) is None
    assert concatenated([first, quantised(value[0], "int4", 16)]) is None


def test_bytes_are_those_of_codes_and_scales():
    made = quantised(np.ones((4, 128), np.float32), "int4", 64, scale_dtype=np.float16)
    assert made.nbytes == 4 * 64 + 4 * 2 * 2 and made.size == 512


CODES, SCALES = np.zeros((2, 4), np.uint8), np.ones((2, 2), np.float32)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (QuantisedTensor(CODES, SCALES, format="int3"), "int3, which is not known; known are int8"),
        (QuantisedTensor(CODES, SCALES, format="int8"), "codes of dtype uint8, but int8 has int8"),
        (QuantisedTensor(CODES, SCALES[:1], format="int4"), "scales of shape .1, 2."),
        (QuantisedTensor(CODES, np.ones((2, 3)), format="int4"), "3 scales a row.* its 8 inputs"),
        (QuantisedTensor(CODES, SCALES * np.nan, format="int4"), "NaN or infinite"),
        (QuantisedTensor(CODES, SCALES * 0, format="int4"), "scales that are zero"),
        (QuantisedTensor(CODES, SCALES, CODES, format="int4"), "zeros of shape .2, 4."),
        (QuantisedTensor(CODES, SCALES, None, CODES, format="int4"), "offsets of shape"),
        (QuantisedTensor(CODES, SCALES, order=np.arange(4), format="int4"), "order of shape"),
    ],
)
def test_arrays_that_do_not_fit_are_named(tensor, message):
    with pytest.raises(ValueError, match=f"^q_proj .*{message}"):
        tensor.check("q_proj")


@pytest.mark.parametrize(
    ("format", "group", "message"),
    [
        ("int5", 8, "int5 is no format of codes; known are int8, int4, fp8, mxfp4, nf4"),
        ("int8", 5, "groups of 5 do not divide 16 inputs"),
        ("int8", 0, "groups of 0 do not divide 16 inputs"),
        ("int4", 1, "groups of 1 codes of 4 bits are not whole bytes"),
    ],
)
def test_what_cannot_be_quantised_is_named(format, group, message):
    with pytest.raises(ValueError, match=message):
        quantised(np.ones((2, 16), np.float32), format, group)


def test_rounding_to_a_dtype_is_done_once():
    made = quantised(rng.standard_normal((4, 32)).astype(ml_dtypes.bfloat16), "int8", 8)
    assert made.dequantised().dtype == ml_dtypes.bfloat16
    exact = made.dequantised(np.float32)
    np.testing.assert_array_equal(made.dequantised(), exact.astype(ml_dtypes.bfloat16))
