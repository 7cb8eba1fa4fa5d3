"""Mistral 7B, Mistral-Small 3 to 3.2, Ministral: the fields of config.json in which families differ."""

from typing import Any

from jaxshare.models.config_fields import Family, Fields, read_attention
from jaxshare.models.layer_types import FULL, SLIDING, read_kinds, same_everywhere, windows_of

_DEFAULT_WINDOW = 4096
"""That of files which do not name one."""


def _mistral(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    window = fields.nullable("sliding_window", int, _DEFAULT_WINDOW)
    return read_attention(fields, hidden_size, num_heads, kv_heads=num_heads) | dict(
        windows=same_everywhere(fields, num_layers, window)
    )


def _ministral(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    window = fields.nullable("sliding_window", int, _DEFAULT_WINDOW)
    kinds = read_kinds(fields, num_layers, [FULL if window is None else SLIDING] * num_layers)
    return read_attention(fields, hidden_size, num_heads, kv_heads=num_heads) | dict(
        windows=windows_of(fields, kinds, window)
    )


FAMILIES = {
    "MistralForCausalLM": Family("mistral", _mistral, default_theta=10_000.0),
    "MinistralForCausalLM": Family("ministral", _ministral, default_theta=10_000.0),
    "Mistral3ForConditionalGeneration": Family(
        "mistral3", _mistral, 10_000.0, text_type="mistral", prefix="language_model."
    ),
}
