"""Reading from config.json what differs between layers: their windows, and the rotation of those
that have one."""

from collections.abc import Sequence
from typing import Any

from jaxshare.models.config_fields import Fields
from jaxshare.models.rope_config import read_rope
from jaxshare.rope import Rope

FULL, SLIDING = "full_attention", "sliding_attention"


def read_kinds(fields: Fields, num_layers: int, default: Sequence[str]) -> list[str]:
    """Returns for each layer `FULL` or `SLIDING`: what layer_types says, or else `default`.

    Raises:
      ConfigError: another type, or types of another number of layers.
    """
    kinds = fields.take("layer_types", list, None)
    if kinds is None:
        return [*default]
    known = {FULL: FULL, SLIDING: SLIDING, "attention": FULL}  # the last is a former name
    if len(kinds) != num_layers or not all(isinstance(k, str) and k in known for k in kinds):
        raise fields.error(
            "layer_types",
            f"it must be {FULL} or {SLIDING} for each of the {num_layers} layers; no other type "
            "is supported",
        )
    return [known[kind] for kind in kinds]


def switched_window(fields: Fields, default: int | None) -> int | None:
    """Returns the length of windows in families with use_sliding_window; None where it is off.

    The length stays in files of models without windows, where it means nothing.
    """
    fields.take("sliding_window", int, None)
    on = fields.take("use_sliding_window", bool, False)
    return fields.nullable("sliding_window", int, default) if on else None


def windows_of(fields: Fields, kinds: Sequence[str], window: int | None) -> tuple[int, ...]:
    """Returns the windows of layers as ModelConfig has them.

    A window as long as the longest text is none.

    Args:
      fields: of config.json.
      kinds: of each layer.
      window: of layers that have one, in tokens.

    Raises:
      ConfigError: a layer has a window, and there is no length.
    """
    if SLIDING not in kinds:
        return ()
    if window is None:
        raise fields.error(
            "sliding_window",
            f"by layer_types layer {list(kinds).index(SLIDING)} has a window: give its length in "
            "tokens, and switch it on where there is use_sliding_window",
        )
    if window >= fields.positive("max_position_embeddings", int):
        return ()
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def same_everywhere(fields: Fields, num_layers: int, window: int | None) -> tuple[int, ...]:
    """Returns the windows of a family whose layers are all alike.

    Raises:
      ConfigError: layer_types says otherwise.
    """
    alike = [FULL if window is None else SLIDING] * num_layers
    kinds = read_kinds(fields, num_layers, alike)
    if kinds != alike:
        raise fields.error(
            "layer_types",
            f"with sliding_window = {window} all layers of this architecture are {alike[0]}",
        )
    return windows_of(fields, kinds, window)


def read_ropes(
    fields: Fields,
    head_dim: int,
    thetas: tuple[float, float],
    kinds: Sequence[str],
) -> dict[str, Any]:
    """Reads rotations of families whose layers with a window are rotated in another way.

    The scaling in files of transformers 4 is of the other layers alone.

    Args:
      fields, head_dim: as for `read_rope`.
      thetas: for files without rope_theta, of layers without and with a window.
      kinds: of each layer.

    Returns:
      As `read_rope`, with layer_ropes.

    Raises:
      ConfigError: as `read_rope`, or a rotation that depends on the length of a text.
    """
    max_positions = fields.positive("max_position_embeddings", int)
    given = fields.values.get("rope_parameters")
    if isinstance(given, dict) and {FULL, SLIDING} & given.keys():  # as transformers 5 writes it
        full, sliding = (
            read_rope(_rope_fields(fields, kind), head_dim, max_positions, theta)
            for kind, theta in zip((FULL, SLIDING), thetas, strict=True)
        )
        local = sliding["rope"]
    else:
        full, sliding = read_rope(fields, head_dim, max_positions, thetas[0]), {}
        local = Rope.default(head_dim, thetas[1])
    if "short_rope" in full | sliding:
        raise fields.error("rope_parameters", "longrope is not supported beside windows")
    ropes = tuple(local if kind == SLIDING else full["rope"] for kind in kinds)
    return full | dict(layer_ropes=ropes)


def _rope_fields(fields: Fields, kind: str) -> Fields:
    """The rotation of one kind of layers as though it were that of all."""
    inside = fields.inside("rope_parameters")
    if inside is None:
        return Fields({}, fields.source)
    each = inside.inside(kind)
    inside.finish({FULL, SLIDING})
    return Fields({"rope_parameters": each.values} if each else {}, fields.source)
