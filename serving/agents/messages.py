"""Values passed between agents (yielded, resumed with, returned), and the ownership of children."""

from typing import Any

from jaxshare.serving.agents.model_calls import is_constant, private_copy
from jaxshare.serving.agents.requests import ChildNext, ChildResult, Yielded
from jaxshare.serving.agents.runs import HANDLES, AgentError, AgentRun, EndedError, Handle
from jaxshare.serving.agents.states import Arrival, State


def copy_for(value: Any, receiver: AgentRun) -> Any:
    """A copy of a value for another run, which comes to own the children whose handles are in it.

    A child's owner only ever moves upwards: to the nearest run that owns both the old owner and the
    receiver, directly or not.
    """
    if is_constant(value):
        return value
    handles: list[Handle] = []
    copied = private_copy(value, {HANDLES: handles})
    for child in (handle._run for handle in handles):
        owners, owner = {receiver}, child.owner
        above = receiver
        while above := above.owner:
            owners.add(above)
        while owner and owner not in owners:
            owner = owner.owner
        if owner and owner is not child.owner and not child.done:
            assert child.owner
            child.owner.owned.pop(child)
            owner.owned[child] = None
            child.owner = owner
    return copied


def register_wait(run: AgentRun, state: State) -> None:
    """Arranges that the value of a new state's wait arrives, if another agent has to give it."""
    request = state.waiting
    if isinstance(request, Handle):
        request = state.waiting = request.result()
    if isinstance(request, Yielded):
        if run.parent is None:
            state.arrived = Arrival(
                error=AgentError(
                    f"agent {run.agent.name} yields in line {state.line}, but no other agent has "
                    "spawned it and could take the value; return it"
                )
            )
        else:
            run.yields.append(state)
            _deliver_yield(run)
    elif isinstance(request, (ChildNext, ChildResult)):
        child = request.child._run
        if child.runtime is not run.runtime:
            state.arrived = Arrival(
                error=AgentError(
                    f"agent {run.agent.name} waits in line {state.line} for a child of another run"
                )
            )
        elif child.done and isinstance(request, ChildNext):
            state.arrived = Arrival(error=child.error or no_more_values(child))
        elif child.done:
            state.arrived = Arrival(child.accepted and child.accepted.value, child.error)
        elif isinstance(request, ChildResult):
            child.listeners.append(lambda arrival: run.runtime.arrive(run, state, arrival))
        else:
            if child.resumable is not None:
                resume(child, None)
            child.waiters.append((run, state))
            _deliver_yield(child)


def _deliver_yield(run: AgentRun) -> None:
    """Gives the next value that a run has yielded to its first waiter, one value at a time."""
    while run.waiters and run.waiters[0][0].done:
        run.waiters.popleft()
    if run.resumable is None and run.yields and run.waiters:
        run.resumable = run.yields.popleft()
        parent, state = run.waiters.popleft()
        value = copy_for(run.resumable.waiting.value, parent)
        parent.runtime.arrive(parent, state, Arrival(value))


def resume(run: AgentRun, value: Any) -> None:
    """Continues a run after its yield; see `Handle.resume`."""
    if run.done:
        raise EndedError(f"agent {run.agent.name} has ended and cannot be resumed")
    if run.resumable is None:
        raise AgentError(
            f"agent {run.agent.name} cannot be resumed: nothing that it has yielded was taken "
            "since it was resumed last; await its next() first"
        )
    state, run.resumable = run.resumable, None
    run.runtime.arrive(run, state, Arrival(copy_for(value, run)))
    _deliver_yield(run)


def deadlock_message(runs: list[AgentRun]) -> str:
    """A list of the waits of all runs."""
    waits = []
    for run in runs:
        for state in run.asleep:
            event = (
                f"the next value of {state.waiting.child._run.id}"
                if isinstance(state.waiting, ChildNext)
                else f"the result of {state.waiting.child._run.id}"
                if isinstance(state.waiting, ChildResult)
                else "being resumed"
            )
            waits.append(f"{run.id} waits in line {state.line} for {event}")
    return "all agents wait: " + "; ".join(waits)


def no_more_values(run: AgentRun) -> EndedError:
    """The error of waiting for another value of an agent that has ended."""
    return EndedError(f"agent {run.agent.name} has ended and yields no more")
