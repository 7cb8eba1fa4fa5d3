"""Qwen2-MoE and Qwen3-MoE: the fields of config.json in which they differ from dense Qwen models."""

from typing import Any

from jaxshare.models.config_fields import Family, Fields, read_attention
from jaxshare.models.layer_types import switched_window
from jaxshare.models.moe import MoE
from jaxshare.models.moe_config import read_moe, read_sparse_layers


def _qwen2_moe(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    _refuse_windows(fields)
    shared_size = fields.positive("shared_expert_intermediate_size", int)
    return read_attention(fields, hidden_size, num_heads, kv_heads=num_heads) | dict(
        qkv_bias=fields.take("qkv_bias", bool, True),
        moe=_experts(fields, shared_size=shared_size, shared_gate=True),
        sparse_layers=read_sparse_layers(fields, num_layers),
    )


def _qwen3_moe(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    _refuse_windows(fields)
    attention_bias = fields.take("attention_bias", bool, False)
    return read_attention(fields, hidden_size, num_heads, bias=attention_bias) | dict(
        qk_norm=True,
        moe=_experts(fields),
        sparse_layers=read_sparse_layers(fields, num_layers),
    )


def _refuse_windows(fields: Fields) -> None:
    """Raises ConfigError for a model with sliding windows, which no published one has."""
    fields.take("max_window_layers", int, None)
    if switched_window(fields, default=4096):
        raise fields.error("use_sliding_window", "beside experts, windows are not supported")


def _experts(fields: Fields, **more: Any) -> MoE:
    size = fields.positive("moe_intermediate_size", int)
    return read_moe(fields, size, fields.take("norm_topk_prob", bool, False), **more)


FAMILIES = {
    "Qwen2MoeForCausalLM": Family("qwen2_moe", _qwen2_moe, default_theta=None),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _qwen3_moe, default_theta=None),
}
