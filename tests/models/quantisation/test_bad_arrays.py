"""Quantised checkpoints with arrays that are wrong: each error names the layer and what would do."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxshare.models import load
from jaxshare.models.config_fields import ConfigError
from jaxshare.models.safetensors_files import CheckpointError
from tests.paths import FIXTURES

QUANTISED = FIXTURES / "quantised"
UP = "model.layers.0.mlp.up_proj"


def changed(tmp_path, name, change, **settings):
    """A copy of a checkpoint with other arrays, and with other settings."""
    folder = tmp_path / name
    shutil.copytree(QUANTISED / name, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def without(name):
    return lambda tensors: tensors.pop(f"{UP}.{name}")


def having(name, value):
    return lambda tensors: tensors.update({f"{UP}.{name}": value})


def with_entry(name, value):
    """Puts a value into the array in the middle."""

    def change(tensors):
        array = tensors[f"{UP}.{name}"].copy()
        array[len(array) // 2] = value
        tensors[f"{UP}.{name}"] = array

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("awq_llama", without("scales"), f"{UP}.scales is missing"),
        ("awq_llama", without("qzeros"), f"{UP}.qzeros is missing"),
        ("awq_llama", without("qweight"), f"{UP}.qweight is missing"),
        (
            "awq_llama",
            having("scales", np.ones((3, 64), np.float16)),
            rf"{UP}.scales has shape \(3, 64\), not \(2, 64\)",
        ),
        (
            "awq_llama",
            having("scales", np.ones((2, 64), np.int32)),
            f"{UP}.scales has dtype I32, not one of BF16, F16, F32",
        ),
        (
            "awq_llama",
            having("qweight", np.ones((64, 8), np.int64)),
            f"{UP}.qweight has dtype I64, not one of I32",
        ),
        (
            "awq_llama",
            having("weight", np.ones((64, 64), np.float16)),
            f"{UP}.weight is there beside {UP}.qweight: keep one of them",
        ),
        ("awq_llama", having("g_idx", np.zeros(64, np.int32)), f"{UP}.g_idx is unexpected"),
        ("awq_llama", with_entry("scales", 0), f"{UP} has scales that are zero; fetch"),
        ("awq_llama", with_entry("scales", np.nan), f"{UP} has scales that are NaN or infinite"),
        (
            "gptq_8_bits_llama",
            with_entry("g_idx", 0),
            f"{UP} cannot be read: its g_idx does not put 32 inputs in each of 2 groups",
        ),
        (
            "gptq_8_bits_llama",
            with_entry("g_idx", 7),
            f"{UP} cannot be read: its g_idx does not put 32 inputs in each of 2 groups",
        ),
        ("gptq_8_bits_llama", having("bias", np.ones(64, np.float16)), f"{UP}.bias is unexpected"),
        (
            "w4a16_glm4",
            lambda tensors: tensors.update(
                {"model.layers.0.self_attn.q_proj.weight_shape": np.asarray([64, 32])}
            ),
            r"q_proj cannot be read: its weight_shape is \(64, 32\), not \(64, 64\)",
        ),
        ("w8a8_llama", without("weight_scale"), f"{UP}.weight_scale is missing"),
        (
            "w8a8_llama",
            having("weight", np.ones((64, 64), np.uint8)),
            f"{UP}.weight has dtype U8, not one of BF16, F16, F32",
        ),
        (
            "w8a8_llama",
            lambda tensors: tensors.update({"lm_head.weight": np.ones((96, 64), np.int8)}),
            "lm_head.weight has dtype I8, not one of BF16, F16, F32",
        ),
    ],
)
def test_wrong_arrays_are_named(tmp_path, name, change, message):
    with pytest.raises(CheckpointError, match=message):
        load(changed(tmp_path, name, change))


def test_all_that_is_wrong_is_listed_together(tmp_path):
    def change(tensors):
        del tensors[f"{UP}.scales"], tensors["model.layers.1.self_attn.k_proj.qzeros"]
        tensors["more"] = np.zeros(3, np.float32)

    folder = changed(tmp_path, "awq_llama", change)
    with pytest.raises(CheckpointError) as error:
        load(folder)
    text = str(error.value)
    assert all(
        part in text
        for part in (
            f"{UP}.scales is missing",
            "model.layers.1.self_attn.k_proj.qzeros is missing",
            "more is unexpected",
        )
    )


def test_groups_that_do_not_divide_are_named(tmp_path):
    folder = changed(tmp_path, "awq_llama", lambda tensors: None, group_size=48)
    with pytest.raises(
        CheckpointError, match=f"{UP} cannot be quantised so: groups of 48 do not divide its 64"
    ):
        load(folder)


def test_quantised_tensors_without_settings_are_said_to_be_such(tmp_path):
    folder = changed(tmp_path, "awq_llama", lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"which are read where config\.json has the quantization_config"
    ):
        load(folder)


def test_other_settings_than_the_tensors_are_of_are_refused(tmp_path):
    folder = changed(tmp_path, "awq_llama", lambda tensors: None, bits=3)
    with pytest.raises(ConfigError, match="bits is 3, but only 4"):
        load(folder)


def test_experts_that_are_not_all_quantised_are_named(tmp_path):
    layer = "model.layers.1.mlp.experts.2.down_proj"

    def change(tensors):
        for array in ("qweight", "qzeros", "scales"):
            del tensors[f"{layer}.{array}"]
        tensors[f"{layer}.weight"] = np.ones((64, 32), np.float16)

    with pytest.raises(
        CheckpointError, match=r"experts.0.down_proj and the same layer .* not all quantised"
    ):
        load(changed(tmp_path, "awq_qwen3_moe", change))


def test_what_is_not_read_may_be_there_or_not(tmp_path):
    """Biases of 0 that AutoGPTQ writes for layers without one, scales of caches, no g_idx, and a g_idx
    that says nothing."""

    def change(tensors):
        tensors[f"{UP}.bias"] = np.zeros(64, np.float16)
        tensors["model.layers.0.self_attn.k_scale"] = np.ones(1, np.float32)
        del tensors[f"{UP}.g_idx"]
        tensors["model.layers.0.mlp.down_proj.g_idx"] = np.zeros(64, np.int32)

    model, whole = (
        load(changed(tmp_path, "gptq_8_bits_llama", change)),
        load(QUANTISED / "gptq_8_bits_llama"),
    )
    for name in ("up", "down"):
        one, other = (
            each.params["params"]["layers_0"]["mlp"][name]["kernel"] for each in (model, whole)
        )
        np.testing.assert_array_equal(one.codes, other.codes)
        assert one.order is None


def test_layers_with_plain_tensors_stay_plain(tmp_path):
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float16)

    def change(tensors):
        for array in ("qweight", "qzeros", "scales"):
            del tensors[f"{UP}.{array}"]
        tensors[f"{UP}.weight"] = weight

    model = load(changed(tmp_path, "awq_llama", change))
    np.testing.assert_array_equal(model.params["params"]["layers_0"]["mlp"]["up"]["kernel"], weight)


def test_scales_of_zero_are_loaded_without_the_check(tmp_path):
    folder = changed(tmp_path, "awq_llama", with_entry("scales", 0))
    kernel = load(folder, check=False).params["params"]["layers_0"]["mlp"]["up"]["kernel"]
    assert not np.asarray(kernel.scales).all()


@pytest.mark.parametrize(
    ("name", "scales"),
    [("fp8_tensors_llama", "weight_scale"), ("fp8_blocks_deepseek_v3", "weight_scale_inv")],
)
def test_missing_scales_have_the_name_of_others(tmp_path, name, scales):
    folder = tmp_path / name
    shutil.copytree(QUANTISED / name, folder)
    file = folder / "model.safetensors"
    there, other = (
        f'"{UP}.{each}"'.encode() for each in (scales, scales.replace("scale", "other"))
    )
    content = file.read_bytes()
    assert there in content
    file.write_bytes(content.replace(there, other))
    with pytest.raises(CheckpointError, match=f"{UP}.{scales} is missing"):
        load(folder)


def test_codes_that_are_no_number_are_named(tmp_path):
    folder = tmp_path / "fp8"
    shutil.copytree(QUANTISED / "fp8_tensors_llama", folder)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    size = int.from_bytes(content[:8], "little")
    start, _ = json.loads(content[8 : 8 + size])[f"{UP}.weight"]["data_offsets"]
    content[8 + size + start + 5] = np.array(np.nan, ml_dtypes.float8_e4m3fn).view(np.uint8)
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{UP} has codes that are NaN; fetch the checkpoint"):
        load(folder)
