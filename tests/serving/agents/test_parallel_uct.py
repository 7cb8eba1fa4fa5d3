"""UCT with virtual losses, against a straight-line implementation over explicit trees.

The implementation knows every answer at once, and keeps up to k simulations before it backs the
oldest one up: by the definition, the search must decide the same, however fast its answers are.
"""

import asyncio
import math

import pytest

from jaxshare.serving.agents import (
    Budget,
    BudgetError,
    MonteCarloTreeSearch,
    Reply,
    Runtime,
    agent,
    llm,
)
from tests.serving.agents.test_search import (
    TREES,
    Value,
    child_at,
    ordered,
    position_number,
    searched,
)

SQRT_2 = math.sqrt(2)


class Node:
    def __init__(self, position, node, fired=0):
        self.position, self.node, self.fired = position, node, fired
        self.children, self.open = [], 0  # children that are backed up; firings that are not
        self.visits, self.total, self.lost = 0, 0.0, 0

    @property
    def is_end(self):
        return "children" not in self.node

    def bound(self, parent, exploration):
        visits = self.visits + self.lost
        times = parent.visits + parent.lost
        return self.total / visits + exploration * math.sqrt(math.log(times) / visits)


class Uct:
    def __init__(self, tree, breadth, exploration, rollout):
        self.root = Node((0,), tree)
        self.breadth, self.exploration, self.rollout = breadth, exploration, rollout
        self.calls, self.values, self.found = 0, 0, []

    def descend(self):
        """Nodes down to the one to fire, or None where only open simulations go on."""
        path = [self.root]
        while not path[-1].is_end:
            at = path[-1]
            if len(at.children) + at.open < self.breadth:
                return path
            if not at.children:
                return None
            in_order = sorted(at.children, key=lambda child: child.position)
            path.append(max(in_order, key=lambda child: child.bound(at, self.exploration)))
        return path

    def fire(self, position, node, firing):
        self.calls += 1
        position = (*position, firing)
        return position, child_at(node, position)

    def simulate(self, path):
        """(path with the new node, score, the finished end or None)."""
        at = path[-1]
        position, node = self.fire(at.position, at.node, at.fired)
        at.fired += 1
        new, score, end = Node(position, node), 0.0, None
        if self.rollout and "children" in node:
            new.fired = 1
            while "children" in node:
                position, node = self.fire(position, node, 0)
        if "error" not in node:
            self.values += 1
            score = node["score"]
            end = None if "children" in node else (position, node)
        return [*path, new], score, end


def uct(tree, simulations, breadth, parallel, exploration=SQRT_2, rollout=False, enough=9.0):
    search, window, begun = Uct(tree, breadth, exploration, rollout), [], 0
    while True:
        while begun < simulations and len(window) < parallel:
            path = search.descend()
            if path is None:
                break
            begun += 1
            if path[-1].is_end:
                score = path[-1].total / path[-1].visits
                for node in path:
                    node.visits, node.total = node.visits + 1, node.total + score
                continue
            window.append(search.simulate(path))
            path[-1].open += 1
            for node in path:
                node.lost += 1
        if not window:
            break
        path, score, end = window.pop(0)
        path[-2].open -= 1
        path[-2].children.append(path[-1])
        for node in path[:-1]:
            node.lost -= 1
        for node in path:
            node.visits, node.total = node.visits + 1, node.total + score
        search.found += [end] if end else []
        if end and end[1]["score"] >= enough:
            break
    found = ordered(search.found)
    return found[0] if found else None, search.calls, search.values


@pytest.mark.parametrize("rollout", [False, True])
@pytest.mark.parametrize("parallel", [1, 2, 3, 8])
@pytest.mark.parametrize(("simulations", "breadth"), [(12, 2), (30, 3)])
def test_many_simulations_at_once_decide_as_the_definition_says(
    simulations, breadth, parallel, rollout
):
    for tree in TREES[:8]:
        value = Value()
        supervisor = MonteCarloTreeSearch(
            simulations, breadth, value, parallel=parallel, rollout=rollout
        )
        answer, calls, values = uct(tree, simulations, breadth, parallel, rollout=rollout)
        if answer is None:
            continue
        found, made = searched(supervisor, tree)
        assert (found.accepted.path, found.accepted.value) == answer
        assert (len(made), value.calls) == (calls, values)


def test_virtual_losses_lead_elsewhere():
    # With the same exploration, a search of one simulation at a time goes to other positions.
    differ = 0
    for tree in TREES:
        one, many = (uct(tree, 30, 3, parallel)[1:] for parallel in (1, 8))
        differ += one != many
    assert differ > len(TREES) / 4


@pytest.mark.parametrize("parallel", [2, 5])
def test_the_answer_that_is_good_enough_is_the_same_every_time(parallel):
    for tree in TREES[:10]:
        answer, _, _ = uct(tree, 30, 3, parallel, enough=0.75)
        if answer is None:
            continue
        for _ in range(2):
            supervisor = MonteCarloTreeSearch(30, 3, Value(), parallel=parallel, enough=0.75)
            found, _ = searched(supervisor, tree)
            assert (found.accepted.path, found.accepted.value) == answer


class Counting:
    """Answers by position, after a while, and counts the calls under way."""

    def __init__(self):
        self.now = self.most = 0

    async def answer(self, call):
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.002)
        self.now -= 1
        return Reply(str(position_number(call.state)))


@agent
async def guesses(depth):
    found = []
    for _ in range(depth):
        found.append(int(await llm("a number")))
    return found


@pytest.mark.parametrize("parallel", [1, 4])
def test_so_many_simulations_are_under_way(parallel):
    model = Counting()
    supervisor = MonteCarloTreeSearch(40, 4, lambda state: 0.5, parallel=parallel)
    asyncio.run(Runtime(model).run(guesses.under(supervisor), 2))
    assert model.most == parallel


def merit(state):
    return (sum(state.value) % 7) / 7 if state.finished else 0.5


def test_a_budget_ends_it_with_the_best_so_far():
    ended = 0
    for calls in range(1, 20, 3):
        budget = Budget(calls=calls)
        supervisor = MonteCarloTreeSearch(100, 4, merit, parallel=4, budget=budget)
        try:
            done = asyncio.run(Runtime(Counting()).run(guesses.under(supervisor), 2))
        except BudgetError:
            continue
        ended += 1
        assert done.calls == calls
        finished = [state for state in done.states if state.finished]
        assert done.accepted.score == max(state.score for state in finished)
    assert ended == 5
