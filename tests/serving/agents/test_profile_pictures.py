"""Pictures of what agents cost and contribute."""

import asyncio
import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("matplotlib", reason="pictures need it")

from jaxshare.serving.agents import Runtime, agent, gather, llm, profile_pictures, spawn
from jaxshare.serving.agents.backends import ScriptedModel
from jaxshare.serving.agents.profile_pictures import (
    contribution_picture,
    costs_by_agent,
    flows,
    hot_agents,
    profile_picture,
    workflow_picture,
)
from jaxshare.serving.agents.search_log import LoggedRun, LoggedState, SearchLog


@agent
async def patcher():
    await llm("patch one two three")
    return await llm("again")


@agent
async def viewer():
    return await llm("view")


@agent
async def decision():
    await spawn(patcher)
    await spawn(patcher)
    return await spawn(viewer)


def logged():
    model = ScriptedModel({"patch": "a b c", "again": "d", "view": "e f"})
    runtime = Runtime(model)
    asyncio.run(runtime.run(decision))
    return SearchLog.of(runtime), model


def test_costs_are_those_of_the_calls():
    log, model = logged()
    counted = {}
    for call in model.calls:
        counted.setdefault(call.agent, [0, 0])[0] += 1
    # Words are tokens: 4 read and 3 written, then 8 read with "again" and 1 written, twice.
    assert costs_by_agent(log) == {"patcher": (4, 32), "viewer": (1, 3), "decision": (0, 0)}
    assert counted == {"patcher": [4, 0], "viewer": [1, 0]}


def test_the_profile_shows_shares():
    [ax] = profile_picture(logged()[0]).axes
    calls, tokens = ([bar.get_width() for bar in bars] for bars in ax.containers)
    assert calls == pytest.approx([80, 20, 0]) and tokens == pytest.approx([3200 / 35, 300 / 35, 0])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["patcher", "viewer", "decision"]


def test_contributions_are_lines_over_time():
    shares = [(5.0, {"a": 1.0}), (6.0, {"a": 0.4, "b": 0.6}), (8.0, {"b": 1.0})]
    [ax] = contribution_picture(shares).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in ax.get_lines()}
    assert lines == {
        "a": [[0, 1.0], [1, 0.4], [3, 0.0]],
        "b": [[0, 0.0], [1, 0.6], [3, 1.0]],
    }
    assert not contribution_picture([]).axes[0].get_lines()


@agent
async def searcher():
    return await llm("search")


@agent
async def coordinator(rounds):
    for _ in range(rounds):
        await llm("decide")
        for _ in range(2):
            await spawn(patcher)
            await spawn(viewer)
        await llm("decide")
        await gather(spawn(searcher), spawn(searcher))
    return await spawn(viewer)


def coordinated():
    script = {"patch": "a", "again": "b", "view": "c", "search": "d", "decide": "e"}
    delay = {"patcher": 0.001, "searcher": 0.01}
    model = ScriptedModel(script, delay=lambda call: delay.get(call.agent, 0.0))
    runtime = Runtime(model)
    asyncio.run(runtime.run(coordinator, 3))
    return SearchLog.of(runtime)


def test_the_work_goes_from_agent_to_agent_as_the_program_says():
    assert flows(coordinated()) == {
        ("coordinator", "patcher"): 3,
        ("patcher", "viewer"): 6,
        ("viewer", "patcher"): 3,
        ("viewer", "coordinator"): 3 + 1,  # and at the end
        ("coordinator", "searcher"): 6,
        ("searcher", "coordinator"): 4,  # both, to the next round
        ("searcher", "viewer"): 2,
    }


def test_a_child_that_yields_works_from_each_resume_to_the_next_yield():
    @agent
    async def reader():
        for _ in range(3):
            yield await llm("read")

    @agent
    async def writer():
        child = spawn(reader)
        for _ in range(2):
            await child.next()
            await llm("write")

    runtime = Runtime(ScriptedModel({"read": "a", "write": "b"}, delay=lambda call: 0.002))
    asyncio.run(runtime.run(writer))
    found = flows(SearchLog.of(runtime))
    # The child is resumed when the next value is asked for; the third is never asked for.
    assert found == {("writer", "reader"): 2, ("reader", "writer"): 2}


def run_of(id, name, parent, began, ended, states=()):
    return LoggedRun(id, name, "Single", parent, began, ended, 0, 0, 0, "1", None, states)


def call(path, began, ended):
    begin = LoggedState((), None, "kept", "begin", 0, None, 1, None, 0.0, 0.0)
    asked = LoggedState((0,), (), "kept", "llm", 1, None, 9, None, 0.0, 0.0)
    return begin, asked, LoggedState(path, (0,), "kept", "llm", 1, None, 0, None, began, ended)


@given(st.lists(st.tuples(st.sampled_from("abp"), st.integers(0, 30), st.integers(1, 9))))
def test_flows_are_those_of_works_with_nothing_whole_in_between(given_works):
    # No two at the same time; "p" is a call of the parent itself, on one of several paths.
    works = [(n, b + i / 1000, b + i / 1000 + d) for i, (n, b, d) in enumerate(given_works)]
    states = {
        state.path: state
        for number, (name, began, ended) in enumerate(works)
        if name == "p"
        for state in call((0, number), began, ended)
    }
    children = [
        run_of(f"p/{name}@7.{number}", name, "p", began, ended)
        for number, (name, began, ended) in enumerate(works)
        if name != "p"
    ]
    log = SearchLog((run_of("p", "p", None, -1.0, 99.0, tuple(states.values())), *children))
    everything = [("p", -2.0, -1.0), *works, ("p", 99.0, 100.0)]
    expected = collections.Counter(
        (first[0], second[0])
        for first in everything
        for second in everything
        if first[2] <= second[1]
        and not any(first[2] <= other[1] and other[2] <= second[1] for other in everything)
        and (first[0], second[0]) != ("p", "p")
    )
    assert flows(log) == expected


def test_hot_agents_are_the_fewest_with_most_calls():
    log = coordinated()
    # Of 35 calls the patcher has 12, the viewer 7, the coordinator and the searcher 6 each.
    assert hot_agents(log) == {"patcher", "viewer", "coordinator"}
    assert hot_agents(SearchLog(())) == set()


def test_the_workflow_picture_shows_agents_and_flows():
    log = coordinated()
    [ax] = workflow_picture(log).axes
    texts = [text.get_text() for text in ax.texts]
    assert {"patcher\n12 calls", "viewer\n7 calls", "searcher\n6 calls"} <= set(texts)
    arrows = {patch.get_label(): patch.get_linewidth() for patch in ax.patches}
    assert arrows.keys() == {f"{agent} to {after}" for agent, after in flows(log)}
    assert sorted(int(text) for text in texts if text.isdigit()) == sorted(flows(log).values())
    assert arrows["patcher to viewer"] == max(arrows.values())
    assert not workflow_picture(SearchLog(())).axes[0].texts


@pytest.mark.parametrize("agents", [1, 2, 5, 8])
def test_nothing_of_the_workflow_picture_is_cut_off(agents, monkeypatch):
    names = [f"agent_{number}" for number in range(agents)]
    runs = (LoggedRun(name, name, "Single", None, 0, 1, 9, 9, 9, "", None, ()) for name in names)
    log = SearchLog(tuple(runs))
    loops = {(name, name): 120 for name in names}
    monkeypatch.setattr(profile_pictures, "flows", lambda log: loops)
    figure = workflow_picture(log)
    figure.canvas.draw()
    [ax] = figure.axes
    for part in (*ax.texts, *ax.patches, *ax.collections):
        extent = part.get_window_extent()
        assert ax.bbox.x0 <= extent.x0 and extent.x1 <= ax.bbox.x1
        assert ax.bbox.y0 <= extent.y0 and extent.y1 <= ax.bbox.y1
