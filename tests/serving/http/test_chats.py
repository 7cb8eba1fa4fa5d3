"""Chats with thinking, tools and forced forms, of an engine that answers by a script."""

import json

import openai
import pytest

from jaxshare import Grammar
from tests.serving.http.served import ScriptedEngine, served

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
ASK = [{"role": "user", "content": "Rain in Oslo?"}]
THOUGHT = "<think>\nA week has 7 days.\n</think>\n\nI look it up.\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 7}}\n</tool_call>'
SECOND = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "weather", "arguments": {"days": "many"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tiny():
    engine = ScriptedEngine()
    with served(engine) as made, openai.OpenAI(base_url=f"{made.url}/v1", api_key="-") as client:
        yield engine, made, client


def asked(tiny, answer, **more):
    """The message and the reason of an answer, whole, and put together from a stream."""
    engine, _, client = tiny
    engine.answers, engine.asked = [answer], []
    options = {"model": "tiny", "messages": ASK, **more}
    whole = client.chat.completions.create(**options).choices[0]
    content, thinking, calls, reason = "", "", {}, None
    for chunk in client.chat.completions.create(stream=True, **options):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        thinking += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or ():
            one = calls.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
            one["id"] += call.id or ""
            one["name"] += call.function.name or ""
            one["arguments"] += call.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    message = whole.message
    assert content == (message.content or "") and reason == whole.finish_reason
    assert thinking == (getattr(message, "reasoning_content", None) or "")
    made = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    assert [(one["name"], one["arguments"]) for one in calls.values()] == made
    assert len({one["id"] for one in calls.values()}) == len(calls)
    return message, reason


def calls_of(message):
    return [
        (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls
    ]


def test_thinking_content_and_calls_are_told_apart(tiny):
    message, reason = asked(tiny, THOUGHT + CALL + SECOND, tools=[WEATHER])
    assert message.reasoning_content == "A week has 7 days."
    assert message.content == "I look it up."
    assert calls_of(message) == [
        ("weather", {"city": "Oslo", "days": 7}),
        ("weather", {"city": "Rome"}),
    ]
    assert reason == "tool_calls"
    assert '"name": "weather"' in tiny[0].prompts[0]


def test_a_plain_answer_has_no_calls(tiny):
    message, reason = asked(tiny, "It <rains>.")
    assert (message.content, message.tool_calls, reason) == ("It <rains>.", None, "stop")


def test_a_call_that_does_not_fit_is_content(tiny):
    message, reason = asked(tiny, BROKEN, tools=[WEATHER])
    assert message.content == BROKEN and message.tool_calls is None and reason == "stop"


def test_one_call_where_parallel_ones_are_not_wanted(tiny):
    message, _ = asked(tiny, CALL + SECOND, tools=[WEATHER], parallel_tool_calls=False)
    assert calls_of(message) == [("weather", {"city": "Oslo", "days": 7})]


def test_no_tool_is_offered_where_none_may_be_called(tiny):
    message, _ = asked(tiny, CALL, tools=[WEATHER], tool_choice="none")
    assert message.content == CALL and message.tool_calls is None
    assert "weather" not in tiny[0].prompts[0]


def test_a_named_function_is_called_with_what_its_schema_admits(tiny):
    choice = {"type": "function", "function": {"name": "weather"}}
    arguments = '{"city": "Oslo"}'
    message, reason = asked(tiny, arguments, tools=[WEATHER], tool_choice=choice)
    assert calls_of(message) == [("weather", {"city": "Oslo"})]
    assert (message.content, reason) == (None, "tool_calls")
    sampler = tiny[0].asked[0][1]["sampler"]
    assert sampler.grammar == Grammar.json_schema(WEATHER["function"]["parameters"])


def test_a_call_that_is_required_is_one_of_a_list(tiny):
    text = '[{"name": "weather", "arguments": {"city": "Oslo"}}]'
    message, reason = asked(tiny, text, tools=[WEATHER], tool_choice="required")
    assert calls_of(message) == [("weather", {"city": "Oslo"})] and reason == "tool_calls"
    grammar = tiny[0].asked[0][1]["sampler"].grammar
    schema = json.loads(grammar.source)
    assert grammar.kind == "json_schema" and schema["minItems"] == 1
    (kind,) = schema["items"]["anyOf"]
    assert kind["properties"]["name"] == {"const": "weather"}
    assert kind["properties"]["arguments"] == WEATHER["function"]["parameters"]


def test_a_required_call_that_is_cut_off_is_content(tiny):
    text = '[{"name": "weather", "arguments": {"city": "Oslo"}}]'
    message, reason = asked(
        tiny, text, tools=[WEATHER], tool_choice="required", max_completion_tokens=20
    )
    assert text.startswith(message.content) and message.content and reason == "length"


def test_calls_and_results_go_back_into_the_dialogue(tiny):
    engine, _, client = tiny
    engine.answers, engine.asked = [CALL, "Rain."], []
    first = client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER])
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7 days of rain"}
    second = client.chat.completions.create(
        model="tiny", messages=[*ASK, message, result], tools=[WEATHER]
    )
    assert second.choices[0].message.content == "Rain."
    assert '"city": "Oslo"' in engine.prompts[1] and "7 days of rain" in engine.prompts[1]


def test_parts_of_messages_are_joined_and_developers_are_the_system(tiny):
    engine, _, client = tiny
    prompts = []
    for messages in (
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Rain?"}],
        [
            {"role": "developer", "content": [{"type": "text", "text": "Be short."}]},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Ra"}, {"type": "text", "text": "in?"}],
            },
        ],
    ):
        engine.asked = []
        client.chat.completions.create(model="tiny", messages=messages)
        prompts += engine.prompts
    assert prompts[0] == prompts[1]


def test_marks_in_words_are_words(tiny):
    engine, _, client = tiny
    engine.asked = []
    mark = "<|im_end|>"
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": mark}])
    tokens = engine.asked[0][0]
    special = engine.model.tokenizer.convert_tokens_to_ids(mark)
    assert engine.prompts[0].count(mark) == tokens.count(special) + 1


def test_variables_reach_the_template(tiny):
    """The template opens and closes a think block where thinking is switched off."""
    engine, served_, client = tiny
    prompts = []
    for variables in ({}, {"enable_thinking": False}):
        engine.asked = []
        client.chat.completions.create(
            model="tiny", messages=ASK, extra_body={"chat_template_kwargs": variables}
        )
        prompts += engine.prompts
    assert ("enable_thinking" in engine.model.tokenizer.chat_template) == (prompts[0] != prompts[1])
    answer = served_.post(
        "/v1/chat/completions", {"messages": ASK, "chat_template_kwargs": {"tools": []}}
    )
    assert answer.status_code == 400 and "tools" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("asked_for", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": {"type": "integer"}},
                }
            },
            Grammar.json_schema({"type": "integer"}),
        ),
        ({"guided_json": {"type": "integer"}}, Grammar.json_schema({"type": "integer"})),
        ({"guided_json": '{"type": "integer"}'}, Grammar.json_schema({"type": "integer"})),
        ({"guided_regex": "[0-9]+"}, Grammar.regex("[0-9]+")),
        ({"guided_choice": ["yes", "no"]}, Grammar.choices(["yes", "no"])),
        ({"guided_grammar": 'start: "a"'}, Grammar.lark('start: "a"')),
        ({"structured_outputs": {"json": {}}}, Grammar.json_schema({})),
        ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
        ({"structured_outputs": {"regex": "a|b"}}, Grammar.regex("a|b")),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar.choices(["a"])),
        ({"structured_outputs": {"grammar": 'start: "b"'}}, Grammar.lark('start: "b"')),
    ],
)
def test_forms_of_texts_become_grammars(tiny, asked_for, grammar):
    engine, made, _ = tiny
    for path, prompt in (
        ("/v1/chat/completions", {"messages": ASK}),
        ("/v1/completions", {"prompt": "a"}),
    ):
        engine.asked = []
        assert made.post(path, {**prompt, **asked_for}).status_code == 200
        assert engine.asked[0][1]["sampler"].grammar == grammar


@pytest.mark.parametrize(
    ("asked_for", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": "no json"}, "guided_json"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "odd"}}}
                ]
            },
            "tools",
        ),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "other"}},
            },
            "tool_choice",
        ),
    ],
)
def test_forms_and_tools_that_cannot_be_used_are_named(tiny, asked_for, param):
    answer = tiny[1].post("/v1/chat/completions", {"messages": ASK, **asked_for})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_pydantic_models_are_a_form_of_the_client_s_own(tiny):
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str
        days: int

    engine, _, client = tiny
    engine.answers, engine.asked = ['{"city": "Oslo", "days": 7}'], []
    answer = client.chat.completions.parse(model="tiny", messages=ASK, response_format=Weather)
    assert answer.choices[0].message.parsed == Weather(city="Oslo", days=7)
    schema = json.loads(engine.asked[0][1]["sampler"].grammar.source)
    assert schema["properties"]["days"]["type"] == "integer"
