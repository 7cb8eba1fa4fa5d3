"""The residency benchmark with concurrent agents: its workflow, its arithmetic, and a small run."""

import asyncio
import itertools
import json
from collections import Counter

import pytest

from jaxshare.serving.agents import Runtime
from jaxshare.serving.agents.backends import ScriptedModel
from scripts.bench import residency as bench
from scripts.bench.parts.residency import concurrent, repairs
from scripts.bench.parts.residency.tree import Counts


def played(tasks, rounds, seed=0):
    """The calls of the workflow, with a model that says the same to everything."""
    model = ScriptedModel({lambda call: True: "so"}, delay=lambda call: 0.001)
    runtime = Runtime(model)
    done = asyncio.run(runtime.run(repairs.repairs, tasks, rounds, seed))
    return model.calls, done, runtime.runs


def prompt(call):
    return "\n".join(message.content for message in call.messages)


def test_the_workflow_is_that_of_the_paper_for_each_repair_side_by_side():
    calls, _, runs = played(2, 3)
    each = {"decision": 2, "patcher": 4, "viewer": 4, "searcher": 2, "summary": 1}
    assert Counter(call.agent for call in calls) == {name: 2 * 3 * n for name, n in each.items()}
    assert {run.agent.name for run in runs[:3]} == {"repairs", "decision"}
    # Both begin at once, and both searchers of a round run at the same time.
    first, second = (run for run in runs if run.agent.name == "decision")
    assert max(first.began, second.began) < min(first.ended, second.ended)
    searchers = [run for run in runs if run.agent.name == "searcher" and run.parent is first]
    for one, other in zip(searchers[::2], searchers[1::2], strict=True):
        assert max(one.began, other.began) < min(one.ended, other.ended)


def test_prompts_grow_by_what_is_new_until_the_record_is_condensed():
    calls, done, _ = played(1, 3)
    patches = [prompt(call) for call in calls if call.agent == "patcher"]
    assert all(b.startswith(a) for a, b in itertools.pairwise(patches))
    assert len(patches[-1]) > 2 * len(patches[0])
    again = [prompt(call) for call in played(1, 4)[0] if call.agent == "patcher"]
    assert again[:12] == patches and not again[12].startswith(patches[11][:1200])
    begin = patches[0][: repairs.RULES]
    assert all(prompt(call).startswith(begin) for call in calls)
    assert done.accepted.value == [["so"] * 9]
    assert [prompt(call) for call in played(1, 3, seed=1)[0]] != [prompt(call) for call in calls]


def measured(seconds, hot, evicted, said="x"):
    return concurrent.Measured(
        seconds,
        Counts(
            dict.fromkeys(concurrent.SYSTEM, 100),
            {"patcher": hot, "viewer": hot, "summary": 50},
            evicted,
        ),
        10,
        7,
        1,
        [("patcher", 0.1, 0.4), ("viewer", 0.3, 0.6), ("summary", 1.0, 2.0)],
        said,
    )


def runs_of(said="x"):
    return {
        "ample": [measured(1.0, 95, 0), measured(1.0, 95, 0)],
        "contribution": [measured(2.0, 80, 300), measured(4.0, 90, 200, said)],
        "lru": [measured(3.0, 70, 500), measured(5.0, 70, 400)],
    }


def test_what_is_reported_is_what_the_words_say():
    rows = {row["policy"]: row for row in concurrent.summarise(runs_of())}
    own = rows["contribution"]
    assert own["seconds"] == 3.0
    assert own["of_lru"] == {"median": 1.375, "lowest": 1.25, "highest": 1.5}
    assert own["hot_hit_rate"] == pytest.approx(0.85) and own["cold_hit_rate"] == pytest.approx(
        1 / 6
    )
    assert own["fewer_hot_misses"] == pytest.approx(1 - 60 / 120)
    # With memory for all there are 5 misses of each hot agent in each run, under lru 30.
    assert own["fewer_avoidable_hot_misses"] == pytest.approx(60 / 100)
    assert rows["ample"]["fewer_avoidable_hot_misses"] == 1
    assert own["evicted_ratio"] == 900 / 500
    assert own["recomputed_tokens"] == 2 * (95 - 80) + 2 * (95 - 90)
    assert (own["to_host_tokens"], own["fetched_tokens"], own["preemptions"]) == (20, 14, 2)
    assert own["hot"]["first_token_seconds"] == pytest.approx(0.2)
    assert own["cold"]["call_seconds"] == 2.0
    assert rows["ample"]["evicted_ratio"] is None
    result = {"rounds": 7, "host": 0, "tasks": 4, "repeats": 2, "capacity": 9}
    result["policies"] = [*rows.values()]
    found = concurrent.goals([result, {**result, "host": 5}])
    assert [(goal.measured, goal.met) for goal in found] == [
        (pytest.approx(0.5), True),
        (1.8, True),
        (1.375, True),
    ]
    assert [goal.met for goal in concurrent.goals([{**result, "rounds": 21}])] == [True, True, True]
    assert "room for 9 tokens and for 5 in host memory" in "\n".join(
        concurrent.lines([{**result, "host": 5}])
    )


def test_policies_that_come_to_different_ends_are_an_error():
    with pytest.raises(RuntimeError, match="repeat 1 under contribution has come to y"):
        concurrent.check_ends(runs_of(said="y"))


@pytest.mark.slow
def test_a_small_run_on_the_engine(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib", reason="pictures need it")
    monkeypatch.setattr(concurrent, "ROOM", 1280)
    small = ["--quick", "--rounds", "1", "--seeds", "1", "--no-engine"]
    assert bench.main([*small, "--plots", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    [result] = report["agents"]
    rows = {row["policy"]: row for row in result["policies"]}
    assert [*rows] == ["ample", "contribution", "lru"]
    assert rows["ample"]["evicted_tokens"] == 0 < rows["lru"]["evicted_tokens"]
    assert all(
        row["seconds"] > 0 and row["hot"]["first_token_seconds"] > 0 for row in rows.values()
    )
    assert sum("agents, 1 rounds" in goal["name"] for goal in report["goals"]) == 3
    assert {file.name for file in tmp_path.iterdir()} == {
        f"residency-{name}.png" for name in ("workflow", "profile", "contributions")
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--repeats", "0"], ["--repeats is 0"]),
        (["--plots", "somewhere", "--no-agents"], ["--plots", "--no-agents"]),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        bench.main(arguments)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(word in said for word in words), said
