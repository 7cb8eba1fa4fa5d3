"""OLMoE: the fields of config.json in which it differs from Llama."""

from typing import Any

from jaxshare.models.config_fields import Family, Fields, read_attention
from jaxshare.models.moe_config import read_moe


def _read(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    attention_bias = fields.take("attention_bias", bool, False)
    return read_attention(
        fields, hidden_size, num_heads, kv_heads=num_heads, bias=attention_bias
    ) | dict(
        qk_norm_whole=True,
        qkv_clip=fields.positive("clip_qkv", float, None) or 0.0,
        moe=read_moe(
            fields,
            fields.positive("intermediate_size", int),
            fields.take("norm_topk_prob", bool, False),
        ),
        sparse_layers=(True,) * num_layers,
    )


FAMILIES = {"OlmoeForCausalLM": Family("olmoe", _read, default_theta=None)}
