"""GLM-4 (THUDM, Z.ai) in both forms: the fields of config.json in which families differ."""

from typing import Any

from jaxshare.models.config_fields import Family, Fields, read_attention
from jaxshare.models.rope_config import read_rope


def _glm(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    fields.positive("head_dim", int)
    found = read_attention(fields, hidden_size, num_heads) | dict(
        qkv_bias=fields.take("attention_bias", bool, True),
        rope_interleaved=True,
    )
    max_positions = fields.positive("max_position_embeddings", int)
    return found | read_rope(
        fields, found["head_dim"], max_positions, 10_000.0, default_partial=0.5
    )


def _glm4(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    return _glm(fields, hidden_size, num_heads, num_layers) | dict(norm_placement="both")


_NAMES = {("mlp", "gate_up"): "mlp.gate_up_proj"}
_NAMES_OF_GLM4 = _NAMES | {
    ("attention_post_norm",): "post_self_attn_layernorm",
    ("mlp_post_norm",): "post_mlp_layernorm",
}
_FUSED = frozenset({"gate_up"})

FAMILIES = {
    "GlmForCausalLM": Family("glm", _glm, None, modules=_NAMES, fused=_FUSED),
    "Glm4ForCausalLM": Family("glm4", _glm4, None, modules=_NAMES_OF_GLM4, fused=_FUSED),
}
