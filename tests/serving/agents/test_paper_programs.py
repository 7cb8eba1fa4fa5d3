"""Programs of Hive's figures under every supervisor, against the same programs run natively.

The paper's text describes its programs, and its figures draw them: the repair of figure 6, the
workflow of figure 3, and the summary agent that shrinks the context (section 3.2). A debate and a
planner with workers are of the same kinds. The oracle is that of `test_children`: Python runs the
coroutines, and a child is driven when its parent waits for it.
"""

import asyncio
from typing import Any

import pytest

from jaxshare.serving import agents
from jaxshare.serving.agents import (
    BeamSearch,
    BestOfN,
    Dialogue,
    ForestOfThoughts,
    MonteCarloTreeSearch,
    Runtime,
    SelfConsistency,
    SelfRefine,
    Single,
    TreeOfThoughts,
    agent,
    current_dialogue,
)
from jaxshare.serving.agents.journal import Journal
from tests.serving.agents.test_children import _BRANCHES, Model, answer, llm, native, spawn


async def _done(value: Any) -> Any:
    return value


def tool(function: Any, *args: Any) -> Any:
    if _BRANCHES.get() is None:
        return agents.tool(function, *args)
    return _done(function(*args))


# Figure 6: a program is repaired by one agent, and another one gathers code.


def simulate(patch: str) -> bool:
    return int(patch) % 3 != 0


def find(query: str) -> str:
    return f"def f{query}(): ..."


@agent
async def context_gather(bug):
    update = "nothing"
    while True:
        query = await llm(f"what matters to {bug} after {update}")
        code = await tool(find, query)
        update = yield code


async def bug_repair():
    gather = spawn(context_gather, "a bug")
    while True:
        code = await gather.next()
        patch = await llm(f"repair {code}")
        if await tool(simulate, patch):
            break
        gather.resume(patch)
    return patch, code


# Figure 3: Decision chooses what is done next; Search finds, and Summary makes that short.


@agent
async def viewer(task):
    return "seen " + await llm(f"view {task}")


@agent
async def patcher(task, seen):
    return await llm(f"patch {task} with {seen}")


@agent
async def searcher(task):
    first, second = spawn(viewer, f"{task} a"), spawn(viewer, f"{task} b")
    return [await second, await first]


@agent
async def summary(found):
    return "short " + await llm(f"summarise {found}")


async def decision():
    seen, patches = [], []
    for turn in range(3):
        choice = int(await llm(f"decide in turn {turn} about {patches}")) % 3
        if choice == 0:
            seen.append(await spawn(viewer, turn))
        elif choice == 1:
            found = await spawn(searcher, turn)
            seen = [await spawn(summary, [*seen, *found])]
        patches.append(await spawn(patcher, turn, seen))
    return patches


# A debate: each debater hears what the other has said.


@agent
async def debater(side):
    said = await llm(f"{side} opens")
    while True:
        heard = yield said
        said = await llm(f"{side} answers {heard}")


async def debate():
    pro, con, said = spawn(debater, "pro"), spawn(debater, "con"), []
    for _ in range(2):
        said += [await pro.next(), await con.next()]
        verdict = await llm(f"who leads after {said}?")
        pro.resume(said[-1] + verdict)
        con.resume(said[-2] + verdict)
    return said, await llm(f"who wins {said}?"), await pro.next()


# A planner with workers, which report before they go on.


@agent
async def worker(task):
    drafted = await llm(f"draft {task}")
    told = yield drafted
    yield await llm(f"finish {drafted} as told {told}")


async def planner():
    plan = await llm("plan")
    team = [spawn(worker, f"{plan}.{number}") for number in range(2)]
    drafts = [await one.next() for one in team]
    review = await llm(f"review {drafts}")
    for one in team:
        one.resume(review)
    return await llm(f"join {[await one.next() for one in team]}")


PROGRAMS = [bug_repair, decision, debate, planner]


def value(state):
    """A score that depends on what the model has said."""
    return int(answer(repr(state.dialogue), 0)) / 10_000


SUPERVISORS = [
    Single(),
    BestOfN(3, value),
    SelfConsistency(3, key=repr),
    SelfRefine(lambda state: "better", value, rounds=3, enough=2.0),
    TreeOfThoughts(2, 2, value),
    BeamSearch(2, 2, value),
    ForestOfThoughts(TreeOfThoughts(2, 1, value), 2, key=repr),
    MonteCarloTreeSearch(6, 2, value, rollout=True),
]


def named(supervisor):
    return type(supervisor).__name__


def branches_to(state):
    """The branches of the calls of the model on the path to a state, from where its round began."""
    found = []
    while state.parent is not None and state.parent.waiting is not None:
        if state.parent.asks_model:
            found.insert(0, state.path[-1])
        state = state.parent
    return found


def run(program, supervisor, restore=None, model=None, **options):
    runtime = Runtime(model or Model(), **options)
    made = agent(restore=restore)(program).under(supervisor)
    return asyncio.run(runtime.run(made)), runtime


@pytest.mark.parametrize("restore", [None, "replay"])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("supervisor", SUPERVISORS, ids=named)
def test_every_path_is_what_python_makes_of_it(program, supervisor, restore):
    model = Model()
    done, runtime = run(program, supervisor, restore, model)
    ended = [state for state in done.states if state.ended]
    assert done.accepted in ended and len(ended) >= (1 if named(supervisor) == "Single" else 2)
    for state in ended:
        assert state.error is None, repr(state.error)
        assert state.value == native(program, branches_to(state))
    assert not any(made.error and not made.cancelled for made in runtime.runs)
    # No call is made twice, whatever paths share.
    assert len({(call.run, call.state) for call in model.calls}) == len(model.calls)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("supervisor", SUPERVISORS[4:], ids=named)
def test_a_journal_has_all_of_a_search(program, supervisor, tmp_path):
    journal = Journal()
    first, _ = run(program, supervisor, journal=journal)
    journal.save(tmp_path / "run.json")
    loaded = Journal.load(tmp_path / "run.json", strict=True)
    again, _ = run(program, supervisor, journal=loaded)
    assert loaded.missed == []
    assert [(state.path, state.value) for state in again.states] == [
        (state.path, state.value) for state in first.states
    ]


# The summary agent: a long dialogue is shortened by another agent, and the work goes on.


@agent
async def shortens(part):
    return await llm("shorten " + " ".join(one.content for one in part))


async def works_long():
    mine = current_dialogue()
    for turn in range(4):
        await llm(f"turn {turn}")
        if len(mine) > 4:
            await mine.summarise(slice(0, -2), by=shortens)
    return [one.content for one in mine]


async def works_long_in_its_own_dialogue():
    talk = Dialogue()
    for turn in range(4):
        await agents.llm(f"turn {turn}", dialogue=talk)
        if len(talk) > 4:
            await talk.summarise(slice(0, -2), by=shortens)
    return [one.content for one in talk]


def shortened(branches, talk):
    """The texts that a dialogue ends with, after those that it begins with."""
    for turn, branch in enumerate(branches):
        talk += [f"turn {turn}", answer(f"turn {turn}", branch)]
        if len(talk) > 4:
            talk[:-2] = [answer("shorten " + " ".join(talk[:-2]), 0)]
    return talk


@pytest.mark.parametrize("program", [works_long, works_long_in_its_own_dialogue])
@pytest.mark.parametrize("supervisor", SUPERVISORS, ids=named)
def test_a_summary_agent_shrinks_the_context(program, supervisor):
    model = Model()
    done, _ = run(program, supervisor, None, model)
    finished = [state for state in done.states if state.finished]
    for state in finished:
        at, begun = state, []
        while at.parent is not None and at.parent.waiting is not None:
            at = at.parent
        if program is works_long and at.parent is not None and at.parent.parent is not None:
            begun = [*at.parent.parent.value, "better"]  # a round goes on with the last one's
        assert state.value == shortened(branches_to(state), begun)
    assert finished and max(len(call.messages) for call in model.calls) <= 7
