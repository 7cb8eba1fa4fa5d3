"""Gemma 2 and the texts of Gemma 3: the fields of config.json in which families differ."""

from typing import Any

from jaxshare.models.config_fields import Family, Fields, read_attention
from jaxshare.models.layer_types import FULL, SLIDING, read_kinds, read_ropes, windows_of

_GELU = ("gelu_pytorch_tanh", "gelu_tanh", "gelu_new")
_DEFAULT_WINDOW = 4096


def _gemma2(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    alternating = [FULL if layer % 2 else SLIDING for layer in range(num_layers)]
    kinds = read_kinds(fields, num_layers, alternating)
    return _common(fields, hidden_size, num_heads, kinds, softcaps=(50.0, 30.0))


def _gemma3(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    each = fields.positive("sliding_window_pattern", int, 6)
    fields.take("_sliding_window_pattern", int, None)  # the same, beside layer_types
    default = [SLIDING if (layer + 1) % each else FULL for layer in range(num_layers)]
    kinds = read_kinds(fields, num_layers, default)
    found = _common(fields, hidden_size, num_heads, kinds, softcaps=(None, None))
    local = fields.positive("rope_local_base_freq", float, 10_000.0)
    return found | read_ropes(fields, found["head_dim"], (1e6, local), kinds) | dict(qk_norm=True)


def _common(
    fields: Fields,
    hidden_size: int,
    num_heads: int,
    kinds: list[str],
    softcaps: tuple[float | None, float | None],
) -> dict[str, Any]:
    _check_gelu(fields)
    if fields.take("use_bidirectional_attention", bool, False):
        raise fields.error("use_bidirectional_attention", "only causal models are supported")
    fields.take("cache_implementation", str, None)  # of transformers' own cache
    fields.positive("head_dim", int)
    bias = fields.take("attention_bias", bool, False)
    window = fields.nullable("sliding_window", int, _DEFAULT_WINDOW)
    attention, logits = softcaps
    return read_attention(fields, hidden_size, num_heads, bias=bias) | dict(
        activation="gelu_tanh",
        norm_placement="both",
        norm_adds_one=True,
        score_scale=fields.positive("query_pre_attn_scalar", float, 256.0) ** -0.5,
        attention_softcap=fields.nullable("attn_logit_softcapping", float, attention) or 0.0,
        logit_softcap=fields.nullable("final_logit_softcapping", float, logits) or 0.0,
        embedding_multiplier=hidden_size**0.5,
        windows=windows_of(fields, kinds, window),
    )


def _check_gelu(fields: Fields) -> None:
    """hidden_act is a former name: where both are given, hidden_activation is meant."""
    former = fields.take("hidden_act", str, _GELU[0])
    name = "hidden_act" if fields.values.get("hidden_activation") is None else "hidden_activation"
    if fields.take("hidden_activation", str, former) not in _GELU:
        raise fields.error(name, f"only {_GELU[0]} is supported")


_NAMES = {
    ("attention_post_norm",): "post_attention_layernorm",
    ("mlp_norm",): "pre_feedforward_layernorm",
    ("mlp_post_norm",): "post_feedforward_layernorm",
}

# What a text_config without these means: the files of Gemma 3 leave them out.
_TEXT_DEFAULTS = dict(
    vocab_size=262208,
    head_dim=256,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=131072,
    rms_norm_eps=1e-6,
)

FAMILIES = {
    "Gemma2ForCausalLM": Family("gemma2", _gemma2, 10_000.0, modules=_NAMES, tied_by_default=True),
    "Gemma3ForCausalLM": Family(
        "gemma3_text", _gemma3, default_theta=None, modules=_NAMES, tied_by_default=True
    ),
    "Gemma3ForConditionalGeneration": Family(
        "gemma3",
        _gemma3,
        default_theta=None,
        modules=_NAMES,
        tied_by_default=True,
        text_type="gemma3_text",
        text_defaults=_TEXT_DEFAULTS,
        prefix="language_model.",
    ),
}
