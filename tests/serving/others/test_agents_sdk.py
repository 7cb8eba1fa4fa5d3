"""The OpenAI Agents SDK asks a server: a model that has to call a function calls it, and goes on."""

import asyncio
import copy
import dataclasses
import json
from typing import Annotated

import openai
import pytest
from pydantic import Field

from jaxshare.models import load
from jaxshare.serving.engine import Engine
from tests.helpers import EMBEDDED
from tests.serving.chat.templates import TEMPLATES
from tests.serving.http.served import served

pytestmark = pytest.mark.others
Digits = Annotated[int, Field(ge=0, le=99)]
"""Bounded, as a small model writes a number without an end otherwise."""


@pytest.fixture(scope="module")
def url():
    model = load(EMBEDDED)
    tokenizer = copy.deepcopy(model.tokenizer)
    # The embedded model's own template writes nothing of tools.
    tokenizer.chat_template = TEMPLATES["hermes"]
    model = dataclasses.replace(model, tokenizer=tokenizer)
    with Engine(model, max_rows=2) as engine, served(engine) as made:
        yield f"{made.url}/v1"


def run(url, kind, *, stream):
    """Runs an agent with one function: (its result, the arguments of all calls)."""
    import agents  # pyright: ignore[reportMissingImports]

    agents.set_tracing_disabled(True)
    calls = []

    @agents.function_tool
    def add(a: Digits, b: Digits) -> str:
        """Adds two numbers."""
        calls.append((a, b))
        return str(a + b)

    async def ask():
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            agent = agents.Agent(
                name="Adder",
                instructions="Answer with numbers.",
                model=getattr(agents, kind)(model="tiny", openai_client=client),
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

    return asyncio.run(ask()), calls


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
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
