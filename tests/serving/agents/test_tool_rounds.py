"""Agents whose model calls tools: rounds up to an answer, errors, searches, journals."""

import asyncio
import dataclasses
import functools
import json
import time

import pytest

from jaxshare.serving.agents import (
    BestOfN,
    Budget,
    BudgetError,
    Message,
    Reply,
    RoundsError,
    Runtime,
    agent,
    llm,
    tool,
)
from jaxshare.serving.agents.backends import ScriptedModel
from jaxshare.serving.agents.journal import Journal, ReplayError
from jaxshare.serving.agents.search_log import SearchLog
from jaxshare.serving.chat import BrokenCall, ToolCall, tool_messages
from jaxshare.serving.chat import tool as described_tool

RAN: list[object] = []
"""The calls of the tools of this file."""


@pytest.fixture(autouse=True)
def ran():
    RAN.clear()
    return RAN


@dataclasses.dataclass
class Place:
    name: str
    height: float = 0.0


def weather(place: Place, days: int = 1) -> dict[str, int]:
    """The weather of a place."""
    RAN.append((place, days))
    return {place.name: days}


async def clock() -> str:
    """The time."""
    RAN.append("clock")
    await asyncio.sleep(0)
    return "noon"


def fails(text: str) -> str:
    """Fails."""
    RAN.append(text)
    raise KeyError(text)


def called(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


OSLO = called("weather", place={"name": "Oslo"}, days=2)
SCRIPT = {
    "Rain?": f"<think>\nHm.\n</think>\n\nI look.\n{OSLO}{called('clock')}",
    "noon": f"And: {called('fails', text='a')}",
    "fails has failed: KeyError": "It rains.",
}
TALK = (
    Message("user", "Rain?"),
    Message(
        "assistant",
        "I look.",
        "Hm.",
        (
            ToolCall("weather", {"place": {"name": "Oslo"}, "days": 2}, "call00001"),
            ToolCall("clock", {}, "call00002"),
        ),
    ),
    Message("tool", '{"Oslo": 2}', tool_call_id="call00001", name="weather"),
    Message("tool", "noon", tool_call_id="call00002", name="clock"),
    Message("assistant", "And:", None, (ToolCall("fails", {"text": "a"}, "call00003"),)),
    Message("tool", "fails has failed: KeyError: 'a'", tool_call_id="call00003", name="fails"),
    Message("assistant", "It rains."),
)


@agent
async def forecasts():
    text = await llm("Rain?", tools=[weather, clock, fails])
    return text, await llm("thanks")


def finished(what, *args, model=None, **options):
    return asyncio.run(Runtime(model, **options).run(what, *args))


def model(**more) -> ScriptedModel:
    return ScriptedModel({**SCRIPT, "thanks": "welcome", **more})


def test_calls_are_run_in_order_and_answered_up_to_an_answer_without():
    script = model()
    done = finished(forecasts, model=script)
    assert done.accepted.value == ("It rains.", "welcome")
    assert done.accepted.dialogue[:-2] == TALK
    assert [(Place("Oslo"), 2), "clock", "a"] == RAN
    # What the model is asked, each time, is the dialogue so far.
    assert [call.messages for call in script.calls[:3]] == [TALK[:1], TALK[:4], TALK[:6]]
    names = [[one.name for one in call.tools] for call in script.calls]
    assert names == [["weather", "clock", "fails"]] * 3 + [[]]
    assert len({call.seed for call in script.calls}) == 4 and done.calls == 4
    assert [state.waits_for for state in SearchLog.of(done.runtime).runs[0].states] == [
        *("begin", "llm", "tool", "tool", "llm", "tool", "llm", "llm", "end")
    ]


@agent
async def bounded(rounds):
    return await llm("Rain?", tools=[described_tool(weather)], rounds=rounds)


@pytest.mark.parametrize("rounds", [1, 3])
def test_rounds_are_bounded(rounds):
    turns = ScriptedModel({"Rain?": OSLO, "Oslo": OSLO})
    with pytest.raises(RoundsError, match="agent bounded: the model calls weather again after"):
        finished(bounded, rounds, model=turns)
    assert len(RAN) == rounds and len(turns.calls) == rounds + 1
    turns = ScriptedModel(
        {
            lambda call: len(call.messages) == 1 + 2 * rounds: "Rain.",
            lambda call: True: OSLO,
        }
    )
    assert finished(bounded, rounds, model=turns).accepted.value == "Rain."


def test_the_model_is_told_which_calls_cannot_be_run():
    wrong = called("weather", place="Oslo")
    turns = ScriptedModel({"Rain?": f"So {wrong}", "This call cannot be run": OSLO, "Oslo": "ok"})
    done = finished(bounded, 2, model=turns)
    assert done.accepted.value == "ok" and [(Place("Oslo"), 2)] == RAN
    _, said, told, *_ = done.accepted.dialogue
    assert said == Message("assistant", f"So {wrong}")
    assert told.role == "user" and "place: 'Oslo' is not of type 'object'" in told.content
    turns = ScriptedModel({"Rain?": wrong, "cannot be run": wrong})
    with pytest.raises(RoundsError, match="calls a tool again"):
        finished(bounded, 1, model=turns)
    # One beside calls that can be run stays in the content.
    turns = ScriptedModel({"Rain?": OSLO + wrong, "Oslo": "ok"})
    done = finished(bounded, 1, model=turns)
    assert [message.content for message in done.accepted.dialogue[1:3]] == [wrong, '{"Oslo": 2}']


@agent
async def runs_itself():
    said = await llm("Rain?", tools=[weather, clock, fails], run_tools=False)
    if not said.tool_calls:
        return said
    said.tool_calls[0].arguments["days"] = 3
    results = await tool(tool_messages, said, [weather, clock])
    return await llm(results, tools=[weather], run_tools=False)


def test_an_agent_may_run_calls_itself():
    done = finished(runs_itself, model=model(noon="Dry."))
    assert done.accepted.value == Message("assistant", "Dry.")
    assert RAN[0] == (Place("Oslo"), 3)
    # Its copy of the message is its own.
    assert done.accepted.dialogue[:2] == TALK[:2]
    assert done.accepted.dialogue[2] == dataclasses.replace(TALK[2], content='{"Oslo": 3}')
    done = finished(runs_itself, model=ScriptedModel({"Rain?": "<think>a</think>No."}))
    assert done.accepted.value == Message("assistant", "No.", "a")
    broken = ScriptedModel({"Rain?": "<tool_call>?</tool_call>"})
    assert finished(runs_itself, model=broken).accepted.value.content == "<tool_call>?</tool_call>"


@agent
async def thinks(n):
    return await llm("Rain?", run_tools=False, n=n)


def test_the_message_of_an_answer_has_its_thinking():
    script = ScriptedModel({"Rain?": ["<think>Hm.</think>No.", "Yes."]})
    no, yes = Message("assistant", "No.", "Hm."), Message("assistant", "Yes.")
    assert finished(thinks, None, model=script).accepted.value == no
    assert finished(thinks, 2, model=script).accepted.value == [no, yes]


@agent
async def several():
    return await llm("Rain?", tools=[weather, clock], run_tools=False, n=2)


def test_several_answers_have_their_calls(tmp_path):
    turns = ScriptedModel({"Rain?": ["No.", OSLO]})
    journal = Journal()
    done = finished(several, model=turns, journal=journal)
    expected = [
        Message("assistant", "No."),
        Message("assistant", "", None, TALK[1].tool_calls[:1]),
    ]
    assert done.accepted.value == expected and done.accepted.dialogue == TALK[:1]
    journal.save(tmp_path / "journal.json")
    again = Journal.load(tmp_path / "journal.json", strict=True)
    assert finished(several, journal=again).accepted.value == expected


def test_a_saved_journal_runs_no_tool_again(tmp_path):
    journal = Journal()
    first = finished(forecasts, model=model(), journal=journal)
    journal.save(tmp_path / "journal.json")
    count = len(RAN)
    again = Journal.load(tmp_path / "journal.json", strict=True)
    second = finished(forecasts, journal=again)
    assert second.accepted.value == first.accepted.value and len(RAN) == count
    assert second.accepted.dialogue == first.accepted.dialogue
    assert [state.path for state in second.states] == [state.path for state in first.states]


@pytest.mark.parametrize("kept", range(8))
def test_a_journal_that_ends_in_the_midst_goes_on_there(tmp_path, kept):
    """Whatever a run has saved when it is killed is neither asked for nor run again."""
    journal = Journal()
    first = finished(forecasts, model=model(), journal=journal)
    order = [*RAN]
    journal.save(tmp_path / "journal.json")
    data = json.loads((tmp_path / "journal.json").read_text(encoding="utf-8"))
    assert len(data["entries"]) == 7
    data["entries"] = data["entries"][:kept]
    (tmp_path / "journal.json").write_text(json.dumps(data), encoding="utf-8")
    RAN.clear()
    turns = model()
    second = finished(forecasts, model=turns, journal=Journal.load(tmp_path / "journal.json"))
    # The waits are: model, tool, tool, model, tool, model, model.
    asked, run = (
        sum(i not in (1, 2, 4) for i in range(kept)),
        sum(i in (1, 2, 4) for i in range(kept)),
    )
    assert order[run:] == RAN and len(turns.calls) == 4 - asked
    assert second.accepted.value == first.accepted.value
    assert second.accepted.dialogue == first.accepted.dialogue


@agent
async def asks_with(kind):
    more = {
        "none": {},
        "tool": {"tools": [clock]},
        "other": {"tools": [weather]},
        "given": {"tools": [clock], "run_tools": False},
        "variables": {"chat_template_kwargs": {"enable_thinking": False}},
        "type": {"returns": str},
        "other type": {"returns": Place},
    }[kind]
    await llm("x", **more)


def test_a_journal_knows_tools_types_and_variables():
    kinds = ["none", "tool", "other", "given", "variables", "type", "other type"]
    for kind in kinds:
        journal = Journal()
        answer = '{"name": "a"}' if kind == "other type" else '"a"'
        script = ScriptedModel({"x": answer})
        finished(asks_with, kind, model=script, journal=journal)
        journal.strict = True
        finished(asks_with, kind, journal=journal)
        for other in kinds:
            if other != kind:
                with pytest.raises(ReplayError, match="in the journal for an answer of the model"):
                    finished(asks_with, other, journal=journal)


@agent(supervisor=BestOfN(3, value=lambda state: len(state.dialogue)))
async def searched():
    return await llm("Rain?", tools=[weather, clock, fails])


def test_supervisors_search_among_calls():
    """Every round is a state: three paths of one start call the tools three times."""
    script = ScriptedModel({**SCRIPT, "Rain?": ["No.", f"{OSLO}{called('clock')}", "Perhaps."]})
    done = finished(searched, model=script)
    assert done.accepted.value == "It rains." and len(done.accepted.dialogue) == len(TALK)
    assert [(Place("Oslo"), 2), "clock", "a"] == RAN


@agent(supervisor=BestOfN(1, value=None, budget=Budget(calls=2)))
async def poor():
    return await llm("Rain?", tools=[weather, clock, fails])


def test_rounds_count_against_the_budget():
    with pytest.raises(BudgetError, match="2 calls"):
        finished(poor, model=model())
    assert len(RAN) == 3


def slow(seconds: float) -> str:
    """Sleeps."""
    time.sleep(seconds)
    return "woken"


@agent
async def hurries():
    return await llm("wait", tools=[slow], timeout=0.2)


def test_a_tool_that_hangs_is_given_up():
    script = ScriptedModel({"wait": called("slow", seconds=30), "slow has failed": "too slow"})
    done = finished(hurries, model=script)
    assert done.accepted.value == "too slow"
    told = done.accepted.dialogue[2].content
    assert told == "slow has failed: TimeoutError: the tool slow has not ended within 0.2 seconds"


@agent
async def parses():
    return await llm("Rain?", tools=[weather, clock, fails], parse=str.upper)


def test_the_last_answer_is_parsed():
    assert finished(parses, model=model()).accepted.value == "IT RAINS."


class Own:
    """A model of another kind, whose replies have ids and broken calls as they like."""

    def __init__(self, *replies: Reply):
        self.replies = [*replies]

    async def answer(self, call):
        return self.replies.pop(0)


def test_models_of_other_kinds_reply_with_calls():
    own = Own(
        Reply("", tool_calls=(ToolCall("clock", {}, ""), ToolCall("clock", {}, ""))),
        Reply("?", broken=(BrokenCall("?", "why"), BrokenCall("?", "how"))),
        Reply("noon"),
    )
    done = finished(asks_clock, model=own)
    calls, *results, broken, told, last = done.accepted.dialogue[1:]
    assert [call.id for call in calls.tool_calls] == ["call00001", "call00002"]
    assert [(one.tool_call_id, one.content) for one in results] == [
        ("call00001", "noon"),
        ("call00002", "noon"),
    ]
    assert broken == Message("assistant", "?") and last == Message("assistant", "noon")
    assert told.content == "This call cannot be run: why\nThis call cannot be run: how"


def test_a_call_of_what_is_not_offered_is_answered_or_left_out():
    own = Own(Reply("", tool_calls=(ToolCall("sum", {}, ""),)), Reply("noon"))
    done = finished(asks_clock, model=own)
    assert done.accepted.dialogue[2].content == (
        "sum has failed: LookupError: there is no such function; there are clock"
    )
    own = Own(Reply("a", tool_calls=(ToolCall("sum", {}, ""),), broken=(BrokenCall("?", "why"),)))
    done = finished(asks_with, "none", model=own)
    assert done.accepted.dialogue == (Message("user", "x"), Message("assistant", "a"))


@agent
async def asks_clock():
    return await llm("time?", tools=[clock])


DESCRIBED = {"name": "f", "parameters": {"type": "object"}}
BAD = [
    ({"tools": 3}, TypeError, "tools is 3; it must be a list"),
    ({"tools": [len]}, TypeError, "given by position"),
    ({"tools": [clock, clock]}, ValueError, "two tools have the name clock"),
    ({"tools": [DESCRIBED]}, ValueError, "the tool f has no function to run; give one, or run_"),
    ({"tools": [clock], "n": 2}, ValueError, "n is 2, and each answer would call tools"),
    ({"tools": [clock], "run_tools": False, "parse": int}, ValueError, "^parse makes the result"),
    ({"tools": [clock], "run_tools": False, "returns": int}, ValueError, "^returns makes the res"),
    ({"tools": [clock], "run_tools": 1}, TypeError, "run_tools is 1; it must be True or False"),
    ({"tools": [clock], "rounds": 0}, ValueError, "rounds is 0"),
    ({"tools": [clock], "rounds": "1"}, TypeError, "rounds is '1'"),
    ({"chat_template_kwargs": [1]}, TypeError, r"chat_template_kwargs is \[1\]; it must be a dict"),
    ({"returns": object}, TypeError, "returns is <class 'object'>: there is no JSON schema"),
    ({"returns": int, "parse": int}, ValueError, "parse and returns both make the result"),
]


@pytest.mark.parametrize(("options", "kind", "told"), BAD)
def test_bad_options_are_refused_at_once(options, kind, told):
    with pytest.raises(kind, match=told):
        llm("x", **options)


MESSAGES = [
    ({"role": "user", "content": 3}, "is no message: its role and its content have to be texts"),
    ({"role": "user", "content": None}, "is no message: its role and its content have to be"),
    ({"role": "user", "content": "a", "audio": 3}, "this has 'role', 'content', 'audio'"),
    ({"role": "tool", "content": "a", "name": 3}, "name of a message is 3; give a text"),
    ({"role": "user", "content": "a", "tool_calls": [{"name": "f"}]}, "tool_calls and the role us"),
    ({"role": "assistant", "content": "", "tool_calls": [{}]}, "has the call {}; give a function"),
    (
        Message("assistant", "", None, (ToolCall("f", {"a": {1, 2}}, ""),)),
        "a call of f has arguments that JSON does not have",
    ),
    (functools.partial(int), "is no message: give a text, a Message, or a dict"),
]


@pytest.mark.parametrize(("message", "told"), MESSAGES)
def test_bad_messages_are_refused_at_once(message, told):
    with pytest.raises(ValueError, match=told):
        llm([message])


def test_messages_may_be_in_the_form_of_templates():
    given = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
        ],
    }
    call = ToolCall("f", {"x": [1]}, "a")
    message = Message("assistant", "", "Hm.", (call,))
    assert llm([given]).messages == (message,) == llm(message).messages
    assert llm(message).messages[0].tool_calls[0].arguments is not call.arguments
    function = {"name": "f", "arguments": {"x": [1]}}
    assert message.as_dict() == given | {
        "content": "",
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }
