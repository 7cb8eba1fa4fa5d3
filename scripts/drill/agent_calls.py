"""A run of agents whose model and tools count their calls in a file: what is killed and goes on.

python -m scripts.drill.agent_calls JOURNAL CALLS
"""

import argparse
import asyncio
import json
import os
import random
import time
from pathlib import Path

from jaxshare.serving.agents import (
    BestOfN,
    ModelCall,
    Reply,
    Runtime,
    State,
    TreeOfThoughts,
    agent,
    call_key,
    gather,
    llm,
    spawn,
    tool,
)
from jaxshare.serving.agents.journal import Journal

_PLACES: list[Path] = []
"""The file with a line for the begin and the end of each call."""


def note(what: str, key: object, **more: object) -> None:
    """Appends a line to the calls, which is on the disk when this returns."""
    line = json.dumps({"what": what, "key": key, **more}) + "\n"
    descriptor = os.open(_PLACES[0], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, line.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def doubled(number: int) -> int:
    """A tool that takes its time."""
    note("begin", call_key(), tool="doubled")
    time.sleep(0.005)
    note("end", call_key())
    return 2 * number


async def flaky(number: int) -> int:
    """A tool that has errors, which are outcomes, too."""
    note("begin", call_key(), tool="flaky")
    await asyncio.sleep(0.003)
    note("end", call_key())
    if number % 3 == 0:
        raise ValueError(f"{number} is a multiple of 3")
    return number


class Counted:
    """A model that counts its calls, and answers by their seeds."""

    def __deepcopy__(self, _: dict) -> "Counted":
        return self

    async def answer(self, call: ModelCall) -> Reply:
        key = f"{call.run} {[*call.state]} {call.seed}"
        note("begin", key, run=call.run, state=call.state)
        rng = random.Random(call.seed)
        await asyncio.sleep(0.002 + 0.006 * rng.random())
        note("end", key)
        return Reply(str(rng.randrange(100)), new_tokens=1, prompt_tokens=len(call.messages))


def total(state: State) -> float:
    """The score of a state: the length of its dialogue."""
    return float(sum(len(message.content) for message in state.dialogue))


@agent(supervisor=TreeOfThoughts(2, 2, value=total))
async def solve(sheet):
    first = int(await llm(f"first {sheet}"))
    second = int(await llm("second", parse=int, retries=2))
    try:
        third = await tool(flaky, first + second)
    except ValueError as error:
        third = len(str(error))
    return first, await tool(doubled, third)


@agent
async def helper(number):
    more = yield await tool(doubled, number)
    yield await llm(f"help {more}")


@agent(supervisor=BestOfN(2, value=lambda state: float(len(str(state.value)))))
async def main(count):
    children = [spawn(solve, sheet) for sheet in range(count)]
    helping = spawn(helper, count)
    plans = await llm("plan", n=3)
    number = await helping.next()
    helping.resume(plans[0])
    both = await gather(helping.next(), tool(doubled, number), llm("both"))
    return plans, both, [await child.result() for child in children]


def run() -> None:
    """Runs the agents, and prints their value and all states."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("journal", type=Path)
    parser.add_argument("calls", type=Path)
    options = parser.parse_args()
    _PLACES.append(options.calls)
    with Journal.open(options.journal) as journal:
        runtime = Runtime(Counted(), seed=3, most_calls=3, journal=journal)
        value = asyncio.run(runtime.run(main, 3)).accepted
    assert value is not None
    states = [
        (run.id, state.path, repr(state.value), state.score, [*map(repr, state.dialogue)])
        for run in runtime.runs
        for state in run.states
    ]
    spent = sorted((run.id, run.calls, run.new_tokens, run.prompt_tokens) for run in runtime.runs)
    print(json.dumps({"value": value.value, "states": sorted(states, key=str), "spent": spent}))


if __name__ == "__main__":
    run()
