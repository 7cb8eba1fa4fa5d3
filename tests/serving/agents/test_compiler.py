"""Compiled agents against Python's own coroutines; copies of their state; refused constructs."""

import copy
import inspect
import re
import textwrap
import traceback

import hypothesis
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st

from jaxshare.serving.agents.compiler.program import (
    Returned,
    UncopyableError,
    Waiting,
    compiled,
    snapshot,
)
from jaxshare.serving.agents.compiler.variables import RefusedError
from tests.serving.agents import agent_suite
from tests.serving.agents.agent_oracle import ask, differences, native, run
from tests.serving.agents.agent_programs import Writer, defined


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize(
    ("function", "args"), agent_suite.SUITE, ids=lambda x: x.__name__ if callable(x) else repr(x)
)
def test_the_suite_runs_as_python_runs_it(function, args):
    _, found = differences(function, *args)
    assert not found, "\n".join(found)


def test_the_suite_is_large_and_gets_to_its_waits():
    assert len({function for function, _ in agent_suite.SUITE}) >= 60
    assert sum(len(native(function, *args).events) for function, args in agent_suite.SUITE) > 400


def program_runs_alike(data, gives):
    source = Writer(lambda most: data.draw(st.integers(0, most)), gives).agent()
    hypothesis.note(
        "\n".join(f"{number:3} {line}" for number, line in enumerate(source.splitlines(), 1))
    )
    function = defined(source)
    hypothesis.assume(len(native(function).events) <= 30)
    try:
        _, found = differences(function)
    except RefusedError as error:
        # The one construct of the grammar that is not compiled.
        assert "a lambda over the variables of a comprehension that waits" in str(error)
        hypothesis.reject()
    assert not found, "\n".join(found)


QUICK = {"suppress_health_check": list(hypothesis.HealthCheck)}


@hypothesis.settings(max_examples=60, **QUICK)
@hypothesis.given(st.data(), st.booleans())
def test_programs_run_as_python_runs_them(data, gives):
    program_runs_alike(data, gives)


@pytest.mark.slow
@hypothesis.settings(max_examples=2000, **QUICK)
@hypothesis.given(st.data(), st.booleans())
def test_many_programs_run_as_python_runs_them(data, gives):
    program_runs_alike(data, gives)


# Sharing between copies.

FOUND: list[int] = []
FOUND_IN = agent_suite.Matrix(0)


def test_what_is_global_is_not_copied_in_the_midst_of_an_expression():
    outer: list[int] = []
    FOUND.clear()

    async def agent(log):
        FOUND.append(await ask(1))
        outer.append(await ask(2))
        FOUND_IN.x += await ask(3)
        mine = FOUND
        mine.append(await ask(4))
        return FOUND

    assert native(agent).result[0] == "returned"
    assert (FOUND, outer, FOUND_IN.x) == ([1, 4], [2], 3)
    program = compiled(agent)
    assert run(program, program.begin(([],), {}), [], each=lambda *_: None).result[0] == "returned"
    # A variable is copied, whatever it is called elsewhere.
    assert (FOUND, outer, FOUND_IN.x) == ([1, 4, 1], [2, 2], 6)


def test_modules_functions_arrays_and_who_says_so_are_shared():
    class Handle:
        def __deepcopy__(self, memo):
            return self

    array, handle, error = jnp.ones(3), Handle(), ValueError()

    async def agent(things, alone):
        await ask(1)
        return things, alone

    program = compiled(agent)
    frame = program.begin(([array, handle, error, copy, len, {"k": array}], array), {})
    assert isinstance(program.send(frame, None), Waiting)
    returned = program.send(snapshot(frame, program), None)
    assert isinstance(returned, Returned)
    things, alone = returned.value
    assert things is not frame["things"] and alone is array
    assert (
        all(a is b for a, b in zip(things[:5], [array, handle, error, copy, len], strict=True))
        and things[5]["k"] is array
    )


def test_firing_one_state_again_and_again_leaves_it_as_it_is():
    async def agent(log):
        def remember(x):
            log.append(x)
            return len(log)

        try:
            raise ValueError("kept")
        except ValueError as error:
            kept = error
        x = await ask("first")
        remember(x)
        y = await ask("second")
        try:
            raise kept
        except ValueError as error:
            return remember(y), log, len(traceback.extract_tb(error.__traceback__))

    program = compiled(agent)
    start = program.begin(([],), {})
    program.send(start, None)
    middles = []
    for x in range(5):
        program.send(middle := snapshot(start, program), x)
        middles.append(middle)
    for x, middle in reversed(list(enumerate(middles))):
        for y in "abc":
            # the line that raised it first, and the one that did again
            assert program.send(snapshot(middle, program), y) == Returned((2, [x, y], 2))
    assert start["log"] == []


def test_what_a_list_comes_to_hold_is_no_other_firings():
    async def agent(log):
        log.append([])
        x = await ask("first")
        log[-1].append(x)
        log.append([x])
        y = await ask("second")
        for each in log[1:]:
            each.append(y)
            z = await ask(each)
        return log, z

    program = compiled(agent)
    begin = program.begin(([0],), {})
    program.send(running := snapshot(begin, program), None)
    first = snapshot(running, program)
    running["log"][1].append("by somebody else")
    for x in "ab":
        program.send(running := snapshot(first, program), x)
        second = snapshot(running, program)
        for y in "cd":
            program.send(running := snapshot(second, program), y)
            third = snapshot(running, program)
            for z in "ef":
                program.send(running := snapshot(third, program), "not used")
                fourth = snapshot(running, program)
                assert program.send(snapshot(fourth, program), z) == Returned(
                    ([0, [x, y], [x, y]], z)
                )
    assert begin["log"] == [0] and first["log"] == [0, []]


def test_a_run_begins_with_arguments_that_fit():
    async def agent(a, /, b=2, *, c):
        await ask(a)

    program = compiled(agent)
    with pytest.raises(TypeError, match=r"agent\(\) missing a required .*'c'"):
        program.begin((1,), {})
    with pytest.raises(TypeError, match=r"agent\(\) too many positional arguments"):
        program.begin((1, 2, 3), {"c": 4})
    assert dict(program.begin((1,), {"c": 3})) == {"a": 1, "b": 2, "c": 3}


def test_what_is_thrown_before_the_begin_comes_out():
    async def agent(log):
        try:
            return await ask(1)
        except ValueError:
            return "never"

    program = compiled(agent)
    with pytest.raises(ValueError, match="early"):
        program.throw(program.begin(([],), {}), ValueError("early"))


# Refused constructs.

REFUSED = {
    "async for x in a:\n    pass": (1, r"async for; write while with `await child.next\(\)`"),
    "x = 1\nasync with a:\n    pass": (2, r"async with.*; write try and finally"),
    "try:\n    await a\nexcept* ValueError:\n    pass": (1, r"except\*"),
    "x = [\n  y async for y in a]": (2, "async for"),
    "x = sum(\n  await y for y in a)": (
        1,
        "a wait in a generator expression.*; write a list comprehension",
    ),
    "pass\nx = locals()": (2, r"locals\(\): variables are not in a Python frame"),
    "x = vars()": (1, r"vars\(\)"),
    "x = eval(\n  'a')": (1, r"eval\(\): it does not see the variables"),
    "exec('a')": (1, r"exec\(\)"),
    "x = lambda: super().f()": (1, r"super\(\)"),
    "x = 1\nclass C:\n    y = x": (
        2,
        "a class that uses the agent's variables.*; define it outside",
    ),
    "x = 1\nclass C:\n    x = 2\n    def f(self):\n        return x": (
        2,
        "a class that uses the agent's variables",
    ),
    "try:\n    pass\nexcept await a:\n    pass": (3, "a wait in what an except clause names"),
    "match a:\n    case 1 if await a:\n        pass": (
        2,
        "a wait in a guard of match; wait in its body",
    ),
    "for a[await a] in [1]:\n    pass": (1, "a wait in what a for loop assigns to"),
    "a, b[\n  await a] = 1, 2": (
        1,
        "a wait inside a tuple that is assigned to; wait before, and assign then",
    ),
    "def f(x=await a):\n    pass": (
        1,
        "a wait in what a function's definition evaluates; wait before",
    ),
    "@f(await a)\nclass C:\n    pass": (
        2,
        "a wait in what a class's definition evaluates; wait before",
    ),
    "x = lambda y=await a: y": (1, "a wait in what a lambda evaluates; wait before"),
    "x = [\n  lambda: y\n  for y in await a if await y]": (
        2,
        "a lambda over the variables of a comprehension that waits; write a loop",
    ),
    "type X = int": (1, "a type statement; define it outside"),
}


@pytest.mark.parametrize("body", REFUSED)
def test_what_cannot_be_compiled_is_refused_with_its_line(body):
    line, message = REFUSED[body]
    function = defined(
        "\n\nasync def agent(a, b, f):\n" + textwrap.indent(body, "    ") + "\n    await a\n"
    )
    with pytest.raises(RefusedError, match=f"an agent cannot have {message}") as caught:
        compiled(function)
    assert (caught.value.filename, caught.value.lineno) == (function.__code__.co_filename, 3 + line)
    assert f"line {3 + line}" in str(caught.value)


def test_what_is_not_an_agent_is_refused():
    with pytest.raises(TypeError, match=r"async def, and .*plain is not"):

        def plain(): ...

        compiled(plain)
    with pytest.raises(TypeError, match="async def, and 3 is not"):
        compiled(3)  # pyright: ignore[reportArgumentType]
    world: dict = {}
    exec("async def hidden(): pass", world)
    with pytest.raises(
        RefusedError,
        match=r"the source of agent hidden cannot be read.*; write it in a file or a notebook",
    ):
        compiled(world["hidden"])


def test_the_lines_of_another_function_are_not_taken_for_an_agent(monkeypatch):
    """As with Python 3.13, where code is made by exec in a program after `python -c`."""
    world: dict = {}
    exec("async def hidden(): pass", world)
    for line in ("async def other(): pass", "import sys"):
        monkeypatch.setattr(inspect, "getsourcelines", lambda _, line=line: ([line + "\n"], 1))
        with pytest.raises(RefusedError, match=r"hidden cannot be read \(its lines are not those"):
            compiled(world["hidden"])


class Private:
    async def agent(self):
        await ask(self.__hidden)  # pyright: ignore[reportAttributeAccessIssue]


def test_a_private_name_of_a_class_is_refused():
    with pytest.raises(
        RefusedError, match="cannot have __hidden, a private name of a class; use one underscore"
    ) as caught:
        compiled(Private.agent)
    assert caught.value.lineno == Private.agent.__code__.co_firstlineno + 1


def test_an_agent_in_an_agent_that_uses_its_variables_is_refused():
    async def outer(x):
        async def inner():
            await ask(x)

        return compiled(inner)

    program = compiled(outer)
    with pytest.raises(
        TypeError,
        match=r"inner is defined in an agent whose variables it uses; give it what it needs as "
        r"arguments",
    ):
        program.send(program.begin((1,), {}), None)


UNCOPYABLE = {
    "f = opened()": ("variable f holds a TextIOWrapper", 3),
    "import threading\nlock = threading.Lock()": ("variable lock holds a lock", 4),
    "rows = (x for x in [1])": ("variable rows holds a generator", 3),
    "rows = [[], {'a': (x for x in [1])}]": ("variable rows holds a list", 3),
    "for row in (x for x in [1]):\n  await ask(1)": (
        "what line 2 still needs holds a generator",
        3,
    ),
    "x = [await ask(y) for y in (z for z in [1])]": (
        "what line 2 still needs holds a generator",
        2,
    ),
    "def f(g=opened()):\n  return g": ("variable f holds a Closure", 4),
    "x = (opened(),\n  await ask(1))": ("what line 2 still needs holds a TextIOWrapper", 3),
}


@pytest.mark.parametrize("body", UNCOPYABLE)
def test_what_cannot_be_copied_is_named(body):
    what, line = UNCOPYABLE[body]
    function = defined("async def agent():\n" + textwrap.indent(body, "  ") + "\n  await ask(2)\n")
    program = compiled(function)
    frame = program.begin((), {})
    expected = (
        f"agent agent waits in line {line}, but "
        + ("the " if what.startswith("variable") else "")
        + re.escape(what)
    )
    with open(__file__) as file:
        function.__globals__["opened"] = lambda *_: file
        assert isinstance(program.send(frame, None), Waiting)
        with pytest.raises(
            UncopyableError,
            match=expected + ", which cannot be copied .*make a list of an iterator",
        ):
            snapshot(frame, program)


def test_a_cache_over_an_agents_variables_cannot_be_copied():
    import functools

    async def agent(n):
        @functools.cache
        def plus(x):
            return x + n

        await ask(plus(1))

    program = compiled(agent)
    frame = program.begin((1,), {})
    went = program.send(frame, None)
    assert isinstance(went, Waiting) and went.value.value == 2
    with pytest.raises(
        UncopyableError,
        match=r"the variable plus holds a _lru_cache_wrapper.*functools.cache; define it outside",
    ):
        snapshot(frame, program)
