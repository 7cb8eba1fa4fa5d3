"""The words in which a run's arguments and supervisors are told apart, in every process alike."""

import dataclasses
import enum
import functools
from pathlib import Path

import numpy as np
import pytest

from jaxshare.serving.agents import BeamSearch, BestOfN, Budget, agent, llm, spawn
from jaxshare.serving.agents.identity import difference, identity_of, in_words


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    tags: frozenset = frozenset()


class Node:
    def __init__(self, *others):
        self.others = list(others)


def score(state):
    return 1.0


SAME = [
    (lambda: {"b", "a", "c"}, lambda: {"c", "b", "a"}),
    (lambda: Point(1, frozenset("xyz")), lambda: Point(1, frozenset("zyx"))),
    (lambda: Node(Node()), lambda: Node(Node())),
    (lambda: np.arange(6).reshape(2, 3), lambda: np.arange(6).reshape(2, 3).T.copy().T),
    (lambda: BeamSearch(2, 3, score), lambda: BeamSearch(2, 3, score)),
    (lambda: object(), lambda: object()),
]
OTHER = [
    (1, True),
    (1, 1.0),
    ("1", 1),
    ([1, 2], (1, 2)),
    ([[1], 2], [[1, 2]]),
    ({"a": 1}, {"a": 2}),
    (Point(1), Point(2)),
    (Node(), Node(Node())),
    (np.zeros(2), np.zeros((2, 1))),
    (np.zeros(2), np.ones(2)),
    (Path("a"), "a"),
    (Color.RED, 1),
    (BestOfN(2, value=score), BestOfN(3, value=score)),
    (BestOfN(2, value=score), BestOfN(2, value=score, budget=Budget(calls=4))),
    (functools.partial(max, 1), functools.partial(max, 2)),
    (len, max),
]


@pytest.mark.parametrize("pair", SAME)
def test_equal_values_have_the_same_words(pair):
    one, two = pair
    assert in_words(one()) == in_words(two())
    assert "0x" not in in_words(one())


@pytest.mark.parametrize("pair", OTHER)
def test_others_have_other_words(pair):
    one, two = pair
    assert in_words(one) != in_words(two)


def test_circles_and_many_ways_to_one_value_end():
    node = Node()
    node.others += [node, node]
    assert in_words(node)
    shared = []
    for _ in range(64):
        shared = [shared, shared]
    assert len(in_words(shared)) < 10_000
    deep = []
    for _ in range(5_000):
        deep = [deep]
    assert in_words(deep)


def test_the_program_is_the_agent_and_those_that_it_names():
    def made(text, more=0):
        @agent
        async def helper():
            return await llm(text)

        @agent
        async def caller():
            return await spawn(helper).result()

        return caller

    one, two = (identity_of(made(text), (), {}, 0) for text in ("a", "a"))
    assert one == two and not difference(one, two)

    @agent
    async def helper():
        return await llm("another source")

    @agent
    async def caller():
        return await spawn(helper).result()

    told = difference(one, identity_of(caller, (), {}, 0))
    assert told == "the source of agent caller, or of one that it names, has changed"
    named = identity_of(caller.under(BestOfN(2, value=helper)), (), {}, 0)
    assert "BestOfN(n=2, value=helper" in named["supervisor"]
