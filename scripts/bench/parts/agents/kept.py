"""States that a supervisor may fire again: what it costs to keep them, and to fire them again."""

import asyncio
import gc
import statistics
import time
import tracemalloc
from typing import Any

from jaxshare.serving.agents import Runtime, agent, llm
from jaxshare.serving.agents.states import Paths, State
from scripts.bench.lib import Goal, alternate

RECORDS, STATES, GROWN = 20_000, 200, 2000
AGAIN = 5
"""States of the path that are fired again at its end."""
MICROSECONDS_GOAL, MEGABYTES_GOAL = 100.0, 10.0
"""The second is about what the agent with the records holds itself."""


class Revisits(Paths):
    """Follows one path, all of whose states it may fire again, and then fires some of them again.

    Attributes:
      seconds: between the first wait for the model and the end of the path.
      seconds_again: of all that is fired again, each up to the next wait.
      on_end: is called at the end of the path.
    """

    def __init__(self, on_end: Any = None):
        self.on_end = on_end

    def start(self, root: State) -> None:
        super().start(root)
        self._met: list[State] = []
        self._again: list[State] | None = None
        self._began = 0.0

    def reached(self, state: State) -> None:
        if self._again is not None:
            return self._fire_again()
        if not state.ended:
            self._began = self._began or time.perf_counter()
            self._met.append(state)
            self._ready.append(state)
            return
        self.seconds, self.accepted = time.perf_counter() - self._began, state
        if self.on_end:
            self.on_end()
        self._again = [self._met[i * len(self._met) // AGAIN] for i in range(AGAIN)]
        self._began = time.perf_counter()
        self._fire_again()

    def _fire_again(self) -> None:
        assert self._again is not None
        if self._again:
            self._ready.append(self._again.pop())
        else:
            self.seconds_again, self.over = time.perf_counter() - self._began, True


@agent
async def holds(waits):
    held = [{"id": number, "tags": ["a", str(number)]} for number in range(RECORDS)]
    for number in range(waits):
        held[number % RECORDS]["tags"].append(await llm("Go on?"))
    return len(held)


@agent
async def grows(waits):
    held = []
    for number in range(waits):
        held.append({"number": number, "text": await llm("Go on?")})
    return len(held)


PROGRAMS = {
    f"{RECORDS:,} records": (holds, STATES),
    f"a list that grows to {GROWN:,}": (grows, GROWN),
}


def measure(model: Any, rounds: int) -> list[dict[str, Any]]:
    """Measures each program: microseconds a kept state, megabytes of all of them, and milliseconds
    a state that is fired again."""
    again: dict[str, list[float]] = {name: [] for name in PROGRAMS}

    def side(name: str) -> float:
        program, waits = PROGRAMS[name]
        gc.collect()
        found = _run(model, program.under(Revisits()), waits)
        again[name].append(found.seconds_again)
        return found.seconds

    times = alternate({name: lambda name=name: side(name) for name in PROGRAMS}, rounds + 1)
    return [
        {
            "holds": name,
            "states": waits,
            "microseconds": statistics.median(times[name][1:]) / waits * 1e6,
            "megabytes": _megabytes(model, name),
            "milliseconds_again": statistics.median(again[name][1:]) / AGAIN * 1e3,
        }
        for name, (_, waits) in PROGRAMS.items()
    ]


def _run(model: Any, program: Any, waits: int) -> Any:
    """The supervisor of a run, at its end."""
    return asyncio.run(Runtime(model).run(program, waits)).supervisor


def _megabytes(model: Any, name: str) -> float:
    """The allocated bytes at the end of a path whose states are kept, less those of one whose states
    are not."""
    program, waits = PROGRAMS[name]
    found: list[int] = []

    def note() -> None:
        gc.collect()
        found.append(tracemalloc.get_traced_memory()[0])

    class Forgets(Revisits):
        """Says that it fires each state once."""

        def refires(self, state: State) -> bool:
            return False

        def _fire_again(self) -> None:
            self.over = True

    for kind in (Forgets, Revisits):
        tracemalloc.start()
        try:
            _run(model, program.under(kind(note)), waits)
        finally:
            tracemalloc.stop()
    return (found[1] - found[0]) / 1e6


def goals(found: list[dict[str, Any]]) -> list[Goal]:
    """The goals for what was measured of the records."""
    kept = found[0]
    name = f"{kept['states']} kept states with {kept['holds']}"
    return [
        Goal(f"{name}: microseconds a wait", kept["microseconds"], MICROSECONDS_GOAL, at_most=True),
        Goal(f"{name}: megabytes", kept["megabytes"], MEGABYTES_GOAL, at_most=True),
    ]


def rows(found: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of a table: the states that are kept, what the agent holds, microseconds a wait,
    megabytes, milliseconds a state that is fired again."""
    return [
        (
            f"{kept['states']:,}",
            kept["holds"],
            f"{kept['microseconds']:.1f}",
            f"{kept['megabytes']:.1f}",
            f"{kept['milliseconds_again']:.1f}",
        )
        for kept in found
    ]
