"""The kills of a run of agents in a short form, and what the drill takes for a failure."""

import random
from collections import Counter

import pytest

from scripts.drill import agent_kills
from scripts.drill.agent_kills import Kept


@pytest.mark.slow
def test_a_run_that_is_killed_five_times_calls_nothing_again(tmp_path):
    assert agent_kills.throw_kills(random.Random(11), tmp_path, kills=5) == 5


def begun(run, *state, key=None):
    return {"what": "begin", "key": key or f"{run}{state}", "run": run, "state": [*state]}


def ended(run):
    return {"what": "end", "key": f"{run}()"}


TOTAL = Counter({("a", (0,)): 3, ("a", (0, 0)): 1, ("b", ()): 1})


@pytest.mark.parametrize(
    ("lines", "kept", "words"),
    [
        ([begun("a", 0), begun("a", 0)], Kept(1, {("a", (0,))}, Counter(), set()), "0"),
        (
            [begun("a", 0, key=str(n % 3)) for n in range(6)],
            Kept(3, set(), Counter({("a", (0,)): 1}), set()),
            "asked 3 times after kill 1, not 2",
        ),
        (
            [begun("a", 0), begun("a", 0, 0), begun("a", 0)],
            Kept(0, set(), Counter(), set()),
            "used",
        ),
        (
            [begun("b"), ended("b"), *[ended("c")] * agent_kills.WINDOW, begun("b")],
            Kept(2 + agent_kills.WINDOW, set(), Counter(), set()),
            "had ended long before",
        ),
        (
            [{"what": "begin", "key": "k", "tool": "t"}] * 2,
            Kept(1, set(), Counter(), {"k"}),
            "tools that had answered",
        ),
    ],
)
def test_the_drill_finds_calls_that_are_made_again(lines, kept, words):
    with pytest.raises(AssertionError, match=words):
        agent_kills.check(lines, [kept], TOTAL)


def test_the_drill_allows_what_was_under_way():
    lines = [begun("a", 0, key=str(n % 3)) for n in range(5)] + [begun("a", 0, 0)]
    agent_kills.check(lines, [Kept(3, set(), Counter({("a", (0,)): 1}), set())], TOTAL)
