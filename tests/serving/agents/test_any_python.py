"""Agents of any Python against native coroutines, straight on and with every state fired again."""

import asyncio
import copy
import itertools

import pytest

from jaxshare.serving.agents import (
    DivergedError,
    RefusedError,
    Reply,
    Runtime,
    UncopyableError,
    agent,
    llm,
    spawn,
    tool,
)
from jaxshare.serving.agents.compiler import program
from jaxshare.serving.agents.journal import Journal
from tests.helpers import mostly_slow
from tests.serving.agents import more_programs, python_programs
from tests.serving.agents.python_oracle import Again, as_agent, copy_some, differences

assert more_programs  # it adds to the programs
PROGRAMS = python_programs.PROGRAMS
NAMED = {function.__name__: (function, arguments) for function, arguments in PROGRAMS}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")


@pytest.mark.parametrize("restore", [None, "replay"])
@pytest.mark.parametrize("name", NAMED)
def test_an_agent_is_what_python_runs(name, restore):
    found, again = differences(*NAMED[name], restore)
    assert again >= 1
    assert not found, "\n".join(found)


@pytest.mark.parametrize("every", mostly_slow([2, None, 3]))
@pytest.mark.parametrize("name", NAMED)
def test_an_agent_is_kept_by_copies_of_some_of_its_states(name, every, monkeypatch):
    copy_some(monkeypatch, every)
    found, _ = differences(*NAMED[name])
    assert not found, "\n".join(found)


def restored(name, restore=None):
    """How the states of a program were restored for their second firings."""
    function, arguments = NAMED[name]
    _, states = as_agent(function, arguments(), True, restore)
    found = set()
    for state in states.values():
        while state.parent is not None:
            if state.path[-1]:
                found.add(state.restored)
            elif not any(state.path):
                assert state.restored == "original"
            state = state.parent
    return found


def test_a_shallow_copier_is_found(monkeypatch):
    assert len(NAMED) == len(PROGRAMS) >= 150
    copied = [name for name in NAMED if "copy" in restored(name)]
    monkeypatch.setattr(program, "duplicate", lambda value, memo: copy.copy(value))
    wrong = [name for name in copied if differences(*NAMED[name])[0]]
    assert len(copied) >= len(NAMED) / 2
    assert len(wrong) >= len(copied) - 9  # for so few a shallow copy does, too


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("planner", "copy"),
        ("cyclic_objects", "copy"),
        ("bound_builtins_inside", "copy"),
        ("generators", "replay"),
        ("databases", "replay"),
        ("helper_asks", "replay"),
        ("async_with", "replay"),
        ("weak_references", "replay"),
        ("factories", "replay"),
        ("local_class_with_state", "replay"),
    ],
)
def test_a_state_is_copied_where_that_is_exact_and_replayed_elsewhere(name, how):
    assert restored(name) == {how}
    assert restored(name, "replay") == {"replay"}


class Model:
    """Answers with the prompt and the number of the firing; counts its calls."""

    def __init__(self):
        self.calls = 0

    async def answer(self, call):
        self.calls += 1
        return Reply(f"{call.messages[-1].content}{call.state[-1]}")


def ended(made, *args, **options):
    """The last states of an agent whose states are fired twice, in the order of the tree."""

    async def go():
        runtime = Runtime(options.pop("model", None) or Model(), **options)
        try:
            await runtime.run(made, *args)
        except Exception:
            assert runtime.runs[0].done
        return runtime.runs[0]

    run = asyncio.run(go())
    return sorted(run.supervisor.ended, key=lambda state: state.path), run


TURNS = itertools.count()


@agent(supervisor=Again(late=True))
async def depends_on_the_outside():
    async for turn in one_turn():
        await llm(f"turn {turn}")
    await llm("end")


async def one_turn():
    yield next(TURNS)


def test_a_program_that_diverges_from_its_record_is_named():
    states, _ = ended(depends_on_the_outside)
    assert states[0].error is None
    assert all(isinstance(state.error, DivergedError) for state in states[1:])
    words = str(states[1].error)
    assert words.startswith("agent depends_on_the_outside was run again to restore a state")
    assert "it waits in line" in words and "in its record it waits in line" in words
    assert "llm('turn 0')" in words and ("llm('turn 1')" in words or "llm('turn 2')" in words)
    assert words.endswith("make that a tool")


@agent(supervisor=Again(late=True))
async def takes_an_iterator(numbers):
    first = next(numbers)
    return first, await llm("a"), list(numbers)


@agent(supervisor=Again(late=True))
async def waits_for_asyncio():
    async with asyncio.Lock():
        await asyncio.sleep(0)
        return await llm("a")


@pytest.mark.parametrize(
    ("made", "args", "words"),
    [
        (takes_an_iterator, lambda: [n for n in "ab"], "make a list of an iterator"),
        (waits_for_asyncio, None, "make it a tool"),
    ],
)
def test_what_cannot_be_fired_again_says_why_and_runs_once(made, args, words):
    arguments = () if args is None else ((each for each in args()),)
    states, _ = ended(made, *arguments)
    assert states[0].finished
    assert isinstance(states[1].error, UncopyableError) and words in str(states[1].error)


def test_copies_alone_can_be_demanded():
    with pytest.raises(RefusedError, match="async for"):
        agent(restore="copy")(NAMED["async_for"][0])
    with pytest.raises(ValueError, match="restore is 'never'; give 'copy', 'replay' or None"):
        agent(restore="never")  # pyright: ignore[reportArgumentType, reportCallIssue]
    _, states = as_agent(*_called("helper_asks"), True, "copy")
    again = [state for state in states.values() if state.error is not None]
    assert again and all("in a coroutine, which cannot be copied" in str(s.error) for s in again)


def _called(name):
    function, arguments = NAMED[name]
    return function, arguments()


@agent
async def worker(text):
    return await llm(text)


@agent(supervisor=Again(late=True))
async def leads():
    children = []
    async for name in names():
        children.append(spawn(worker, name))
    done = [await child for child in children]
    return done, await llm("sum"), await tool(len, done)


async def names():
    for name in "ab":
        yield name


def test_a_replay_meets_the_children_that_were_spawned():
    model = Model()
    states, run = ended(leads, model=model)
    assert [state.value for state in states] == [
        (["a0", "b0"], "sum0", 2),
        (["a0", "b0"], "sum1", 2),
    ]
    assert [state.restored for state in states] == ["original"] * 2
    assert len(run.children) == 2 and model.calls == 4


@agent(supervisor=Again(late=True))
async def helped():
    return await ask("a"), await ask("b")


async def ask(text):
    await asyncio.sleep(0)
    return await llm(text)


def test_a_journal_has_what_helpers_ask():
    model, journal = Model(), Journal()
    first, _ = ended(helped, model=model, journal=journal)
    assert first[0].value == ("a0", "b0") and model.calls >= 2
    calls = model.calls
    again, _ = ended(helped, model=model, journal=journal)
    assert [(s.path, s.value) for s in again] == [(s.path, s.value) for s in first]
    assert model.calls == calls


LEFT: list[str] = []


@agent
async def leaves():
    async for _ in names():
        try:
            await llm("forever")
        finally:
            LEFT.append("tidied up")


@agent
async def does_not_wait():
    spawn(leaves)
    return await llm("end")


class SlowModel(Model):
    async def answer(self, call):
        if call.agent == "leaves":
            await asyncio.sleep(60)
        return await super().answer(call)


def test_a_child_that_is_ended_runs_its_finally():
    LEFT.clear()

    async def go():
        return (await Runtime(SlowModel()).run(does_not_wait)).accepted

    accepted = asyncio.run(go())
    assert accepted is not None and accepted.value == "end0" and LEFT == ["tidied up"]
