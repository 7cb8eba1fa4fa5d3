"""/v1/responses: items, events, and dialogues that the server remembers."""

import json

import openai
import pytest

from jaxshare import Grammar
from tests.serving.http.served import ScriptedEngine, served, sse_events

TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWER = "<think>\nHm.\n</think>\n\nI look.\n" + CALL


@pytest.fixture(scope="module")
def tiny():
    engine = ScriptedEngine()
    with (
        served(engine, max_responses=8) as made,
        openai.OpenAI(base_url=f"{made.url}/v1", api_key="-", max_retries=0) as client,
    ):
        yield engine, made, client


@pytest.fixture
def script(tiny):
    def set_answers(*answers):
        tiny[0].answers, tiny[0].asked = [*answers], []

    return set_answers


def test_an_answer_has_thinking_a_message_and_calls(tiny, script):
    script(ANSWER)
    answer = tiny[2].responses.create(model="tiny", input="Rain in Oslo?", tools=[TOOL])
    thinking, message, call = answer.output
    assert (thinking.type, thinking.content[0].text) == ("reasoning", "Hm.")
    assert (message.type, answer.output_text) == ("message", "I look.")
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "weather",
        {"city": "Oslo"},
    )
    assert answer.status == "completed" and {item.status for item in answer.output} == {"completed"}
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_the_events_build_what_the_whole_is(tiny, script):
    script(ANSWER)
    whole = tiny[2].responses.create(model="tiny", input="Rain?", tools=[TOOL])
    with tiny[2].responses.stream(model="tiny", input="Rain?", tools=[TOOL]) as stream:
        events = [*stream]
        last = stream.get_final_response()
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    for made, given in zip(last.output, whole.output, strict=True):
        assert made.type == given.type
        if made.type == "function_call":
            assert (made.name, made.arguments) == (given.name, given.arguments)
        else:
            assert made.content[0].text == given.content[0].text
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    arguments = "".join(
        event.delta for event in events if event.type == "response.function_call_arguments.delta"
    )
    assert arguments == whole.output[2].arguments


def test_every_item_and_part_that_opens_closes(tiny, script):
    script(ANSWER)
    answer = tiny[1].post("/v1/responses", {"input": "Rain?", "tools": [TOOL], "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = sse_events(answer.text)
    assert all(name == json.loads(data)["type"] for name, data in events)
    names = [name for name, _ in events]
    for part in ("output_item", "content_part"):
        opened, closed = (names.count(f"response.{part}.{end}") for end in ("added", "done"))
        assert opened == closed > 0


def test_a_dialogue_goes_on_from_a_stored_response(tiny, script):
    engine, _, client = tiny
    script(ANSWER, "It rains.", "Seven days.")
    first = client.responses.create(
        model="tiny", input="Rain in Oslo?", tools=[TOOL], instructions="Be short."
    )
    call = first.output[2]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(
        model="tiny", input=[result], previous_response_id=first.id, tools=[TOOL]
    )
    third = client.responses.create(
        model="tiny", input="How long?", previous_response_id=second.id, tools=[TOOL]
    )
    assert [second.output_text, third.output_text] == ["It rains.", "Seven days."]
    prompt = engine.prompts[2]
    parts = ["Rain in Oslo?", '"city": "Oslo"', "rain", "It rains.", "How long?"]
    places = [prompt.index(part) for part in parts]
    assert places == sorted(places)
    # Instructions are of their own response alone.
    assert "Be short." in engine.prompts[0] and "Be short." not in prompt


def test_items_are_a_dialogue_of_one_s_own(tiny, script):
    engine, _, client = tiny
    script(ANSWER, "It rains.")
    asked = {"role": "user", "content": [{"type": "input_text", "text": "Rain in Oslo?"}]}
    first = client.responses.create(model="tiny", input=[asked], tools=[TOOL], store=False)
    items = [item.model_dump(exclude_none=True) for item in first.output]
    result = {"type": "function_call_output", "call_id": items[2]["call_id"], "output": "rain"}
    client.responses.create(model="tiny", input=[asked, *items, result], tools=[TOOL])
    assert engine.prompts[1].startswith(engine.prompts[0].rstrip()[:-1])
    assert '"city": "Oslo"' in engine.prompts[1] and "rain" in engine.prompts[1]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_responses_are_kept_shown_and_forgotten(tiny, script):
    client = tiny[2]
    script("Yes.")
    made = client.responses.create(model="tiny", input="Rain?", metadata={"a": "b"})
    assert client.responses.retrieve(made.id).output_text == "Yes."
    assert client.responses.retrieve(made.id).metadata == {"a": "b"}
    client.responses.delete(made.id)
    for lost in (
        lambda: client.responses.retrieve(made.id),
        lambda: client.responses.delete(made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            lost()
    answer = tiny[1].post("/v1/responses", {"input": "a", "previous_response_id": made.id})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "previous_response_id")


def test_the_oldest_leave(tiny, script):
    client = tiny[2]
    script("Yes.")
    made = [client.responses.create(model="tiny", input="Rain?").id for _ in range(9)]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made[0])
    assert client.responses.retrieve(made[1]).id == made[1]


def test_an_answer_that_is_cut_off_is_incomplete(tiny, script):
    script("It rains all day.")
    answer = tiny[2].responses.create(model="tiny", input="Rain?", max_output_tokens=4)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete" and answer.output_text == "It r"


def test_forms_of_texts_become_grammars(tiny, script):
    script("7")
    form = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}, "strict": True}
    tiny[2].responses.create(model="tiny", input="a", text={"format": form})
    assert tiny[0].asked[0][1]["sampler"].grammar == Grammar.json_schema({"type": "integer"})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference"}]}, "input.0 of type item_reference"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input"),
        ({"input": [{"type": "function_call"}]}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "include": ["file_search_call.results"]}, "include"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a" * 5000}, "input"),
    ],
)
def test_what_cannot_be_served_is_named(tiny, body, param):
    answer = tiny[1].post("/v1/responses", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_logprobs_come_with_the_text(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="-") as client:
        options = {
            "model": "tiny",
            "input": "1. 17 + 25",
            "max_output_tokens": 8,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
        }
        whole = client.responses.create(**options)
        with client.responses.stream(**options) as stream:
            told = [
                one
                for event in stream
                if event.type == "response.output_text.delta"
                for one in event.logprobs
            ]
    logprobs = whole.output[0].content[0].logprobs
    assert len(logprobs) == 8 and [len(one.top_logprobs) for one in logprobs] == [2] * 8
    assert [one.logprob for one in told] == pytest.approx(
        [one.logprob for one in logprobs][: len(told)], abs=1e-5
    )
    assert len(told) >= 6  # those of a text that is held back come with what shows it
