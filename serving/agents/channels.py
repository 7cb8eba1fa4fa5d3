"""Channels: what a child yields and returns, as one path of its parent's run sees it.

A child belongs to the state of the agent that spawned it. Paths on which it was treated alike share
its run. Once they treat it differently, by resuming it with values of their own or by cancelling
it, all but one of them go on with a fork: a run of their own that begins where they part. So a
state that is fired again finds its children as they were, and nothing is computed twice before.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxshare.serving.agents.errors import EndedError
from jaxshare.serving.agents.layers import Layers
from jaxshare.serving.agents.states import Arrival, State

type Run = Any
"""An `AgentRun`, which holds channels itself."""


class Position(NamedTuple):
    """The place of a path in its dealings with a child.

    Attributes:
      run: the child's run, or the fork of it, that the path deals with.
      given: the number of yielded values that the path was given.
      resumes: how often it has resumed the child.
      is_cancelled: whether it has cancelled the child.
    """

    run: Run
    given: int = 0
    resumes: int = 0
    is_cancelled: bool = False


class Waiter(NamedTuple):
    """A state of `run` that waits for a child; `arrive` takes the outcome."""

    run: Run
    state: State
    arrive: Callable[[Arrival], None]


class Channel:
    """A child, as the code on one path deals with it; its place is a `Position`.

    Attributes:
      child: the run that was spawned.
      waiters: those that wait for its next value, and `listeners` those that wait for its end.
      holders: all paths that share this channel.
    """

    def __init__(self, child: Run, position: Position | None = None):
        self.child = child
        self.run, self.given, self.resumes, self.is_cancelled = position or Position(child)
        self.waiters: deque[Waiter] = deque()
        self.listeners: list[Waiter] = []
        self.holders: list[Children] = []

    @property
    def position(self) -> Position:
        """Where it is now."""
        return Position(self.run, self.given, self.resumes, self.is_cancelled)

    @property
    def is_driver(self) -> bool:
        """True if the run goes on where this channel resumes it."""
        return self.run.driver is self

    @property
    def is_behind(self) -> bool:
        """True if the run has gone on, or was ended, by another channel's doing."""
        return not self.is_driver and (self.run.resumes > self.resumes or self.run.is_called_off)

    @property
    def resumable(self) -> State | None:
        """The state with the value that was given last, if it waits to be resumed."""
        return self.run.yields[self.given - 1] if self.given > self.resumes else None

    def await_next(self, waiter: Waiter) -> None:
        """Waits for the next value that the child yields; resumes it if it still waits."""
        if self.is_cancelled:
            return waiter.arrive(Arrival(error=was_cancelled(self.run)))
        if self.resumable is not None:
            self.resume(Arrival(), waiter.run, waiter.state.path)
        elif self.is_behind:
            self.run.runtime.fork(self, waiter.run, waiter.state.path)
        if self.run.done:
            return waiter.arrive(Arrival(error=self.run.error or no_more_values(self.run)))
        self.waiters.append(waiter)
        self.run.channels[self] = None
        self.deliver()

    def await_result(self, waiter: Waiter) -> None:
        """Waits for the child's return value."""
        if self.is_cancelled:
            return waiter.arrive(Arrival(error=was_cancelled(self.run)))
        if self.is_behind:
            self.run.runtime.fork(self, waiter.run, waiter.state.path)
        if self.run.done:
            return waiter.arrive(result_of(self.run))
        self.listeners.append(waiter)
        self.run.channels[self] = None

    def deliver(self) -> None:
        """Gives the next value that was yielded to the first waiter, one value at a time."""
        while self.waiters and self.waiters[0].run.done:
            self.waiters.popleft()
        if self.waiters and self.given == self.resumes and len(self.run.yields) > self.given:
            state = self.run.yields[self.given]
            self.given += 1
            self.moved()
            self.waiters.popleft().arrive(
                Arrival(
                    state.waiting.value,
                    channels=state.children and state.children.channels,
                    positions=state.positions,
                    given=(self.child, self.position),
                )
            )

    def withdraw(self, waiter: Waiter) -> None:
        """Takes a waiter back that no longer wants the next value, or the value it was given."""
        if waiter in self.waiters:
            self.waiters.remove(waiter)
        elif waiter in self.listeners:
            self.listeners.remove(waiter)
        elif self.resumable is not None:
            self.given -= 1
            self.moved()
            self.deliver()

    def resume(self, arrival: Arrival, by: Run, path: tuple[int, ...]) -> None:
        """Continues the child after the yield whose value was given last.

        Args:
          by, path: the run that resumes it, and its firing.
        """
        if not self.is_driver:
            self.run.runtime.fork(self, by, path)
        self.run.runtime.keep_copy(self.run, self.resumes)
        state = self.resumable
        assert state is not None
        self.resumes += 1
        self.run.resumes += 1
        self.moved()
        self.run.runtime.arrive(self.run, state, arrival)
        self.deliver()

    def cancel(self) -> None:
        """Ends the child for the paths that share this channel."""
        if self.is_cancelled or (self.run.done and not self.is_behind):
            return
        run, self.is_cancelled = self.run, True
        self.moved()
        self.end(Arrival(error=was_cancelled(run)))
        if self.is_driver and not any(each.is_awaited for each in run.channels):
            run.runtime.keep_copy(run, None)
            run.runtime.call_off(run)

    @property
    def is_awaited(self) -> bool:
        """True if something waits for the child on this channel."""
        waiting = (*self.waiters, *self.listeners)
        return not all(waiter.run.done for waiter in waiting)

    def end(self, arrival: Arrival) -> None:
        """Tells all that wait that nothing more comes; the arrival is the child's result."""
        listeners, self.listeners = self.listeners, []
        waiters, self.waiters = self.waiters, deque()
        for waiter in listeners:
            waiter.arrive(arrival)
        for waiter in waiters:
            waiter.arrive(Arrival(error=arrival.error or no_more_values(self.run)))

    def moved(self) -> None:
        """Has every holder keep the new position."""
        for holder in self.holders:
            holder.moved[self.child] = self


class Children:
    """The children of one path of an agent's run, and what it has received of others' children.

    Attributes:
      positions: of children with which the path had dealings, at its last wait; never changed.
      channels: those that it has used.
      moved: channels whose positions have changed since the last wait.
      is_copy: whether the path has left the one that the run began on.
    """

    __slots__ = ("channels", "is_copy", "moved", "positions")

    def __init__(self, positions: Mapping[Run, Position] = {}, is_copy: bool = False):
        self.positions = positions if isinstance(positions, Layers) else Layers(positions)
        self.is_copy = is_copy
        self.channels: dict[Run, Channel] = {}
        self.moved: dict[Run, Channel] = {}

    def channel(self, child: Run) -> Channel:
        """The channel of a child on this path."""
        if (found := self.channels.get(child)) is None:
            found = Channel(child, self.positions.get(child)) if self.is_copy else child.channel
            self.hold(found)
        return found

    def hold(self, channel: Channel) -> None:
        """Takes over a channel, such as that of a new child."""
        self.channels[channel.child] = channel
        channel.holders.append(self)
        if channel.position != self.positions.get(channel.child, Position(channel.child)):
            self.moved[channel.child] = channel

    def receive(self, arrival: Arrival, again: bool) -> None:
        """Takes over the children whose handles came with a value.

        Args:
          again: whether another firing takes the value, too.
        """
        if arrival.given is not None and again:
            child, position = arrival.given
            self.positions = self.positions | {child: position}
        for child in arrival.children:
            if not again and arrival.channels and child in arrival.channels:
                if child not in self.channels:
                    self.hold(arrival.channels[child])
            elif (position := arrival.positions.get(child)) is not None:
                self.positions = self.positions | {child: position}

    def kept(self) -> Mapping[Run, Position]:
        """The positions now."""
        if self.moved:
            changed = {child: channel.position for child, channel in self.moved.items()}
            self.positions = self.positions | changed
            self.moved = {}
        return self.positions


def result_of(run: Run) -> Arrival:
    """The outcome of waiting for the result of a run that has ended."""
    accepted = run.accepted
    if accepted is None:
        return Arrival(error=run.error)
    channels = accepted.children and accepted.children.channels
    return Arrival(accepted.value, run.error, channels, accepted.positions)


def no_more_values(run: Run) -> EndedError:
    """The error of waiting for another value of an agent that has ended."""
    return EndedError(f"agent {run.agent.name} has ended and yields no more")


def was_cancelled(run: Run) -> EndedError:
    """The error of waiting for an agent that its parent has cancelled."""
    return EndedError(f"agent {run.agent.name} was cancelled")
