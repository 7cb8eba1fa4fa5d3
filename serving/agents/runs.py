"""One run of an agent, as its supervisor, its parent and a search log see it, and its handle."""

import asyncio
import contextlib
import contextvars
import dataclasses
import os
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Mapping
from typing import Any, Protocol

from jaxshare.deprecated import renamed
from jaxshare.serving.agents.agent import Agent
from jaxshare.serving.agents.budgets import Spent
from jaxshare.serving.agents.channels import Channel, Children
from jaxshare.serving.agents.compiler import program
from jaxshare.serving.agents.compiler.duplicates import shared
from jaxshare.serving.agents.dialogue import Message
from jaxshare.serving.agents.errors import AgentError, BudgetError, DivergedError
from jaxshare.serving.agents.message_list import HANDLES, MessageList
from jaxshare.serving.agents.requests import ChildNext, ChildResult, Model
from jaxshare.serving.agents.states import Arrival, Inquiry, Single, State, Supervisor
from jaxshare.serving.agents.streaming import OnToken
from jaxshare.serving.agents.watchdog import Watchdog


class Host(Protocol):
    """The part of `jaxshare.serving.agents.runtime.Runtime` that runs and their requests use."""

    @property
    def model(self) -> Model: ...
    @property
    def seed(self) -> int: ...
    @property
    def journal(self) -> Any: ...
    @property
    def on_token(self) -> OnToken | None: ...
    @property
    def watchdog(self) -> Watchdog: ...
    @property
    def desk(self) -> Any: ...
    @property
    def max_agents(self) -> int: ...
    @property
    def max_depth(self) -> int: ...
    @property
    def runs(self) -> "list[AgentRun]": ...
    @property
    def call_slots(self) -> asyncio.Semaphore | None: ...
    def clock(self) -> float: ...
    def resume(self, child: "AgentRun", value: Any, now: "Firing | None") -> None: ...
    def arrive(self, run: "AgentRun", state: State, arrival: Arrival) -> None: ...
    def fork(self, channel: Channel, by: "AgentRun", path: tuple[int, ...]) -> None: ...
    def recall(self, run: "AgentRun", state: State) -> Mapping[str, Any]: ...
    def keep_copy(self, run: "AgentRun", resumes: int | None) -> None: ...
    def call_off(self, run: "AgentRun") -> None: ...
    def keep_task(self, tidied: Coroutine[Any, Any, None]) -> None: ...
    def spawn(
        self,
        by: "Firing",
        agent: Agent,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        line: int,
        /,
    ) -> "Handle": ...


@shared
class Handle:
    """A child, as agents hold it.

    Copies of a state share it, and each deals with the child as it was in that state: a child that
    is treated differently on two paths of its parent is forked.
    """

    def __init__(self, run: "AgentRun"):
        self._run = run

    def next(self) -> ChildNext:
        """Awaits the next value that the child yields; resumes it with None if it still waits.

        Raises (where it is awaited): the child's error; EndedError if it has ended and yields no
        more.
        """
        return ChildNext(self)

    def result(self) -> ChildResult:
        """Awaits the child's return value; raises the child's error."""
        return ChildResult(self)

    def resume(self, value: Any = None) -> None:
        """Continues the child after the `yield` awaited last, which evaluates to this value.

        Raises:
          EndedError: the child has ended.
          AgentError: no yielded value was taken since it was resumed last.
        """
        with _dealing(f"resumes {self._run.agent.name}") as now:
            if now is None or not now.is_replaying:
                self._run.runtime.resume(self._run, value, now)

    def cancel(self) -> None:
        """Ends the child, unless it has ended; its `finally` clauses and context managers run.

        Awaiting it afterwards raises an EndedError.
        """
        with _dealing(f"cancels {self._run.agent.name}") as now:
            if now is None or not now.is_replaying:
                channel_of(self._run, now).cancel()

    def __await__(self) -> Any:
        return self.result().__await__()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Handle":
        memo.get(HANDLES, []).append(self)
        return self

    def __repr__(self) -> str:
        return f"<child {self._run.id}>"


def channel_of(child: "AgentRun", now: "Firing | None") -> Channel:
    """The channel by which the running code deals with a child."""
    return child.channel if now is None or now.children is None else now.children.channel(child)


class AgentRun:
    """One run of an agent.

    Attributes:
      id: the path of agents that led to it, and where each was spawned.
      agent, supervisor: its agent, and the supervisor of this run alone.
      parent, spawned_in: the run that spawned it, and the line of that.
      owner: the run that ends it when it ends: the parent or, if the parent gave the handle away
        upwards, the run that received it.
      root: its first state; states: all states, in the order of their commits.
      children: runs that it has spawned.
      calls, new_tokens, prompt_tokens, cost: counts of its own model calls and their tokens, and
        the sum of their prices; `total` includes those of all that it has spawned.
      began, ended: seconds since the runtime's start.
      done: whether it is over; then either `accepted` is the state that it ended with, or `error`
        is the reason why there is none.
      cancelled: whether it was ended because its owner ended, or by `Handle.cancel`.
    """

    def __init__(
        self,
        runtime: Host,
        id: str,
        agent: Agent,
        supervisor: Supervisor,
        parent: "AgentRun | None",
        spawned_in: int,
    ):
        self.runtime, self.id, self.agent, self.supervisor = runtime, id, agent, supervisor
        self.parent = self.owner = parent
        self.spawned_in = spawned_in
        self.depth: int = parent.depth + 1 if parent else 0
        # Whether two paths of a run above may come to deal with it in different ways.
        self.may_be_forked: bool = parent is not None and (
            parent.may_be_forked or type(parent.supervisor) is not Single
        )
        self.root = State(agent.name, id, ())
        self.states = [self.root]
        # Copies of its arguments, for replays; or why there are none.
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.uncopied: Exception | None = None
        self.children: list[AgentRun] = []
        # Runs that end with this one, in the order in which it became their owner.
        self.owned: dict[AgentRun, None] = {}
        self.calls = self.new_tokens = self.prompt_tokens = 0
        self.cost, self.total = 0.0, Spent()
        self.began, self.ended = runtime.clock(), 0.0
        self.done = self.cancelled = False
        self.accepted: State | None = None
        self.error: BaseException | None = None
        self.handle = Handle(self)
        # States that firings will lead to, with the fired ones; and the tasks of firings that await
        # something.
        self.under_way: dict[State, State] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.used_up: str | None = None  # the part of the budget that made a firing be given up
        self.timer: asyncio.TimerHandle | None = None
        # States that wait for another agent, and those of them that were fired meanwhile.
        self.asleep: dict[State, None] = {}
        self.fired_early: list[State] = []
        self.listeners: list[Callable[[Arrival], None]] = []
        # States with a yielded value, in order; and the channels by which others deal with the run.
        # Its driver resumes it in place, and others get forks of it: for them there are copies of
        # its search, by the number of resumes before, and as it was when it was called off.
        self.yields: list[State] = []
        self.resumes = 0
        self.channel = self.driver = Channel(self)
        self.channels: dict[Channel, None] = {}
        self.copies: dict[int | None, Any] = {}
        self.is_called_off = False
        # Paths of the supervisor's open inquiries, and answers that it was not told; see `inquiries`.
        self.asked: set[Any] = set()
        self.answers: list[tuple[Inquiry, Arrival]] = []


@dataclasses.dataclass(slots=True)
class Firing:
    """The piece of an agent's code that is running.

    Attributes:
      spawned: the number of children that it has spawned so far.
      events: the children that it has spawned, and the errors of its other dealings with children
        (None for none), in order.
      replays: in a replay, the events of then that were not met yet.
      recorded: what the code has read of clocks and random numbers, as (function, value).
      readings: in a replay, what it read then and has not read again.
      is_beyond: whether a replay goes on where its record ends.
      branch: of the path; see `jaxshare.serving.agents.places`.
      is_bound: whether the agent has awaited asyncio outside a tool, which is not done again.
      children: of the path that the code is on.
      dialogue: the agent's own, as the code that is running found it; `own` is it as a value, once
        the code has asked for that.
      restored: how the fired state was restored; see `State.restored`.
    """

    runtime: Host
    run: AgentRun
    path: tuple[int, ...]
    branch: str
    spawned: int = 0
    events: list[Handle | Exception | None] = dataclasses.field(default_factory=list)
    replays: deque[Handle | Exception | None] | None = None
    recorded: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    readings: deque[tuple[str, Any]] | None = None
    is_beyond: bool = False
    is_bound: bool = False
    children: Children | None = None
    dialogue: tuple[Message, ...] = ()
    own: MessageList | None = None
    restored: str = "original"

    @property
    def is_replaying(self) -> bool:
        """True if what the code does with children is to be that of a record."""
        return self.replays is not None and not (self.is_beyond and not self.replays)


current_firing: contextvars.ContextVar[Firing | None] = contextvars.ContextVar(
    "jaxshare_agents_firing", default=None
)


def spawn(agent: Agent, /, *args: Any, **kwargs: Any) -> Handle:
    """Starts another agent beside the one that calls this, at once, on copies of the arguments.

    The child ends with the agent that spawned it, unless that agent has returned or yielded its
    handle: then it ends with the agent that received the handle.

    Raises:
      TypeError: not an agent, or arguments that do not fit it.
      RuntimeError: called outside an agent.
      AgentError: agents spawn each other too deep, or there are too many.
    """
    if not isinstance(agent, Agent):
        raise TypeError(f"{agent!r} is no agent: decorate an async def with @agent")
    now = current_firing.get()
    if now is None:
        raise RuntimeError(
            f"spawn({agent.name}) outside an agent; run({agent.name}, ...) runs it by itself"
        )
    if not now.is_replaying:
        handle = now.runtime.spawn(now, agent, args, kwargs, _calling_line())
        now.events.append(handle)
        return handle
    handle = now.replays.popleft() if now.replays else None
    # By name and place, since one with another supervisor, or defined in an agent, is made anew.
    if not isinstance(handle, Handle) or not agent.is_same_as(handle._run.agent):
        raise _diverged(now, f"spawns {agent.name}")
    return handle


@contextlib.contextmanager
def _dealing(what: str) -> Generator["Firing | None", None, None]:
    """Records what comes of dealing with a child; in a replay, nothing but that comes of it."""
    now = current_firing.get()
    if now is None:
        yield now
        return
    if now.is_replaying:
        assert now.replays is not None
        yield now
        event = now.replays.popleft() if now.replays else Handle
        if isinstance(event, Exception):
            raise event
        if event is not None:
            raise _diverged(now, what)
        return
    try:
        yield now
    except Exception as error:
        now.events.append(error)
        raise
    now.events.append(None)


def _diverged(now: Firing, what: str) -> DivergedError:
    return DivergedError.of(
        now.run.agent.name,
        f"{what} in line {_calling_line()}, which is not in its record; make a tool of what decides "
        "it",
    )


def _calling_line() -> int:
    """The line in the agent's own code from which `spawn` was called, directly or by a helper."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename in (__file__, contextlib.__file__):
        frame = frame.f_back
    while frame.f_back and frame.f_back.f_code.co_filename not in _DRIVERS:
        frame = frame.f_back
    return frame.f_lineno


_DRIVERS = {program.__file__, os.path.join(os.path.dirname(__file__), "courses.py")}
"""The files whose code runs that of agents."""


def check_limits(runtime: Host, agent: Agent, parent: AgentRun | None) -> None:
    """Raises an AgentError if a run may not start one more, or not that deep."""
    if parent and parent.depth + 1 > runtime.max_depth:
        raise AgentError(
            f"{parent.agent.name} spawns {agent.name} {runtime.max_depth} agents deep; if that is "
            "meant, give the runtime a larger `deepest`"
        )
    if len(runtime.runs) >= runtime.max_agents:
        raise AgentError(
            f"there were {runtime.max_agents} agents already when {agent.name} was to be "
            "spawned; if that is meant, give the runtime a larger `most_agents`"
        )


def conclusion(
    run: AgentRun, used_up: str | None = None
) -> tuple[State | None, BaseException | None]:
    """(the accepted state, the error) that a run ends with; one of the two is None.

    Without an accepted state, the error is that of the first path if all paths have failed.

    Args:
      used_up: the part of its budget that is used up, if that ends it.
    """
    accepted = run.supervisor.accepted
    if accepted is None and not isinstance(run.supervisor, Supervisor):
        finished = (state for state in run.states if state.finished)
        accepted = min(finished, key=lambda state: state.path, default=None)
    if accepted is not None:
        if accepted.finished:
            return accepted, None
        return None, accepted.error or AgentError(
            f"{supervisor_name(run)} has accepted {accepted!r}, which is not finished"
        )
    first = min(
        (state for state in run.states if state.error), key=lambda state: state.path, default=None
    )
    failure = first and first.error
    if used_up:
        error = BudgetError(
            f"agent {run.agent.name} has used up its budget ({used_up}) before it came to an end"
        )
    elif failure and all(state.fired or state.error for state in run.states):
        return None, failure
    else:
        error = AgentError(f"{supervisor_name(run)} has accepted no state")
    error.__cause__ = failure
    return None, error


def supervisor_name(run: AgentRun) -> str:
    """The name of a run's supervisor, for the start of an error message."""
    return f"{type(run.supervisor).__name__}, the supervisor of agent {run.agent.name},"


def with_note[E: BaseException](error: E, note: str) -> E:
    """The error, after the note was added to it."""
    error.add_note(note)
    return error


_ERRORS = "jaxshare.serving.agents.errors"
__getattr__ = renamed(
    __name__,
    {
        "DeadlockError": f"{_ERRORS}.DeadlockError",
        "EndedError": f"{_ERRORS}.EndedError",
        "Judged": "jaxshare.serving.agents.judging.Judged",
    },
)
