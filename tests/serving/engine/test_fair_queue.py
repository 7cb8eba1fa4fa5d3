"""The fair queue: what each agent is served in the long run, by its contribution."""

import dataclasses

import pytest

from jaxshare.serving.engine.fair_queue import FairQueue
from jaxshare.serving.engine.metrics import Metrics
from tests.serving.engine.stepped import small_pieces
from tests.serving.engine.test_engine import Stepped, done, metric

__all__ = ["small_pieces"]  # the fixture


@dataclasses.dataclass(eq=False)
class Asked:
    """What the queue sees of a request."""

    agent: str
    number: int
    priority: int = 0


def served(contributions, *, tokens: int = 30_000) -> dict[str, int]:
    """Tokens of each agent, where all of them always have a request waiting."""
    queue = FairQueue(None if contributions is None else lambda: contributions)
    counts = dict.fromkeys("abc", 0)
    for number, agent in enumerate(counts):
        queue.add(Asked(agent, number))
    while sum(counts.values()) < tokens:
        first = next(iter(queue))
        queue.take(first)
        queue.serve(first, 7)
        counts[first.agent] += 7
        queue.put_back(first)
    return counts


@pytest.mark.parametrize(
    ("contributions", "expected"),
    [
        (None, (1 / 3, 1 / 3, 1 / 3)),
        ({}, (1 / 3, 1 / 3, 1 / 3)),
        ({"a": 1.0, "b": 0.0, "c": 0.0}, (4 / 6, 1 / 6, 1 / 6)),
        ({"a": 0.5, "b": 0.3, "c": 0.2}, (5 / 12, 19 / 60, 4 / 15)),
    ],
)
def test_half_of_the_service_is_equal_and_half_by_contribution(contributions, expected):
    counts = served(contributions)
    whole = sum(counts.values())
    assert [count / whole for count in counts.values()] == pytest.approx(expected, abs=2e-3)


def test_priority_comes_before_every_contribution():
    queue = FairQueue(lambda: {"a": 0.9, "b": 0.1})
    low, high = Asked("a", 0), Asked("b", 1, priority=1)
    for asked in (low, high):
        queue.add(asked)
    assert [*queue] == [high, low]


def test_gauges_are_those_of_the_active_agents():
    metrics = Metrics()

    def gauge(agent):
        return metrics.registry.get_sample_value("jaxshare_contribution", {"agent": agent})

    metrics.set_contributions({"a": 0.75, "b": 0.25})
    assert (gauge("a"), gauge("b"), gauge("c")) == (0.75, 0.25, None)
    metrics.set_contributions({"b": 0.5, "c": 0.5})
    assert (gauge("a"), gauge("b"), gauge("c")) == (None, 0.5, 0.5)


def test_an_engines_gauges_are_its_policys_contributions():
    engine = Stepped(1024)
    for number, agent in enumerate("aab"):
        stream = engine.submit([5, 6, 7, 8] * 5 + [number], max_new_tokens=4, agent_id=agent)
        engine.settle()
        done(stream)
    found = {a: metric(engine, "jaxshare_contribution", agent=a) for a in "ab"}
    assert found == engine._scheduler.kv.tree.policy.contributions()
    assert found["a"] > found["b"] > 0
