"""Mixtral: the fields of config.json and the names of tensors in which it differs from Llama."""

from typing import Any

from jaxshare.models.config_fields import Family, Fields, read_attention
from jaxshare.models.layer_types import same_everywhere
from jaxshare.models.moe_config import read_moe


def _read(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    window = fields.positive("sliding_window", int, None)
    return read_attention(fields, hidden_size, num_heads, kv_heads=num_heads) | dict(
        windows=same_everywhere(fields, num_layers, window),
        moe=read_moe(fields, fields.positive("intermediate_size", int), normalise=True),
        sparse_layers=(True,) * num_layers,
    )


_MODULES = {
    ("moe", "router"): "block_sparse_moe.gate",
    **{
        ("moe", name): f"block_sparse_moe.experts.*.{stored}"
        for name, stored in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}

FAMILIES = {"MixtralForCausalLM": Family("mixtral", _read, default_theta=None, modules=_MODULES)}
