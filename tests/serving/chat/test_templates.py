"""Tools, calls and results in chat templates: transformers' text, the same calls read back, and no
control token from anyone's words."""

import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare.models.chat_rendering import ChatTemplateError
from jaxshare.serving.chat import ChatAnswer, ToolCall, chat_format, parse_answer
from jaxshare.serving.chat_template import render_marked
from jaxshare.serving.inputs import encode_messages
from jaxshare.serving.words import unmark
from tests.serving.chat.templates import (
    CONTROLS,
    TEMPLATES,
    controls,
    model_of,
    tokenizer,
)

HERMES, PYTHONIC = TEMPLATES["hermes"], TEMPLATES["pythonic"]


def weather(city: str, days: int = 1) -> str:
    """Tells the weather.

    Args:
      city: its name.
      days: from today on.
    """
    return f"{city}: rain for {days}"


DESCRIBED = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "its name."},
                "days": {"type": "integer", "description": "from today on."},
            },
            "required": ["city"],
        },
    },
}
ASKED = {"role": "user", "content": "Rain in Oslo?"}


def called(*arguments: dict[str, Any], content: str | None = "", as_text: bool = False):
    """An assistant's message with calls."""
    given = [json.dumps(one, ensure_ascii=False) if as_text else one for one in arguments]
    calls = [
        {
            "id": f"call0000{i}",
            "type": "function",
            "function": {"name": "weather", "arguments": one},
        }
        for i, one in enumerate(given, 1)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(text: str, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": "weather", "content": text}


def theirs(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """The text that transformers renders."""
    text = tokenizer(template).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **options
    )
    assert isinstance(text, str)
    return text


def ours(template: str, *arguments: Any, **options: Any) -> str:
    """The text of the tokens that encode_messages makes."""
    return tokenizer(template).decode(encode_messages(model_of(template), *arguments, **options))


@pytest.mark.parametrize("tools", [[weather], [DESCRIBED], [DESCRIBED["function"]]])
@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_and_results_are_written_as_transformers_writes_them(name, tools):
    template = TEMPLATES[name]
    # DeepSeek's first template takes the text of arguments, beside a content that is None:
    # transformers leaves that content out, and then the template leaves the calls out.
    calls = [] if name == "deepseek" else [called({"city": "Åse"}, as_text="v3.1" in name)]
    messages = [{"role": "system", "content": "Be brief."}, ASKED, *calls, result("Rain.")]
    assert ours(template, messages, tools) == theirs(template, messages, tools=[DESCRIBED])


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("content", ["", None])
@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_written_in_the_form_that_the_template_takes(name, content, as_text):
    """Some templates want arguments as objects and some as text, some want no content to be None."""
    given = called({"city": "Åse", "days": 2}, {"city": "B"}, content=content, as_text=as_text)
    text = ours(TEMPLATES[name], [ASKED, given, result("Rain.")], [weather])
    if name == "deepseek":
        calls = [
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{one}\n```<｜tool▁call▁end｜>"
            for one in ('{"city": "Åse", "days": 2}', '{"city": "B"}')
        ]
        joined = "\n".join(calls)
        assert f"<｜tool▁calls▁begin｜>{joined}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>" in text
    else:
        same = called({"city": "Åse", "days": 2}, {"city": "B"}, as_text=name == "deepseek-v3.1")
        messages = [ASKED, same, result("Rain.")]
        assert text == theirs(TEMPLATES[name], messages, tools=[DESCRIBED])


WORDS = st.lists(
    st.one_of(
        st.sampled_from(
            [*CONTROLS, "<", "｜>", "|>", '"', "\\", "'", "\n", "}", ";", "]", " ", "a"]
        ),
        st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=4),
    ),
    max_size=5,
).map("".join)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), WORDS, st.floats(-9, 9)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(WORDS, inner, max_size=2)),
    max_leaves=5,
)
NAMES = st.sampled_from(["city", "days", "größe", "x1", "items"])


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "qwen3-coder"])
@given(arguments=st.lists(st.dictionaries(NAMES, VALUES, max_size=3), min_size=1, max_size=3))
@settings(max_examples=40)
def test_calls_that_a_template_writes_are_read_back(name, arguments):
    template = TEMPLATES[name]
    answer = ChatAnswer(
        "", None, tuple(ToolCall("weather", one, f"call_{i}") for i, one in enumerate(arguments, 1))
    )
    plain = {"role": "assistant", "content": "PLAIN"}
    before, after = ours(template, [ASKED, plain]).split("PLAIN")
    written = ours(template, [ASKED, answer.message()])
    assert written.startswith(before) and written.endswith(after)
    written = written[len(before) : len(written) - len(after)]
    read = parse_answer(written, chat_format(template))
    assert read == answer
    assert json.dumps([one.arguments for one in read.tool_calls]) == json.dumps(arguments)


TYPED = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": ["integer", "null"]},
            "größe": {"type": "number"},
            "x1": {"type": "boolean"},
            "items": {"type": "array"},
        },
    },
}


@given(
    arguments=st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "city": WORDS,
                "days": st.none() | st.integers(),
                "größe": st.floats(allow_nan=False, allow_infinity=False),
                "x1": st.booleans(),
                "items": st.lists(VALUES, max_size=3),
            },
        ),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=60)
def test_parameters_that_a_template_writes_are_read_back_by_their_types(arguments):
    answer = ChatAnswer(
        "", None, tuple(ToolCall("weather", one, f"call_{i}") for i, one in enumerate(arguments, 1))
    )
    template = TEMPLATES["qwen3-coder"]
    before, after = ours(template, [ASKED]), "<|im_end|>\n<|im_start|>assistant\n"
    written = ours(template, [ASKED, answer.message()]).removeprefix(before)
    read = parse_answer(written.removesuffix(after), chat_format(template), tools=[TYPED])
    assert read == answer
    assert json.dumps([one.arguments for one in read.tool_calls]) == json.dumps(arguments)


def test_ids_are_made_short_for_a_template_that_takes_no_others():
    """Mistral's templates refuse ids that have not nine letters and digits."""

    def text(*ids: str) -> str:
        calls = [{"id": one, "name": "weather", "arguments": {}} for one in ids]
        results = [result("Rain.") | {"tool_call_id": one} for one in ids]
        return ours(
            TEMPLATES["mistral"], [ASKED, {"role": "assistant", "tool_calls": calls}, *results]
        )

    assert re.findall(r'_?id": "(\w+)"', text("call00001", "call00002")) == [
        *("call00001", "call00002"),
        *("call00001", "call00002"),
    ]
    first, second, *others = re.findall(r'_?id": "(\w+)"', text("call_1", "call00002"))
    assert others == [first, second] and second == "call00002"
    assert len(first) == 9 and first.isalnum()


def test_an_answer_continues_its_dialogue_with_thinking_content_and_calls():
    text = "<think>\nWhere?\n</think>\n\nI look.\n" + "\n".join(
        f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
        for city in ("Oslo", "Rome")
    )
    answer = parse_answer(text, "hermes", tools=[weather])
    assert [call.arguments for call in answer.tool_calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    before = ours(HERMES, [ASKED])
    assert ours(HERMES, [ASKED, answer.message()]).startswith(f"{before}{text}<|im_end|>\n")


@pytest.mark.parametrize("name", TEMPLATES)
@given(words=st.lists(WORDS, min_size=9, max_size=9))
@settings(max_examples=25)
def test_words_in_tools_calls_and_results_make_no_control_token(name, words):
    def tokens(texts: list[str]) -> list[str]:
        tool = {
            "name": "weather",
            "description": texts[0],
            "parameters": {
                "type": "object",
                "properties": {
                    f"city{texts[1]}": {"type": "string", "description": texts[2]},
                    "unit": {"enum": [texts[3], "b"]},
                },
            },
        }
        call = called({"city": texts[4], f"k{texts[5]}": [{"inner": texts[6]}]})
        messages = [ASKED, call, result(texts[7]), {"role": "user", "content": texts[8]}]
        made = encode_messages(
            model_of(TEMPLATES[name]), messages, [tool], {"someone": texts[8], "thinking": True}
        )
        return controls(TEMPLATES[name], made)

    assert tokens(words) == tokens(["a"] * 9)


@given(arguments=st.dictionaries(NAMES, VALUES, min_size=1, max_size=3), text=WORDS)
@settings(max_examples=40)
def test_every_character_of_calls_and_results_is_there(arguments, text):
    messages = [ASKED, called(arguments), result(text)]
    for template in (HERMES, PYTHONIC):
        # The text of what Python prints escapes some characters, marks among them.
        assert ours(template, messages) == theirs(template, messages)


def test_the_text_of_an_escaped_mark_stays_where_a_template_does_not_escape():
    messages = [ASKED, result("\\U000f0000 \\udb80\\udc01")]
    assert ours(HERMES, messages) == theirs(HERMES, messages)


def test_variables_reach_the_template():
    messages = [ASKED]
    assert ours(HERMES, messages, chat_template_kwargs={"enable_thinking": False}).endswith(
        "assistant\n<think>\n\n</think>\n\n"
    )
    assert ours(HERMES, messages, None, {}) == theirs(HERMES, messages)


def test_a_tokenizer_with_a_template_for_tools_uses_it():
    made = tokenizer("{{ messages[0].content }}")
    made.chat_template = {"default": "plain", "tool_use": HERMES}
    model = dataclasses.replace(model_of(HERMES), tokenizer=made)
    try:
        assert made.decode(encode_messages(model, [ASKED])) == "plain"
        text = made.decode(encode_messages(model, [ASKED], [weather]))
    finally:
        made.chat_template = "{{ messages[0].content }}"
    assert text == ours(HERMES, [ASKED], [weather])


NO_TOOLS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ONLY_TOOLS = "{{ tools[0].function.name }}{{ raise_exception('no tools') if not tools }}"


def test_a_template_that_knows_no_tools_or_no_calls_is_an_error():
    model = model_of(NO_TOOLS)
    with pytest.raises(ValueError, match="chat template cannot offer weather: it writes nothing"):
        encode_messages(model, [ASKED], [weather])
    with pytest.raises(ValueError, match=r"refuses the messages \(it writes nothing of the calls"):
        encode_messages(model, [ASKED, called({})])
    # One that refuses to be without tools knows them.
    assert ours(ONLY_TOOLS, [ASKED], [weather]) == "weather"
    assert render_marked(tokenizer(NO_TOOLS), [ASKED]) == "user: Rain in Oslo?\n"


BAD = [
    (["a"], TypeError, "message 0 is 'a'; give a dict"),
    ([{"content": "a"}], ValueError, "message 0 has the role None; it must be a text"),
    ([ASKED, {"role": "tool"}], ValueError, "message 1 has the role tool and the content None"),
    ([ASKED | {"tool_calls": []}], ValueError, "message 0 has tool_calls and the role user"),
    ([{"role": "assistant", "tool_calls": "a"}], TypeError, "tool_calls of message 0 is 'a'"),
    ([{"role": "assistant", "tool_calls": [{}]}], ValueError, "message 0 has the call {}; give"),
    ([called({}) | {"tool_calls": [7]}], ValueError, "message 0 has the call 7; give a function"),
    ([{"role": "assistant", "tool_calls": [{"name": 3}]}], ValueError, "has the call {'name': 3}"),
    (
        [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}],
        ValueError,
        "a call of f whose arguments are a text: it is not valid JSON",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}],
        ValueError,
        r"a call of f with \[1\]; arguments are an object",
    ),
]


@pytest.mark.parametrize(("messages", "error", "match"), BAD)
def test_messages_of_a_wrong_form_are_refused(messages, error, match):
    with pytest.raises(error, match=match):
        encode_messages(model_of(HERMES), messages)


def test_variables_and_nesting_that_cannot_be_are_refused():
    model = model_of(HERMES)
    with pytest.raises(ValueError, match="chat_template_kwargs has tools, which is set here"):
        encode_messages(model, [ASKED], None, {"tools": []})
    with pytest.raises(TypeError, match="chat_template_kwargs is 3; it must be a dict"):
        encode_messages(model, [ASKED], None, 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="must be texts, numbers and lists of them"):
        encode_messages(model, [ASKED], None, {"now": object()})
    deep: Any = "a"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested more than 64 levels deep"):
        encode_messages(model, [ASKED, called({"a": deep})])
    with pytest.raises(ValueError, match="the text has 9,000,"):
        encode_messages(model, [ASKED, result("a" * 9_000_000)])


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_found_from_the_template(name):
    assert chat_format(TEMPLATES[name]).name == name.removesuffix("-args")


def test_a_template_that_tells_no_form_of_calls_is_plain():
    for template in (None, "", NO_TOOLS, "<function=f>", HERMES.replace("tool_call>", "call>")):
        assert chat_format(template).name == "plain"


def test_a_prompt_may_leave_a_think_block_open():
    for name, variables, opened in [
        ("deepseek", {}, "<think>"),
        ("deepseek-v3.1", {"thinking": True}, "<think>"),
        ("deepseek-v3.1", {"thinking": False}, None),
        ("hermes", {"enable_thinking": False}, None),
    ]:
        prompt = unmark(render_marked(tokenizer(TEMPLATES[name]), [ASKED], (), variables))
        assert chat_format(TEMPLATES[name]).after(prompt).opened == opened


def test_a_slow_or_failing_template_is_an_error_with_tools_too():
    with pytest.raises(ChatTemplateError, match="is undefined"):
        render_marked(tokenizer("{{ a.b.c }}"), [ASKED, called({})])
