"""One run of an agent, as its supervisor, its parent and a search log see it, and its handle."""

import asyncio
import contextvars
import dataclasses
import os
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from jaxshare.serving.agents.agent import Agent
from jaxshare.serving.agents.compiler import program
from jaxshare.serving.agents.compiler.frames import shared
from jaxshare.serving.agents.dialogue import Message
from jaxshare.serving.agents.requests import ChildNext, ChildResult, Model
from jaxshare.serving.agents.states import Arrival, State, Supervisor


class Host(Protocol):
    """The part of `jaxshare.serving.agents.runtime.Runtime` that runs and their requests use."""

    @property
    def model(self) -> Model: ...
    @property
    def seed(self) -> int: ...
    @property
    def journal(self) -> Any: ...
    @property
    def max_agents(self) -> int: ...
    @property
    def max_depth(self) -> int: ...
    @property
    def runs(self) -> "list[AgentRun]": ...
    @property
    def call_slots(self) -> asyncio.Semaphore | None: ...
    def clock(self) -> float: ...
    def resume(self, run: "AgentRun", value: Any) -> None: ...
    def arrive(self, run: "AgentRun", state: State, arrival: Arrival) -> None: ...
    def spawn(
        self,
        by: "Firing",
        agent: Agent,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        line: int,
        /,
    ) -> "Handle": ...


class AgentError(RuntimeError):
    """An impossible interaction between agents, or between a supervisor and its agent."""


class RoundsError(AgentError):
    """A model calls tools again after as many answers with calls as `llm` allows."""


class DivergedError(AgentError):
    """An agent that was run again, to restore a state, did not do what it had done before."""


class DeadlockError(AgentError):
    """All agents wait for each other; the message lists the waits."""


class BudgetError(AgentError):
    """The budget of an agent was used up before any of its paths had ended."""


class EndedError(AgentError):
    """A child that has ended was resumed, or had to yield once more; or it was ended unneeded."""


HANDLES: Any = "handles"
"""The memo key of the list that collects the handles found while a value is copied."""


@shared
class Handle:
    """A child, as its parent holds it. Copies of a state share it."""

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
        self._run.runtime.resume(self._run, value)

    def __await__(self) -> Any:
        return self.result().__await__()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Handle":
        memo.get(HANDLES, []).append(self)
        return self

    def __repr__(self) -> str:
        return f"<child {self._run.id}>"


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
      calls, new_tokens, prompt_tokens: counts of its model calls and their tokens.
      began, ended: seconds since the runtime's start.
      done: whether it is over; then either `accepted` is the state that it ended with, or `error`
        is the reason why there is none.
      cancelled: whether it was ended because its owner ended.
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
        self.root = State(agent.name, id, ())
        self.states = [self.root]
        # Copies of its arguments, for replays; or why there are none.
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.uncopied: Exception | None = None
        self.children: list[AgentRun] = []
        # Runs that end with this one, in the order in which it became their owner.
        self.owned: dict[AgentRun, None] = {}
        self.calls = self.new_tokens = self.prompt_tokens = 0
        self.began, self.ended = runtime.clock(), 0.0
        self.done = self.cancelled = False
        self.accepted: State | None = None
        self.error: BaseException | None = None
        self.handle = Handle(self)
        # Firings without a new state so far, and the tasks of those that await something.
        self.firings = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.used_up: str | None = None  # the part of the budget that made a firing be given up
        self.timer: asyncio.TimerHandle | None = None
        # States that wait for another agent, and those of them that were fired meanwhile.
        self.asleep: dict[State, None] = {}
        self.fired_early: list[State] = []
        # States of other runs that wait for its next value, and callbacks for its end.
        self.waiters: deque[tuple[AgentRun, State]] = deque()
        self.listeners: list[Callable[[Arrival], None]] = []
        # States with a yielded value that is not taken yet; the one whose value was taken last and
        # that waits to be resumed.
        self.yields: deque[State] = deque()
        self.resumable: State | None = None


@dataclasses.dataclass(slots=True)
class Firing:
    """The piece of an agent's code that is running.

    Attributes:
      spawned, handles: the number of children that it has spawned so far, and they themselves.
      replays: in a replay, the children that the agent spawned then and that were not met yet.
      restored: how the fired state was restored; see `State.restored`.
    """

    runtime: Host
    run: AgentRun
    path: tuple[int, ...]
    spawned: int = 0
    handles: list[Handle] = dataclasses.field(default_factory=list)
    replays: deque[Handle] | None = None
    restored: str = "original"


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
    if now.replays is None:
        now.handles.append(now.runtime.spawn(now, agent, args, kwargs, _calling_line()))
        return now.handles[-1]
    if not now.replays or now.replays[0]._run.agent is not agent:
        raise DivergedError(
            f"agent {now.run.agent.name} was run again to restore a state, and spawns {agent.name} "
            f"in line {_calling_line()}, which is not in its record; make a tool of what decides it"
        )
    return now.replays.popleft()


def _calling_line() -> int:
    """The line in the agent's own code from which `spawn` was called, directly or by a helper."""
    frame = sys._getframe(2)
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


@dataclasses.dataclass(frozen=True)
class Judged:
    """A state, as an agent that judges it sees it.

    Attributes:
      variables: variables of the judged agent.
      dialogue: its dialogue with the model.
      finished, value: whether it has returned, and its value.
    """

    variables: dict[str, Any]
    dialogue: tuple[Message, ...]
    finished: bool
    value: Any

    @classmethod
    def of(cls, state: State) -> "Judged":
        """The visible parts of a state."""
        return cls(dict(state.variables), state.dialogue, state.finished, state.value)


def numeric_score(run: AgentRun, state: State, value: Any) -> float:
    """The value that a run's value function gave for a state, as a number; else an AgentError."""
    try:
        return float(value)
    except (TypeError, ValueError):
        judge = run.supervisor.value
    name = judge.name if isinstance(judge, Agent) else getattr(judge, "__name__", repr(judge))
    raise AgentError(f"the value function {name} gave {value!r} for {state!r}, which is no number")
