"""Agents whose model gives values of a type: objects, attempts, errors, journals."""

import asyncio
import dataclasses
import enum
import json
from typing import Literal

import pytest

from jaxshare import Grammar
from jaxshare.serving.agents import (
    AnswerError,
    BestOfN,
    Message,
    ParseError,
    Reply,
    Runtime,
    agent,
    llm,
    tool,
)
from jaxshare.serving.agents.backends import ScriptedModel
from jaxshare.serving.agents.journal import Journal
from tests.paths import FIXTURES


class Kind(enum.Enum):
    BUS = "bus"
    TRAIN = "train"


@dataclasses.dataclass
class Leg:
    to: str
    km: float


@dataclasses.dataclass
class Trip:
    legs: list[Leg]
    kind: Kind = Kind.BUS
    seats: int | None = None


SAID = '{"legs": [{"to": "Oslo", "km": 3}], "kind": "train"}'
TRIP = Trip([Leg("Oslo", 3.0)], Kind.TRAIN)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def finished(what, *args, model=None, **options):
    return asyncio.run(Runtime(model, **options).run(what, *args))


class Attempts:
    """Gives these answers in order, and keeps the calls."""

    def __init__(self, *answers: str | Reply):
        self.answers, self.calls = [*answers], []

    async def answer(self, call):
        self.calls.append(call)
        given = self.answers.pop(0)
        return given if isinstance(given, Reply) else Reply(given, 2, 1)


@agent
async def plans(kind, retries=0, n=None):
    returns = {"trip": Trip, "trips": list[Trip], "schema": SCHEMA, "word": Literal["a", "b"]}[kind]
    made = await llm("plan", returns=returns, retries=retries, n=n)
    if kind == "trip" and n is None:
        made.legs.append("changed")  # the agent's own object
        made.legs.pop()
    return made


MADE = [
    ("trip", SAID, TRIP),
    ("trips", f"[{SAID}]", [TRIP]),
    ("trips", "[]", []),
    ("schema", '{"a": 3, "b": null}', {"a": 3, "b": None}),
    ("word", '"b"', "b"),
]


@pytest.mark.parametrize(("kind", "said", "value"), MADE)
def test_an_answer_is_a_value_and_is_replayed_as_one(tmp_path, kind, said, value):
    journal, model = Journal(), Attempts(said)
    done = finished(plans, kind, model=model, journal=journal)
    assert done.accepted.value == value
    assert done.accepted.dialogue == (Message("user", "plan"), Message("assistant", said))
    journal.save(tmp_path / "journal.json")
    # Without pickles: what is recorded is JSON.
    again = finished(plans, kind, journal=Journal.load(tmp_path / "journal.json", strict=True))
    assert again.accepted.value == value and type(again.accepted.value) is type(value)
    assert again.accepted.dialogue == done.accepted.dialogue
    assert json.loads((tmp_path / "journal.json").read_text())["entries"][0]["json"] == json.loads(
        said
    )


def test_the_model_is_given_the_grammar_of_the_type():
    model = Attempts(SAID, "1")
    finished(plans, "trip", model=model)
    schema = json.loads(model.calls[0].grammar.source)
    assert schema["required"] == ["legs"] and schema["properties"]["legs"]["items"]["required"] == [
        "to",
        "km",
    ]
    assert schema["properties"]["seats"] == {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    model = Attempts('{"a": 1}')
    finished(plans, "schema", model=model)
    assert model.calls[0].grammar == Grammar.json_schema(SCHEMA)


def test_a_wrong_answer_is_asked_for_again_with_another_seed():
    model = Attempts("no", '{"legs": 3}', SAID)
    done = finished(plans, "trip", 2, model=model)
    assert done.accepted.value == TRIP and done.calls == 3
    assert len({call.seed for call in model.calls}) == 3
    assert done.accepted.dialogue[-1].content == SAID


WRONG = [
    ("no", "it is not valid JSON"),
    ('{"legs": [{"to": "a"}]}', "it does not fit the schema: legs.0: 'km' is a required"),
    (Reply(SAID, 7, 1, is_cut=True), "it was cut after 7 tokens; give more max_new_tokens"),
    (Reply("", 7, 1, reasoning="Hm", is_cut=True), "it was cut after 7 tokens"),
]


@pytest.mark.parametrize(("said", "reason"), WRONG)
def test_an_answer_that_is_no_value_is_an_error_with_its_text(tmp_path, said, reason):
    text = said.text if isinstance(said, Reply) else said
    journal = Journal()
    with pytest.raises(AnswerError) as caught:
        finished(plans, "trip", 1, model=Attempts("x", said), journal=journal)
    error = caught.value
    assert isinstance(error, ParseError) and error.text == text and reason in error.reason
    assert "agent plans: 2 answers of the model could not be parsed" in str(error)
    journal.save(tmp_path / "journal.json")
    with pytest.raises(AnswerError) as again:
        finished(plans, "trip", 1, journal=Journal.load(tmp_path / "journal.json", strict=True))
    assert (again.value.text, again.value.reason, str(again.value)) == (
        error.text,
        error.reason,
        str(error),
    )


def test_several_answers_are_several_values():
    model = Attempts('"a"', '"b"')
    journal = Journal()
    assert finished(plans, "word", 0, 2, model=model, journal=journal).accepted.value == ["a", "b"]
    assert finished(plans, "word", 0, 2, journal=journal).accepted.value == ["a", "b"]


@agent(supervisor=BestOfN(3, value=lambda state: -len(state.value.legs)))
async def searched():
    trip = await llm("plan", returns=Trip)
    trip.legs.append(Leg("home", 1.0))
    return trip


def test_forks_have_their_own_values():
    said = ['{"legs": []}', SAID, SAID]
    journal = Journal()
    done = finished(searched, model=ScriptedModel({"plan": said}), journal=journal)
    assert done.accepted.value == Trip([Leg("home", 1.0)])
    assert sorted(len(state.value.legs) for state in done.states if state.finished) == [1, 2, 2]
    assert finished(searched, journal=journal).accepted.value == done.accepted.value


def look(city: str) -> str:
    """Looks a city up."""
    return f"{city} is far"


@agent
async def looks_up():
    return await llm("plan", tools=[look], returns=Trip, retries=1)


def test_tools_may_come_before_a_value():
    call = '<tool_call>{"name": "look", "arguments": {"city": "Oslo"}}</tool_call>'
    model = ScriptedModel({"plan": call, "Oslo is far": ["x", SAID]})
    done = finished(looks_up, model=model)
    assert done.accepted.value == TRIP
    # A grammar of the value would leave no room for calls.
    assert [one.grammar for one in model.calls] == [None] * 3
    assert [len(one.tools) for one in model.calls] == [1, 1, 1]


def quoted(text):
    return Message("user", text)


@agent
async def former():
    first = await llm(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}],
        temperature=0.5,
    )
    kept = await tool(quoted, first)
    many = await llm("two", n=2)
    return first, kept, many


def test_a_journal_of_a_former_version_is_replayed():
    """The file was written before messages had calls; a value in it is a pickled message."""
    journal = Journal.load(FIXTURES / "agents-journal-0.1.json", strict=True, pickles=True)
    done = finished(former, journal=journal)
    assert done.accepted.value == ("1", Message("user", "1"), ["2", "3"])
    assert repr(done.accepted.value[1]) == "Message(role='user', content='1')"
    assert done.accepted.dialogue == (
        Message("system", "Be brief."),
        Message("user", "one"),
        Message("assistant", "1"),
        Message("user", "two"),
    )
