"""OLMo 2 and 3: the fields of config.json in which families differ."""

from typing import Any

from jaxshare.models.config_fields import Family, Fields, read_attention
from jaxshare.models.layer_types import FULL, SLIDING, read_kinds, read_ropes, windows_of


def _olmo2(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    bias = fields.take("attention_bias", bool, False)
    return read_attention(fields, hidden_size, num_heads, kv_heads=num_heads, bias=bias) | dict(
        qk_norm_whole=True,
        norm_placement="post",
    )


def _olmo3(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    kinds = _kinds_of_olmo3(fields, num_layers)
    window = fields.nullable("sliding_window", int, 4096)
    return _olmo2(fields, hidden_size, num_heads, num_layers) | dict(
        windows=windows_of(fields, kinds, window)
    )


def _kinds_of_olmo3(fields: Fields, num_layers: int) -> list[str]:
    default = [SLIDING if (layer + 1) % 4 else FULL for layer in range(num_layers)]
    return read_kinds(fields, num_layers, default)


def _ropes_of_olmo3(
    fields: Fields, head_dim: int, max_positions: int, default_theta: float
) -> dict[str, Any]:
    kinds = _kinds_of_olmo3(fields, fields.positive("num_hidden_layers", int))
    theta = fields.positive("rope_theta", float, default_theta)  # of all layers
    return read_ropes(fields, head_dim, max_positions, (theta, theta), kinds)


_NAMES = {
    ("attention_post_norm",): "post_attention_layernorm",
    ("mlp_post_norm",): "post_feedforward_layernorm",
}

FAMILIES = {
    "Olmo2ForCausalLM": Family("olmo2", _olmo2, 10_000.0, modules=_NAMES),
    "Olmo3ForCausalLM": Family(
        "olmo3", _olmo3, 500_000.0, modules=_NAMES, read_ropes=_ropes_of_olmo3
    ),
}
