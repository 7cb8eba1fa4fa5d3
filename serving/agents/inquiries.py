"""Inquiries of supervisors: functions and agents that vote, give feedback or decide.

A supervisor lists what it wants to know (`Supervisor.inquiries`). A function is called at once, an
agent is spawned as a child of the run. An error is never lost: it becomes a state of the run's tree.
"""

from collections.abc import Callable
from typing import Any

from jaxshare.serving.agents.agent import Agent
from jaxshare.serving.agents.runs import AgentRun, Firing, Host, supervisor_name, with_note
from jaxshare.serving.agents.states import Arrival, Inquiry, State


def ask(runtime: Host, run: AgentRun, advance: Callable[[AgentRun], None]) -> bool:
    """Asks what a run's supervisor wants to know and was not asked yet, and tells it the answers.

    Args:
      advance: goes on with the run, once an agent has answered.

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


def _ask(
    runtime: Host, run: AgentRun, inquiry: Inquiry, advance: Callable[[AgentRun], None]
) -> None:
    def come(arrival: Arrival) -> None:
        run.answers.append((inquiry, arrival))
        advance(run)

    try:
        if isinstance(inquiry.to, Agent):
            now, line = Firing(runtime, run, inquiry.path), inquiry.about.line
            child = runtime.spawn(now, inquiry.to, inquiry.args, {}, line)._run
            if not child.done:
                child.listeners.append(come)
                return
            arrival = Arrival(child.accepted and child.accepted.value, child.error)
        else:
            arrival = Arrival(inquiry.to(*inquiry.args))
    except Exception as error:
        arrival = Arrival(error=error)
    run.answers.append((inquiry, arrival))


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
