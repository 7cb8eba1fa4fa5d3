"""Answers of each format, written in the published forms, and what is broken in them."""

import dataclasses
import enum
import json
import math

import pytest

from jaxshare.serving.chat import (
    BrokenCall,
    ChatAnswer,
    ChatFormat,
    ToolCall,
    as_tools,
    parse_answer,
)


def weather(city: str, days: int = 1) -> str:
    """Tells the weather."""
    return f"{city} {days}"


def clock() -> str:
    """Tells the time."""
    return "noon"


TOOLS = as_tools([weather, clock])
OSLO, NOW = ToolCall("weather", {"city": "Oslo"}, "call_1"), ToolCall("clock", {}, "call_2")


def hermes(*bodies: str) -> str:
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def coder(*calls: tuple[str, dict[str, str]]) -> str:
    written = (
        "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
        for _, given in calls
    )
    return "\n".join(
        f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"
        for (name, _), inner in zip(calls, written, strict=True)
    )


def v3(*calls: tuple[str, str]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{body}\n```<｜tool▁call▁end｜>"
        for name, body in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def v31(*calls: tuple[str, str]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{body}<｜tool▁call▁end｜>"
        for name, body in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


WEATHER, CLOCK = (
    '{"name": "weather", "arguments": {"city": "Oslo"}}',
    '{"name": "clock", "arguments": {}}',
)
LLAMA_WEATHER = '{"name": "weather", "parameters": {"city": "Oslo"}}'
LLAMA_CLOCK = '{"type": "function", "name": "clock", "parameters": {}}'
TWO = {
    "hermes": hermes(WEATHER, CLOCK),
    "qwen3-coder": coder(("weather", {"city": "Oslo"}), ("clock", {})),
    "mistral": f"[TOOL_CALLS] [{WEATHER}, {CLOCK}]",
    "llama3": f"<|python_tag|>{LLAMA_WEATHER}; {LLAMA_CLOCK}",
    "pythonic": '[weather(city="Oslo"), clock()]',
    "deepseek": v3(("weather", '{"city": "Oslo"}'), ("clock", "{}")),
    "deepseek-v3.1": v31(("weather", '{"city": "Oslo"}'), ("clock", "{}")),
}


@pytest.mark.parametrize("format", TWO)
def test_two_calls(format):
    text = TWO[format]
    for tools in (TOOLS, None):
        assert parse_answer(text, format, tools=tools) == ChatAnswer("", None, (OSLO, NOW))
        thought = f"<think>\nHm.\n</think>\n\n{text}\n"
        assert parse_answer(thought, format, tools=tools) == ChatAnswer("", "Hm.", (OSLO, NOW))
    # Where nothing is offered, nothing is a call.
    assert parse_answer(text, format, tools=[]) == ChatAnswer(text)
    assert parse_answer(text, "plain", tools=TOOLS) == ChatAnswer(text)


MISTRAL_ARGS = '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]clock[ARGS]{}'


@pytest.mark.parametrize("tools", [TOOLS, None])
def test_two_calls_of_mistrals_newer_form(tools):
    for text in (MISTRAL_ARGS, MISTRAL_ARGS.replace("clock", "clock[CALL_ID]a1b2c3d4e")):
        answer = parse_answer(f"[THINK]Hm.[/THINK]I look.{text}", "mistral", tools=tools)
        assert answer == ChatAnswer("I look.", "Hm.", (OSLO, NOW))


@pytest.mark.parametrize(
    "format", ["hermes", "qwen3-coder", "mistral", "deepseek", "deepseek-v3.1"]
)
def test_content_around_calls(format):
    answer = parse_answer(f"I look.\n\n{TWO[format]}\n\nDone. ", format, tools=TOOLS)
    assert answer == ChatAnswer("I look.\n\nDone. ", None, (OSLO, NOW))


@pytest.mark.parametrize("format", [*TWO, "plain"])
@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "\n\n", "Hello.", "\n Hello. \n", "1 < 2 and <b>", "a [1, 2] {}", "[1, 2]"),
        *('{"city": "Oslo"}', "{}", "[f]", "[see (1)", "{", "[", "<", "<think", '{"name": "Bo"}'),
        *('{"name": "Bo", "age": 3} and so on', '{"type": "object"}', "{x}", "[]", "; {}"),
        *("</think> a", "a <think>b</think>", '{"parameters": {"a": 1}}', '{"nam', "[weather"),
    ],
)
def test_other_text_is_content_as_written(format, text):
    if text == "[see (1)" and format == "pythonic":
        return  # a call of `see`; see below
    assert parse_answer(text, format, tools=TOOLS) == ChatAnswer(text)


THOUGHTS = [
    ("<think>Hm.</think>Yes.", None, "Hm.", "Yes."),
    ("\n<think>\n\nHm. \n</think>\n\nYes.\n", None, "Hm.", "Yes.\n"),
    ("[THINK]Hm.[/THINK]Yes.", None, "Hm.", "Yes."),
    ("<think>Hm.[/THINK]</think>Yes.", None, "Hm.[/THINK]", "Yes."),
    ("<think>\n\n</think>\n\nYes.", None, "", "Yes."),
    ("<think>Hm. <tool", None, "Hm. <tool", ""),
    ("<think>Hm. </thin", None, "Hm. </thin", ""),
    ("<think>", None, "", ""),
    ("Hm.\n</think>\n\nYes.", "<think>", "Hm.", "Yes."),
    ("<think>\nHm.\n</think>\n\nYes.", "<think>", "Hm.", "Yes."),
    ("Hm.[/THINK]Yes.", "[THINK]", "Hm.", "Yes."),
    ("Hm. That is", "<think>", "Hm. That is", ""),
    ("</think>Yes.", "<think>", "", "Yes."),
    ("", "<think>", "", ""),
]


@pytest.mark.parametrize("format", [*TWO, "plain"])
@pytest.mark.parametrize(("text", "opened", "thinking", "content"), THOUGHTS)
def test_think_blocks(format, text, opened, thinking, content):
    answer = parse_answer(text, ChatFormat(format, opened), tools=TOOLS)
    assert answer == ChatAnswer(content, thinking)


def test_a_call_in_a_thought_is_a_thought():
    answer = parse_answer(f"<think>{TWO['hermes']}</think>ok", "hermes", tools=TOOLS)
    assert answer == ChatAnswer("ok", TWO["hermes"])


QUOTED = (
    *(text for name, text in TWO.items() if name != "qwen3-coder"),
    *('"\\', "'", "</tool_call>", "<|python_tag|>", MISTRAL_ARGS, "[TOOL_CALLS]", "[ARGS]"),
    *("</parameter>", "a</parameter>\n</tool_call>", "<parameter=days>", "</function>"),
)
CODER = TWO["qwen3-coder"]


@pytest.mark.parametrize(
    ("format", "quoted"),
    [
        *((format, quoted) for format in TWO for quoted in QUOTED),
        *((format, CODER) for format in TWO if format != "qwen3-coder"),
    ],
)
def test_what_an_argument_quotes_is_the_arguments(format, quoted):
    """A page that a model quotes cannot call anything."""
    body = json.dumps({"city": quoted}, ensure_ascii=False)
    text = {
        "hermes": hermes(f'{{"name": "weather", "arguments": {body}}}'),
        "qwen3-coder": coder(("weather", {"city": quoted})),
        "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {body}}}]',
        "llama3": f'{{"name": "weather", "parameters": {body}}}',
        "pythonic": f"[weather(city={quoted!r})]",
        "deepseek": v3(("weather", body)),
        "deepseek-v3.1": v31(("weather", body)),
    }[format]
    call = ToolCall("weather", {"city": quoted}, "call_1")
    assert parse_answer(text, format, tools=TOOLS) == ChatAnswer("", None, (call,))


def test_newer_calls_of_mistral_may_quote_marks():
    for quoted in QUOTED:
        body = json.dumps({"city": quoted}, ensure_ascii=False)
        text = f"[TOOL_CALLS]weather[ARGS]{body}"
        call = ToolCall("weather", {"city": quoted}, "call_1")
        assert parse_answer(text, "mistral", tools=TOOLS) == ChatAnswer("", None, (call,))


def test_a_value_without_quotes_ends_where_its_parameter_and_function_seem_to():
    """Nothing in Qwen3-Coder's form tells a whole call that a value quotes from a call."""
    text = coder(("weather", {"city": f"a\n{CODER}"}))
    answer = parse_answer(text, "qwen3-coder", tools=TOOLS)
    assert [call.arguments for call in answer.tool_calls] == [
        {"city": "a\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo"},
        {},
    ]


class Shade(enum.Enum):
    DARK = 1
    LIGHT = 2


@dataclasses.dataclass
class Spot:
    x: int
    y: float = 0.0


def draw(
    text: str,
    size: int,
    ratio: float,
    is_filled: bool,
    points: list[int],
    at: Spot,
    label: str | None,
    shade: Shade,
    mixed: int | str = 0,
) -> str:
    """Draws something."""
    return text


def test_values_without_quotes_have_the_types_of_their_parameters():
    written = {
        "text": "\n 7 \n\n",
        "size": "3",
        "ratio": "2.5",
        "is_filled": "True",
        "points": "[1, 2]",
        "at": '{"x": 1}',
        "label": "None",
        "shade": "2",
        "mixed": "7",
    }
    expected = {
        "text": "\n 7 \n\n",
        "size": 3,
        "ratio": 2.5,
        "is_filled": True,
        "points": [1, 2],
        "at": {"x": 1},
        "label": None,
        "shade": 2,
        "mixed": "7",
    }
    text = coder(("draw", written))
    [call] = parse_answer(text, "qwen3-coder", tools=[draw]).tool_calls
    assert call.arguments == expected and call.arguments["is_filled"] is True
    [call] = parse_answer(text, "qwen3-coder").tool_calls
    assert call.arguments == written  # a type that nothing tells is a text's
    text = coder(("draw", written | {"is_filled": "false", "label": "null", "shade": " 2"}))
    [call] = parse_answer(text, "qwen3-coder", tools=[draw]).tool_calls
    assert call.arguments == expected | {"is_filled": False}


def test_values_have_the_types_of_json():
    text = "[f(a=1, b=-2.5, c=True, d=None, e=[1, (2, 'x')], g={'h': {}}, i='\\n\\u00e9')]"
    [call] = parse_answer(text, "pythonic").tool_calls
    expected = dict(a=1, b=-2.5, c=True, d=None, e=[1, [2, "x"]], g={"h": {}}, i="\né")
    assert call.arguments == expected and call.arguments["c"] is True
    body = json.dumps(expected)
    [call] = parse_answer(hermes(f'{{"name": "f", "arguments": {body}}}'), "hermes").tool_calls
    assert call.arguments == expected and call.arguments["c"] is True


FORGIVEN = [
    ("hermes", "<tool_call>" + WEATHER),  # cut after its end
    ("hermes", "<tool_call>" + WEATHER + "</tool_cal"[:0]),
    ("hermes", hermes('{"arguments": {"city": "Oslo"}, "name": "weather"}')),
    ("hermes", hermes('{"name": "weather", "parameters": {"city": "Oslo"}, "id": 3}')),
    ("hermes", hermes('{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}')),
    ("hermes", hermes('{"n\\u0061me": "we\\u0061ther", "arguments": {"city": "Oslo"}}')),
    ("qwen3-coder", coder(("weather", {"city": "Oslo"})).replace("\n", "")),
    ("qwen3-coder", coder(("weather", {"city": "Oslo"})).replace("\n</tool_call>", "")),
    ("qwen3-coder", coder(("weather", {"city": "Oslo"})).replace("=weather>", "= weather >")),
    ("mistral", f"[TOOL_CALLS][{WEATHER}]"),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}"),
    ("mistral", f"[TOOL_CALLS] [\n{WEATHER},\n]\n"),
    ("mistral", "[TOOL_CALLS] [" + WEATHER[:-1] + ', "id": "abcdefghi"}]'),
    ("mistral", '[TOOL_CALLS] weather [ARGS] {"city": "Oslo"}\n'),
    ("llama3", LLAMA_WEATHER),
    ("llama3", f" {LLAMA_WEATHER}\n"),
    ("llama3", f"{LLAMA_WEATHER};"),
    ("llama3", '{"parameters": {"city": "Oslo"}, "name": "weather"}'),
    ("pythonic", "[ weather (city='Oslo',) , ]"),
    ("pythonic", "[weather(city='Oslo')"),
    ("deepseek", v3(("weather", '{\n"city": "Oslo"\n}')).replace("<｜tool▁calls▁end｜>", "")),
    ("deepseek", v3(("weather", '{"city": "Oslo"}')).replace("```json", "```")),
    ("deepseek-v3.1", v31(("weather ", ' {"city": "Oslo"} ')).replace("<｜tool▁call▁end｜>", "")),
]


@pytest.mark.parametrize(("format", "text"), FORGIVEN)
def test_small_deviations_are_forgiven(format, text):
    assert parse_answer(text, format, tools=TOOLS).tool_calls == (OSLO,)


def test_a_line_break_in_a_string_is_one():
    text = hermes('{"name": "weather", "arguments": {"city": "a\nb"}}')
    assert parse_answer(text, "hermes").tool_calls[0].arguments == {"city": "a\nb"}


def body(arguments: str, name: str = "weather") -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


BROKEN = [
    (body('{"city": "Oslo"}}'), "not valid JSON: Extra data"),
    (body('{"city": "Oslo"'), "not valid JSON"),
    (body('{"city": "Oslo}'), "not valid JSON: Unterminated string"),
    (body("{'city': 'Oslo'}"), "not valid JSON: Expecting property name"),
    (body('{"city": "Oslo", "city": "Rome"}'), "not valid JSON: 'city' is in an object twice"),
    (body('{"city": NaN}'), "not valid JSON: NaN is no number of JSON"),
    (body('{"city": 1e999}'), "not valid JSON: Out of range float"),
    (body('{"city": "\\ud800"}'), "not valid JSON: it has half of a character"),
    (body('{"city": ' + "[" * 100_000 + "]" * 100_000 + "}"), "nested too deeply"),
    (body('{"city": ' + "1" * 5000 + "}"), "not valid JSON: Exceeds the limit"),
    ("", "not valid JSON: Expecting value"),
    ("weather", "not valid JSON: Expecting value"),
    ("[1]", "it is no JSON object"),
    ("{}", "it has no name"),
    ('{"name": 3, "arguments": {}}', "it has no name"),
    ('{"name": "", "arguments": {}}', "it has no name"),
    ('{"name": "clock", "arguments": {}, "parameters": {}}', "has both arguments and parameters"),
    ('{"name": "clock", "arguments": [1]}', "its arguments are no object"),
    (body("{}", "sum"), "there is no function 'sum'; there are weather, clock"),
    (body("{}"), "its arguments do not fit: 'city' is a required property"),
    (body('{"city": 3}'), "its arguments do not fit: city: 3 is not of type 'string'"),
    (body('{"city": "a", "days": 1.5}'), "do not fit: days: 1.5 is not of type 'integer'"),
    (body('{"city": "a", "x": 1}'), "do not fit: Additional properties are not allowed"),
    ('{"name": "weather"}', "'city' is a required property"),
]


@pytest.mark.parametrize(("written", "reason"), BROKEN, ids=[str(i) for i in range(len(BROKEN))])
def test_a_broken_call_is_content_with_a_reason(written, reason):
    text = hermes(written)
    answer = parse_answer(f"Well. {text}", "hermes", tools=TOOLS)
    [broken] = answer.broken
    assert (answer.content, answer.tool_calls) == (f"Well. {text}", ())
    assert broken.text == text and reason in broken.reason


def test_calls_beside_a_broken_one_are_calls():
    wrong = body("{}", "sum")
    answer = parse_answer(f"a {hermes(WEATHER, wrong, CLOCK)} b", "hermes", tools=TOOLS)
    assert [call.name for call in answer.tool_calls] == ["weather", "clock"]
    assert answer.content == f"a {hermes(wrong)}\nb"  # the first whitespace between the two
    assert [broken.text for broken in answer.broken] == [hermes(wrong)]


OTHER_BROKEN = [
    ("llama3", "<|python_tag|>print(1)", None, "not valid JSON"),
    ("llama3", "<|python_tag|>", None, "not valid JSON"),
    ("llama3", '<|python_tag|>{"city": 3}', None, "it has no name"),
    ("llama3", '{"name": "weather", "parameters": {"city": "Os', None, "not valid JSON"),
    ("llama3", '{"name": "sum", "parameters": {}}', None, "there is no function 'sum'"),
    ("llama3", '{"parameters": {}, "name": "weather"}', None, "'city' is a required property"),
    ("pythonic", "[weather(city='Oslo]", "weather(city='Oslo]", "not valid Python"),
    ("pythonic", "[weather(city='Oslo'", "weather(city='Oslo'", "not valid Python"),
    ("pythonic", "[weather('Oslo')]", "weather('Oslo')", "it has an argument without a name"),
    ("pythonic", "[weather(city=oslo)]", "weather(city=oslo)", "argument city is no literal"),
    ("pythonic", "[weather(city={1})]", "weather(city={1})", "argument city is no literal"),
    ("pythonic", "[weather(city={1: 2})]", "weather(city={1: 2})", "argument city is no literal"),
    ("pythonic", "[weather(city=b'')]", "weather(city=b'')", "argument city is no literal"),
    ("pythonic", "[weather(city=1e999)]", "weather(city=1e999)", "argument city is no literal"),
    ("pythonic", "[weather(city=1+2)]", "weather(city=1+2)", "argument city is no literal"),
    ("pythonic", "[weather(**{})]", "weather(**{})", "it has arguments in **"),
    ("pythonic", "[weather(city=1, city=2)]", "weather(city=1, city=2)", "it has city twice"),
    ("pythonic", "[clock()()]", "()]", "it is in a list of calls, but is none"),
    ("pythonic", "[sum(a=1)]", "sum(a=1)", "there is no function 'sum'"),
    ("pythonic", "[see (1)", "see (1)", "it has an argument without a name"),
    ("qwen3-coder", coder(("sum", {})), None, "there is no function 'sum'"),
    ("qwen3-coder", coder(("weather", {})), None, "'city' is a required property"),
    ("qwen3-coder", coder(("weather", {"city": "a", "x": "1"})), None, "Additional properties"),
    ("qwen3-coder", coder(("weather", {"city": "a", "days": "x"})), None, "days: it is not valid"),
    (
        "qwen3-coder",
        coder(("weather", {"city": "a", "days": "1.5"})),
        None,
        "not of type 'integer'",
    ),
    (
        "qwen3-coder",
        coder(("weather", {"city": "a", "#": "b"})).replace("#", "city"),
        None,
        "parameter city: it has city twice",
    ),
    ("qwen3-coder", "<tool_call>", None, "it ends before a function's name"),
    ("qwen3-coder", "<tool_call>\n<function=weat", None, "it ends before a function's name"),
    ("qwen3-coder", f"<tool_call>{WEATHER}</tool_call>", None, "there is no <function=NAME>"),
    ("qwen3-coder", "<tool_call><function=clock>", None, "it ends before its function does"),
    ("qwen3-coder", "<tool_call><function=clock><para", None, "it ends before its function does"),
    ("qwen3-coder", "<tool_call><function=clock>x", None, "there is no <parameter=NAME>"),
    ("qwen3-coder", "<tool_call><function=clock></function>x", None, "text after its function"),
    (
        "qwen3-coder",
        "<tool_call><function=weather><parameter=city>Os",
        None,
        "its parameter city has no end",
    ),
    (
        "qwen3-coder",
        "<tool_call><function=weather><parameter=city>Os</parameter>" + " " * 70 + "</function>",
        None,
        "its parameter city has no end",
    ),
    ("mistral", "[TOOL_CALLS]", None, "no name with JSON of arguments after it"),
    ("mistral", "[TOOL_CALLS]weather", None, "no name with JSON of arguments after it"),
    ("mistral", "[TOOL_CALLS]weather[ARGS]", None, "no name with JSON of arguments after it"),
    ("mistral", "[TOOL_CALLS]weather[ARGS]Oslo", None, "no name with JSON of arguments after it"),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Os', None, "not valid JSON"),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city" "Os"}', None, "not valid JSON"),
    ("mistral", "[TOOL_CALLS]sum[ARGS]{}", None, "there is no function 'sum'"),
    ("mistral", "[TOOL_CALLS] []", None, "it is in a list of calls, but is none"),
    ("mistral", "[TOOL_CALLS] [", None, "it is in a list of calls, but is none"),
    ("mistral", "[TOOL_CALLS] [clock]", None, "it is in a list of calls, but is none"),
    ("deepseek", v3(("sum", "{}")), None, "there is no function 'sum'"),
    ("deepseek", v3(("weather", '{"city": "Oslo"')), None, "not valid JSON"),
    ("deepseek", v3(("weather", "Oslo")), None, "no name with JSON of arguments after it"),
    ("deepseek", v3(("weather", '{"city": "a"} x')), None, "not valid JSON: Extra data"),
    ("deepseek-v3.1", v31(("weather", "{}")), None, "'city' is a required property"),
    ("deepseek-v3.1", v31(("weather", '{"city" "a"}')), None, "not valid JSON"),
]


@pytest.mark.parametrize(("format", "text", "part", "reason"), OTHER_BROKEN)
def test_broken_calls_of_the_other_formats(format, text, part, reason):
    answer = parse_answer(text, format, tools=TOOLS)
    [broken] = answer.broken
    assert reason in broken.reason
    if "deepseek" in format:
        start, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
        assert answer == ChatAnswer(broken.text, None, (), (broken,))
        assert f"{start}{broken.text}{end}" == text
    elif answer.tool_calls:
        assert (answer.content, broken.text) == (part, part)
    else:
        assert answer.content == text and broken.text == (part or text)


def test_a_broken_call_in_a_list_does_not_break_the_others():
    answer = parse_answer("[clock(), weather(1), weather(city='a')] ok", "pythonic", tools=TOOLS)
    assert [call.name for call in answer.tool_calls] == ["clock", "weather"]
    assert answer.content == "weather(1) ok"
    assert answer.broken == (BrokenCall("weather(1)", "it has an argument without a name"),)


def test_a_broken_call_in_mistrals_list_does_not_break_the_others():
    wrong, other = body("{}", "sum"), body("{}")
    text = f"So: [TOOL_CALLS] [{wrong}, {other}, {WEATHER}, {CLOCK}] Done."
    answer = parse_answer(text, "mistral", tools=TOOLS)
    assert [call.name for call in answer.tool_calls] == ["weather", "clock"]
    assert answer.content == f"So: {wrong}, {other} Done."
    assert [broken.text for broken in answer.broken] == [wrong, other]
    answer = parse_answer(f"[TOOL_CALLS] [{WEATHER}, clock] a", "mistral", tools=TOOLS)
    assert answer.tool_calls == (OSLO,) and answer.content == ", clock] a"
    assert [broken.text for broken in answer.broken] == [", clock] a"]


@pytest.mark.parametrize(("format", "calls"), [("mistral", MISTRAL_ARGS), ("qwen3-coder", CODER)])
def test_calls_follow_a_broken_one(format, calls):
    broken = {"mistral": "[TOOL_CALLS]sum[ARGS]x ", "qwen3-coder": "<tool_call>sum "}[format]
    answer = parse_answer(broken + calls, format, tools=TOOLS)
    assert answer.tool_calls == (OSLO, NOW)
    assert answer.content == broken.strip() and answer.broken[0].text == broken


def test_a_text_after_llamas_calls_is_content():
    answer = parse_answer(f"{LLAMA_WEATHER}; and then", "llama3", tools=TOOLS)
    assert answer == ChatAnswer("; and then", None, (OSLO,))
    answer = parse_answer(f"So: <|python_tag|>{LLAMA_WEATHER}", "llama3", tools=TOOLS)
    assert answer == ChatAnswer("So:", None, (OSLO,))


def test_what_separates_objects_is_written_once():
    text = f'{LLAMA_WEATHER}; {{"city": 1}} <|python_tag|>clock()'
    answer = parse_answer(text, "llama3", tools=TOOLS)
    assert answer.content == text.removeprefix(LLAMA_WEATHER)
    assert answer.tool_calls == (OSLO,) and answer.broken[0].text == "<|python_tag|>clock()"


def test_ids_begin_as_they_are_told_to():
    answer = parse_answer(TWO["hermes"], "hermes", id_prefix="turn 3 call ")
    assert [call.id for call in answer.tool_calls] == ["turn 3 call 1", "turn 3 call 2"]


@pytest.mark.parametrize("number", [math.inf, -0.0, 10**400])
def test_numbers_of_python_that_json_does_not_have_are_broken(number):
    answer = parse_answer(f"[f(a={number!r})]".replace("inf", "1e999"), "pythonic")
    assert bool(answer.broken) == (number == math.inf)
    if not answer.broken:
        assert answer.tool_calls[0].arguments == {"a": number}


def test_formats_and_tools_that_there_are_not_are_refused():
    with pytest.raises(ValueError, match="the format is 'qwen'; it must be one of plain, hermes"):
        parse_answer("a", "qwen")
    with pytest.raises(TypeError, match="format is 3; give a ChatFormat"):
        parse_answer("a", 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="opened is '<b>'; it must be None or one of <think>"):
        ChatFormat("plain", "<b>")
    with pytest.raises(TypeError, match="tools is 3; it must be a list"):
        parse_answer("a", tools=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="the piece is 3; it must be a text"):
        parse_answer(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="id_prefix is 3; it must be a text"):
        parse_answer("a", id_prefix=3)  # pyright: ignore[reportArgumentType]
