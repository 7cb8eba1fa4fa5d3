"""bitsandbytes' forms against numbers taken out of bytes one by one, and what is refused. Those that
the library itself writes are in test_published_forms.py."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxshare.models import CheckpointError, ConfigError, load
from jaxshare.models.config_fields import Fields
from jaxshare.models.quantisation.bitsandbytes import (
    LLMInt8Form,
    NF4Form,
    read_bitsandbytes,
)
from tests.models.quantisation.test_published_forms import QUANTISED

RNG = np.random.default_rng(5)
NF4 = load_file(QUANTISED / "bitsandbytes_nf4_llama" / "model.safetensors")[
    "model.layers.0.mlp.up_proj.weight.quant_map"
]
STATE = dict(quant_type="nf4", blocksize=64, dtype="bfloat16")
SETTINGS = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")


def state_of(**more) -> np.ndarray:
    return np.frombuffer(json.dumps(STATE | more).encode(), np.uint8)


def nf4_arrays(outputs: int, inputs: int, nested: bool) -> dict[str, np.ndarray]:
    count = outputs * inputs
    scales = -(-count // 64)
    arrays = {
        "weight": RNG.integers(0, 256, (count // 2, 1), np.uint8),
        "weight.quant_map": NF4,
        "weight.absmax": RNG.uniform(0.1, 1, scales).astype(np.float32),
        "weight.quant_state.bitsandbytes__nf4": state_of(shape=[outputs, inputs]),
    }
    if nested:
        arrays["weight.absmax"] = RNG.integers(0, 256, scales, np.uint8)
        arrays["weight.nested_absmax"] = RNG.uniform(0.1, 1, -(-scales // 256)).astype("f4")
        arrays["weight.nested_quant_map"] = np.linspace(-1, 1, 256, dtype=np.float32)
        more = dict(nested_blocksize=256, nested_offset=1.25, shape=[outputs, inputs])
        arrays["weight.quant_state.bitsandbytes__nf4"] = state_of(**more)
    return arrays


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("shape", [(6, 128), (5, 96), (300, 64), (3, 40), (7, 2)])
def test_blocks_go_on_from_row_to_row(shape, nested):
    arrays = nf4_arrays(*shape, nested)
    found = NF4Form().read(arrays, shape)
    found.check("layer")
    expected = np.empty(shape[0] * shape[1], np.float32)
    for place in range(expected.size):
        octet = int(arrays["weight"][place // 2, 0])
        number = NF4[octet & 15 if place % 2 else octet >> 4]
        scale = arrays["weight.absmax"][place // 64]
        if nested:
            inner = arrays["weight.nested_absmax"][place // 64 // 256]
            scale = arrays["weight.nested_quant_map"][scale] * inner + np.float32(1.25)
        expected[place] = number * scale
    np.testing.assert_array_equal(found.dequantised(np.float32), expected.reshape(shape))
    stored = NF4Form().arrays(shape)
    for name, value in arrays.items():
        assert not stored[name].shapes or value.shape in stored[name].shapes
    assert all(array.is_optional for name, array in stored.items() if name not in arrays)


def test_blocks_and_rows_of_zeros_are_no_damage():
    arrays = nf4_arrays(2, 128, False)
    arrays["weight.absmax"][1] = 0
    found = NF4Form().read(arrays, (2, 128))
    found.check("layer")
    numbers = np.asarray(found.dequantised(np.float32))
    assert not numbers[0, 64:].any() and numbers[0, :64].any() and numbers[1].any()
    codes = RNG.integers(-127, 128, (3, 8)).astype(np.int8)
    scales = np.asarray([1.0, 0.0, 2.54], np.float32)
    found = LLMInt8Form().read({"weight": codes, "SCB": scales}, (3, 8))
    found.check("layer")
    expected = codes * (scales / np.float32(127))[:, None]
    np.testing.assert_array_equal(found.dequantised(np.float32), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(blocksize=128), '"blocksize": 128.*read are blocks of 64 in NF4'),
        (dict(quant_type="fp4"), '"quant_type": "fp4"'),
        (dict(shape=[4, 32]), "of the layer's shape .2, 64."),
    ],
)
def test_another_state_is_named(change, message):
    arrays = nf4_arrays(2, 64, False)
    arrays["weight.quant_state.bitsandbytes__nf4"] = state_of(**change)
    with pytest.raises(ValueError, match=message):
        NF4Form().read(arrays, (2, 64))


def test_a_table_or_scales_that_do_not_fit_are_named():
    arrays = nf4_arrays(2, 64, True)
    with pytest.raises(ValueError, match="quant_map is not that of NF4"):
        NF4Form().read({**arrays, "weight.quant_map": NF4[::-1]}, (2, 64))
    with pytest.raises(ValueError, match="lacks the nested_offset"):
        NF4Form().read({**arrays, "weight.quant_state.bitsandbytes__nf4": state_of()}, (2, 64))
    del arrays["weight.nested_absmax"]
    with pytest.raises(ValueError, match="float32, or uint8 with a nested_absmax"):
        NF4Form().read(arrays, (2, 64))
    text = np.frombuffer(b"[1, 2", np.uint8)
    with pytest.raises(ValueError, match="cannot be read"):
        NF4Form().read({**arrays, "weight.quant_state.bitsandbytes__nf4": text}, (2, 64))


def test_settings_as_they_are_published():
    """That of unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit."""
    settings = dict(
        _load_in_4bit=True,
        _load_in_8bit=False,
        bnb_4bit_compute_dtype="bfloat16",
        bnb_4bit_quant_storage="uint8",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        llm_int8_enable_fp32_cpu_offload=False,
        llm_int8_has_fp16_weight=False,
        llm_int8_skip_modules=None,
        llm_int8_threshold=6.0,
        load_in_4bit=True,
        load_in_8bit=False,
        quant_method="bitsandbytes",
    )
    found = read_bitsandbytes(Fields(settings, "config.json"))
    assert isinstance(found.form("model.layers.0.mlp.up_proj"), NF4Form)
    eight = settings | dict(load_in_4bit=False, load_in_8bit=True, llm_int8_skip_modules=["up"])
    found = read_bitsandbytes(Fields(eight, "config.json"))
    assert isinstance(found.form("model.layers.0.mlp.up_proj"), LLMInt8Form)
    assert found.plain == ("up",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(bnb_4bit_quant_type="fp4"), 'bnb_4bit_quant_type is "fp4", but only nf4 is read'),
        (dict(bnb_4bit_quant_storage="bfloat16"), "bnb_4bit_quant_storage .* only uint8 is read"),
        (dict(load_in_4bit=False), "one of load_in_4bit and load_in_8bit must be true"),
        (dict(load_in_8bit=True), "one of load_in_4bit and load_in_8bit must be true"),
        (dict(bnb_5bit=True), "unknown settings .*bnb_5bit"),
    ],
)
def test_settings_that_are_not_read_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        read_bitsandbytes(Fields(SETTINGS | change, "config.json"))


@pytest.mark.parametrize("name", ["weight.absmax", "weight.quant_state.bitsandbytes__nf4"])
def test_an_array_that_is_missing_is_named(name, tmp_path):
    source = QUANTISED / "bitsandbytes_nf4_llama"
    tensors = load_file(source / "model.safetensors")
    del tensors[f"model.layers.1.self_attn.q_proj.{name}"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=f"layers.1.self_attn.q_proj.{name} is missing"):
        load(tmp_path)
