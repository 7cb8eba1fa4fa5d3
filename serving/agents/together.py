"""The outcome of a wait for several requests at once; see `jaxshare.serving.agents.concurrency`."""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from jaxshare.serving.agents.channels import Channel, Children, Waiter
from jaxshare.serving.agents.dialogues import Continuing, Said
from jaxshare.serving.agents.messages import await_child, received
from jaxshare.serving.agents.model_calls import UsedUpError
from jaxshare.serving.agents.requests import ChildNext, ChildResult, Together
from jaxshare.serving.agents.runs import AgentRun, Firing, Host
from jaxshare.serving.agents.states import Arrival, State
from jaxshare.serving.agents.tool_rounds import Follow, settled

Answered = Callable[[Host, AgentRun, State, tuple[int, ...]], Coroutine[Any, Any, Any]]
"""Awaits one request: (runtime, run, the state that waits for it, path) to (value, messages)."""


class First(NamedTuple):
    """The part that `first` has waited for: its index, and its result."""

    index: int
    value: Any


@dataclasses.dataclass(frozen=True)
class Gathered:
    """The value of a wait for several requests, and the arrivals from children in it."""

    value: Any
    arrivals: list[Arrival]


class _JointWait:
    """One firing of a state that waits for several requests.

    Attributes:
      arrivals: from children.
      said: in dialogues that parts continue, by the index of the part.
      futures: one for each part.
    """

    def __init__(self, runtime: Host, run: AgentRun, state: State, now: Firing, answered: Answered):
        self.runtime, self.run, self.state, self.now = runtime, run, state, now
        self.answered = answered
        self.arrivals: list[Arrival] = []
        self.said: dict[int, Said] = {}
        # Of parts that wait for a child: the channel, the waiter, and whether it is for a next value.
        self._waiters: dict[asyncio.Future[Any], tuple[Channel, Waiter, bool]] = {}
        children = state.children
        if now.path[-1] or state.course is None:
            children = now.children = Children(state.positions, is_copy=True)
        self._at = dataclasses.replace(state, children=children)

    def begin(self, part: Any, path: tuple[int, ...]) -> asyncio.Future[Any]:
        """A future with the part's value; the runtime's task awaits it."""
        if not isinstance(part, (ChildNext, ChildResult)):
            return asyncio.ensure_future(self._value(part, path))
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def arrive(arrival: Arrival) -> None:
            if future.done():
                return
            self.runtime.unpark(self.run, self.state)
            if arrival.error is not None:
                return future.set_exception(arrival.error)
            arrival = received(arrival, self.run)
            arrival.given = None  # the channel has it
            self.arrivals.append(arrival)
            future.set_result(arrival.value)

        waiter = Waiter(self.run, self._at, arrive)
        if (channel := await_child(part, waiter)) is not None:
            self._waiters[future] = channel, waiter, isinstance(part, ChildNext)
        return future

    async def _value(self, part: Any, path: tuple[int, ...]) -> Any:
        if isinstance(part, Together):
            return await self.value(part, path)
        at = dataclasses.replace(self.state, waiting=part)
        while True:
            found = await self.answered(self.runtime, self.run, at, path)
            value, messages = settled(self.run, at.waiting, *found)
            if isinstance(value, Continuing):
                self.said[-1 - path[len(self.now.path)]] = value.said[0]
                return value.value
            if not isinstance(value, Follow):
                return value
            dialogue = (*at.own_dialogue, *messages)
            at = dataclasses.replace(at, waiting=value.request, dialogue=dialogue, own=None)
            path = (*path, -1)

    async def value(self, request: Together, path: tuple[int, ...]) -> Any:
        """The value of the request; what is not needed for it is ended."""
        decided = self._recorded(request, path)
        parts = [
            (index, part)
            for index, part in enumerate(request.parts)
            if decided is None or index in decided
        ]
        futures = {index: self.begin(part, (*path, -1 - index)) for index, part in parts}
        found: list[int] = []
        try:
            async with asyncio.timeout(request.timeout if decided is None else None):
                found = await self._found(request, futures)
        except TimeoutError as error:
            if decided is None and not str(error) and request.timeout is not None:
                seconds = f"{request.timeout} second{'s' * (request.timeout != 1)}"
                error = TimeoutError(
                    f"agent {self.run.agent.name} has waited in line {self.state.line} for {seconds}"
                )
                self._record_error(path, error)
            raise error
        finally:
            await self._end(futures, found)
        if decided is None:
            self._record(path, found)
        return _value_of(request, futures, found)

    async def _found(self, request: Together, futures: dict[int, asyncio.Future[Any]]) -> list[int]:
        """The parts that decide: all, the first one, or the one whose error is raised."""
        open_ = dict(futures)
        if request.timeout is None:
            with self.runtime.desk.waiting(open_):
                return await self._found_among(request, open_) or list(futures)
        return await self._found_among(request, open_) or list(futures)

    async def _found_among(
        self, request: Together, open_: dict[int, asyncio.Future[Any]]
    ) -> list[int]:
        """The one part that decides; none if all do. `open_` has those under way meanwhile."""
        while open_:
            if not any(future.done() for future in open_.values()):
                if request.timeout is None and not any(
                    isinstance(future, asyncio.Task) for future in open_.values()
                ):
                    self.runtime.park(self.run, self.state)
                await asyncio.wait(open_.values(), return_when=asyncio.FIRST_COMPLETED)
            for index in [index for index, future in open_.items() if future.done()]:
                future = open_.pop(index)
                failed = future.cancelled() or future.exception() is not None
                if request.mode == "first" or (failed and not request.return_exceptions):
                    return [index]
            self.runtime.desk.look()
        return []

    async def _end(self, futures: dict[int, asyncio.Future[Any]], found: list[int]) -> None:
        """Ends what is under way, and gives back what children have yielded for nothing."""
        self.runtime.unpark(self.run, self.state)
        tasks = [future for future in futures.values() if isinstance(future, asyncio.Task)]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
        for index, future in futures.items():
            if future in self._waiters and index not in found:
                channel, waiter, is_next = self._waiters[future]
                failed = future.done() and future.exception() is not None
                if not failed and (is_next or not future.done()):
                    channel.withdraw(waiter)
                future.cancel()

    # The journal has what has decided about the value; the parts have entries of their own.

    def _recorded(self, request: Together, path: tuple[int, ...]) -> Any:
        journal = self.runtime.journal
        if journal is None or not (replay := journal.lookup((self.run.id, path), request)):
            return None
        return replay()[0]

    def _record(self, path: tuple[int, ...], found: list[int]) -> None:
        if self.runtime.journal is not None:
            self.runtime.journal.record_value((self.run.id, path), found, ())

    def _record_error(self, path: tuple[int, ...], error: Exception) -> None:
        if self.runtime.journal is not None:
            self.runtime.journal.record_error((self.run.id, path), error)


def _value_of(request: Together, futures: dict[int, asyncio.Future[Any]], found: list[int]) -> Any:
    """The value of a request of which these parts decide; raises the error of one."""
    results = []
    for index in found:
        future = futures[index]
        error = asyncio.CancelledError() if future.cancelled() else future.exception()
        if error is not None and (not request.return_exceptions or isinstance(error, UsedUpError)):
            raise error
        results.append(future.result() if error is None else error)
    if request.mode == "first":
        return First(found[0], results[0])
    return results[0] if request.mode == "one" else results


async def together(
    runtime: Host,
    run: AgentRun,
    state: State,
    now: Firing,
    request: Together,
    path: tuple[int, ...],
    answered: Answered,
) -> tuple[Gathered, tuple[()]]:
    """(the outcome of a wait for several requests, no messages)."""
    wait = _JointWait(runtime, run, state, now, answered)
    value = await wait.value(request, path)
    if wait.said:
        one = value.index if isinstance(value, First) else None
        said = [each._replace(index=i) for i, each in wait.said.items() if one in (None, i)]
        value = Continuing(value, said)
    return Gathered(value, wait.arrivals), ()
