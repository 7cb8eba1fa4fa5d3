"""States of an agent, and supervisors, which decide what to fire next (Hive, section 5.1.1)."""

import copy
import dataclasses
import types
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

from jaxshare.serving.agents.requests import ChildNext, ChildResult, Llm, Message, Yielded

if TYPE_CHECKING:
    from jaxshare.serving.agents.compiler.frames import Frame


_OF_OTHERS = frozenset((ChildNext, ChildResult, Yielded))
"""What only another agent can give."""


@dataclasses.dataclass(eq=False)
class State:
    """Where a run of an agent can be gone on from, any number of times.

    Attributes:
      agent: the agent's name.
      run: which of its runs.
      path: its position in the tree of the run: of each state on the way, which of its firings; ()
        for the first.
      parent: the state that was fired to come here, None for the first.
      dialogue: with the model, up to here.
      waiting: what the agent waits for; None where it has not begun or is at its end.
      line: in which line it waits.
      finished: whether the agent has returned; `value` is what.
      error: what the agent has raised, which ends this path.
      score: what the supervisor's value function gave it, where that was asked.
      fired: how often it was.
      times: when the firing that it comes of began and ended, in seconds since the runtime's start.
    """

    agent: str
    run: str
    path: tuple[int, ...]
    parent: "State | None" = None
    dialogue: tuple[Message, ...] = ()
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

    @property
    def ended(self) -> bool:
        """Whether there is nothing to fire: it has returned, or raised."""
        return self.finished or self.error is not None

    @property
    def asks_model(self) -> bool:
        """Whether it waits for the model, so that every firing may come to something else."""
        return isinstance(self.waiting, Llm)

    @property
    def sleeping(self) -> bool:
        """Whether it waits for another agent that has not given what it waits for."""
        return type(self.waiting) in _OF_OTHERS and self.arrived is None

    @property
    def variables(self) -> Mapping[str, Any]:
        """The agent's variables, to look at."""
        return types.MappingProxyType(
            {name: value for name, value in (self.frame or {}).items() if "." not in name}
        )

    def __repr__(self) -> str:
        what = (
            f"returned {self.value!r}"
            if self.finished
            else f"raised {self.error!r}"
            if self.error
            else f"waits in line {self.line}"
        )
        return f"<State {self.run}{list(self.path)} {what if self.path or self.ended else 'has not begun'}>"


@dataclasses.dataclass(slots=True)
class Arrival:
    """What a state waited for has come: a value, or an error."""

    value: Any = None
    error: BaseException | None = None


@dataclasses.dataclass(frozen=True)
class Budget:
    """Of one run of an agent, its own model calls alone; None is no bound.

    Attributes:
      calls: model calls; each of n answers is one, and each retry. A firing that would need one
        more is given up, and the run is at its end when nothing else can go on.
      tokens: written by the model: the same, once so many are; what is being written then is still
        counted on.
      seconds: of wall time; what is under way then is cancelled.
    """

    calls: int | None = None
    tokens: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) is not None and value <= 0:
                raise ValueError(
                    f"{field.name} of a budget is {value}; give a number above 0, or None for no "
                    "bound"
                )


class Supervisor:
    """Decides which states of an agent are fired. Four callbacks; whatever the agent is, the same
    supervisor can search its states.

    What is given to @agent is a pattern: every run of the agent has a copy of its own, whose `init`
    sets up all that changes.

    An object that has the four callbacks need not be derived from this. What it does not have of
    the rest is as it is here, but for its end: where it does not set `over`, its run is over when
    it fires nothing and nothing is under way; where it does not set `accepted`, the answer is the
    finished state that stands first in the tree.

    Attributes:
      budget: of a run.
      value: what judges states that `judges` asks for, before they are committed: a function of the
        `State`, or an agent, which is spawned with the state's `Judged` view. It gives a number.
      over: nothing more is to be fired, and
      accepted: the finished state that is the answer, None where there is none; a state that has
        raised ends the run with its error.
    """

    budget: Budget = Budget()
    value: Any = None
    over: bool = False
    accepted: State | None = None

    def begin(self) -> Self:
        """A copy for one run."""
        return copy.copy(self)

    def init(self, root: State) -> None:
        """The run begins; root has not begun."""
        raise NotImplementedError

    def fire(self) -> Iterable[State]:
        """The states to fire now, a state as many times as it is named. Asked after every other
        callback."""
        raise NotImplementedError

    def commit(self, state: State) -> None:
        """A firing has come to this new state; where it is `sleeping`, `wake` follows."""
        raise NotImplementedError

    def wake(self, state: State) -> None:
        """What a sleeping state waited for has arrived."""
        raise NotImplementedError

    def judges(self, state: State) -> bool:
        """Whether a new state needs a score."""
        return (
            self.value is not None
            and not state.sleeping
            and state.error is None
            and (state.asks_model or state.finished)
        )

    def stop(self, reason: str) -> None:
        """The budget is used up: what is there has to do."""
        self.over = True


def begun(pattern: Any) -> Supervisor:
    """A supervisor for one run. What an object with the four callbacks alone does not say is as
    `Supervisor` has it."""
    if isinstance(pattern, Supervisor):
        return pattern.begin()
    made = copy.copy(pattern)
    for name in ("budget", "value", "over", "accepted"):
        if not hasattr(made, name):
            setattr(made, name, getattr(Supervisor, name))
    for name in ("judges", "stop"):
        if not hasattr(made, name):
            setattr(made, name, types.MethodType(getattr(Supervisor, name), made))
    return made


class Paths(Supervisor):
    """What most supervisors have in common: a state in which nothing is to be chosen, since it does
    not wait for the model, is fired once.

    A subclass says in `reached` what to do with states that wait for the model, and with those that
    have ended.
    """

    def init(self, root: State) -> None:
        self._ready: list[State] = []
        self.over, self.accepted = False, None
        self.start(root)

    def start(self, root: State) -> None:
        """Fires what there is at first."""
        self._ready.append(root)

    def reached(self, state: State) -> None:
        """A path has come to a state that asks the model, or to its end."""
        raise NotImplementedError

    def fire(self) -> Iterable[State]:
        ready, self._ready = self._ready, []
        return ready

    def commit(self, state: State) -> None:
        if state.ended or state.asks_model:
            self.reached(state)
        elif not state.sleeping:
            self._ready.append(state)

    def wake(self, state: State) -> None:
        self._ready.append(state)


class Single(Paths):
    """One path, as the agent would run by itself."""

    def __init__(self, budget: Budget = Budget()):
        self.budget = budget

    def reached(self, state: State) -> None:
        if state.ended:
            self.over, self.accepted = True, state
        else:
            self._ready.append(state)
