"""JSON schemas whose texts are a regular language, as patterns.

That is so for closed objects, bounded or unbounded arrays, strings, numbers, enumerations, and what
they are made of without recursion. Every text of the pattern is valid under the schema; what is
beyond that is left to llguidance.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxshare.serving.grammars.patterns import (
    NOTHING,
    BeyondError,
    Characters,
    Pattern,
    Repeat,
    choice,
    sequence,
    text,
)

_MOST_OPTIONAL, _DEEPEST, _MOST_ITEMS = 4, 16, 64
_IGNORED = frozenset(
    {"$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default"}
    | {"examples", "deprecated", "readOnly", "writeOnly"}
)
SPACE = choice([NOTHING, " ", sequence("\n", Repeat(text(" "), 0, 16))])
"""Between the parts of a text: nothing, a space, or a line break with its indentation."""
_DIGIT = Characters.of([(0x30, 0x39)])
_INTEGER = sequence(
    Repeat(text("-"), 0, 1), choice(["0", sequence(Characters.of([(0x31, 0x39)]), Repeat(_DIGIT))])
)
_NUMBER = sequence(
    _INTEGER,
    Repeat(sequence(".", Repeat(_DIGIT, 1)), 0, 1),
    Repeat(sequence(choice(["e", "E"]), Repeat(choice(["+", "-"]), 0, 1), Repeat(_DIGIT, 1)), 0, 1),
)
_HEX = Characters.of([(0x30, 0x39), (0x41, 0x46), (0x61, 0x66)])
_CHARACTER = choice(
    [
        Characters.of([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)], negated=True),
        sequence("\\", choice([*'"\\/bfnrt'])),
        # no half of a surrogate pair, of which two would be one character
        sequence(
            "\\u",
            choice(
                [
                    sequence(Characters.of([(0x30, 0x39), (0x41, 0x43), (0x61, 0x63)]), _HEX),
                    sequence(choice(["d", "D"]), Characters.of([(0x30, 0x37)])),
                    sequence(choice([*"eEfF"]), _HEX),
                ]
            ),
            _HEX,
            _HEX,
        ),
    ]
)


def schema_pattern(schema: Any) -> Pattern:
    """The pattern of a JSON schema's texts.

    Raises:
      BeyondError: it has something that is not known to be regular.
    """
    return _value(schema, schema, 0)


def _value(schema: Any, whole: Any, depth: int) -> Pattern:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        raise BeyondError("it admits any value, or is deep")
    used = {key: value for key, value in schema.items() if key not in _IGNORED}
    if "$ref" in used:
        return _value(_target(_only(used, "$ref"), whole), whole, depth + 1)
    if "const" in used:
        return text(_plain(_only(used, "const", "type")))
    if "enum" in used:
        return choice([_plain(value) for value in _only(used, "enum", "type")])
    if "anyOf" in used:
        parts = _only(used, "anyOf")
        return choice([_value(part, whole, depth + 1) for part in parts])
    kind = used.pop("type", None)
    if isinstance(kind, list):
        return choice([_value({**used, "type": each}, whole, depth + 1) for each in kind])
    match kind:
        case "null":
            return _without(used, text("null"))
        case "boolean":
            return _without(used, choice(["true", "false"]))
        case "integer":
            return _without(used, _INTEGER)
        case "number":
            return _without(used, _NUMBER)
        case "string":
            least, most = used.pop("minLength", 0), used.pop("maxLength", None)
            return _without(used, sequence('"', _repeat(_CHARACTER, least, most), '"'))
        case "array":
            return _array(used, whole, depth)
        case "object":
            return _object(used, whole, depth)
    raise BeyondError("it admits several types")


def _only(used: Mapping[str, Any], key: str, *others: str) -> Any:
    """The value of a key beside which no more than these others may be."""
    if {*used} - {key, *others} or isinstance(used.get("type"), list):
        raise BeyondError(f"it has more beside {key}")
    kind, value = used.get("type"), used[key]
    if kind is not None:
        values = value if key == "enum" else [value]
        names = {str: "string", bool: "boolean", int: "integer", type(None): "null"}
        if any(names.get(type(each)) != kind for each in values):
            raise BeyondError(f"it has values of another type in {key}")
    return value


def _without(used: Mapping[str, Any], pattern: Pattern) -> Pattern:
    """The pattern, where no keyword is left that would change it."""
    if used:
        raise BeyondError(f"it has {next(iter(used))}")
    return pattern


def _plain(value: Any) -> str:
    if not isinstance(value, str | bool | int | None):
        raise BeyondError("it has a value with parts, or a fraction")
    return json.dumps(value, ensure_ascii=False)


def _target(reference: Any, whole: Any) -> Any:
    """The part of a schema that a reference within it names."""
    if not isinstance(reference, str) or not reference.startswith("#/") or "~" in reference:
        raise BeyondError("it refers to something else")
    found = whole
    for name in reference[2:].split("/"):
        if not isinstance(found, Mapping) or name not in found:
            raise BeyondError("it refers to something that is not there")
        found = found[name]
    return found


def _repeat(part: Pattern, least: Any, most: Any) -> Repeat:
    numbers = [number for number in (least, most) if number is not None]
    if not all(isinstance(n, int) and 0 <= n <= _MOST_ITEMS for n in numbers):
        raise BeyondError("it has many parts")
    if most is not None and most < least:
        raise BeyondError("it admits nothing")
    return Repeat(part, least, most)


def _array(used: dict[str, Any], whole: Any, depth: int) -> Pattern:
    least, most = used.pop("minItems", 0), used.pop("maxItems", None)
    item = _value(used.pop("items", None), whole, depth + 1)
    _without(used, NOTHING)
    inner = sequence(SPACE, ",", SPACE, item)
    if most == 0:
        return _without(used, sequence("[", SPACE, "]"))
    more = _repeat(inner, max(least, 1) - 1, None if most is None else most - 1)
    some = sequence("[", SPACE, item, more, SPACE, "]")
    return some if least else choice([sequence("[", SPACE, "]"), some])


def _object(used: dict[str, Any], whole: Any, depth: int) -> Pattern:
    properties, required = used.pop("properties", {}), used.pop("required", [])
    if used.pop("additionalProperties", True) is not False:
        raise BeyondError("it admits further properties")
    _without(used, NOTHING)
    if {*required} - {*properties} or len({*properties} - {*required}) > _MOST_OPTIONAL:
        raise BeyondError("it has required properties that are not described, or many optional")
    entries = [
        (
            sequence(_plain(name), SPACE, ":", SPACE, _value(part, whole, depth + 1)),
            name in required,
        )
        for name, part in properties.items()
    ]
    return sequence("{", _entries(entries, first=True), SPACE, "}")


def _entries(entries: Sequence[tuple[Pattern, bool]], first: bool) -> Pattern:
    """The entries of an object in their order, some of which may be absent."""
    if not entries:
        return NOTHING
    (entry, is_required), *rest = entries
    comma = [] if first else [SPACE, ","]
    present = sequence(*comma, SPACE, entry, _entries(rest, first=False))
    return present if is_required else choice([present, _entries(rest, first)])
