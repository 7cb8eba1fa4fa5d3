"""Each figure of Hogwild! Inference from end to end, on the embedded model: interrupted, with a bad
problem, without a judge."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.papers import hogwild
from scripts.papers.hogwild_options import JUDGED, NAMES, TABLES, TIMED, VIEWS
from tests.paths import ROOT
from tests.serving.evaluation import test_judge

server = test_judge.server
SMALL = ["--quick", "--samples", "1", "--budgets", "16,48"]
LATENCY = ["--histories", "32,96", "--rounds", "1", "--steps", "2"]
ACCURACIES = [name for name in NAMES if name not in (*TABLES, VIEWS, *JUDGED)]


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """A folder of figures, which share their evaluations."""
    return tmp_path_factory.mktemp("figures")


def made(capsys, *arguments: str, code: int = 0) -> dict:
    """The report of a figure."""
    capsys.readouterr()
    assert hogwild.main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def check_picture(path: Path) -> None:
    assert path.stat().st_size > 10_000 and path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def marks(folder: Path) -> dict[int, float]:
    """By budget the mean over problems of the part of their questions that is right."""
    scores = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    by_budget: dict[int, list[float]] = {}
    for score in scores:
        part = sum(score["right"]) / len(score["right"])
        by_budget.setdefault(score["budget"], []).append(part)
    return {budget: statistics.fmean(parts) for budget, parts in by_budget.items()}


@pytest.mark.slow
@pytest.mark.parametrize("figure", ACCURACIES)
def test_figures_of_accuracy(figure, out, capsys):
    latency = LATENCY if figure == TIMED else []
    report = made(capsys, figure, *SMALL, *latency, "--out", str(out))
    assert report["experiment"] == f"hogwild {figure}" and report["versions"]["jax"]
    for panel in report["results"]["panels"]:
        for line in panel["lines"]:
            expected = marks(out / line["folder"])
            assert [*expected] == [16, 48] and {
                point["budget"]: pytest.approx(point["accuracy"]) for point in line["points"]
            } == expected
            assert {point["workers"] for point in line["points"]} == {line["workers"]}
            assert line["model"] == report["model"]["embedded"] and line["model"]["weights"]
            assert line["settings"]["seed"] == 0 and line["versions"] and line["code"]
    check_picture(out / figure / f"{figure}.png")
    table = (out / figure / "table.md").read_text()
    assert all(f"| {line['label']} |" in table for line in panel["lines"])
    if figure == TIMED:
        baseline, workers = report["results"]["panels"][0]["lines"]
        assert 0 < baseline["points"][0]["seconds"] < baseline["points"][1]["seconds"]
        tokens = report["results"]["prompt_tokens"]
        assert 0 < tokens["baseline"] <= tokens["2 workers"] and workers["points"][0]["seconds"]
        check_picture(out / figure / "latency.png")


@pytest.mark.slow
@pytest.mark.parametrize("figure", TABLES)
def test_tables_of_latency(figure, out, capsys):
    report = made(capsys, figure, "--quick", *LATENCY, "--workers", "2", "--out", str(out))
    assert [row["history"] for row in report["results"]] == [32, 96]
    for row in report["results"]:
        assert [*row["workers"]] == ["1", "2"]
        for count, found in row["workers"].items():
            seconds = found["round_seconds"][0]
            assert seconds > 0 and found["pass_milliseconds"] == pytest.approx(1e3 * seconds)
            assert found["tokens_per_second"] == pytest.approx(int(count) / seconds)
            assert found["attention_microseconds_a_layer"] > 0 and found["plan_microseconds"] > 0
    assert "| 32 | 96 |" in (out / figure / "table.md").read_text() or figure == "table2"


PARITY = ROOT / "tests" / "fixtures" / "parity"
FED = ["--workers", "2", "--histories", "16", "--rounds", "1", "--steps", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "timed"),
    [
        (["--model", str(PARITY / "llama_gqa_longrope_long")], "plan and attention"),
        (["--model", str(PARITY / "deepseek_v3_experts")], "plan"),
        (["--model", str(PARITY / "gpt_oss_gqa_sharded")], "plan"),
        (["--quick", "--approximate-kv", "int8"], "plan"),
        (["--quick", "--tensor", "2"], "plan"),
        (["--quick", "--data", "2"], "plan"),
        (["--quick", "--kv", "2"], ""),
    ],
)
def test_latencies_of_other_models_and_meshes(arguments, timed, tmp_path, capsys):
    report = made(capsys, "table2", *arguments, *FED, "--out", str(tmp_path))
    for found in report["results"][0]["workers"].values():
        assert found["pass_milliseconds"] > 0
        assert bool(found["plan_microseconds"]) == ("plan" in timed)
        assert bool(found["attention_microseconds_a_layer"]) == ("attention" in timed)


@pytest.mark.slow
def test_figure1(out, capsys):
    report = made(capsys, "figure1", "--quick", "--budgets", "16,48", "--out", str(out))
    assert [moment["passes"] for moment in report["results"]] == [16, 48]
    for moment in report["results"]:
        alice, bob = (
            {block["block"]: block for block in moment["rows"][name]} for name in ("Alice", "Bob")
        )
        # the same blocks, each with its own last
        assert [*alice] == ["history", "Bob", "Alice"]
        assert [*bob] == ["history", "Alice", "Bob"] and alice["history"] == bob["history"]
        assert alice["Bob"]["start"] == bob["Alice"]["start"] == alice["history"]["length"]
        check_picture(out / "figure1" / f"figure1-{moment['passes']}.png")
    assert "| Bob | Alice |" in (out / "figure1" / "table.md").read_text()


@pytest.mark.slow
def test_levels_and_their_judge(out, capsys, server):
    server.replies = [f"Level: {n}" for n in (1, 1, 2, 2, 3, 4, 6, 5, 6)]
    asked = ["--endpoint", server.url, "--judge", "m", "--out", str(out)]
    small = ["--quick", "--samples", "1", "--budgets", "48"]
    report = made(capsys, "levels", *small, *asked)
    lines = report["results"]["panels"][0]["lines"]
    assert [line["level"] for line in lines] == [pytest.approx(n / 3) for n in (4, 9, 17)]
    assert [line["method"] for line in lines] == ["self-consistency", "workers", "workers"]
    assert [line["settings"].get("layout") for line in lines] == [None, "interleaved", "combined"]
    check_picture(out / "levels" / "levels.png")
    human = out / "human.jsonl"
    human.write_text(
        "".join(
            json.dumps({"folder": line["folder"], "problem": "1", "level": n}) + "\n"
            for n, line in enumerate(lines, 1)
        )
    )
    report = made(capsys, "judge", *small, *asked, "--human", str(human))
    assert len(server.requests) == 9  # the gradings are there
    lines = report["results"]["panels"][0]["lines"]
    assert lines[0]["by_level"] == {"1": 2, "2": 1, "3": 0, "4": 0, "5": 0, "6": 0}
    assert [line["range"] for line in lines] == [1, 2, 1]
    assert [line["human_and_judge"][0][0] for line in lines] == [1, 2, 3]
    table = (out / "judge" / "table.md").read_text()
    assert "3 runs have levels of people: correlation with the judge's 0.99" in table
    check_picture(out / "judge" / "judge.png")


@pytest.mark.slow
def test_a_judge_that_is_down_loses_nothing(tmp_path, capsys, server):
    arguments = ["levels", "--quick", "--samples", "1", "--budgets", "16", "--judge", "m"]
    arguments += ["--attempts", "1", "--out", str(tmp_path), "--endpoint"]
    assert hogwild.main([*arguments, "http://127.0.0.1:9/v1"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "2 independent streams: the judge m at http://127.0.0.1:9/v1 gave no grade" in said
    assert "0 of 3 gradings are kept" in said and "--resume" in said
    before = [path.read_bytes() for path in sorted(tmp_path.glob("evaluations/*/runs.jsonl"))]
    assert hogwild.main([*arguments, server.url, "--resume"]) == 0
    assert len(server.requests) == 9 and len(before) == 3
    assert before == [
        path.read_bytes() for path in sorted(tmp_path.glob("evaluations/*/runs.jsonl"))
    ]


@pytest.mark.slow
def test_a_figure_that_was_interrupted_goes_on_and_is_that_of_an_unbroken_run(tmp_path, capsys):
    arguments = ["figure5", "--quick", "--samples", "3", "--budgets", "16,48"]
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    command = [sys.executable, "-m", "scripts.papers.hogwild", *arguments, "--out", str(broken)]
    process = subprocess.Popen(
        [*command, "--concurrency", "1"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stderr=subprocess.PIPE,
        text=True,
    )
    while not any(path.stat().st_size for path in broken.glob("evaluations/*/runs.jsonl")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 130 and "--resume goes on" in said, said
    kept = {p: p.read_bytes() for p in broken.glob("evaluations/*/runs.jsonl")}
    assert 0 < sum(lines.count(b"\n") for lines in kept.values()) < 12
    assert not (broken / "figure5" / "result.json").exists()
    assert hogwild.main([*arguments, "--out", str(broken)]) == 2  # it has begun
    resumed = made(capsys, *arguments, "--out", str(broken), "--resume")
    assert all(path.read_bytes().startswith(lines) for path, lines in kept.items())
    unbroken = made(capsys, *arguments, "--out", str(whole))
    points = [
        [line["points"] for panel in report["results"]["panels"] for line in panel["lines"]]
        for report in (resumed, unbroken)
    ]
    assert points[0] == points[1] and len(points[0]) == 4
    check_picture(broken / "figure5" / "figure5.png")


@pytest.mark.slow
def test_a_bad_problem_is_named_the_others_run_and_marks_can_be_made_again(tmp_path, capsys):
    task = tmp_path / "own.jsonl"
    rows = [{"problem": "What is 3 + 4?", "answer": "7", "id": "a"}, {"problem": "No answer"}]
    rows += [{"problem": "What is 2 + 2?", "answer": "5", "id": "c"}]
    task.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["figure4", "--quick", "--task", str(task), "--samples", "2", "--budgets", "16"]
    out = ["--out", str(tmp_path / "out")]
    assert hogwild.main([*arguments, *out]) == 3
    assert "own.jsonl, line 2: " in capsys.readouterr().err
    report = json.loads((tmp_path / "out" / "figure4" / "result.json").read_text())
    for line in report["results"]["panels"][0]["lines"]:
        assert line["points"][0]["problems"] == 2 and line["bad_lines"][0]["line"] == 2
    # With other answers the same texts are marked anew: the first value is right now.
    folder = tmp_path / "out" / line["folder"]
    [first, _] = [json.loads(row) for row in (folder / "scores.jsonl").read_text().splitlines()]
    rows[0]["answer"] = first["value"]
    task.write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = (folder / "runs.jsonl").read_bytes()
    again = made(capsys, "figure4", "--rescore", *out, code=3)
    accuracy = again["results"]["panels"][0]["lines"][1]["points"][0]["accuracy"]
    assert accuracy == marks(folder)[16] >= 0.5
    assert (folder / "runs.jsonl").read_bytes() == runs
    assert made(capsys, "figure4", "--redraw", *out, code=3)["results"] == again["results"]
