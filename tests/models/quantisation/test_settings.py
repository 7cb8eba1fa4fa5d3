"""Settings that quantization_config of config.json may have, and those that are refused."""

import pytest

from jaxshare.models.config_fields import ConfigError, Fields
from jaxshare.models.quantisation.settings import read_quantisation

AWQ = dict(quant_method="awq", bits=4, group_size=128, version="gemm", zero_point=True)
GPTQ = dict(quant_method="gptq", bits=4, group_size=128, desc_act=True, sym=True)
FP8 = dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128])
INT8 = dict(num_bits=8, type="int", symmetric=True, strategy="channel", dynamic=False)


def compressed(weights=INT8, format="int-quantized", **more):
    groups = {"group_0": dict(targets=["Linear"], weights=weights, input_activations=None)}
    return dict(quant_method="compressed-tensors", format=format, config_groups=groups) | more


def read(settings):
    return read_quantisation(Fields({"quantization_config": settings}, "config.json"))


# quantization_config as the authors of these checkpoints have published it.
PUBLISHED = {
    "Qwen/QwQ-32B-AWQ": AWQ | dict(modules_to_not_convert=None),
    "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4": dict(
        backend="autoawq",
        bits=4,
        do_fuse=False,
        exllama_config=None,
        fuse_max_seq_len=None,
        group_size=128,
        modules_to_fuse=None,
        modules_to_not_convert=None,
        quant_method="awq",
        version="gemm",
        zero_point=True,
    ),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8": dict(
        batch_size=1,
        bits=8,
        block_name_to_quantize=None,
        cache_block_outputs=True,
        damp_percent=0.01,
        dataset=None,
        desc_act=False,
        exllama_config={"version": 1},
        group_size=128,
        max_input_length=None,
        model_seqlen=None,
        module_name_preceding_first_block=None,
        modules_in_block_to_quantize=None,
        pad_token_id=None,
        quant_method="gptq",
        sym=True,
        tokenizer=None,
        true_sequential=True,
        use_cuda_fp16=False,
        use_exllama=True,
    ),
    "deepseek-ai/DeepSeek-V3": FP8 | dict(fmt="e4m3"),
    "Qwen/Qwen3-8B-FP8": FP8
    | dict(fmt="e4m3", modules_to_not_convert=["lm_head", "model.layers.0.input_layernorm"]),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": compressed(
        dict(
            actorder="weight",
            block_structure=None,
            dynamic=False,
            group_size=128,
            num_bits=4,
            observer="mse",
            observer_kwargs={},
            strategy="group",
            symmetric=True,
            type="int",
        ),
        "pack-quantized",
        global_compression_ratio=1.8,
        ignore=["lm_head"],
        kv_cache_scheme=None,
        quantization_status="compressed",
        sparsity_config={},
        transform_config={},
        version="0.10.0",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_are_read(name):
    found = read(PUBLISHED[name])
    assert found is not None and found.method == PUBLISHED[name]["quant_method"]
    assert found.form("model.layers.0.self_attn.q_proj") is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(bits=4), "lacks quantization_config.quant_method"),
        (dict(quant_method="quip"), r"quant_method is \"quip\", .*those that are: awq, gptq, fp8"),
        (AWQ | dict(bits=8), "bits is 8, but only 4 is read for AWQ"),
        (AWQ | dict(version="marlin"), 'version is "marlin", but only gemm is read'),
        (AWQ | dict(group_size=0), "group_size is 0, but it must be at least 1, or -1"),
        (AWQ | dict(group_size="128"), 'group_size is "128", but must be a whole number'),
        (AWQ | dict(rotation="hadamard"), "unknown settings .* quantization_config.rotation ="),
        (AWQ | dict(modules_to_not_convert=[1]), "modules_to_not_convert is .* names of layers"),
        (GPTQ | dict(bits=3), "bits is 3, but only 4 and 8 are read for GPTQ"),
        (GPTQ | dict(checkpoint_format="marlin"), "checkpoint_format .* only gptq and gptq_v2"),
        (GPTQ | dict(is_marlin_format=True), "is_marlin_format is true, but only"),
        (GPTQ | dict(pack_dtype="int16"), "pack_dtype is .*int16.* only int32"),
        (
            GPTQ | dict(dynamic={"-:.*down.*": {}}),
            "unknown settings .* quantization_config.dynamic",
        ),
        (FP8 | dict(fmt="e5m2"), 'fmt is "e5m2", but only e4m3 is read'),
        (FP8 | dict(weight_block_size=[128]), "weight_block_size is .* two whole numbers"),
        (FP8 | dict(weight_block_size=[128, 0]), "weight_block_size is .* two whole numbers"),
        (
            compressed(format="nvfp4-pack-quantized"),
            r'quantization_config\.format is "nvfp4-pack-quantized", but .* pack-quantized, int-',
        ),
        (
            {
                **compressed(),
                "config_groups": {
                    "group_0": {"targets": ["Linear"], "weights": INT8, "format": "x"}
                },
            },
            r'group_0\.format is "x", but the formats that are read are pack-quantized, int-quant',
        ),
        (
            compressed(INT8 | dict(num_bits=4)),
            "num_bits is 4, but weights in int-quantized must be of type int with num_bits 8, not int",
        ),
        (
            compressed(INT8 | dict(type="float")),
            "num_bits is 8, but .* of type int with num_bits 8, not float",
        ),
        (compressed(INT8 | dict(strategy="token")), 'strategy is "token", but only tensor'),
        (compressed(INT8 | dict(strategy="group")), "group_size is null, but groups must have"),
        (compressed(INT8 | dict(strategy="block")), "block_structure is null, but blocks must"),
        (compressed(INT8 | dict(dynamic=True)), "dynamic is true, but weights must have scales"),
        (compressed(INT8 | dict(tiles=4)), "unknown settings .*group_0.weights.tiles = 4"),
        (compressed(None), "group_0.weights is null, but schemes without"),
        (compressed(ignore=["re:("]), r"ignore is \[\"re:\(\"\], but re:\( is not a valid pattern"),
        (compressed(transform_config={"a": 1}), "unknown settings .*transform_config"),
        (
            compressed(sparsity_config={"format": "sparse-24-bitmask"}),
            "sparse weights are not read",
        ),
    ],
)
def test_what_is_not_understood_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        read(settings)


def test_plain_weights_have_no_settings():
    assert read(None) is None and read({}) is None


def test_names_and_patterns_come_before_classes_and_ignored_layers_first():
    settings = compressed(ignore=["lm_head", "re:.*layers\\.1\\.mlp.*"])
    eight, four = dict(INT8), dict(INT8 | dict(num_bits=4, strategy="group", group_size=32))
    settings["config_groups"] = {
        "all": dict(targets=["Linear"], weights=eight),
        "some": dict(targets=["re:.*down_proj$"], weights=four, format="pack-quantized"),
    }
    found = read(settings)
    assert found.form("lm_head") is None and found.form("model.layers.1.mlp.down_proj") is None
    down, up = (found.form(f"model.layers.0.mlp.{name}_proj") for name in ("down", "up"))
    assert {*down.arrays((64, 64))} > {"weight_packed"} and "weight" in up.arrays((64, 64))
    assert found.form("model.embed_tokens", "Embedding") is None


def test_a_pattern_that_takes_forever_is_refused_in_time():
    read_settings = read(compressed(ignore=["re:(?:.|..|...)*[A-Z]"]))
    with pytest.raises(
        ConfigError, match=r"has the pattern re:\(\?:.*compared with model.layers.0"
    ):
        read_settings.form("model.layers.0.self_attn.q_proj")
