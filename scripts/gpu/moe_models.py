"""Published models with experts, whose decode steps scripts/gpu/compile.py compiles for eight GPUs.

The fields are those of each model's config.json that change its numbers. What is compiled has one
layer of each kind twice: the first of a kind also computes what all of them share.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare.models.config import ModelConfig
from jaxshare.models.tensor_parallel import param_path
from jaxshare.quantised import FORMATS, QuantisedTensor
from scripts.gpu.predicted import Packing, kinds

DEVICES = 8

QWEN3_30B_A3B = ModelConfig.from_json(
    dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        head_dim=128,
        hidden_act="silu",
        hidden_size=2048,
        intermediate_size=6144,
        max_position_embeddings=40960,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_attention_heads=32,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_key_value_heads=4,
        rms_norm_eps=1e-06,
        rope_theta=1000000.0,
        tie_word_embeddings=False,
        vocab_size=151936,
    )
)
GPT_OSS_20B = ModelConfig.from_json(
    dict(
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        head_dim=64,
        hidden_act="silu",
        hidden_size=2880,
        intermediate_size=2880,
        layer_types=["sliding_attention", "full_attention"] * 12,
        max_position_embeddings=131072,
        num_attention_heads=64,
        num_experts_per_tok=4,
        num_hidden_layers=24,
        num_key_value_heads=8,
        num_local_experts=32,
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
        sliding_window=128,
        tie_word_embeddings=False,
        vocab_size=201088,
    )
)
DEEPSEEK_V3 = ModelConfig.from_json(
    dict(
        architectures=["DeepseekV3ForCausalLM"],
        model_type="deepseek_v3",
        first_k_dense_replace=3,
        hidden_act="silu",
        hidden_size=7168,
        intermediate_size=18432,
        kv_lora_rank=512,
        max_position_embeddings=163840,
        moe_intermediate_size=2048,
        n_group=8,
        n_routed_experts=256,
        n_shared_experts=1,
        norm_topk_prob=True,
        num_attention_heads=128,
        num_experts_per_tok=8,
        num_hidden_layers=61,
        num_key_value_heads=128,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        rms_norm_eps=1e-06,
        rope_scaling=dict(
            beta_fast=32,
            beta_slow=1,
            factor=40,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=4096,
            type="yarn",
        ),
        rope_theta=10000,
        routed_scaling_factor=2.5,
        tie_word_embeddings=False,
        topk_group=4,
        v_head_dim=128,
        vocab_size=129280,
    )
)

BACKEND = "mosaic_gpu"
"""Of attention; XLA's serves what this one does not."""


class Published(NamedTuple):
    """A model as it is served: with its experts' packing, None for bfloat16."""

    name: str
    config: ModelConfig
    packing: Packing | None = None


MODELS = (
    Published("Qwen3-30B-A3B", QWEN3_30B_A3B),
    Published("gpt-oss-20b", GPT_OSS_20B, Packing("mxfp4", 32, 1)),
    Published("DeepSeek-V3", DEEPSEEK_V3, Packing("fp8", 128, 4)),
)
"""gpt-oss as it is published, DeepSeek-V3 with experts in blocks of 128 inputs as it is published:
in bfloat16 a device would hold 168 GB of it."""


def compiled_layers(config: ModelConfig) -> tuple[int, ...]:
    """Two layers of each kind, in their order."""
    found: dict[Any, list[int]] = {}
    for layer, kind in enumerate(kinds(config)):
        found.setdefault(kind, []).append(layer)
    return tuple(sorted(layer for layers in found.values() for layer in layers[:2]))


def with_layers(config: ModelConfig, layers: tuple[int, ...]) -> ModelConfig:
    """The model with some of its layers alone."""
    taken = {
        name: tuple(values[layer] for layer in layers) if (values := getattr(config, name)) else ()
        for name in ("windows", "layer_ropes", "sparse_layers")
    }
    return dataclasses.replace(config, num_layers=len(layers), **taken)


def packed_experts(params: Any, packing: Packing | None) -> Any:
    """The shapes of parameters with the matrices of experts quantised; each device has the scales
    of its own experts."""
    if packing is None:
        return params

    def packed(keys: Any, leaf: jax.ShapeDtypeStruct) -> Any:
        path = param_path(keys)
        if leaf.ndim != 3 or "moe" not in path:
            return leaf
        kind, (*lead, inputs) = FORMATS[packing.format], leaf.shape
        scale = {1: jnp.float8_e8m0fnu, 4: jnp.float32}[packing.scale_bytes]
        codes, scales = (
            jax.ShapeDtypeStruct((*lead, number), dtype, sharding=leaf.sharding)
            for number, dtype in (
                (inputs * kind.bits // 8, kind.storage),
                (inputs // packing.group, scale),
            )
        )
        return QuantisedTensor(codes, scales, format=packing.format, dtype=np.dtype(leaf.dtype))

    return jax.tree.map_with_path(packed, params)
