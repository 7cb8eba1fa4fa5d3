"""Mixtures of experts in config.json: published files, parameter counts, errors that name fields."""

import math

import pytest

from jaxshare.models import ConfigError, ModelConfig
from jaxshare.models.tensor_names import expected_tensors, stored_shapes

QWEN3_30B_A3B = dict(
    architectures=["Qwen3MoeForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=151643,
    decoder_sparse_step=1,
    eos_token_id=151645,
    head_dim=128,
    hidden_act="silu",
    hidden_size=2048,
    initializer_range=0.02,
    intermediate_size=6144,
    max_position_embeddings=40960,
    max_window_layers=48,
    mlp_only_layers=[],
    model_type="qwen3_moe",
    moe_intermediate_size=768,
    norm_topk_prob=True,
    num_attention_heads=32,
    num_experts=128,
    num_experts_per_tok=8,
    num_hidden_layers=48,
    num_key_value_heads=4,
    output_router_logits=False,
    rms_norm_eps=1e-06,
    rope_scaling=None,
    rope_theta=1000000.0,
    router_aux_loss_coef=0.001,
    sliding_window=None,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.51.0",
    use_cache=True,
    use_sliding_window=False,
    vocab_size=151936,
)
QWEN3_235B_A22B = QWEN3_30B_A3B | dict(
    hidden_size=4096,
    intermediate_size=12288,
    max_window_layers=94,
    moe_intermediate_size=1536,
    num_attention_heads=64,
    num_hidden_layers=94,
)
QWEN1_5_MOE_A2_7B = dict(
    architectures=["Qwen2MoeForCausalLM"],
    attention_dropout=0.0,
    bos_token_id=151643,
    decoder_sparse_step=1,
    eos_token_id=151643,
    hidden_act="silu",
    hidden_size=2048,
    initializer_range=0.02,
    intermediate_size=5632,
    max_position_embeddings=8192,
    max_window_layers=21,
    model_type="qwen2_moe",
    moe_intermediate_size=1408,
    norm_topk_prob=False,
    num_attention_heads=16,
    num_experts=60,
    num_experts_per_tok=4,
    num_hidden_layers=24,
    num_key_value_heads=16,
    output_router_logits=False,
    rms_norm_eps=1e-06,
    rope_theta=1000000.0,
    router_aux_loss_coef=0.001,
    shared_expert_intermediate_size=5632,
    sliding_window=32768,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.39.0.dev0",
    use_cache=True,
    use_sliding_window=False,
    vocab_size=151936,
)
MIXTRAL_8X7B = dict(
    architectures=["MixtralForCausalLM"],
    attention_dropout=0.0,
    bos_token_id=1,
    eos_token_id=2,
    hidden_act="silu",
    hidden_size=4096,
    initializer_range=0.02,
    intermediate_size=14336,
    max_position_embeddings=32768,
    model_type="mixtral",
    num_attention_heads=32,
    num_experts_per_tok=2,
    num_hidden_layers=32,
    num_key_value_heads=8,
    num_local_experts=8,
    output_router_logits=False,
    rms_norm_eps=1e-05,
    rope_theta=1000000.0,
    router_aux_loss_coef=0.02,
    sliding_window=None,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.36.0.dev0",
    use_cache=True,
    vocab_size=32000,
)
OLMOE_1B_7B = dict(
    architectures=["OlmoeForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    clip_qkv=None,
    eos_token_id=50279,
    hidden_act="silu",
    hidden_size=2048,
    initializer_range=0.02,
    intermediate_size=1024,
    max_position_embeddings=4096,
    model_type="olmoe",
    norm_topk_prob=False,
    num_attention_heads=16,
    num_experts=64,
    num_experts_per_tok=8,
    num_hidden_layers=16,
    num_key_value_heads=16,
    output_router_logits=False,
    pad_token_id=1,
    rms_norm_eps=1e-05,
    rope_scaling=None,
    rope_theta=10000.0,
    router_aux_loss_coef=0.01,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.43.0.dev0",
    use_cache=True,
    vocab_size=50304,
)

PUBLISHED = {
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30.5e9),
    "Qwen3-235B-A22B": (QWEN3_235B_A22B, 235.1e9),
    "Qwen1.5-MoE-A2.7B": (QWEN1_5_MOE_A2_7B, 14.3e9),
    "Mixtral-8x7B": (MIXTRAL_8X7B, 46.7e9),
    "OLMoE-1B-7B": (OLMOE_1B_7B, 6.92e9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_parameters_that_their_cards_say(name):
    fields, count = PUBLISHED[name]
    shapes = stored_shapes(expected_tensors(ModelConfig.from_json(fields)))
    assert sum(map(math.prod, shapes.values())) == pytest.approx(count, rel=0.003)


@pytest.mark.parametrize(
    ("name", "layer", "tensors"),
    [
        (
            "Qwen3-30B-A3B",
            47,
            {"mlp.gate": (128, 2048), "mlp.experts.127.down_proj": (2048, 768)},
        ),
        (
            "Qwen1.5-MoE-A2.7B",
            0,
            {
                "mlp.experts.59.gate_proj": (1408, 2048),
                "mlp.shared_expert.up_proj": (5632, 2048),
                "mlp.shared_expert_gate": (1, 2048),
            },
        ),
        (
            "Mixtral-8x7B",
            31,
            {
                "block_sparse_moe.gate": (8, 4096),
                "block_sparse_moe.experts.7.w1": (14336, 4096),
                "block_sparse_moe.experts.7.w2": (4096, 14336),
                "block_sparse_moe.experts.7.w3": (14336, 4096),
            },
        ),
        (
            "OLMoE-1B-7B",
            15,
            {"mlp.experts.63.up_proj": (1024, 2048), "self_attn.k_norm": (2048,)},
        ),
    ],
)
def test_published_tensors_are_expected(name, layer, tensors):
    shapes = stored_shapes(expected_tensors(ModelConfig.from_json(PUBLISHED[name][0])))
    for tensor, shape in tensors.items():
        assert shapes[f"model.layers.{layer}.{tensor}.weight"] == shape
    expert = "block_sparse_moe.experts" if name.startswith("Mixtral") else "mlp.experts"
    experts = {key for key in shapes if key.startswith(f"model.layers.{layer}.{expert}.")}
    count = PUBLISHED[name][0].get("num_experts", PUBLISHED[name][0].get("num_local_experts"))
    assert len(experts) == 3 * count


def test_how_families_route():
    moes = {name: ModelConfig.from_json(fields).moe for name, (fields, _) in PUBLISHED.items()}
    assert all(moe is not None and moe.scoring == "softmax" for moe in moes.values())
    told = {name: (moe.num_experts, moe.top_k, moe.normalise) for name, moe in moes.items() if moe}
    assert told == {
        "Qwen3-30B-A3B": (128, 8, True),
        "Qwen3-235B-A22B": (128, 8, True),
        "Qwen1.5-MoE-A2.7B": (60, 4, False),
        "Mixtral-8x7B": (8, 2, True),
        "OLMoE-1B-7B": (64, 8, False),
    }


def test_layers_that_have_experts():
    fields = QWEN3_30B_A3B | dict(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    config = ModelConfig.from_json(fields)
    assert [form.is_sparse for form in config.layer_forms] == [
        False,
        True,
        False,
        False,
        False,
        True,
    ]
    shapes = stored_shapes(expected_tensors(config))
    assert shapes["model.layers.3.mlp.gate_proj.weight"] == (6144, 2048)
    assert "model.layers.1.mlp.gate_proj.weight" not in shapes


def test_clipped_queries_keys_and_values():
    assert ModelConfig.from_json(OLMOE_1B_7B | dict(clip_qkv=8)).qkv_clip == 8.0
    assert ModelConfig.from_json(OLMOE_1B_7B).qkv_clip == 0.0


def test_windows_of_qwen3_are_of_all_layers():
    def windows(**change):
        return ModelConfig.from_json(QWEN3_30B_A3B | change).windows

    assert windows(sliding_window=4096) == ()
    on = dict(use_sliding_window=True)
    for few in (0, 20, 48):  # it has no effect
        assert windows(**on, sliding_window=1024, max_window_layers=few) == (1024,) * 48
    assert windows(**on, sliding_window=None) == ()
    absent = {name: value for name, value in QWEN3_30B_A3B.items() if name != "sliding_window"}
    assert ModelConfig.from_json(absent | on).windows == (4096,) * 48
    assert windows(**on, sliding_window=40960) == ()  # the whole context


def test_windows_of_qwen2_are_of_every_other_lower_layer():
    def windows(**change):
        return ModelConfig.from_json(QWEN1_5_MOE_A2_7B | change).windows

    assert windows(sliding_window=1024) == ()
    on = dict(use_sliding_window=True, sliding_window=1024)
    assert windows(**on, max_window_layers=5) == (*(1024, 0) * 3, *[0] * 18)
    assert windows(**on) == (*(1024, 0) * 11, 0, 0)
    assert windows(**on, max_window_layers=None) == (1024, 0) * 12
    assert windows(**on, max_window_layers=0) == ()
    # a layer_types decides in place of max_window_layers
    kinds = [*["full_attention"] * 22, *["sliding_attention"] * 2]
    assert windows(**on, layer_types=kinds) == (*[0] * 22, 1024, 1024)
    assert windows(**on | dict(sliding_window=8192)) == ()  # the whole context


def test_both_names_of_the_number_of_experts():
    later = {k: v for k, v in OLMOE_1B_7B.items() if k != "num_experts"}
    renamed = ModelConfig.from_json(later | dict(num_local_experts=64))
    assert renamed == ModelConfig.from_json(OLMOE_1B_7B)


@pytest.mark.parametrize(
    ("fields", "change", "message"),
    [
        (QWEN3_30B_A3B, dict(num_experts_per_tok=129), "num_experts_per_tok is 129, but .* 128"),
        (QWEN3_30B_A3B, dict(num_experts_per_tok=0), "num_experts_per_tok is 0"),
        (QWEN3_30B_A3B, dict(num_experts=None), "lacks num_experts"),
        (
            QWEN3_30B_A3B,
            dict(num_local_experts=8),
            "num_local_experts is 8, but num_experts is 128",
        ),
        (QWEN3_30B_A3B, dict(decoder_sparse_step=0), "decoder_sparse_step is 0"),
        (QWEN3_30B_A3B, dict(mlp_only_layers=["0"]), "mlp_only_layers"),
        (QWEN3_30B_A3B, dict(moe_intermediate_size=None), "lacks moe_intermediate_size"),
        (QWEN3_30B_A3B, dict(n_group=4), "n_group = 4"),
        (QWEN1_5_MOE_A2_7B, dict(shared_expert_intermediate_size=0), "shared_expert_interm"),
        (MIXTRAL_8X7B, dict(sliding_window=0), "sliding_window is 0"),
        (OLMOE_1B_7B, dict(clip_qkv=0), "clip_qkv is 0, .*greater than 0"),
        (OLMOE_1B_7B, dict(clip_qkv=-8.0), "clip_qkv is -8.0, .*greater than 0"),
        (OLMOE_1B_7B, dict(clip_qkv="8"), 'clip_qkv is "8", .*a finite number'),
        (
            QWEN3_30B_A3B,
            dict(use_sliding_window=True, sliding_window=0),
            "sliding_window is 0, .*greater than 0",
        ),
        (
            QWEN3_30B_A3B,
            dict(
                use_sliding_window=True,
                sliding_window=4096,
                layer_types=["full_attention", *["sliding_attention"] * 47],
            ),
            "layer_types .* with sliding_window = 4096 all layers .* are sliding_attention",
        ),
        (
            QWEN1_5_MOE_A2_7B,
            dict(layer_types=[*["full_attention"] * 23, "sliding_attention"]),
            "sliding_window .* layer 23 has a window",
        ),
        (
            QWEN1_5_MOE_A2_7B,
            dict(use_sliding_window=True, sliding_window=-1),
            "sliding_window is -1, .*greater than 0",
        ),
    ],
)
def test_errors_name_the_field(fields, change, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_json(fields | change)
