"""Judging new states: the value function of a supervisor, and what it sees of a state."""

import dataclasses
import functools
import math
from typing import Any, Protocol

from jaxshare.serving.agents.agent import Agent
from jaxshare.serving.agents.dialogue import Message
from jaxshare.serving.agents.errors import AgentError
from jaxshare.serving.agents.inquiries import consulted
from jaxshare.serving.agents.runs import AgentRun, Firing, Host, supervisor_name, with_note
from jaxshare.serving.agents.states import Arrival, State


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


class JudgingHost(Host, Protocol):
    """The part of a runtime that takes judged states."""

    def commit(self, run: AgentRun, new: State, /) -> None: ...
    def end(
        self, run: AgentRun, *, accepted: State | None = ..., error: BaseException | None = ...
    ) -> None: ...


def judge(runtime: JudgingHost, run: AgentRun, new: State, now: Firing) -> None:
    """Scores a new state if the supervisor needs a score, then has it committed.

    An error of the value function, or a score that is no number, becomes the state's own error: it
    ends this path, and the search goes on with the others.
    """
    try:
        is_judged = run.supervisor.judges(new)
    except Exception as error:
        return runtime.end(run, error=with_note(error, f"in {supervisor_name(run)}"))
    if is_judged:
        _Judgement(runtime, run, new).begin(now)
    else:
        runtime.commit(run, new)


class _Judgement:
    """The evaluations of one state, whose mean is its score."""

    def __init__(self, runtime: JudgingHost, run: AgentRun, new: State):
        self._runtime, self._run, self._new = runtime, run, new
        self._arrivals: dict[int, Arrival] = {}

    def begin(self, now: Firing) -> None:
        """Calls the value function, or spawns the judges."""
        judge, new = self._run.supervisor.value, self._new
        args = (Judged.of(new) if isinstance(judge, Agent) else new,)
        for number in range(self._run.supervisor.evaluations):
            come = functools.partial(self._came, number)
            arrival = consulted(self._runtime, judge, args, now, new.line, come)
            if arrival is not None:
                come(arrival)

    def _came(self, number: int, arrival: Arrival) -> None:
        run, new, times = self._run, self._new, self._run.supervisor.evaluations
        self._arrivals[number] = arrival
        if run.done or len(self._arrivals) < times:
            return
        try:
            scores = [self._score(self._arrivals[number]) for number in range(times)]
            new.score = scores[0] if times == 1 else math.fsum(scores) / times
        except Exception as error:
            note = f"in the value function of {supervisor_name(run)}, of {new!r}"
            new.finished, new.error = False, with_note(error, note)
        self._runtime.commit(run, new)

    def _score(self, arrival: Arrival) -> float:
        """The number of one evaluation; raises its error, or an AgentError for something else."""
        if arrival.error is not None:
            raise arrival.error
        try:
            return float(arrival.value)
        except (TypeError, ValueError):
            value = self._run.supervisor.value
        name = value.name if isinstance(value, Agent) else getattr(value, "__name__", repr(value))
        raise AgentError(
            f"the value function {name} gave {arrival.value!r} for {self._new!r}, which is no "
            "number"
        )
