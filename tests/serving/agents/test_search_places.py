"""Places of model calls in searches: against the calls that come after them."""

import asyncio

import pytest

from jaxshare.serving.agents import (
    BeamSearch,
    BestOfN,
    Budget,
    ForestOfThoughts,
    MonteCarloTreeSearch,
    Runtime,
    SelfConsistency,
    SelfRefine,
    Single,
    TreeOfThoughts,
    agent,
    choose,
    gather,
    llm,
    spawn,
    tool,
)
from jaxshare.serving.agents import search_places as places
from jaxshare.serving.agents.backends import ScriptedModel


def length(text):
    return len(text)


@agent
async def think(levels):
    said = await llm("begin")
    for _ in range(levels):
        await tool(length, said)
        said = await llm("go on")
    return said


@agent
async def proposes(levels):
    said = ""
    for _ in range(levels):
        said = await choose([await llm("propose"), *"abc"])
    return said


@agent
async def helper(task):
    first = await llm(task)
    return first + await llm("more")


@agent
async def leads(levels):
    found = []
    for _ in range(levels):
        found += await gather(llm("lead"), spawn(helper, "help"))
        found.append(await spawn(helper, found[-1][:4]))
    return found


@agent
async def judge(judged):
    return (sum(map(ord, "".join(each.content for each in judged.dialogue))) % 7) / 7


def value(state):
    return (sum((7 * step + 3) * (i + 1) for i, step in enumerate(state.path)) % 11) / 11


def vote(states):
    return len(states) - 1


SUPERVISORS = {
    "best": BestOfN(3, value),
    "consistent": SelfConsistency(4),
    "tree": TreeOfThoughts(3, 2, value),
    "judged": TreeOfThoughts(2, 2, judge),
    "deep": TreeOfThoughts(3, 2, value, depth_first=True, enough=2.0, budget=Budget(calls=80)),
    "voted": TreeOfThoughts(2, 2, vote=vote),
    "proposed": TreeOfThoughts(3, 2, value, generate="propose"),
    "beam": BeamSearch(2, 2, value),
    "forest": ForestOfThoughts(TreeOfThoughts(2, 1, value), 3, active=2),
    "corrected": ForestOfThoughts(BeamSearch(1, 2, value), 2, correct="wrong", below=0.6),
}


class Slow(ScriptedModel):
    """Answers in an order that the seeds decide."""

    def __init__(self):
        texts = [f"answer {number}" for number in range(5)]
        delay = {True: 0.0, False: 0.002}
        super().__init__({lambda call: True: texts}, delay=lambda call: delay[call.seed % 2 == 0])


def calls_of(program, supervisor, most_calls=None):
    model = Slow()
    runtime = Runtime(model, most_calls=most_calls)
    asyncio.run(runtime.run(program.under(supervisor), 3))
    return model.calls


@pytest.mark.parametrize("most_calls", [None, 1])
@pytest.mark.parametrize("program", [think, proposes, leads])
@pytest.mark.parametrize("name", SUPERVISORS)
def test_what_is_asked_later_was_open_before(name, program, most_calls):
    calls = [call for call in calls_of(program, SUPERVISORS[name], most_calls) if call.place]
    assert calls and {call.place.run for call in calls} <= {call.run for call in calls}
    for number, call in enumerate(calls):
        place = call.place
        assert place.answer == call.state and place.answer[: len(place.node)] == place.node
        # Dialogues of one node begin alike, and with those of the nodes above it.
        for after in calls[number:]:
            if after.run == call.run:
                asked = after.place.node
                assert any(asked[: len(n)] == n or n[: len(asked)] == asked for n in place.open)


def test_what_a_search_has_pruned_is_not_open():
    calls = calls_of(think, TreeOfThoughts(3, 1, value))
    levels = {}
    for call in calls:
        levels.setdefault(call.place.node, []).append(call.place)
    first, *rest = levels
    assert first == () and len(calls) == 3 * 4 and len(rest) == 3
    for node, places_of_level in levels.items():
        for place in places_of_level:
            # The node, and the answers that are under way or have come: nothing of other branches.
            assert {each[: len(node)] for each in place.open} == {node}
            assert len(place.open) == 3


def test_siblings_that_wait_for_the_model_are_open_until_they_are_pruned():
    calls = calls_of(think, TreeOfThoughts(3, 1, value), most_calls=1)
    assert {call.place.open for call in calls[:3]} == {((0, 0), (0, 1), (0, 2))}


@pytest.mark.parametrize(
    "supervisor", [Single(), SelfRefine("wrong", value), MonteCarloTreeSearch(15, 2, value)]
)
def test_a_supervisor_that_may_come_back_to_any_state_says_nothing(supervisor):
    assert {call.place for call in calls_of(think, supervisor)} == {None}


def test_searches_with_too_many_open_states_say_nothing(monkeypatch):
    monkeypatch.setattr(places, "MOST_OPEN", 3)
    assert [bool(calls_of(think, BestOfN(n, value))[0].place) for n in (3, 4)] == [True, False]
