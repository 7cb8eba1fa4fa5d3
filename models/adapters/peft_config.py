"""adapter_config.json, as PEFT writes it: what it says of an adapter's numbers."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from jaxshare.argument_checks import shown
from jaxshare.models.adapters.adapter_params import AdapterError
from jaxshare.models.config_fields import ConfigError, Fields

_NO_EFFECT = frozenset(
    {
        # what was trained, and how; the matrices are in the other file
        "auto_mapping",
        "revision",
        "inference_mode",
        "task_type",
        "peft_version",
        "lora_dropout",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "loftq_config",
        "eva_config",
        "lora_ga_config",
        "megatron_core",
        "qalora_group_size",
        "ensure_weight_tying",
        "runtime_config",
    }
)
_HARMLESS_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "lora_ga")
"""Values of init_lora_weights that leave the base as it is."""
_MAX_PATTERN = 2000
_REPEATED_GROUP = re.compile(r"\)(?:[*+]|\{)")
"""A group that is repeated: matching such a pattern can take for ever."""


@dataclasses.dataclass(frozen=True)
class PeftSettings:
    """What decides about the numbers of an adapter.

    Attributes:
      rank, alpha: of modules that no pattern names.
      is_stabilised: the scale is alpha / sqrt(rank), not alpha / rank (rsLoRA).
      rank_patterns, alpha_patterns: by regular expressions for the ends of modules' names.
      targets: the ends of names of the modules that it is of; empty where an expression says it.
      base: the model that it was made for, or "".
    """

    rank: int
    alpha: float
    is_stabilised: bool
    rank_patterns: Mapping[str, int]
    alpha_patterns: Mapping[str, float]
    targets: tuple[str, ...]
    base: str

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> "PeftSettings":
        """Reads the contents of a file; `source` is its name in messages.

        Raises:
          AdapterError: a setting is missing or wrong, or one that is not supported.
        """
        fields = Fields(values, source)
        try:
            _check_supported(fields)
            found = cls(
                fields.positive("r", int),
                fields.positive("lora_alpha", float),
                fields.take("use_rslora", bool, False),
                _patterns(fields, "rank_pattern", int),
                _patterns(fields, "alpha_pattern", float),
                _targets(fields),
                fields.take("base_model_name_or_path", str, ""),
            )
            fields.finish(_NO_EFFECT)
        except ConfigError as error:
            raise AdapterError(str(error)) from error
        return found

    def rank_of(self, module: str) -> int:
        """The rank of a module of the base, by its whole name."""
        return _matching(self.rank_patterns, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The scale of a module of the base, by its whole name."""
        rank = self.rank_of(module)
        alpha = _matching(self.alpha_patterns, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_stabilised else rank)


def _check_supported(fields: Fields) -> None:
    """Refuses by name what changes the numbers in a way that is not LoRA's.

    Raises:
      ConfigError: as described.
    """
    if fields.take("peft_type", str, "LORA") != "LORA":
        raise fields.error("peft_type", "only LORA is supported")
    if fields.take("use_dora", bool, False):
        raise fields.error(
            "use_dora", "adapters with magnitudes (DoRA) are not supported; merge it into its base"
        )
    if fields.take("bias", str, "none") != "none":
        raise fields.error("bias", "biases of the base stay as they are; only none is supported")
    if fields.given("modules_to_save"):
        raise fields.error(
            "modules_to_save", "whole modules beside the adapter are not supported; merge it"
        )
    start = fields.given("init_lora_weights")
    if start not in _HARMLESS_STARTS:
        raise fields.error(
            "init_lora_weights",
            "such a start changes the base's weights as well; convert it to a plain adapter when it "
            "is saved (path_initial_model_for_weight_conversion)",
        )


def _patterns(fields: Fields, name: str, kind: type) -> dict[str, Any]:
    inside = fields.inside(name)
    if inside is None:
        return {}
    for pattern in inside.values:
        try:
            re.compile(pattern)
            is_simple = len(pattern) <= _MAX_PATTERN and not _REPEATED_GROUP.search(pattern)
        except re.error:
            is_simple = False
        if not is_simple:
            raise fields.error(
                name,
                f"{shown(pattern)} is no regular expression of at most {_MAX_PATTERN} characters "
                "without repeated groups; name the modules",
            )
    return {pattern: inside.positive(pattern, kind) for pattern in inside.values}


def _targets(fields: Fields) -> tuple[str, ...]:
    given = fields.given("target_modules")
    if isinstance(given, str) or given is None:  # an expression, or "all-linear"
        return ()
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise fields.error("target_modules", "it must be a list of names, or an expression")
    return tuple(given)


def _matching(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a name, at a dot."""
    for pattern, value in patterns.items():
        if re.match(rf"(?:.*\.)?(?:{pattern})$", module):
            return value
    return default
