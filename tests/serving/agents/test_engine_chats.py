"""Calls of agents as chats of the engine: the prompt, the grammar, and the parts of the answer."""

import asyncio
import dataclasses
import functools
from typing import Any

import pytest

from jaxshare import FinishReason, Grammar, Sampler
from jaxshare.models import Generation, LoadedModel
from jaxshare.serving.agents import Message, ModelCall, Options, Reply, agent, llm, run
from jaxshare.serving.agents.backends import EngineModel
from jaxshare.serving.chat import ToolCall, as_tools, parse_answer
from jaxshare.serving.engine import Engine
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.inputs import encode_messages
from tests.helpers import TINY, init
from tests.serving.chat.templates import TEMPLATES, tokenizer

GRAMMAR = Grammar.json_schema({"type": "integer"})
ASKED = (Message("user", "Rain in Oslo?"),)
TALK = (
    *ASKED,
    Message("assistant", "I look.", "Hm.", (ToolCall("weather", {"city": "Oslo"}, "call00001"),)),
    Message("tool", "rain", tool_call_id="call00001", name="weather"),
)
AS_DICTS = [
    {"role": "user", "content": "Rain in Oslo?"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "id": "call00001",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Oslo"}},
            }
        ],
    },
    {"role": "tool", "content": "rain", "tool_call_id": "call00001", "name": "weather"},
]
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def weather(city: str) -> str:
    """Tells the weather.

    Args:
      city: its name.
    """
    return f"{city}: rain"


TOOLS = as_tools([weather])


@functools.cache
def model(name: str) -> EngineModel:
    words = tokenizer(TEMPLATES.get(name, f"{{# {name} #}}{{{{ messages[0].content }}}}"))
    config = dataclasses.replace(TINY, num_layers=1, vocab_size=len(words), max_positions=4096)
    loaded = LoadedModel(config, init(config), words, Generation())
    return EngineModel(Engine(loaded, max_rows=4), sampler=Sampler(temperature=0.5))


class Done:
    """A finished stream of the engine."""

    def __init__(self, completion: Completion):
        self.completion = completion

    def __await__(self):
        yield from ()
        return self.completion

    def cancel(self) -> None:
        pass


@dataclasses.dataclass
class Submitted:
    """What the engine was given, and a reply to the text that it gave."""

    prompt: Any
    sampler: Sampler
    options: dict[str, Any]
    reply: Reply


@pytest.fixture
def submitted(monkeypatch):
    def submit(name, text, messages=ASKED, reason=FinishReason.STOP, **more) -> Submitted:
        given = []

        def take(prompt, sampler, **options):
            given.extend((prompt, sampler, options))
            return Done(Completion(text, (5, 6, 7), reason, prompt_tokens=len(prompt)))

        monkeypatch.setattr(model(name).engine, "submit", take)
        call = ModelCall(messages, Options(9, top_k=3), 1, "a", "a", (0,), **more)
        reply = asyncio.run(model(name).answer(call))
        return Submitted(*given, reply)

    return submit


def test_a_dialogue_with_calls_comes_into_the_template(submitted):
    variables = {"enable_thinking": False}
    got = submitted("hermes", CALLED, TALK, tools=TOOLS, chat_template_kwargs=variables)
    words = tokenizer(TEMPLATES["hermes"])
    expected = words.apply_chat_template(
        AS_DICTS,
        tools=[TOOLS[0].schema()],
        tokenize=False,
        add_generation_prompt=True,
        **variables,
    )
    assert words.decode(got.prompt) == expected
    assert (got.sampler.temperature, got.sampler.top_k, got.sampler.grammar) == (0.5, 3, None)
    assert got.options["max_new_tokens"] == 9 and got.options["seed"] == 1
    assert got.reply.tool_calls == (ToolCall("weather", {"city": "Rome"}, "call_1"),)
    assert (got.reply.text, got.reply.new_tokens) == ("", 3)
    assert got.reply.prompt_tokens == len(got.prompt) and not got.reply.is_cut


def test_thinking_is_parted_from_the_answer(submitted):
    reply = submitted("hermes", "<think>\nHm.\n</think>\n\nRain.").reply
    assert (reply.text, reply.reasoning, reply.tool_calls) == ("Rain.", "Hm.", ())
    # What nothing offers is no call.
    reply = submitted("hermes", f" {CALLED}\n").reply
    assert (reply.text, reply.reasoning, reply.tool_calls) == (f" {CALLED}\n", None, ())
    reply = submitted("hermes", f"{CALLED}<tool_call>x", tools=TOOLS).reply
    assert len(reply.tool_calls) == len(reply.broken) == 1 and reply.text == "<tool_call>x"


def test_a_think_block_that_the_prompt_opens_comes_before_the_grammar(submitted):
    got = submitted("hermes", "3", grammar=GRAMMAR)
    assert got.sampler.grammar == GRAMMAR and got.reply.text == "3"
    got = submitted("deepseek", "Hm.\n</think>\n\n3", grammar=GRAMMAR)
    assert got.sampler.grammar is None
    assert (got.reply.text, got.reply.reasoning) == ("3", "Hm.")


@pytest.mark.parametrize(
    ("reason", "is_cut"),
    [
        (FinishReason.STOP, False),
        (FinishReason.STOP_TEXT, False),
        (FinishReason.LENGTH, True),
        (FinishReason.CACHE_FULL, True),
    ],
)
def test_an_answer_that_ends_for_want_of_tokens_is_cut(submitted, reason, is_cut):
    assert submitted("hermes", "3", reason=reason).reply.is_cut == is_cut


def test_what_is_sampled_is_what_the_engine_samples():
    @agent
    async def asks():
        said = await llm(
            "Rain in Oslo?", tools=[weather], run_tools=False, max_new_tokens=6, temperature=1.0
        )
        return said.content, said.tool_calls

    engine = model("hermes").engine
    value = run(asks, model=model("hermes"))
    tokens = encode_messages(engine.model, AS_DICTS[:1], [weather])
    seen = []
    submit = engine.submit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "submit", lambda *a, **k: seen.append((a, k)) or submit(*a, **k))
        assert run(asks, model=model("hermes")) == value
    ((prompt, sampler), options), *_ = seen
    assert list(prompt) == tokens
    again = submit(tokens, sampler, **options).wait()
    assert value == (parse_answer(again.text, "hermes", tools=[weather]).content, ())


def test_a_model_without_a_template_takes_no_tools():
    plain = model("plain")
    plain.engine.model.tokenizer.chat_template = None
    for more in (
        {"tools": TOOLS},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"messages": TALK},
    ):
        call = ModelCall(
            **{"messages": ASKED, **dict.fromkeys(("agent", "run"), "a"), **more},
            options=Options(3),
            seed=1,
            state=(0,),
        )
        with pytest.raises(ValueError, match="the model has no chat template, so it takes no tool"):
            asyncio.run(plain.answer(call))


def test_a_template_that_knows_no_tools_refuses_them(submitted):
    with pytest.raises(ValueError, match="cannot offer weather"):
        submitted("plain template", "a", tools=TOOLS)
