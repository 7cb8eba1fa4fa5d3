"""ModelConfig from config.json: real files, both forms of the rotation, errors that name fields."""

import dataclasses
import json

import pytest

from jaxshare.models import ConfigError, ModelConfig
from jaxshare.rope import Rope

LLAMA_2 = dict(
    architectures=["LlamaForCausalLM"],
    bos_token_id=1,
    eos_token_id=2,
    hidden_act="silu",
    hidden_size=4096,
    initializer_range=0.02,
    intermediate_size=11008,
    max_position_embeddings=4096,
    model_type="llama",
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=32,
    pad_token_id=0,
    pretraining_tp=1,
    rms_norm_eps=1e-05,
    rope_scaling=None,
    tie_word_embeddings=False,
    torch_dtype="float16",
    transformers_version="4.31.0.dev0",
    use_cache=True,
    vocab_size=32000,
)
LLAMA_3_2 = LLAMA_2 | dict(
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=128000,
    eos_token_id=[128001, 128008, 128009],
    head_dim=64,
    hidden_size=2048,
    intermediate_size=8192,
    max_position_embeddings=131072,
    mlp_bias=False,
    num_hidden_layers=16,
    num_key_value_heads=8,
    rope_theta=500000.0,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
    transformers_version="4.45.0.dev0",
    vocab_size=128256,
    rope_scaling=dict(
        factor=32.0,
        high_freq_factor=4.0,
        low_freq_factor=1.0,
        original_max_position_embeddings=8192,
        rope_type="llama3",
    ),
)
QWEN_2_5 = dict(
    architectures=["Qwen2ForCausalLM"],
    attention_dropout=0.0,
    bos_token_id=151643,
    eos_token_id=151645,
    hidden_act="silu",
    hidden_size=3584,
    initializer_range=0.02,
    intermediate_size=18944,
    max_position_embeddings=32768,
    max_window_layers=28,
    model_type="qwen2",
    num_attention_heads=28,
    num_hidden_layers=28,
    num_key_value_heads=4,
    rms_norm_eps=1e-06,
    rope_theta=1000000.0,
    sliding_window=131072,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.43.1",
    use_cache=True,
    use_mrope=False,
    use_sliding_window=False,
    vocab_size=152064,
)
QWEN_3 = dict(
    architectures=["Qwen3ForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=151643,
    eos_token_id=151645,
    head_dim=128,
    hidden_act="silu",
    hidden_size=1024,
    initializer_range=0.02,
    intermediate_size=3072,
    max_position_embeddings=40960,
    max_window_layers=28,
    model_type="qwen3",
    num_attention_heads=16,
    num_hidden_layers=28,
    num_key_value_heads=8,
    rms_norm_eps=1e-06,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=None,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
    transformers_version="4.51.0",
    use_cache=True,
    use_sliding_window=False,
    vocab_size=151936,
)
LONGROPE = dict(
    rope_type="longrope",
    short_factor=[1.0] * 64,
    long_factor=[4.0] * 64,
    original_max_position_embeddings=4096,
)


def without(config: dict, *names: str) -> dict:
    return {name: value for name, value in config.items() if name not in names}


def scaling(**values) -> dict:
    """Returns Llama 2 with a rope_scaling."""
    return LLAMA_2 | dict(max_position_embeddings=16384, rope_scaling=values)


def test_llama_2():
    assert ModelConfig.from_json(LLAMA_2) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        rope=Rope.default(128, 10000.0),
        norm_eps=1e-5,
        max_positions=4096,
        tie_embeddings=False,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )


def test_llama_before_grouped_queries_has_as_many_kv_heads_as_heads():
    assert ModelConfig.from_json(without(LLAMA_2, "num_key_value_heads")).num_kv_heads == 32


def test_llama_3_2():
    config = ModelConfig.from_json(LLAMA_3_2)
    assert (config.num_kv_heads, config.head_dim, config.tie_embeddings, config.max_positions) == (
        8,
        64,
        True,
        131072,
    )
    assert config.rope == Rope.llama3(64, 500000.0, 32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("attention", "mlp"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_llama_biases(attention, mlp):
    config = ModelConfig.from_json(LLAMA_2 | dict(attention_bias=attention, mlp_bias=mlp))
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (attention, attention, mlp)


def test_qwen_2_5():
    config = ModelConfig.from_json(QWEN_2_5)
    assert (config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm) == (
        True,
        False,
        False,
        False,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rope) == (
        28,
        4,
        128,
        Rope.default(128, 1e6),
    )


@pytest.mark.parametrize("bias", [False, True])
def test_qwen_3(bias):
    config = ModelConfig.from_json(QWEN_3 | dict(attention_bias=bias))
    assert (config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm) == (
        bias,
        bias,
        False,
        True,
    )
    # not hidden_size / num_attention_heads, which is 64
    assert (config.head_dim, config.tie_embeddings) == (128, True)


def test_qwen_windows():
    on = QWEN_2_5 | dict(use_sliding_window=True, sliding_window=4096, max_window_layers=21)
    assert ModelConfig.from_json(on).windows == (0,) * 21 + (4096,) * 7
    # a layer_types decides instead of max_window_layers
    kinds = ["sliding_attention", "full_attention"] * 14
    assert ModelConfig.from_json(on | dict(layer_types=kinds)).windows == (4096, 0) * 14
    for without_windows in (
        on | dict(use_sliding_window=False),
        on | dict(max_window_layers=28),
        on | dict(sliding_window=None),
        on | dict(sliding_window=32768),  # the whole context
    ):
        assert ModelConfig.from_json(without_windows) == ModelConfig.from_json(QWEN_2_5)


@pytest.mark.parametrize(
    ("four", "five"),
    [
        (
            LLAMA_2,
            without(LLAMA_2, "rope_scaling", "torch_dtype")
            | dict(
                rope_parameters=dict(rope_type="default", rope_theta=10000.0),
                dtype="float16",
                transformers_version="5.0.0",
            ),
        ),
        (
            LLAMA_3_2,
            without(LLAMA_3_2, "rope_scaling", "rope_theta")
            | dict(rope_parameters=LLAMA_3_2["rope_scaling"] | dict(rope_theta=5e5)),
        ),
        (
            QWEN_2_5
            | dict(
                rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=32768)
            ),
            without(QWEN_2_5, "rope_theta", "rope_scaling")
            | dict(
                layer_types=["full_attention"] * 28,
                rope_parameters=dict(
                    rope_type="yarn",
                    rope_theta=1000000,
                    factor=4,
                    original_max_position_embeddings=32768,
                ),
            ),
        ),
        (
            QWEN_3 | dict(partial_rotary_factor=0.5),
            without(QWEN_3, "rope_theta")
            | dict(
                rope_parameters=dict(rope_theta=1e6, partial_rotary_factor=0.5),
                layer_types=["attention"] * 28,
            ),
        ),
        (
            LLAMA_2 | dict(rope_scaling=dict(type="linear", factor=2)),
            LLAMA_2 | dict(rope_parameters=dict(rope_type="linear", factor=2.0)),
        ),
    ],
)
def test_forms_of_transformers_4_and_5_say_the_same(four, five):
    assert ModelConfig.from_json(four) == ModelConfig.from_json(five)


def test_both_forms_in_one_file_may_agree():
    both = LLAMA_3_2 | dict(
        rope_parameters=LLAMA_3_2["rope_scaling"] | dict(rope_theta=500000.0, type="llama3")
    )
    assert ModelConfig.from_json(both) == ModelConfig.from_json(LLAMA_3_2)


def test_partial_rotary_turns_a_part_of_each_head():
    assert ModelConfig.from_json(QWEN_3 | dict(partial_rotary_factor=0.25)).rope == Rope.default(
        32, 1e6
    )


def test_yarn_without_an_original_context_takes_the_models():
    rope = ModelConfig.from_json(QWEN_2_5 | dict(rope_scaling=dict(type="yarn", factor=4.0))).rope
    assert rope == Rope.yarn(128, 1e6, 4.0, 32768)


def test_yarn_with_a_null_factor_takes_the_ratio_of_contexts():
    rope = ModelConfig.from_json(
        scaling(type="yarn", factor=None, original_max_position_embeddings=2048)
    ).rope
    assert rope == Rope.yarn(128, 10000.0, 8.0, 2048)


def test_longrope_is_chosen_once_for_a_context():
    config = ModelConfig.from_json(scaling(**LONGROPE))
    scale = (1 + 2 / 12) ** 0.5  # sqrt(1 + log(16384 / 4096) / log(4096))
    short, long = (
        Rope.longrope(64 * 2, 10000.0, [f] * 64, pytest.approx(scale)) for f in (1.0, 4.0)
    )
    assert config.rope == long and config.max_positions == 16384
    assert config.for_context(16384) == config.for_context(4097) == config
    assert config.for_context(4096).rope == config.for_context(1).rope == short
    assert config.for_context(4096).max_positions == 4096
    with pytest.raises(ValueError, match="4097"):
        config.for_context(4096).for_context(4097)


def test_longrope_of_a_model_that_was_not_extended_is_short():
    config = ModelConfig.from_json(scaling(**LONGROPE) | dict(max_position_embeddings=4096))
    assert config.rope == Rope.longrope(128, 10000.0, [1.0] * 64, 1.0) and config.short_rope is None


@pytest.mark.parametrize("positions", [0, -1, 4097])
def test_a_context_that_the_model_does_not_have(positions):
    with pytest.raises(ValueError, match=rf"{positions} tokens.*4096"):
        ModelConfig.from_json(LLAMA_2).for_context(positions)


def test_other_models_do_not_depend_on_the_context():
    config = ModelConfig.from_json(LLAMA_3_2)
    assert config.for_context(10) is config


def test_a_config_is_hashable():
    first, second = (
        ModelConfig.from_json(scaling(**LONGROPE)),
        ModelConfig.from_json(scaling(**LONGROPE)),
    )
    assert (
        hash(first) == hash(second)
        and len({first, second, dataclasses.replace(first, num_layers=1)}) == 2
    )


@pytest.mark.parametrize(
    "name",
    [
        "architectures",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "rms_norm_eps",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rope_theta",
    ],
)
@pytest.mark.parametrize("absent", [True, False])
def test_a_missing_field_is_named(name, absent):
    config = without(QWEN_3, name) if absent else QWEN_3 | {name: None}
    with pytest.raises(ConfigError, match=rf"config\.json lacks {name}\b"):
        ModelConfig.from_json(config)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        # architectures
        (
            LLAMA_2 | dict(architectures=["GPT2LMHeadModel"]),
            "architectures.*GPT2LMHeadModel.*LlamaForCausalLM",
        ),
        (LLAMA_2 | dict(architectures=[]), "architectures"),
        (LLAMA_2 | dict(architectures=["LlamaModel"]), "architectures"),
        (LLAMA_2 | dict(model_type="mistral"), "model_type.*mistral.*llama"),
        # wrong values
        (LLAMA_2 | dict(hidden_size="4096"), "hidden_size.*whole number"),
        (LLAMA_2 | dict(hidden_size=True), "hidden_size.*whole number"),
        (LLAMA_2 | dict(num_hidden_layers=0), "num_hidden_layers.*greater than 0"),
        (LLAMA_2 | dict(rms_norm_eps=-1e-5), "rms_norm_eps.*greater than 0"),
        (LLAMA_2 | dict(rms_norm_eps=float("nan")), "rms_norm_eps.*finite"),
        (LLAMA_2 | dict(num_key_value_heads=5), "num_key_value_heads.*divide.*32"),
        (LLAMA_2 | dict(num_attention_heads=48), "head_dim.*48.*4096"),
        (LLAMA_2 | dict(tie_word_embeddings="yes"), "tie_word_embeddings.*true or false"),
        # another function
        (LLAMA_2 | dict(hidden_act="gelu"), "hidden_act.*gelu.*silu"),
        (LLAMA_2 | dict(is_causal=False), "is_causal"),
        (
            LLAMA_2 | dict(quantization_config=dict(bits=4, quant_method="hqq")),
            'quantization_config.quant_method is "hqq", .* not read; those that are: awq, gptq, ',
        ),
        (LLAMA_2 | dict(embedding_multiplier=12.0), r"embedding_multiplier = 12\.0"),
        (
            LLAMA_2 | dict(logits_scaling=8.0, attention_multiplier=0.1),
            "logits_scaling = 8.0, attention_multiplier = 0.1",
        ),
        (LLAMA_2 | dict(sliding_window=4096), "sliding_window = 4096"),
        (LLAMA_2 | dict(num_local_experts=8), "num_local_experts"),
        (QWEN_3 | dict(final_logit_softcapping=30.0), "final_logit_softcapping"),
        (
            QWEN_3 | dict(use_sliding_window=True, sliding_window=0),
            "sliding_window.*greater than 0",
        ),
        (
            QWEN_3 | dict(layer_types=["full_attention"] * 27 + ["sliding_attention"]),
            "sliding_window.*layer 27 has a window",
        ),
        (QWEN_3 | dict(layer_types=["chunked_attention"] * 28), "layer_types.*no other type"),
        (QWEN_3 | dict(layer_types=["full_attention"] * 27), "layer_types.*28"),
        # rotation
        (scaling(type="dynamic", factor=2.0), "dynamic.*current length.*yarn"),
        (
            scaling(rope_type="mrope", mrope_section=[16, 24, 24]),
            "rope_type.*mrope.*default, linear, llama3, yarn, longrope",
        ),
        (scaling(rope_type="default", mrope_section=[16, 24, 24]), "mrope_section"),
        (scaling(rope_type="linear"), r"lacks rope_scaling\.factor"),
        (scaling(rope_type="linear", factor=0), r"rope_scaling\.factor.*greater than 0"),
        (scaling(rope_type="linear", factor=2.0, beta_fast=32), "beta_fast"),
        (scaling(type="yarn"), r"lacks rope_scaling\.factor"),
        (
            scaling(rope_type="llama3", factor=8.0, high_freq_factor=4.0),
            "lacks rope_scaling.low_freq_factor",
        ),
        (
            scaling(rope_type="llama3", factor=8.0, high_freq_factor=1.0, low_freq_factor=4.0),
            "high_freq_factor.*greater than low_freq_factor",
        ),
        (scaling(**LONGROPE | dict(short_factor=[1.0] * 63)), "longrope.*64 factors"),
        (scaling(**LONGROPE | dict(long_factor=[0.0] * 64)), "long_factor.*positive"),
        (
            without(scaling(**LONGROPE), "x") | dict(rope_scaling=without(LONGROPE, "long_factor")),
            "lacks rope_scaling.long_factor",
        ),
        (LLAMA_2 | dict(partial_rotary_factor=1.5), "partial_rotary_factor.*1"),
        (LLAMA_2 | dict(partial_rotary_factor=0.352), "default.*even"),
        (LLAMA_2 | dict(rope_theta=0), "rope_theta.*greater than 0"),
        (LLAMA_2 | dict(rope_theta=5e5, rope_parameters=dict(rope_theta=1e4)), "rope_theta twice"),
        (LLAMA_3_2 | dict(rope_parameters=dict(rope_type="yarn", factor=32.0)), "rope_type twice"),
        (
            LLAMA_2 | dict(rope_parameters=dict(full_attention=dict(rope_type="default"))),
            "full_attention",
        ),
        (LLAMA_2 | dict(rope_scaling="linear"), "rope_scaling.*object"),
    ],
)
def test_what_is_not_understood_is_named(config, named):
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_json(config)


@pytest.mark.parametrize(
    "extra",
    [
        # switched off
        dict(embedding_multiplier=None, use_mrope=False, residual_scale=0, expert_ids=[]),
        dict(
            auto_map={"AutoModelForCausalLM": "modeling_x.Model"},
            _name_or_path="x/y",
            unsloth_version="2025.1",
            pretraining_tp=2,
        ),
        dict(
            id2label={"0": "LABEL_0"},
            label2id={"LABEL_0": 0},
            temperature=0.9,
            max_length=4096,
            _attn_implementation_autoset=True,
        ),
        dict(hidden_act="swish"),
        dict(original_max_position_embeddings=2048),
    ],
)
def test_fields_without_effect_pass(extra):
    assert ModelConfig.from_json(LLAMA_2 | extra) == ModelConfig.from_json(LLAMA_2)


def test_reads_a_file_or_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_3))
    expected = ModelConfig.from_json(QWEN_3)
    assert (
        ModelConfig.from_json(tmp_path)
        == ModelConfig.from_json(str(tmp_path / "config.json"))
        == expected
    )


def test_files_that_are_not_there_or_not_json(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        ModelConfig.from_json(tmp_path)
    for text in ("{", "[]", "\xff"):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match=str(tmp_path / "config.json")):
            ModelConfig.from_json(tmp_path)
