"""The watchdog over agents that never wait."""

import asyncio
import inspect
import logging
import re
import time

import pytest

from jaxshare.serving.agents import (
    AgentError,
    BestOfN,
    Runtime,
    agent,
    llm,
    spawn,
    tool,
)
from jaxshare.serving.agents.backends import ScriptedModel
from jaxshare.serving.agents.watchdog import Watchdog


def run(made, watchdog=0.02):
    return asyncio.run(Runtime(ScriptedModel({"": "ok"}), watchdog=watchdog).run(made))


def line_of(function, text):
    """The line of a file in which a function has a text."""
    lines, start = inspect.getsourcelines(function)
    return start + next(number for number, line in enumerate(lines) if text in line)


async def spins():
    await llm("begin")
    n = 0
    while True:
        n += 1
    await llm("never")


def helper():
    while True:
        sum(range(100))


async def spins_in_a_helper():
    await llm("begin")
    for _ in [1, 2]:
        helper()
    return "never"


async def spins_in_a_generator():
    await llm("begin")
    yield 1
    while True:
        pass


async def catches():
    await llm("begin")
    while True:
        try:
            while True:
                pass
        except Exception:
            pass


async def catches_everything_once():
    await llm("begin")
    try:
        while True:
            pass
    except BaseException:
        pass
    return await llm("after")


@pytest.mark.parametrize("restore", [None, "replay"])
@pytest.mark.parametrize(
    ("program", "text"),
    [
        (spins, r"n \+= 1|while True"),
        (spins_in_a_helper, "helper|while True|sum"),
        (catches, "pass|while True"),
        (catches_everything_once, "pass|while True"),
    ],
)
def test_code_that_never_waits_is_ended_with_its_line(program, text, restore, caplog):
    began = time.monotonic()
    with pytest.raises(AgentError) as raised, caplog.at_level(logging.WARNING):
        run(agent(restore=restore)(program))
    assert 0.15 < time.monotonic() - began < 20
    message = str(raised.value)
    found = re.fullmatch(
        rf"agent {program.__name__} in line (\d+) of {re.escape(__file__)} was ended after "
        r"([\d.]+) seconds without waiting; await something in its loops, or make a tool of what "
        "takes long, or give the runtime a larger `watchdog`",
        message,
    )
    assert found and float(found[2]) >= 0.2
    with open(__file__) as file:
        assert re.search(text, file.read().splitlines()[int(found[1]) - 1])
    [warned] = [record.getMessage() for record in caplog.records]
    assert re.match(
        rf"agent {program.__name__} in line \d+ of {re.escape(__file__)} has run for 0\.0\d+ "
        "seconds without waiting, and everything else waits for it; await something",
        warned,
    ), warned


def test_the_error_is_that_of_the_path_and_other_paths_go_on():
    @agent(supervisor=BestOfN(3, value=lambda state: 1.0))
    async def works():
        said = await llm("which?")
        while said == "bad":
            pass
        return said

    model = ScriptedModel({"which?": ["bad", "good", "good"]})
    done = asyncio.run(Runtime(model, watchdog=0.02).run(works))
    assert done.accepted.value == "good"
    [failed] = [state for state in done.states if state.error]
    line = line_of(works.function, "while said")
    assert isinstance(failed.error, AgentError)
    assert re.search(rf"in line {line}|in line {line + 1}", str(failed.error))


def test_a_child_that_never_waits_names_itself_and_its_parent():
    made = agent(spins_in_a_generator)

    @agent
    async def parent():
        child = spawn(made)
        assert await child.next() == 1
        child.resume()
        return await child

    with pytest.raises(AgentError, match=r"agent spins_in_a_generator in line") as raised:
        run(parent)
    assert any("spawned by parent in line" in note for note in raised.value.__notes__)


def test_code_in_c_is_warned_of_and_ended_when_it_comes_back(caplog):
    @agent
    async def sleeps():
        time.sleep(0.5)
        return await llm("after")

    with pytest.raises(AgentError, match="without waiting"), caplog.at_level(logging.WARNING):
        run(sleeps)
    assert f"in line {line_of(sleeps.function, 'time.sleep')} of" in caplog.text


def test_agents_that_wait_are_left_alone(caplog):
    @agent(supervisor=BestOfN(2, value=lambda state: 1.0))
    async def waits():
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            await tool(len, "")
            await llm("again")
            time.sleep(0.001)
        await tool(time.sleep, 0.3)
        return "done"

    with caplog.at_level(logging.WARNING):
        assert run(waits, watchdog=0.1).accepted.value == "done"
        time.sleep(0.1)
    assert not caplog.records


def test_without_a_watchdog_nothing_is_ended(caplog):
    @agent
    async def sleeps():
        time.sleep(0.1)
        return "done"

    assert run(sleeps, watchdog=None).accepted.value == "done" and not caplog.records


# A destructor that happens to run swallows the error, which comes again later.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_path_that_is_ended_late_leaves_the_runtime_as_it_was():
    """The error comes at any moment, such as when the code has just come to its wait."""
    for late in range(30):

        @agent
        async def spins_a_little(until):
            while time.monotonic() < until:
                pass
            return await llm("after")

        seconds = 0.03 + late * 0.0005
        try:
            done = asyncio.run(
                Runtime(ScriptedModel({"": "ok"}), watchdog=0.003).run(
                    spins_a_little, time.monotonic() + seconds
                )
            )
            assert done.accepted.value == "ok"
        except AgentError as error:
            assert "without waiting" in str(error)


@pytest.mark.parametrize("watchdog", [0, -1, "soon", float("nan")])
def test_bad_seconds(watchdog):
    with pytest.raises((ValueError, TypeError), match="watchdog"):
        Watchdog(watchdog)
