"""Answers that are values: the JSON schema of a type, and objects of the type from a model's JSON."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from jsonschema.protocols import Validator

from jaxshare import Grammar
from jaxshare.argument_checks import shown
from jaxshare.serving.chat.json_text import read_json
from jaxshare.serving.chat.schemas import (
    check_schema,
    converted,
    problem,
    schema_of,
    validated,
    validator,
    with_null,
)


@dataclasses.dataclass(frozen=True)
class Returns:
    """The type of an answer; `as_returns` makes one.

    Attributes:
      schema: the JSON schema of the answer's text.
      convert: makes the object of a value of types that JSON has, which fits the schema.
    """

    schema: Mapping[str, Any]
    convert: Callable[[Any], Any] = dataclasses.field(repr=False)

    def read(self, text: str) -> Any:
        """Returns the value of types that JSON has that an answer's text is.

        Raises:
          ValueError: the text is no JSON, does not fit the schema, or the type refuses its value;
            with the reason.
        """
        value = read_json(text)
        if told := problem(self._validator, value):
            raise ValueError(f"it does not fit the schema: {told}")
        self.made(value)
        return value

    def made(self, value: Any) -> Any:
        """Returns the object of a value that `read` has given.

        Raises:
          ValueError: the type refuses the value, such as a dataclass in its `__post_init__`.
        """
        try:
            return self.convert(value)
        except (ValueError, TypeError, ArithmeticError, LookupError) as error:
            told = " ".join(str(error).split())
            raise ValueError(f"its type refuses it: {type(error).__name__}: {told}") from error

    @functools.cached_property
    def grammar(self) -> Grammar:
        """The grammar of the answer's text."""
        return Grammar.json_schema(self.schema)

    @functools.cached_property
    def _validator(self) -> Validator:
        return validator(self.schema)


def as_returns(given: Any) -> Returns:
    """Returns the type of an answer.

    Args:
      given: a JSON schema (2020-12) as a dict, for a value of types that JSON has; a class with
        `model_json_schema` and `model_validate`, such as a model of Pydantic; or a type as
        `jaxshare.serving.chat.schemas.schema_of` takes it: int, Literal, an enum, a dataclass, a
        TypedDict, list[int] and so on.

    Raises:
      ValueError: it is a dict and no JSON schema.
      TypeError: there is no JSON schema of it.
    """
    if isinstance(given, Mapping):
        return _made(given)
    try:
        hash(given)
    except TypeError:
        raise TypeError(
            f"returns is {shown(given)}; give a type, or a JSON schema as a dict"
        ) from None
    return _known(given)


def _made(given: Any) -> Returns:
    if isinstance(given, Mapping):
        schema = with_null(given)
        convert: Callable[[Any], Any] = _same
    elif isinstance(given, type) and hasattr(given, "model_json_schema"):
        made: Any = given
        schema, convert = made.model_json_schema(), functools.partial(validated, made)
    else:
        try:
            schema = with_null(schema_of(given))
        except TypeError as error:
            raise TypeError(f"returns is {shown(given)}: {error}") from None
        convert = functools.partial(_converted, given)
    try:
        check_schema(schema)
    except ValueError as error:
        raise ValueError(f"returns is {shown(given)}: {error}") from None
    return Returns(schema, convert)


_known = functools.lru_cache(maxsize=64)(_made)
"""Cached, since most calls of an agent return the same types, and checking a schema takes long."""


def _same(value: Any) -> Any:
    return value


def _converted(hint: Any, value: Any) -> Any:
    return converted(value, hint)
