"""The asynchronous runtime: runs agents under their supervisors, and moves values between them.

Follows section 5.1.1 of Hive. A firing completes the wait of a state, then runs the agent's code to
its next wait. That is a new state, which is committed to the supervisor. Many states of many agents
are under way at once. Their relative speed decides nothing, except what a supervisor makes of the
order in which states are committed.

Firings are queued, and the event loop drains the queue. Only a firing that has to await something
gets a task.
"""

import asyncio
import contextvars
import time
from collections import deque
from typing import Any

from jaxshare.serving.agents.agent import Agent
from jaxshare.serving.agents.courses import begun
from jaxshare.serving.agents.firings import (
    close_coroutines,
    close_courses,
    outcome,
    run_to_next_wait,
)
from jaxshare.serving.agents.messages import (
    copy_for,
    deadlock_message,
    no_more_values,
    register_wait,
    resume,
)
from jaxshare.serving.agents.model_calls import UsedUpError
from jaxshare.serving.agents.requests import Model
from jaxshare.serving.agents.runs import (
    AgentError,
    AgentRun,
    BudgetError,
    DeadlockError,
    EndedError,
    Firing,
    Handle,
    Judged,
    check_limits,
    conclusion,
    numeric_score,
    spawn,
    supervisor_name,
    with_note,
)
from jaxshare.serving.agents.states import Arrival, State, Supervisor, supervisor_for_run

__all__ = [
    "AgentError",
    "AgentRun",
    "BudgetError",
    "DeadlockError",
    "EndedError",
    "Handle",
    "Judged",
    "Runtime",
    "run",
    "spawn",
]

MAX_FIRINGS = 256
"""Firings from the queue before other callbacks of the event loop get their turn."""


class Runtime:
    """Runs one agent, and all that it spawns.

    Args:
      model: answers `llm`.
      seed: seed of everything random.
      most_agents: limit of agent runs in all; beyond it, spawning is an error.
      deepest: limit of nested spawning, where recursion ends with an error.
      most_calls: limit of model calls under way at once; None for no limit.
      journal: replays a run, or records one; see `jaxshare.serving.agents.journal`.
    """

    def __init__(
        self,
        model: Model,
        *,
        seed: int = 0,
        most_agents: int = 100_000,
        deepest: int = 64,
        most_calls: int | None = None,
        journal: Any = None,
    ):
        self.model, self.seed, self.journal = model, seed, journal
        self.max_agents, self.max_depth = most_agents, deepest
        self.runs: list[AgentRun] = []
        self.call_slots = asyncio.Semaphore(most_calls) if most_calls else None
        # Firings: (run, the fired state, the state that it will become).
        self._queue: deque[tuple[AgentRun, State, State]] = deque()
        self._draining = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._start_time = time.perf_counter()
        self._finished: asyncio.Future[None] | None = None

    def clock(self) -> float:
        """Seconds since the runtime was made."""
        return time.perf_counter() - self._start_time

    async def run(self, agent: Agent, /, *args: Any, **kwargs: Any) -> AgentRun:
        """Runs an agent to its end; the `accepted.value` of the run is the agent's return value.

        Raises the agent's own error, with notes on the agents that led to it; and
          DeadlockError: all agents wait for each other.
          BudgetError: its budget was used up before any path had ended.
          AgentError: its supervisor never fires a state, or agents interact in an impossible way.
        """
        if not isinstance(agent, Agent):
            raise TypeError(f"{agent!r} is no agent: decorate an async def with @agent")
        if self._finished is not None:
            raise RuntimeError("a runtime runs one agent, and what that spawns; make another")
        self._loop, self._context = asyncio.get_running_loop(), contextvars.copy_context()
        self._finished = self._loop.create_future()
        run = self._start(agent, args, kwargs, None, agent.name, 0)
        try:
            await self._finished
        finally:
            if not run.done:
                self._end(run, error=EndedError(f"agent {agent.name} was interrupted"))
            self._queue.clear()
            if self._tasks:
                await asyncio.wait(self._tasks)
            close_coroutines(self.runs)
        if run.error is not None:
            raise run.error
        return run

    # Starting and ending runs.

    def spawn(
        self, by: Firing, agent: Agent, args: tuple[Any, ...], kwargs: dict[str, Any], line: int
    ) -> Handle:
        """Starts a child of the run whose code is running, or whose state is judged."""
        id = f"{by.run.id}/{agent.name}@{'.'.join(map(str, by.path))}"
        if by.spawned > 0:
            id += f"#{by.spawned}"
        by.spawned += 1
        return self._start(agent, args, kwargs, by.run, id, line).handle

    def _start(
        self,
        agent: Agent,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parent: AgentRun | None,
        id: str,
        line: int,
    ) -> AgentRun:
        check_limits(self, agent, parent)
        run = AgentRun(self, id, agent, supervisor_for_run(agent.supervisor), parent, line)
        if parent:
            args, kwargs = copy_for(args, run), copy_for(kwargs, run) if kwargs else {}
        begun(run, run.root, args, kwargs)
        self.runs.append(run)
        if parent:
            parent.children.append(run)
            parent.owned[run] = None
        if (seconds := run.supervisor.budget.seconds) is not None:
            run.timer = self._loop.call_later(
                seconds, self._stop_from_outside, run, f"{seconds} seconds"
            )
        try:
            run.supervisor.init(run.root)
        except Exception as error:
            self._end_by_supervisor_error(run, error)
        self._advance(run)
        return run

    def _advance(self, run: AgentRun) -> None:
        """Fires the states that the supervisor names; ends the run if it is over."""
        if run.done:
            return
        supervisor = run.supervisor
        try:
            if not supervisor.over:
                for state in supervisor.fire() or ():
                    self._fire(run, state)
            over = supervisor.over
        except Exception as error:
            return self._end_by_supervisor_error(run, error)
        if over:
            self._conclude(run)
        elif not run.firings and not run.asleep:
            # Nothing is under way, so nothing will call the supervisor again.
            if run.used_up:
                self._stop(run, run.used_up)
            elif not isinstance(supervisor, Supervisor) and any(
                state.ended for state in run.states
            ):
                self._conclude(run)
            else:
                message = f"{supervisor_name(run)} fires no state, and is not over"
                self._end(run, error=AgentError(f"{message}: nothing can go on"))

    def _stop(self, run: AgentRun, used_up: str) -> None:
        """Ends a run whose budget is used up, by the best state so far."""
        try:
            run.supervisor.stop(used_up)
        except Exception as error:
            return self._end_by_supervisor_error(run, error)
        self._conclude(run, used_up)

    def _stop_from_outside(self, run: AgentRun, used_up: str) -> None:
        """Stops a run outside a firing, after which the other runs may wait forever."""
        self._stop(run, used_up)
        if not self._draining:
            self._check_deadlock()

    def _conclude(self, run: AgentRun, used_up: str | None = None) -> None:
        accepted, error = conclusion(run, used_up)
        self._end(run, accepted=accepted, error=error)

    def _end_by_supervisor_error(self, run: AgentRun, error: Exception) -> None:
        self._end(run, error=with_note(error, f"in {supervisor_name(run)}"))

    def _end(
        self, run: AgentRun, *, accepted: State | None = None, error: BaseException | None = None
    ) -> None:
        run.done, run.accepted, run.error, run.ended = True, accepted, error, self.clock()
        if run.timer:
            run.timer.cancel()
        for task in run.tasks:
            task.cancel()
        close_courses(run)
        if accepted and run.owner:
            copy_for(accepted.value, run.owner)  # moves the children whose handles it returns
        for child in list(run.owned):
            if not child.done:
                child.cancelled = True
                message = f"agent {child.agent.name} was ended with {run.agent.name}"
                self._end(child, error=EndedError(message))
        if error is not None and run.parent and not run.cancelled:
            error.add_note(
                f"in agent {run.agent.name}, spawned by {run.parent.agent.name} in line "
                f"{run.spawned_in} of {run.parent.agent.file}"
            )
        arrival = Arrival(accepted and accepted.value, error)
        for listener in run.listeners:
            listener(arrival)
        for parent, state in run.waiters:
            self.arrive(parent, state, Arrival(error=error or no_more_values(run)))
        run.listeners.clear()
        run.waiters.clear()
        if run.owner:
            run.owner.owned.pop(run, None)
        elif self._finished and not self._finished.done():
            self._finished.set_result(None)

    # Firing states.

    def _fire(self, run: AgentRun, state: State) -> None:
        if state.run != run.id or state.finished or state.error is not None:
            raise AgentError(
                f"{state!r} cannot be fired: it "
                f"{'has ended' if state.ended else f'is none of {run.id}'}"
            )
        if state in run.asleep:
            run.fired_early.append(state)
            return
        new = State(state.agent, state.run, (*state.path, state.fired), state, state.dialogue)
        new.times = (self.clock(), 0.0)
        state.fired += 1
        run.firings += 1
        self._queue.append((run, state, new))
        if not self._draining:
            self._draining = True
            self._loop.call_soon(self._drain_queue, context=self._context)

    def _drain_queue(self) -> None:
        """Starts up to MAX_FIRINGS firings from the queue."""
        for _ in range(min(MAX_FIRINGS, len(self._queue))):
            run, state, new = self._queue.popleft()
            if run.done:
                continue
            try:
                self._start_firing(run, state, new)
            except Exception as error:
                self._fail(error)
        self._draining = bool(self._queue)
        if self._draining:
            self._loop.call_soon(self._drain_queue, context=self._context)
        else:
            self._check_deadlock()

    def _start_firing(self, run: AgentRun, state: State, new: State) -> None:
        now = Firing(self, run, new.path, handles=new.spawned)
        if state.waiting is None:
            self._run_code(run, state, new, now, Arrival())
        elif (arrival := state.arrived) is not None:
            arrival = Arrival(copy_for(arrival.value, run), arrival.error)
            self._run_code(run, state, new, now, arrival)
        else:
            task = asyncio.Task(
                self._await_and_run_code(run, state, new, now), loop=self._loop, eager_start=True
            )
            if not task.done():
                run.tasks.add(task)
                self._tasks.add(task)
                task.add_done_callback(lambda task: self._task_done(run, task))
            elif not task.cancelled() and (error := task.exception()):
                self._fail(error)

    def _task_done(self, run: AgentRun, task: asyncio.Task[None]) -> None:
        run.tasks.discard(task)
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._fail(error)
        if not self._draining:
            self._check_deadlock()

    def _fail(self, error: BaseException) -> None:
        """Ends all runs because of an error in the runtime itself."""
        if not self.runs[0].done:
            self._end(self.runs[0], error=error)

    async def _await_and_run_code(
        self, run: AgentRun, state: State, new: State, now: Firing
    ) -> None:
        """Fires a state that waits for something outside the agents."""
        value, failure = None, None
        try:
            value, messages = await outcome(self, run, state, now)
            if messages:
                new.dialogue = (*state.dialogue, *messages)
        except UsedUpError as error:
            run.used_up = str(error)
            run.firings -= 1
            return self._advance(run)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
            failure = error  # the awaited thing was cancelled, not this task
        except GeneratorExit:
            raise
        except BaseException as error:
            failure = error
        if not run.done:
            self._run_code(run, state, new, now, Arrival(value, failure))

    def _run_code(
        self, run: AgentRun, state: State, new: State, now: Firing, came: Arrival
    ) -> None:
        """Runs the agent's code from a state to the next, and has that judged and committed."""
        run_to_next_wait(run, state, new, now, came)
        register_wait(run, new)
        new.times = (new.times[0], self.clock())
        self._judge(run, new, now)

    def _judge(self, run: AgentRun, new: State, now: Firing) -> None:
        """Scores a new state if the supervisor needs a score, then commits it."""
        judge = run.supervisor.value
        try:
            if not run.supervisor.judges(new):
                return self._commit(run, new)
            if isinstance(judge, Agent):
                judging = self.spawn(now, judge, (Judged.of(new),), {}, new.line)._run
                if judging.done:
                    value = judging.accepted and judging.accepted.value
                    self._set_score(run, new, Arrival(value, judging.error))
                else:
                    judging.listeners.append(lambda arrival: self._set_score(run, new, arrival))
                return
            arrival = Arrival(judge(new))
        except Exception as error:
            note = f"in the value function of {supervisor_name(run)}, of {new!r}"
            return self._end(run, error=with_note(error, note))
        self._set_score(run, new, arrival)

    def _set_score(self, run: AgentRun, new: State, arrival: Arrival) -> None:
        if run.done:
            return
        if arrival.error is not None:
            return self._end(run, error=arrival.error)
        try:
            new.score = numeric_score(run, new, arrival.value)
        except AgentError as error:
            return self._end(run, error=error)
        self._commit(run, new)

    def _commit(self, run: AgentRun, new: State) -> None:
        run.firings -= 1
        run.states.append(new)
        if new.sleeping:
            run.asleep[new] = None
        try:
            run.supervisor.commit(new)
        except Exception as error:
            return self._end_by_supervisor_error(run, error)
        self._advance(run)

    # Sleeping states.

    def resume(self, run: AgentRun, value: Any) -> None:
        """Continues a run after its yield; see `Handle.resume`."""
        resume(run, value)

    def arrive(self, run: AgentRun, state: State, arrival: Arrival) -> None:
        """Wakes a state, since its wait has ended."""
        state.arrived = arrival
        if run.done or state not in run.asleep:
            return  # it arrived before the state was committed
        del run.asleep[state]
        try:
            run.supervisor.wake(state)
            early = [each for each in run.fired_early if each is state]
            run.fired_early = [each for each in run.fired_early if each is not state]
            for each in early:
                self._fire(run, each)
        except Exception as error:
            return self._end_by_supervisor_error(run, error)
        self._advance(run)

    def _check_deadlock(self) -> None:
        """Ends all runs if none of them can go on; called when the queue is empty."""
        if self._tasks or self.runs[0].done:
            return
        waiting = [run for run in self.runs if not run.done]
        if stopped := next((run for run in waiting if run.used_up), None):
            self._stop_from_outside(stopped, str(stopped.used_up))
        elif not any(run.timer for run in waiting):
            self._end(waiting[0], error=DeadlockError(deadlock_message(waiting)))


def run(agent: Agent, /, *args: Any, model: Model, seed: int = 0, **kwargs: Any) -> Any:
    """Runs an agent to its end and returns its value; see `Runtime` and `Runtime.run`."""

    async def whole_run() -> AgentRun:
        return await Runtime(model, seed=seed).run(agent, *args, **kwargs)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        accepted = asyncio.run(whole_run()).accepted
    else:
        raise RuntimeError(
            "run() begins an event loop, and here one is running, as in a notebook: (await "
            "Runtime(model).run(agent, ...)).accepted.value is the same there"
        )
    assert accepted
    return accepted.value
