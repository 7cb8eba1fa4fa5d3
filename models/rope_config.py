"""Reading the rotary embedding from config.json.

Both forms are read: that of transformers 4 (`rope_theta`, `rope_scaling`) and that of version 5
(`rope_parameters`). Frequencies and attention factors follow `modeling_rope_utils.py` of version 5,
with one difference: the rotary classes of its Llama and Qwen models cannot rotate a part of a head;
here `partial_rotary_factor` is applied wherever it is given.
"""

import math
from collections.abc import Callable
from typing import Any

from jaxshare.models.config_fields import REQUIRED, ConfigError, Fields
from jaxshare.rope import Rope

_Read = Callable[[Fields, int, float, int, int], Rope | tuple[Rope, Rope]]


def read_rope(
    fields: Fields,
    head_dim: int,
    max_positions: int,
    default_theta: float | None,
    default_partial: float = 1.0,
) -> dict[str, Any]:
    """Reads the fields of ModelConfig that describe the rotation.

    Args:
      fields: of config.json.
      head_dim: the size of one head.
      max_positions: the model's context, in tokens.
      default_theta: for files without rope_theta; None if it is required.
      default_partial: the part of a head that is rotated, for files without partial_rotary_factor.

    Returns:
      rope, short_rope, short_positions.

    Raises:
      ConfigError: a missing or unknown field, an unknown rope type, or one whose frequencies depend
        on the current length.
    """
    inner = _merge_forms(fields)
    theta = inner.positive("rope_theta", float, default_theta)
    if theta is None:
        raise ConfigError(
            f"{fields.source} lacks rope_theta, which the model cannot be built without: add it"
        )
    partial = inner.positive("partial_rotary_factor", float, default_partial)
    original = inner.positive("original_max_position_embeddings", int, max_positions)
    kind = inner.take("rope_type", str, "default")
    kind = "longrope" if kind == "su" else kind  # its former name
    if kind == "dynamic":
        raise inner.error(
            "rope_type",
            "its frequencies depend on the current length, so rows of different lengths could not "
            "share cached keys: choose a fixed scaling such as yarn, linear or longrope",
        )
    if kind not in _KINDS:
        raise inner.error("rope_type", f"must be one of {', '.join(_KINDS)}")
    if partial > 1:
        raise inner.error("partial_rotary_factor", "must not be greater than 1")
    read, ignored = _KINDS[kind]
    try:
        ropes = read(inner, int(head_dim * partial), theta, original, max_positions)
    except ConfigError:
        raise
    except (ArithmeticError, ValueError) as error:
        raise ConfigError(
            f"{fields.source} has a rotation of type {kind} that cannot be computed: {error}"
        ) from error
    inner.finish(ignored)
    if isinstance(ropes, Rope):
        return dict(rope=ropes)
    short, long = ropes
    if max_positions <= original:
        return dict(rope=short)
    return dict(rope=long, short_rope=short, short_positions=original)


def _merge_forms(fields: Fields) -> Fields:
    """Merges both forms, and rotation fields at the top level, into one object."""
    scaling, parameters = fields.inside("rope_scaling"), fields.inside("rope_parameters")
    outside = {
        name: fields.values[name]
        for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
        if fields.take(name, float, None) is not None
    }
    merged: dict[str, Any] = {}
    for values in (
        outside,
        parameters.values if parameters else {},
        scaling.values if scaling else {},
    ):
        for key, value in values.items():
            name = "rope_type" if key == "type" else key  # its former name
            if None not in (value, merged.get(name)) and value != merged[name]:
                raise ConfigError(
                    f"{fields.source} gives {name} twice, as {merged[name]} and as {value}: keep "
                    "the right one"
                )
            merged[name] = value if value is not None else merged.get(name)
    inner = parameters or scaling
    return Fields(merged, fields.source, inner.prefix if inner else "")


def _default(fields: Fields, dim: int, theta: float, original: int, max_positions: int) -> Rope:
    return Rope.default(dim, theta)


def _linear(fields: Fields, dim: int, theta: float, original: int, max_positions: int) -> Rope:
    return Rope.linear(dim, theta, fields.positive("factor", float))


def _llama3(fields: Fields, dim: int, theta: float, original: int, max_positions: int) -> Rope:
    low, high = (
        fields.positive("low_freq_factor", float),
        fields.positive("high_freq_factor", float),
    )
    if high <= low:
        raise fields.error("high_freq_factor", f"must be greater than low_freq_factor, {low}")
    return Rope.llama3(dim, theta, fields.positive("factor", float), low, high, original)


def _yarn(fields: Fields, dim: int, theta: float, original: int, max_positions: int) -> Rope:
    # A null factor means the ratio of the contexts; an absent one is an error.
    ratio = max_positions / original if "factor" in fields.values else REQUIRED
    return Rope.yarn(
        dim,
        theta,
        fields.positive("factor", float, ratio),
        original,
        # Zero means the default here, as in transformers.
        beta_fast=fields.take("beta_fast", float, None) or 32.0,
        beta_slow=fields.take("beta_slow", float, None) or 1.0,
        attention_factor=fields.positive("attention_factor", float, None),
        mscale=fields.take("mscale", float, None),
        mscale_all_dim=fields.take("mscale_all_dim", float, None),
        truncate=fields.take("truncate", bool, True),
    )


def _longrope(
    fields: Fields, dim: int, theta: float, original: int, max_positions: int
) -> tuple[Rope, Rope]:
    """Reads the rotations for contexts up to `original` and beyond.

    transformers switches between them when a text exceeds `original`; keys in a shared cache cannot
    change, so ModelConfig.for_context chooses once.
    """
    factor = fields.positive("factor", float, max_positions / original)
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    scale = fields.positive("attention_factor", float, scale)
    short, long = (fields.take(name, list) for name in ("short_factor", "long_factor"))
    for name, divisors in (("short_factor", short), ("long_factor", long)):
        if not all(type(d) in (int, float) and d > 0 for d in divisors):
            raise fields.error(name, "must be a list of positive numbers")
    return Rope.longrope(dim, theta, short, scale), Rope.longrope(dim, theta, long, scale)


# rope_type: (its reader, fields that have no effect)
_KINDS: dict[str, tuple[_Read, tuple[str, ...]]] = {
    "default": (_default, ()),
    "linear": (_linear, ()),
    "llama3": (_llama3, ()),
    "yarn": (_yarn, ("finetuned",)),
    "longrope": (_longrope, ()),
}
