"""Qwen2, Qwen2.5, QwQ and dense Qwen3: the fields of config.json in which families differ."""

from typing import Any

from jaxshare.models.config_fields import Family, Fields, read_attention
from jaxshare.models.layer_types import FULL, SLIDING, read_kinds, switched_window, windows_of


def _qwen2(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    return read_attention(fields, hidden_size, num_heads) | dict(
        qkv_bias=True,
        windows=read_windows(fields, num_layers),
    )


def _qwen3(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    fields.positive("head_dim", int)
    attention_bias = fields.take("attention_bias", bool, False)
    return read_attention(fields, hidden_size, num_heads, bias=attention_bias) | dict(
        qk_norm=True,
        windows=read_windows(fields, num_layers),
    )


def read_windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Reads the windows of layers.

    Layers from max_window_layers on have one if use_sliding_window is set, unless layer_types says
    otherwise.
    """
    first = fields.take("max_window_layers", int, 28)
    window = switched_window(fields, default=4096)
    default = [SLIDING if window and layer >= first else FULL for layer in range(num_layers)]
    return windows_of(fields, read_kinds(fields, num_layers, default), window)


FAMILIES = {
    "Qwen2ForCausalLM": Family("qwen2", _qwen2, default_theta=None),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3, default_theta=None),
}
