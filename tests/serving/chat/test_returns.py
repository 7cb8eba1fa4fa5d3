"""Types of answers: their schemas by jsonschema itself, and the objects that are made of values."""

import dataclasses
import enum
from typing import Any, Literal, NotRequired, TypedDict

import jsonschema
import pytest

from jaxshare import Grammar
from jaxshare.serving.chat import as_returns


class Shade(enum.Enum):
    DARK = "dark"
    LIGHT = "light"


@dataclasses.dataclass(frozen=True)
class Spot:
    x: int
    y: float = 0.5


@dataclasses.dataclass
class Shape:
    """A shape.

    Attributes:
      spots: its corners.
    """

    spots: list[Spot]
    shade: Shade
    label: str | None = None
    size: tuple[int, int] | None = None

    def __post_init__(self):
        if self.label == "":
            raise ValueError("a label has to have\nletters")


class Person(TypedDict):
    name: str
    spot: NotRequired[Spot]


class Checked:
    """A class with the two methods of a model of Pydantic, and its kind of error."""

    def __init__(self, age: int):
        self.age = age

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"age": {"$ref": "#/$defs/Age"}},
            "required": ["age"],
            "$defs": {"Age": {"type": "integer", "minimum": 0}},
        }

    @classmethod
    def model_validate(cls, value: Any) -> "Checked":
        if value["age"] > 150:
            raise ValueError("1 validation error\nage is too high")
        return cls(value["age"])


MADE = [
    (int, "3", 3),
    (float, "3", 3.0),
    (str, '"a"', "a"),
    (bool, "true", True),
    (list[int], "[1, 2.0]", [1, 2]),
    (list[int], "[]", []),
    (dict[str, list[bool]], '{"a": [true], "": []}', {"a": [True], "": []}),
    (tuple[int, str], '[1, "a"]', (1, "a")),
    (int | None, "null", None),
    (int | None, "7", 7),
    (Literal["yes", "no", 3], '"no"', "no"),
    (Literal["yes", "no", 3], "3", 3),
    (Shade, '"light"', Shade.LIGHT),
    (list[Shade], '["dark"]', [Shade.DARK]),
    (Spot, '{"x": 1}', Spot(1)),
    (
        Shape,
        '{"spots": [{"x": 1}, {"x": 2, "y": 3}], "shade": "dark", "size": [1, 2]}',
        Shape([Spot(1), Spot(2, 3.0)], Shade.DARK, None, (1, 2)),
    ),
    (Shape, '{"spots": [], "shade": "light", "label": null}', Shape([], Shade.LIGHT)),
    (Spot | list[Spot], '[{"x": 1}]', [Spot(1)]),
    (Person, '{"name": "Bo"}', {"name": "Bo"}),
    (Person, ' {"name": "Bo", "spot": {"x": 3}}\n', {"name": "Bo", "spot": Spot(3)}),
    ({"type": "integer", "minimum": 3}, "3", 3),
    ({"type": "string", "nullable": True}, "null", None),
    ({}, '[{"a": null}]', [{"a": None}]),
]


@pytest.mark.parametrize(("given", "text", "value"), MADE, ids=[str(i) for i in range(len(MADE))])
def test_objects_are_made_of_texts(given, text, value):
    returns = as_returns(given)
    recorded = returns.read(text)
    made = returns.made(recorded)
    assert made == value and type(made) is type(value)
    jsonschema.validate(recorded, dict(returns.schema))
    assert returns.grammar == Grammar.json_schema(returns.schema)


def test_nested_objects_are_of_their_types():
    made = as_returns(Shape).made({"spots": [{"x": 1.0}], "shade": "dark"})
    assert type(made.spots[0]) is Spot and type(made.spots[0].x) is int
    schema = as_returns(Shape).schema
    assert schema["properties"]["spots"]["description"] == "its corners."
    assert schema["required"] == ["spots", "shade"]


def test_a_class_that_validates_itself_is_asked_to():
    returns = as_returns(Checked)
    assert returns.made(returns.read('{"age": 3}')).age == 3
    with pytest.raises(ValueError, match="does not fit the schema: age: -3 is less than"):
        returns.read('{"age": -3}')
    with pytest.raises(ValueError, match="its type refuses it: ValueError: 1 validation error age"):
        returns.read('{"age": 200}')


WRONG = [
    (int, "", "it is not valid JSON: Expecting value"),
    (int, "three", "it is not valid JSON"),
    (int, "3 4", "it is not valid JSON: Extra data"),
    (int, "3.5", "it does not fit the schema: 3.5 is not of type 'integer'"),
    (int, "true", "it does not fit the schema: True is not of type 'integer'"),
    (float, "1e999", "it is not valid JSON: Out of range float"),
    (float, "NaN", "it is not valid JSON: NaN is no number of JSON"),
    (str, '"\\ud800"', "it is not valid JSON: it has half of a character"),
    (list[int], "[" * 100_000, "it is not valid JSON"),
    (tuple[int, str], "[1]", "it does not fit the schema"),
    (Literal["yes"], '"no"', "it does not fit the schema: 'no' is not one of"),
    (Literal[1], "true", "it does not fit the schema"),
    (Spot, '{"x": 1, "z": 2}', "Additional properties are not allowed"),
    (Spot, '{"x": 1, "x": 2}', "it is not valid JSON: 'x' is in an object twice"),
    (Spot, "{}", "'x' is a required property"),
    (Person, "{}", "'name' is a required property"),
    (
        Shape,
        '{"spots": [], "shade": "dark", "label": ""}',
        "its type refuses it: ValueError: a label has to have letters",
    ),
    ({"$ref": "#/$defs/a"}, "3", "the schema refers to /$defs/a, which it does not have"),
]


@pytest.mark.parametrize(
    ("given", "text", "reason"), WRONG, ids=[str(i) for i in range(len(WRONG))]
)
def test_a_text_that_is_no_value_of_the_type_has_a_reason(given, text, reason):
    with pytest.raises(ValueError) as caught:
        as_returns(given).read(text)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


@dataclasses.dataclass
class Tree:
    trees: "list[Tree]"


class Loop(TypedDict):
    next: "Loop"


BAD = [
    (3, TypeError, "returns is 3: there is no JSON schema of 3; use str, int"),
    (object, TypeError, "returns is <class 'object'>: there is no JSON schema of"),
    ([int], TypeError, "returns is .*; give a type, or a JSON schema as a dict"),
    (dict[int, str], TypeError, "has keys that are no texts"),
    (Tree, TypeError, "Tree has a field of its own type"),
    (Loop, TypeError, "Loop has a field of its own type"),
    ({"type": "number!"}, ValueError, "returns is .*: it is no JSON schema"),
]


@pytest.mark.parametrize(("given", "kind", "told"), BAD)
def test_what_has_no_schema_is_refused(given, kind, told):
    with pytest.raises(kind, match=told):
        as_returns(given)
