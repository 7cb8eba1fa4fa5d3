"""One firing of a state: the outcome of its wait, then the agent's code up to its next wait."""

import asyncio
import dataclasses
import inspect
import types
from collections.abc import Coroutine, Generator
from typing import Any

from jaxshare.serving.agents.call_keys import calling
from jaxshare.serving.agents.compiler.program import Returned
from jaxshare.serving.agents.courses import (
    Compiled,
    Course,
    Native,
    Reached,
    is_own_awaitable,
    keep,
    leave,
)
from jaxshare.serving.agents.dialogue import Message
from jaxshare.serving.agents.dialogues import dialogues_of
from jaxshare.serving.agents.errors import AgentError
from jaxshare.serving.agents.model_calls import (
    UsedUpError,
    call_model,
    call_tool,
    check_budget,
    is_constant,
    private_copy,
    spend,
    spent_by_firing,
)
from jaxshare.serving.agents.recorded import journaled
from jaxshare.serving.agents.requests import (
    REQUESTS,
    Ask,
    CallRun,
    Choose,
    Llm,
    Together,
    Tool,
)
from jaxshare.serving.agents.restoring import taken
from jaxshare.serving.agents.runs import AgentRun, Firing, Host
from jaxshare.serving.agents.states import Arrival, State
from jaxshare.serving.agents.together import Gathered, together
from jaxshare.serving.agents.tool_rounds import Follow, is_final, run_call, settled

Outcome = tuple[Any, tuple[Message, ...]]
"""(the value of a wait, the messages that continue the dialogue)."""


@dataclasses.dataclass(frozen=True)
class Went:
    """The agent's code has gone on during its wait for a coroutine.

    Attributes:
      course, reached: the code, and the wait that it has come to.
    """

    course: Course
    reached: Reached


AGAIN: Any = object()
"""The value of a wait for a coroutine that another firing has awaited."""


def outcome(
    runtime: Host, run: AgentRun, state: State, now: Firing
) -> Coroutine[Any, Any, Outcome]:
    """The outcome of a state's wait, from the journal where it has one; raises the wait's error.

    The value is a `Follow` if the agent has to wait for something else before its code goes on.
    """
    is_coroutine = isinstance(state.waiting, types.CoroutineType)
    if is_coroutine or (is_own_awaitable(state.waiting) and run.agent.restore is None):
        return _run_coroutine(runtime, run, state, now)
    if isinstance(state.waiting, Together):
        return together(runtime, run, state, now, state.waiting, now.path, answered)
    found = answered(runtime, run, state, now.path)
    return found if is_final(state.waiting) else _settled(run, state, found)


def answered(
    runtime: Host, run: AgentRun, state: State, path: tuple[int, ...]
) -> Coroutine[Any, Any, Outcome]:
    """The outcome of a request for an answer or a tool, from the journal where it has one."""
    find = _new_outcome if runtime.journal is None else _journaled_outcome
    return find(runtime, run, state, path)


async def _settled(run: AgentRun, state: State, found: Coroutine[Any, Any, Outcome]) -> Outcome:
    return settled(run, state.waiting, *await found)


async def _new_outcome(
    runtime: Host, run: AgentRun, state: State, path: tuple[int, ...]
) -> Outcome:
    request = state.waiting
    if isinstance(request, Llm):
        return await call_model(runtime, run, state, request, path)
    if isinstance(request, Ask):
        return await runtime.desk.answer(run, state, request, path), ()
    if isinstance(request, Choose):
        return request.index(path[-1]), ()
    if isinstance(request, (Tool, CallRun)):
        with calling(runtime.desk.session, run.id, path):
            if isinstance(request, Tool):
                return await call_tool(request), ()
            return await run_call(request)
    return await request, ()  # what cannot be awaited is an error of Python's


_ASKS = "the coroutine asked for what a later firing has"
"""The recorded value of a coroutine that went on to requests with entries of their own."""


async def _run_coroutine(runtime: Host, run: AgentRun, state: State, now: Firing) -> Outcome:
    """Runs the coroutine that an agent waits for, to its end or to its first request."""
    key, journal = (run.id, now.path), runtime.journal
    if journal is not None and (replay := journal.lookup(key, state.waiting)):
        value, messages = replay()
        if value != _ASKS:
            now.is_bound = True  # perhaps: the coroutine was not run
            return value, messages
    if now.path[-1] and run.agent.restore == "copy":
        raise AgentError(
            f"agent {run.agent.name} waits in line {state.line} for a coroutine, which cannot "
            "be awaited again; make it a tool, so that the state can be fired many times"
        )
    if now.path[-1]:
        return AGAIN, ()
    try:
        value = await _until_request(state, now)
    except Exception as error:
        if journal is not None:
            journal.record_error(key, error)
        raise
    if journal is not None:
        journal.record_value(key, _ASKS if isinstance(value, Went) else value, ())
    return value, ()


async def _awaited(request: Any) -> Any:
    return await request


@types.coroutine
def _until_request(state: State, now: Firing) -> Generator[Any, Any, Any]:
    """Runs a coroutine in the firing's task, which awaits what is for asyncio.

    Returns:
      The coroutine's value, or a `Went` at its first request.
    """
    course, waiting = state.course, state.waiting
    inner = Native(waiting if isinstance(waiting, types.CoroutineType) else _awaited(waiting))
    assert course is not None and isinstance(course.code, Compiled)
    part = Course(inner, course.context, course.children, course.held)
    value, error = None, None
    while not isinstance(at := _went_on(course, part, now, value, error), Returned):
        if isinstance(at.request, REQUESTS):
            state.course, course.code.inner = None, inner
            return Went(course, Reached(at.request, state.line))
        if asyncio.isfuture(at.request):
            at.request._asyncio_future_blocking = True
        value, error, now.is_bound = None, None, True
        try:
            value = yield at.request if asyncio.isfuture(at.request) else None
        except BaseException as raised:
            error = raised
    return at.value


def _went_on(
    course: Course, part: Course, now: Firing, value: Any, error: BaseException | None
) -> Reached | Returned:
    try:
        return part.go(now, value, error)
    finally:
        course.held = part.held


async def _journaled_outcome(
    runtime: Host, run: AgentRun, state: State, path: tuple[int, ...]
) -> Outcome:
    """Replays the outcome from the journal, or records a new one in it."""
    request, key, journal = state.waiting, (run.id, path), runtime.journal
    if isinstance(request, Llm):
        # A recorded answer was a model call too, so the budget has to allow it again.
        check_budget(run, request.n or 1)
    if replay := journal.lookup(key, request):
        spend(run, *journal.spent(key))
        return replay()
    spent = [0, 0, 0, 0.0]
    spent_by_firing.set(spent)  # in the firing's own task
    try:
        value, messages = await _new_outcome(runtime, run, state, path)
    except UsedUpError as error:
        journal.record_used_up(key, str(error), spent)
        raise
    except Exception as error:
        journal.record_error(key, error, spent)
        raise
    journal.record_value(key, value, messages, spent)
    return value, messages


def run_to_next_wait(
    run: AgentRun,
    state: State,
    new: State,
    now: Firing,
    came: Arrival,
) -> None:
    """Runs the agent's code from a state to its next wait or its end, and fills in `new`.

    Args:
      came: what the wait gave: a value, or an error that is raised in the agent.
    """
    value, error = came.value, came.error
    if error is None and isinstance(value, Follow):
        # The agent's code does not go on, so both states can have this frame.
        leave(run, state)
        new.frame, new.context = state.frame, state.context
        new.is_uncopied, new.is_followed = state.is_uncopied, True
        new.children, new.positions, new.past = state.children, state.positions, state.past
        new.line, new.waiting = state.line, value.request
        new.course, state.course = state.course, None
        return
    course = None
    if not isinstance(value, Went):
        now.dialogue = new.dialogue
    try:
        if isinstance(value, Went):
            course, at = value.course, value.reached
            new.is_followed = True
        else:
            course, at = taken(run, state, now, again=value is AGAIN)
            for arrival in value.arrivals if isinstance(value, Gathered) else [came]:
                course.children.receive(arrival, now.restored != "original")
            value = value.value if isinstance(value, Gathered) else value
            if at is None:
                given = value if is_constant(value) else private_copy(value)
                new.given = given, error, new.dialogue
                with journaled(run.runtime.journal, run.id, now):
                    at = course.go(now, value, error)
            else:
                new.is_followed = True
        if isinstance(at, Returned):
            new.finished, new.value = True, at.value
            new.frame = course.code.frame if isinstance(course.code, Compiled) else None
            new.children, new.positions = course.children, course.children.kept()
        else:
            new.line, new.waiting = at.line, at.request
            is_bound = now.is_bound or asyncio.isfuture(state.waiting)
            new.past = state.past.after(is_own_awaitable(state.waiting), is_bound)
            keep(run, new, course)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as raised:
        new.error, new.waiting = raised, None
    finally:
        new.restored = now.restored
        new.dialogue, new.own = dialogues_of(course and course.held, now)


def close_coroutines(runs: list[AgentRun]) -> None:
    """Closes the coroutines that agents wait for and that were never started."""
    for run in runs:
        for state in run.states:
            if (
                isinstance(state.waiting, types.CoroutineType)
                and inspect.getcoroutinestate(state.waiting) == inspect.CORO_CREATED
            ):
                state.waiting.close()
