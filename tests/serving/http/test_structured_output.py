"""Forms of texts and calls that have to come, of a model that would write something else."""

import dataclasses
import json
import re

import jsonschema
import openai
import pytest

from jaxshare.models import Generation, LoadedModel
from jaxshare.serving.engine import Engine
from tests.helpers import TINY, init
from tests.serving.chat.templates import TEMPLATES, tokenizer
from tests.serving.http.served import served

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "time", "parameters": SCHEMA}}
ASK = [{"role": "user", "content": "1. 17 + 25"}]
OPTIONS = {"model": "tiny", "temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="-", max_retries=0) as made:
        yield made


def chat(client, **more):
    return client.chat.completions.create(messages=ASK, **OPTIONS, **more).choices[0]


def test_every_endpoint_writes_what_the_schema_admits(client):
    form = {"name": "n", "schema": SCHEMA, "strict": True}
    texts = [
        chat(
            client, response_format={"type": "json_schema", "json_schema": form}, max_tokens=80
        ).message.content,
        client.completions.create(
            prompt="a", max_tokens=80, extra_body={"guided_json": SCHEMA}, **OPTIONS
        )
        .choices[0]
        .text,
        client.responses.create(
            input="a",
            max_output_tokens=80,
            text={"format": {"type": "json_schema", **form}},
            model="tiny",
            temperature=1.0,
        ).output_text,
    ]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.slow
def test_expressions_choices_and_grammars_hold(client):
    for asked, form in (
        ({"guided_regex": "[ab]{3}[0-9]"}, "[ab]{3}[0-9]"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "x" ("y" | "z")'}}, "x[yz]"),
    ):
        choice = chat(client, extra_body=asked, max_tokens=20)
        assert re.fullmatch(form, choice.message.content) and choice.finish_reason == "stop"


def test_tools_that_the_template_does_not_know_are_refused(client):
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, tools=[TOOL])
    assert error.value.param == "messages" and "cannot offer weather" in error.value.message


@pytest.fixture(scope="module")
def caller():
    """A client of a model without sense, whose template knows tools."""
    words = tokenizer(TEMPLATES["hermes"])
    config = dataclasses.replace(TINY, num_layers=1, vocab_size=len(words), max_positions=4096)
    end = words.convert_tokens_to_ids("<|im_end|>")
    model = LoadedModel(config, init(config), words, Generation((end,)))
    with (
        Engine(model, max_rows=4) as engine,
        served(engine) as made,
        openai.OpenAI(base_url=f"{made.url}/v1", api_key="-", max_retries=0) as client,
    ):
        yield client


def test_a_call_that_is_named_comes(caller):
    named = {"type": "function", "function": {"name": "weather"}}
    choice = chat(caller, tools=[TOOL, OTHER], tool_choice=named, max_tokens=80)
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason) == ("weather", "tool_calls")
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_a_call_of_any_tool_comes_where_one_is_required(caller):
    choice = chat(
        caller,
        tools=[TOOL, OTHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=160,
    )
    (call,) = choice.message.tool_calls
    assert call.function.name in ("weather", "time") and choice.finish_reason == "tool_calls"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_grammar": "start: ("}, "guided_grammar"),
        ({"guided_json": {"type": "odd"}}, "guided_json"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"$ref": "#/none"}},
                }
            },
            "response_format",
        ),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
        ({"guided_regex": "a", "resample": "stepwise"}, "resample"),
    ],
)
def test_grammars_that_cannot_be_served_are_named(live, asked, param):
    for path, prompt in (
        ("/v1/chat/completions", {"messages": ASK}),
        ("/v1/completions", {"prompt": "a"}),
    ):
        answer = live.post(path, {**prompt, **asked})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
