"""SmolLM3: the fields of config.json in which families differ."""

from typing import Any

from jaxshare.models.config_fields import Family, Fields, read_attention
from jaxshare.models.layer_types import FULL, SLIDING, read_kinds, switched_window, windows_of
from jaxshare.models.rope_config import read_rope
from jaxshare.rope import Rope


def _read(fields: Fields, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    rotates = _rotates(fields, num_layers)
    window = switched_window(fields, default=None)
    fields.take("max_window_layers", int, None)  # of Qwen, without effect here
    default = [FULL if turns or window is None else SLIDING for turns in rotates]
    kinds = read_kinds(fields, num_layers, default)
    fields.take("pretraining_tp", int, 1)  # the number of parts of a product in training
    bias = fields.take("attention_bias", bool, False)
    found = read_attention(fields, hidden_size, num_heads, bias=bias) | dict(
        mlp_bias=fields.take("mlp_bias", bool, False),
        windows=windows_of(fields, kinds, window),
    )
    return found | _read_ropes(fields, found["head_dim"], rotates)


def _rotates(fields: Fields, num_layers: int) -> list[bool]:
    """Reads which layers have a rotation: despite its name, no_rope_layers has 1 for those."""
    each = fields.positive("no_rope_layer_interval", int, 4)
    given = fields.take("no_rope_layers", list, None)
    if given is None:
        return [bool((layer + 1) % each) for layer in range(num_layers)]
    if len(given) < num_layers or any(value not in (0, 1) for value in given):
        raise fields.error(
            "no_rope_layers",
            f"it must be 1 for layers with a rotation and 0 for others, of {num_layers} layers",
        )
    return [bool(value) for value in given[:num_layers]]


def _read_ropes(fields: Fields, head_dim: int, rotates: list[bool]) -> dict[str, Any]:
    max_positions = fields.positive("max_position_embeddings", int)
    found = read_rope(fields, head_dim, max_positions, 2_000_000.0)
    if all(rotates):
        return found
    if "short_rope" in found:
        raise fields.error("rope_scaling", "longrope is not supported beside layers without rope")
    rope: Rope = found["rope"]
    none = Rope.none()
    return found | dict(layer_ropes=tuple(rope if turns else none for turns in rotates))


FAMILIES = {
    "SmolLM3ForCausalLM": Family("smollm3", _read, default_theta=None, tied_by_default=True)
}
