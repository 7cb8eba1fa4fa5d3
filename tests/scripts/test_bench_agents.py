"""The arithmetic and arguments of the agents' benchmark, and that what it times is what it says;
the times are no matter for a test."""

import asyncio
import json

import pytest

from scripts.bench import agents as bench


@pytest.mark.parametrize(("kind", "each"), [("model", 11), ("tool", 11), ("next", 21)])
def test_every_agent_waits_as_often_as_is_said(kind, each):
    seconds, transitions, tasks = asyncio.run(bench.once(bench.KINDS[kind], 5, 10))
    # Ten waits and the begin; what yields is an agent too, which nobody resumes after its last. The
    # parent waits for each.
    assert transitions == 5 * each + 6 and tasks == 0 and seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", bench.KINDS)
def test_runs_leave_nothing_behind(kind):
    left = bench.leaks(bench.KINDS[kind], 20, 5)
    assert left["tasks"] == left["runs"] == 0
    assert left["bytes_a_run"] < 20_000  # 20 agents' states take more than 100,000


@pytest.mark.slow
def test_a_leak_would_be_seen(monkeypatch):
    kept, once = [], bench.Runtime.run

    async def run(self, *args):
        kept.append(await once(self, *args))

    monkeypatch.setattr(bench.Runtime, "run", run)
    left = bench.leaks(bench.KINDS["model"], 20, 5)
    assert left["runs"] == 21 * (bench.LEAK_ROUNDS + 2) and left["bytes_a_run"] > 40_000
    kept.clear()


def test_summary_has_the_median_of_rounds():
    found = bench.summarise(
        "model",
        1000,
        [0.03, 0.05, 0.04],
        [0.004, 0.002, 0.003],
        {"tasks": 0, "runs": 0, "bytes_a_run": 12},
    )
    assert (
        found["microseconds"] == pytest.approx(40)
        and found["lowest"] == pytest.approx(30)
        and found["highest"] == pytest.approx(50)
    )
    assert found["collector_microseconds"] == pytest.approx(3)
    slow = bench.summarise("tool", 1000, [0.06], [0.0], {"tasks": 1, "runs": 2, "bytes_a_run": 12})
    assert [(round(goal.measured), goal.goal, goal.met) for goal in bench.goals([found, slow])] == [
        (40, 50, True),
        (0, 0, True),
        (60, 50, False),
        (3, 0, False),
    ]


@pytest.mark.slow
def test_a_small_run_reports_as_json(tmp_path, capsys):
    output = tmp_path / "result.json"
    small = ["--quick", "--agents", "10", "--states", "2", "--rounds", "1"]
    assert bench.main([*small, "--json", "--output", str(output)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(output.read_text()) and report["benchmark"] == "agents"
    assert [r["waits_for"] for r in report["results"]] == ["model", "tool", "next"] and len(
        report["goals"]
    ) == 11
    assert report["settings"]["agents"] == 10 and report["command"].startswith(
        "python -m scripts.bench.agents --quick"
    )
    assert bench.as_text(report)
    records, grown = report["kept"]
    assert (records["states"], grown["states"]) == (200, 2000)
    assert records["milliseconds_again"] > 0 and grown["megabytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--agents", "0"], ["--agents is 0", "begin at 1"]),
        (["--states", "0"], ["--states 0"]),
        (["--rounds", "0"], ["--rounds 0"]),
        (["--rounds", "x"], ["--rounds", "'x'"]),
        (["--output", "no/such/folder/result.json"], ["--output", "folder that exists"]),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    said = capsys.readouterr().err
    assert (
        stopped.value.code == 2
        and said.startswith("scripts.bench.agents: ")
        and said.count("\n") == 1
    )
    assert all(word in said for word in words), said
