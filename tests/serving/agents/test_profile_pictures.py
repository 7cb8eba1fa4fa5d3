"""Pictures of what agents cost and contribute."""

import asyncio

import pytest

pytest.importorskip("matplotlib", reason="pictures need it")

from jaxshare.serving.agents import Runtime, agent, llm, spawn
from jaxshare.serving.agents.backends import ScriptedModel
from jaxshare.serving.agents.profile_pictures import (
    contribution_picture,
    costs_by_agent,
    profile_picture,
)
from jaxshare.serving.agents.search_log import SearchLog


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
