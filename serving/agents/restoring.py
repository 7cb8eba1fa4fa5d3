"""Restoring a state that is fired: its own course, a copy of its frame, or a replay of its record.

A replay runs the agent on from the nearest copy above, or again from its beginning.
"""

import asyncio
import contextvars
import copy
import functools
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from jaxshare.argument_checks import shown
from jaxshare.serving.agents.channels import Children
from jaxshare.serving.agents.compiler.duplicates import duplicate
from jaxshare.serving.agents.compiler.program import Returned, UncopyableError, snapshot
from jaxshare.serving.agents.courses import (
    Compiled,
    Course,
    Native,
    Pause,
    Reached,
    is_own_awaitable,
    keep_frame,
    leave,
)
from jaxshare.serving.agents.dialogue import Message
from jaxshare.serving.agents.errors import DivergedError
from jaxshare.serving.agents.model_calls import private_copy
from jaxshare.serving.agents.requests import (
    CallRun,
    ChildNext,
    ChildResult,
    Choose,
    Llm,
    Together,
    Tool,
)
from jaxshare.serving.agents.runs import AgentRun, Firing, Handle
from jaxshare.serving.agents.states import State


def taken(
    run: AgentRun, state: State, now: Firing, again: bool
) -> tuple[Course, Reached | Returned | None]:
    """(a course that waits where the state does, where it is if that is beyond).

    Args:
      again: whether another firing has gone on with the coroutine that the state waits for.

    Raises:
      DivergedError, UncopyableError: see `_run_again`.
    """
    if not again and now.path[-1] == 0 and (course := state.course) is not None:
        # The first firing, however late its outcome is: so which path goes on does not depend on
        # what is faster.
        leave(run, state)
        state.course, now.restored = None, "original"
        return course, None
    if not again:
        keep_frame(run, state)
    children = now.children or Children(state.positions, is_copy=True)
    if not again and state.frame is not None:
        now.restored = "copy"
        return _beginning(run, state, children, is_native=False), None
    now.restored = "replay"
    if run.agent.restore == "copy":
        raise UncopyableError(
            f"agent {run.agent.name} waits in line {state.line} in a coroutine, which cannot be "
            'copied; leave restore="copy" out, or wait in the agent itself'
        )
    return _replayed(run, state, now, children)


def recalled(run: AgentRun, state: State) -> Mapping[str, Any]:
    """The variables of a state, by its record.

    Raises:
      DivergedError: see `_run_again`.
    """
    now = Firing(run.runtime, run, state.path, state.branch)
    course, _ = _replayed(run, state, now, Children(state.positions, is_copy=True))
    return course.code.variables


def _replayed(
    run: AgentRun, state: State, now: Firing, children: Children
) -> tuple[Course, Reached | Returned | None]:
    """The course of `_run_again`, whose error says what would do where copies would."""
    try:
        return _run_again(run, state, now, children)
    except DivergedError as error:
        if run.agent.program is None or state.is_uncopied:
            raise
        raise DivergedError(
            f'{error}, or have all states copied, whatever they hold: @agent(restore="copy")'
        ) from error.__cause__


def _run_again(
    run: AgentRun, state: State, now: Firing, children: Children
) -> tuple[Course, Reached | Returned | None]:
    """Runs an agent to a state, with the outcomes that led there.

    It begins at the nearest copy above, or anew if there is none, or if a coroutine was awaited
    since then: only Python itself can run to a wait within one.

    Returns:
      (the course, where it is if that is beyond the state, since it ran through the coroutine that
      the state waits for).

    Raises:
      DivergedError: the agent did not come to the waits of its record.
      UncopyableError: an argument that has changed since, or a wait for asyncio, prevents it.
    """
    steps, first = [], state
    through = is_own_awaitable(state.waiting)
    is_native = through or run.agent.program is None
    while first.waiting is not None and (is_native or first.frame is None):
        first = first.stands_for or first
        steps.append(first)
        assert first.parent is not None
        first = first.parent
        is_native = is_native or is_own_awaitable(first.waiting)
    steps.reverse()
    course = _beginning(run, first, children, is_native)
    # What runs beyond the record is a part of this firing.
    again = Firing(now.runtime, run, now.path, now.branch, events=now.events, recorded=now.recorded)
    again.replays, again.readings, at = deque(), deque(), None
    parts = _parts(steps)
    for step, passed in parts:
        parent = step.parent
        again.replays += [event for each in passed for event in each.events]
        again.readings += [reading for each in passed for reading in each.recorded]
        assert parent is not None
        if at is not None:
            _check_same(run, parent, at)
        value, error, again.dialogue = step.given
        if error is not None:
            error = _copied_error(error)
        go = functools.partial(course.go, again, private_copy(value), error)
        if through and step is parts[-1][0]:
            again.is_beyond = True
            return course, go()
        at = _went(run, step, go)
        if again.replays or again.readings:
            left = again.readings[0][0] if again.readings else "what it does with a child"
            raise _diverged(run, step, f"it leaves out {left}")
    if at is None:
        return course, None
    _check_same(run, state, at)
    return course, None


def _beginning(run: AgentRun, first: State, children: Children, is_native: bool) -> Course:
    """A course at a state with a copy, or else at the beginning of an agent.

    Args:
      is_native: have Python itself run the agent from its beginning.
    """
    program = None if is_native else run.agent.program
    if program is not None and first.frame is not None:
        assert first.context is not None
        code = Compiled(program, snapshot(first.frame, program))
        return Course(code, first.context.copy(), children, code.frame.beside)
    if run.arguments is None:
        raise UncopyableError(
            f"agent {run.agent.name} cannot be run again, since its arguments cannot be copied "
            f"({run.uncopied}); make a list of an iterator, and open files in the agent"
        ) from run.uncopied
    args, kwargs = duplicate(run.arguments, {})
    made = (
        Native(run.agent.function(*args, **kwargs))
        if program is None
        else Compiled(program, program.begin(args, kwargs))
    )
    return Course(made, contextvars.copy_context(), children)


def _parts(steps: list[State]) -> list[tuple[State, list[State]]]:
    """The steps that a replay takes, each with all of the record that it runs through."""
    parts: list[tuple[State, list[State]]] = []
    for step in steps:
        if not _is_passed(step):
            parts.append((step, []))
        parts[-1][1].append(step)
    return parts


def _is_passed(step: State) -> bool:
    """True if the agent's own code has no wait where the firing that led to a state began."""
    parent = step.parent
    assert parent is not None
    return step.is_followed or is_own_awaitable(parent.waiting)


def _copied_error(error: BaseException) -> BaseException:
    """A copy of an error, since Python writes tracebacks to it; itself if it has none."""
    try:
        return copy.copy(error)
    except Exception:
        return error


def _went(run: AgentRun, step: State, go: Callable[[], Reached | Returned]) -> Reached:
    """Where a replay has come to instead of a step of the record; it must be a wait."""
    try:
        reached = go()
    except (KeyboardInterrupt, SystemExit, DivergedError):
        raise
    except BaseException as error:
        raise _diverged(run, step, f"it raised {error!r}") from error
    if isinstance(reached, Returned):
        raise _diverged(run, step, f"it returned {reached.value!r}")
    return reached


def _check_same(run: AgentRun, state: State, at: Reached) -> None:
    """Raises an error unless a replay waits for what the state waited for."""
    was: Any = state.waiting
    now: Any = at.request.result() if isinstance(at.request, Handle) else at.request
    if asyncio.isfuture(now) or isinstance(now, Pause):
        raise UncopyableError(
            f"agent {run.agent.name} waits in line {at.line} for a coroutine of asyncio, which "
            "cannot be awaited again; make it a tool, so that the state can be fired many times"
        )
    if state.is_followed and isinstance(was, (CallRun, Llm)) and isinstance(now, Llm):
        return  # a wait on the way to the answer
    if type(was) is not type(now):
        same = False
    elif isinstance(was, Llm):
        same = (was.messages, was.n, _before(was)) == (now.messages, now.n, _before(now))
    elif isinstance(was, Tool):
        same = _function_name(was) == _function_name(now)
    elif isinstance(was, Choose):
        same = len(was.options) == len(now.options)
    elif isinstance(was, (ChildNext, ChildResult)):
        same = was.child is now.child
    elif isinstance(was, Together):
        same = [*map(type, was.parts)] == [*map(type, now.parts)]
    else:
        same = True
    if not same:
        raise _diverged(run, state, f"it waits in line {at.line} for {_shown(now)}")


def _before(request: Llm) -> tuple[Message, ...] | None:
    return request.place and request.place.before


def _shown(request: Any) -> str:
    """A request as it is written in an agent."""
    if isinstance(request, Llm):
        return f"llm({shown(request.messages[-1].content)})" if request.messages else "llm()"
    return f"tool({_function_name(request)})" if isinstance(request, Tool) else shown(request)


def _function_name(request: Tool) -> str:
    return getattr(request.function, "__qualname__", type(request.function).__qualname__)


def _diverged(run: AgentRun, step: State, instead: str) -> DivergedError:
    return DivergedError.of(
        run.agent.name,
        f"{instead}; in its record it waits in line {step.line} for {_shown(step.waiting)}. It "
        "depends on something that is not recorded: make that a tool",
    )
