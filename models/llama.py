"""Llama 2, 3, 3.1 to 3.3, CodeLlama, Yi: the fields of config.json in which families differ."""

from typing import Any

from jaxshare.models.config_fields import Family, Fields, read_head_dim


def _read(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    attention_bias = fields.take("attention_bias", bool, False)
    # The number of parts of a matrix product in training; the products are the same.
    fields.take("pretraining_tp", int, 1)
    return dict(
        num_kv_heads=fields.positive("num_key_value_heads", int, num_heads),
        head_dim=read_head_dim(fields, hidden_size, num_heads),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=fields.take("mlp_bias", bool, False),
        qk_norm=False,
    )


# Files of Llama 1 and 2 from before CodeLlama have no rope_theta: the value was fixed.
FAMILIES = {"LlamaForCausalLM": Family("llama", _read, default_theta=10_000.0)}
