"""Courses: the code of an agent under way, on its own objects, from one wait to the next.

The first firing of a state goes on with the course that came to it, so an agent runs as Python
runs it. Later firings need a course of their own: a copy of the frame that a state keeps, or the
function run again from its beginning with the recorded outcomes (`replayed`), which needs no copy.
"""

import asyncio
import contextlib
import contextvars
import copy
import dataclasses
import functools
import inspect
from collections import deque
from collections.abc import Callable
from typing import Any

from jaxshare.argument_checks import shown
from jaxshare.serving.agents.channels import Children
from jaxshare.serving.agents.compiler.frames import Frame, duplicate
from jaxshare.serving.agents.compiler.program import (
    Program,
    Returned,
    UncopyableError,
    snapshot,
)
from jaxshare.serving.agents.dialogue import Message
from jaxshare.serving.agents.dialogues import Held, paused, resumed
from jaxshare.serving.agents.errors import DivergedError
from jaxshare.serving.agents.model_calls import private_copy
from jaxshare.serving.agents.recorded import record_for
from jaxshare.serving.agents.requests import (
    REQUESTS,
    CallRun,
    ChildNext,
    ChildResult,
    Llm,
    Together,
    Tool,
    Yielded,
    driven,
)
from jaxshare.serving.agents.runs import AgentRun, Firing, Handle, current_firing
from jaxshare.serving.agents.states import Single, State


@dataclasses.dataclass(slots=True)
class Reached:
    """A course has come to a wait, in this line of the agent, for this request."""

    request: Any
    line: int


class _Pause:
    """An awaitable for the bare `yield` of a coroutine, which lets others run."""

    def __await__(self) -> Any:
        yield


def is_own_awaitable(request: Any) -> bool:
    """True for a coroutine, and what else has its own code for being awaited."""
    return (
        not isinstance(request, (*REQUESTS, Handle, _Pause))
        and not asyncio.isfuture(request)
        and inspect.isawaitable(request)
    )


class Native:
    """A coroutine or an asynchronous generator, run by Python itself."""

    def __init__(self, made: Any):
        self._made, self._is_generator = made, inspect.isasyncgen(made)
        self._step: Any = None if self._is_generator else made  # what the next value is sent to
        self._line = 0

    @property
    def variables(self) -> dict[str, Any]:
        """Its variables, by name."""
        frame = self._made.ag_frame if self._is_generator else self._made.cr_frame
        return dict(frame.f_locals) if frame else {}

    def go(self, value: Any, error: BaseException | None) -> Reached | Returned:
        """Runs it to its next wait or its end; its own errors are raised."""
        token = driven.set(True)
        try:
            if self._step is None:
                generator = self._made
                self._step = generator.asend(value) if error is None else generator.athrow(error)
                value, error = None, None
            request = self._step.send(value) if error is None else self._step.throw(error)
        except StopIteration as end:
            if not self._is_generator:
                return Returned(end.value)
            self._step, request = None, Yielded(end.value)
        except StopAsyncIteration:
            if not self._is_generator:
                raise
            return Returned(None)
        finally:
            driven.reset(token)
        frame = self._made.ag_frame if self._is_generator else self._made.cr_frame
        return Reached(_awaitable(request), frame.f_lineno)

    def close(self) -> None:
        """Ends it where it waits: its `finally` clauses and context managers run."""
        if not self._is_generator:
            return self._made.close()
        if self._step is not None:
            self._step.close()
        with contextlib.suppress(StopIteration, StopAsyncIteration):
            self._made.aclose().send(None)


def _awaitable(request: Any) -> Any:
    """The request itself, or what has to be awaited for what a coroutine passes to asyncio."""
    if request is None:
        return _Pause()
    if asyncio.isfuture(request):
        request._asyncio_future_blocking = False
    return request


class Compiled:
    """A compiled agent with its frame, and the coroutine that it awaits, if that asks for more."""

    def __init__(self, program: Program, frame: Frame):
        self._program, self.frame = program, frame
        self.inner: Native | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """Its variables, by name, with its temporaries."""
        return dict(self.frame)

    @property
    def line(self) -> int:
        """The line in which it waits."""
        return self._program.instructions[self.frame.position].line

    def go(self, value: Any, error: BaseException | None) -> Reached | Returned:
        """Runs it to its next wait or its end; its own errors are raised."""
        if self.inner is not None:
            try:
                reached = self.inner.go(value, error)
                if isinstance(reached, Reached):
                    return Reached(reached.request, self.line)
                value, error = reached.value, None
            except BaseException as raised:
                value, error = None, raised
            self.inner = None
        program, frame = self._program, self.frame
        came_to = program.send(frame, value) if error is None else program.throw(frame, error)
        if isinstance(came_to, Returned):
            return came_to
        instruction = program.instructions[came_to.position]
        request = Yielded(came_to.value) if instruction.is_yield else came_to.value
        return Reached(request, instruction.line)

    def close(self) -> None:
        """Ends the coroutine that it awaits."""
        if self.inner is not None:
            self.inner.close()


@dataclasses.dataclass(slots=True)
class Course:
    """An agent's code under way, with its context variables and its children."""

    code: Native | Compiled
    context: contextvars.Context
    children: Children
    held: Held | None = None

    def go(
        self, now: Firing, value: Any = None, error: BaseException | None = None
    ) -> Reached | Returned:
        """Runs the code to its next wait or its end, as a part of a firing."""
        now.children, request = self.children, None
        value = resumed(self.held, now, value)
        try:
            at = self.context.run(_go, self.code, now, value, error)
            request = at.request if isinstance(at, Reached) else None
            return at
        finally:
            self.held = paused(self.held, now, request)


def _go(
    code: Native | Compiled, now: Firing, value: Any, error: BaseException | None
) -> Reached | Returned:
    token = current_firing.set(now)
    try:
        return now.runtime.watchdog.run(now.run.agent, code.go, value, error)
    finally:
        current_firing.reset(token)


def begun(
    run: AgentRun,
    state: State,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    children: Children,
) -> None:
    """Gives the first state of a run its course, and the run a copy of the arguments.

    Args:
      children: those whose handles are in the arguments.

    Raises:
      TypeError: the arguments do not fit the agent.
      UncopyableError: an agent that is restored by copies gets an argument that has none.
    """
    agent, context = run.agent, contextvars.copy_context()
    if run.may_be_forked or type(run.supervisor) is not Single:
        record_for(agent.function)
    try:
        run.arguments = duplicate((args, kwargs), {})
    except Exception as error:
        run.uncopied = error
    if agent.program is None:
        agent.check_arguments(args, kwargs)
        code = Native(agent.function(*args, **kwargs))
    else:
        code = Compiled(agent.program, agent.program.begin(args, kwargs))
    keep(run, state, Course(code, context, children))


def keep(run: AgentRun, state: State, course: Course) -> None:
    """Leaves a course at the state that it has come to.

    Raises:
      UncopyableError: states of the agent are to be copied, and this one cannot be.
    """
    state.course = course
    state.children, state.positions = course.children, course.children.kept()
    if not isinstance(course.code, Compiled) or course.code.inner is not None:
        state.is_uncopied = True
    elif run.agent.restore == "copy":
        keep_frame(run, state)


def leave(run: AgentRun, state: State) -> None:
    """Keeps a copy of a state's frame before its course goes on, if the state may be fired again."""
    if run.supervisor.refires(state) or (run.may_be_forked and isinstance(state.waiting, Yielded)):
        keep_frame(run, state)


def keep_frame(run: AgentRun, state: State) -> None:
    """Keeps a copy of the frame that waits in a state, if there can be one."""
    course, program = state.course, run.agent.program
    if state.frame is not None or state.is_uncopied or course is None:
        return
    if isinstance(course.code, Compiled) and course.code.inner is None:
        assert program is not None
        course.code.frame.beside = course.held
        try:
            state.frame = snapshot(course.code.frame, program, strict=run.agent.restore is None)
            state.context = course.context.copy()
            return
        except UncopyableError:
            if run.agent.restore == "copy":
                raise
    state.is_uncopied = True


def taken(
    run: AgentRun, state: State, now: Firing, again: bool
) -> tuple[Course, Reached | Returned | None]:
    """(a course that waits where the state does, where it is if that is beyond).

    Args:
      again: whether another firing has gone on with the coroutine that the state waits for.

    Raises:
      DivergedError, UncopyableError: see `replayed`.
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
        now.restored, program = "copy", run.agent.program
        assert program is not None and state.context is not None
        code = Compiled(program, snapshot(state.frame, program))
        return Course(code, state.context.copy(), children, code.frame.beside), None
    now.restored = "replay"
    if run.agent.restore == "copy":
        raise UncopyableError(
            f"agent {run.agent.name} waits in line {state.line} in a coroutine, which cannot be "
            'copied; leave restore="copy" out, or wait in the agent itself'
        )
    return replayed(run, state, now, children)


def replayed(
    run: AgentRun, state: State, now: Firing, children: Children
) -> tuple[Course, Reached | Returned | None]:
    """Runs an agent again from its beginning to a state, with the outcomes that led there.

    Returns:
      (the course, where it is if that is beyond the state, since it ran through the coroutine that
      the state waits for).

    Raises:
      DivergedError: the agent did not come to the waits of its record.
      UncopyableError: an argument that has changed since, or a wait for asyncio, prevents it.
    """
    if run.arguments is None:
        raise UncopyableError(
            f"agent {run.agent.name} cannot be run again, since its arguments cannot be copied "
            f"({run.uncopied}); make a list of an iterator, and open files in the agent"
        ) from run.uncopied
    steps, first = [], state
    while first.waiting is not None:
        steps.append(first)
        assert first.parent is not None
        first = first.parent
    args, kwargs = duplicate(run.arguments, {})
    steps.reverse()
    events = deque([event for each in steps for event in each.events])
    course = Course(
        Native(run.agent.function(*args, **kwargs)), contextvars.copy_context(), children
    )
    readings = deque([reading for each in steps for reading in each.recorded])
    again, at = Firing(now.runtime, run, now.path, replays=events, readings=readings), None
    through = is_own_awaitable(state.waiting)
    sent = [step for step in steps if not _is_passed(step)]
    for step in sent:
        parent = step.parent
        assert parent is not None
        if at is not None:
            _check_same(run, parent, at)
        value, error, again.dialogue = step.given
        if error is not None:
            error = _copied_error(error)
        go = functools.partial(course.go, again, private_copy(value), error)
        if through and step is sent[-1]:
            return course, go()
        at = _went(run, step, go)
    if at is None:
        return course, None
    _check_same(run, state, at)
    return course, None


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
    was, now = state.waiting, at.request
    if asyncio.isfuture(now) or isinstance(now, _Pause):
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
    return DivergedError(
        f"agent {run.agent.name} was run again to restore a state, and {instead}; in its record it "
        f"waits in line {step.line} for {_shown(step.waiting)}. It depends on something that is not "
        "recorded: make that a tool"
    )
