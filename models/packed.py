"""Packed parameters: projections of the same input as one kernel, and so one product.

A GPU then starts one product for queries, keys and values, and one for gate and up. Checkpoints
have the parts under their own names: `pack` is for what is loaded, `unpack` for what needs names.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxshare.models.config import ModelConfig
from jaxshare.quantised import concatenated, is_quantised

QKV, GATE_UP = "qkv", "gate_up"
"""The names of packed projections."""
_PLACES = {QKV: "attention", GATE_UP: "mlp"}
"""The modules of a layer that have them."""


def part_sizes(config: ModelConfig) -> dict[str, dict[str, int]]:
    """The features of each part of each packed projection, in their order."""
    kv = config.num_kv_heads * config.head_dim
    qkv = {QKV: {"q": config.num_heads * config.head_dim, "k": kv, "v": kv}}
    gate_up = {GATE_UP: {"gate": config.intermediate_size, "up": config.intermediate_size}}
    return gate_up if config.mla else qkv | gate_up


def kv_modules(config: ModelConfig) -> tuple[str, ...]:
    """The modules whose parameters are those of kv heads, one head after the other."""
    return ("k", "v", "k_norm") if config.qk_norm_whole else ("k", "v")


def pack(params: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Packs the projections of every layer.

    Args:
      params: {"params": ...}, emptied layer by layer, so that no more than one is held twice.
      config: of the model.

    Returns:
      The same with packed projections in place of their parts, but for those whose parts are
      quantised in different ways.
    """
    layers, packed = params.pop("params"), dict[str, Any]()
    for name in [*layers]:
        packed[name] = _packed_layer(layers.pop(name), config)
    return {**params, "params": packed}


def _packed_layer(layer: Any, config: ModelConfig) -> Any:
    if not isinstance(layer, Mapping) or "attention" not in layer:
        return layer
    found = {name: {**module} for name, module in layer.items()}
    for name, sizes in part_sizes(config).items():
        module = found.get(_PLACES[name])
        if module is None:  # a layer with experts
            continue
        parts = [module[part] for part in sizes]
        whole = {key: _concatenated([part[key] for part in parts]) for key in parts[0]}
        if any(value is None for value in whole.values()):
            continue
        module[name] = whole
        for part in sizes:
            del module[part]
    return found


def _concatenated(parts: list[Any]) -> Any:
    if any(map(is_quantised, parts)):
        return concatenated(parts) if all(map(is_quantised, parts)) else None
    return jnp.concatenate(parts)


def unpack(params: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Gives the parts of packed projections their names again; changes nothing else.

    Args:
      params: {"params": ...}, packed or not; it stays as it is.
      config: of the model.
    """
    return {**params, "params": {k: _parts(v, config) for k, v in params["params"].items()}}


def _parts(layer: Any, config: ModelConfig) -> Any:
    if not isinstance(layer, Mapping) or "attention" not in layer:
        return layer
    found = {name: {**module} for name, module in layer.items()}
    for name, sizes in part_sizes(config).items():
        module = found.get(_PLACES[name], {})
        whole, start = module.pop(name, None), 0
        for part, size in sizes.items() if whole else ():
            module[part] = {key: value[start : start + size] for key, value in whole.items()}
            start += size
    return found
