"""The fair queue: what each agent is served in the long run, by its contribution, and which of its
requests are admitted first."""

import collections
import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare.serving.engine.fair_queue import FairQueue
from jaxshare.serving.engine.metrics import Metrics
from tests.serving.engine.stepped import small_pieces
from tests.serving.engine.test_engine import Stepped, alone, done, lasting, metric

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
    engine = Stepped()
    for number, agent in enumerate("aab"):
        stream = engine.submit([5, 6, 7, 8] * 5 + [number], max_new_tokens=4, agent_id=agent)
        engine.settle()
        done(stream)
    found = {a: metric(engine, "jaxshare_contribution", agent=a) for a in "ab"}
    assert found == engine._scheduler.kv.tree.policy.contributions()
    assert found["a"] > found["b"] > 0


# The order of admission.


def slow_order(waiting, served, cached, passed):
    """The agents in turn as they are without it; each agent's next is the request of the first
    eight that has the most cached, or its first one where eight later ones were admitted before."""
    turns = sorted(waiting, key=lambda r: (-r.priority, served.get(r.agent, 0), r.number))
    left, order = [*waiting], []
    for turn in turns:
        own = [r for r in left if (r.agent, r.priority) == (turn.agent, turn.priority)]
        group = [r for r in waiting if (r.agent, r.priority) == (turn.agent, turn.priority)]
        own.sort(key=lambda r: r.number)
        group.sort(key=lambda r: r.number)
        compared = [r for r in own if r in group[:8]]
        in_order = passed[group[0]] >= 8 or not compared
        chosen = own[0] if in_order else max(compared, key=lambda r: (cached[r], -r.number))
        left.remove(chosen)
        order.append(chosen)
    return order


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_each_agent_admits_first_what_is_cached_most(seed):
    rng = random.Random(seed)
    queue, cached, passed, waiting = FairQueue(), {}, collections.Counter(), []
    served, number = {}, 0
    for _ in range(60):
        if not waiting or rng.random() < 0.55:
            new = Asked(rng.choice("ab"), number, rng.choice((0, 0, 0, 1)))
            number += 1
            cached[new] = rng.randrange(5)
            waiting.append(new)
            queue.add(new)
            served.setdefault(new.agent, 0)
            continue
        order = [*queue.by_cached(cached.__getitem__)]
        assert order == slow_order(waiting, queue._served, cached, passed)
        first = order[0]
        older = [
            r
            for r in waiting
            if (r.agent, r.priority) == (first.agent, first.priority) and r.number < first.number
        ]
        if older:
            passed[min(older, key=lambda r: r.number)] += 1
        waiting.remove(first)
        queue.take(first)
        queue.serve(first, rng.randrange(1, 9))


def test_no_request_is_passed_for_long():
    queue = FairQueue()
    poor = Asked("a", 0)
    cached = {poor: 0}
    queue.add(poor)
    admitted = []
    for number in range(1, 40):
        new = Asked("a", number)
        cached[new] = 100
        queue.add(new)
        first = next(queue.by_cached(cached.__getitem__))
        queue.take(first)
        admitted.append(first)
    assert admitted.index(poor) == 8


def test_an_engine_with_little_memory_reads_what_requests_share_once():
    engine = Stepped(256, max_rows=1, passes=63)
    families = [lasting(100, 4, seed=seed) for seed in range(2)]
    streams = [
        engine.submit([*families[number % 2], 5 + number], max_new_tokens=4, agent_id="a")
        for number in range(8)
    ]
    engine.settle()
    assert [done(stream).tokens for stream in streams] == [
        tuple(alone([*families[number % 2], 5 + number], 4)[0]) for number in range(8)
    ]
    # Both families do not fit beside each other; in turns, each would be read anew every time.
    assert metric(engine, "jaxshare_tokens_total", how="fed") < 3 * 100
    reused = [done(stream).reused_tokens for stream in streams]
    assert sorted(reused)[:2] == [0, 0] and sorted(reused)[2:] == [100] * 6
