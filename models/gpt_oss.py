"""gpt-oss: the fields of config.json and the names of tensors in which it differs from Llama."""

from typing import Any

from jaxshare.models.config_fields import Family, Fields, read_attention
from jaxshare.models.layer_types import FULL, SLIDING, read_kinds, windows_of
from jaxshare.models.moe import MoE
from jaxshare.models.moe_config import read_moe

_DEFAULT_WINDOW = 128


def _read(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    alternating = [FULL if layer % 2 else SLIDING for layer in range(num_layers)]
    kinds = read_kinds(fields, num_layers, alternating)
    window = fields.nullable("sliding_window", int, _DEFAULT_WINDOW)
    bias = fields.take("attention_bias", bool, True)
    return read_attention(fields, hidden_size, num_heads, bias=bias) | dict(
        attention_sinks=True,
        windows=windows_of(fields, kinds, window),
        moe=_read_experts(fields),
        sparse_layers=(True,) * num_layers,
    )


def _read_experts(fields: Fields) -> MoE:
    fields.positive("initial_context_length", int, None)  # rope_scaling has it, too
    chosen = fields.positive("num_experts_per_tok", int)
    if fields.take("experts_per_token", int, chosen) != chosen:
        raise fields.error("experts_per_token", f"num_experts_per_tok is {chosen}; both name it")
    return read_moe(
        fields,
        fields.positive("intermediate_size", int),
        normalise=False,
        scoring="chosen",
        router_bias=True,
        expert_bias=True,
        swiglu_limit=fields.positive("swiglu_limit", float, 7.0),
        swiglu_alpha=fields.positive("swiglu_alpha", float, 1.702),
    )


_MODULES = {
    ("moe", "router"): "mlp.router",
    ("moe", "gate_up"): "mlp.experts.gate_up_proj",
    ("moe", "down"): "mlp.experts.down_proj",
    # names in messages, of parameters that are parts of the former
    ("moe", "gate"): "mlp.experts.gate_proj",
    ("moe", "up"): "mlp.experts.up_proj",
}

FAMILIES = {
    "GptOssForCausalLM": Family(
        "gpt_oss",
        _read,
        default_theta=150_000.0,
        modules=_MODULES,
        stacks_experts=True,
        quantizations=frozenset({"mxfp4"}),
    )
}
