"""Granite 3: the fields of config.json in which families differ."""

from typing import Any

from jaxshare.models.config_fields import Family, Fields, read_attention


def _read(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    bias = fields.take("attention_bias", bool, False)
    return read_attention(fields, hidden_size, num_heads, kv_heads=num_heads, bias=bias) | dict(
        mlp_bias=fields.take("mlp_bias", bool, False),
        score_scale=fields.positive("attention_multiplier", float, 1.0),
        embedding_multiplier=fields.positive("embedding_multiplier", float, 1.0),
        residual_multiplier=fields.positive("residual_multiplier", float, 1.0),
        logit_divisor=fields.positive("logits_scaling", float, 1.0),
    )


FAMILIES = {"GraniteForCausalLM": Family("granite", _read, default_theta=10_000.0)}
