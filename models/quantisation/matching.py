"""The layers of a model that are quantised, and their stored forms."""

import dataclasses

import regex

from jaxshare.models.config_fields import ConfigError, Fields
from jaxshare.models.quantisation.stored import StoredForm

_REGEX = "re:"
_CLASSES = ("Linear", "Embedding")
_MOST_SECONDS = 1.0
"""Of one match: a pattern of a checkpoint may be made to take forever."""


@dataclasses.dataclass(frozen=True)
class Quantisation:
    """The settings of a quantised checkpoint.

    Attributes:
      method: its name in config.json.
      forms: the stored form of the layers that targets match: their names, patterns that begin with
        "re:", or a class of layers.
      plain: layers that are not quantised. In methods other than compressed-tensors the tensors that
        are stored decide; these are parts of names, for messages about those that are missing.
      is_exact: `plain` are targets, too, and layers that they match are plain.
    """

    method: str
    forms: tuple[tuple[tuple[str, ...], StoredForm], ...]
    plain: tuple[str, ...] = ()
    is_exact: bool = False

    def form(self, layer: str, kind: str = "Linear") -> StoredForm | None:
        """Returns the stored form of a layer; None for one that is plain.

        Args:
          layer: its name, for example "model.layers.0.self_attn.q_proj".
          kind: the class of layers that it is of.
        """
        if self.is_exact and any(_matches(layer, kind, target) for target in self.plain):
            return None
        # A name or a pattern says more than a class does.
        for classes in (False, True):
            for targets, form in self.forms:
                if any(
                    (target in _CLASSES) == classes and _matches(layer, kind, target)
                    for target in targets
                ):
                    return form
        return None

    def is_quantised(self, layer: str) -> bool:
        """Returns whether a layer of which no tensor is stored should be quantised."""
        named = not self.is_exact and any(part in layer for part in self.plain)
        return not named and self.form(layer) is not None


def _matches(layer: str, kind: str, target: str) -> bool:
    if target.startswith(_REGEX):
        try:
            found = regex.match(target.removeprefix(_REGEX), layer, timeout=_MOST_SECONDS)
        except TimeoutError:
            raise ConfigError(
                f"quantization_config has the pattern {target}, which takes more than "
                f"{_MOST_SECONDS:.0f} second to be compared with {layer}; give names of layers, or a "
                "simpler pattern"
            ) from None
        return found is not None
    return target in (layer, kind)


def names_in(fields: Fields, *names: str) -> tuple[str, ...]:
    """Reads fields with lists of names or patterns of layers, and returns all of them.

    Raises:
      ConfigError: a list of anything else, or a pattern that is not valid.
    """
    found: list[str] = []
    for name in names:
        for each in fields.take(name, list, []):
            if not isinstance(each, str):
                raise fields.error(name, "it must be a list of names of layers")
            if each.startswith(_REGEX):
                try:
                    regex.compile(each.removeprefix(_REGEX))
                except regex.error as error:
                    raise fields.error(name, f"{each} is not a valid pattern: {error}") from error
            found.append(each)
    return tuple(found)
