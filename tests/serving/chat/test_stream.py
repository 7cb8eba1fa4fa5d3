"""Answers as they are written: however they are cut, the pieces are those of the whole."""

import itertools
import json
import re
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxshare.serving.chat import (
    AnswerStream,
    ArgumentsDelta,
    CallBroken,
    CallFinished,
    CallStarted,
    ChatEvent,
    ChatFormat,
    ContentDelta,
    ThinkingDelta,
    parse_answer,
)
from tests.serving.chat.test_answers import (
    BROKEN,
    MISTRAL_ARGS,
    OTHER_BROKEN,
    TOOLS,
    TWO,
    coder,
    hermes,
)

FORMATS = (*TWO, "plain")
PIECES = (
    *(
        '<tool_call>\n{"name": "weather", "arguments": {"city": "O\\"s"}}\n</tool_call>',
        "<tool_call>",
    ),
    *(
        "</tool_call>",
        "<think>",
        "</think>",
        "[THINK]",
        "[/THINK]",
        "<|python_tag|>",
        "; ",
        "```\n",
    ),
    *('{"name": "weather", "parameters": {"city": "a"}}', '{"name": "x", "parameters": {', "}}"),
    *('{"type": "function", "name": "clock", "parameters": {}}', '{"name": "clock"', '"', "{", "}"),
    *("[clock()]", "[clock(), ", 'weather(city="a")', "weather(1)", ")", "]", "[", "(", "'", "\\"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("function<｜tool▁sep｜>clock\n```json\n{}\n```", 'weather<｜tool▁sep｜>{"city": "a"}', "<｜"),
    *(
        "<function=weather>",
        "<function=clock>\n",
        "</function>",
        "<parameter=city>",
        "</parameter>",
    ),
    *("<tool_call>\n<function=weather>\n<parameter=city>\nOs\n</parameter>\n", "<parameter=days>3"),
    *("[TOOL_CALLS]", "[TOOL_CALLS] [", "[ARGS]", '{"name": "clock", "arguments": {}}', ", "),
    *('[TOOL_CALLS]weather[ARGS]{"city": "a"}', "clock[CALL_ID]a1", "[TOOL_"),
    *(" ", "\n", "\n\n", "a", "Hello ", "<", "é"),
)
TEXTS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


def check(text: str, format: ChatFormat, cuts: list[int], tools=None) -> None:
    """Streams a text in pieces that end at the cuts and compares it with the whole."""
    whole = parse_answer(text, format, tools=tools)
    stream, events, ends = AnswerStream(format, tools=tools), [], [0, *sorted({*cuts, len(text)})]
    for start, end in itertools.pairwise(ends):
        events += stream.feed(text[start:end])
    events += stream.finish()
    assert stream.finish() == [] and stream.answer == whole
    assert "".join(e.text for e in events if isinstance(e, ContentDelta)) == whole.content
    thinking = "".join(e.text for e in events if isinstance(e, ThinkingDelta))
    assert thinking == (whole.thinking or "")
    assert not thinking or whole.thinking is not None
    assert tuple(e.call for e in events if isinstance(e, CallFinished)) == whole.tool_calls
    assert tuple(e.call for e in events if isinstance(e, CallBroken)) == whole.broken
    check_calls(events)


def check_calls(events: list[ChatEvent]) -> None:
    """Started calls are counted, told in order, and end; their arguments are JSON of the call's."""
    running: tuple[CallStarted, str] | None = None
    started = 0
    for event in events:
        if isinstance(event, CallStarted):
            assert running is None and event.index == started
            running, started = (event, ""), started + 1
        elif isinstance(event, ArgumentsDelta):
            assert running and event.index == running[0].index and event.text
            running = running[0], running[1] + event.text
        elif isinstance(event, CallFinished):
            assert running and event.index == running[0].index
            call = event.call
            assert (call.name, call.id) == (running[0].name, running[0].id)
            assert json.loads(running[1], strict=False) == call.arguments
            running = None
        elif isinstance(event, CallBroken):
            assert event.index == (running[0].index if running else None)
            running = None
    assert running is None


@pytest.mark.parametrize("format", FORMATS)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=6), opened=st.booleans())
@settings(max_examples=150)
def test_any_cutting_gives_the_whole(format, text, cuts, opened):
    given_format = ChatFormat(format, "<think>" if opened else None)
    cuts = [cut for cut in cuts if cut < len(text)]
    for tools in (None, TOOLS):
        check(text, given_format, cuts, tools)
        check(text, given_format, [*range(len(text))], tools)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        *TWO.items(),
        ("mistral", MISTRAL_ARGS),
        *(("hermes", f"a {hermes(body)}\nb") for body, _ in BROKEN if len(body) < 200),
        *((format, text) for format, text, _, _ in OTHER_BROKEN),
    ],
)
def test_every_single_cut_gives_the_whole(format, text):
    for cut in range(len(text) + 1):
        check(text, ChatFormat(format), [cut], TOOLS)


WORDS = st.lists(st.sampled_from([*PIECES, "x", "\u2028"]), max_size=4).map("".join)
SAID = st.text("ab .,{}[]()\"'é<>|\n", max_size=8).filter(lambda text: text == text.strip())
WRITTEN = {
    "hermes": '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>',
    "mistral": '[TOOL_CALLS] [{{"name": "f", "arguments": {}}}]',
    "mistral args": "[TOOL_CALLS]f[ARGS]{}",
    "deepseek": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>",
    "deepseek-v3.1": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
}


@pytest.mark.parametrize("format", WRITTEN)
@given(
    thinking=st.none() | SAID,
    parts=st.lists(st.tuples(SAID, st.dictionaries(WORDS, WORDS, max_size=2)), max_size=3),
    last=SAID,
    cut=st.integers(0, 200),
)
@settings(max_examples=150)
def test_what_an_answer_is_made_of_is_what_is_read(format, thinking, parts, last, cut):
    """The oracle is how the text is made: calls whose arguments quote marks of every kind."""
    text = "" if thinking is None else f"<think>\n{thinking}\n</think>\n\n"
    for said, arguments in parts:
        text += said + WRITTEN[format].format(json.dumps(arguments, ensure_ascii=False))
    stream = AnswerStream(format.removesuffix(" args"))
    stream.feed(text[:cut])
    stream.feed(text[cut:] + last)
    stream.finish()
    answer = stream.answer
    assert answer.content == "".join([*(said for said, _ in parts), last])
    assert answer.thinking == thinking and answer.broken == ()
    assert [call.arguments for call in answer.tool_calls] == [given for _, given in parts]


VALUE = st.lists(
    st.sampled_from([*(p for p in PIECES if "</parameter>" not in p), "</parameter>", "x"]),
    max_size=4,
).map(lambda parts: "".join(parts) + "y")


@given(
    parts=st.lists(
        st.tuples(SAID, st.dictionaries(st.sampled_from(["a", "größe"]), VALUE)), max_size=3
    ),
    last=SAID,
    cut=st.integers(0, 300),
)
@settings(max_examples=150)
def test_parameters_without_quotes_are_what_is_read(parts, last, cut):
    """Values may quote any mark, but for the end of a parameter before another or a function's."""
    for _, given_values in parts:
        for value in given_values.values():
            assume(not re.search(r"</parameter>\s*(<parameter=|</function>)", value))
    text = "".join(said + coder(("f", values)) for said, values in parts)
    stream = AnswerStream("qwen3-coder")
    events = [*stream.feed(text[:cut]), *stream.feed(text[cut:] + last), *stream.finish()]
    check_calls(events)
    assert stream.answer.content == "".join([*(said for said, _ in parts), last])
    assert [call.arguments for call in stream.answer.tool_calls] == [given for _, given in parts]


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60), cut=st.integers(0, 60))
@settings(max_examples=100)
def test_a_text_without_marks_is_not_changed(text, cut):
    cut = min(cut, len(text))
    for format in ("plain", "hermes", "qwen3-coder", "mistral", "deepseek"):
        stream = AnswerStream(format)
        events = [*stream.feed(text[:cut]), *stream.feed(text[cut:]), *stream.finish()]
        if not text.lstrip().startswith(("<think>", "[THINK]")):
            assert stream.answer.content == text
            assert "".join(e.text for e in events if isinstance(e, ContentDelta)) == text


def test_what_is_certain_is_told_at_once():
    stream = AnswerStream("hermes", tools=TOOLS)
    assert stream.feed("I look") == [ContentDelta("I look")]
    assert stream.feed(" at it. <") == [ContentDelta(" at it.")]
    assert stream.feed("b> <tool_ca") == [ContentDelta(" <b>")]
    assert stream.feed('ll>{"name": "weather", "argu') == []
    assert stream.feed('ments": {"ci') == [
        CallStarted(0, "weather", "call_1"),
        ArgumentsDelta(0, '{"ci'),
    ]
    assert stream.feed('ty": "Os') == [ArgumentsDelta(0, 'ty": "Os')]
    [last, finished] = stream.feed('lo"}}</tool_call>')
    assert last == ArgumentsDelta(0, 'lo"}')
    assert isinstance(finished, CallFinished) and finished.call.arguments == {"city": "Oslo"}
    assert stream.feed("\n") == [] == stream.finish()


def test_parameters_and_arguments_are_told_as_they_come():
    stream = AnswerStream("qwen3-coder", tools=TOOLS)
    assert stream.feed("<tool_call>\n<function=weat") == []
    assert stream.feed("her>") == [CallStarted(0, "weather", "call_1")]
    assert stream.feed("<parameter=city>\nOslo\n</parameter>\n<par") == []
    assert stream.feed("ameter=") == [ArgumentsDelta(0, '{"city": "Oslo"')]
    assert stream.feed("days>2</parameter></function>") == [ArgumentsDelta(0, ', "days": 2')]
    [last, finished] = stream.feed("</tool_call>")
    assert last == ArgumentsDelta(0, "}") and isinstance(finished, CallFinished)
    stream = AnswerStream("mistral", tools=TOOLS)
    assert stream.feed("I look. [TOOL_") == [ContentDelta("I look.")]
    assert stream.feed("CALLS]weather[AR") == []
    assert stream.feed('GS]{"ci') == [
        CallStarted(0, "weather", "call_1"),
        ArgumentsDelta(0, '{"ci'),
    ]
    [last, finished] = stream.feed('ty": "Oslo"}')
    assert isinstance(finished, CallFinished) and finished.call.arguments == {"city": "Oslo"}


def test_thinking_is_told_as_it_comes():
    stream = AnswerStream(ChatFormat("hermes", "<think>"))
    assert stream.feed("\nFirst, ") == [ThinkingDelta("First,")]
    assert stream.feed("then </th") == [ThinkingDelta(" then")]
    assert stream.feed("ink>\n\nYes") == [ContentDelta("Yes")]


def test_a_call_that_breaks_is_taken_back_and_its_text_is_content():
    text = '<tool_call>{"name": "weather", "arguments": {"city": 3}}</tool_call>'
    stream = AnswerStream("hermes", tools=TOOLS)
    started, arguments, broken, content = stream.feed(text)
    assert started == CallStarted(0, "weather", "call_1")
    assert arguments == ArgumentsDelta(0, '{"city": 3}')
    assert isinstance(broken, CallBroken) and broken.index == 0 and broken.call.text == text
    assert content == ContentDelta(text)


def test_a_call_of_an_unknown_function_is_never_started():
    text = '<tool_call>{"name": "sum", "arguments": {"city": 3}}</tool_call>'
    broken, content = AnswerStream("hermes", tools=TOOLS).feed(text)
    assert isinstance(broken, CallBroken) and broken.index is None
    assert content == ContentDelta(text)


def test_an_object_that_is_no_call_is_told_at_its_first_key():
    stream = AnswerStream("llama3", tools=TOOLS)
    assert stream.feed('{"n') == []
    assert stream.feed("o") == [ContentDelta('{"no')]
    stream = AnswerStream("pythonic", tools=TOOLS)
    assert stream.feed("[wea") == []
    assert stream.feed(" k") == [ContentDelta("[wea k")]


def test_a_finished_stream_takes_no_more():
    stream = AnswerStream()
    stream.finish()
    with pytest.raises(ValueError, match="the stream is finished; make another one"):
        stream.feed("a")


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("start", ["", *(text[:30] for text in TWO.values()), '{"name": "'])
def test_a_long_answer_takes_no_time(format, start):
    """No state looks at all of its text again for every piece."""
    took = {}
    for size in (4_000, 32_000):
        stream, begin = AnswerStream(format), time.process_time()
        for piece in (start, *(" \n a"[i % 4] for i in range(size))):
            stream.feed(piece)
        stream.finish()
        took[size] = time.process_time() - begin
    assert took[32_000] < 40 * took[4_000] + 0.5
