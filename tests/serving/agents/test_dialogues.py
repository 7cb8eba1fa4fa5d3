"""Dialogues as values, against the same programs run by Python with lists of texts.

The model's answer depends on every message of the dialogue and on the index of the firing, so that
a path whose dialogues are not its own ends with another value than its native run.
"""

import asyncio
import contextvars
import copy
import hashlib
import pickle
from typing import Any

import pytest

from jaxshare.serving import agents
from jaxshare.serving.agents import (
    BestOfN,
    Dialogue,
    Judged,
    Message,
    Reply,
    Runtime,
    SelfRefine,
    TreeOfThoughts,
    agent,
    current_dialogue,
    first,
    gather,
    spawn,
    tool,
)
from jaxshare.serving.agents.backends import ScriptedModel
from jaxshare.serving.agents.journal import Journal
from tests.serving.agents.test_children import Each, paths_of

_NATIVE: contextvars.ContextVar[Any] = contextvars.ContextVar("native", default=None)
"""(branches of the calls to come, the own dialogue) in a native run."""


def answer(messages: list[tuple[str, str]], branch: int, number: int = 0) -> str:
    """A number for a dialogue, a firing, and an answer among several."""
    digest = hashlib.blake2b(f"{messages} {branch} {number}".encode(), digest_size=4).digest()
    return str(int.from_bytes(digest) % 10_000)


class Model:
    """Answers by the whole dialogue, the index of the firing and the seed's number."""

    def __init__(self):
        self.calls, self.seeds = [], {}

    async def answer(self, call: Any) -> Reply:
        self.calls.append(call)
        seeds = self.seeds.setdefault((call.run, call.state), [])
        if call.seed not in seeds:
            seeds.append(call.seed)
        messages = [(one.role, one.content) for one in call.messages]
        return Reply(answer(messages, call.state[-1], seeds.index(call.seed)))


class Listed(list):
    """A dialogue of a native run: (role, text) pairs."""

    def fork(self):
        return Listed(self)

    def append(self, text):
        super().append(("user", text))

    def drop(self, part):
        del self[part]

    def replace(self, part, text):
        self[part if isinstance(part, slice) else slice(part, part + 1)] = [("user", text)]

    def choose(self, text):
        super().append(("assistant", text))

    async def summarise(self, part):
        start, stop, _ = part.indices(len(self))
        text = await Asked("short?", Listed(self[:stop]), None)
        self[start:stop] = [("user", text)]


class Asked:
    def __init__(self, text, dialogue, n):
        self.text, self.dialogue, self.n = text, dialogue, n

    def __await__(self):
        return (yield self)


def llm(text: str = "", dialogue: Any = None, n: int | None = None) -> Any:
    if _NATIVE.get() is None:
        return agents.llm(text or (), dialogue=dialogue, n=n)
    return Asked(text, dialogue, n)


def new(*texts: str) -> Any:
    if _NATIVE.get() is None:
        return Dialogue([Message("user", text) for text in texts])
    return Listed(("user", text) for text in texts)


def own() -> Any:
    return current_dialogue() if _NATIVE.get() is None else _NATIVE.get()[1]


def shorten(dialogue: Any, part: slice) -> Any:
    if _NATIVE.get() is None:
        return dialogue.summarise(part, ask="short?")
    return dialogue.summarise(part)


def texts(dialogue: Any) -> list[str]:
    return [one[1] if isinstance(one, tuple) else one.content for one in dialogue]


def native(function: Any, branches: list[int]) -> Any:
    """The value of a program run by Python, whose calls of the model get these branches."""

    def run() -> Any:
        mine = Listed()
        _NATIVE.set((branches, mine))
        coroutine, value = function(), None
        try:
            while True:
                asked = coroutine.send(value)
                talk = mine if asked.dialogue is None else asked.dialogue
                if asked.text:
                    talk.append(asked.text)
                branch = branches.pop(0)
                if asked.n is None:
                    value = answer([*talk], branch)
                    talk.choose(value)
                else:
                    value = [answer([*talk], branch, k) for k in range(asked.n)]
        except StopIteration as end:
            return end.value

    return contextvars.Context().run(run)


# Programs.


async def two_dialogues():
    one, two = new("be brief"), new()
    for turn in range(2):
        await llm(f"one {turn}", dialogue=one)
        await llm(f"two {turn}", dialogue=two)
        await llm(f"own {turn}")
    return texts(one), texts(two), texts(own())


async def forks():
    base = new("task")
    await llm("plan", dialogue=base)
    left, right = base.fork(), base.fork()
    await llm("left", dialogue=left)
    right.append(await llm(dialogue=left))
    await llm("right", dialogue=right)
    return texts(base), texts(left), texts(right)


async def edits():
    talk = new("a", "b", "c")
    await llm("first", dialogue=talk)
    talk.drop(0)
    talk.replace(1, "C")
    await llm("second", dialogue=talk)
    talk.drop(slice(0, 2))
    talk.replace(slice(1, 1), "between")
    await llm("third", dialogue=talk)
    return texts(talk)


async def chooses():
    talk = new("task")
    answers = await llm("propose", dialogue=talk, n=3)
    other = talk.fork()
    talk.choose(answers[1])
    other.choose(answers[2])
    await llm("go on", dialogue=talk)
    await llm("go on", dialogue=other)
    return answers, texts(talk), texts(other)


async def shares():
    talk = new("task")
    held = {"first": talk, "all": [talk, talk.fork()]}
    await llm("one", dialogue=held["all"][0])
    held["all"][1].append("other")
    await llm("two", dialogue=held["all"][1])
    return texts(talk), texts(held["first"]), texts(held["all"][1]), held["first"] is talk


async def edits_its_own():
    await llm("one")
    mine = own()
    await llm("two")
    mine.drop(slice(0, 2))
    await llm("three")
    mine.append("noted")
    await llm()
    return texts(mine), len(own()), mine is own()


async def chooses_in_its_own():
    await llm("one")
    answers = await llm("propose", dialogue=own(), n=2)
    own().choose(max(answers))
    await llm("go on")
    return texts(own())


async def summarises():
    for turn in range(2):
        await llm(f"turn {turn}")
    await shorten(own(), slice(0, 3))
    await llm("after")
    return texts(own())


async def asked_by_a_helper():
    async def helper(dialogue):
        dialogue.append("from the helper")
        said = await llm("in the helper", dialogue=dialogue)
        own().append(said)
        return await llm("again", dialogue=dialogue)

    talk = new("task")
    await llm("first")
    await helper(talk)
    await llm("last")
    return texts(talk), texts(own())


PROGRAMS = [
    two_dialogues,
    forks,
    edits,
    chooses,
    shares,
    edits_its_own,
    chooses_in_its_own,
    summarises,
    asked_by_a_helper,
]


def run(made: Any, model: Any = None, **options: Any) -> Any:
    return asyncio.run(Runtime(model or Model(), **options).run(made))


@pytest.mark.parametrize("restore", [None, "replay"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_path_has_dialogues_of_its_own(program, late, restore):
    done = run(agent(restore=restore)(program).under(Each(2, late)))
    paths = paths_of(done)
    assert len(paths) >= 4 and len({tuple(branches) for branches, _ in paths}) == len(paths)
    for branches, state in paths:
        assert state.error is None, (branches, repr(state.error))
        assert state.value == native(program, [*branches]), branches


def test_paths_are_restored_by_copies_where_there_can_be_some():
    done = run(agent(edits).under(Each(2)))
    assert {state.restored for state in done.states} == {"", "original", "copy"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_journal_replays_dialogues(program, tmp_path):
    journal = Journal()
    done = run(agent(program).under(Each(2)), journal=journal)
    journal.save(tmp_path / "run.json")
    loaded = Journal.load(tmp_path / "run.json", strict=True)
    again = asyncio.run(Runtime(None, journal=loaded).run(agent(program).under(Each(2))))
    assert [(state.path, state.value, state.dialogue) for state in again.states] == [
        (state.path, state.value, state.dialogue) for state in done.states
    ]


def test_an_entry_has_the_messages_of_its_answer(tmp_path):
    journal = Journal()
    run(agent(chooses), journal=journal)
    journal.save(tmp_path / "run.json")
    written = (tmp_path / "run.json").read_text()
    assert written.count("propose") == 1 and written.count("go on") == 2

    async def chooses_again():
        talk = new("another task")
        await llm("propose", dialogue=talk, n=3)

    chooses_again.__name__ = "chooses"
    with pytest.raises(LookupError, match="in the journal for"):
        run(agent(chooses_again), journal=Journal.load(tmp_path / "run.json", strict=True))


# Waits for several.


async def _gathers(talks):
    said = await gather(
        agents.llm("one", dialogue=talks[0]),
        tool(len, "ab"),
        agents.wait_for(agents.llm("two", dialogue=talks[1]), 60),
        agents.llm("own"),
        agents.llm("three", dialogue=talks[2], n=2),
    )
    return said, [texts(talk) for talk in talks], texts(current_dialogue())


@pytest.mark.parametrize("restore", [None, "copy", "replay"])
def test_each_part_of_a_wait_continues_its_own_dialogue(restore):
    @agent(supervisor=Each(2), restore=restore)
    async def gathers():
        talks = [Dialogue("a"), Dialogue("b"), Dialogue("c")]
        said, seen, mine = await _gathers(talks) if restore != "copy" else (None, None, None)
        if restore == "copy":
            said = await gather(
                agents.llm("one", dialogue=talks[0]),
                tool(len, "ab"),
                agents.llm("two", dialogue=talks[1]),
                agents.llm("own"),
                agents.llm("three", dialogue=talks[2], n=2),
            )
            seen, mine = [texts(talk) for talk in talks], texts(current_dialogue())
        talks[2].choose(said[4][1])
        return said, seen, mine, texts(talks[2])

    states = [state for state in run(gathers).states if state.ended]
    assert len(states) == 2
    for state in states:
        assert state.error is None, repr(state.error)
        (one, two, three, _, [four, five]), seen, mine, chosen = state.value
        assert two == 2 and mine == []
        assert seen == [["a", "one", one], ["b", "two", three], ["c", "three"]]
        assert chosen == ["c", "three", five] and four != five
    assert states[0].value[0] != states[1].value[0]


def test_first_continues_the_dialogue_of_the_first_alone():
    @agent
    async def asks():
        slow, fast = Dialogue("slow"), Dialogue("fast")
        found = await first(agents.llm("wait", dialogue=slow), agents.llm("no wait", dialogue=fast))
        return found.index, found.value, len(slow), texts(fast)

    model = ScriptedModel(
        {"no wait": "quick", "wait": "late"},
        delay=lambda call: 30.0 if call.messages[0].content == "slow" else 0.0,
    )
    assert run(asks, model).accepted.value == (1, "quick", 1, ["fast", "no wait", "quick"])


# Tools, types and errors.


def test_calls_of_tools_are_part_of_the_dialogue_that_is_asked_in():
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"rain in {city}"

    @agent(supervisor=Each(2))
    async def asks():
        await agents.llm("hello")
        talk = Dialogue({"role": "system", "content": "be brief"})
        said = await agents.llm("weather in Oslo?", dialogue=talk, tools=[weather])
        return said, [*talk], [*current_dialogue()]

    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    model = ScriptedModel({"hello": "hi", "weather in": call, "rain in": "It rains."})
    for state in run(asks, model).states:
        if state.ended:
            said, talk, mine = state.value
            assert said == "It rains." and texts(mine) == ["hello", "hi"]
            assert [one.role for one in talk] == [
                "system",
                "user",
                "assistant",
                "tool",
                "assistant",
            ]
            assert talk[3].content == "rain in Oslo" and talk[4].content == "It rains."


def test_one_of_several_parsed_answers_is_chosen_by_its_value():
    @agent
    async def asks():
        talk = Dialogue("task")
        numbers = await agents.llm("number?", dialogue=talk, n=2, parse=lambda text: int(text[3:]))
        talk.choose(max(numbers))
        return numbers, texts(talk)

    value = run(asks, ScriptedModel({"number?": ["n: 4", "n: 7"]})).accepted.value
    assert value[1] == ["task", "number?", "n: 7"] and sorted(value[0]) == [4, 7]


def test_an_answer_that_fails_leaves_the_dialogue_as_it_was():
    @agent
    async def asks():
        talk = Dialogue("task")
        try:
            await agents.llm("number?", dialogue=talk, parse=int)
        except ValueError:
            return texts(talk)

    assert run(asks, ScriptedModel({"number?": "none"})).accepted.value == ["task"]


def test_a_judge_sees_the_dialogue_that_the_agent_works_in():
    seen = []

    def value(state):
        seen.append((texts(state.dialogue), texts(Judged.of(state).dialogue)))
        return 1.0

    @agent(supervisor=TreeOfThoughts(1, 1, value=value))
    async def works():
        talk = Dialogue("base")
        await agents.llm("one")
        await agents.llm("two", dialogue=talk)
        await tool(len, "")
        await agents.llm("three", dialogue=talk)
        await agents.llm("four")

    run(works, ScriptedModel({"one": "1", "two": "2", "three": "3", "four": "4"}))
    assert (
        [state for state, _ in seen]
        == [judged for _, judged in seen]
        == [
            ["base"],
            ["base", "two", "2"],
            ["one", "1"],
            ["one", "1", "four", "4"],
        ]
    )


def test_feedback_continues_the_dialogue_that_the_round_worked_in():
    @agent(supervisor=SelfRefine(lambda state: "shorter", value=lambda state: 0.0, rounds=2))
    async def writes():
        mine = current_dialogue()
        if not mine:
            mine.append("write")
        return await agents.llm(dialogue=mine)

    model = ScriptedModel({"write": "long text", "shorter": "text"})
    run(writes, model)
    assert texts(model.calls[1].messages) == ["write", "long text", "shorter"]


def test_an_agent_that_is_given_a_dialogue_gets_a_copy():
    @agent
    async def child(talk):
        await agents.llm("in the child", dialogue=talk)
        yield talk
        await agents.llm("again", dialogue=talk)
        yield talk

    @agent
    async def parent():
        talk = Dialogue("task")
        await agents.llm("in the parent", dialogue=talk)
        made = spawn(child, talk)
        given = await made.next()
        await agents.llm("given", dialogue=given)
        return texts(talk), texts(given), texts(await made.next())

    model = ScriptedModel({"in the": "done", "again": "twice", "given": "taken"})
    mine, given, last = run(parent, model).accepted.value
    assert mine == ["task", "in the parent", "done"]
    assert given == [*mine, "in the child", "done", "given", "taken"]
    assert last == [*mine, "in the child", "done", "again", "twice"]


SHARED = {}


def test_a_dialogue_of_another_agent_is_an_error():
    @agent
    async def child():
        await agents.llm("mine?", dialogue=SHARED["talk"])

    @agent
    async def parent():
        SHARED["talk"] = Dialogue()
        await agents.llm("mine", dialogue=SHARED["talk"])
        await spawn(child)

    with pytest.raises(ValueError, match="agent child asks in a dialogue of agent parent; give"):
        run(parent)


def test_an_agent_summarises_a_part():
    @agent
    async def summary(part):
        assert isinstance(part, Dialogue)
        return await agents.llm(f"shorten {len(part)}: {part[0].content}", temperature=0.0)

    @agent
    async def works():
        mine = current_dialogue()
        mine.append({"role": "system", "content": "be brief"})
        for turn in range(3):
            await agents.llm(f"turn {turn}")
        said = await mine.summarise(slice(1, -2), by=summary)
        assert said == "so far" and len(mine) == 4
        text = await mine.summarise(max_new_tokens=7)
        return text, [*mine]

    model = ScriptedModel({"shorten 4: turn 0": "so far", "turn": "ok", "Summarise the": "all"})
    text, mine = run(works, model).accepted.value
    assert text == "all" and texts(mine) == ["be brief", "all"]
    last = model.calls[-1]
    assert texts(last.messages[:-1]) == ["be brief", "so far", "turn 2", "ok"]
    assert "the dialogue above" in last.messages[-1].content and last.options.max_new_tokens == 7


def test_dialogues_are_lists_of_messages():
    talk = Dialogue(["a", Message("user", "b")][1])
    talk.append([{"role": "system", "content": "s"}, Message("assistant", "x")])
    assert len(talk) == 3 and talk[-1] == Message("assistant", "x")
    assert talk[1:] == Dialogue(talk[1:]) != talk and [one.role for one in talk[:2]] == [
        "user",
        "system",
    ]
    assert Message("user", "b") in talk and talk.index(talk[1]) == 1
    part = talk[:1]
    part.append("more")
    assert len(talk) == 3 and len(part) == 2
    assert pickle.loads(pickle.dumps(talk)) == copy.deepcopy(talk) == talk
    assert eval(repr(talk)) == talk


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda d: d.drop(2), IndexError, "no message 2 in a dialogue of 2; count from 0"),
        (lambda d: d.replace(-3, "x"), IndexError, "no message -3 in a dialogue of 2"),
        (lambda d: d[5], IndexError, "no message 5 in a dialogue of 2"),
        (lambda d: d.drop(slice(0, 2, 2)), ValueError, "the step 2; leave it out"),
        (lambda d: d.append({"role": "wizard", "content": ""}), ValueError, "'wizard'; there are"),
        (lambda d: d.append(7), TypeError, "content"),
        (lambda d: d.choose("x"), ValueError, "'x' is none of the 0 answers to choose from; give"),
        (lambda d: agents.llm("x", dialogue=[*d]), TypeError, "give a Dialogue"),
        (
            lambda d: gather(agents.llm("x", dialogue=d), agents.llm("y", dialogue=d)),
            ValueError,
            "in the same dialogue; give one of them a fork",
        ),
        (lambda d: d.summarise(slice(1, 1)).send(None), ValueError, "nothing to summarise in"),
        (lambda d: current_dialogue(), RuntimeError, "for the code of an agent"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call(Dialogue([Message("user", "a"), Message("user", "b")]))


def test_an_answer_cannot_be_chosen_after_an_edit():
    @agent(supervisor=BestOfN(2, value=lambda state: 1.0))
    async def asks():
        talk = Dialogue("task")
        answers = await agents.llm("two", dialogue=talk, n=2)
        talk.append("more")
        talk.choose(answers[0])

    with pytest.raises(ValueError, match="before any edit"):
        run(asks)
