"""Random JSON schemas, of all that is served, whose texts are short."""

import random
from typing import Any

KINDS = (
    "string",
    "integer",
    "number",
    "boolean",
    "null",
    "enum",
    "const",
    "array",
    "object",
    "any",
)


def random_schema(seed: int) -> dict[str, Any]:
    """A schema of at most three levels, with references to definitions of its own."""
    rng = random.Random(f"schema {seed}")
    names = ["#/$defs/small", "#/$defs/pair"]
    schema = _schema(rng, 3, names)
    return {
        **schema,
        "$defs": {
            "small": {"type": "integer", "minimum": 0, "maximum": 9},
            "pair": {
                "type": "object",
                "properties": {"x": {"$ref": "#/$defs/small"}, "y": {"type": "boolean"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            },
        },
    }


def _schema(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    flat = KINDS[:7]
    kind = rng.choice(KINDS if depth == 3 else KINDS[:9] if depth else flat)
    if names and rng.random() < 0.1:
        return {"$ref": rng.choice(names)}
    match kind:
        case "string":
            return _string(rng)
        case "integer":
            return {"type": "integer", "minimum": rng.choice([-20, 0, 3]), "maximum": 120}
        case "number":
            low = rng.randint(-5, 5)
            return {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.randint(1, 9)}
        case "boolean" | "null":
            return {"type": kind}
        case "enum":
            values = ["red", "green", 'a "word"', "é€", 3, -1, True, None]
            return {"enum": rng.sample(values, rng.randint(1, 5))}
        case "const":
            return {"const": rng.choice(["fixed", 17, False])}
        case "array":
            least = rng.randint(0, 2)
            return {
                "type": "array",
                "items": _schema(rng, depth - 1, names),
                "minItems": least,
                "maxItems": least + rng.randint(0, 2),
            }
        case "object":
            return _object(rng, depth, names)
    return {"anyOf": [_schema(rng, depth - 1, names) for _ in range(rng.randint(1, 3))]}


def _string(rng: random.Random) -> dict[str, Any]:
    match rng.randint(0, 4):
        case 0:
            return {
                "type": "string",
                "pattern": rng.choice(["^[a-c]{1,4}$", "^(ab|cd)+$", r"^\d\d$"]),
            }
        case 1:
            return {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid"])}
        case _:
            least = rng.randint(0, 2)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 6)}


def _object(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    keys = rng.sample(["name", "age", "é", "a b", "list", "kind"], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {key: _schema(rng, depth - 1, names) for key in keys},
        "required": [key for key in keys if rng.random() < 0.7],
        "additionalProperties": False,
    }
