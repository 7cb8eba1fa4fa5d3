"""States of an agent, and supervisors, which decide what to fire next (Hive, section 5.1.1)."""

import contextvars
import copy
import dataclasses
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from jaxshare.serving.agents import places
from jaxshare.serving.agents.budgets import Budget
from jaxshare.serving.agents.dialogue import Message
from jaxshare.serving.agents.keeping import BEGINNING, Past
from jaxshare.serving.agents.requests import ChildNext, ChildResult, Choose, Llm, Together, Yielded

if TYPE_CHECKING:
    from jaxshare.serving.agents.compiler.frames import Frame


_FROM_AGENTS = frozenset((ChildNext, ChildResult, Yielded))
"""Requests that another agent has to answer."""


@dataclasses.dataclass(eq=False)
class State:
    """A point of an agent's run from which it can be continued any number of times.

    Attributes:
      agent: the agent's name.
      run: the id of its run.
      path: position in the tree of the run: the index of the firing of each state on the way; ()
        for the first state.
      parent: the state whose firing led to this one, None for the first.
      dialogue: the dialogue with the model that the agent works in: its own, or the one that it
        asks in or has asked in last.
      own: the agent's own dialogue, where that is another one.
      waiting: the request that the agent waits for; None before its start and at its end.
      line: the line in which it waits.
      finished: whether the agent has returned; `value` is its return value.
      error: the error that the agent has raised, which ends this path.
      score: the score given by the supervisor's value function, or None.
      fired: number of its firings.
      times: start and end of the firing that led to it, in seconds since the runtime's start.
      frame: a copy of the agent's variables and position in its code, if the state may be fired
        again and one can be made and is worth it; see `jaxshare.serving.agents.keeping`.
      arrived: the outcome of a wait for another agent, once there.
      restored: how the parent was restored for the firing that led here: "original" (its own
        frame went on), "copy" or "replay" (by its record); "" for the first state.
      course: the code that waits here, a `jaxshare.serving.agents.courses.Course`, until a firing has taken it.
      context: its context variables, for copies.
      is_uncopied: whether its frame cannot be copied.
      recall: makes the variables again, of a state that is kept by its record.
      past: what the path to it has copied and awaited.
      is_followed: whether the agent's own code has not gone on in the firing that led here.
      given: the value or the error that the firing gave to the agent, and its own dialogue then,
        for replays.
      events: the children that the firing spawned, and the errors of its other dealings with
        children, for replays.
      recorded: what the firing has read of clocks and random numbers, for replays.
      children: the children as the path to it sees them, and `positions` its place with each.
      stands_for: the state at whose wait the agent is, if a supervisor has made this one of it.
      end_error: the error that its code raised when it was ended here, which changes nothing else.
      branch: of its path; see `jaxshare.serving.agents.places`.
    """

    agent: str
    run: str
    path: tuple[int, ...]
    parent: "State | None" = None
    dialogue: tuple[Message, ...] = ()
    own: tuple[Message, ...] | None = None
    waiting: Any = None
    line: int = 0
    finished: bool = False
    value: Any = None
    error: BaseException | None = None
    score: float | None = None
    fired: int = 0
    times: tuple[float, float] = (0.0, 0.0)
    frame: "Frame | None" = dataclasses.field(default=None, repr=False)
    arrived: "Arrival | None" = dataclasses.field(default=None, repr=False)
    restored: str = ""
    course: Any = dataclasses.field(default=None, repr=False)
    context: contextvars.Context | None = dataclasses.field(default=None, repr=False)
    is_uncopied: bool = False
    recall: Callable[[], Mapping[str, Any]] | None = dataclasses.field(default=None, repr=False)
    past: Past = BEGINNING
    is_followed: bool = False
    given: tuple[Any, BaseException | None, tuple[Message, ...]] = (None, None, ())
    events: list[Any] = dataclasses.field(default_factory=list, repr=False)
    recorded: list[Any] = dataclasses.field(default_factory=list, repr=False)
    children: Any = dataclasses.field(default=None, repr=False)
    positions: Mapping[Any, Any] = dataclasses.field(default_factory=dict, repr=False)
    stands_for: "State | None" = dataclasses.field(default=None, repr=False)
    end_error: BaseException | None = None
    branch: str = dataclasses.field(default=places.FIRST, init=False, repr=False)

    def __post_init__(self) -> None:
        if (above := self.parent) is not None:
            self.branch = places.branch_after(above.branch, len(above.path), self.path[-1])

    @property
    def own_dialogue(self) -> tuple[Message, ...]:
        """The agent's own dialogue, which `llm` continues unless it is given another one."""
        return self.dialogue if self.own is None else self.own

    @property
    def ended(self) -> bool:
        """True if the agent has returned or raised, so that the state cannot be fired."""
        return self.finished or self.error is not None

    @property
    def asks_model(self) -> bool:
        """True if it waits for the model, so that every firing may lead to another state."""
        waiting = self.waiting
        return isinstance(waiting, Llm) or (isinstance(waiting, Together) and waiting.asks_model)

    @property
    def branches(self) -> bool:
        """True if its firings may lead to different states: it asks the model, or chooses."""
        return self.asks_model or isinstance(self.waiting, Choose)

    @property
    def is_proposal(self) -> bool:
        """True if it chooses among what the model has proposed: a thought only once chosen."""
        if not isinstance(self.waiting, Choose):
            return False
        above = self.parent
        while above is not None and not above.branches:
            above = above.parent
        return above is not None and above.asks_model

    def firings(self, breadth: int) -> int:
        """The number of firings of a search with this breadth; a choice has its options instead."""
        return len(self.waiting.options) if isinstance(self.waiting, Choose) else breadth

    @property
    def sleeping(self) -> bool:
        """True if it waits for a value of another agent that has not arrived."""
        return type(self.waiting) in _FROM_AGENTS and self.arrived is None

    @property
    def variables(self) -> Mapping[str, Any]:
        """A read-only view of the agent's variables.

        There are none once a state has been fired that is not kept: it cannot be copied, or its
        supervisor fires it once. Those of a state that is kept by its record are made again, which
        takes as long as to fire it again; a DivergedError says that they cannot be.
        """
        if self.frame is not None:
            held: Mapping[str, Any] = self.frame
        elif self.course:
            held = self.course.code.variables
        else:
            held = self.recall() if self.recall else {}
        return types.MappingProxyType(
            {name: value for name, value in held.items() if "." not in name}
        )

    def __repr__(self) -> str:
        if self.finished:
            situation = f"returned {self.value!r}"
        elif self.error:
            situation = f"raised {self.error!r}"
        else:
            situation = f"waits in line {self.line}" if self.path else "has not begun"
        return f"<State {self.run}{list(self.path)} {situation}>"


@dataclasses.dataclass(slots=True)
class Arrival:
    """The outcome of a state's wait: a value, or an error.

    Attributes:
      channels, positions: of the children of the agent that gives the value, for handles in it.
      given: the child that has yielded the value, and the place with it from now on.
      children: those whose handles are in the value.
    """

    value: Any = None
    error: BaseException | None = None
    channels: Mapping[Any, Any] | None = None
    positions: Mapping[Any, Any] = types.MappingProxyType({})
    given: tuple[Any, Any] | None = None
    children: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Inquiry:
    """An inquiry of a supervisor about states, such as which of them is best.

    Attributes:
      about: the state in whose place an agent is spawned.
      number: tells inquiries of one role about one state apart.
      to: a function, or an agent, which is spawned as a child of the run.
      args: its arguments.
      role: what it is, for its name in the run and notes on its errors.
      read: makes the answer of what was returned; an error of it is one of the inquiry.
    """

    about: State
    number: int
    to: Any
    args: tuple[Any, ...]
    role: Literal["vote", "feedback", "correction", "decision"]
    read: Callable[[Any], Any] = lambda returned: returned

    @property
    def path(self) -> tuple[int, ...]:
        """Its place in the tree of the run, below the state: no firing has such a number."""
        roles = get_args(type(self).__annotations__["role"])
        return *self.about.path, -2 - len(roles) * self.number - roles.index(self.role)

    @property
    def branch(self) -> str:
        """The branch of that path."""
        *above, step = self.path
        return places.branch_after(self.about.branch, len(above), step)


class Supervisor:
    """Decides which states of an agent are fired, by four callbacks that fit any agent.

    The supervisor given to @agent is a pattern: every run of the agent has a copy of its own, whose
    `init` sets up all that changes.

    An object with the four callbacks need not be derived from this class. The attributes and
    methods that it lacks are those of this class, except at its end: if it does not set `over`, its
    run is over when it fires nothing and nothing is under way; if it does not set `accepted`, the
    answer is the finished state that is first in the tree.

    Attributes:
      budget: the budget of a run.
      value: the value function, which scores the states that `judges` selects before they are
        committed: a function of the `State`, or an agent, which is spawned with the state's
        `Judged` view. It gives a number. An error of it ends the path, not the search.
      evaluations: the number of times that it is asked for each state; the score is the mean.
      over: whether nothing more is to be fired.
      accepted: once over, the finished state that is the answer, or None; a state that has raised
        ends the run with its error.
    """

    budget: Budget = Budget()
    value: Any = None
    evaluations: int = 1
    over: bool = False
    accepted: State | None = None

    def begin(self) -> Self:
        """A copy of this pattern for one run."""
        return copy.copy(self)

    def init(self, root: State) -> None:
        """Called at the start of the run, with the state before the agent's first line."""
        raise NotImplementedError

    def fire(self) -> Iterable[State]:
        """The states to fire now, each as often as listed; called after every other callback."""
        raise NotImplementedError

    def commit(self, state: State) -> None:
        """Called when a firing has led to this new state; `wake` follows if it is `sleeping`."""
        raise NotImplementedError

    def wake(self, state: State) -> None:
        """Called when the value that a sleeping state waits for has arrived."""
        raise NotImplementedError

    def judges(self, state: State) -> bool:
        """True if a new state needs a score."""
        return (
            self.value is not None
            and not state.sleeping
            and state.error is None
            and (state.branches or state.finished)
            and not state.is_proposal
        )

    def inquiries(self) -> Iterable[Inquiry]:
        """The inquiries to functions and agents whose answers it waits for, each until it is told.

        Called after `fire`. An inquiry that was asked before is not asked again.
        """
        return ()

    def answered(self, inquiry: Inquiry, value: Any, failed: State | None) -> None:
        """Called with the answer to an inquiry.

        Args:
          value: the answer.
          failed: a state with its error instead, which is in the run's tree below the state that
            the inquiry is about.
        """

    def pending(self) -> Iterable[State] | None:
        """The states that it may fire still, beside those under way; None if it may fire any.

        An engine that knows them evicts first what it has cached of the paths that are over.
        """
        return None

    def refires(self, state: State) -> bool:
        """True if it may fire a state more than once, which is then kept as it is.

        A state that is fired again against this is restored by a replay.
        """
        return True

    def stop(self, reason: str) -> None:
        """Ends the search, since the budget is used up; the answer is chosen from what there is."""
        self.over = True


def supervisor_for_run(pattern: Any) -> Supervisor:
    """A copy of a pattern for one run, with the parts of `Supervisor` that the pattern lacks."""
    if isinstance(pattern, Supervisor):
        return pattern.begin()
    made = copy.copy(pattern)
    for name in ("budget", "value", "evaluations", "over", "accepted"):
        if not hasattr(made, name):
            setattr(made, name, getattr(Supervisor, name))
    for name in ("judges", "inquiries", "answered", "pending", "refires", "stop"):
        if not hasattr(made, name):
            setattr(made, name, types.MethodType(getattr(Supervisor, name), made))
    return made


class Paths(Supervisor):
    """A supervisor that fires once each state that does not branch.

    A subclass decides in `reached` about states that branch and states that have ended.
    """

    def init(self, root: State) -> None:
        self._ready: list[State] = []
        self.over, self.accepted = False, None
        self.start(root)

    def start(self, root: State) -> None:
        """Makes the first states ready to be fired."""
        self._ready.append(root)

    def reached(self, state: State) -> None:
        """Called when a path has come to a state that branches, or to its end."""
        raise NotImplementedError

    def refires(self, state: State) -> bool:
        return state.branches or state.waiting is None

    def fire(self) -> Iterable[State]:
        ready, self._ready = self._ready, []
        return ready

    def commit(self, state: State) -> None:
        if state.ended or state.branches:
            self.reached(state)
        elif not state.sleeping:
            self._ready.append(state)

    def wake(self, state: State) -> None:
        self._ready.append(state)


class Single(Paths):
    """Follows one path, as the agent would run by itself."""

    def __init__(self, budget: Budget = Budget()):
        self.budget = budget

    def reached(self, state: State) -> None:
        if state.ended:
            self.over, self.accepted = True, state
        else:
            self._ready.append(state)

    def refires(self, state: State) -> bool:
        return False


def best(states: Iterable[State], count: int = 1) -> list[State]:
    """The states with the highest scores, best first; equal scores in the order of the tree."""
    return sorted(states, key=lambda state: (-comparable_score(state), state.path))[:count]


def comparable_score(state: State) -> float:
    """A state's score to compare it by: less than any number if it has none, or NaN."""
    return -math.inf if state.score is None or math.isnan(state.score) else state.score
