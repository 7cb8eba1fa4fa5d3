"""The OpenAI Agents SDK asks a server: a model that has to call a function calls it, and goes on."""

import asyncio
import copy
import dataclasses
import json
from typing import Annotated

import openai
import pytest
from pydantic import BaseModel, Field

from jaxshare.models import load
from jaxshare.serving.engine import Engine
from tests.helpers import EMBEDDED
from tests.serving.chat.templates import TEMPLATES
from tests.serving.http.served import served

pytestmark = pytest.mark.others
KINDS = ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"]
Digits = Annotated[int, Field(ge=0, le=99)]
"""Bounded, as a small model writes a number without an end otherwise."""


class Verdict(BaseModel):
    correct: bool
    points: Annotated[int, Field(ge=0, le=99)]


@pytest.fixture(scope="module")
def url():
    model = load(EMBEDDED)
    tokenizer = copy.deepcopy(model.tokenizer)
    # The embedded model's own template writes nothing of tools.
    tokenizer.chat_template = TEMPLATES["hermes"]
    model = dataclasses.replace(model, tokenizer=tokenizer)
    with Engine(model, max_rows=2) as engine, served(engine) as made:
        yield f"{made.url}/v1"


def with_model(url, kind, use):
    """Runs what uses a model, and closes its connections."""
    import agents  # pyright: ignore[reportMissingImports]

    agents.set_tracing_disabled(True)

    async def work():
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await use(agents, getattr(agents, kind)(model="tiny", openai_client=client))

    return asyncio.run(work())


def run(url, kind, *, stream):
    """Runs an agent with one function: (its result, the arguments of all calls)."""
    calls = []

    async def use(agents, model):
        @agents.function_tool
        def add(a: Digits, b: Digits) -> str:
            """Adds two numbers."""
            calls.append((a, b))
            return str(a + b)

        agent = agents.Agent(
            name="Adder",
            instructions="Answer with numbers.",
            model=model,
            tools=[add],
            model_settings=agents.ModelSettings(
                temperature=0.0,
                max_tokens=200,
                tool_choice="add",
                include_usage=True,
                extra_body={"stop": ["="]},
            ),
        )
        if not stream:
            return await agents.Runner.run(agent, "What is 17 + 25?", max_turns=3)
        result = agents.Runner.run_streamed(agent, "What is 17 + 25?", max_turns=3)
        async for _ in result.stream_events():
            pass
        return result

    return with_model(url, kind, use), calls


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_function_is_called_and_its_result_is_read(url, kind, stream):
    """The choice of a tool is forced at the first turn only, as the SDK resets it then."""
    result, calls = run(url, kind, stream=stream)
    assert len(calls) == 1 and all(type(number) is int for number in calls[0])
    kinds = [item.type for item in result.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"]
    assert result.new_items[1].output == str(sum(calls[0]))
    called = result.new_items[0].raw_item
    assert called.name == "add" and json.loads(called.arguments) == dict(
        zip("ab", calls[0], strict=True)
    )
    assert kinds[-1] == "message_output_item" and result.final_output
    usage = result.context_wrapper.usage
    assert (
        usage.requests == 2 and usage.total_tokens == usage.input_tokens + usage.output_tokens > 0
    )


def settings(**more):
    """Settings under which the texts of a small model end soon."""
    import agents  # pyright: ignore[reportMissingImports]

    ends = {str(token): 6.0 for token in load(EMBEDDED).generation.stop_tokens}
    asked = {"seed": 3, "logit_bias": ends}
    return agents.ModelSettings(temperature=1.0, max_tokens=200, extra_body=asked, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_has_a_type(url, kind):
    async def use(agents, model):
        agent = agents.Agent(
            name="Judge",
            instructions="Judge.",
            model=model,
            model_settings=settings(),
            output_type=Verdict,
        )
        return await agents.Runner.run(agent, "17 + 25 = 42")

    assert isinstance(with_model(url, kind, use).final_output, Verdict)


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_hands_over_to_another_in_a_stream(url, kind):
    async def use(agents, model):
        second = agents.Agent(
            name="Second", instructions="Answer.", model=model, model_settings=settings()
        )
        first = agents.Agent(
            name="First",
            instructions="Hand over.",
            model=model,
            model_settings=settings(tool_choice="required", parallel_tool_calls=False),
            handoffs=[second],
        )
        streamed = agents.Runner.run_streamed(first, "What is 17 + 25?")
        pieces = [
            event.data.delta
            async for event in streamed.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        return streamed, pieces

    streamed, pieces = with_model(url, kind, use)
    assert streamed.last_agent.name == "Second"
    assert "".join(pieces) == streamed.final_output
