"""Mixtures of experts in config.json, in the words of transformers."""

from typing import Any

from jaxshare.models.config_fields import Fields
from jaxshare.models.moe import MoE

_NAMES = "num_experts", "num_local_experts"
_MOST_EXPERTS = 100_000
"""More than any model has; a checkpoint has tensors for each."""


def read_moe(fields: Fields, expert_size: int, normalise: bool, **more: Any) -> MoE:
    """Reads the numbers of experts and of those that a token passes through.

    Args:
      fields: of the model.
      expert_size, normalise, more: see `MoE`.
    """
    given = [name for name in _NAMES if fields.values.get(name) is not None] or [_NAMES[0]]
    counts = [fields.positive(name, int, most=_MOST_EXPERTS) for name in given]
    if len({*counts}) > 1:
        raise fields.error(_NAMES[1], f"{_NAMES[0]} is {counts[0]}; both name the experts")
    top_k = fields.positive("num_experts_per_tok", int)
    if top_k > counts[0]:
        raise fields.error(
            "num_experts_per_tok", f"there are {counts[0]} experts; it must not be more"
        )
    return MoE(counts[0], top_k, expert_size, normalise, **more)


def read_sparse_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Reads for each layer whether it has experts, as Qwen names them: every
    decoder_sparse_step-th, without those in mlp_only_layers."""
    step = fields.positive("decoder_sparse_step", int, 1)
    dense = fields.take("mlp_only_layers", list, [])
    if not all(type(layer) is int for layer in dense):
        raise fields.error("mlp_only_layers", "it must be a list of indices of layers")
    return tuple((i + 1) % step == 0 and i not in dense for i in range(num_layers))
