"""Tools that hang, or return more than a dialogue or a journal can keep."""

import functools
import time
import tracemalloc

import numpy as np
import pytest

from jaxshare.serving.agents import agent, llm, run, tool
from jaxshare.serving.agents.backends import ScriptedModel
from jaxshare.serving.agents.result_sizes import ResultError
from jaxshare.serving.chat import FunctionTool, as_tools

MODEL = ScriptedModel({})


GIGABYTE = bytes(2**30)
"""Zeros, which take no memory before they are written."""


def read() -> bytes:
    """Reads everything."""
    return GIGABYTE


def hang() -> str:
    """Hangs."""
    time.sleep(60)
    return ""


async def wait(seconds: float) -> str:
    """Waits.

    Args:
      seconds: at most 5.
    """
    return f"{seconds:g} s"


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@agent
async def use(function, most_bytes=2**28):
    return await tool(function, most_bytes=most_bytes)


@agent
async def ask(question, tools, timeout=None, most_characters=200_000):
    return await llm(question, tools=tools, timeout=timeout, most_characters=most_characters)


def test_a_gigabyte_does_not_come_into_an_agent():
    tracemalloc.start()
    try:
        with pytest.raises(ResultError, match="the tool read has returned more than 268,435,456 b"):
            run(use, read, model=MODEL)
        assert tracemalloc.get_traced_memory()[1] < 2**24  # no copy of it was made
    finally:
        tracemalloc.stop()


def test_a_gigabyte_does_not_come_into_a_dialogue():
    told = (
        "read has failed: ResultError: the tool read has returned more than 268,435,456 bytes, which "
        "states and journals would keep; return less, such as the path of a file, or give tool a "
        "larger most_bytes"
    )
    model = ScriptedModel({"Read": call("read"), told: "Too much."})
    assert run(ask, "Read", [read], model=model) == "Too much."


@pytest.mark.parametrize("size", [9, 10, 11])
def test_the_bound_of_a_dialogue_is_exact(size):
    def some() -> str:
        """Reads some."""
        return "y" * size

    model = ScriptedModel({"Read": call("some"), "y" * size: "read", "11 characters": "too much"})
    assert run(ask, "Read", [some], most_characters=10, model=model) == (
        "read" if size <= 10 else "too much"
    )
    if size > 10:
        assert model.calls[-1].messages[-1].content == (
            "some has failed: ResultError: the result has 11 characters, and at most 10 "
            "(most_characters of llm) come into the dialogue; ask for less"
        )


LONG = "z" * 600


@pytest.mark.parametrize(
    "value",
    [
        LONG,
        LONG.encode(),
        [LONG],
        ["z"] * 40,
        [1] * 40,
        {"a": {"b": (LONG,)}},
        {LONG: 1},
        {"a", LONG},
        np.zeros(200, np.int64),
        [[np.zeros((10, 10, 10), np.int8)]],
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_large_is_found_in_what_a_tool_returns(value):
    with pytest.raises(ResultError, match=r"has returned more than 500 bytes.*larger most_bytes"):
        run(use, lambda: value, 500, model=MODEL)
    assert run(use, lambda: value, 5000, model=MODEL) is not None


def test_a_value_in_circles_has_the_size_of_its_parts():
    circle: list = ["x" * 100]
    circle.append(circle)
    assert run(use, lambda: circle, 500, model=MODEL)[0] == "x" * 100


def test_the_same_text_many_times_counts_once_but_its_places_count():
    assert len(run(use, lambda: [LONG] * 10, 1000, model=MODEL)) == 10
    with pytest.raises(ResultError):
        run(use, lambda: [LONG] * 100, 1000, model=MODEL)


def test_an_agent_may_deal_with_a_result_that_is_too_large():
    @agent
    async def careful():
        try:
            return await tool(lambda: LONG, most_bytes=100)
        except ResultError:
            return "too much"

    assert run(careful, model=MODEL) == "too much"


def test_a_tool_that_hangs_is_told_to_the_model():
    told = "hang has failed: TimeoutError: the tool hang has not ended within 0.2 seconds"
    model = ScriptedModel({"Go": call("hang"), told: "It hangs."})
    began = time.monotonic()
    assert run(ask, "Go", [hang], timeout=0.2, model=model) == "It hangs."
    assert time.monotonic() - began < 10  # the thread is left alone


def test_a_tool_with_a_schema_is_run_as_its_function():
    @agent
    async def both(offered):
        return await tool(offered, 2), await tool(functools.partial(offered, seconds=3))

    [offered] = as_tools([wait])
    assert run(both, offered, model=MODEL) == ("2 s", "3 s")
    with pytest.raises(ValueError, match="the tool none has no function to run; give one"):
        tool(FunctionTool("none"))


def test_a_function_around_an_async_one_is_awaited():
    def around(seconds: float = 1) -> object:
        """Waits."""
        return wait(seconds)

    assert run(use, around, model=MODEL) == "1 s"
    model = ScriptedModel({"Go": call("around", '{"seconds": 4}'), "4 s": "Waited."})
    assert run(ask, "Go", [around], model=model) == "Waited."


@pytest.mark.parametrize("given", [0, -1, 2.5, True])
def test_bounds_that_are_none_are_refused_at_once(given):
    with pytest.raises((ValueError, TypeError), match="most_bytes is"):
        tool(hang, most_bytes=given)
    with pytest.raises((ValueError, TypeError), match="most_characters is"):
        llm("x", tools=[hang], most_characters=given)
