"""Supervisors against straight-line implementations of their algorithms, over small explicit trees.

A tree is walked by an agent whose model answers by the position that the call comes from, so that
every algorithm sees the same tree. The implementations here use no agents: a node is a dictionary,
and a position is the path of firings that led to it.
"""

import asyncio
import math
import random

import pytest

from jaxshare.serving.agents import (
    AgentError,
    Budget,
    BudgetError,
    Message,
    ParseError,
    Reply,
    Runtime,
    Supervisor,
    agent,
    llm,
    run,
    spawn,
    tool,
)
from jaxshare.serving.agents.react import parse_step, react
from jaxshare.serving.agents.search import (
    BeamSearch,
    BestOfN,
    ForestOfThoughts,
    MonteCarloTreeSearch,
    SelfConsistency,
    SelfRefine,
    TreeOfThoughts,
)


class Model:
    """Names the child of a node by the position of the call."""

    def __init__(self):
        self.calls = []

    async def answer(self, call):
        self.calls.append(call)
        await asyncio.sleep(random.random() / 5000)  # the order of answers must not matter
        return Reply(str(position_number(call.state)), 1, 1)


def position_number(position):
    return position[-1] + 3 * position[0] + len(position)


def child_at(node, position):
    """The child that a node's firing at this position leads to."""
    return node["children"][position_number(position) % len(node["children"])]


class BranchError(Exception):
    pass


@agent
async def walks(tree):
    node = tree
    while "children" in node:
        number = await llm(node["name"])
        node = node["children"][int(number) % len(node["children"])]
        if "error" in node:
            raise BranchError(node["name"])
    return node


def make_tree(seed, depth=4, errors=0.1, scores=5):
    """A random tree: a node has a name, one of few scores, and children, an error, or neither."""
    rng = random.Random(seed)

    def node(name, left):
        made = {"name": name, "score": rng.randrange(scores) / (scores - 1)}
        if name and rng.random() < errors:
            made["error"] = True
        elif left and (not name or rng.random() < 0.8):
            made["children"] = [node(f"{name}/{i}", left - 1) for i in range(rng.randint(1, 3))]
        return made

    return node("", depth)


class Value:
    """Scores nodes, and counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, state):
        self.calls += 1
        return (state.value if state.finished else state.variables["node"])["score"]


def searched(supervisor, tree, which=walks, **options):
    """The run, and its model's calls."""
    model = Model()
    return asyncio.run(Runtime(model, **options).run(which.under(supervisor), tree)), model.calls


def check(supervisor, value, tree, expected):
    """Checks a search against expected = (position and node, or None; calls; values)."""
    answer, calls, values = expected
    if answer is None:
        with pytest.raises((BranchError, AgentError)):
            searched(supervisor, tree)
        return
    found, made = searched(supervisor, tree)
    assert (found.accepted.path, found.accepted.value) == answer
    assert len(made) == found.calls == calls
    assert value is None or value.calls == values


def ordered(found):
    """Positions and nodes, best first."""
    return sorted(found, key=lambda each: (-each[1]["score"], each[0]))


TREES = [make_tree(seed) for seed in range(24)]


def walk(tree, first):
    """(position, end of the path whose states are fired once, calls); None if it raises."""
    position, node, calls = (first,), tree, 0
    while "children" in node:
        position, calls = (*position, 0), calls + 1
        node = child_at(node, position)
    return position, None if "error" in node else node, calls


# Repeated runs.


@pytest.mark.parametrize("n", [1, 2, 5])
def test_best_of_n(n):
    for tree in TREES:
        paths = [walk(tree, i) for i in range(n)]
        found = ordered((position, node) for position, node, _ in paths if node)
        value = Value()
        check(
            BestOfN(n, value),
            value,
            tree,
            (found[0] if found else None, sum(calls for *_, calls in paths), len(found)),
        )


@pytest.mark.parametrize("n", [1, 3, 6])
def test_self_consistency(n):
    for tree in TREES:
        paths = [walk(tree, i) for i in range(n)]
        found = [(position, node) for position, node, _ in paths if node]
        most = max(
            (sum(other["score"] == node["score"] for _, other in found) for _, node in found),
            default=0,
        )
        first = next(
            (
                each
                for each in found
                if sum(other["score"] == each[1]["score"] for _, other in found) == most
            ),
            None,
        )
        check(
            SelfConsistency(n, key=lambda node: node["score"]),
            None,
            tree,
            (first, sum(calls for *_, calls in paths), 0),
        )


@agent
async def drafts(topic):
    text = await llm(f"write about {topic}")
    return text + await llm("and more")


class Drafts:
    """Gives drafts in order."""

    def __init__(self, *texts):
        self.texts, self.calls = list(texts), []

    async def answer(self, call):
        self.calls.append(call)
        text = self.texts.pop(0)
        if text == "fail":
            raise BranchError(text)
        return Reply(text)


@pytest.mark.parametrize(
    ("scores", "answer", "rounds"),
    [
        ([0.5, 0.2, 0.9], 0.9, 3),
        ([0.5, 0.7, 0.7], 0.7, 3),
        ([0.1, 1.0], 1.0, 2),
        ([1.5], 1.5, 1),
        ([0.5, "fail"], 0.5, 2),
    ],
)
def test_self_refine_goes_on_in_the_same_dialogue_until_it_is_good_enough(scores, answer, rounds):
    texts = [
        text for score in scores for text in ([str(score), "0"] if score != "fail" else ["fail"])
    ]
    model = Drafts(*texts)

    def feedback(state):
        return f"{state.score} is not enough"

    supervisor = SelfRefine(feedback, lambda state: float(state.value), rounds=3)
    done = asyncio.run(Runtime(model).run(drafts.under(supervisor), "jax"))
    assert float(done.accepted.value) == answer and sum(
        state.finished for state in done.states
    ) == sum(s != "fail" for s in scores)
    assert done.accepted is next(
        state for state in done.states if state.finished and float(state.value) == answer
    )
    first = [
        Message("user", "write about jax"),
        Message("assistant", texts[0]),
        Message("user", "and more"),
        Message("assistant", "0"),
    ]
    assert len(model.calls) == len(texts) and model.calls[1].messages == tuple(first[:3])
    if rounds > 1:
        assert model.calls[2].messages == (
            *first,
            Message("user", f"{scores[0]} is not enough"),
            first[0],
        )
    if rounds > 2:
        assert (
            len(model.calls[4].messages) == 11
            and model.calls[4].messages[9].content == f"{scores[1]} is not enough"
        )
    assert len({state.path for state in done.states}) == len(done.states)


# Trees.


def breadth_first(tree, breadth, keep, depth=None, prune=-math.inf, enough=math.inf):
    calls = values = levels = 0
    found, level = [], [((0,), tree)]
    while level and (depth is None or levels < depth):
        came = []
        for position, node in level:
            for i in range(breadth):
                child = child_at(node, (*position, i))
                calls += 1
                if "error" not in child:
                    values += 1
                    if child["score"] >= prune:
                        came.append(((*position, i), child))
        found += [each for each in came if "children" not in each[1]]
        if any(node["score"] >= enough for _, node in found):
            break
        level = ordered(each for each in came if "children" in each[1])[:keep]
        levels += 1
    return ordered(found)[0] if found else None, calls, values


def depth_first(tree, breadth, keep, depth=None, prune=-math.inf, enough=-math.inf):
    found, count = [], {"calls": 0, "values": 0}

    def visit(position, node, left):
        """True once the search is over."""
        if left == 0:
            return False
        good = []
        for i in range(breadth):
            child = child_at(node, (*position, i))
            count["calls"] += 1
            if "error" not in child:
                count["values"] += 1
                if child["score"] >= prune:
                    good.append(((*position, i), child))
        found.extend(each for each in good if "children" not in each[1])
        if any(node["score"] >= enough for _, node in found):
            return True
        return any(
            visit(*each, None if left is None else left - 1)
            for each in ordered(e for e in good if "children" in e[1])[:keep]
        )

    visit((0,), tree, depth)
    return ordered(found)[0] if found else None, count["calls"], count["values"]


LIMITS = [
    {},
    {"depth": 2},
    {"prune": 0.5},
    {"enough": 1.0},
    {"enough": 0.5, "prune": 0.25, "depth": 3},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize(("breadth", "keep"), [(1, 1), (2, 1), (3, 2), (2, 5)])
def test_tree_of_thoughts(breadth, keep, limits):
    for tree in TREES[:20]:
        for first, algorithm in ((False, breadth_first), (True, depth_first)):
            value = Value()
            check(
                TreeOfThoughts(breadth, keep, value, depth_first=first, **limits),
                value,
                tree,
                algorithm(tree, breadth, keep, **limits),
            )


def beam(tree, width, branch):
    calls = values = 0
    found, level = [], [((0,), tree)]
    while level:
        came = []
        for position, node in level:
            for i in range(branch):
                child = child_at(node, (*position, i))
                calls += 1
                if "error" not in child:
                    values += 1
                    came.append(((*position, i), child))
        best = ordered([*found, *came])[:width]
        found, level = (
            [each for each in best if "children" not in each[1]],
            [each for each in best if "children" in each[1]],
        )
    return found[0] if found else None, calls, values


@pytest.mark.parametrize(("width", "branch"), [(1, 1), (1, 3), (2, 2), (4, 3)])
def test_beam_search(width, branch):
    for tree in TREES:
        value = Value()
        check(BeamSearch(width, branch, value), value, tree, beam(tree, width, branch))


def uct(tree, simulations, breadth, exploration, rollout=False, enough=math.inf):
    """Plain recursive UCT."""
    count, fired, found = {"calls": 0, "values": 0}, {}, []

    def fire(position, node):
        number = fired.get(position, 0)
        fired[position] = number + 1
        count["calls"] += 1
        position = (*position, number)
        return position, child_at(node, position)

    def score_of(position, node):
        """The score of a new node, or of the end of its rollout."""
        while rollout and "children" in node:
            position, node = fire(position, node)
        if "error" in node:
            return 0.0
        count["values"] += 1
        if "children" not in node:
            found.append((position, node))
        return node["score"]

    def new(position, node):
        return {"position": position, "node": node, "children": [], "visits": 0, "total": 0.0}

    def simulate(at):
        node = at["node"]
        if "children" not in node:
            score = at["total"] / at["visits"] if at["visits"] else score_of(at["position"], node)
        elif len(at["children"]) < breadth:
            made = new(*fire(at["position"], node))
            score = score_of(made["position"], made["node"])
            made.update(visits=1, total=score)
            at["children"].append(made)
        else:
            score = simulate(
                max(
                    at["children"],
                    key=lambda c: (
                        c["total"] / c["visits"]
                        + exploration * math.sqrt(math.log(at["visits"]) / c["visits"])
                    ),
                )
            )
        at["visits"] += 1
        at["total"] += score
        return score

    root = new((0,), tree)
    for _ in range(simulations):
        if any(node["score"] >= enough for _, node in found):
            break
        simulate(root)
    return ordered(found)[0] if found else None, count["calls"], count["values"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"exploration": 0.3},
        {"rollout": True},
        {"enough": 0.75},
        {"rollout": True, "enough": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize(("simulations", "breadth"), [(1, 1), (10, 2), (30, 3)])
def test_monte_carlo_tree_search(simulations, breadth, options):
    for tree in TREES[:15]:
        value = Value()
        expected = uct(tree, simulations, breadth, **{"exploration": math.sqrt(2), **options})
        check(MonteCarloTreeSearch(simulations, breadth, value, **options), value, tree, expected)


def forest(tree, trees, breadth, keep, vote):
    answers, calls, values = [], 0, 0
    for first in range(trees):
        # A tree's first firing is one of the root's, so its positions start with another number.
        found, level = [], [((first,), tree)]
        while level:
            came = []
            for position, node in level:
                for i in range(breadth):
                    child = child_at(node, (*position, i))
                    calls += 1
                    if "error" not in child:
                        values += 1
                        came.append(((*position, i), child))
            found += [each for each in came if "children" not in each[1]]
            level = ordered(each for each in came if "children" in each[1])[:keep]
        answers += ordered(found)[:1]
    if not answers:
        return None, calls, values
    scores = [node["score"] for _, node in answers]
    voted = next(
        each for each in answers if scores.count(each[1]["score"]) == max(map(scores.count, scores))
    )
    return voted if vote else ordered(answers)[0], calls, values


@pytest.mark.parametrize("vote", [True, False])
@pytest.mark.parametrize("trees", [1, 4])
def test_forest_of_thoughts(trees, vote):
    for tree in TREES:
        value = Value()
        supervisor = ForestOfThoughts(
            TreeOfThoughts(2, 1, value), trees, key=(lambda node: node["score"]) if vote else None
        )
        check(supervisor, value, tree, forest(tree, trees, 2, 1, vote))


def test_a_forest_of_other_searches():
    for tree in TREES[:10]:
        value = Value()
        check(
            ForestOfThoughts(MonteCarloTreeSearch(4, 2, value, exploration=1.0), 1),
            value,
            tree,
            uct(tree, 4, 2, 1.0),
        )


# Properties of all supervisors.


def supervisors(value, **options):
    return [
        BestOfN(4, value, **options),
        SelfConsistency(4, key=lambda node: node["name"], **options),
        SelfRefine(lambda state: "again", value, enough=2, **options),
        BeamSearch(2, 2, value, **options),
        TreeOfThoughts(2, 2, value, **options),
        TreeOfThoughts(2, 2, value, depth_first=True, enough=2, **options),
        ForestOfThoughts(TreeOfThoughts(2, 2, value), 2, key=None, **options),
        MonteCarloTreeSearch(12, 2, value, **options),
        MonteCarloTreeSearch(12, 2, value, rollout=True, **options),
    ]


NAMES = [f"{type(each).__name__}-{i}" for i, each in enumerate(supervisors(None))]
ALL = pytest.mark.parametrize("which", range(len(NAMES)), ids=NAMES)


@agent
async def walks_with_pauses(tree):
    """Walks like `walks`, with more states between two model calls."""
    node, helper = tree, spawn(counts)
    while "children" in node:
        number = await llm(node["name"])
        await asyncio.sleep(0)
        if await tool(isinstance, number, str):
            node = node["children"][int(number) % len(node["children"])]
        await helper
        if "error" in node:
            raise BranchError(node["name"])
    return node


@agent
async def counts():
    await asyncio.sleep(0.001)


@ALL
def test_a_search_is_the_same_every_time_and_as_long_as_the_definition_says(which):
    for tree in (TREES[3], TREES[7]):
        runs = [searched(supervisors(Value())[which], tree) for _ in range(2)]
        assert len({(run.accepted.path, run.calls) for run, _ in runs}) == 1


@ALL
def test_states_in_which_nothing_is_chosen_are_fired_once(which):
    done, calls = searched(supervisors(Value())[which], TREES[3], walks_with_pauses)
    for state in done.states:
        if not state.ended and not state.asks_model and state is not done.root:
            assert state.fired <= 1
    assert done.accepted.finished and done.calls == len(calls)


@ALL
def test_an_agent_can_be_the_value_function(which):
    @agent
    async def judge(judged):
        await llm(f"how good is {judged.dialogue[-1].content if judged.dialogue else 'it'}?")
        return (judged.value if judged.finished else judged.variables["node"])["score"]

    by_function, _ = searched(supervisors(Value())[which], TREES[5])
    by_agent, calls = searched(supervisors(judge)[which], TREES[5])
    assert (
        by_agent.accepted.path == by_function.accepted.path and by_agent.calls == by_function.calls
    )
    judged = [call for call in calls if call.agent == "judge"]
    assert (
        len(judged)
        == len(by_agent.children)
        == sum(state.score is not None for state in by_agent.states)
    )
    assert which == 1 or judged


@ALL
def test_where_all_branches_fail_the_error_is_that_of_the_first(which):
    tree = {
        "name": "",
        "score": 0,
        "children": [{"name": str(i), "score": 0, "error": True} for i in range(3)],
    }
    with pytest.raises(BranchError) as caught:
        searched(supervisors(Value())[which], tree)
    assert str(caught.value) == child_at(tree, (0, 0))["name"]


@ALL
def test_an_agent_without_choices_ends_at_once(which):
    leaf = {"name": "leaf", "score": 0.5}
    done, calls = searched(supervisors(Value())[which], leaf)
    assert done.accepted.value == leaf and not calls
    with pytest.raises(BranchError):
        searched(supervisors(Value())[which], leaf, fails_at_once)


@agent
async def fails_at_once(tree):
    raise BranchError(tree["name"])


@ALL
def test_a_budget_leaves_the_best_that_was_found(which):
    tree = make_tree(3, errors=0)
    whole, _ = searched(supervisors(Value())[which], tree)
    ended = 0
    for calls in range(1, whole.calls + 1):
        try:
            done, made = searched(supervisors(Value(), budget=Budget(calls=calls))[which], tree)
        except BudgetError:
            continue
        finished = [state for state in done.states if state.finished]
        ended += 1
        assert done.accepted in finished and len(made) <= calls
        if which != 1:
            assert done.accepted.score == max(state.score for state in finished)
    assert ended and done.accepted.path == whole.accepted.path  # the last was enough


def test_a_budget_that_ends_in_the_midst_of_a_level_keeps_what_was_found_there():
    tree = {
        "name": "",
        "score": 0,
        "children": [{"name": str(i), "score": i / 4} for i in range(3)],
    }
    done, calls = searched(TreeOfThoughts(3, 1, Value(), budget=Budget(calls=2)), tree)
    scores = [child_at(tree, (0, i))["score"] for i in range(2)]
    assert len(calls) == 2 and done.accepted.score == max(scores)


def test_scores_that_are_no_numbers_count_least():
    tree = {
        "name": "",
        "score": 0,
        "children": [{"name": str(i), "score": math.nan if i else 0.0} for i in range(4)],
    }
    for supervisor in (
        BestOfN(3, Value()),
        TreeOfThoughts(3, 3, Value()),
        BeamSearch(3, 3, Value()),
    ):
        found, _ = searched(supervisor, tree)
        assert found.accepted.value["name"] == "0"


def test_no_answer_within_the_depth_is_an_error_that_says_so():
    tree = {
        "name": "",
        "score": 0,
        "children": [{"name": "0", "score": 0, "children": [{"name": "1", "score": 1}]}],
    }
    with pytest.raises(
        AgentError, match="TreeOfThoughts, the supervisor of agent walks, has accepted no state"
    ):
        searched(TreeOfThoughts(2, 2, Value(), depth=1), tree)
    tree["children"].append({"name": "2", "score": 0, "error": True})
    with pytest.raises(AgentError, match="accepted no state") as caught:
        searched(TreeOfThoughts(2, 2, Value(), depth=1), tree)
    assert isinstance(caught.value.__cause__, BranchError)
    tree["children"].pop()
    with pytest.raises(
        AgentError,
        match="MonteCarloTreeSearch, the supervisor of agent walks, has accepted no state",
    ):
        searched(MonteCarloTreeSearch(1, 1, Value()), tree)


@pytest.mark.parametrize(
    "make",
    [
        lambda: BestOfN(0, None),
        lambda: SelfConsistency(0),
        lambda: SelfRefine(str, None, rounds=0),
        lambda: BeamSearch(0, 1, None),
        lambda: BeamSearch(1, 0, None),
        lambda: TreeOfThoughts(0, 1, None),
        lambda: TreeOfThoughts(1, 0, None),
        lambda: TreeOfThoughts(1, 1, None, depth=0),
        lambda: ForestOfThoughts(Supervisor(), 0),
        lambda: MonteCarloTreeSearch(0, 1, None),
        lambda: MonteCarloTreeSearch(1, 0, None),
    ],
)
def test_numbers_begin_at_one(make):
    with pytest.raises(ValueError, match="is 0; give a whole number from 1 on"):
        make()


# A tool loop.


def multiply(a: int, b: int) -> int:
    """The product of two numbers.

    And more.
    """
    return a * b


async def divide(a, b, timeout=1):
    return a / b / timeout


TOOLS = {"multiply": multiply, "divide": divide}


def test_react_uses_tools_until_it_has_the_answer():
    model = Drafts(
        'Thought: first the product\nAction: multiply {"a": 6, "b": 7}',
        "no form",
        "Thought: half of it\n\nAction: divide "
        '{"a": 42, "b": 2, "timeout": 1}\nObservation of mine',
        "Action: sum {}",
        'Action: divide {"a": 1, "b": 0}',
        'Action: multiply {"c": 1}',
        "Action: multiply",
        "Thought: done\nAnswer: it is 21\nand no more",
    )
    done = asyncio.run(Runtime(model).run(react, "half of 6 times 7", TOOLS))
    assert done.accepted.value == "it is 21\nand no more"
    first = model.calls[0].messages[0].content
    assert first.endswith(
        "Tools:\nmultiply(a: int, b: int) -> int: The product of two numbers.\ndivide(a, b, "
        "timeout=1)\n\nTask: half of 6 times 7"
    )
    told = [message.content for message in model.calls[-1].messages if message.role == "user"][1:]
    assert told == [
        "Observation: 42",
        "Observation: 21.0",
        "Observation: there is no tool sum; there are: multiply, divide",
        "Observation: divide has failed: ZeroDivisionError: division by zero",
        "Observation: multiply has failed: TypeError: multiply() got an unexpected keyword "
        "argument 'c'",
        "Observation: multiply has failed: TypeError: multiply() missing 2 required positional "
        "arguments: 'a' and 'b'",
    ]
    assert all(call.options.stop == ("\nObservation:",) for call in model.calls)
    assert "no form" not in str(model.calls[-1].messages)  # there was another attempt


def test_react_has_bounds():
    with pytest.raises(ParseError, match="'no form at all'"):
        run(react, "x", TOOLS, model=Drafts(*["no form"] * 2, "no form at all"))
    with pytest.raises(AgentError, match=r"no answer within 2 steps.*Observation: 6"):
        run(react, "x", TOOLS, steps=2, model=Drafts(*['Action: multiply {"a": 2, "b": 3}'] * 2))
    assert (
        run(
            react.under(SelfConsistency(3)),
            "x",
            {},
            model=Drafts("Answer: 1", "Answer: 2", "Answer: 2"),
        )
        == "2"
    )


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("Answer: 4", ("", None, {}, "4")),
        ("  Thought: I say\nAction: this\nAction: go", None),
        (
            'Thought: a\nb\n Action: go { "x": {"y": [1]} } and so on',
            ("a\nb", "go", {"x": {"y": [1]}}, None),
        ),
        ("Action: go", ("", "go", {}, None)),
        ("Action:", None),
        ('Action: go {"x": ', None),
        ("Thought: Answer: 4", None),
        ("", None),
    ],
)
def test_parse_step(text, step):
    if step is None:
        with pytest.raises(ValueError):
            parse_step(text)
    else:
        assert tuple(parse_step(text)) == step
