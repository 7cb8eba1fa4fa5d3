"""DeepSeek-V2, V2-Lite, V3, R1 and Kimi-K2: the fields of config.json in which they differ."""

import functools
import math
from typing import Any, Literal

from jaxshare.models.config_fields import MAX_HEAD_DIM, Family, Fields
from jaxshare.models.mla import MLA
from jaxshare.models.moe import MoE


def _read(
    version: int, fields: Fields, hidden_size: int, num_heads: int, num_layers: int
) -> dict[str, Any]:
    bias = fields.take("attention_bias", bool, False)
    mla = _read_mla(fields, bias)
    _check_heads(fields, mla, num_heads)
    _pass_over(fields)
    return dict(
        num_kv_heads=1,
        head_dim=mla.cached_dim,
        rotary_dim=mla.rope_dim,
        qkv_bias=False,
        out_bias=bias,
        mlp_bias=version == 2 and fields.take("mlp_bias", bool, False),
        qk_norm=False,
        score_scale=_score_scale(fields, mla),
        rope_interleaved=version == 2 or fields.take("rope_interleave", bool, True),
        mla=mla,
        **_read_experts(version, fields, num_layers),
    )


def _read_mla(fields: Fields, bias: bool) -> MLA:
    names = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    kv_lora_rank, nope_dim, rope_dim, value_dim = (
        fields.positive(name, int, most=MAX_HEAD_DIM) for name in names
    )
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", "it must be even, because pairs are rotated")
    q_lora_rank = fields.positive("q_lora_rank", int, None) or 0
    return MLA(q_lora_rank, kv_lora_rank, nope_dim, rope_dim, value_dim, bias)


def _check_heads(fields: Fields, mla: MLA, num_heads: int) -> None:
    """Checks the fields that other families have, too, and that say nothing new here."""
    for name, only in (
        ("num_key_value_heads", num_heads),
        ("head_dim", mla.rope_dim),
        ("qk_head_dim", mla.query_dim),
    ):
        if fields.take(name, int, only) != only:
            raise fields.error(name, f"in a model with latents it must be {only}")


def _pass_over(fields: Fields) -> None:
    """Marks fields of training as read, and that of layers that predict later tokens, which are
    left out."""
    for name in ("num_nextn_predict_layers", "pretraining_tp", "ep_size"):
        fields.take(name, int, None)
    for name in ("seq_aux", "output_router_logits"):
        fields.take(name, bool, None)
    fields.take("aux_loss_alpha", float, None)


def _score_scale(fields: Fields, mla: MLA) -> float:
    """The scale of scores. YaRN's factor multiplies queries and keys as a whole, not their rotated
    part alone, so its square is in the scale."""
    rope = fields.inside("rope_parameters") or fields.inside("rope_scaling")
    scale = mla.query_dim**-0.5
    if rope is None or rope.values.get("rope_type", rope.values.get("type")) in (None, "default"):
        return scale
    all_dim = rope.take("mscale_all_dim", float, None)
    factor = rope.positive("factor", float, None)
    if not all_dim or factor is None or factor <= 1:
        return scale
    return scale * (0.1 * all_dim * math.log(factor) + 1.0) ** 2


def _read_experts(version: int, fields: Fields, num_layers: int) -> dict[str, Any]:
    """Reads the settings of experts, and which layers have them: all but the first ones."""
    dense = fields.take("first_k_dense_replace", int, 0)
    if fields.take("moe_layer_freq", int, 1) != 1:
        raise fields.error("moe_layer_freq", "only 1, experts in every later layer, is supported")
    scoring: Literal["softmax", "sigmoid"] = "softmax" if version == 2 else "sigmoid"
    if fields.take("scoring_func", str, scoring) != scoring:
        raise fields.error("scoring_func", f"in DeepSeek-V{version} it must be {scoring}")
    size = fields.positive("moe_intermediate_size", int)
    shared = fields.take("n_shared_experts", int, 0)
    routing = _read_v2_routing(fields) if version == 2 else _read_v3_routing(fields)
    moe = MoE(
        num_experts=fields.positive("n_routed_experts", int),
        top_k=fields.positive("num_experts_per_tok", int),
        expert_size=size,
        scoring=scoring,
        scaling=fields.positive("routed_scaling_factor", float, 1.0),
        shared_size=shared * size,
        **routing,
    )
    _check_groups(fields, moe)
    if dense >= num_layers:
        return {}
    return dict(moe=moe, sparse_layers=tuple(i >= dense for i in range(num_layers)))


def _read_v2_routing(fields: Fields) -> dict[str, Any]:
    if fields.take("norm_topk_prob", bool, False):
        raise fields.error("norm_topk_prob", "in DeepSeek-V2 it must be false")
    method = fields.take("topk_method", str, "greedy")
    groups = _groups(fields)
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error("topk_method", "must be greedy or group_limited_greedy")
    return dict(normalise=False, **(groups if method == "group_limited_greedy" else {}))


def _read_v3_routing(fields: Fields) -> dict[str, Any]:
    if fields.take("topk_method", str, "noaux_tc") != "noaux_tc":
        raise fields.error("topk_method", "in DeepSeek-V3 it must be noaux_tc")
    normalise = fields.take("norm_topk_prob", bool, True)
    return dict(normalise=normalise, choice_bias=True, group_score="top2", **_groups(fields))


def _groups(fields: Fields) -> dict[str, int]:
    return dict(
        groups=fields.positive("n_group", int, None) or 1,
        top_groups=fields.positive("topk_group", int, None) or 1,
    )


def _check_groups(fields: Fields, moe: MoE) -> None:
    if moe.num_experts % moe.groups:
        raise fields.error("n_group", f"it must divide n_routed_experts, {moe.num_experts}")
    if moe.top_groups > moe.groups:
        raise fields.error("topk_group", f"there are only {moe.groups} groups (n_group)")
    if moe.top_k > (most := moe.num_experts // moe.groups * moe.top_groups):
        raise fields.error("num_experts_per_tok", f"a token can reach only {most} experts")


_ATTENTION = {
    "q_a": "q_a_proj",
    "q_a_norm": "q_a_layernorm",
    "q_b": "q_b_proj",
    "kv_a": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
    "kv_b": "kv_b_proj",
    "k_b": "k_b_proj",
    "v_b": "v_b_proj",
}
_MODULES = {
    **{("attention", part): f"self_attn.{name}" for part, name in _ATTENTION.items()},
    **{
        ("moe", "shared", part): f"mlp.shared_experts.{part}_proj"
        for part in ("gate", "up", "down")
    },
    ("moe",): "mlp.gate",  # with the bias by which experts are chosen
}
"""k_b_proj and v_b_proj are rows of kv_b_proj, and names in messages alone."""

FAMILIES = {
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2", functools.partial(_read, 2), default_theta=10_000.0, modules=_MODULES
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3",
        functools.partial(_read, 3),
        default_theta=10_000.0,
        other_types=("kimi_k2",),
        predicts_later_tokens=True,
        modules=_MODULES,
    ),
}
