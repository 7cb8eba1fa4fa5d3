"""gpt-oss: config.json of the published checkpoints, experts in MXFP4, and what is refused."""

import functools
import itertools
import math
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxshare import models
from jaxshare.models import ConfigError, ModelConfig
from jaxshare.models.mxfp4 import packed
from jaxshare.models.orbax_io import convert
from jaxshare.models.safetensors_files import CheckpointError
from jaxshare.models.tensor_names import expected_tensors
from jaxshare.quantised import QuantisedTensor
from jaxshare.sharding import make_mesh
from tests.helpers import mostly_slow
from tests.paths import FIXTURES

PARITY = FIXTURES / "parity"
PACKED, PLAIN = PARITY / "gpt_oss_mqa_yarn_mxfp4", PARITY / "gpt_oss_gqa_sharded"
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
GPT_OSS_20B = dict(
    architectures=["GptOssForCausalLM"],
    attention_bias=True,
    attention_dropout=0.0,
    eos_token_id=200002,
    experts_per_token=4,
    head_dim=64,
    hidden_act="silu",
    hidden_size=2880,
    initial_context_length=4096,
    initializer_range=0.02,
    intermediate_size=2880,
    layer_types=["sliding_attention", "full_attention"] * 12,
    max_position_embeddings=131072,
    model_type="gpt_oss",
    num_attention_heads=64,
    num_experts_per_tok=4,
    num_hidden_layers=24,
    num_key_value_heads=8,
    num_local_experts=32,
    output_router_logits=False,
    pad_token_id=199999,
    quantization_config=dict(
        modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        quant_method="mxfp4",
    ),
    rms_norm_eps=1e-05,
    rope_scaling=dict(
        beta_fast=32.0,
        beta_slow=1.0,
        factor=32.0,
        original_max_position_embeddings=4096,
        rope_type="yarn",
        truncate=False,
    ),
    rope_theta=150000,
    router_aux_loss_coef=0.9,
    sliding_window=128,
    swiglu_limit=7.0,
    tie_word_embeddings=False,
    transformers_version="4.55.0.dev0",
    use_cache=True,
    vocab_size=201088,
)
GPT_OSS_120B = GPT_OSS_20B | dict(
    num_hidden_layers=36,
    num_local_experts=128,
    layer_types=["sliding_attention", "full_attention"] * 18,
)


@pytest.mark.parametrize(("fields", "billions"), [(GPT_OSS_20B, 20.91), (GPT_OSS_120B, 116.83)])
def test_published_checkpoints(fields, billions):
    """The numbers are those of table 1 of the model card, arXiv 2508.10925."""
    config = ModelConfig.from_json(fields)
    assert config.windows == (128, 0) * (config.num_layers // 2) and config.attention_sinks
    assert config.moe is not None and config.moe.top_k == 4
    count = sum(math.prod(tensor.shape) for tensor in expected_tensors(config).values())
    assert round(count / 1e9, 2) == billions


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (dict(experts_per_token=2), "experts_per_token is 2, but num_experts_per_tok is 4"),
        (dict(sliding_window=0), "sliding_window is 0, but must be greater than 0"),
        (dict(quantization_config=dict(quant_method="hqq")), "quant_method is .*hqq.* not read"),
        (dict(num_experts_per_tok=33, experts_per_token=33), "there are 32 experts"),
    ],
)
def test_what_is_wrong_is_named(more, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_json(GPT_OSS_20B | more)


def test_every_code_of_mxfp4():
    """The sixteen numbers of section 5.3.3 of the specification, the low half of a byte first."""
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers = [*positive, *(-x for x in positive)]
    for low, high in itertools.product(range(16), repeat=2):
        blocks = np.full((1, 2, 16), low | high << 4, np.uint8)
        made = packed(blocks, np.asarray([[127, 124]], np.uint8))
        found = np.asarray(made.dequantised(), np.float64)
        pairs = [numbers[low], numbers[high]] * 16
        assert found.tolist() == [[*pairs, *(x / 8 for x in pairs)]]


def copied(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    return tmp_path / "model", file, load_file(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{GATE_UP}_scales"), f"{GATE_UP}_scales is missing"),
        (
            lambda t: t.update({f"{GATE_UP}_scales": t[f"{GATE_UP}_scales"][:, :-1].copy()}),
            rf"{GATE_UP}_scales has shape \(4, 127, 1\), not \(4, 128, 1\)",
        ),
        (
            lambda t: t.update({f"{GATE_UP}_blocks": t[f"{GATE_UP}_blocks"].astype(np.float32)}),
            f"{GATE_UP}_blocks has dtype F32, not one of U8",
        ),
        (
            lambda t: t[f"{GATE_UP}_scales"].__setitem__((2, 5, 0), 255),
            f"{GATE_UP}_blocks has scales that are NaN or infinite",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.sinks": np.ones(3, np.float32)}),
            r"model.layers.0.self_attn.sinks has shape \(3,\), not \(4,\)",
        ),
        (
            lambda t: t.update({GATE_UP: np.ones((4, 32, 128), np.float32)}),
            f"{GATE_UP} is unexpected",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change, message, tmp_path):
    folder, file, tensors = copied(PACKED, tmp_path)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message):
        models.load(folder)


def test_experts_stay_packed_with_the_numbers_of_the_file():
    """Each number is computed by hand from its code and the exponent of its group."""
    params = models.load(PACKED, "float32").params["params"]
    tensors = load_file(PACKED / "model.safetensors")
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers = np.asarray([*positive, *(-x for x in positive)])
    for name, rows, modules in (("gate_up", 2, ("gate", "up")), ("down", 1, ("down",))):
        blocks, scales = (
            tensors[f"model.layers.1.mlp.experts.{name}_proj_{part}"]
            for part in ("blocks", "scales")
        )
        pairs = np.stack([numbers[blocks & 15], numbers[blocks >> 4]], axis=-1)
        whole = pairs.reshape(*scales.shape, 32) * 2.0 ** (scales[..., None].astype(int) - 127)
        whole = whole.reshape(*scales.shape[:2], -1)
        for index, module in enumerate(modules):
            kernel = params["layers_1"]["moe"][module]["kernel"]
            assert isinstance(kernel, QuantisedTensor)
            assert kernel.codes.dtype == np.uint8 and kernel.scales.dtype.itemsize == 1
            expected = whole[:, index::rows].astype(np.float32)
            np.testing.assert_array_equal(np.asarray(kernel.dequantised()), expected)
            kept = np.asarray(jax.jit(lambda each: each.dequantised())(kernel))
            np.testing.assert_array_equal(kept, expected)


def test_bytes_of_published_experts_are_those_of_the_file():
    """17 bytes for 32 numbers, of the shape of gpt-oss-20b."""
    config = ModelConfig.from_json(GPT_OSS_20B)
    expected = expected_tensors(config)
    shapes = [t.shape for t in expected.values() if "moe" in t.path and len(t.shape) == 3]
    one = packed(np.zeros((1, 90, 16), np.uint8), np.full((1, 90), 127, np.uint8))
    count = sum(math.prod(shape) for shape in shapes)
    assert one.shape == (1, 2880) and one.nbytes * 32 == 17 * 2880
    assert round(count * 17 / 32 / 2**30, 1) == 9.5


def test_converted_to_orbax_and_back_it_is_the_same_model(tmp_path):
    convert(PLAIN, tmp_path / "orbax")
    convert(tmp_path / "orbax", tmp_path / "back")
    tokens = np.arange(12)[None]
    loaded = [models.load(folder, "float32") for folder in (PLAIN, tmp_path / "back")]
    causal = jax.jit(functools.partial(loaded[0].module.apply, method="causal"))
    assert loaded[0].config == loaded[1].config
    expected, found = (causal(model.params, tokens) for model in loaded)
    np.testing.assert_array_equal(found, expected)
    assert GATE_UP in load_file(tmp_path / "back" / "model.safetensors")


def test_packed_experts_are_the_same_bits_in_orbax_form(tmp_path):
    convert(PACKED, tmp_path / "orbax")
    found, expected = (models.load(folder).params for folder in (tmp_path / "orbax", PACKED))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    with pytest.raises(ValueError, match=r"is quantised \(mxfp4\)"):
        convert(tmp_path / "orbax", tmp_path / "back")


@pytest.mark.parametrize("tensor", mostly_slow([4, 2]))
def test_packed_experts_on_a_mesh(tensor):
    model = models.load(PACKED, "float32", mesh=make_mesh(tensor=tensor))
    kernel = model.params["params"]["layers_1"]["moe"]["down"]["kernel"]
    assert kernel.codes.addressable_shards[0].data.shape[0] == 4 // tensor
    alone = models.load(PACKED, "float32").params["params"]["layers_1"]["moe"]["down"]["kernel"]
    np.testing.assert_array_equal(np.asarray(kernel.codes), np.asarray(alone.codes))
