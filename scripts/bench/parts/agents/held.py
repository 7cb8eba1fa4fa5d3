"""Agents that hold much: a firing has to cost what changes, not what is held."""

import asyncio
import gc
import statistics
import time
import tracemalloc
from typing import Any

from jaxshare.serving.agents import Runtime, TreeOfThoughts, agent, llm, tool
from scripts.bench.lib import Goal, alternate

WAITS, RECORDS = 2000, 20_000
GROWING_GOAL, HELD_GOAL = 50.0, 100.0
BREADTH, LEVELS = 3, 10


async def told(number):
    return number


@agent
async def nothing(waits, _):
    for number in range(waits):
        await tool(told, number)
    return time.perf_counter()


@agent
async def grows(waits, _):
    found = []
    for number in range(waits):
        found.append({"number": number, "text": f"step {number}"})
        await tool(told, number)
    return time.perf_counter()


@agent
async def holds(waits, records):
    held = [{"id": number, "tags": ["a", str(number)]} for number in range(records)]
    begin = time.perf_counter()
    for number in range(waits):
        held[number % records]["tags"].append(await tool(told, number))
    return time.perf_counter() - begin


@agent
async def searched(levels, records):
    held = [{"id": number, "tags": ["a", str(number)]} for number in range(records)]
    for number in range(levels):
        held[number % records]["tags"].append(await llm("Go on?"))
    return len(held)


PROGRAMS = {
    "nothing": (nothing, GROWING_GOAL),
    f"a list that grows to {WAITS:,}": (grows, GROWING_GOAL),
    f"{RECORDS:,} records": (holds, HELD_GOAL),
}


def measure(model: Any, rounds: int) -> dict[str, Any]:
    """Microseconds a wait of one path, by what is held; and milliseconds a firing of a search that
    copies the records."""

    def side(name: str) -> float:
        program = PROGRAMS[name][0]
        gc.collect()
        begin = time.perf_counter()
        done = asyncio.run(Runtime(model).run(program, WAITS, RECORDS))
        value = done.accepted.value if done.accepted else 0.0
        return value - begin if program is not holds else value

    times = alternate({name: lambda name=name: side(name) for name in PROGRAMS}, rounds + 1)
    tree = TreeOfThoughts(BREADTH, 1, lambda state: 1.0)
    begin = time.perf_counter()
    run = asyncio.run(Runtime(model).run(searched.under(tree), LEVELS, RECORDS))
    return {
        "waits": WAITS,
        "records": RECORDS,
        "microseconds": {
            name: statistics.median(each[1:]) / WAITS * 1e6 for name, each in times.items()
        },
        "megabytes": {name: _megabytes(model, name) for name in PROGRAMS},
        "search": {
            "firings": len(run.states) - 1,
            "milliseconds": (time.perf_counter() - begin) / (len(run.states) - 1) * 1e3,
        },
    }


def _megabytes(model: Any, name: str) -> float:
    """The most that a run has allocated, its states among it."""
    tracemalloc.start()
    try:
        done = asyncio.run(Runtime(model).run(PROGRAMS[name][0], WAITS, RECORDS))
        del done
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def goals(found: dict[str, Any]) -> list[Goal]:
    """The goals for what was measured."""
    return [
        Goal(f"{name}: microseconds a wait", found["microseconds"][name], goal, at_most=True)
        for name, (_, goal) in PROGRAMS.items()
    ]


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """The rows of a table: what is held, microseconds a wait, megabytes."""
    return [
        (name, f"{each:.1f}", f"{found['megabytes'][name]:.1f}")
        for name, each in found["microseconds"].items()
    ]
