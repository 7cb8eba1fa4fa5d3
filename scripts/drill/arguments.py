"""Calls of the public functions and classes with wrong types and extreme values."""

import functools
import random
from pathlib import Path

from scripts.drill.drill import Drill
from scripts.drill.reader import Reader
from tests.drill.argument_targets import SECONDS, TARGETS

_CALLS, _TARGETS = 40, 3
_SECONDS = SECONDS + 60
"""The time of the calls of one target, which start an engine at first."""


@functools.cache
def caller() -> Reader:
    """The process that calls."""
    return Reader("tests.drill.argument_targets", {"HF_HUB_OFFLINE": "1"})


def throw_arguments(rng: random.Random, _: Path) -> int:
    """Some targets are called with odd arguments, while other clients of the engine are right."""
    count = 0
    for name in rng.sample([*TARGETS], _TARGETS):
        seed = rng.randrange(2**32)
        found = caller().ask({"target": name, "seed": seed, "calls": _CALLS}, _SECONDS)
        assert not found["wrong"], found["wrong"]
        count += found["calls"]
    return count


DRILLS = [
    Drill(
        "arguments",
        "odd arguments work or are refused by name; the calls of other clients are right",
        "wrong types, huge, tiny and infinite numbers, endless ranges, odd texts, in public calls",
        throw_arguments,
    )
]
