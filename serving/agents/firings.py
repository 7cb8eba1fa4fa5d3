"""One firing of a state: the outcome of its wait, then the agent's code up to its next wait."""

import inspect
import types
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from jaxshare.serving.agents.agent import Agent
from jaxshare.serving.agents.compiler.program import Returned, snapshot
from jaxshare.serving.agents.dialogue import Message
from jaxshare.serving.agents.model_calls import (
    ATOMS,
    UsedUpError,
    call_model,
    call_tool,
    check_budget,
    spend,
    spent_by_firing,
)
from jaxshare.serving.agents.requests import CallRun, Llm, Tool, Yielded
from jaxshare.serving.agents.runs import (
    AgentError,
    AgentRun,
    Firing,
    Handle,
    Host,
    current_firing,
)
from jaxshare.serving.agents.states import State
from jaxshare.serving.agents.tool_rounds import Follow, follow, is_followed, run_call

if TYPE_CHECKING:
    from jaxshare.serving.agents.compiler.frames import Frame

Outcome = tuple[Any, tuple[Message, ...]]
"""(the value of a wait, the messages that continue the dialogue)."""


def outcome(
    runtime: Host, run: AgentRun, state: State, path: tuple[int, ...]
) -> Coroutine[Any, Any, Outcome]:
    """The outcome of a state's wait, from the journal where it has one; raises the wait's error.

    The value is a `Follow` if the agent has to wait for something else before its code goes on.
    """
    find = _new_outcome if runtime.journal is None else _journaled_outcome
    found = find(runtime, run, state, path)
    return _followed(run, state, found) if is_followed(state.waiting) else found


async def _followed(run: AgentRun, state: State, found: Coroutine[Any, Any, Outcome]) -> Outcome:
    value, messages = await found
    return follow(run, state.waiting, value, messages), messages


async def _new_outcome(
    runtime: Host, run: AgentRun, state: State, path: tuple[int, ...]
) -> Outcome:
    request = state.waiting
    if isinstance(request, Llm):
        return await call_model(runtime, run, state, request, path)
    if isinstance(request, Tool):
        return await call_tool(request), ()
    if isinstance(request, CallRun):
        return await run_call(request)
    if isinstance(request, types.CoroutineType) and path[-1]:
        raise AgentError(
            f"agent {run.agent.name} waits in line {state.line} for a coroutine, which cannot "
            "be awaited again; make it a tool, so that the state can be fired many times"
        )
    if inspect.isawaitable(request):
        return await request, ()
    raise TypeError(f"object {type(request).__name__} can't be used in 'await' expression")


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
    spent = [0, 0, 0]
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
    runtime: Host,
    run: AgentRun,
    state: State,
    new: State,
    value: Any,
    error: BaseException | None,
) -> Firing:
    """Runs the agent's code from a state to its next wait or its end, and fills in `new`.

    Args:
      value, error: what the wait gave; error is raised in the agent unless it is None.
    """
    program, now = run.agent.program, Firing(runtime, run, new.path)
    if error is None and isinstance(value, Follow):
        # Frames are copied before they go on, so that both states can have this one.
        new.frame, new.line, new.waiting = state.frame, state.line, value.request
        return now
    token = current_firing.set(now)
    try:
        assert state.frame is not None
        frame = snapshot(state.frame, program)
        came_to = program.send(frame, value) if error is None else program.throw(frame, error)
        if isinstance(came_to, Returned):
            new.finished, new.value, new.frame = True, came_to.value, frame
        else:
            instruction = program.instructions[came_to.position]
            new.line = instruction.line
            new.frame = frame if _is_constant_frame(frame) else snapshot(frame, program)
            new.waiting = Yielded(came_to.value) if instruction.is_yield else came_to.value
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as raised:
        new.error = raised
    finally:
        current_firing.reset(token)
    return now


_CONSTANT_TYPES = frozenset((*ATOMS, Handle, Agent))
_RANGE_ITERATOR, _BUILTIN = type(iter(range(0))), type(len)


def _is_constant_frame(frame: "Frame") -> bool:
    """True if nothing in a frame can be changed from outside, so that it needs no copy.

    The iterator of a loop over a range counts: no other name refers to it.
    """
    if frame.handling:
        return False
    for name, value in frame.items():
        kind = type(value)
        is_loop_counter = kind is _RANGE_ITERATOR and name[0] == "."
        is_function = kind is _BUILTIN and isinstance(value.__self__, types.ModuleType)
        if kind not in _CONSTANT_TYPES and not is_loop_counter and not is_function:
            return False
    return True


def close_coroutines(runs: list[AgentRun]) -> None:
    """Closes the coroutines that agents wait for and that were never started."""
    for run in runs:
        for state in run.states:
            if (
                isinstance(state.waiting, types.CoroutineType)
                and inspect.getcoroutinestate(state.waiting) == inspect.CORO_CREATED
            ):
                state.waiting.close()
