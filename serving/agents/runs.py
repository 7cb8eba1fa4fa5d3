"""One run of an agent, as its supervisor, its parent and a trace see it, and the handle that its
parent has of it."""

import asyncio
import contextvars
import dataclasses
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from jaxshare.serving.agents.agent import Agent
from jaxshare.serving.agents.compiler import program
from jaxshare.serving.agents.compiler.frames import shared
from jaxshare.serving.agents.requests import ChildNext, ChildResult, Message, Model
from jaxshare.serving.agents.states import Arrival, State, Supervisor


class Host(Protocol):
    """The runtime as runs and their calls know it: `jaxshare.serving.agents.runtime.Runtime`."""

    @property
    def model(self) -> Model: ...
    @property
    def seed(self) -> int: ...
    @property
    def slots(self) -> asyncio.Semaphore | None: ...
    def clock(self) -> float: ...
    def resume(self, run: "AgentRun", value: Any) -> None: ...
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
    """Something that agents did to each other, or a supervisor to its agent, that cannot be."""


class DeadlockError(AgentError):
    """All agents wait for each other; the message says who waits for whom."""


class BudgetError(AgentError):
    """An agent's budget was used up before any of its paths had come to an end."""


class EndedError(AgentError):
    """A child that has ended was resumed, or asked for a value that it did not yield; or it was
    ended because nobody needs it any more."""


PASSED: Any = "passed"
"""Under this the memo of a copy may have a list, in which the handles that are in it are put."""


@shared
class Handle:
    """A child, as its parent has it. Copies of a state share it."""

    def __init__(self, run: "AgentRun"):
        self._run = run

    def next(self) -> ChildNext:
        """To be awaited: the value that the child yields next. If it still waits to be resumed, it
        is, with None.

        Raises (where it is awaited): what the child has raised; EndedError if it has ended and
        yields no more.
        """
        return ChildNext(self)

    def result(self) -> ChildResult:
        """To be awaited: what the child returns; raises what it has raised."""
        return ChildResult(self)

    def resume(self, value: Any = None) -> None:
        """Gives the child's `yield`, whose value was awaited last, this value.

        Raises:
          EndedError: the child has ended.
          AgentError: nothing that it has yielded was taken since it was resumed last.
        """
        self._run.runtime.resume(self._run, value)

    def __await__(self) -> Any:
        return self.result().__await__()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Handle":
        memo.get(PASSED, []).append(self)
        return self

    def __repr__(self) -> str:
        return f"<child {self._run.id}>"


class AgentRun:
    """One run of an agent.

    Attributes:
      id: the path of agents that led there, and where each was spawned.
      agent, supervisor, parent: supervisor is this run's own; parent has spawned it,
      spawned_in: in this line.
      owner: with whose end it ends: the parent, or, once that has given its handle away upwards,
        who has it then.
      root: its first state; states: all, in the order in which they were committed.
      children: runs that it has spawned.
      calls, new_tokens, prompt_tokens: of its model calls.
      began, ended: seconds since the runtime's start.
      done: whether it is over; then `accepted` is the state that it ended with, or `error` why
        there is none.
      cancelled: whether it was ended because nobody needed it any more.
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
        self.runtime, self.id, self.agent, self.supervisor, self.parent = (
            runtime,
            id,
            agent,
            supervisor,
            parent,
        )
        self.owner, self.spawned_in = parent, spawned_in
        self.depth: int = parent.depth + 1 if parent else 0
        self.root = State(agent.name, id, ())
        self.states = [self.root]
        self.children: list[AgentRun] = []
        # that end with it, in the order in which they became its own
        self.owned: dict[AgentRun, None] = {}
        self.calls = self.new_tokens = self.prompt_tokens = 0
        self.began, self.ended = runtime.clock(), 0.0
        self.done = self.cancelled = False
        self.accepted: State | None = None
        self.error: BaseException | None = None
        self.handle = Handle(self)
        # What is under way: firings that have not come to a new state, and those of them that have
        # a task.
        self.firings = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.used_up: str | None = None  # of its budget, so that a firing had to be given up
        self.timer: asyncio.TimerHandle | None = None
        # What sleeps.
        self.asleep: dict[State, None] = {}
        self.early: list[State] = []  # fired while they sleep
        self.askers: deque[tuple[AgentRun, State]] = deque()  # who wait for its next value,
        self.listeners: list[Callable[[Arrival], None]] = []  # and for its end
        self.yields: deque[State] = deque()  # that nobody has asked for yet
        self.taken: State | None = None  # whose yield was given, and waits to be resumed


@dataclasses.dataclass(slots=True)
class Firing:
    """The piece of an agent's code that is running."""

    runtime: Host
    run: AgentRun
    path: tuple[int, ...]
    spawned: int = 0


firing: contextvars.ContextVar[Firing | None] = contextvars.ContextVar(
    "jaxshare_agents_firing", default=None
)


def spawn(agent: Agent, /, *args: Any, **kwargs: Any) -> Handle:
    """To be called in an agent: runs another beside it, at once, on copies of the arguments. It
    ends with the agent that has spawned it, unless that has returned or yielded its handle: then
    with the agent that got it.

    Raises:
      TypeError: no agent, or arguments that do not fit it.
      RuntimeError: outside an agent.
      AgentError: agents spawn each other too deep, or there are too many.
    """
    if not isinstance(agent, Agent):
        raise TypeError(f"{agent!r} is no agent: decorate an async def with @agent")
    now = firing.get()
    if now is None:
        raise RuntimeError(
            f"spawn({agent.name}) outside an agent; run({agent.name}, ...) runs it by itself"
        )
    return now.runtime.spawn(now, agent, args, kwargs, _agents_line())


def _agents_line() -> int:
    """The line that an agent's own code has come to, which has called what has called this."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_back.f_code.co_filename != program.__file__:
        frame = frame.f_back
    return frame.f_lineno


@dataclasses.dataclass(frozen=True)
class Judged:
    """A state, as an agent that judges it sees it.

    Attributes:
      variables: of the agent that is judged.
      dialogue: its dialogue with the model.
      finished, value: whether it has returned, and what.
    """

    variables: dict[str, Any]
    dialogue: tuple[Message, ...]
    finished: bool
    value: Any

    @classmethod
    def of(cls, state: State) -> "Judged":
        """What there is to see of a state."""
        return cls(dict(state.variables), state.dialogue, state.finished, state.value)
