"""The asynchronous runtime: runs agents, each under its supervisor, and moves values between them
(Hive, section 5.1.1).

A state is fired by doing what it waits for and then running the agent's code to its next wait; that
is a new state, which is committed to the supervisor. Many states of many agents are under way at
once; nothing is decided by which of them is faster, but for what a supervisor makes of the order in
which states are committed.

Firings wait in a queue, which the event loop empties; what has to be awaited gets a task, and what
is there already does not.
"""

import asyncio
import contextvars
import inspect
import time
import types
from collections import deque
from typing import TYPE_CHECKING, Any

from jaxshare.serving.agents.agent import Agent
from jaxshare.serving.agents.compiler.program import Returned, snapshot
from jaxshare.serving.agents.messages import ended, passed, resume, wait_for, who_waits
from jaxshare.serving.agents.model_calls import (
    ATOMS,
    UsedUpError,
    ask,
    check_budget,
    recording,
    spend,
    use,
)
from jaxshare.serving.agents.requests import Llm, Message, Model, Tool, Yielded
from jaxshare.serving.agents.runs import (
    AgentError,
    AgentRun,
    BudgetError,
    DeadlockError,
    EndedError,
    Firing,
    Handle,
    Judged,
    firing,
    spawn,
)
from jaxshare.serving.agents.states import Arrival, State, Supervisor, begun

if TYPE_CHECKING:
    from jaxshare.serving.agents.compiler.frames import Frame

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

_TURN = 256
"""Firings from the queue before the event loop may look after something else."""


class Runtime:
    """Runs agents.

    Args:
      model: what `llm` asks.
      seed: of all that is random.
      most_agents: runs of agents there may be in all, and `deepest` how deep they may spawn each
        other: recursion ends there with an error.
      most_calls: model calls under way at once; None for no bound.
      journal: of a run to be repeated, or to be filled: see `jaxshare.serving.agents.journal`.
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
        self.model, self.seed, self.most_agents, self.deepest, self.journal = (
            model,
            seed,
            most_agents,
            deepest,
            journal,
        )
        self.runs: list[AgentRun] = []
        self.slots = asyncio.Semaphore(most_calls) if most_calls else None
        # firings: of which state, and what is to become the new one
        self._queue: deque[tuple[AgentRun, State, State]] = deque()
        self._emptying = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._begin = time.perf_counter()
        self._over: asyncio.Future[None] | None = None

    def clock(self) -> float:
        """Seconds since the runtime was made."""
        return time.perf_counter() - self._begin

    async def run(self, agent: Agent, /, *args: Any, **kwargs: Any) -> AgentRun:
        """Runs an agent to its end; its run, whose `accepted.value` is what it returned.

        Raises what the agent raised, with notes on the agents that led there; and
          DeadlockError: all agents wait for each other.
          BudgetError: its budget was used up before any path had ended.
          AgentError: its supervisor never fires a state, or what agents do to each other cannot be.
        """
        if not isinstance(agent, Agent):
            raise TypeError(f"{agent!r} is no agent: decorate an async def with @agent")
        if self._over is not None:
            raise RuntimeError("a runtime runs one agent, and what that spawns; make another")
        self._loop, self._context = asyncio.get_running_loop(), contextvars.copy_context()
        self._over = self._loop.create_future()
        run = self._start(agent, args, kwargs, None, agent.name, 0)
        try:
            await self._over
        finally:
            if not run.done:
                self._end(run, error=EndedError(f"agent {agent.name} was interrupted"))
            self._queue.clear()
            if self._tasks:
                await asyncio.wait(self._tasks)
            _close_coroutines(self.runs)
        if run.error is not None:
            raise run.error
        return run

    # Starting and ending runs.

    def spawn(
        self, by: Firing, agent: Agent, args: tuple[Any, ...], kwargs: dict[str, Any], line: int
    ) -> Handle:
        """A child of the run whose code is running, or which is judged."""
        id = f"{by.run.id}/{agent.name}@{'.'.join(map(str, by.path))}" + f"#{by.spawned}" * (
            by.spawned > 0
        )
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
        if parent and parent.depth + 1 > self.deepest:
            raise AgentError(
                f"{parent.agent.name} spawns {agent.name} {self.deepest} agents deep; if that is "
                "meant, give the runtime a larger `deepest`"
            )
        if len(self.runs) >= self.most_agents:
            raise AgentError(
                f"there were {self.most_agents} agents already when {agent.name} was to be "
                "spawned; if that is meant, give the runtime a larger `most_agents`"
            )
        run = AgentRun(self, id, agent, begun(agent.supervisor), parent, line)
        run.root.frame = agent.program.begin(
            passed(args, run), passed(kwargs, run) if kwargs else {}
        )
        self.runs.append(run)
        if parent:
            parent.children.append(run)
            parent.owned[run] = None
        if (seconds := run.supervisor.budget.seconds) is not None:
            run.timer = self._loop.call_later(
                seconds, self._stop_waiting, run, f"{seconds} seconds"
            )
        try:
            run.supervisor.init(run.root)
        except Exception as error:
            self._end(run, error=_noted(error, f"in {_supervisor(run)}"))
        self._advance(run)
        return run

    def _advance(self, run: AgentRun) -> None:
        """Asks the supervisor what to fire, and fires it; ends the run if it is over."""
        if run.done:
            return
        supervisor = run.supervisor
        try:
            if not supervisor.over:
                for state in supervisor.fire() or ():
                    self._fire(run, state)
            over = supervisor.over
        except Exception as error:
            return self._end(run, error=_noted(error, f"in {_supervisor(run)}"))
        if over:
            self._conclude(run)
        elif not run.firings and not run.asleep:
            if run.used_up:
                self._stop(run, run.used_up)
            elif not isinstance(supervisor, Supervisor) and any(
                state.ended for state in run.states
            ):
                self._conclude(run)
            else:
                self._end(
                    run,
                    error=AgentError(
                        f"{_supervisor(run)} fires no state, and is not over: nothing can go on"
                    ),
                )

    def _stop(self, run: AgentRun, used_up: str) -> None:
        """Ends a run whose budget is used up by the best that there is."""
        try:
            run.supervisor.stop(used_up)
        except Exception as error:
            return self._end(run, error=_noted(error, f"in {_supervisor(run)}"))
        self._conclude(run, used_up)

    def _stop_waiting(self, run: AgentRun, used_up: str) -> None:
        self._stop(run, used_up)
        if not self._emptying:
            self._look_for_deadlock()

    def _conclude(self, run: AgentRun, used_up: str | None = None) -> None:
        """Ends a run by what its supervisor has accepted; where that is nothing, by the error of
        its first path if all have failed."""
        accepted = run.supervisor.accepted
        if accepted is None and not isinstance(run.supervisor, Supervisor):
            accepted = min(
                (state for state in run.states if state.finished),
                key=lambda state: state.path,
                default=None,
            )
        if accepted is not None:
            if accepted.finished:
                return self._end(run, accepted=accepted)
            unfinished = AgentError(
                f"{_supervisor(run)} has accepted {accepted!r}, which is not finished"
            )
            return self._end(run, error=accepted.error or unfinished)
        first = min(
            (state for state in run.states if state.error),
            key=lambda state: state.path,
            default=None,
        )
        failed = first and first.error
        if used_up:
            error = BudgetError(
                f"agent {run.agent.name} has used up its budget ({used_up}) before it came to an "
                "end"
            )
        elif failed and all(state.fired or state.error for state in run.states):
            return self._end(run, error=failed)
        else:
            error = AgentError(f"{_supervisor(run)} has accepted no state")
        error.__cause__ = failed
        self._end(run, error=error)

    def _end(
        self, run: AgentRun, *, accepted: State | None = None, error: BaseException | None = None
    ) -> None:
        run.done, run.accepted, run.error, run.ended = True, accepted, error, self.clock()
        if run.timer:
            run.timer.cancel()
        for task in run.tasks:
            task.cancel()
        if accepted and run.owner:
            passed(accepted.value, run.owner)
        for child in list(run.owned):
            if not child.done:
                child.cancelled = True
                self._end(
                    child,
                    error=EndedError(f"agent {child.agent.name} was ended with {run.agent.name}"),
                )
        if error is not None and run.parent and not run.cancelled:
            _noted(
                error,
                f"in agent {run.agent.name}, spawned by {run.parent.agent.name} in line "
                f"{run.spawned_in} of {run.parent.agent.program.file}",
            )
        arrival = Arrival(accepted and accepted.value, error)
        for listener in run.listeners:
            listener(arrival)
        for parent, state in run.askers:
            self.arrive(parent, state, Arrival(error=error or ended(run)))
        run.listeners.clear()
        run.askers.clear()
        if run.owner:
            run.owner.owned.pop(run, None)
        elif self._over and not self._over.done():
            self._over.set_result(None)

    # Firing states.

    def _fire(self, run: AgentRun, state: State) -> None:
        if state.run != run.id or state.finished or state.error is not None:
            raise AgentError(
                f"{state!r} cannot be fired: it "
                f"{'has ended' if state.ended else f'is none of {run.id}'}"
            )
        if state in run.asleep:
            run.early.append(state)
            return
        new = State(state.agent, state.run, (*state.path, state.fired), state, state.dialogue)
        new.times = (time.perf_counter() - self._begin, 0.0)
        state.fired += 1
        run.firings += 1
        self._queue.append((run, state, new))
        if not self._emptying:
            self._emptying = True
            self._loop.call_soon(self._empty, context=self._context)

    def _empty(self) -> None:
        """Fires what is in the queue."""
        for _ in range(min(_TURN, len(self._queue))):
            run, state, new = self._queue.popleft()
            if run.done:
                continue
            try:
                self._begin_firing(run, state, new)
            except Exception as error:
                self._fail(error)
        self._emptying = bool(self._queue)
        if self._emptying:
            self._loop.call_soon(self._empty, context=self._context)
        else:
            self._look_for_deadlock()

    def _begin_firing(self, run: AgentRun, state: State, new: State) -> None:
        request = state.waiting
        if request is None:
            self._step(run, state, new, None, None)
        elif (arrival := state.arrived) is not None:
            self._step(run, state, new, passed(arrival.value, run), arrival.error)
        else:
            task = asyncio.Task(
                self._await_outcome(run, state, new), loop=self._loop, eager_start=True
            )
            if not task.done():
                run.tasks.add(task)
                self._tasks.add(task)
                task.add_done_callback(lambda task: self._settled(run, task))
            elif not task.cancelled() and (error := task.exception()):
                self._fail(error)

    def _settled(self, run: AgentRun, task: asyncio.Task[None]) -> None:
        run.tasks.discard(task)
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._fail(error)
        if not self._emptying:
            self._look_for_deadlock()

    def _fail(self, error: BaseException) -> None:
        """A mistake of the runtime's own: all ends."""
        if not self.runs[0].done:
            self._end(self.runs[0], error=error)

    async def _await_outcome(self, run: AgentRun, state: State, new: State) -> None:
        """From a state that waits for something outside to the new one."""
        value, failed = None, None
        try:
            value, said = await (self._outcome if self.journal is None else self._recorded)(
                run, state, new.path
            )
            if said:
                new.dialogue = (*state.dialogue, *said)
        except UsedUpError as error:
            run.used_up = str(error)
            run.firings -= 1
            return self._advance(run)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
            failed = error  # what is waited for was cancelled, not this
        except GeneratorExit:
            raise
        except BaseException as error:
            failed = error
        if not run.done:
            self._step(run, state, new, value, failed)

    async def _outcome(
        self, run: AgentRun, state: State, path: tuple[int, ...]
    ) -> tuple[Any, tuple[Message, ...]]:
        """(what a state waits for, the messages that its dialogue is continued by); raises what
        that raises."""
        request = state.waiting
        if isinstance(request, Llm):
            return await ask(self, run, state, request, path)
        if isinstance(request, Tool):
            return await use(request), ()
        if isinstance(request, types.CoroutineType) and path[-1]:
            raise AgentError(
                f"agent {run.agent.name} waits in line {state.line} for a coroutine, which cannot "
                "be awaited again; make it a tool, so that the state can be fired many times"
            )
        if inspect.isawaitable(request):
            return await request, ()
        raise TypeError(f"object {type(request).__name__} can't be used in 'await' expression")

    async def _recorded(
        self, run: AgentRun, state: State, path: tuple[int, ...]
    ) -> tuple[Any, tuple[Message, ...]]:
        """The same from the journal, or for it."""
        request, key = state.waiting, (run.id, path)
        if isinstance(request, Llm):
            check_budget(run, request.n or 1)  # what is known was a call, too
        if known := self.journal.known(key, request):
            spend(run, *self.journal.spent(key))
            return known()
        spent = [0, 0, 0]
        recording.set(spent)  # in the firing's own task
        try:
            value, said = await self._outcome(run, state, path)
        except UsedUpError as error:
            self.journal.given_up(key, str(error), spent)
            raise
        except Exception as error:
            self.journal.failed(key, error, spent)
            raise
        self.journal.done(key, value, said, spent)
        return value, said

    def _step(
        self, run: AgentRun, state: State, new: State, value: Any, failed: BaseException | None
    ) -> None:
        """Runs the agent's code from a state to the next, and commits that."""
        program, now = run.agent.program, Firing(self, run, new.path)
        token = firing.set(now)
        try:
            assert state.frame is not None
            frame = snapshot(state.frame, program)
            outcome = program.send(frame, value) if failed is None else program.throw(frame, failed)
            if isinstance(outcome, Returned):
                new.finished, new.value, new.frame = True, outcome.value, frame
            else:
                instruction = program.instructions[outcome.at]
                new.line = instruction.line
                new.frame = frame if _constant(frame) else snapshot(frame, program)
                new.waiting = Yielded(outcome.value) if instruction.is_yield else outcome.value
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            new.error = error
        finally:
            firing.reset(token)
        wait_for(run, new)
        new.times = (new.times[0], time.perf_counter() - self._begin)
        self._judge(run, new, now)

    def _judge(self, run: AgentRun, new: State, now: Firing) -> None:
        """Has a new state's score found where the supervisor asks for it, then commits it."""
        value = run.supervisor.value
        try:
            if not run.supervisor.judges(new):
                return self._commit(run, new)
            if isinstance(value, Agent):
                judge = self.spawn(now, value, (Judged.of(new),), {}, new.line)._run
                if judge.done:
                    self._judged(
                        run, new, Arrival(judge.accepted and judge.accepted.value, judge.error)
                    )
                else:
                    judge.listeners.append(lambda arrival: self._judged(run, new, arrival))
                return
            arrival = Arrival(value(new))
        except Exception as error:
            return self._end(
                run, error=_noted(error, f"in the value function of {_supervisor(run)}, of {new!r}")
            )
        self._judged(run, new, arrival)

    def _judged(self, run: AgentRun, new: State, arrival: Arrival) -> None:
        if run.done:
            return
        if arrival.error is not None:
            return self._end(run, error=arrival.error)
        try:
            new.score = float(arrival.value)
        except (TypeError, ValueError):
            value = run.supervisor.value
            name = (
                value.name if isinstance(value, Agent) else getattr(value, "__name__", repr(value))
            )
            return self._end(
                run,
                error=AgentError(
                    f"the value function {name} gave {arrival.value!r} for {new!r}, which is no "
                    "number"
                ),
            )
        self._commit(run, new)

    def _commit(self, run: AgentRun, new: State) -> None:
        run.firings -= 1
        run.states.append(new)
        if new.sleeping:
            run.asleep[new] = None
        try:
            run.supervisor.commit(new)
        except Exception as error:
            return self._end(run, error=_noted(error, f"in {_supervisor(run)}"))
        self._advance(run)

    # Sleeping states.

    def resume(self, run: AgentRun, value: Any) -> None:
        """See `Handle.resume`."""
        resume(run, value)

    def arrive(self, run: AgentRun, state: State, arrival: Arrival) -> None:
        """What a state waits for has come."""
        state.arrived = arrival
        if run.done or state not in run.asleep:
            return  # it was there before the state was committed
        del run.asleep[state]
        try:
            run.supervisor.wake(state)
            early, run.early = (
                [s for s in run.early if s is state],
                [s for s in run.early if s is not state],
            )
            for state in early:
                self._fire(run, state)
        except Exception as error:
            return self._end(run, error=_noted(error, f"in {_supervisor(run)}"))
        self._advance(run)

    def _look_for_deadlock(self) -> None:
        """Ends all if there is nothing that could go on; called when the queue is empty."""
        if self._tasks or self.runs[0].done:
            return
        waiting = [run for run in self.runs if not run.done]
        if used_up := next((run for run in waiting if run.used_up), None):
            self._stop_waiting(used_up, str(used_up.used_up))
        elif not any(run.timer for run in waiting):
            self._end(waiting[0], error=DeadlockError(who_waits(waiting)))


def run(agent: Agent, /, *args: Any, model: Model, seed: int = 0, **kwargs: Any) -> Any:
    """Runs an agent to its end and gives what it returned; arguments and errors are those of
    `Runtime` and `Runtime.run`."""

    async def whole() -> AgentRun:
        return await Runtime(model, seed=seed).run(agent, *args, **kwargs)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        accepted = asyncio.run(whole()).accepted
    else:
        raise RuntimeError(
            "run() begins an event loop, and here one is running, as in a notebook: (await "
            "Runtime(model).run(agent, ...)).accepted.value is the same there"
        )
    assert accepted
    return accepted.value


_CONSTANT = frozenset((*ATOMS, Handle, Agent))
_COUNTER, _BUILTIN = type(iter(range(0))), type(len)


def _constant(frame: "Frame") -> bool:
    """Whether nobody else can change anything in a frame, so that it needs no copy. A loop's own
    iterator has no name that others know."""
    if frame.handling:
        return False
    for name, value in frame.items():
        kind = type(value)
        counts, function = (
            kind is _COUNTER and name[0] == ".",
            kind is _BUILTIN and isinstance(value.__self__, types.ModuleType),
        )
        if kind not in _CONSTANT and not counts and not function:
            return False
    return True


def _close_coroutines(runs: list[AgentRun]) -> None:
    """Those that agents wait for and that nobody will await any more."""
    for run in runs:
        for state in run.states:
            if (
                isinstance(state.waiting, types.CoroutineType)
                and inspect.getcoroutinestate(state.waiting) == inspect.CORO_CREATED
            ):
                state.waiting.close()


def _supervisor(run: AgentRun) -> str:
    return f"{type(run.supervisor).__name__}, the supervisor of agent {run.agent.name},"


def _noted[E: BaseException](error: E, note: str) -> E:
    error.add_note(note)
    return error
