"""Inquiries of supervisors: functions and agents that vote, give feedback or decide.

A supervisor lists what it wants to know (`Supervisor.inquiries`). A function is called at once, an
agent is spawned as a child of the run. An error is never lost: it becomes a state of the run's tree.
"""

from collections.abc import Callable, Iterator
from typing import Any

from jaxshare.serving.agents.agent import Agent
from jaxshare.serving.agents.channels import result_of
from jaxshare.serving.agents.runs import AgentRun, Firing, Host, supervisor_name, with_note
from jaxshare.serving.agents.states import Arrival, Inquiry, State

Advance = Callable[[AgentRun], None]
"""Goes on with a run, once an agent has answered its supervisor."""


def firings(runtime: Host, run: AgentRun, advance: Advance) -> Iterator[State]:
    """The states that a run's supervisor wants to be fired now, also after answers at once."""
    supervisor, is_told = run.supervisor, True
    while is_told and not supervisor.over:
        yield from supervisor.fire() or ()
        is_told = not supervisor.over and _ask_all(runtime, run, advance)


def ask_again(runtime: Host, run: AgentRun, advance: Advance) -> None:
    """Asks what the supervisor of a new fork waits to be told."""
    if _ask_all(runtime, run, advance):
        advance(run)


def _ask_all(runtime: Host, run: AgentRun, advance: Advance) -> bool:
    """Asks what a run's supervisor wants to know and was not asked yet, and tells it the answers.

    Returns:
      True if the supervisor was told an answer, so that it may fire more.
    """
    supervisor = run.supervisor
    for inquiry in [*supervisor.inquiries()]:
        if inquiry.path not in run.asked:
            run.asked.add(inquiry.path)
            _ask(runtime, run, inquiry, advance)
    answers, run.answers = run.answers, []
    for inquiry, arrival in answers:
        run.asked.discard(inquiry.path)
        if not supervisor.over:
            answer, error = _read(inquiry, arrival)
            failed = None if error is None else _failed(run, inquiry, error)
            supervisor.answered(inquiry, answer, failed)
    return bool(answers)


def _ask(runtime: Host, run: AgentRun, inquiry: Inquiry, advance: Advance) -> None:
    def come(arrival: Arrival) -> None:
        run.answers.append((inquiry, arrival))
        advance(run)

    now = Firing(runtime, run, inquiry.path, inquiry.branch)
    arrival = consulted(runtime, inquiry.to, inquiry.args, now, inquiry.about.line, come)
    if arrival is not None:
        run.answers.append((inquiry, arrival))


def consulted(
    runtime: Host,
    to: Any,
    args: tuple[Any, ...],
    now: Firing,
    line: int,
    come: Callable[[Arrival], None],
) -> Arrival | None:
    """Calls a function, or spawns an agent as a child of the run that asks.

    Args:
      to, args: the function or the agent, and its arguments.
      now, line: the place of the child.
      come: gets the outcome of an agent that has not ended yet.

    Returns:
      The outcome, an error of any kind among them; None if `come` gets it.
    """
    try:
        if not isinstance(to, Agent):
            return Arrival(to(*args))
        child = runtime.spawn(now, to, args, {}, line)._run
    except Exception as error:
        return Arrival(error=error)
    if child.done:
        return result_of(child)
    child.listeners.append(come)
    return None


def _read(inquiry: Inquiry, arrival: Arrival) -> tuple[Any, BaseException | None]:
    """(the answer, None), or (None, the error that there is instead)."""
    if arrival.error is not None:
        return None, arrival.error
    try:
        return inquiry.read(arrival.value), None
    except Exception as error:
        return None, error


def _failed(run: AgentRun, inquiry: Inquiry, error: BaseException) -> State:
    """A state of the run's tree with the error of an inquiry."""
    about, now = inquiry.about, run.runtime.clock()
    failed = State(
        about.agent,
        run.id,
        inquiry.path,
        about,
        about.dialogue,
        line=about.line,
        error=with_note(error, f"in the {inquiry.role} of {supervisor_name(run)}"),
        times=(now, now),
    )
    run.states.append(failed)
    return failed
