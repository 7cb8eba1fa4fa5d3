"""Errors of paths that are ended: seen in the log and in the trace, and of no effect on the run."""

import asyncio
import contextlib
import inspect
import logging

import pytest

from jaxshare.serving.agents import (
    AgentError,
    Reply,
    Runtime,
    TreeOfThoughts,
    agent,
    llm,
    spawn,
    tidying,
    tool,
)
from jaxshare.serving.agents.search_log import SearchLog


class Model:
    async def answer(self, call):
        return Reply(str(call.state[-1]))


async def fails(value):
    raise ValueError(f"the tool fails at {value}")


async def hangs():
    await asyncio.sleep(60)


async def one():
    yield 1


@agent
async def raises_at_once():
    try:
        return await llm("a"), await llm("b")
    finally:
        raise LookupError("at once")


@agent
async def raises_in_python():
    async for _ in one():
        try:
            return await llm("a"), await llm("b")
        finally:
            raise LookupError("in Python")


@agent
async def raises_after_a_tool():
    try:
        return await llm("a"), await llm("b")
    finally:
        await tool(fails, 1)


@agent
async def asks_the_model():
    try:
        return await llm("a"), await llm("b")
    finally:
        await llm("c")


@agent
async def takes_too_long():
    try:
        return await llm("a"), await llm("b")
    finally:
        await tool(hangs)


@agent
async def is_tidy():
    try:
        return await llm("a"), await llm("b")
    finally:
        await asyncio.sleep(0)


PROGRAMS = {
    raises_at_once: ("LookupError('at once')", "raise LookupError"),
    raises_in_python: ("LookupError('in Python')", "raise LookupError"),
    raises_after_a_tool: ("ValueError('the tool fails at 1')", "await tool(fails"),
    asks_the_model: ("EndedError('an agent that is being ended can await tools", 'llm("c")'),
    takes_too_long: ("TimeoutError('it has not ended within 0.05 seconds')", 'llm("b")'),
    is_tidy: ("", ""),
}


def line_of(program, text):
    lines, first = inspect.getsourcelines(program.function)
    return first + next(number for number, line in enumerate(lines) if text in line)


@agent
async def leads(program):
    child = spawn(program)
    said = await llm("x")
    return said if child else None


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_an_error_at_the_end_of_a_child_is_seen(program, caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(tidying, "SECONDS", 0.05)

    class Slow(Model):
        async def answer(self, call):
            if call.messages[-1].content == "b":
                await asyncio.sleep(60)
            elif call.agent == "leads":
                await asyncio.sleep(0.01)  # the child has come to its second wait
            return await super().answer(call)

    runtime = Runtime(Slow())
    with caplog.at_level(logging.WARNING, logger="jaxshare.agents"):
        done = asyncio.run(runtime.run(leads, program))
    assert done.accepted is not None and done.accepted.value == "0"
    check_seen(program, runtime, caplog, int(program is not is_tidy), tmp_path)


def check_seen(program, runtime, caplog, count, tmp_path):
    error, text = PROGRAMS[program]
    warnings = [record.getMessage() for record in caplog.records]
    SearchLog.of(runtime).save(tmp_path / "trace.json")
    runs = SearchLog.load(tmp_path / "trace.json").runs
    logged = [state.end_error for run in runs for state in run.states if state.end_error]
    assert len(warnings) == len(logged) == count
    for warning in warnings:
        assert warning.startswith(f"agent {program.name} was ended where it waits in line")
        assert error in warning and f"in line {line_of(program, text)}; nothing" in warning
    assert all(each.startswith(error) for each in logged)


@pytest.mark.parametrize("program", [raises_at_once, raises_in_python, is_tidy])
def test_an_error_at_the_end_of_a_losing_path_is_seen(program, caplog, tmp_path):
    searching = TreeOfThoughts(3, 1, lambda state: -float(sum(state.path)))
    runtime = Runtime(Model())

    with (
        caplog.at_level(logging.WARNING, logger="jaxshare.agents"),
        # The paths that go on raise it as well.
        contextlib.nullcontext() if program is is_tidy else pytest.raises(AgentError),
    ):
        asyncio.run(runtime.run(program.under(searching)))
    check_seen(program, runtime, caplog, 2 * (program is not is_tidy), tmp_path)
