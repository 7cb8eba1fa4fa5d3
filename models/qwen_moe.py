"""Qwen2-MoE and Qwen3-MoE: the fields of config.json in which they differ from dense Qwen models."""

from typing import Any

from jaxshare.models.config_fields import Family, Fields, read_attention
from jaxshare.models.layer_types import (
    FULL,
    SLIDING,
    read_kinds,
    same_everywhere,
    switched_window,
    windows_of,
)
from jaxshare.models.moe import MoE
from jaxshare.models.moe_config import read_moe, read_sparse_layers

_DEFAULT_WINDOW = 4096
"""That of files with windows which do not name their length."""


def _qwen2_moe(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    shared_size = fields.positive("shared_expert_intermediate_size", int)
    return read_attention(fields, hidden_size, num_heads, kv_heads=num_heads) | dict(
        qkv_bias=fields.take("qkv_bias", bool, True),
        windows=_windows_of_qwen2_moe(fields, num_layers),
        moe=_experts(fields, shared_size=shared_size, shared_gate=True),
        sparse_layers=read_sparse_layers(fields, num_layers),
    )


def _qwen3_moe(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    fields.take("max_window_layers", int, None)  # of other families, without effect here
    window = switched_window(fields, _DEFAULT_WINDOW)
    attention_bias = fields.take("attention_bias", bool, False)
    return read_attention(fields, hidden_size, num_heads, bias=attention_bias) | dict(
        qk_norm=True,
        windows=same_everywhere(fields, num_layers, window),
        moe=_experts(fields),
        sparse_layers=read_sparse_layers(fields, num_layers),
    )


def _windows_of_qwen2_moe(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Reads the windows of layers: if use_sliding_window is set, every other layer from the first
    to max_window_layers has one, unless layer_types says otherwise."""
    end = fields.take("max_window_layers", int, 28)
    window = switched_window(fields, _DEFAULT_WINDOW)
    default = [
        SLIDING if window and layer % 2 == 0 and layer < end else FULL
        for layer in range(num_layers)
    ]
    return windows_of(fields, read_kinds(fields, num_layers, default), window)


def _experts(fields: Fields, **more: Any) -> MoE:
    size = fields.positive("moe_intermediate_size", int)
    return read_moe(fields, size, fields.take("norm_topk_prob", bool, False), **more)


FAMILIES = {
    "Qwen2MoeForCausalLM": Family("qwen2_moe", _qwen2_moe, default_theta=None),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _qwen3_moe, default_theta=None),
}
