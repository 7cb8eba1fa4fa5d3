"""The cost of the runtime of agents: a thousand agents of ten states, instant models and tools.

    python -m scripts.bench.agents                           # the full measurement
    python -m scripts.bench.agents --quick                   # within half a minute on two cores
    python -m scripts.bench.agents --json --output FILE      # one JSON object

A transition is one firing of one state: what it waits for is had, the agent's code runs to its next
wait, and the new state is committed to its supervisor. The time holds all of that, the agent's own
code and copies of its variables too. Agents that hold much are measured apart. How to read the result is in benchmarks/README.md.
"""

import asyncio
import contextlib
import dataclasses
import gc
import statistics
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxshare.serving.agents import Agent, AgentRun, Reply, Runtime, agent, llm, spawn, tool
from scripts.bench.lib import Goal, Parser, alternate, finish, machine, own_command, table, versions
from scripts.bench.parts.agents.held import BREADTH
from scripts.bench.parts.agents.held import goals as held_goals
from scripts.bench.parts.agents.held import measure as measure_held
from scripts.bench.parts.agents.held import rows as held_rows
from scripts.bench.parts.agents.kept import goals as kept_goals
from scripts.bench.parts.agents.kept import measure as measure_kept
from scripts.bench.parts.agents.kept import rows as kept_rows

AGENTS, STATES = 1000, 10
MICROSECONDS_GOAL, LEAK_GOAL = 50.0, 0.0
LEAK_ROUNDS = 5
"""Rounds that must leave nothing allocated, after two rounds that may fill caches."""


class Ready:
    """A model that answers at once."""

    async def answer(self, call: Any) -> Reply:
        return Reply("yes", 1, len(call.messages))


async def identity(number):
    return number


@agent
async def asks(states):
    said = ""
    for _ in range(states):
        said = await llm("Go on?")
    return said


@agent
async def calls_tools(states):
    total = 0
    for number in range(states):
        total += await tool(identity, number)
    return total


@agent
async def yields(states):
    for number in range(states):
        yield number


@agent
async def takes(states):
    child, total = spawn(yields, states), 0
    for _ in range(states):
        total += await child.next()
    return total


@agent
async def many(kind, count, states):
    children = [spawn(kind, states) for _ in range(count)]
    for child in children:
        await child


KINDS = {"model": asks, "tool": calls_tools, "next": takes}


class Collector(contextlib.AbstractContextManager):
    """The time that Python's garbage collector took.

    A full collection also scans all that was imported.
    """

    def __enter__(self):
        self.seconds = 0.0
        gc.callbacks.append(self._told)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._told)

    def _told(self, phase: str, _: dict[str, int]) -> None:
        self.seconds += time.perf_counter() * (1 if phase == "stop" else -1)


async def once(kind: Agent, count: int, states: int) -> tuple[float, int, int]:
    """(seconds, transitions, tasks that are left)."""
    runtime = Runtime(Ready())
    begin = time.perf_counter()
    await runtime.run(many, kind, count, states)
    seconds = time.perf_counter() - begin
    return seconds, sum(len(run.states) - 1 for run in runtime.runs), len(asyncio.all_tasks()) - 1


def leaks(kind: Agent, count: int, states: int) -> dict[str, int]:
    """The tasks, runs of agents and bytes for good that LEAK_ROUNDS runs leave allocated, a run."""

    def bytes_now() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    def runs_now() -> int:
        return sum(isinstance(each, AgentRun) for each in gc.get_objects())

    gc.collect()
    tasks, runs = 0, runs_now()
    tracemalloc.start()
    try:
        for _ in range(2):
            asyncio.run(once(kind, count, states))
        before = bytes_now()
        for _ in range(LEAK_ROUNDS):
            tasks += asyncio.run(once(kind, count, states))[2]
        left = bytes_now() - before
    finally:
        tracemalloc.stop()
    return {
        "tasks": tasks,
        "runs": runs_now() - runs,
        "bytes_a_run": round(left / LEAK_ROUNDS),
    }


def measure(count: int, states: int, rounds: int) -> list[dict[str, Any]]:
    """Every kind of agent: microseconds a transition in every round, after one that is not counted,
    and what is left."""
    transitions: dict[str, int] = {}
    collecting: dict[str, list[float]] = {name: [] for name in KINDS}

    def side(name: str) -> float:
        gc.collect()
        with Collector() as collector:
            seconds, transitions[name], _ = asyncio.run(once(KINDS[name], count, states))
        collecting[name].append(collector.seconds)
        return seconds

    times = alternate({name: lambda name=name: side(name) for name in KINDS}, rounds + 1)
    return [
        summarise(
            name,
            transitions[name],
            times[name][1:],
            collecting[name][1:],
            leaks(KINDS[name], max(1, count // 10), states),
        )
        for name in KINDS
    ]


def summarise(
    name: str,
    transitions: int,
    seconds: Sequence[float],
    collecting: Sequence[float],
    left: dict[str, int],
) -> dict[str, Any]:
    """Microseconds a transition: the median of rounds, the lowest, the highest, and of the garbage
    collector in them."""
    of_rounds = [each / transitions * 1e6 for each in seconds]
    return {
        "waits_for": name,
        "transitions": transitions,
        "microseconds": statistics.median(of_rounds),
        "lowest": min(of_rounds),
        "highest": max(of_rounds),
        "collector_microseconds": statistics.median(collecting) / transitions * 1e6,
        "round_seconds": list(seconds),
        "left": left,
    }


def goals(results: Sequence[dict[str, Any]]) -> list[Goal]:
    """The goals that these results can be held against."""
    found = []
    for r in results:
        found.append(
            Goal(
                f"{r['waits_for']}: microseconds a transition",
                r["microseconds"],
                MICROSECONDS_GOAL,
                at_most=True,
            )
        )
        left = r["left"]["tasks"] + r["left"]["runs"]
        found.append(
            Goal(f"{r['waits_for']}: tasks and runs that are left", left, LEAK_GOAL, at_most=True)
        )
    return found


def as_text(report: dict[str, Any]) -> str:
    """The report without its goals."""
    settings, where = report["settings"], report["machine"]
    rows = [
        (
            r["waits_for"],
            str(r["transitions"]),
            f"{r['microseconds']:.1f}",
            f"{r['lowest']:.1f} to {r['highest']:.1f}",
            f"{r['collector_microseconds']:.1f}",
            f"{r['left']['bytes_a_run']}",
        )
        for r in report["results"]
    ]
    held = report["held"]
    return "\n".join(
        [
            f"{settings['agents']} agents with {settings['states']} waits each; medians of "
            f"{settings['rounds']} rounds",
            f"{where['cpu']}, {where['cores']} cores, load {where['load_average']} at the start; "
            f"Python {report['versions']['python']}",
            "",
            table(
                ("waits for", "transitions", "us each", "of rounds", "collector", "bytes left"),
                rows,
            ),
            "",
            f"One agent with {held['waits']:,} waits for a tool; and a search of breadth "
            f"{BREADTH} with {held['records']:,} records: {held['search']['milliseconds']:.1f} ms a "
            "firing",
            "",
            table(("holds", "us a wait", "MB at most"), held_rows(held)),
            "",
            "One path whose states may all be fired again, and some of them at its end",
            "",
            table(
                ("keeps", "holds", "us a wait", "MB for that", "ms again"),
                kept_rows(report["kept"]),
            ),
        ]
    )


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run; rounds as `--quick` has them where they were not given."""

    agents: int
    states: int
    rounds: int
    quick: bool
    json: bool
    output: Path | None


def parse(arguments: Sequence[str] | None) -> Options:
    parser = Parser(prog="scripts.bench.agents", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--agents", type=int, default=AGENTS, help="side by side (default %(default)s)"
    )
    parser.add_argument(
        "--states", type=int, default=STATES, help="waits of each (default %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, help="turns of each kind of wait (default 15; quick 3)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer turns: within half a minute on two cores"
    )
    parser.reporting()
    given = parser.parse_args(arguments)
    rounds = given.rounds if given.rounds is not None else 3 if given.quick else 15
    if min(given.agents, given.states, rounds) < 1:
        parser.error(
            f"--agents is {given.agents}, --states {given.states} and --rounds {rounds}, but all "
            "begin at 1"
        )
    parser.check_output(given.output)
    return Options(given.agents, given.states, rounds, given.quick, given.json, given.output)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    asked = own_command(__file__, arguments)
    where = machine()
    results = measure(options.agents, options.states, options.rounds)
    settings = {
        "agents": options.agents,
        "states": options.states,
        "rounds": options.rounds,
        "warm_up_turns": 1,
        "leak_rounds": LEAK_ROUNDS,
        "quick": options.quick,
    }
    report = {
        "benchmark": "agents",
        "command": asked,
        "machine": where,
        "versions": versions(("jax",)),
        "settings": settings,
        "results": results,
        "held": measure_held(Ready(), max(1, options.rounds // 3)),
        "kept": measure_kept(Ready(), max(1, options.rounds // 3)),
    }
    found = [*goals(results), *held_goals(report["held"]), *kept_goals(report["kept"])]
    finish(report, as_text(report), found, as_json=options.json, output=options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
