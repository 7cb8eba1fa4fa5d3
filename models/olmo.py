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
    default = [SLIDING if (layer + 1) % 4 else FULL for layer in range(num_layers)]
    kinds = read_kinds(fields, num_layers, default)
    window = fields.nullable("sliding_window", int, 4096)
    theta = fields.positive("rope_theta", float, 500_000.0)  # of all layers
    found = _olmo2(fields, hidden_size, num_heads, num_layers)
    ropes = read_ropes(fields, found["head_dim"], (theta, theta), kinds)
    return found | ropes | dict(windows=windows_of(fields, kinds, window))


_NAMES = {
    ("attention_post_norm",): "post_attention_layernorm",
    ("mlp_post_norm",): "post_feedforward_layernorm",
}

FAMILIES = {
    "Olmo2ForCausalLM": Family("olmo2", _olmo2, 10_000.0, modules=_NAMES),
    "Olmo3ForCausalLM": Family("olmo3", _olmo3, default_theta=None, modules=_NAMES),
}
