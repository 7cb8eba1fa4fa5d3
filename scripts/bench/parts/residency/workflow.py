"""The five agents' workflow of section 8.3 of Hive, as the prompts of its calls, whose order never
changes while their texts do.

A round is what figure 3 of that paper describes. Decision looks at the state of things; Patcher and
Viewer take turns over a growing record, each reading it under a system prompt of its own; Decision
looks again; Searcher reads documents that are not read again; Summary consolidates what was found,
which goes into the record. Every third Summary consolidates the record too, and takes its place.
All prompts begin with the same rules of the house.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

HOT = frozenset({"Patcher", "Viewer"})
TURNS, SEARCHES, CONDENSE = 4, 2, 3
"""Turns of Patcher and Viewer, and searches, in a round; rounds until the record is condensed."""
VOCABULARY = 30_000

RULES = 240
SYSTEM = {"Decision": 320, "Patcher": 580, "Viewer": 520, "Summary": 220, "Searcher": 260}
"""Tokens of the agents' system prompts, after the rules."""
SOURCE = 900
"""Tokens of the file that is being repaired; Patcher and Viewer read it before the record."""

# Tokens of what is new each time: from, to.
PATCH, REVIEW, VERDICT, QUERY, DOCUMENT = (90, 220), (60, 160), (20, 40), (20, 60), (800, 2000)
FINDING, NOTE, SUMMARY = (120, 300), (80, 160), (200, 400)

PRIORITIES = {"Patcher": 2, "Viewer": 2, "Decision": 1}
"""The right priorities of each agent's calls in this workflow; 0 for the others."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an agent: its whole prompt, as token ids."""

    agent: str
    tokens: tuple[int, ...]
    priority: int = 0


def workflow(rounds: int, seed: int) -> list[Call]:
    """The calls of `rounds` rounds, one after the other.

    Equal arguments give equal calls, and fewer rounds the first of more.

    Args:
      rounds: from 1 up.
      seed: decides every token and the lengths of all that is new.
    """
    rng = np.random.default_rng(seed)

    def text(length: int | tuple[int, int]) -> tuple[int, ...]:
        return tuple(
            rng.integers(
                VOCABULARY,
                size=length if isinstance(length, int) else rng.integers(*length, endpoint=True),
            ).tolist()
        )

    rules = text(RULES)
    system = {name: rules + text(length) for name, length in SYSTEM.items()}
    source, summary, record, verdicts = text(SOURCE), (), (), ()
    calls = []

    def call(agent: str, *parts: Sequence[int]) -> None:
        calls.append(Call(agent, sum(map(tuple, parts), system[agent]), PRIORITIES.get(agent, 0)))

    for number in range(1, rounds + 1):
        call("Decision", summary, verdicts)
        for _ in range(TURNS):
            call("Patcher", source, summary, record)
            record += text(PATCH)
            call("Viewer", source, summary, record)
            record += text(REVIEW)
            verdicts += text(VERDICT)
        call("Decision", summary, verdicts)
        findings = ()
        for _ in range(SEARCHES):
            call("Searcher", text(QUERY), text(DOCUMENT))
            findings += text(FINDING)
        if number % CONDENSE:
            call("Summary", findings)
            record += text(NOTE)
        else:
            call("Summary", summary, record, findings)
            summary, record, verdicts = text(SUMMARY), (), ()
    return calls
