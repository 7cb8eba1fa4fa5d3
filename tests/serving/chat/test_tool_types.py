"""Models of pydantic and named types as arguments and results of tools, and as types of answers."""

import datetime
import json
import re
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest

from jaxshare.serving.chat import as_returns, as_tools, call

type Name = Literal["Oslo", "Rome"]
type Names = list[Name]


class Place(pydantic.BaseModel):
    """A place on earth."""

    name: str = pydantic.Field(description="as on maps", min_length=2)
    title: str | None = None
    altitude: Annotated[float, pydantic.Field(ge=-500)] = 0.0


class Trip(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)

    day: datetime.date
    stops: list[Place]
    back: Place | None = None


class Chain(pydantic.BaseModel):
    rest: "Chain | None" = None


def plan(trip: Trip, cities: Names, fast: bool = False) -> Trip:
    """Plans a trip.

    Args:
      trip: what is known.
      cities: on the way.
    """
    assert isinstance(trip.day, datetime.date) and all(type(one) is Place for one in trip.stops)
    return trip.model_copy(update={"back": Place(name=cities[-1])})


[TOOL] = as_tools([plan])
GIVEN: dict[str, Any] = {
    "trip": {"day": "2026-02-03", "stops": [{"name": "Oslo"}]},
    "cities": ["Oslo", "Rome"],
}


def test_the_schema_stands_alone():
    schema = TOOL.schema()["function"]["parameters"]
    assert "$ref" not in json.dumps(schema) and "$defs" not in json.dumps(schema)
    assert schema["properties"]["cities"] == {
        "type": "array",
        "items": {"type": "string", "enum": ["Oslo", "Rome"]},
        "description": "on the way.",
    }
    trip = schema["properties"]["trip"]
    assert (trip["description"], trip["required"]) == ("what is known.", ["day", "stops"])
    place = trip["properties"]["stops"]["items"]
    assert place["properties"]["name"]["description"] == "as on maps"
    assert "title" in place["properties"] and "title" not in place
    jsonschema.Draft202012Validator.check_schema(schema)


def test_arguments_become_objects_and_the_result_json():
    result = call(TOOL, GIVEN)
    assert not result.is_error, result.text
    rome = {"name": "Rome", "title": None, "altitude": 0.0}
    assert json.loads(result.text) == {
        "day": "2026-02-03",
        "stops": [{"name": "Oslo", "title": None, "altitude": 0.0}],
        "back": rome,
    }


@pytest.mark.parametrize(
    ("trip", "told"),
    [
        ({"day": "2026-02-03"}, "stops"),
        ({"day": "2026-02-03", "stops": [{"name": "O"}]}, "too short|at least"),
        ({"day": "2026-02-03", "stops": [{"name": "Oslo", "altitude": -501}]}, "-500"),
        ({"day": "2026-02-03", "stops": [], "price": 1}, "price"),
        ({"day": "soon", "stops": []}, "day"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_told_of(trip, told):
    result = call(TOOL, GIVEN | {"trip": trip})
    assert result.is_error and re.search(told, result.text)


def test_a_model_that_has_itself_as_a_part_is_refused():
    def walk(chain: Chain) -> str:
        """Walks."""
        return ""

    with pytest.raises(TypeError, match="the argument chain of walk: Chain has a field of its own"):
        as_tools([walk])


def test_an_answer_may_be_a_model_of_pydantic():
    returns = as_returns(Trip)
    trip = returns.made(returns.read(json.dumps(GIVEN["trip"])))
    assert trip == Trip(day=datetime.date(2026, 2, 3), stops=[Place(name="Oslo")])
    with pytest.raises(ValueError, match="its type refuses it: ValidationError"):
        returns.read(json.dumps({"day": "soon", "stops": []}))
