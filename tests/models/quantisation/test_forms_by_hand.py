"""Stored forms against numbers taken out of words one by one, for cases that the libraries that make
checkpoints do not write any more, or never wrote."""

import ml_dtypes
import numpy as np
import pytest

from jaxshare.models.config_fields import Fields
from jaxshare.models.quantisation.awq import AWQForm
from jaxshare.models.quantisation.codes import order_of, stacked
from jaxshare.models.quantisation.compressed_tensors import read_compressed_tensors
from jaxshare.models.quantisation.fp8 import FP8Form
from jaxshare.models.quantisation.gptq import GPTQForm
from jaxshare.quantised import QuantisedTensor

RNG = np.random.default_rng(3)


def words(*shape):
    return RNG.integers(-(2**31), 2**31, shape).astype(np.int32)


def scales(*shape, dtype=np.float16):
    return RNG.uniform(0.01, 0.1, shape).astype(dtype)


def code(word, place, bits):
    return int(word) >> (bits * place) & (2**bits - 1)


@pytest.mark.parametrize("has_zeros", [True, False])
@pytest.mark.parametrize("group", [8, -1])
def test_awq(group, has_zeros):
    outputs, inputs = 16, 24
    size = inputs if group == -1 else group
    arrays = {"qweight": words(inputs, 2), "scales": scales(inputs // size, outputs)}
    if has_zeros:
        arrays["qzeros"] = words(inputs // size, 2)
    found = AWQForm(group, has_zeros).read(arrays, (outputs, inputs))
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # the outputs of a word, from its low bits on
    expected = np.empty((outputs, inputs), np.float32)
    for place in range(8):
        for word in range(2):
            row = word * 8 + order[place]
            for i in range(inputs):
                zero = code(arrays["qzeros"][i // size, word], place, 4) if has_zeros else 8
                number = code(arrays["qweight"][i, word], place, 4) - zero
                expected[row, i] = number * np.float32(arrays["scales"][i // size, row])
    np.testing.assert_array_equal(found.dequantised(np.float32), expected)


@pytest.mark.parametrize("less", [1, 0])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq(bits, less):
    """Zeros of all numbers: in the first version of the form 0 is stored as the largest code."""
    outputs, inputs, group, in_word = 16, 32, 16, 32 // bits
    groups = RNG.permutation(np.repeat([0, 1], group)).astype(np.int32)
    arrays = {
        "qweight": words(inputs // in_word, outputs),
        "qzeros": words(2, outputs // in_word),
        "scales": scales(2, outputs),
        "g_idx": groups,
    }
    arrays["qzeros"][0, 0] = -1
    found = GPTQForm(bits, group, less).read(arrays, (outputs, inputs))
    expected = np.empty((outputs, inputs), np.float32)
    for o in range(outputs):
        for i in range(inputs):
            zero = code(arrays["qzeros"][groups[i], o // in_word], o % in_word, bits)
            zero = (zero + less) % 2**bits
            number = code(arrays["qweight"][i // in_word, o], i % in_word, bits) - zero
            expected[o, i] = number * np.float32(arrays["scales"][groups[i], o])
    assert found.order is not None
    np.testing.assert_array_equal(found.dequantised(np.float32), expected)


@pytest.mark.parametrize("shape", [(20, 40), (6, 12), (16, 48)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu])
def test_blocks_of_fp8_that_do_not_divide_a_matrix(shape, dtype):
    rows, columns = 8, 16
    codes = RNG.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    grid = RNG.uniform(0.5, 2, (-(-shape[0] // rows), -(-shape[1] // columns))).astype(dtype)
    form = FP8Form((rows, columns))
    (array,) = [each for name, each in form.arrays(shape).items() if name != "weight"]
    assert array.shapes == (grid.shape,)
    found = form.read({"weight": codes, "weight_scale_inv": grid}, shape)
    found.check("a layer")
    expected = np.empty(shape, np.float32)
    for o in range(shape[0]):
        for i in range(shape[1]):
            scale = grid[o // rows, i // columns].astype(np.float32)
            expected[o, i] = codes[o, i].astype(np.float32) * scale
    np.testing.assert_array_equal(found.dequantised(np.float32), expected)


def form_of(weights, format):
    groups = {"group_0": dict(targets=["Linear"], weights=weights)}
    settings = dict(config_groups=groups, format=format)
    found = read_compressed_tensors(Fields(settings, "config.json")).form("a")
    assert found is not None
    return found


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group", "block"])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_codes_with_zero_points(strategy, bits):
    """Zero points are packed along the outputs where there is one for outputs or groups, and not for
    tensors and blocks. Outputs do not fill a word."""
    outputs, inputs, in_word = 12, 32, 32 // bits
    sizes = {"tensor": (outputs, inputs), "channel": (1, inputs), "group": (1, 8), "block": (4, 16)}
    rows, columns = sizes[strategy]
    shape = outputs // rows, inputs // columns
    weights = dict(num_bits=bits, type="int", symmetric=False, strategy=strategy)
    weights |= dict(group_size=8) if strategy == "group" else {}
    weights |= dict(block_structure=[rows, columns]) if strategy == "block" else {}
    form = form_of(weights, "pack-quantized")
    zeros = RNG.integers(0, 2**bits, shape)
    signed = (zeros - 2 ** (bits - 1)).astype(np.int8)
    packed = np.zeros((-(-shape[0] // in_word), shape[1]), np.uint32)
    for o in range(shape[0]):
        packed[o // in_word] |= (zeros[o] << (bits * (o % in_word))).astype(np.uint32)
    arrays = {
        "weight_packed": words(outputs, inputs // in_word),
        "weight_scale": scales(*shape, dtype=ml_dtypes.bfloat16),
        "weight_zero_point": packed.view(np.int32) if strategy in ("channel", "group") else signed,
        "weight_shape": np.asarray([outputs, inputs]),
    }
    if strategy == "tensor":
        arrays |= {name: arrays[name][0] for name in ("weight_scale", "weight_zero_point")}
    for name, array in form.arrays((outputs, inputs)).items():
        assert name not in arrays or arrays[name].shape in array.shapes, name
    found = form.read(arrays, (outputs, inputs))
    expected = np.empty((outputs, inputs), np.float32)
    grid = np.asarray(arrays["weight_scale"]).reshape(shape)
    for o in range(outputs):
        for i in range(inputs):
            at = o // rows, i // columns
            number = code(arrays["weight_packed"][o, i // in_word], i % in_word, bits) - zeros[at]
            expected[o, i] = number * grid[at].astype(np.float32)
    np.testing.assert_array_equal(found.dequantised(np.float32), expected)


def test_codes_of_a_byte_with_zero_points():
    form = form_of(
        dict(num_bits=8, type="int", symmetric=False, strategy="channel"), "int-quantized"
    )
    codes, zeros = (RNG.integers(-128, 128, (6, n)).astype(np.int8) for n in (10, 1))
    arrays = {"weight": codes, "weight_scale": scales(6, 1), "weight_zero_point": zeros}
    found = form.read(arrays, (6, 10))
    expected = (codes.astype(np.float32) - zeros) * arrays["weight_scale"].astype(np.float32)
    np.testing.assert_array_equal(found.dequantised(np.float32), expected)


def test_zero_points_of_fp8_are_refused():
    form = form_of(dict(num_bits=8, type="float", strategy="channel"), "float-quantized")
    arrays = {
        "weight": np.ones((6, 10), ml_dtypes.float8_e4m3fn),
        "weight_scale": scales(6, 1),
        "weight_zero_point": np.zeros((6, 1), np.int8),
    }
    assert form.read(arrays, (6, 10)).zeros is None
    arrays["weight_zero_point"] = np.ones((6, 1), np.int8)
    with pytest.raises(ValueError, match="weight_zero_point is not 0, but codes in FP8 have no"):
        form.read(arrays, (6, 10))


def test_an_order_of_inputs_is_that_of_their_groups():
    np.testing.assert_array_equal(order_of(np.int32([1, 0, 1, 0]), 2), [1, 3, 0, 2])
    assert order_of(np.int32([0, 0, 1, 1]), 2) is None
    assert order_of(np.int32([-1, -1, -1, -1]), 2) is None
    with pytest.raises(ValueError, match="does not put 2 inputs in each of 2 groups"):
        order_of(np.int32([0, 0, 0, 1]), 2)


def of_an_expert(zeros=None, order=None):
    codes = RNG.integers(0, 256, (6, 4)).astype(np.uint8)
    return QuantisedTensor(codes, scales(6, 2), zeros, order=order, format="int4")


def test_experts_with_and_without_zeros_are_stacked():
    experts = [of_an_expert(), of_an_expert(np.full((6, 2), 3, np.int8)), of_an_expert()]
    found = stacked(3, experts)
    expected = np.stack([each.dequantised() for each in experts])
    np.testing.assert_array_equal(found.dequantised(), expected)


def test_experts_with_orders_of_their_own_are_refused():
    order = np.int32([1, 0, 2, 3, 4, 5, 6, 7])
    assert stacked(2, [of_an_expert(order=order), of_an_expert(order=order.copy())]).shape[0] == 2
    with pytest.raises(
        ValueError, match=r"another order .* use a checkpoint that was made without"
    ):
        stacked(2, [of_an_expert(order=order), of_an_expert(order=order[::-1])])
    with pytest.raises(ValueError, match="another order"):
        stacked(2, [of_an_expert(), of_an_expert(order=order)])
