"""What agents give each other: values that are yielded, resumed with and returned, and handles of
their children."""

from typing import Any

from jaxshare.serving.agents.model_calls import constant, own
from jaxshare.serving.agents.requests import ChildNext, ChildResult, Yielded
from jaxshare.serving.agents.runs import PASSED, AgentError, AgentRun, EndedError, Handle
from jaxshare.serving.agents.states import Arrival, State


def passed(value: Any, to: AgentRun) -> Any:
    """A copy of a value, for another run. Children whose handles are in it will not end before that
    run does."""
    if constant(value):
        return value
    handles: list[Handle] = []
    copied = own(value, {PASSED: handles})
    for child in (handle._run for handle in handles):
        chain, owner = {to}, child.owner
        above = to
        while above := above.owner:
            chain.add(above)
        while owner and owner not in chain:
            owner = owner.owner
        if owner and owner is not child.owner and not child.done:
            assert child.owner
            child.owner.owned.pop(child)
            owner.owned[child] = None
            child.owner = owner
    return copied


def wait_for(run: AgentRun, state: State) -> None:
    """Sees to it that what a new state waits for arrives, where that is for another agent to
    give."""
    request = state.waiting
    if isinstance(request, Handle):
        request = state.waiting = request.result()
    if isinstance(request, Yielded):
        if run.parent is None:
            state.arrived = Arrival(
                error=AgentError(
                    f"agent {run.agent.name} yields in line {state.line}, but nobody has spawned "
                    "it who could take the value; return it"
                )
            )
        else:
            run.yields.append(state)
            _match(run)
    elif isinstance(request, (ChildNext, ChildResult)):
        other = request.child._run
        if other.runtime is not run.runtime:
            state.arrived = Arrival(
                error=AgentError(
                    f"agent {run.agent.name} waits in line {state.line} for a child of another run"
                )
            )
        elif other.done and isinstance(request, ChildNext):
            state.arrived = Arrival(error=other.error or ended(other))
        elif other.done:
            state.arrived = Arrival(other.accepted and other.accepted.value, other.error)
        elif isinstance(request, ChildResult):
            other.listeners.append(lambda arrival: run.runtime.arrive(run, state, arrival))
        else:
            if other.taken is not None:
                resume(other, None)
            other.askers.append((run, state))
            _match(other)


def _match(run: AgentRun) -> None:
    """What a run has yielded goes to who asks for it, one value at a time."""
    while run.askers and run.askers[0][0].done:
        run.askers.popleft()
    if run.taken is None and run.yields and run.askers:
        run.taken = run.yields.popleft()
        parent, state = run.askers.popleft()
        parent.runtime.arrive(parent, state, Arrival(passed(run.taken.waiting.value, parent)))


def resume(run: AgentRun, value: Any) -> None:
    """See `Handle.resume`."""
    if run.done:
        raise EndedError(f"agent {run.agent.name} has ended and cannot be resumed")
    if run.taken is None:
        raise AgentError(
            f"agent {run.agent.name} cannot be resumed: nothing that it has yielded was taken "
            "since it was resumed last; await its next() first"
        )
    state, run.taken = run.taken, None
    run.runtime.arrive(run, state, Arrival(passed(value, run)))
    _match(run)


def who_waits(runs: list[AgentRun]) -> str:
    """What a report of a deadlock says."""
    waits = []
    for run in runs:
        for state in run.asleep:
            whom = (
                f"the next value of {state.waiting.child._run.id}"
                if isinstance(state.waiting, ChildNext)
                else f"the result of {state.waiting.child._run.id}"
                if isinstance(state.waiting, ChildResult)
                else "being resumed"
            )
            waits.append(f"{run.id} waits in line {state.line} for {whom}")
    return "all agents wait: " + "; ".join(waits)


def ended(run: AgentRun) -> EndedError:
    """What asking an agent that has ended for another value comes to."""
    return EndedError(f"agent {run.agent.name} has ended and yields no more")
