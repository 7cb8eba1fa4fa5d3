"""config.json of published checkpoints of each dense family: what it means, and its parameters."""

import math

import pytest

from jaxshare.models import ConfigError, ModelConfig
from jaxshare.models.tensor_names import expected_tensors
from jaxshare.rope import Rope

PHI_4 = dict(
    architectures=["Phi3ForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=100257,
    embd_pdrop=0.0,
    eos_token_id=100257,
    hidden_act="silu",
    hidden_size=5120,
    initializer_range=0.02,
    intermediate_size=17920,
    max_position_embeddings=16384,
    model_type="phi3",
    num_attention_heads=40,
    num_hidden_layers=40,
    num_key_value_heads=10,
    original_max_position_embeddings=16384,
    pad_token_id=100257,
    resid_pdrop=0.0,
    rms_norm_eps=1e-05,
    rope_scaling=None,
    rope_theta=250000,
    sliding_window=None,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.47.0",
    use_cache=True,
    vocab_size=100352,
)
# The divisors of its longrope, 48 short and 48 long ones, are stand-ins.
PHI_4_MINI = PHI_4 | dict(
    full_attn_mod=1,
    hidden_size=3072,
    intermediate_size=8192,
    interpolate_factor=1,
    lm_head_bias=False,
    max_position_embeddings=131072,
    mlp_bias=False,
    num_attention_heads=24,
    num_hidden_layers=32,
    num_key_value_heads=8,
    original_max_position_embeddings=4096,
    partial_rotary_factor=0.75,
    rope_scaling=dict(short_factor=[1.0] * 48, long_factor=[4.0] * 48, type="longrope"),
    rope_theta=10000.0,
    sliding_window=262144,
    tie_word_embeddings=True,
    vocab_size=200064,
)
PHI_3_MINI_4K = PHI_4 | dict(
    hidden_size=3072,
    intermediate_size=8192,
    max_position_embeddings=4096,
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=32,
    original_max_position_embeddings=4096,
    rope_theta=10000.0,
    sliding_window=2047,
    vocab_size=32064,
)
MISTRAL_7B = dict(
    architectures=["MistralForCausalLM"],
    bos_token_id=1,
    eos_token_id=2,
    hidden_act="silu",
    hidden_size=4096,
    initializer_range=0.02,
    intermediate_size=14336,
    max_position_embeddings=32768,
    model_type="mistral",
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=8,
    rms_norm_eps=1e-05,
    rope_theta=10000.0,
    sliding_window=4096,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.34.0.dev0",
    use_cache=True,
    vocab_size=32000,
)
MISTRAL_7B_V3 = MISTRAL_7B | dict(rope_theta=1000000.0, sliding_window=None, vocab_size=32768)
MISTRAL_SMALL_24B = MISTRAL_7B | dict(
    attention_dropout=0.0,
    head_dim=128,
    hidden_size=5120,
    intermediate_size=32768,
    num_hidden_layers=40,
    rope_theta=100000000.0,
    sliding_window=None,
    vocab_size=131072,
)
MINISTRAL_8B = MISTRAL_7B | dict(
    attention_dropout=0.0,
    head_dim=128,
    intermediate_size=12288,
    num_hidden_layers=36,
    rope_theta=100000000.0,
    sliding_window=32768,
    vocab_size=131072,
)
GEMMA_2_2B = dict(
    architectures=["Gemma2ForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    attn_logit_softcapping=50.0,
    bos_token_id=2,
    cache_implementation="hybrid",
    eos_token_id=1,
    final_logit_softcapping=30.0,
    head_dim=256,
    hidden_act="gelu_pytorch_tanh",
    hidden_activation="gelu_pytorch_tanh",
    hidden_size=2304,
    initializer_range=0.02,
    intermediate_size=9216,
    max_position_embeddings=8192,
    model_type="gemma2",
    num_attention_heads=8,
    num_hidden_layers=26,
    num_key_value_heads=4,
    pad_token_id=0,
    query_pre_attn_scalar=256,
    rms_norm_eps=1e-06,
    rope_theta=10000.0,
    sliding_window=4096,
    torch_dtype="float32",
    transformers_version="4.42.4",
    use_cache=True,
    vocab_size=256000,
)
GEMMA_3_1B = dict(
    architectures=["Gemma3ForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    attn_logit_softcapping=None,
    bos_token_id=2,
    cache_implementation="hybrid",
    eos_token_id=[1, 106],
    final_logit_softcapping=None,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    hidden_size=1152,
    initializer_range=0.02,
    intermediate_size=6912,
    max_position_embeddings=32768,
    model_type="gemma3_text",
    num_attention_heads=4,
    num_hidden_layers=26,
    num_key_value_heads=1,
    pad_token_id=0,
    query_pre_attn_scalar=256,
    rms_norm_eps=1e-06,
    rope_local_base_freq=10000,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=512,
    sliding_window_pattern=6,
    torch_dtype="bfloat16",
    transformers_version="4.50.0.dev0",
    use_cache=True,
    vocab_size=262144,
)
GEMMA_3_4B = dict(
    architectures=["Gemma3ForConditionalGeneration"],
    boi_token_index=255999,
    eoi_token_index=256000,
    eos_token_id=[1, 106],
    image_token_index=262144,
    initializer_range=0.02,
    mm_tokens_per_image=256,
    model_type="gemma3",
    text_config=dict(
        hidden_size=2560,
        intermediate_size=10240,
        model_type="gemma3_text",
        num_hidden_layers=34,
        rope_scaling=dict(factor=8.0, rope_type="linear"),
        sliding_window=1024,
    ),
    torch_dtype="bfloat16",
    transformers_version="4.50.0.dev0",
    vision_config=dict(hidden_size=1152, num_hidden_layers=27, model_type="siglip_vision_model"),
)
MISTRAL_SMALL_3_1 = dict(
    architectures=["Mistral3ForConditionalGeneration"],
    image_token_index=10,
    model_type="mistral3",
    multimodal_projector_bias=False,
    projector_hidden_act="gelu",
    spatial_merge_size=2,
    text_config=dict(
        attention_dropout=0.0,
        head_dim=128,
        hidden_act="silu",
        hidden_size=5120,
        initializer_range=0.02,
        intermediate_size=32768,
        max_position_embeddings=131072,
        model_type="mistral",
        num_attention_heads=32,
        num_hidden_layers=40,
        num_key_value_heads=8,
        rms_norm_eps=1e-05,
        rope_theta=1000000000.0,
        sliding_window=None,
        use_cache=True,
        vocab_size=131072,
    ),
    torch_dtype="bfloat16",
    transformers_version="4.50.0.dev0",
    vision_config=dict(hidden_size=1024, model_type="pixtral"),
    vision_feature_layer=-1,
)
SMOLLM3_3B = dict(
    architectures=["SmolLM3ForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    eos_token_id=128012,
    hidden_act="silu",
    hidden_size=2048,
    initializer_range=0.02,
    intermediate_size=11008,
    layer_types=["full_attention"] * 36,
    max_position_embeddings=65536,
    max_window_layers=28,
    mlp_bias=False,
    model_type="smollm3",
    no_rope_layer_interval=4,
    no_rope_layers=[1, 1, 1, 0] * 9,
    num_attention_heads=16,
    num_hidden_layers=36,
    num_key_value_heads=4,
    pad_token_id=128012,
    pretraining_tp=2,
    rms_norm_eps=1e-06,
    rope_scaling=None,
    rope_theta=5000000.0,
    sliding_window=None,
    torch_dtype="bfloat16",
    transformers_version="4.54.0.dev0",
    use_cache=False,
    use_sliding_window=False,
    vocab_size=128256,
)
OLMO_2_7B = dict(
    architectures=["Olmo2ForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    eos_token_id=100257,
    hidden_act="silu",
    hidden_size=4096,
    initializer_range=0.02,
    intermediate_size=11008,
    max_position_embeddings=4096,
    model_type="olmo2",
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=32,
    pad_token_id=100277,
    rms_norm_eps=1e-06,
    rope_scaling=None,
    rope_theta=500000,
    tie_word_embeddings=False,
    torch_dtype="float32",
    transformers_version="4.47.0",
    use_cache=True,
    vocab_size=100352,
)
OLMO_3_7B = OLMO_2_7B | dict(
    architectures=["Olmo3ForCausalLM"],
    eos_token_id=100257,
    layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
    max_position_embeddings=65536,
    model_type="olmo3",
    rope_scaling=dict(
        attention_factor=1.2079441541679836,
        beta_fast=32,
        beta_slow=1,
        factor=8.0,
        original_max_position_embeddings=8192,
        rope_type="yarn",
    ),
    sliding_window=4096,
    torch_dtype="bfloat16",
    transformers_version="4.57.0.dev0",
    vocab_size=100278,
)
GRANITE_3_1_8B = dict(
    architectures=["GraniteForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    attention_multiplier=0.0078125,
    bos_token_id=0,
    embedding_multiplier=12.0,
    eos_token_id=0,
    hidden_act="silu",
    hidden_size=4096,
    initializer_range=0.02,
    intermediate_size=12800,
    logits_scaling=16.0,
    max_position_embeddings=131072,
    mlp_bias=False,
    model_type="granite",
    num_attention_heads=32,
    num_hidden_layers=40,
    num_key_value_heads=8,
    pad_token_id=0,
    residual_multiplier=0.22,
    rms_norm_eps=1e-05,
    rope_scaling=None,
    rope_theta=10000000.0,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
    transformers_version="4.47.0.dev0",
    use_cache=True,
    vocab_size=49155,
)
GLM_4_9B_0414 = dict(
    architectures=["Glm4ForCausalLM"],
    attention_bias=True,
    attention_dropout=0.0,
    eos_token_id=[151329, 151336, 151338],
    head_dim=128,
    hidden_act="silu",
    hidden_size=4096,
    initializer_range=0.02,
    intermediate_size=13696,
    max_position_embeddings=32768,
    model_type="glm4",
    num_attention_heads=32,
    num_hidden_layers=40,
    num_key_value_heads=2,
    pad_token_id=151329,
    partial_rotary_factor=0.5,
    rms_norm_eps=1e-05,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.52.0.dev0",
    use_cache=True,
    vocab_size=151552,
)
GLM_4_9B_CHAT = GLM_4_9B_0414 | dict(
    architectures=["GlmForCausalLM"],
    max_position_embeddings=131072,
    model_type="glm",
    rms_norm_eps=1.5625e-07,
)

PUBLISHED = {
    "microsoft/phi-4": (PHI_4, 14_659_507_200),
    "microsoft/Phi-4-mini-instruct": (PHI_4_MINI, 3_836_021_760),
    "microsoft/Phi-3-mini-4k-instruct": (PHI_3_MINI_4K, 3_821_079_552),
    "mistralai/Mistral-7B-v0.1": (MISTRAL_7B, 7_241_732_096),
    "mistralai/Mistral-7B-v0.3": (MISTRAL_7B_V3, 7_248_023_552),
    "mistralai/Mistral-Small-24B-Base-2501": (MISTRAL_SMALL_24B, 23_572_403_200),
    "mistralai/Ministral-8B-Instruct-2410": (MINISTRAL_8B, 8_019_808_256),
    "google/gemma-2-2b": (GEMMA_2_2B, 2_614_341_888),
    "google/gemma-3-1b-it": (GEMMA_3_1B, 999_885_952),
    "google/gemma-3-4b-it": (GEMMA_3_4B, 3_880_263_168),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": (MISTRAL_SMALL_3_1, 23_572_403_200),
    "HuggingFaceTB/SmolLM3-3B": (SMOLLM3_3B, 3_075_098_624),
    "allenai/OLMo-2-1124-7B": (OLMO_2_7B, 7_298_617_344),
    "allenai/Olmo-3-1025-7B": (OLMO_3_7B, 7_298_011_136),
    "ibm-granite/granite-3.1-8b-instruct": (GRANITE_3_1_8B, 8_170_848_256),
    "zai-org/GLM-4-9B-0414": (GLM_4_9B_0414, 9_400_279_040),
    "zai-org/glm-4-9b-chat-hf": (GLM_4_9B_CHAT, 9_399_951_360),
}
"""The number of parameters as the hub gives it, of the language model alone where there are
others."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_checkpoints(name):
    config, number = PUBLISHED[name]
    tensors = expected_tensors(ModelConfig.from_json(config)).values()
    assert sum(math.prod(tensor.shape) for tensor in tensors) == number


def test_phi():
    config = ModelConfig.from_json(PHI_4)
    assert (config.head_dim, config.num_kv_heads, config.windows) == (128, 10, ())
    assert config.rope == Rope.default(128, 250000.0) and config.short_rope is None
    # Of Phi-4-mini's heads of 128 entries 96 are rotated; its window is longer than its texts.
    mini = ModelConfig.from_json(PHI_4_MINI)
    assert (mini.rope.rotary_dim, mini.windows, mini.tie_embeddings) == (96, (), True)
    assert mini.for_context(4096).rope.frequencies[1] == pytest.approx(4 * mini.rope.frequencies[1])
    assert ModelConfig.from_json(PHI_3_MINI_4K).windows == (2047,) * 32


def test_longrope_by_its_former_name():
    scaling = PHI_4_MINI["rope_scaling"]
    former = PHI_4_MINI | dict(rope_scaling=scaling | dict(type="su"))
    assert ModelConfig.from_json(former) == ModelConfig.from_json(PHI_4_MINI)


def test_mistral():
    assert ModelConfig.from_json(MISTRAL_7B).windows == (4096,) * 32
    assert ModelConfig.from_json(MISTRAL_7B_V3).windows == ()
    small = ModelConfig.from_json(MISTRAL_SMALL_24B)
    assert (small.head_dim, small.num_heads, small.hidden_size) == (128, 32, 5120)
    # the whole context, and so none
    assert ModelConfig.from_json(MINISTRAL_8B).windows == ()
    absent = {name: value for name, value in MISTRAL_7B.items() if name != "sliding_window"}
    assert ModelConfig.from_json(absent) == ModelConfig.from_json(MISTRAL_7B)


def test_ministral_has_windows_by_layer():
    kinds = ["sliding_attention", "full_attention"] * 16
    config = MISTRAL_7B | dict(
        architectures=["MinistralForCausalLM"], model_type="ministral", layer_types=kinds
    )
    assert ModelConfig.from_json(config).windows == (4096, 0) * 16
    with pytest.raises(ConfigError, match=r"layer_types.*all layers.*sliding_attention"):
        ModelConfig.from_json(MISTRAL_7B | dict(layer_types=kinds))


def test_gemma_2():
    config = ModelConfig.from_json(GEMMA_2_2B)
    assert config.windows == (4096, 0) * 13 and config.layer_ropes == ()
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    assert (config.score_scale, config.embedding_multiplier) == (1 / 16, 48.0)
    assert (config.activation, config.norm_placement, config.norm_adds_one) == (
        "gelu_tanh",
        "both",
        True,
    )
    assert config.tie_embeddings and not config.qk_norm
    off = ModelConfig.from_json(GEMMA_2_2B | dict(attn_logit_softcapping=None))
    assert (off.attention_softcap, off.logit_softcap) == (0.0, 30.0)


def test_gemma_3():
    config = ModelConfig.from_json(GEMMA_3_1B)
    assert config.windows == (512,) * 5 + (0,) + (512,) * 5 + (0,) + (512,) * 5 + (0,) + (
        512,
    ) * 5 + (0, 512, 512)
    local, whole = Rope.default(256, 1e4), Rope.default(256, 1e6)
    assert config.layer_ropes == tuple(local if window else whole for window in config.windows)
    assert config.rope == whole and config.qk_norm and config.tie_embeddings
    assert (config.attention_softcap, config.logit_softcap) == (0.0, 0.0)


def test_gemma_3_in_the_form_of_transformers_5():
    scaled = dict(rope_type="linear", factor=8.0, rope_theta=1000000)
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2
    five = {
        name: value
        for name, value in GEMMA_3_1B.items()
        if not name.startswith("rope_") and name != "sliding_window_pattern"
    } | dict(
        _sliding_window_pattern=6,
        layer_types=kinds,
        rope_parameters=dict(
            full_attention=scaled,
            sliding_attention=dict(rope_type="default", rope_theta=10000),
        ),
    )
    four = GEMMA_3_1B | dict(rope_scaling=dict(rope_type="linear", factor=8.0))
    assert ModelConfig.from_json(five) == ModelConfig.from_json(four)
    assert ModelConfig.from_json(four).rope == Rope.linear(256, 1e6, 8.0)


def test_language_models_inside_checkpoints_of_images():
    config = ModelConfig.from_json(GEMMA_3_4B)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.windows[:6] == (1024,) * 5 + (0,) and config.rope == Rope.linear(256, 1e6, 8.0)
    assert all(name.startswith("language_model.model.") for name in expected_tensors(config))
    mistral = ModelConfig.from_json(MISTRAL_SMALL_3_1)
    assert "language_model.lm_head.weight" in expected_tensors(mistral)
    assert mistral.windows == () and not mistral.tie_embeddings


def test_smollm3_has_layers_without_rotation():
    config = ModelConfig.from_json(SMOLLM3_3B)
    rotation, none = Rope.default(128, 5e6), Rope.none()
    assert config.layer_ropes == (rotation, rotation, rotation, none) * 9
    assert config.rope == rotation and config.tie_embeddings and config.windows == ()
    by_interval = {k: v for k, v in SMOLLM3_3B.items() if k != "no_rope_layers"}
    assert ModelConfig.from_json(by_interval) == config
    all_rotate = ModelConfig.from_json(SMOLLM3_3B | dict(no_rope_layers=[1] * 36))
    assert all_rotate.layer_ropes == ()


def test_smollm3_windows_are_of_layers_without_rotation():
    config = {k: v for k, v in SMOLLM3_3B.items() if k != "layer_types"}
    config |= dict(use_sliding_window=True, sliding_window=1024)
    assert ModelConfig.from_json(config).windows == (0, 0, 0, 1024) * 9


def test_olmo_2():
    config = ModelConfig.from_json(OLMO_2_7B)
    assert (config.norm_placement, config.qk_norm_whole, config.qk_norm) == ("post", True, False)


def test_olmo_3_scales_the_rotation_of_layers_without_a_window():
    config = ModelConfig.from_json(OLMO_3_7B)
    whole = Rope.yarn(128, 5e5, 8.0, 8192, attention_factor=1.2079441541679836)
    assert config.windows == (4096, 4096, 4096, 0) * 8 and config.rope == whole
    assert config.layer_ropes == (*[Rope.default(128, 5e5)] * 3, whole) * 8
    absent = {name: value for name, value in OLMO_3_7B.items() if name != "layer_types"}
    assert ModelConfig.from_json(absent) == config


def test_granite():
    config = ModelConfig.from_json(GRANITE_3_1_8B)
    assert (config.score_scale, config.logit_divisor) == (1 / 128, 16.0)
    assert (config.embedding_multiplier, config.residual_multiplier) == (12.0, 0.22)


def test_glm_4():
    config = ModelConfig.from_json(GLM_4_9B_0414)
    assert config.rope == Rope.default(64, 1e4) and config.rope_interleaved
    assert (config.qkv_bias, config.out_bias, config.norm_placement) == (True, False, "both")
    former = ModelConfig.from_json(GLM_4_9B_CHAT)
    assert former.norm_placement == "pre"
    # a half of each head is rotated where a file does not say how much
    for known in (GLM_4_9B_0414, GLM_4_9B_CHAT):
        absent = {k: v for k, v in known.items() if k != "partial_rotary_factor"}
        assert ModelConfig.from_json(absent) == ModelConfig.from_json(known)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (MISTRAL_7B | dict(sliding_window=0), "sliding_window is 0.*greater than 0"),
        (PHI_3_MINI_4K | dict(sliding_window=-1), "sliding_window.*greater than 0"),
        (GEMMA_2_2B | dict(sliding_window=0), "sliding_window.*greater than 0"),
        (GEMMA_2_2B | dict(sliding_window=None), "sliding_window.*layer 0 has a window"),
        (GEMMA_2_2B | dict(sliding_window=4096.5), "sliding_window.*whole number"),
        (PHI_4 | dict(full_attn_mod=2), "full_attn_mod"),
        (PHI_4 | dict(layer_types=["sliding_attention"] * 40), "layer_types.*full_attention"),
        (PHI_4 | dict(hidden_act="gelu"), "hidden_act.*silu"),
        (GEMMA_2_2B | dict(hidden_activation="gelu"), "hidden_activation.*gelu_pytorch_tanh"),
        (GEMMA_2_2B | dict(hidden_activation=None, hidden_act="silu"), "hidden_act .*tanh"),
        (GEMMA_2_2B | dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
        (GEMMA_2_2B | dict(query_pre_attn_scalar=0), "query_pre_attn_scalar.*greater than 0"),
        (GEMMA_2_2B | dict(attn_logit_softcapping=-50.0), "attn_logit_softcapping.*greater"),
        (GEMMA_3_1B | dict(sliding_window_pattern=0), "sliding_window_pattern.*greater than 0"),
        (GEMMA_3_1B | dict(rope_local_base_freq=0), "rope_local_base_freq.*greater than 0"),
        (
            GEMMA_3_1B | dict(rope_parameters=dict(full_attention={}, chunked_attention={"a": 1})),
            "rope_parameters.chunked_attention",
        ),
        (GEMMA_3_4B | dict(text_config=None), "lacks text_config"),
        (GEMMA_3_4B | dict(audio_config={"a": 1}), "audio_config"),
        (
            GEMMA_3_4B | dict(text_config=GEMMA_3_4B["text_config"] | dict(sliding_window=0)),
            "text_config.sliding_window is 0",
        ),
        (
            MISTRAL_SMALL_3_1 | dict(text_config=dict(model_type="ministral3")),
            "text_config.model_type.*ministral3.*only mistral",
        ),
        (SMOLLM3_3B | dict(no_rope_layers=[1] * 35), "no_rope_layers.*36 layers"),
        (SMOLLM3_3B | dict(no_rope_layers=[2] * 36), "no_rope_layers.*1 for layers"),
        (SMOLLM3_3B | dict(layer_types=["sliding_attention"] * 36), "sliding_window.*layer 0"),
        (GRANITE_3_1_8B | dict(residual_multiplier=0), "residual_multiplier.*greater than 0"),
        (GRANITE_3_1_8B | dict(logits_scaling=0.0), "logits_scaling.*greater than 0"),
        (OLMO_2_7B | dict(clip_qkv=8.0), "clip_qkv = 8.0"),
        (GLM_4_9B_0414 | dict(mrope_section=[8, 12, 12]), "mrope_section"),
    ],
)
def test_what_is_not_understood_is_named(config, named):
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_json(config)


def test_an_unknown_architecture_is_named_beside_those_that_are_known():
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_json(PHI_4 | dict(architectures=["MambaForCausalLM"]))
    for known in ("MambaForCausalLM", "Phi3ForCausalLM", "Glm4", "docs/adding_a_model.md"):
        assert known in str(caught.value)
