"""A run of agents that saves its journal as outcomes come: what the drill kills and goes on with.

python -m scripts.drill.agents_run JOURNAL [--model embedded] [--resume]
"""

import argparse
import asyncio
import json
import random
import re
from pathlib import Path

from jaxshare import models
from jaxshare.serving.agents import (
    BeamSearch,
    BestOfN,
    Model,
    ModelCall,
    Reply,
    Runtime,
    State,
    agent,
    llm,
    spawn,
    tool,
)
from jaxshare.serving.agents.backends import EngineModel, ScriptedModel
from jaxshare.serving.agents.journal import Journal

_SYSTEM = {"role": "system", "content": "Alice works alone."}
_SHEETS = (("47 + 38", "12 * 7"), ("93 - 16", "64 + 19"))


def numbers_of(text: str) -> list[int]:
    """A tool that has errors, which are outcomes, too."""
    if not (found := re.findall(r"\d+", text)):
        raise ValueError(f"there is no number in {text!r}")
    return [int(each) for each in found]


def longest(state: State) -> float:
    """The score of a state: the length of what the model has written so far."""
    return float(sum(len(message.content) for message in state.dialogue))


@agent
async def read(text):
    """Yields the numbers of a text, or what is wrong with it, then takes what to add to each."""
    try:
        numbers = await tool(numbers_of, text)
    except ValueError as error:
        numbers = [len(str(error))]
    more = yield numbers
    yield [number + more for number in numbers]


@agent(supervisor=BeamSearch(width=2, branch=2, value=longest))
async def solve(sheet):
    found = []
    for question in sheet:
        text = await llm(
            [_SYSTEM, {"role": "user", "content": f"1. {question}"}],
            max_new_tokens=12,
            temperature=1.5,
        )
        reader = spawn(read, text)  # a reader for each branch of the search
        numbers = await reader.next()
        reader.resume(len(numbers))
        found.append((numbers, await reader.next()))
    return found


@agent(supervisor=BestOfN(2, value=longest))
async def mark():
    children = [spawn(solve, sheet) for sheet in _SHEETS]
    words = await llm("1. 5 + 5", max_new_tokens=6, temperature=1.0)
    return words, [await child.result() for child in children]


def written(call: ModelCall) -> str:
    """The script's answer to a call: some words and numbers by its seed."""
    rng = random.Random(call.seed)
    return " ".join(rng.choice(("so", "12", "7", "then", "50")) for _ in range(rng.randrange(6)))


class Counted:
    """A model that counts its calls, and takes its time for each."""

    def __init__(self, model: Model):
        self.model, self.calls = model, 0

    def __deepcopy__(self, _: dict) -> "Counted":
        return self

    async def answer(self, call: ModelCall) -> Reply:
        self.calls += 1
        await asyncio.sleep(0.01)
        return await self.model.answer(call)


async def run(runtime: Runtime, journal: Journal, file: Path) -> object:
    """Runs the agents, and saves the journal whenever it has something new."""
    task = asyncio.create_task(runtime.run(mark))
    saved = len(journal)
    while not task.done():
        await asyncio.wait([task], timeout=0.001)
        if len(journal) > saved:
            saved = len(journal)
            journal.save(file)
    return (await task).accepted.value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("journal", type=Path)
    parser.add_argument("--model", choices=("embedded", "scripted"), default="scripted")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    journal = Journal()
    if options.resume and options.journal.exists():
        journal = Journal.load(options.journal)
    kept = sum("an answer" in entry.request for entry in journal._entries.values())
    is_scripted = options.model == "scripted"
    script = ScriptedModel({lambda call: True: written})
    model = Counted(script if is_scripted else EngineModel(models.load("embedded")))
    runtime = Runtime(model, seed=3, most_calls=2, journal=journal)
    value = asyncio.run(run(runtime, journal, options.journal))
    states = [
        (run.id, state.path, repr(state.value), state.score, [*map(repr, state.dialogue)])
        for run in runtime.runs
        for state in run.states
    ]
    spent = sorted((run.id, run.calls, run.new_tokens, run.prompt_tokens) for run in runtime.runs)
    report = {"value": value, "states": sorted(states, key=str), "spent": spent}
    print(json.dumps({**report, "calls": model.calls, "kept": kept}))


if __name__ == "__main__":
    main()
