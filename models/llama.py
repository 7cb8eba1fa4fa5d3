"""Llama 2, 3, 3.1 to 3.3, CodeLlama, Yi: the fields of config.json in which families differ."""

from typing import Any

from jaxshare.models.config_fields import Family, Fields, read_attention


def _read(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    attention_bias = fields.take("attention_bias", bool, False)
    # The number of parts of a matrix product in training; the products are the same.
    fields.take("pretraining_tp", int, 1)
    return read_attention(
        fields, hidden_size, num_heads, kv_heads=num_heads, bias=attention_bias
    ) | dict(
        mlp_bias=fields.take("mlp_bias", bool, False),
    )


# Files of Llama 1 and 2 from before CodeLlama have no rope_theta: the value was fixed.
FAMILIES = {"LlamaForCausalLM": Family("llama", _read, default_theta=10_000.0)}
