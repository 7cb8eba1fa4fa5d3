"""Judging new states: the value function of a supervisor, and what it sees of a state."""

import dataclasses
from typing import Any, Protocol

from jaxshare.serving.agents.agent import Agent
from jaxshare.serving.agents.dialogue import Message
from jaxshare.serving.agents.errors import AgentError
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
    """Scores a new state if the supervisor needs a score, then has it committed."""
    value = run.supervisor.value
    try:
        if not run.supervisor.judges(new):
            return runtime.commit(run, new)
        if isinstance(value, Agent):
            judging = runtime.spawn(now, value, (Judged.of(new),), {}, new.line)._run
            if judging.done:
                given = judging.accepted and judging.accepted.value
                _set_score(runtime, run, new, Arrival(given, judging.error))
            else:
                judging.listeners.append(lambda arrival: _set_score(runtime, run, new, arrival))
            return
        arrival = Arrival(value(new))
    except Exception as error:
        note = f"in the value function of {supervisor_name(run)}, of {new!r}"
        return runtime.end(run, error=with_note(error, note))
    _set_score(runtime, run, new, arrival)


def _set_score(runtime: JudgingHost, run: AgentRun, new: State, arrival: Arrival) -> None:
    if run.done:
        return
    if arrival.error is not None:
        return runtime.end(run, error=arrival.error)
    try:
        new.score = _numeric_score(run, new, arrival.value)
    except AgentError as error:
        return runtime.end(run, error=error)
    runtime.commit(run, new)


def _numeric_score(run: AgentRun, state: State, value: Any) -> float:
    """The value that a run's value function gave for a state, as a number; else an AgentError."""
    try:
        return float(value)
    except (TypeError, ValueError):
        judge = run.supervisor.value
    name = judge.name if isinstance(judge, Agent) else getattr(judge, "__name__", repr(judge))
    raise AgentError(f"the value function {name} gave {value!r} for {state!r}, which is no number")
