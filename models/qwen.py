"""Qwen2, Qwen2.5, QwQ and dense Qwen3: the fields of config.json in which families differ."""

from typing import Any

from jaxshare.models.config_fields import Family, Fields, read_head_dim


def _qwen2(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    refuse_sliding_windows(fields, num_layers)
    return dict(
        num_kv_heads=fields.positive("num_key_value_heads", int),
        head_dim=read_head_dim(fields, hidden_size, num_heads),
        qkv_bias=True,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )


def _qwen3(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    refuse_sliding_windows(fields, num_layers)
    fields.positive("head_dim", int)
    attention_bias = fields.take("attention_bias", bool, False)
    return dict(
        num_kv_heads=fields.positive("num_key_value_heads", int),
        head_dim=read_head_dim(fields, hidden_size, num_heads),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=False,
        qk_norm=True,
    )


def refuse_sliding_windows(fields: Fields, num_layers: int) -> None:
    """Raises ConfigError for a model with sliding windows.

    Layers from max_window_layers on have one if use_sliding_window is set, unless layer_types says
    otherwise.
    """
    on = fields.take("use_sliding_window", bool, False)
    fields.take("sliding_window", int, None)
    first = fields.take("max_window_layers", int, 0)
    no_window = "sliding_window" in fields.values and fields.values["sliding_window"] is None
    if on and not no_window and first < num_layers and fields.values.get("layer_types") is None:
        raise fields.error(
            "use_sliding_window",
            f"sliding windows are not supported, and layers {first} to {num_layers - 1} have one",
        )


FAMILIES = {
    "Qwen2ForCausalLM": Family("qwen2", _qwen2, default_theta=None),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3, default_theta=None),
}
