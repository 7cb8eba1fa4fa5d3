"""Phi-3, Phi-4, Phi-4-mini, Phi-4-reasoning: the fields of config.json in which families differ."""

from typing import Any

from jaxshare.models.config_fields import Family, Fields, read_attention
from jaxshare.models.layer_types import same_everywhere


def _read(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    for name in ("full_attn_mod", "interpolate_factor"):  # of code that came with a checkpoint
        if fields.take(name, int, 1) != 1:
            raise fields.error(name, "only 1 is supported, as in the published checkpoints")
    return read_attention(fields, hidden_size, num_heads, kv_heads=num_heads) | dict(
        windows=same_everywhere(fields, num_layers, fields.positive("sliding_window", int, None)),
    )


_NAMES = {("attention", "qkv"): "self_attn.qkv_proj", ("mlp", "gate_up"): "mlp.gate_up_proj"}

FAMILIES = {
    "Phi3ForCausalLM": Family(
        "phi3", _read, 10_000.0, modules=_NAMES, fused=frozenset({"qkv", "gate_up"})
    )
}
