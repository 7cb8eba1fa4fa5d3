"""The five agents of figure 3 of Hive as programs: repairs side by side, whose texts are fixed."""

from collections.abc import Sequence

import numpy as np

from jaxshare.serving.agents import Dialogue, agent, gather, llm, spawn
from scripts.bench.parts.residency.workflow import CONDENSE, SEARCHES, TURNS

# Letters of fixed texts, about as many tokens.
RULES, SOURCE = 120, 450
SYSTEM = {"decision": 160, "patcher": 290, "viewer": 260, "summary": 110, "searcher": 130}
PATCH, REVIEW, VERDICT, QUERY, DOCUMENT = (45, 110), (30, 80), (10, 20), (10, 30), (400, 1000)
FINDING, NOTE, SUMMARY = (60, 150), (40, 80), (100, 200)
ANSWER = 12
"""Tokens of an answer, at most."""


class Texts:
    """Texts of random letters.

    Args:
      seed: decides all of them; equal seeds give equal texts in the same order.
    """

    def __init__(self, seed: Sequence[int]):
        self._rng = np.random.default_rng(seed)

    def text(self, length: int | tuple[int, int]) -> str:
        """A text of so many letters, or of a number of them between two."""
        size = length if isinstance(length, int) else self._rng.integers(*length, endpoint=True)
        return bytes(
            self._rng.integers(ord("a"), ord("z"), size=size, endpoint=True).tolist()
        ).decode()


async def asked(system: str, *parts: str) -> str:
    """The model's answer to these parts under a system prompt."""
    talk = Dialogue({"role": "system", "content": system})
    return await llm("\n".join(parts), dialogue=talk, max_new_tokens=ANSWER)


@agent
async def patcher(system, *parts):
    return await asked(system, *parts)


@agent
async def viewer(system, *parts):
    return await asked(system, *parts)


@agent
async def searcher(system, *parts):
    return await asked(system, *parts)


@agent
async def summary(system, *parts):
    return await asked(system, *parts)


@agent
async def decision(systems, seed, task, rounds):
    texts = Texts((seed, 1 + task))
    source, condensed, record, verdicts, said = texts.text(SOURCE), "", "", "", []
    for number in range(1, rounds + 1):
        said.append(await asked(systems["decision"], condensed, verdicts))
        for _ in range(TURNS):
            patch = await spawn(patcher, systems["patcher"], source, condensed, record)
            record += f"\n{texts.text(PATCH)} {patch}"
            review = await spawn(viewer, systems["viewer"], source, condensed, record)
            record += f"\n{texts.text(REVIEW)} {review}"
            verdicts += f" {texts.text(VERDICT)}"
        said.append(await asked(systems["decision"], condensed, verdicts))
        documents = [f"{texts.text(QUERY)} {texts.text(DOCUMENT)}" for _ in range(SEARCHES)]
        await gather(*(spawn(searcher, systems["searcher"], each) for each in documents))
        findings = " ".join(texts.text(FINDING) for _ in range(SEARCHES))
        if number % CONDENSE:
            said.append(await spawn(summary, systems["summary"], findings))
            record += f"\n{texts.text(NOTE)}"
        else:
            said.append(await spawn(summary, systems["summary"], condensed, record, findings))
            condensed, record, verdicts = texts.text(SUMMARY), "", ""
    return said


@agent
async def repairs(tasks, rounds, seed):
    texts = Texts((seed, 0))
    rules = texts.text(RULES)
    systems = {name: f"{rules}\n{texts.text(length)}" for name, length in SYSTEM.items()}
    return await gather(*(spawn(decision, systems, seed, task, rounds) for task in range(tasks)))
