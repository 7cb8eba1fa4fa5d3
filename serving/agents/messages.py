"""Values passed between agents (yielded, resumed with, returned), and the ownership of children."""

import dataclasses
from typing import Any

from jaxshare.serving.agents.channels import Channel, Children, Waiter, result_of
from jaxshare.serving.agents.errors import AgentError, EndedError
from jaxshare.serving.agents.layers import Layers
from jaxshare.serving.agents.model_calls import is_constant, private_copy
from jaxshare.serving.agents.requests import ChildNext, ChildResult, Yielded
from jaxshare.serving.agents.runs import HANDLES, AgentRun, Firing, Handle, channel_of
from jaxshare.serving.agents.states import Arrival, State


def copy_for(value: Any, receiver: AgentRun, children: list[AgentRun] | None = None) -> Any:
    """A copy of a value for another run, which comes to own the children whose handles are in it.

    A child's owner only ever moves upwards: to the nearest run that owns both the old owner and the
    receiver, directly or not.

    Args:
      children: gets the children whose handles are in the value.
    """
    if is_constant(value):
        return value
    handles: list[Handle] = []
    copied = private_copy(value, {HANDLES: handles})
    for child in (handle._run for handle in handles):
        if children is not None:
            children.append(child)
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


def received(arrival: Arrival, run: AgentRun) -> Arrival:
    """An arrival with a copy of its value for one firing of a run."""
    if is_constant(arrival.value):
        return arrival
    children: list[AgentRun] = []
    value = copy_for(arrival.value, run, children)
    return dataclasses.replace(arrival, value=value, children=tuple(children))


def children_of_arguments(by: Firing, given: list[AgentRun]) -> Children:
    """The children that a new agent holds, since their handles are in its arguments."""
    children = Children()
    for child in given:
        children.hold(channel_of(child, by))
    held = children.channels.items()
    children.positions = Layers({child: channel.position for child, channel in held})
    return children


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
            for channel in list(run.channels):
                channel.deliver()
    elif isinstance(request, (ChildNext, ChildResult)):
        waiter = Waiter(run, state, lambda arrival: run.runtime.arrive(run, state, arrival))
        await_child(request, waiter)


def await_child(request: ChildNext | ChildResult, waiter: Waiter) -> Channel | None:
    """Waits for a child; returns the channel on which that is."""
    run, state, child = waiter.run, waiter.state, request.child._run
    if child.runtime is not run.runtime:
        error = f"agent {run.agent.name} waits in line {state.line} for a child of another run"
        waiter.arrive(Arrival(error=AgentError(error)))
        return None
    channel: Channel = state.children.channel(child)
    if isinstance(request, ChildNext):
        channel.await_next(waiter)
    else:
        channel.await_result(waiter)
    return channel


def resume(child: AgentRun, value: Any, now: Firing | None) -> None:
    """Continues a child after its yield; see `Handle.resume`."""
    channel = channel_of(child, now)
    if channel.is_cancelled or (channel.run.done and not channel.is_behind):
        raise EndedError(f"agent {child.agent.name} has ended and cannot be resumed")
    if channel.resumable is None:
        raise AgentError(
            f"agent {child.agent.name} cannot be resumed: nothing that it has yielded was taken "
            "since it was resumed last; await its next() first"
        )
    arrival = Arrival(copy_for(value, channel.run))
    if now is not None and now.children is not None:
        arrival.channels, arrival.positions = now.children.channels, now.children.kept()
    by = now.run if now else child.owner or child
    channel.resume(arrival, by, now.path if now else ())


def announce_end(run: AgentRun) -> None:
    """Gives the outcome of a run that has ended to all that wait for it."""
    if run.error is not None and run.parent and not run.cancelled:
        run.error.add_note(
            f"in agent {run.agent.name}, spawned by {run.parent.agent.name} in line "
            f"{run.spawned_in} of {run.parent.agent.file}"
        )
    arrival = result_of(run)
    for listener in run.listeners:
        listener(arrival)
    run.listeners.clear()
    for channel in list(run.channels):
        channel.end(arrival)


def deadlock_message(runs: list[AgentRun], together: list[tuple[AgentRun, State]]) -> str:
    """A list of the waits of all runs, and of those for several agents."""
    waits = [f"{run.id} waits in line {state.line} for several agents" for run, state in together]
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
