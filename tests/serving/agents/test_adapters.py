"""The option `adapter` of an agent's calls: what an engine, an endpoint and a journal make of it."""

import asyncio
import dataclasses
import re

import pytest

from jaxshare.serving.agents import llm
from jaxshare.serving.agents.answer_options import Options
from jaxshare.serving.agents.backends import EngineModel
from jaxshare.serving.agents.dialogue import Message
from jaxshare.serving.agents.endpoint import OpenAIModel
from jaxshare.serving.agents.journal_entries import summary
from jaxshare.serving.agents.requests import ModelCall
from jaxshare.serving.engine import Engine
from jaxshare.serving.inputs import encode_messages
from tests.helpers import one_layer
from tests.models.test_adapters import random_adapter


def call(**options):
    return ModelCall(
        (Message("user", "1. 47 + 38"),), Options(8, 0.0, **options), 0, "asker", "asker", (0, 0)
    )


@pytest.mark.slow
def test_an_engine_answers_with_it():
    base = one_layer()
    model = base.with_adapters({"a": random_adapter(base.config, 2, 3)})
    with Engine(model, max_rows=2) as engine:
        asked = EngineModel(engine)
        messages = [{"role": "user", "content": "1. 47 + 38"}]
        prompt = encode_messages(base, messages)
        for name in (None, "a"):
            reply = asyncio.run(asked.answer(call(adapter=name)))
            expected = engine.submit(
                prompt,
                dataclasses.replace(asked._sampler, temperature=0.0),
                adapter=name,
                max_new_tokens=8,
            ).wait()
            assert reply.text.strip() == expected.text.strip()
        with pytest.raises(ValueError, match="the adapter 'b' is not loaded; loaded are: a"):
            asyncio.run(asked.answer(call(adapter="b")))


def test_an_endpoint_is_asked_for_the_model_of_its_name():
    model = OpenAIModel("big", base_url="http://localhost:1/v1")
    assert model._request(call())["model"] == "big"
    assert model._request(call(adapter="small"))["model"] == "small"


def test_journals_tell_it_apart_and_know_former_ones():
    plain, own, other = (llm("x", adapter=name) for name in (None, "a", "b"))
    assert plain.options == Options() and own.options.adapter == "a"
    assert len({summary(each) for each in (plain, own, other)}) == 3
    assert "adapter" not in repr(own.options)
    for wrong, shown in ((3, "3"), ({"a": 1}, "{'a': 1}")):
        why = re.escape(f"adapter is {shown}; it must be the name of one, or None")
        with pytest.raises(TypeError, match=why):
            llm("x", adapter=wrong)
