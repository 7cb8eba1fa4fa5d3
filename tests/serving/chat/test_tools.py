"""Functions as tools: their schemas beside transformers' own, checked arguments, and results."""

import asyncio
import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import get_json_schema

from jaxshare.serving.chat import (
    ChatAnswer,
    FunctionTool,
    ToolCall,
    ToolResult,
    as_tools,
    call,
    parse_answer,
    tool,
    tool_messages,
)


class Unit(enum.Enum):
    CELSIUS = "c"
    FAHRENHEIT = "f"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Place:
    """A place.

    Attributes:
      city: its name.
      zip: its code.
    """

    city: str
    zip: int | None = None


@dataclasses.dataclass
class Trip:
    stops: list[Place]
    unit: Unit = Unit.CELSIUS
    seen: bool = dataclasses.field(default=False, init=False)


def plain(a: str, b: int, c: float = 1.0, d: bool = False):
    """Does one thing.

    And that in two paragraphs.

    Args:
      a: the first.
      b (int): the second,
        which goes on: here
      c: the third
      d: the fourth

    Returns:
      nothing.
    """


def containers(
    a: list[str], b: dict[str, int], c: list, d: dict, e: list[dict[str, list[float]]], f: Any
):
    """Takes containers.

    Args:
        a: the first
        b: the second
        c: the third
        d: the fourth
        e: the fifth
        f: the sixth
    """


def choices(
    a: Literal["x", "y"],
    b: Literal[1, "z", None],
    c: Unit,
    d: Level,
    e: int | None = None,
    f: Optional[Unit] = None,  # noqa: UP045, as people write it
    g: int | str = 0,
    h: list[int] | dict[str, str] | None = None,
) -> str:
    """Takes choices.

    Args:
        a: the first
        b: the second
        c: the third
        d: the fourth
        e: the fifth
        f: the sixth
        g: the seventh
        h: the eighth
    """
    return ""


def nothing() -> list[int]:
    """Takes nothing."""
    return []


@pytest.mark.parametrize("function", [plain, containers, choices, nothing])
def test_schemas_are_those_of_transformers(function):
    theirs = get_json_schema(function)
    theirs["function"].pop("return", None)
    assert tool(function).schema() == theirs


def trip(trip: Trip, pair: tuple[int, str], many: tuple[float, ...] = (), **extra: int):
    """Plans."""


def test_schemas_of_what_transformers_does_not_take():
    place = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "its name."},
            "zip": {"type": "integer", "nullable": True, "description": "its code."},
        },
        "additionalProperties": False,
        "required": ["city"],
    }
    assert tool(trip).parameters == {
        "type": "object",
        "properties": {
            "trip": {
                "type": "object",
                "properties": {
                    "stops": {"type": "array", "items": place},
                    "unit": {"type": "string", "enum": ["c", "f"]},
                },
                "additionalProperties": False,
                "required": ["stops"],
            },
            "pair": {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "string"}],
                "minItems": 2,
                "maxItems": 2,
            },
            "many": {"type": "array", "items": {"type": "number"}},
        },
        "required": ["trip", "pair"],
        "additionalProperties": {"type": "integer"},
    }


def test_a_function_without_documentation_and_a_method_are_tools():
    class Shop:
        def buy(self, what: str) -> str:
            return f"{self.__class__.__name__}: {what}"

    class Clock:
        __name__ = "clock"

        def __call__(self, zone: str) -> str:
            return f"noon in {zone}"

    assert tool(Shop().buy).schema()["function"] == {
        "name": "buy",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {"what": {"type": "string"}},
            "required": ["what"],
        },
    }
    assert call(Shop().buy, {"what": "tea"}).text == "Shop: tea"
    assert call(tool(Clock()), {"zone": "UTC"}).text == "noon in UTC"


def _recursive():
    @dataclasses.dataclass
    class Node:
        inner: "list[Node]"

    Node.__annotations__["inner"] = list[Node]

    def walk(node: Node): ...

    return walk


def _of(**hints: Any):
    def f(a=1): ...

    f.__annotations__ = hints
    return f


NO_TOOLS = [
    (3, "3 is no tool: give a function that has a name"),
    (lambda: 1, "is no tool: give a function that has a name"),
    (functools.partial(plain, "a"), "is no tool: give a function that has a name"),
    (_of(), "the argument a of f has no type hint; give one"),
    (_of(a=bytes), "the argument a of f: there is no JSON schema of <class 'bytes'>; use str"),
    (_of(a=dict[int, str]), "has keys that are no texts"),
    (_of(a=list[object]), "there is no JSON schema of <class 'object'>"),
    (_of(a=Literal[b"x"]), "has to have texts, numbers, bools or None as its values"),
    (_of(a=enum.Enum("Empty", [])), "has to have texts, numbers, bools or None as its values"),
    (_recursive(), "Node has a field of its own type"),
    (eval("lambda *a: a"), "is no tool"),
]


@pytest.mark.parametrize(("function", "match"), NO_TOOLS)
def test_what_is_no_tool_is_refused(function, match):
    with pytest.raises(TypeError, match=match.replace("(", r"\(")):
        tool(function)


def test_arguments_by_position_are_refused():
    def first(a: int, /): ...
    def many(*a: int): ...

    for function in (first, many):
        with pytest.raises(TypeError, match="has to be given by position; models give"):
            tool(function)


GIVEN = [
    ([{"type": "web"}], ValueError, "is no tool: its type has to be 'function'"),
    ([{"function": 3}], ValueError, "is no tool"),
    ([{}], ValueError, "the name of a tool is None; use letters, digits"),
    ([{"name": "a b"}], ValueError, "the name of a tool is 'a b'"),
    ([{"name": "a", "description": 3}], TypeError, "the description of a is 3; it must be a text"),
    ([{"name": "a", "parameters": 3}], TypeError, "the parameters of a are 3; give a JSON schema"),
    (
        [{"name": "a", "parameters": {"type": "text"}}],
        ValueError,
        "the parameters of a cannot be used: it is no JSON schema: type: 'text' is not valid",
    ),
    ([plain, plain], ValueError, "two tools have the name plain; give each its own"),
    ("plain", TypeError, "tools is 'plain'; it must be a list"),
]


@pytest.mark.parametrize(("given", "error", "match"), GIVEN)
def test_tools_of_a_wrong_form_are_refused(given, error, match):
    with pytest.raises(error, match=match):
        as_tools(given)


def test_a_function_that_is_none_and_a_schema_without_end_are_refused():
    with pytest.raises(TypeError, match="the function of a is 3; it cannot be called"):
        FunctionTool("a", function=3)  # pyright: ignore[reportArgumentType]
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="the parameters of a cannot be used: it is nested too"):
        FunctionTool("a", parameters=deep)


def test_tools_in_all_their_forms():
    made = as_tools([plain, tool(nothing), {"name": "a"}, {"function": {"name": "b"}}])
    assert [one.name for one in made] == ["plain", "nothing", "a", "b"]
    assert made[2].parameters == {"type": "object", "properties": {}}
    assert as_tools(None) == () == as_tools([])
    assert as_tools(made) == made


def show(
    a: int = 0,
    b: float = 0.0,
    c: Unit = Unit.CELSIUS,
    d: Place | None = None,
    e: tuple[int, Unit] | None = None,
    f: set[int] | None = None,
    g: dict[str, list[Unit]] | None = None,
    h: Literal[1, True, "x"] = 1,
    i: Sequence[Level] = (),
    j: int | Place | None = None,
    k: tuple[float, ...] = (),
    m: Mapping[str, Any] | None = None,
    n: list[Trip] | None = None,
) -> str:
    """Shows what it is given."""
    return repr({name: value for name, value in locals().items() if value is not None})


CONVERTED = [
    ({"a": 3.0}, "'a': 3,"),
    ({"b": 3}, "'b': 3.0,"),
    ({"c": "f"}, "'c': <Unit.FAHRENHEIT: 'f'>"),
    ({"d": {"city": "Oslo"}}, "'d': Place(city='Oslo', zip=None)"),
    ({"d": {"city": "Oslo", "zip": 5.0}}, "'d': Place(city='Oslo', zip=5)"),
    ({"d": None, "e": [2.0, "f"]}, "'e': (2, <Unit.FAHRENHEIT: 'f'>)"),
    ({"f": [2, 2]}, "'f': {2}"),
    ({"g": {"x": ["c"]}}, "'g': {'x': [<Unit.CELSIUS: 'c'>]}"),
    ({"h": True}, "'h': True"),
    ({"h": 1.0}, "'h': 1,"),
    ({"i": [1, 2.0]}, "'i': [<Level.LOW: 1>, <Level.HIGH: 2>]"),
    ({"j": {"city": "A"}}, "'j': Place(city='A', zip=None)"),
    ({"j": 4}, "'j': 4"),
    ({"k": [1, 2]}, "'k': (1.0, 2.0)"),
    ({"m": {"a": [1]}}, "'m': {'a': [1]}"),
    (
        {"n": [{"stops": [{"city": "A"}], "unit": "f"}]},
        "'n': [Trip(stops=[Place(city='A', zip=None)], unit=<Unit.FAHRENHEIT: 'f'>, seen=False)]",
    ),
]


@pytest.mark.parametrize(("arguments", "shown"), CONVERTED)
def test_arguments_are_converted_to_their_types(arguments, shown):
    result = call(show, arguments)
    assert shown in result.text and not result.is_error


UNFIT = [
    ({"a": 3.5}, "a: 3.5 is not of type 'integer'"),
    ({"a": True}, "a: True is not of type 'integer'"),
    ({"a": None}, "a: None is not of type 'integer'"),
    ({"a": "3"}, "a: '3' is not of type 'integer'"),
    ({"c": "k"}, "c: 'k' is not one of ['c', 'f']"),
    ({"d": {}}, "'city' is a required property"),
    ({"d": {"city": "A", "x": 1}}, "('x' was unexpected)"),
    ({"e": [1]}, "is too short"),
    ({"e": [1, "c", 3]}, "is too long"),
    ({"h": 2}, "h: 2 is not one of [1, True, 'x']"),
    ({"z": 1}, "('z' was unexpected)"),
    ({"n": [{"stops": [3]}]}, "n.0.stops.0: 3 is not of type 'object'"),
]


@pytest.mark.parametrize(("arguments", "told"), UNFIT)
def test_arguments_that_do_not_fit_are_a_result_that_says_so(arguments, told):
    result = call(show, arguments)
    assert result.is_error and told in result.text
    assert result.text.startswith("show has failed: ValueError: its arguments do not fit: ")
    with pytest.raises(ValueError, match="its arguments do not fit"):
        tool(show).check(arguments)


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(-9, 9), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(["city", "zip"]), inner)
    ),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from("abcdefghijkmn"), VALUES, max_size=2))
def test_arguments_that_fit_are_always_converted(arguments):
    """What the schema lets in never fails on the way to the function."""
    result = call(show, arguments)
    assert not result.is_error or "its arguments do not fit: " in result.text


def test_parameters_of_the_caller_are_kept_to():
    inner = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 1, "nullable": True},
            "nullable": {"$ref": "#/$defs/word"},
            "enum": {"enum": ["a"], "nullable": True},
        },
        "$defs": {"word": {"type": "string", "pattern": "^[a-z]+$"}},
    }
    [one] = as_tools([{"name": "f", "parameters": inner}])
    for fits in ({}, {"n": None}, {"n": 2}, {"nullable": "abc"}, {"enum": None}, {"enum": "a"}):
        one.check(fits)
    for wrong in ({"n": 0}, {"nullable": "A"}, {"enum": "b"}, {"m": 1}):
        with pytest.raises(ValueError, match="its arguments do not fit"):
            one.check(wrong)
    [free] = as_tools([{"name": "f", "parameters": {"type": "object"}}])
    free.check({"anything": [1]})
    [far] = as_tools([{"name": "f", "parameters": {"$ref": "https://example.org/schema.json"}}])
    with pytest.raises(ValueError, match=r"the schema refers to https://example\.org/schema"):
        far.check({})


def fails(kind: str) -> str:
    """Fails."""
    raise {"key": KeyError, "value": ValueError, "stop": StopIteration}[kind]("why")


async def later(seconds: float) -> dict[str, Any]:
    """Waits."""
    await asyncio.sleep(0)
    return {"waited": seconds, "unit": Unit.CELSIUS, "place": Place("Åse"), "seen": {1}, "at": 1j}


def test_errors_of_functions_are_results_that_name_them():
    for kind, name in (("key", "KeyError"), ("value", "ValueError"), ("stop", "StopIteration")):
        result = call(fails, {"kind": kind})
        assert result.is_error and result.text.startswith(f"fails has failed: {name}: ")
        assert "why" in result.text


def test_results_are_texts():
    assert call(lambda_named("t", "Å\n"), {}) == ToolResult("Å\n")
    for value, text in [
        (3, "3"),
        (None, "null"),
        (True, "true"),
        ([1, "é"], '[1, "é"]'),
        ((1, 2), "[1, 2]"),
        (Unit.CELSIUS, '"c"'),
        (Place("A"), '{"city": "A", "zip": null}'),
    ]:
        assert call(lambda_named("t", value), {}) == ToolResult(text)
    assert call(later, {"seconds": 1}).text == (
        '{"waited": 1.0, "unit": "c", "place": {"city": "Åse", "zip": null}, "seen": [1], '
        '"at": "1j"}'
    )


def lambda_named(name: str, value: Any):
    def function():
        return value

    function.__name__ = name
    return function


def test_a_tool_without_a_function_cannot_be_run():
    with pytest.raises(ValueError, match="the tool f has no function to run; give one"):
        call({"name": "f"}, {})


def test_messages_of_results_are_in_the_order_of_the_calls():
    answer = parse_answer(
        "[show(a=1), fails(kind='key'), show(a='x')]", "pythonic", tools=[show, fails]
    )
    assert [one.name for one in answer.tool_calls] == ["show", "fails"]
    first, second = tool_messages(answer, [fails, show])
    assert {**first, "content": first["content"][:7]} == {
        "role": "tool",
        "name": "show",
        "tool_call_id": "call_1",
        "content": "{'a': 1",
    }
    assert second["tool_call_id"] == "call_2" and second["content"].startswith("fails has failed: ")
    assert tool_messages(ChatAnswer("a"), [show]) == []
    with pytest.raises(ValueError, match="the answer calls show, but the tools are fails; give"):
        tool_messages(answer, [fails])


def test_the_message_of_an_answer():
    calls = (ToolCall("f", {"a": 1}, "call_1"),)
    assert ChatAnswer("hm", "why", calls).message() == {
        "role": "assistant",
        "content": "hm",
        "reasoning_content": "why",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        ],
    }
    assert ChatAnswer("hm", "").message() == {"role": "assistant", "content": "hm"}
