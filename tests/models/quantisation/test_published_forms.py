"""Quantised checkpoints as published, against the libraries that make them and transformers with plain
weights (`scripts/fixtures/make_quantised.py`)."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare.cache import KVCache
from jaxshare.layout import Layout
from jaxshare.models import load, orbax_io
from jaxshare.quantised import is_quantised
from jaxshare.sharding import make_mesh
from tests.helpers import mostly_slow
from tests.paths import FIXTURES

QUANTISED = FIXTURES / "quantised"
CASES = {
    "awq_llama": "int4",
    "awq_qwen3_moe": "int4",
    "gptq_phi3": "int4",
    "fp8_blocks_deepseek_v3": "fp8",
    "w4a16_glm4": "int4",
    "w8a8_llama": "int8",
    "bitsandbytes_nf4_llama": "nf4",
    "bitsandbytes_int8_qwen2": "int8",
    "gptq_8_bits_llama": "int8",
    "fp8_tensors_llama": "fp8",
    "w4a16_ordered_llama": "int4",
    "float_quantized_llama": "fp8",
}
PLACES = {"self_attn": "attention", "mlp": "mlp"}


def logits_of(model, tokens):
    cache = KVCache.create(model.config, [64], jnp.float32, mesh=model.mesh)
    found, _ = model.forward(
        tokens[None], np.asarray([tokens.size]), cache, Layout.from_blocks([[0]]), every=True
    )
    return np.asarray(found)[0, : tokens.size]


def turned(rows, head, start, rotary):
    """Rows of a checkpoint that rotates pairs (2 i, 2 i + 1), as pairs (i, i + rotary / 2)."""
    heads = rows.reshape(-1, head, rows.shape[-1])
    part = heads[:, start : start + rotary]
    pairs = part.reshape(len(heads), rotary // 2, 2, -1).swapaxes(1, 2).reshape(part.shape)
    whole = [heads[:, :start], pairs, heads[:, start + rotary :]]
    return np.concatenate(whole, axis=1).reshape(rows.shape)


def found_and_expected(model, layer, expected):
    """The numbers of a layer in the model, and the checkpoint's as the model has them."""
    number, block, name = re.fullmatch(r"model\.layers\.(\d+)\.(\w+)\.(.*)", layer).groups()
    params = model.params["params"][f"layers_{number}"]
    name = name.removesuffix("_proj").removesuffix("_proj_with_mqa")
    if name.startswith(("experts", "shared_experts")):
        *_, expert, part = name.split(".")
        if expert == "shared_experts":
            return [params["moe"]["shared"][part]["kernel"]], [expected]
        return [params["moe"][part]["kernel"][int(expert)]], [expected]
    module = params[PLACES[block]]
    config = model.config
    if config.mla and block == "self_attn":
        mla = config.mla
        if name == "q_b":
            expected = turned(expected, mla.query_dim, mla.nope_dim, mla.rope_dim)
        if name == "kv_a":
            expected = turned(expected, mla.cached_dim, mla.kv_lora_rank, mla.rope_dim)
        if name == "kv_b":
            heads = expected.reshape(config.num_heads, -1, mla.kv_lora_rank)
            parts = heads[:, : mla.nope_dim], heads[:, mla.nope_dim :]
            return [module[part]["kernel"] for part in ("k_b", "v_b")], [
                part.reshape(-1, mla.kv_lora_rank) for part in parts
            ]
    elif config.rope_interleaved and name in ("q", "k"):
        expected = turned(expected, config.head_dim, 0, config.rope.rotary_dim)
    names = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}.get(name, (name,))
    kernels = [module[each]["kernel"] for each in names]
    cuts = np.cumsum([kernel.shape[0] for kernel in kernels])[:-1]
    return kernels, np.split(expected, cuts)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_library_bit_for_bit(name):
    case = json.loads((QUANTISED / name / "case.json").read_text())
    model = load(QUANTISED / name)
    assert model.dtype == jnp.dtype(case["dtype"])
    expected = np.load(QUANTISED / name / "expected.npz")
    layers = expected.keys() - {"tokens", "logits"}
    assert layers and layers <= {*case["layers"]}
    for layer in layers:
        kernels, parts = found_and_expected(model, layer, expected[layer])
        for kernel, part in zip(kernels, parts, strict=True):
            assert is_quantised(kernel) and kernel.format == CASES[name]
            numbers = np.asarray(kernel.dequantised())
            assert numbers.dtype == model.dtype
            # -0 and 0 are one number, and a code of zero has no sign in some libraries.
            bits = np.where(part == 0x8000, np.uint16(0), part)
            np.testing.assert_array_equal((numbers + 0).view(np.uint16), bits, layer)


@pytest.mark.parametrize("name", mostly_slow(CASES))
def test_logits_are_those_of_transformers(name):
    expected = np.load(QUANTISED / name / "expected.npz")
    found = logits_of(load(QUANTISED / name, dtype="float32"), expected["tokens"])
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=1e-4)


def test_scales_stay_as_stored_in_a_model_of_another_dtype():
    own, other = (load(QUANTISED / "awq_llama", dtype=dtype) for dtype in (None, "bfloat16"))
    assert own.dtype == jnp.float16 and other.dtype == jnp.bfloat16
    kernels = [each.params["params"]["layers_0"]["mlp"]["up"]["kernel"] for each in (own, other)]
    assert {each.scales.dtype for each in kernels} == {jnp.dtype(jnp.float16)}
    jax.tree.map(np.testing.assert_array_equal, *[(x.codes, x.scales, x.zeros) for x in kernels])
    assert kernels[1].dequantised().dtype == jnp.bfloat16


@pytest.mark.parametrize("name", mostly_slow(["awq_qwen3_moe", "w8a8_llama", "w4a16_glm4"]))
def test_devices_of_a_mesh_have_their_parts(name):
    expected = np.load(QUANTISED / name / "expected.npz")
    model = load(QUANTISED / name, dtype="float32", mesh=make_mesh(tensor=2))
    found = logits_of(model, expected["tokens"])
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=1e-4)


def test_an_order_of_inputs_cannot_be_split():
    with pytest.raises(ValueError, match="with an order of its inputs, which cannot be split over"):
        load(QUANTISED / "gptq_phi3", mesh=make_mesh(tensor=2))


def equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(
    "name", mostly_slow(["fp8_blocks_deepseek_v3", "gptq_phi3", "awq_qwen3_moe"])
)
def test_orbax_form_keeps_codes_and_scales(name, tmp_path):
    summary = orbax_io.convert(QUANTISED / name, tmp_path / "orbax")
    assert summary["form"] == "orbax"
    loaded, restored = load(QUANTISED / name), load(tmp_path / "orbax")
    equal(loaded.params, restored.params)
    assert loaded.fingerprint == restored.fingerprint and restored.dtype == loaded.dtype
    half = load(tmp_path / "orbax", dtype="float32")
    equal(half.params, load(QUANTISED / name, dtype="float32").params)


def test_orbax_form_is_restored_onto_a_mesh(tmp_path):
    """Includes one kv head for two devices, which is repeated."""
    orbax_io.convert(QUANTISED / "w8a8_llama", tmp_path / "orbax")
    for sizes in ({"tensor": 2}, {"tensor": 4}):
        mesh = make_mesh(**sizes)
        one, other = (
            load(each, mesh=mesh) for each in (QUANTISED / "w8a8_llama", tmp_path / "orbax")
        )
        equal(one.params, other.params)
        specs = [[x.sharding.spec for x in jax.tree.leaves(each.params)] for each in (one, other)]
        assert specs[0] == specs[1]
    orbax_io.convert(QUANTISED / "gptq_phi3", tmp_path / "ordered")
    with pytest.raises(ValueError, match="with an order of its inputs, which cannot be split over"):
        load(tmp_path / "ordered", mesh=make_mesh(tensor=2))


def test_there_is_no_way_back_from_orbax_form(tmp_path):
    orbax_io.convert(QUANTISED / "w8a8_llama", tmp_path / "orbax")
    with pytest.raises(
        ValueError, match=r"is quantised \(int8\), and quantised parameters are not"
    ):
        orbax_io.convert(tmp_path / "orbax", tmp_path / "back")
    assert not (tmp_path / "back").exists()
