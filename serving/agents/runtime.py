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
from collections.abc import Coroutine, Mapping
from typing import Any

from jaxshare.deprecated import renamed
from jaxshare.garbage import seldom_collected
from jaxshare.serving.agents import forks
from jaxshare.serving.agents.agent import Agent
from jaxshare.serving.agents.channels import Channel, Children, was_cancelled
from jaxshare.serving.agents.courses import begun
from jaxshare.serving.agents.errors import AgentError, DeadlockError, EndedError
from jaxshare.serving.agents.firings import close_coroutines, outcome, run_to_next_wait
from jaxshare.serving.agents.inquiries import ask_again, firings
from jaxshare.serving.agents.judging import judge
from jaxshare.serving.agents.messages import (
    announce_end,
    children_of_arguments,
    copy_for,
    deadlock_message,
    received,
    register_wait,
    resume,
)
from jaxshare.serving.agents.model_calls import UsedUpError
from jaxshare.serving.agents.places import place_of
from jaxshare.serving.agents.questions import Desk, Person
from jaxshare.serving.agents.requests import Model, Yielded
from jaxshare.serving.agents.restoring import recalled
from jaxshare.serving.agents.runs import (
    AgentRun,
    Firing,
    Handle,
    check_limits,
    conclusion,
    supervisor_name,
    with_note,
)
from jaxshare.serving.agents.states import Arrival, State, Supervisor, supervisor_for_run
from jaxshare.serving.agents.streaming import OnToken, Streamed
from jaxshare.serving.agents.tidying import tidy
from jaxshare.serving.agents.watchdog import Watchdog

MAX_FIRINGS = 256
"""Firings from the queue before other callbacks of the event loop get their turn."""


class Runtime(Streamed):
    """Runs one agent, and all that it spawns.

    Args:
      model: answers `llm`.
      seed: seed of everything random.
      most_agents: limit of agent runs in all; beyond it, spawning is an error.
      deepest: limit of nested spawning, where recursion ends with an error.
      most_calls: limit of model calls under way at once; None for no limit.
      journal: replays a run, or records one; see `jaxshare.serving.agents.journal`.
      watchdog: seconds that an agent's code may run between two waits before a warning names the
        line; after ten times as long it is ended by an AgentError. None for neither.
      ask, answers: answer `ask`: a function of an OpenQuestion, and answers by the ids of questions.
      on_token: is called with every piece of every answer as it comes, an `AnswerPiece`.
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
        watchdog: float | None = 10.0,
        ask: Person | None = None,
        answers: Mapping[str, Any] | None = None,
        on_token: OnToken | None = None,
    ):
        self.model, self.seed, self.journal, self.on_token = model, seed, journal, on_token
        self.max_agents, self.max_depth, self.watchdog = most_agents, deepest, Watchdog(watchdog)
        self.runs: list[AgentRun] = []
        self.call_slots = asyncio.Semaphore(most_calls) if most_calls else None
        # Firings: (run, the fired state, the state that it will become).
        self._queue: deque[tuple[AgentRun, State, State]] = deque()
        self.desk = Desk(ask, answers, journal, self._check_deadlock, self._fail)
        self._tasks = set[asyncio.Task[None]]()
        self._draining, self._start_time = False, time.perf_counter()
        self._finished: asyncio.Future[None] | None = None

    def clock(self) -> float:
        """Seconds since the runtime was made."""
        return time.perf_counter() - self._start_time

    async def run(self, agent: Agent, /, *args: Any, **kwargs: Any) -> AgentRun:
        """Runs an agent to its end; the `accepted.value` of the run is the agent's return value.

        Raises the agent's own error, with notes on the agents that led to it; and
          DeadlockError: all agents wait for each other.
          PausedError: it waits for answers of a person.
          BudgetError: its budget was used up before any path had ended.
          AgentError: its supervisor never fires a state, or agents interact in an impossible way.
        """
        if not isinstance(agent, Agent):
            raise TypeError(f"{agent!r} is no agent: decorate an async def with @agent")
        if self._finished is not None:
            raise RuntimeError("a runtime runs one agent, and what that spawns; make another")
        self._loop, self._context = asyncio.get_running_loop(), contextvars.copy_context()
        self._finished = self._loop.create_future()
        self.desk.begin(agent, args, kwargs, self.seed)
        with seldom_collected():
            run = self._start(agent, args, kwargs, None, agent.name, 0)
            self.watchdog.start()
            try:
                await self._finished
            finally:
                if not run.done:
                    self.end(run, error=EndedError(f"agent {agent.name} was interrupted"))
                self._queue.clear()
                if self._tasks:
                    await asyncio.wait(self._tasks)
                close_coroutines(self.runs)
                self.watchdog.stop()
        if run.error is not None:
            raise run.error
        return run

    # Starting and ending runs.

    def spawn(
        self, by: Firing, agent: Agent, args: tuple[Any, ...], kwargs: dict[str, Any], line: int
    ) -> Handle:
        """Starts a child of the run whose code is running, or whose state is judged."""
        id = f"{by.run.id}/{agent.name}@{place_of(by.path, by.branch)}"
        if by.spawned > 0:
            id += f"#{by.spawned}"
        by.spawned += 1
        return self._start(agent, args, kwargs, by, id, line).handle

    def _start(
        self,
        agent: Agent,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        by: Firing | None,
        id: str,
        line: int,
    ) -> AgentRun:
        parent, children = by and by.run, Children()
        check_limits(self, agent, parent)
        run = AgentRun(self, id, agent, supervisor_for_run(agent.supervisor), parent, line)
        if by:
            handed: list[AgentRun] = []
            args, kwargs = copy_for((args, kwargs), run, handed)
            if handed:
                children = children_of_arguments(by, handed)
            if by.children:
                by.children.hold(run.channel)
        begun(run, run.root, args, kwargs, children)
        self._join(run)
        try:
            run.supervisor.init(run.root)
        except Exception as error:
            self._end_by_supervisor_error(run, error)
        self._advance(run)
        return run

    def _join(self, run: AgentRun) -> None:
        """Takes a new run among those of the runtime."""
        self.runs.append(run)
        if run.parent:
            run.parent.children.append(run)
        if run.owner:
            run.owner.owned[run] = None
        if (seconds := run.supervisor.budget.seconds) is not None:
            run.timer = self._loop.call_later(
                seconds - (self.clock() - run.began),
                self._stop_from_outside,
                run,
                f"{seconds} seconds",
            )

    def fork(self, channel: Channel, by: AgentRun, path: tuple[int, ...]) -> None:
        """Gives a channel a run of its own; see `jaxshare.serving.agents.forks`."""
        fired = forks.fork(self, channel, by, path)
        run = channel.run
        self._join(run)
        for state in [*run.asleep]:
            state.children = Children(state.positions, is_copy=True)
            if not isinstance(state.waiting, Yielded):
                register_wait(run, state)
        for state in fired:
            self._fire(run, state)
        ask_again(self, run, self._advance)

    def keep_copy(self, run: AgentRun, resumes: int | None) -> None:
        """Keeps a copy of a run's search for forks; see `jaxshare.serving.agents.forks`."""
        forks.keep_copy(run, resumes)

    def call_off(self, run: AgentRun) -> None:
        """Ends a run that its parent has cancelled."""
        run.cancelled = run.is_called_off = True
        self.end(run, error=was_cancelled(run))

    def _advance(self, run: AgentRun) -> None:
        """Fires the states that the supervisor names; ends the run if it is over."""
        if run.done:
            return
        supervisor = run.supervisor
        try:
            for state in firings(self, run, self._advance):
                self._fire(run, state)
            over = supervisor.over
        except Exception as error:
            return self._end_by_supervisor_error(run, error)
        if over:
            self._conclude(run)
        elif not run.under_way and not run.asleep and not run.asked:
            # Nothing is under way, so nothing will call the supervisor again.
            if run.used_up:
                self._stop(run, run.used_up)
            elif not isinstance(supervisor, Supervisor) and any(
                state.ended for state in run.states
            ):
                self._conclude(run)
            else:
                message = f"{supervisor_name(run)} fires no state, and is not over"
                self.end(run, error=AgentError(f"{message}: nothing can go on"))

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
        self.end(run, accepted=accepted, error=error)

    def _end_by_supervisor_error(self, run: AgentRun, error: Exception) -> None:
        self.end(run, error=with_note(error, f"in {supervisor_name(run)}"))

    def end(
        self, run: AgentRun, *, accepted: State | None = None, error: BaseException | None = None
    ) -> None:
        """Ends a run, and the runs that it owns."""
        run.done, run.accepted, run.error, run.ended = True, accepted, error, self.clock()
        if run.timer:
            run.timer.cancel()
        for task in run.tasks:
            task.cancel()
        tidy(self, run)
        if accepted and run.owner:
            copy_for(accepted.value, run.owner)  # moves the children whose handles it returns
        for child in list(run.owned):
            if not child.done:
                child.cancelled = True
                message = f"agent {child.agent.name} was ended with {run.agent.name}"
                self.end(child, error=EndedError(message))
        announce_end(run)
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
        new = State(state.agent, state.run, (*state.path, state.fired), state, state.own_dialogue)
        new.times = (self.clock(), 0.0)
        state.fired += 1
        run.under_way[new] = state
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
        now = Firing(self, run, new.path, new.branch, events=new.events, recorded=new.recorded)
        now.dialogue = state.own_dialogue
        if state.waiting is None:
            self._run_code(run, state, new, now, Arrival())
        elif (arrival := state.arrived) is not None:
            self._run_code(run, state, new, now, received(arrival, run))
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

    def keep_task(self, tidied: Coroutine[Any, Any, None]) -> None:
        """Runs what a path awaits at its end, which the runtime waits for."""
        task = self._loop.create_task(tidied)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
            self.end(self.runs[0], error=error)

    async def _await_and_run_code(
        self, run: AgentRun, state: State, new: State, now: Firing
    ) -> None:
        """Fires a state that waits for something outside the agents."""
        value, failure = None, None
        try:
            value, messages = await outcome(self, run, state, now)
            if messages:
                new.dialogue = (*state.own_dialogue, *messages)
        except UsedUpError as error:
            run.used_up = str(error)
            del run.under_way[new]
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
        judge(self, run, new, now)

    def commit(self, run: AgentRun, new: State) -> None:
        """Gives a new state to its supervisor."""
        del run.under_way[new]
        run.states.append(new)
        if new.sleeping:
            run.asleep[new] = None
        try:
            run.supervisor.commit(new)
        except Exception as error:
            return self._end_by_supervisor_error(run, error)
        self._advance(run)

    def recall(self, run: AgentRun, state: State) -> Mapping[str, Any]:
        """The variables of a state that is kept by its record; see `State.variables`."""
        return recalled(run, state)

    # Sleeping states.

    def resume(self, child: AgentRun, value: Any, now: Firing | None) -> None:
        """Continues a run after its yield; see `Handle.resume`."""
        resume(child, value, now)

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
        """Ends all runs if none of them can go on."""
        if self._draining or self.runs[0].done or not self.desk.all_idle(self._tasks):
            return
        waiting = [run for run in self.runs if not run.done]
        if stopped := next((run for run in waiting if run.used_up), None):
            self._stop_from_outside(stopped, str(stopped.used_up))
        elif self.desk.open:
            self.end(waiting[0], error=self.desk.pause())
        elif not any(run.timer for run in waiting):
            self.end(waiting[0], error=DeadlockError(deadlock_message(waiting, self.desk.parked)))


__getattr__ = renamed(__name__, {"run": "jaxshare.serving.agents.running.run"})
