"""The benchmarks' arithmetic and arguments; what they measure is no matter for a test."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from scripts.bench import decode as bench_decode
from scripts.bench import lib as benchlib
from scripts.bench import peer
from scripts.bench.parts.decode import report
from scripts.bench.parts.decode.report import GOALS
from tests.paths import ROOT

OURS, THEIRS, SHARED = report.OURS, report.THEIRS, report.SHARED
QUICK = ["--quick", "--torch-python", sys.executable]


def test_sides_take_turns_and_each_begins_a_round():
    calls = []

    def side(name: str, seconds: float):
        return lambda: calls.append(name) or seconds

    times = benchlib.alternate({"a": side("a", 1.0), "b": side("b", 2.0), "c": side("c", 3.0)}, 4)
    assert "".join(calls) == "abcbcacababc"
    assert times == {"a": [1.0] * 4, "b": [2.0] * 4, "c": [3.0] * 4}


def test_summary_has_medians_of_times_and_of_each_rounds_ratio():
    # Round by round transformers takes 2, 1.5 and 4 times as long: 2 is the median, which the
    # medians' ratio, 1.5, is not.
    found = bench_decode.summarise(
        8, 4, {OURS: [1.0, 2.0, 2.0], THEIRS: [2.0, 3.0, 8.0], SHARED: [0.5, 0.5, 4.0]}
    )
    assert found["batch"] == 8
    assert found["sides"][OURS] == {
        "step_milliseconds": 500.0,
        "tokens_per_second": 16.0,
        "round_seconds": [1.0, 2.0, 2.0],
    }
    assert found["sides"][THEIRS]["tokens_per_second"] == pytest.approx(8 * 4 / 3.0)
    assert found["ratios"] == {
        OURS: {"median": 2.0, "lowest": 1.5, "highest": 4.0},
        SHARED: {"median": 4.0, "lowest": 2.0, "highest": 6.0},
    }


def results(ratios: dict[int, float]) -> list[dict]:
    return [
        {"batch": batch, "ratios": {OURS: {"median": ratio}, SHARED: {"median": 99.0}}}
        for batch, ratio in ratios.items()
    ]


def test_goals_are_those_of_the_batches_measured_without_sharing():
    found = [
        goal.as_json()
        for goal in bench_decode.goals(results({1: 1.49, 8: 2.0, 16: 9.0, 64: 3.1}), GOALS)
    ]
    assert [(goal["measured"], goal["goal"], goal["met"]) for goal in found] == [
        (1.49, 1.5, False),
        (2.0, 2.0, True),
        (3.1, 3.0, True),
    ]
    assert bench_decode.goals(results({1: 9.0}), {}) == []


@pytest.mark.parametrize(
    ("theirs", "near", "found"),
    [
        ([[1, 4], [2, 5], [3, 6]], [[9.0] * 2] * 3, (6, 6, [])),
        # Row 0 differs at its second token and row 1 at its first: what comes later is not held
        # against them.
        ([[1, 7], [8, 5], [3, 6]], [[9.0, 0.5], [1.0, 9.0], [9.0, 9.0]], (3, 1, [0.5, 1.0])),
    ],
)
def test_tokens_are_compared_up_to_each_rows_first_difference(theirs, near, found):
    agreement = bench_decode.compare([[1, 2, 3, 10], [4, 5, 6, 11]], theirs, near)
    assert (agreement["tokens"], agreement["equal"], agreement["spacings_at_differences"]) == found


def test_report_ends_with_its_goals(capsys, tmp_path):
    goals = [
        benchlib.Goal("first", 1.0, 2.0),
        benchlib.Goal("second", 3.0, 2.0),
        benchlib.Goal("third", 1.0, 2.0, at_most=True),
        benchlib.Goal("fourth", 3.0, 2.0, at_most=True),
        benchlib.Goal("fifth", None, 2.0),
    ]
    output = tmp_path / "result.json"
    benchlib.finish({"benchmark": "x"}, "the text", goals, as_json=False, output=output)
    text = capsys.readouterr().out.rstrip().splitlines()
    assert text[0] == "the text"
    assert [line.split() for line in text[-5:]] == [
        ["first", "1.00", "at", "least", "2.00", "NO"],
        ["second", "3.00", "at", "least", "2.00", "yes"],
        ["third", "1.00", "at", "most", "2.00", "yes"],
        ["fourth", "3.00", "at", "most", "2.00", "NO"],
        ["fifth", "at", "least", "2.00", "not", "measured"],
    ]
    benchlib.finish({"benchmark": "x"}, "the text", goals, as_json=True, output=None)
    written = json.loads(capsys.readouterr().out)
    assert written == json.loads(output.read_text()) and list(written) == ["benchmark", "goals"]
    assert written["goals"][0] == {
        "name": "first",
        "measured": 1.0,
        "goal": 2.0,
        "at_most": False,
        "met": False,
    }
    assert [goal["met"] for goal in written["goals"]] == [False, True, True, False, None]


def test_a_published_command_names_no_place_on_somebodys_machine():
    asked = benchlib.command(
        [
            str(ROOT / "scripts" / "x.py"),
            "--torch-python",
            "/home/someone/bin/python",
            "--output=/home/x y/r.json",
            "--batches",
            "1,8",
            "runs/a",
        ]
    )
    assert asked == "python -m scripts.x --torch-python python --output=r.json --batches 1,8 runs/a"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_report_that_cannot_be_written_is_printed_all_the_same(capsys):
    with pytest.raises(SystemExit) as stopped:
        benchlib.finish({"benchmark": "x"}, "the text", [], as_json=True, output=Path("/dev/full"))
    out, err = capsys.readouterr()
    assert stopped.value.code == 1 and json.loads(out) == {"benchmark": "x", "goals": []}
    assert (
        err == "--output: /dev/full cannot be written (No space left on device); what was "
        "measured is on stdout\n"
    )


def test_machine_and_versions_are_told():
    machine = benchlib.machine()
    assert machine["cpu"] and machine["cores"] >= 1 and machine["memory_gib"] > 0 and machine["os"]
    assert set(benchlib.versions(["jax", "numpy"])) == {"python", "jax", "numpy"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batches", "0"], ["--batches", "'0'"]),
        (["--batches", "1,,8"], ["--batches", "'1,,8'"]),
        (["--batches", "8,8"], ["--batches", "different"]),
        (["--batches", "many"], ["--batches", "'many'"]),
        (["--prompt", "0"], ["--prompt is 0", "from 1 to"]),
        (["--prompt", "5000"], ["--prompt is 5000", "from 1 to"]),
        (["--prompt", "ten"], ["--prompt", "'ten'"]),
        (["--rounds", "0"], ["--rounds is 0"]),
        (["--steps", "-1"], ["--steps -1"]),
        (["--output", "no/such/folder/result.json"], ["--output", "folder that exists"]),
        (["--torch-python", "no/such/python"], ["--torch-python", "no such program"]),
        (["--colour"], ["--colour"]),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench_decode.main([*QUICK, *arguments])
    said = capsys.readouterr().err
    assert (
        stopped.value.code == 2
        and said.startswith("scripts.bench.decode: ")
        and said.count("\n") == 1
    )
    assert all(word in said for word in words), said


def test_without_an_environment_for_torch_it_says_how_to_get_one(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peer, "ROOT", tmp_path)
    with pytest.raises(SystemExit) as stopped:
        bench_decode.main(["--quick"])
    said = capsys.readouterr().err
    assert (
        stopped.value.code == 2
        and "make parity" in said
        and "--torch-python" in said
        and said.count("\n") == 1
    )


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is not None,
    reason="needs a Python without PyTorch, and this one has it",
)
def test_a_python_without_torch_is_refused_before_any_work(capfd):
    assert bench_decode.main(QUICK) == 2
    said = capfd.readouterr().err
    assert "No module named 'torch'" in said and "--torch-python" in said and said.count("\n") == 1


def test_a_log_has_a_line_a_minute_in_place_of_a_bar(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(benchlib.time, "monotonic", lambda: now[0])
    with benchlib.progress(40) as say:
        for step in range(40):
            now[0] = 7.0 * step
            say(f"step {step}")
    said = capsys.readouterr().err
    # 63 s is the first moment after a minute, and each later line is a minute after the one before.
    assert said.splitlines() == [f"{n} of 40 steps, step {n}" for n in (9, 18, 27, 36)]
