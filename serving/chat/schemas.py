"""JSON schemas of Python's types, and values of these types from JSON."""

import collections.abc
import dataclasses
import enum
import inspect
import json
import types
from collections.abc import Mapping
from typing import (
    Any,
    Literal,
    TypeAliasType,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import jsonschema
import referencing
import referencing.exceptions
from jsonschema.exceptions import best_match
from jsonschema.protocols import Validator

from jaxshare.argument_checks import shown
from jaxshare.serving.chat.docstrings import described

_SCALARS = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}
_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, set, frozenset)
_DICTS = (dict, collections.abc.Mapping)
_DATA = ("enum", "const", "default", "examples")
"""The parts of a schema that are no schemas."""
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""The parts of a schema that are schemas by name."""


def schema_of(hint: Any, outer: tuple[type, ...] = ()) -> dict[str, Any]:
    """Returns the JSON schema of a type: transformers' own where it has one, with tuples' lengths.

    Args:
      hint: str, int, float, bool, None, Any, Literal, an enum (by its values), a dataclass, a
        TypedDict, a model of pydantic, or list, tuple, set, dict, Optional and unions of them.
      outer: dataclasses and TypedDicts that this is a part of.

    Raises:
      TypeError: there is no schema of this type.
    """
    hint = _meant(hint)
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if origin is Literal:
        return _one_of(hint, list(args))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _one_of(hint, [member.value for member in hint])
    if origin in (Union, types.UnionType):
        return _union(args, outer)
    if (origin or hint) is tuple:
        return _tuple(args, outer)
    if (origin or hint) in _LISTS:
        return {"type": "array"} | ({"items": schema_of(args[0], outer)} if args else {})
    if (origin or hint) in _DICTS:
        if args and args[0] is not str:
            raise TypeError(f"{shown(hint)} has keys that are no texts, which JSON does not have")
        return {"type": "object"} | (
            {"additionalProperties": schema_of(args[1], outer)} if args else {}
        )
    if _is_pydantic(hint):
        whole = hint.model_json_schema()
        return _inlined(whole, whole.get("$defs", {}), ())
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass(hint, outer)
    if is_typeddict(hint):
        return _typed_dict(hint, outer)
    raise TypeError(
        f"there is no JSON schema of {shown(hint)}; use str, int, float, bool, Literal, an enum, a "
        "dataclass, a TypedDict, a model of pydantic, or list, tuple, dict and Optional of them"
    )


def _meant(hint: Any) -> Any:
    """A type without the names that are given to it by `type` statements."""
    while isinstance(hint, TypeAliasType):
        hint = hint.__value__
    return hint


def _is_pydantic(hint: Any) -> bool:
    return isinstance(hint, type) and hasattr(hint, "model_json_schema")


def _inlined(schema: Any, defs: Mapping[str, Any], outer: tuple[str, ...]) -> Any:
    """A schema of pydantic's with its references replaced, since it becomes a part of another one.

    Titles are left out, and so are arguments that no field names, as with dataclasses.
    """
    if isinstance(schema, list):
        return [_inlined(inner, defs, outer) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    if (ref := schema.get("$ref")) is not None:
        name = ref.rpartition("/")[2]
        if name in outer:
            raise TypeError(f"{name} has a field of its own type, which no schema here tells")
        made = _inlined(defs[name], defs, (*outer, name))
    for key, inner in schema.items():
        if key in ("$ref", "$defs") or (key == "title" and isinstance(inner, str)):
            continue
        if key in _NAMED:
            made[key] = {name: _inlined(one, defs, outer) for name, one in inner.items()}
        else:
            made[key] = inner if key in _DATA else _inlined(inner, defs, outer)
    if "properties" in made:
        made.setdefault("additionalProperties", False)
    return made


def _one_of(hint: Any, values: list[Any]) -> dict[str, Any]:
    if not values or not all(type(value) in _SCALARS for value in values):
        raise TypeError(f"{shown(hint)} has to have texts, numbers, bools or None as its values")
    names = list(dict.fromkeys(_SCALARS[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


def _union(args: tuple[Any, ...], outer: tuple[type, ...]) -> dict[str, Any]:
    parts = [schema_of(arg, outer) for arg in args if arg is not type(None)]
    if len(parts) == 1:
        schema = parts[0]
    elif all(part.keys() == {"type"} for part in parts):
        names = sorted({part["type"] for part in parts})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": parts}
    return schema | ({"nullable": True} if type(None) in args else {})


def _tuple(args: tuple[Any, ...], outer: tuple[type, ...]) -> dict[str, Any]:
    if not args:
        return {"type": "array"}
    if args[-1] is Ellipsis:
        return {"type": "array", "items": schema_of(args[0], outer)}
    return {
        "type": "array",
        "prefixItems": [schema_of(arg, outer) for arg in args],
        "minItems": len(args),
        "maxItems": len(args),
    }


def _dataclass(hint: type, outer: tuple[type, ...]) -> dict[str, Any]:
    required = [
        field.name
        for field in _fields(hint)
        if field.default is field.default_factory is dataclasses.MISSING
    ]
    return _object(hint, [field.name for field in _fields(hint)], required, outer)


def _typed_dict(hint: Any, outer: tuple[type, ...]) -> dict[str, Any]:
    names = [*get_type_hints(hint)]
    return _object(hint, names, [name for name in names if name in hint.__required_keys__], outer)


def _object(
    hint: type, names: list[str], required: list[str], outer: tuple[type, ...]
) -> dict[str, Any]:
    if hint in outer:
        raise TypeError(f"{hint.__name__} has a field of its own type, which no schema here tells")
    hints, texts = get_type_hints(hint), _field_texts(hint)
    properties = {}
    for name in names:
        properties[name] = schema_of(hints[name], (*outer, hint))
        if text := texts.get(name):
            properties[name]["description"] = text
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | ({"required": required} if required else {})


def _fields(hint: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(hint) if field.init]


def _field_texts(hint: type) -> dict[str, str]:
    doc = inspect.cleandoc(hint.__doc__ or "")
    # A dataclass without a docstring has its signature there.
    return {} if doc.startswith(f"{hint.__name__}(") else described(doc)[1]


def converted(value: Any, hint: Any) -> Any:
    """Returns a value of a type from JSON that fits the type's schema.

    Args:
      value: of types that JSON has, such as 3.0 for an int.
      hint: as `schema_of` takes it.
    """
    hint = _meant(hint)
    origin, args = get_origin(hint), get_args(hint)
    kind = origin or hint
    if _is_pydantic(hint):
        return validated(hint, value)
    if hint in (int, float):
        return hint(value)
    if origin is Literal:
        is_bool = isinstance(value, bool)
        return next(arg for arg in args if arg == value and isinstance(arg, bool) == is_bool)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    if origin in (Union, types.UnionType):
        return converted(value, next(arg for arg in args if _fits(value, arg)))
    if kind is tuple:
        each = args[:1] * len(value) if args[1:] == (Ellipsis,) else args or (Any,) * len(value)
        return tuple(converted(one, arg) for one, arg in zip(value, each, strict=True))
    if kind in _LISTS:
        made = [converted(one, args[0]) if args else one for one in value]
        return kind(made) if kind in (set, frozenset) else made
    if kind in _DICTS:
        return {key: converted(one, args[1]) if args else one for key, one in value.items()}
    if is_typeddict(hint) or (dataclasses.is_dataclass(hint) and isinstance(hint, type)):
        hints = get_type_hints(hint)
        return hint(**{name: converted(one, hints[name]) for name, one in value.items()})
    return value


def validated(model: Any, value: Any) -> Any:
    """Returns the object of a pydantic model, or of a class like one, of a value that JSON has."""
    if hasattr(model, "model_validate_json"):
        return model.model_validate_json(json.dumps(value))  # in which a strict one takes dates
    return model.model_validate(value)


def _fits(value: Any, hint: Any) -> bool:
    return problem(validator(schema_of(hint)), value) is None


def validator(schema: Mapping[str, Any]) -> Validator:
    """Returns what checks values against a schema; no reference in it is ever fetched."""
    return jsonschema.Draft202012Validator(with_null(dict(schema)), registry=referencing.Registry())


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raises ValueError if this is no JSON schema (2020-12)."""
    try:
        jsonschema.Draft202012Validator.check_schema(dict(schema))
    except jsonschema.SchemaError as error:
        raise ValueError(f"it is no JSON schema: {_told(error)}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def problem(checked: Validator, value: Any) -> str | None:
    """Returns what is wrong with a value, in one line; None if it fits."""
    try:
        error = best_match(checked.iter_errors(value))
    except RecursionError:
        return "it is nested too deeply"
    except referencing.exceptions.Unresolvable as unknown:
        return f"the schema refers to {unknown.ref}, which it does not have"
    return None if error is None else _told(error)


def _told(error: jsonschema.ValidationError | jsonschema.SchemaError) -> str:
    place = ".".join(map(str, error.absolute_path))
    told = " ".join(f"{place}: {error.message}".removeprefix(": ").split())
    return told if len(told) <= 200 else f"{told[:197]}..."


def with_null(schema: Any) -> Any:
    """Returns a schema with `nullable`, which templates know and JSON schemas do not, written out."""
    if isinstance(schema, list):
        return [with_null(inner) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, inner in schema.items():
        if key in _NAMED and isinstance(inner, Mapping):
            made[key] = {name: with_null(one) for name, one in inner.items()}
        elif key != "nullable":
            made[key] = inner if key in _DATA else with_null(inner)
    is_nullable = schema.get("nullable") is True
    return {"anyOf": [made, {"type": "null"}]} if is_nullable else made


def hints_of(function: Any) -> dict[str, Any]:
    """Returns the type hints of a function's arguments, or of an object's that is called."""
    has_hints = isinstance(function, types.FunctionType | types.MethodType)
    hints = get_type_hints(function if has_hints else cast(Any, type(function).__call__))
    return {name: hint for name, hint in hints.items() if name != "return"}
