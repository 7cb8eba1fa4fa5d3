"""Messages with tools as prompts of the engine."""

import dataclasses

import pytest

from jaxshare.models import Generation, LoadedModel
from jaxshare.serving.engine import Engine
from jaxshare.serving.inputs import encode_messages
from tests.helpers import TINY, init
from tests.serving.chat.templates import TEMPLATES, tokenizer

MESSAGES = [{"role": "user", "content": "Will it rain in Oslo?"}]


def weather(city: str, days: int = 1) -> str:
    """The weather of a city.

    Args:
      city: its name.
      days: from today.
    """
    return f"{city}: rain for {days} days"


@pytest.fixture(scope="module")
def engine():
    words = tokenizer(TEMPLATES["hermes"])
    config = dataclasses.replace(TINY, num_layers=1, vocab_size=len(words), max_positions=4096)
    with Engine(LoadedModel(config, init(config), words, Generation()), max_rows=4) as engine:
        yield engine


def test_tools_and_variables_reach_the_template(engine):
    """What is sampled follows from the tokens of the whole prompt."""
    for more in (
        {},
        {"tools": [weather]},
        {"tools": [weather], "chat_template_kwargs": {"enable_thinking": False}},
    ):
        tokens = encode_messages(engine.model, MESSAGES, **more)
        given, encoded = (
            engine.submit(prompt, max_new_tokens=6, seed=1, **options).wait()
            for prompt, options in ((MESSAGES, more), (tokens, {}))
        )
        assert given.prompt_tokens == len(tokens) and given.tokens == encoded.tokens


@pytest.mark.parametrize("prompt", ["a text", [5, 6, 7]])
@pytest.mark.parametrize(
    "more", [{"tools": [weather]}, {"chat_template_kwargs": {"enable_thinking": True}}]
)
def test_they_are_for_messages(engine, prompt, more):
    with pytest.raises(
        ValueError, match=f"{next(iter(more))} are for the chat template, but the prompt"
    ):
        engine.submit(prompt, **more)
