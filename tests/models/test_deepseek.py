"""Published configurations of DeepSeek-V2, V3 and Kimi-K2, as their model cards give them, and what
is refused."""

import functools
import json
import math
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxshare.cache import KVCache
from jaxshare.layout import Layout
from jaxshare.models import ConfigError, ModelConfig, load, orbax_io
from jaxshare.models.mla import MLA
from jaxshare.models.moe import MoE
from jaxshare.models.safetensors_files import CheckpointError
from jaxshare.models.tensor_names import expected_tensors, stored_shapes
from jaxshare.rope import Rope
from jaxshare.sharding import make_mesh
from tests.helpers import mostly_slow
from tests.paths import FIXTURES

DENSE = FIXTURES / "parity" / "deepseek_v2_dense"
DENSE_V3 = FIXTURES / "parity" / "deepseek_v3_dense_halves"
EXPERTS = FIXTURES / "parity" / "deepseek_v3_experts"

V2_LITE = dict(
    architectures=["DeepseekV2ForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    auto_map={"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    aux_loss_alpha=0.001,
    bos_token_id=100000,
    eos_token_id=100001,
    first_k_dense_replace=1,
    hidden_act="silu",
    hidden_size=2048,
    initializer_range=0.02,
    intermediate_size=10944,
    kv_lora_rank=512,
    max_position_embeddings=163840,
    model_type="deepseek_v2",
    moe_intermediate_size=1408,
    moe_layer_freq=1,
    n_group=1,
    n_routed_experts=64,
    n_shared_experts=2,
    norm_topk_prob=False,
    num_attention_heads=16,
    num_experts_per_tok=6,
    num_hidden_layers=27,
    num_key_value_heads=16,
    pretraining_tp=1,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rms_norm_eps=1e-06,
    rope_scaling=dict(
        beta_fast=32,
        beta_slow=1,
        factor=40,
        mscale=0.707,
        mscale_all_dim=0.707,
        original_max_position_embeddings=4096,
        type="yarn",
    ),
    rope_theta=10000,
    routed_scaling_factor=1.0,
    scoring_func="softmax",
    seq_aux=True,
    tie_word_embeddings=False,
    topk_group=1,
    topk_method="greedy",
    torch_dtype="bfloat16",
    transformers_version="4.33.1",
    use_cache=True,
    v_head_dim=128,
    vocab_size=102400,
)
V2 = V2_LITE | dict(
    hidden_size=5120,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    n_group=8,
    n_routed_experts=160,
    num_attention_heads=128,
    num_hidden_layers=60,
    num_key_value_heads=128,
    q_lora_rank=1536,
    routed_scaling_factor=16.0,
    topk_group=3,
    topk_method="group_limited_greedy",
)
V3 = V2 | dict(
    architectures=["DeepseekV3ForCausalLM"],
    bos_token_id=0,
    eos_token_id=1,
    ep_size=1,
    first_k_dense_replace=3,
    hidden_size=7168,
    intermediate_size=18432,
    model_type="deepseek_v3",
    moe_intermediate_size=2048,
    n_group=8,
    n_routed_experts=256,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_experts_per_tok=8,
    num_hidden_layers=61,
    num_nextn_predict_layers=1,
    rope_scaling=V2["rope_scaling"] | dict(mscale=1.0, mscale_all_dim=1.0),
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_group=4,
    topk_method="noaux_tc",
    vocab_size=129280,
)
KIMI_K2 = V3 | dict(
    bos_token_id=163584,
    eos_token_id=163585,
    first_k_dense_replace=1,
    max_position_embeddings=131072,
    model_type="kimi_k2",
    n_group=1,
    n_routed_experts=384,
    num_attention_heads=64,
    num_key_value_heads=64,
    num_nextn_predict_layers=0,
    rope_scaling=V3["rope_scaling"] | dict(beta_fast=1.0, beta_slow=1.0, factor=32.0),
    rope_theta=50000.0,
    routed_scaling_factor=2.827,
    topk_group=1,
    vocab_size=163840,
)
"""The files of V3 and Kimi-K2 name the quantization of their own weights as well; those of their
conversions to bfloat16 do not."""


WITH_RANK = MLA(1536, 512, 128, 64, 128)
V2_ROUTING = dict(normalise=False, scoring="softmax")
V3_ROUTING = dict(normalise=True, scoring="sigmoid", group_score="top2", choice_bias=True)


@pytest.mark.parametrize(
    ("published", "mla", "moe", "dense"),
    [
        (V2_LITE, MLA(0, 512, 128, 64, 128), MoE(64, 6, 1408, shared_size=2816, **V2_ROUTING), 1),
        (
            V2,
            WITH_RANK,
            MoE(160, 6, 1536, groups=8, top_groups=3, scaling=16.0, shared_size=3072, **V2_ROUTING),
            1,
        ),
        (
            V3,
            WITH_RANK,
            MoE(256, 8, 2048, groups=8, top_groups=4, scaling=2.5, shared_size=2048, **V3_ROUTING),
            3,
        ),
        (KIMI_K2, WITH_RANK, MoE(384, 8, 2048, scaling=2.827, shared_size=2048, **V3_ROUTING), 1),
    ],
    ids=["V2-Lite", "V2", "V3", "Kimi-K2"],
)
def test_published_configurations(published, mla, moe, dense):
    config = ModelConfig.from_json(published)
    assert (config.mla, config.moe) == (mla, moe)
    assert config.sparse_layers == (False,) * dense + (True,) * (config.num_layers - dense)
    assert (config.num_kv_heads, config.head_dim, config.value_dim) == (1, 576, 0)
    assert config.rope.rotary_dim == 64 and config.rope_interleaved
    assert not (config.qkv_bias or config.out_bias or config.mlp_bias or config.qk_norm)


@pytest.mark.parametrize(
    ("published", "parameters"),
    [(V2_LITE, 15.7065e9), (V2, 235.741e9), (V3, 671.026e9), (KIMI_K2, 1026.408e9)],
    ids=["V2-Lite", "V2", "V3", "Kimi-K2"],
)
def test_published_numbers_of_parameters(published, parameters):
    """Those of the model cards, without the layers that predict later tokens."""
    expected = expected_tensors(ModelConfig.from_json(published))
    found = sum(math.prod(tensor.shape) for tensor in expected.values())
    assert found == pytest.approx(parameters, rel=1e-5)
    stored = stored_shapes(expected)
    assert found == sum(map(math.prod, stored.values()))


def test_published_tensors_of_v3():
    stored = stored_shapes(expected_tensors(ModelConfig.from_json(V3)))
    layer = "model.layers.60."
    for name, shape in {
        "model.embed_tokens.weight": (129280, 7168),
        "model.layers.0.mlp.gate_proj.weight": (18432, 7168),
        f"{layer}input_layernorm.weight": (7168,),
        f"{layer}post_attention_layernorm.weight": (7168,),
        f"{layer}self_attn.q_a_proj.weight": (1536, 7168),
        f"{layer}self_attn.q_a_layernorm.weight": (1536,),
        f"{layer}self_attn.q_b_proj.weight": (24576, 1536),
        f"{layer}self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        f"{layer}self_attn.kv_a_layernorm.weight": (512,),
        f"{layer}self_attn.kv_b_proj.weight": (32768, 512),
        f"{layer}self_attn.o_proj.weight": (7168, 16384),
        f"{layer}mlp.gate.weight": (256, 7168),
        f"{layer}mlp.gate.e_score_correction_bias": (256,),
        f"{layer}mlp.experts.255.down_proj.weight": (7168, 2048),
        f"{layer}mlp.shared_experts.up_proj.weight": (2048, 7168),
        "model.norm.weight": (7168,),
        "lm_head.weight": (129280, 7168),
    }.items():
        assert stored[name] == shape, name
    assert not any(name.startswith("model.layers.61.") for name in stored)


@pytest.mark.parametrize(
    ("published", "mscale", "factor"), [(V2_LITE, 0.707, 40), (V3, 1.0, 40), (KIMI_K2, 1.0, 32)]
)
def test_scores_have_the_square_of_yarns_factor(published, mscale, factor):
    config = ModelConfig.from_json(published)
    assert config.rope.attention_factor == pytest.approx(1.0)
    larger = 0.1 * mscale * math.log(factor) + 1
    assert config.score_scale == pytest.approx(192**-0.5 * larger**2)


def test_scores_without_yarn():
    config = ModelConfig.from_json(V3 | dict(rope_scaling=None))
    assert config.score_scale == pytest.approx(192**-0.5)
    assert config.rope == Rope.default(64, 10_000.0)


def test_a_token_of_v3_takes_70_kb():
    """The 70,272 bytes of DeepSeek-V3's insights paper, table 1 (Zhao et al., 2025): 70.272 KB."""
    config = ModelConfig.from_json(V3)
    assert KVCache.create(config, (1,)).token_bytes == 70_272


def test_dense_layers_alone():
    for first in (61, 99):
        config = ModelConfig.from_json(V3 | dict(first_k_dense_replace=first))
        assert config.moe is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(kv_lora_rank=None), "lacks kv_lora_rank"),
        (dict(qk_rope_head_dim=63), "qk_rope_head_dim is 63, but it must be even"),
        (dict(v_head_dim=0), "v_head_dim is 0, but must be greater than 0"),
        (dict(num_key_value_heads=8), "num_key_value_heads is 8, .* must be 128"),
        (dict(head_dim=128), "head_dim is 128, .* must be 64"),
        (dict(qk_head_dim=128), "qk_head_dim is 128, .* must be 192"),
        (dict(n_group=7), "n_group is 7, but it must divide n_routed_experts, 256"),
        (dict(topk_group=9), "topk_group is 9, but there are only 8 groups"),
        (dict(num_experts_per_tok=129), "a token can reach only 128 experts"),
        (dict(moe_layer_freq=2), "moe_layer_freq is 2, but only 1"),
        (dict(scoring_func="softmax"), "scoring_func .* it must be sigmoid"),
        (dict(topk_method="greedy"), "topk_method .* it must be noaux_tc"),
        (dict(model_type="deepseek_v2"), "model_type .* deepseek_v3 or kimi_k2"),
        (dict(index_topk=2048), "unknown settings .* index_topk"),
        (dict(quantization_config=dict(quant_method="fp8", fmt="e5m2")), "fmt .* only e4m3"),
    ],
)
def test_what_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_json(V3 | change)


def test_what_is_refused_of_version_2():
    with pytest.raises(ConfigError, match="norm_topk_prob is true, but in DeepSeek-V2"):
        ModelConfig.from_json(V2 | dict(norm_topk_prob=True))
    with pytest.raises(ConfigError, match=r"topk_method .* must be greedy or group_limited_greedy"):
        ModelConfig.from_json(V2 | dict(topk_method="noaux_tc"))


@functools.cache
def dense():
    return load(DENSE, dtype="float32")


def same_parameters(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_k_b_and_v_b_are_the_rows_of_kv_b_proj_of_each_head():
    stored = load_file(DENSE / "model.safetensors")["model.layers.1.self_attn.kv_b_proj.weight"]
    params = dense().params["params"]["layers_1"]["attention"]
    for head in range(4):
        rows = stored[18 * head : 18 * head + 18].astype(np.float32)  # 8 of a key, 10 of a value
        np.testing.assert_array_equal(params["k_b"]["kernel"][8 * head : 8 * head + 8], rows[:8])
        np.testing.assert_array_equal(params["v_b"]["kernel"][10 * head : 10 * head + 10], rows[8:])


def test_converted_and_back_every_bit_is_the_same(tmp_path):
    orbax_io.convert(DENSE, tmp_path / "orbax")
    orbax_io.convert(tmp_path / "orbax", tmp_path / "back")
    before, after = (load_file(f / "model.safetensors") for f in (DENSE, tmp_path / "back"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype
        np.testing.assert_array_equal(value.view(np.uint8), after[name].view(np.uint8))
    same_parameters(load(tmp_path / "orbax", dtype="float32").params, dense().params)


def test_it_is_read_onto_a_mesh():
    mesh = make_mesh(tensor=2, kv=2)
    model = load(DENSE, dtype="float32", mesh=mesh)
    assert (model.config.num_kv_heads, model.kv_repeats) == (2, 2)
    same_parameters(model.params, dense().on(mesh).params)
    assert model.fingerprint == dense().fingerprint


def with_tensors(folder, target, change):
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def test_layers_that_predict_later_tokens_are_left_out(tmp_path):
    def add(tensors):
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            tensors[name.replace(".1.", ".2.")] = tensors[name]
        tensors["model.layers.2.eh_proj.weight"] = np.zeros((32, 64), np.float32)

    more = with_tensors(DENSE_V3, tmp_path / "more", add)
    same_parameters(load(more).params, load(DENSE_V3).params)
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.eh_proj\.weight is unexpected"):
        load(with_tensors(DENSE, tmp_path / "v2", add))


def test_tensors_that_do_not_fit_are_named(tmp_path):
    def damage(tensors):
        kv_b, kv_a = (
            f"model.layers.0.self_attn.{n}.weight" for n in ("kv_b_proj", "kv_a_layernorm")
        )
        tensors[kv_b] = tensors[kv_b][:-1]
        del tensors[kv_a]

    with pytest.raises(CheckpointError) as error:
        load(with_tensors(DENSE, tmp_path / "damaged", damage))
    assert "kv_b_proj.weight has shape (71, 16), not (72, 16)" in str(error.value)
    assert "kv_a_layernorm.weight is missing" in str(error.value)


def test_a_config_that_does_not_say_what_its_tensors_are(tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(DENSE, folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | dict(q_lora_rank=24)))
    with pytest.raises(CheckpointError, match=r"q_a_proj\.weight is missing"):
        load(folder)


@functools.cache
def experts():
    return load(EXPERTS, dtype="float32")


def test_a_checkpoint_with_experts_is_converted_and_back(tmp_path):
    orbax_io.convert(EXPERTS, tmp_path / "orbax")
    orbax_io.convert(tmp_path / "orbax", tmp_path / "back")
    before, after = (load_file(f / "model.safetensors") for f in (EXPERTS, tmp_path / "back"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(value.view(np.uint8), after[name].view(np.uint8))
    same_parameters(load(tmp_path / "orbax", dtype="float32").params, experts().params)


def test_the_bias_by_which_experts_are_chosen_is_not_rounded(tmp_path):
    bias = np.asarray([10 + i / 1000 for i in range(8)], np.float32)

    def widen(tensors):
        tensors["model.layers.1.mlp.gate.e_score_correction_bias"] = bias

    folder = with_tensors(EXPERTS, tmp_path / "wide", widen)
    orbax_io.convert(folder, tmp_path / "orbax")
    for source in (folder, tmp_path / "orbax"):
        params = load(source, dtype="bfloat16").params["params"]["layers_1"]["moe"]
        np.testing.assert_array_equal(params["choice_bias"], bias)
        assert params["router"]["kernel"].dtype == "bfloat16"


@pytest.mark.parametrize("axes", mostly_slow([{"tensor": 2, "kv": 2}, {"tensor": 4}]), ids=str)
def test_experts_and_latents_over_devices(axes):
    """The logits of transformers at each position, on a mesh."""
    model = load(EXPERTS, dtype="float32", mesh=make_mesh(**axes))
    with np.load(EXPERTS / "expected.npz") as expected:
        tokens, logits = expected["tokens"][:64], expected["logits"][:64]
    cache = KVCache.create(model.config, (64,), "float32", mesh=model.mesh)
    layout = Layout.from_blocks([[0]])
    found, _ = model.forward(tokens[None], [64], cache, layout, every=True)
    np.testing.assert_allclose(found[0], logits, rtol=0, atol=1e-4)


def test_an_expert_that_is_missing_is_named(tmp_path):
    def remove(tensors):
        del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]

    with pytest.raises(CheckpointError, match=r"experts\.5\.up_proj\.weight is missing"):
        load(with_tensors(EXPERTS, tmp_path / "less", remove))
