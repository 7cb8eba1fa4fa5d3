"""Errors of children, judges and value functions end their path alone; searches within searches.

The expected answers are those of the implementations in test_search.py, which know no agents: a
node with an error is one whose path has ended.
"""

import asyncio
import math

import pytest

from jaxshare.serving.agents import (
    AgentError,
    BeamSearch,
    BestOfN,
    ForestOfThoughts,
    MonteCarloTreeSearch,
    Reply,
    Runtime,
    Single,
    TreeOfThoughts,
    agent,
    llm,
    spawn,
)
from jaxshare.serving.agents.search_log import SearchLog
from tests.serving.agents.test_search import (
    TREES,
    BranchError,
    Value,
    beam,
    breadth_first,
    depth_first,
    forest,
    ordered,
    position_number,
    uct,
    walk,
)


def best_of(tree, n):
    paths = [walk(tree, i) for i in range(n)]
    found = ordered((position, node) for position, node, _ in paths if node)
    return found[0] if found else None, sum(calls for *_, calls in paths), len(found)


SEARCHES = {
    "best of n": (lambda value: BestOfN(4, value), lambda tree: best_of(tree, 4)),
    "beam": (lambda value: BeamSearch(2, 3, value), lambda tree: beam(tree, 2, 3)),
    "breadth first": (
        lambda value: TreeOfThoughts(3, 2, value),
        lambda tree: breadth_first(tree, 3, 2),
    ),
    "depth first": (
        lambda value: TreeOfThoughts(2, 2, value, depth_first=True, enough=0.75),
        lambda tree: depth_first(tree, 2, 2, enough=0.75),
    ),
    "forest": (
        lambda value: ForestOfThoughts(TreeOfThoughts(2, 1, value), 3, key=None),
        lambda tree: forest(tree, 3, 2, 1, False),
    ),
    "uct": (
        lambda value: MonteCarloTreeSearch(20, 3, value),
        lambda tree: uct(tree, 20, 3, math.sqrt(2)),
    ),
    "rollouts": (
        lambda value: MonteCarloTreeSearch(12, 2, value, rollout=True),
        lambda tree: uct(tree, 12, 2, math.sqrt(2), rollout=True),
    ),
}
ALL = pytest.mark.parametrize("name", SEARCHES)
SCORING = [name for name in SEARCHES if name not in ("best of n", "rollouts")]
"""Searches that score every thought."""


def plain(path):
    """The position in the explicit tree, without the waits for children between the calls."""
    return (*path[:1], *path[1::2])


class Model:
    """Names the child of a node by the position of the call, with a wait after each call."""

    def __init__(self, waits):
        self.position, self.calls = plain if waits else lambda path: path, 0

    async def answer(self, call):
        self.calls += call.agent == "parent"
        return Reply(str(position_number(self.position(call.state))))


def named(name):
    def decorate(function):
        function.__name__ = name
        return agent(function)

    return decorate


@agent
async def steps(node, number):
    """The child of a node, or its error."""
    found = node["children"][number % len(node["children"])]
    if "error" in found:
        raise BranchError(found["name"])
    return found


@named("parent")
async def walks_by_children(tree):
    node = tree
    while "children" in node:
        number = int(await llm(node["name"]))
        node = await spawn(steps, node, number)
    return node


@named("parent")
async def walks_on(tree):
    """Walks on where there is an error: its value function is to meet that."""
    node = tree
    while "children" in node:
        number = int(await llm(node["name"]))
        node = node["children"][number % len(node["children"])]
    return node


def searched(which, supervisor, tree, model):
    """(the run or its error, the runtime)."""
    runtime = Runtime(model)
    try:
        return asyncio.run(runtime.run(which.under(supervisor), tree)), runtime
    except (BranchError, AgentError) as error:
        return error, runtime


@ALL
def test_a_child_that_fails_ends_its_path_alone_and_is_in_the_log(name):
    make, oracle = SEARCHES[name]
    num_failed = 0
    for tree in TREES[:16]:
        answer, calls, _ = oracle(tree)
        model = Model(waits=True)
        done, runtime = searched(walks_by_children, make(Value()), tree, model)
        assert model.calls == calls
        if answer is None:
            assert isinstance(done, (BranchError, AgentError))
            continue
        assert (plain(done.accepted.path), done.accepted.value) == answer
        log = SearchLog.of(runtime)
        failed_children = {run.error for run in log.runs if run.agent == "steps" and run.error}
        failed_paths = {state.value for state in log.runs[0].states if state.fate == "failed"}
        assert failed_children == failed_paths
        num_failed += len(failed_paths)
    assert num_failed > 3


class FailingValue(Value):
    def __call__(self, state):
        node = state.value if state.finished else state.variables["node"]
        if "error" in node:
            raise BranchError(node["name"])
        return super().__call__(state)


@agent
async def failing_judge(judged):
    node = judged.value if judged.finished else judged.variables["node"]
    if "error" in node:
        raise BranchError(node["name"])
    return node["score"]


@pytest.mark.parametrize("value", [FailingValue(), failing_judge], ids=["function", "agent"])
@pytest.mark.parametrize("name", SCORING)
def test_a_value_that_fails_ends_its_path_alone_and_is_in_the_log(name, value):
    make, oracle = SEARCHES[name]
    num_failed = 0
    for tree in TREES[:16]:
        answer, calls, _ = oracle(tree)
        model = Model(waits=False)
        done, runtime = searched(walks_on, make(value), tree, model)
        assert model.calls == calls
        if answer is None:
            assert isinstance(done, (BranchError, AgentError))
            continue
        assert (done.accepted.path, done.accepted.value) == answer
        failed = [state for state in runtime.runs[0].states if state.error]
        assert all("value function of" in "".join(each.error.__notes__) for each in failed)
        num_failed += len(failed)
    assert num_failed > 3


def no_number(state):
    return "many"


@pytest.mark.parametrize("name", [*SCORING, "best of n", "rollouts"])
def test_a_value_that_always_fails_is_the_error_of_the_run(name):
    done, _ = searched(walks_on, SEARCHES[name][0](no_number), TREES[3], Model(waits=False))
    assert isinstance(done, AgentError) and "no_number gave 'many'" in str(done)


def test_one_evaluation_of_several_that_fails_ends_the_path():
    def value(state):
        value.times += 1
        if value.times == 2:
            raise BranchError("second")
        return 1.0

    value.times = 0
    tree = {"name": "", "children": [{"name": "a"}, {"name": "b"}, {"name": "c"}]}
    supervisor = TreeOfThoughts(2, 1, value, evaluations=2)
    done, runtime = searched(walks_on, supervisor, tree, Model(waits=False))
    assert done.accepted.path == (0, 1) and value.times == 4
    assert [state.path for state in runtime.runs[0].states if state.error] == [(0, 0)]


def test_paths_that_a_judge_has_ended_are_tidied():
    closed = []

    @named("parent")
    async def holds(tree):
        number = int(await llm("first"))
        try:
            await llm("second")
        finally:
            closed.append(number)
        return number

    def value(state):
        if not state.finished and state.variables["number"] == 2:
            raise BranchError("two")
        return 0.0

    done, _ = searched(holds, TreeOfThoughts(2, 2, value), {}, Model(waits=False))
    assert done.accepted.finished
    assert 2 in closed


# Searches within searches.


def merit(text):
    return (sum(ord(letter) * (i + 3) for i, letter in enumerate(text)) * 7919) % 101


class Letters:
    """Answers of each firing by its number; children are slower or faster by their seed."""

    async def answer(self, call):
        if call.agent == "continues":
            await asyncio.sleep(call.seed % 3 / 2000)
        return Reply("abc"[call.state[-1] % 3])


@agent
async def continues(text, length):
    for _ in range(length):
        text += await llm(f"after {text}")
    return text


def text_merit(state):
    return merit(state.value if state.finished else state.variables["text"])


def ratio(state):
    return text_merit(state) / 101


INNER = {
    "best of n": BestOfN(1, text_merit),
    "tree": TreeOfThoughts(3, 1, text_merit),
    "beam": BeamSearch(1, 3, text_merit),
    "forest": ForestOfThoughts(TreeOfThoughts(3, 1, text_merit), 2, key=None),
    "uct": MonteCarloTreeSearch(200, 3, ratio, parallel=4),
}


def continued(inner, text, length):
    """The text that the inner search finds."""
    if inner == "best of n":
        return text + "a" * length
    if inner == "uct":  # all of the small tree
        ends = [text]
        for _ in range(length):
            ends = [end + letter for end in ends for letter in "abc"]
        return max(ends, key=merit)
    for _ in range(length):
        text = max((text + letter for letter in "abc"), key=merit)
    return text


@agent
async def plans(children):
    text = ""
    for child in children:
        text += await llm("next")
        text = await spawn(child, text, 2)
    return text


OUTER = {
    "breadth first": TreeOfThoughts(3, 9, text_merit),
    "depth first": TreeOfThoughts(3, 9, text_merit, depth_first=True, enough=1000),
    "beam": BeamSearch(9, 3, text_merit),
    "forest": ForestOfThoughts(TreeOfThoughts(3, 9, text_merit), 2, key=None),
    "uct": MonteCarloTreeSearch(100, 3, ratio),
    "parallel uct": MonteCarloTreeSearch(100, 3, ratio, parallel=5),
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("outer", OUTER)
def test_searches_within_all_of_a_search(outer, inner):
    child = continues.under(INNER[inner])
    done = asyncio.run(Runtime(Letters()).run(plans.under(OUTER[outer]), [child] * 2))
    ends = [
        continued(inner, continued(inner, first, 2) + second, 2)
        for first in "abc"
        for second in "abc"
    ]
    assert done.accepted.value == max(ends, key=merit)
    assert all(run.done and run.error is None for run in done.children)


def test_single_paths_have_searching_children_too():
    for inner, search in INNER.items():
        child = continues.under(search)
        done = asyncio.run(Runtime(Letters()).run(plans.under(Single()), [child]))
        assert done.accepted.value == continued(inner, "a", 2)


# A child that is forked while its search waits for a vote.


class Quarrel:
    """The first tree is quiet, the second one loud; the parent has two firings."""

    async def answer(self, call):
        if call.agent == "asks_twice":
            return Reply(str(call.state[-1]))
        return Reply("loud" if call.state[0] else "quiet")


@agent
async def speaks():
    first = await llm("first")
    await llm("second")
    if first == "quiet":
        raise BranchError(first)
    yield first


@agent
async def slow_vote(states):
    await asyncio.sleep(0.05 * (states[0].variables["first"] == "quiet"))
    return 0


@agent
async def asks_twice():
    search = ForestOfThoughts(TreeOfThoughts(2, 1, vote=slow_vote), 2, key=None)
    child = spawn(speaks.under(search))
    first = await child.next()
    said = await llm("say")
    child.resume(said)
    second = await child.next()
    child.resume(said)
    await child.result()  # once the first tree has voted, too
    return first, said, second


def test_a_child_that_waits_for_a_vote_is_forked_with_it():
    branching = TreeOfThoughts(2, 2, lambda state: float(state.finished and state.value[1]))
    runtime = Runtime(Quarrel())
    done = asyncio.run(runtime.run(asks_twice.under(branching)))
    assert done.accepted.value == ("loud", "1", "loud")
    children = [run for run in runtime.runs if run.agent.name == "speaks"]
    assert len(children) == 2 and all(run.accepted is not None for run in children)
    votes = [run for run in runtime.runs if run.agent.name == "slow_vote"]
    assert len({run.id for run in votes}) == len(votes)


@agent
async def mutters():
    first = await llm("first")
    await llm("second")
    return first


@agent
async def quits_or_waits():
    child = spawn(mutters.under(TreeOfThoughts(2, 1, vote=slow_vote)))
    if await llm("say") == "first":
        child.cancel()
        return "cancelled"
    return await child


class Firsts:
    async def answer(self, call):
        if call.agent == "quits_or_waits":
            await asyncio.sleep(0.02)  # the child has come to its vote
            return Reply("then" if call.state[-1] else "first")
        return Reply("quiet")


def test_a_fork_of_a_child_that_waits_for_nothing_but_a_vote():
    branching = TreeOfThoughts(2, 2, lambda state: float(state.value == "quiet"))
    done = asyncio.run(Runtime(Firsts()).run(quits_or_waits.under(branching)))
    assert done.accepted.value == "quiet"
