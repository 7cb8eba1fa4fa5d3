"""Mistral 7B, Mistral-Small 3 to 3.2, Ministral: the fields of config.json in which families differ."""

from typing import Any

from jaxshare.models.config_fields import Family, Fields, read_head_dim
from jaxshare.models.layer_types import FULL, SLIDING, read_kinds, same_everywhere, windows_of

_DEFAULT_WINDOW = 4096
"""That of files which do not name one."""


def _mistral(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    window = fields.nullable("sliding_window", int, _DEFAULT_WINDOW)
    return _shape(fields, hidden_size, num_heads) | dict(
        windows=same_everywhere(fields, num_layers, window)
    )


def _ministral(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    window = fields.nullable("sliding_window", int, _DEFAULT_WINDOW)
    kinds = read_kinds(fields, num_layers, [FULL if window is None else SLIDING] * num_layers)
    return _shape(fields, hidden_size, num_heads) | dict(windows=windows_of(fields, kinds, window))


def _shape(fields: Fields, hidden_size: int, num_heads: int) -> dict[str, Any]:
    return dict(
        num_kv_heads=fields.positive("num_key_value_heads", int, num_heads),
        head_dim=read_head_dim(fields, hidden_size, num_heads),
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )


FAMILIES = {
    "MistralForCausalLM": Family("mistral", _mistral, default_theta=10_000.0),
    "MinistralForCausalLM": Family("ministral", _ministral, default_theta=10_000.0),
    "Mistral3ForConditionalGeneration": Family(
        "mistral3", _mistral, 10_000.0, text_type="mistral", prefix="language_model."
    ),
}
