"""A chat template that is given in place of the checkpoint's own."""

import json

import pytest

from jaxshare.models import EMBEDDED, load
from jaxshare.models.chat_rendering import ChatTemplateError
from jaxshare.serving.chat_template import with_chat_template
from jaxshare.serving.cli import main
from jaxshare.serving.inputs import encode_messages
from tests.helpers import one_layer
from tests.paths import ROOT
from tests.serving.http.served import served

MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}]
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": NUMBER, "b": NUMBER},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


def test_the_model_that_it_was_given_to_keeps_its_own():
    model = load(EMBEDDED)
    own = encode_messages(model, MESSAGES)
    other = with_chat_template(model, "{{ messages[0].content }}!")
    assert model.tokenizer.decode(encode_messages(other, MESSAGES)) == "What is 17 + 25?!"
    assert encode_messages(model, MESSAGES) == own
    for template, why in (("{% if %}", "Expected an expression"), ("{{ 1 // 0 }}", "zero")):
        with pytest.raises(ChatTemplateError, match=why):
            with_chat_template(model, template)


def test_the_example_lets_a_model_call_functions_that_knows_none():
    from jaxshare.serving.engine import Engine

    template = (ROOT / "examples" / "tools.jinja").read_text(encoding="utf-8")
    with Engine(with_chat_template(one_layer(), template)) as engine, served(engine) as live:
        body = {"messages": MESSAGES, "tools": [ADD], "max_tokens": 200, "temperature": 0.7}
        named = {"type": "function", "function": {"name": "add"}}
        answer = live.post("/v1/chat/completions", {**body, "tool_choice": named})
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    found = json.loads(call["function"]["arguments"])
    assert found.keys() == {"a", "b"} and all(0 <= value <= 99 for value in found.values())


def test_commands_take_one_and_name_a_file_that_cannot_be_read(tmp_path, capsys):
    file = tmp_path / "plain.jinja"
    file.write_text("{{ messages[0].content }}")
    plain = ["generate", "embedded", "--max-new-tokens", "4", "--temperature", "0", "--json"]
    assert main.main([*plain, "--prompt", "1. 47 + 38"]) == 0
    expected = json.loads(capsys.readouterr().out)
    chat = [*plain, "--chat", "--prompt", "1. 47 + 38", "--chat-template"]
    assert main.main([*chat, str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["completions"][0]["tokens"] == expected["completions"][0]["tokens"]
    assert main.main([*chat, str(tmp_path / "none.jinja")]) == 1
    assert "--chat-template" in capsys.readouterr().err
