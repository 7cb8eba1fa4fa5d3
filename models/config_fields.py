"""Reading JSON settings field by field; fields that were not read are an error that names them."""

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

REQUIRED: Any = object()
MAX_INT, MAX_FLOAT = 2**31 - 1, 3.4e38
"""The largest numbers of a device's int32 and float32."""
MAX_HEAD_DIM = 2**16
_LONGEST = 300
"""Characters that an error quotes."""


class ConfigError(ValueError):
    """A setting is missing, wrong or unknown; the message names it."""


class Fields:
    """The fields of one JSON object. A field that is null counts as absent.

    Attributes:
      values: the object as it was read.
      source: its name in messages, for example the path of the file.
      prefix: precedes a field's name in messages, for objects inside the file.
    """

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = ""):
        self.values, self.source, self.prefix = values, source, prefix
        self._taken: set[str] = set()

    def take(self, name: str, kind: type, default: Any = REQUIRED) -> Any:
        """Returns the value of a field, and marks the field as read.

        Args:
          name: of the field.
          kind: bool, int, float, str, list or dict; an int is a float, a bool is neither.
          default: of a field that is absent; without one it is required.

        Raises:
          ConfigError: the field is absent and required, has another type, or is not finite.
        """
        self._taken.add(name)
        value = self.values.get(name)
        if value is None:
            if default is REQUIRED:
                raise ConfigError(
                    f"{self.source} lacks {self.prefix}{name}, which the model cannot be built "
                    "without: add it"
                )
            return default
        if kind is float and type(value) is int and abs(value) < MAX_FLOAT:
            value = float(value)
        if type(value) is not kind or (kind is float and not math.isfinite(value)):
            raise self.error(name, f"must be {_KINDS[kind]}")
        return value

    def given(self, name: str) -> Any:
        """Returns the value of a field of any type, None where it is absent, and marks it as read."""
        self._taken.add(name)
        return self.values.get(name)

    def positive(
        self, name: str, kind: type, default: Any = REQUIRED, most: float | None = None
    ) -> Any:
        """Returns a number as `take` does; it must be greater than zero.

        It must not be greater than `most`, which is by default what the device's int32 or float32
        can hold.
        """
        value = self.take(name, kind, default)
        if value is None:
            return None
        if value <= 0:
            raise self.error(name, "must be greater than 0")
        most = (MAX_INT if kind is int else MAX_FLOAT) if most is None else most
        if value > most:
            raise self.error(name, f"must be at most {most}")
        return value

    def nullable(self, name: str, kind: type, default: Any) -> Any:
        """Returns a number as `positive` does, or None where the field is null.

        `default` is for files without the field, which mean something else.
        """
        if name in self.values and self.values[name] is None:
            default = None
        return self.positive(name, kind, default)

    def inside(self, name: str) -> "Fields | None":
        """Returns the object in a field, or None when it is absent or empty."""
        value = self.take(name, dict, None)
        return Fields(value, self.source, f"{self.prefix}{name}.") if value else None

    def error(self, name: str, problem: str) -> ConfigError:
        """Returns the error that describes a problem with a field."""
        return ConfigError(
            f"{self.source}: {self.prefix}{name} is {_short(self.values.get(name))}, but {problem}"
        )

    def unread(self, ignored: Collection[str] = ()) -> list[str]:
        """Every enabled field that was not read and is not in `ignored`, with its value.

        Null, false, zero and empty values pass: in these files they switch something off.
        """
        return [
            f"{self.prefix}{k if k.isidentifier() else _short(k)} = {_short(v)}"
            for k, v in self.values.items()
            if v and k not in self._taken and k not in ignored
        ]

    def finish(self, ignored: Collection[str] = ()) -> None:
        """Raises ConfigError with every field that `unread` gives."""
        if unknown := self.unread(ignored):
            raise ConfigError(
                f"{self.source} has unknown settings that may change the model's numbers: "
                f"{', '.join(unknown)}; such a model would be computed wrongly, so remove a field "
                "only if it is known to have no effect"
            )


@dataclasses.dataclass(frozen=True)
class Family:
    """The meaning of config.json for one architecture, where families differ.

    Attributes:
      model_type: the `model_type` of the architecture.
      other_types: others, of models that are computed alike.
      read: (fields, hidden_size, num_heads, num_layers) -> num_kv_heads, head_dim, qkv_bias,
        out_bias, mlp_bias, qk_norm, and those fields of ModelConfig in which it differs from Llama;
        the rotation where `jaxshare.models.rope_config.read_rope` alone does not read it.
      default_theta: the rope theta of files without one; None where it is required, and where
        `read` returns the rotation.
      predicts_later_tokens: checkpoints may have layers after the last, which predict later tokens
        and are left out.
      modules: the names of modules in checkpoints by their paths in a layer or a model, where they
        are not those of Llama.
      fused: the projections of one input that checkpoints have as one tensor, by the names that
        `jaxshare.models.packed` has for them; `modules` has the names of their tensors.
      tied_by_default: files without tie_word_embeddings have no head of their own.
      stacks_experts: checkpoints have the matrices of all experts of a layer in one tensor,
        transposed, gate and up in turns (gpt-oss).
      quantizations: the methods of quantization_config whose weights are read without settings, as
        plain numbers. All families have those of `jaxshare.models.quantisation` beside them.
      text_type: the `model_type` of text_config, in checkpoints of texts and images, whose language
        model is read and the rest left out.
      text_defaults: what a text_config without a field means.
      prefix: of the names of the language model's tensors in such checkpoints.
    """

    model_type: str
    read: Callable[[Fields, int, int, int], dict[str, Any]]
    default_theta: float | None
    modules: Mapping[tuple[str, ...], str] = dataclasses.field(default_factory=dict)
    fused: frozenset[str] = frozenset()
    other_types: tuple[str, ...] = ()
    predicts_later_tokens: bool = False
    tied_by_default: bool = False
    stacks_experts: bool = False
    quantizations: frozenset[str] = frozenset()
    text_type: str = ""
    text_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prefix: str = ""


def read_head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    """Reads head_dim, which defaults to hidden_size / num_heads."""
    head_dim = fields.positive("head_dim", int, None, MAX_HEAD_DIM)
    if head_dim is None and hidden_size % num_heads:
        raise fields.error(
            "head_dim",
            f"it must be given, because {num_heads} heads do not divide hidden_size, {hidden_size}",
        )
    if not 1 <= (derived := head_dim or hidden_size // num_heads) <= MAX_HEAD_DIM:
        raise fields.error(
            "hidden_size",
            f"with {num_heads} heads each would have a size of {derived}; it must be 1 to "
            f"{MAX_HEAD_DIM}",
        )
    return derived


def read_attention(
    fields: Fields,
    hidden_size: int,
    num_heads: int,
    *,
    kv_heads: Any = REQUIRED,
    bias: bool = False,
) -> dict[str, Any]:
    """Reads the heads of a family, and says what is in most: one answer for biases of attention, no
    biases of the MLP and no norms of queries and keys.

    Args:
      fields, hidden_size, num_heads: of the model.
      kv_heads: their number in files that do not give it; by default it is required.
      bias: queries, keys, values and the output have biases.
    """
    return dict(
        num_kv_heads=fields.positive("num_key_value_heads", int, kv_heads),
        head_dim=read_head_dim(fields, hidden_size, num_heads),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=False,
        qk_norm=False,
    )


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Reads a JSON file that holds one object.

    Raises:
      ConfigError: the file does not hold a JSON object.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # malformed JSON or UTF-8, or nested too deeply
        raise ConfigError(f"{path} is not valid JSON ({error}); fetch the file again") from error
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error}); give a file that can be") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold one JSON object; it holds {_short(values)}")
    return values


_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, cut where it is long, or the error's type."""
    message = str(error).strip()
    return cut(message.splitlines()[0]) if message else type(error).__name__


_MOST, _SHOWN = 6, 3


def some_of(problems: Iterable[str]) -> str:
    """Returns all problems as an error has them, or the first three where there are more than six.

    They are in order, numbers in names by their size.
    """
    listed = sorted(
        problems, key=lambda text: re.sub(r"\d+", lambda found: found[0].zfill(9), text)
    )
    if len(listed) > _MOST:
        listed = [*listed[:_SHOWN], f"... and {len(listed) - _SHOWN} more"]
    return "; ".join(listed)


def cut(text: str) -> str:
    """Returns a text of a file as an error can have it: its start, where it is long."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
