"""Ending paths that nothing will go on with: their `finally` clauses and context managers run.

An error of theirs cannot change the run, which has its answer. It is logged, and kept with the
state in which the path has ended.
"""

import asyncio
import contextlib
import dataclasses
import logging
import traceback
from typing import Any

from jaxshare.serving.agents.courses import Course, Reached
from jaxshare.serving.agents.errors import EndedError
from jaxshare.serving.agents.firings import answered
from jaxshare.serving.agents.places import branch_after
from jaxshare.serving.agents.requests import REQUESTS, Tool
from jaxshare.serving.agents.runs import AgentRun, Firing, Host
from jaxshare.serving.agents.states import State

_LAST = -(2**31)
"""The last step of the path of what a state awaits first at its end, below the parts of any wait."""
SECONDS = 10.0
"""Limit of what a path awaits at its end."""

_log = logging.getLogger("jaxshare.agents")


def tidy(runtime: Host, run: AgentRun) -> None:
    """Ends the code that waits in the states of a run, by an `asyncio.CancelledError`.

    What it awaits then, tools or anything of asyncio, is awaited in a task of the runtime.
    """
    for state in [*run.states, *run.under_way.values()]:
        course, state.course = state.course, None
        if course is None:
            continue
        if state.waiting is None or runtime.desk.is_paused:  # a pause is not the end of a path
            _close(course)
            continue
        branch = branch_after(state.branch, len(state.path), -1)
        now = Firing(runtime, run, (*state.path, -1), branch, dialogue=state.own_dialogue)
        reached = _went(course, now, state, None, asyncio.CancelledError())
        if reached is not None:
            runtime.keep_task(_tidied(course, now, reached, state))


def _went(
    course: Course, now: Firing, state: State, value: Any, error: BaseException | None
) -> Reached | None:
    """Runs the code on; the wait that it comes to, or None at its end."""
    try:
        reached = course.go(now, value, error)
    except (KeyboardInterrupt, SystemExit):
        raise
    except asyncio.CancelledError:
        return None
    except BaseException as failed:
        _report(now, state, failed)
        return None
    return reached if isinstance(reached, Reached) else None


def _report(now: Firing, state: State, error: BaseException) -> None:
    """Logs an error of a path that is being ended, and keeps it with the path's last state."""
    state.end_error, agent = error, now.run.agent
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == agent.file
    ]
    _log.warning(
        "agent %s was ended where it waits in line %d of %s, and its code for that raised %r in "
        "line %d; nothing else has changed by it",
        agent.name,
        state.line,
        agent.file,
        error,
        lines[0] if lines else state.line,
    )


async def _tidied(course: Course, now: Firing, reached: Reached | None, state: State) -> None:
    number = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SECONDS):
            while reached is not None:
                value, error = None, None
                try:
                    value = await _outcome(now, reached.request, state, number)
                except asyncio.CancelledError:
                    raise
                except Exception as raised:
                    error = raised
                reached, number = _went(course, now, state, value, error), number + 1
            return
    _report(now, state, TimeoutError(f"it has not ended within {SECONDS:g} seconds"))
    _close(course)


def _close(course: Course) -> None:
    with contextlib.suppress(Exception):
        course.context.run(course.code.close)


async def _outcome(now: Firing, request: Any, state: State, number: int) -> Any:
    if isinstance(request, Tool):
        at = dataclasses.replace(state, waiting=request)
        path = (*state.path, _LAST - number)
        return (await answered(now.runtime, now.run, at, path))[0]
    if isinstance(request, REQUESTS):
        raise EndedError(
            "an agent that is being ended can await tools and what is for asyncio alone"
        )
    return await request
