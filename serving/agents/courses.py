"""Courses: the code of an agent under way, on its own objects, from one wait to the next.

The first firing of a state goes on with the course that came to it, so an agent runs as Python
runs it. Later firings need a course of their own; see `jaxshare.serving.agents.restoring`.
"""

import asyncio
import contextlib
import contextvars
import dataclasses
import functools
import inspect
from typing import Any

from jaxshare.serving.agents.channels import Children
from jaxshare.serving.agents.choices import Picked
from jaxshare.serving.agents.compiler.duplicates import CostlyError, duplicate
from jaxshare.serving.agents.compiler.frames import Frame
from jaxshare.serving.agents.compiler.program import (
    Program,
    Returned,
    UncopyableError,
    snapshot,
)
from jaxshare.serving.agents.dialogues import Held, paused, resumed
from jaxshare.serving.agents.keeping import SMALL
from jaxshare.serving.agents.recorded import record_for
from jaxshare.serving.agents.requests import (
    REQUESTS,
    Choose,
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


class Pause:
    """An awaitable for the bare `yield` of a coroutine, which lets others run."""

    def __await__(self) -> Any:
        yield


def is_own_awaitable(request: Any) -> bool:
    """True for a coroutine, and what else has its own code for being awaited."""
    return (
        not isinstance(request, (*REQUESTS, Handle, Pause))
        and not asyncio.isfuture(request)
        and inspect.isawaitable(request)
    )


class Native:
    """A coroutine or an asynchronous generator, run by Python itself."""

    options: tuple[Any, ...] = ()  # of the choice that it waits for

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
        self.options = request.options if isinstance(request, Choose) else ()
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
        return Pause()
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
    def options(self) -> tuple[Any, ...]:
        """The options of the choice that it waits for."""
        return self.frame.options if self.inner is None else self.inner.options

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
        if isinstance(request, Choose):
            frame.options = request.options
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
        if isinstance(value, Picked):
            value = self.code.options[value.index]
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
    is_once = type(run.supervisor) is Single and not run.may_be_forked
    if not is_once or run.runtime.journal is not None:
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
    """Keeps a copy of the frame that waits in a state, if there can be one that is worth it."""
    course, program = state.course, run.agent.program
    if state.frame is not None or state.is_uncopied or course is None:
        return
    if not isinstance(course.code, Compiled) or course.code.inner is not None:
        state.is_uncopied = True
        return
    assert program is not None
    waits, past, forced = len(state.path), state.past, run.agent.restore == "copy"
    limit = None if forced else past.limit(waits, can_begin=run.arguments is not None)
    recall = functools.partial(run.runtime.recall, run, state)
    if limit == 0:
        state.recall = recall
        return
    course.code.frame.beside = course.held
    state.past = past.without_copy(waits)
    try:
        state.frame = snapshot(course.code.frame, program, strict=not forced, limit=limit)
    except CostlyError:
        state.recall = recall
        return
    except UncopyableError:
        if forced:
            raise
        state.is_uncopied = True
        if limit is None or limit <= SMALL:
            state.past = past
        return
    state.context, state.past = course.context.copy(), past.with_copy(waits, state.frame.size)
