"""Evaluations: tasks read from given files, runs of a stand-in whose answers are known, numbers
worked out by hand, real ones killed."""

import argparse
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest

import jaxshare
from jaxshare import Sampler
from jaxshare.models import EMBEDDED, Generation, load
from jaxshare.serving import COLLABORATIVE, PLAIN, Format
from jaxshare.serving.cli import main
from jaxshare.serving.cli.evaluation import evaluate, plan, report, rescore
from jaxshare.serving.errors import InUseError
from jaxshare.serving.evaluation import (
    Mathematician,
    Point,
    Problem,
    Run,
    arithmetic,
    execute,
    load_task,
    passes_to,
    plot,
    points,
    provenance,
    run_specs,
    runs,
    scoring,
    solve,
    wilson,
)
from jaxshare.serving.evaluation.scoring import Score, right_answers
from tests.serving.evaluation.test_baselines import script

# tasks


def test_sums_are_questions_whose_answers_are_right():
    task = load_task("sums", samples=20)
    assert task.answer_tokens == 40 and not task.needs_mathematics
    for problem in task.problems:
        first, *lines = problem.text.splitlines()
        assert (
            first
            == "Solve these problems and return comma-separated answers \\boxed{answer1, ..., "
            "answer5}:"
        )
        for line, answer in zip(lines, problem.answers, strict=True):
            left, right = map(int, re.findall(r"\d+", line)[1:])
            [sign] = {
                {"red": "+", "sold": "-", "boxes": "*"}.get(word, word) for word in line.split()
            } & {*"+-*"}
            assert int(answer) == {"+": left + right, "-": left - right, "*": left * right}[sign]
    assert [p.id for p in task.problems] == [*map(str, range(1, 21))] and len(
        {p.text for p in task.problems}
    ) == 20


def test_samples_are_the_first_ones_and_tasks_differ():
    few, many = load_task("sums", samples=3), load_task("sums", samples=5)
    assert (
        many.problems[:3] == few.problems
        and few.digest != many.digest
        and len(load_task("sums").problems) == 128
    )
    dependent = load_task("sums-dependent", samples=3, questions=(6, 6))
    assert [p.text.count("the answer of") for p in dependent.problems] == [2, 2, 2] and len(
        dependent.problems[0].answers
    ) == 6
    ranged = load_task("sums", samples=60, questions=(5, 10))
    assert {len(p.answers) for p in ranged.problems} == {*range(5, 11)} and all(
        p.text.count("\n") == len(p.answers) for p in ranged.problems
    )
    assert {p.text for p in ranged.problems if len(p.answers) == 5} <= {
        p.text for p in load_task("sums", samples=60).problems
    }
    assert ranged.answer_tokens == load_task("sums", questions=(10, 10)).answer_tokens


def gsm8k(folder: Path, count: int) -> None:
    rows = [
        {"question": f"Question {i}?", "answer": f"Two plus {i}.\n#### {i},000"}
        for i in range(1, count + 1)
    ]
    (folder / "gsm8k_test.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )


def test_gsm8k5_groups_five_questions_and_never_one_twice(tmp_path, monkeypatch):
    gsm8k(tmp_path, 12)
    task = load_task("gsm8k5", samples=2, data=tmp_path)
    assert task.problems[0].text == (
        "Solve these problems and return comma-separated answers \\boxed{answer1,..., answer5} :\n"
        " 1. Question 1?\n 2. Question 2?\n 3. Question 3?\n 4. Question 4?\n 5. Question 5?"
    )
    assert (
        task.problems[1].answers == ("6000", "7000", "8000", "9000", "10000")
        and task.problems[1].id == "6+7+8+9+10"
    )
    assert task.needs_mathematics and task.answer_tokens == 64
    monkeypatch.setenv("JAXSHARE_DATA", str(tmp_path))
    assert load_task("gsm8k5", samples=2) == task
    assert load_task("gsm8k5") == task  # where there are fewer than 128
    with pytest.raises(ValueError, match="--samples is 3, but gsm8k5 has 2 problems; lower it"):
        load_task("gsm8k5", samples=3)


def test_sets_keep_the_tokens_of_the_paper(tmp_path):
    (tmp_path / "olympiadbench.jsonl").write_text(
        '{"id": 7, "question": "How many?", "answer": "$2^{9}$"}\n', encoding="utf-8"
    )
    (tmp_path / "aime2024.jsonl").write_text(
        '{"id": 60, "problem": "Find it.", "answer": "204", "url": "x"}\n', encoding="utf-8"
    )
    olympiad, aime = (load_task(name, data=tmp_path) for name in ("olympiad", "aime"))
    assert (
        olympiad.problems == (Problem("7", "How many?", ("$2^{9}$",)),)
        and olympiad.answer_tokens == 64
    )
    assert aime.problems == (Problem("60", "Find it.", ("204",)),) and aime.answer_tokens == 16


LINES = [
    '{"problem": "one", "answer": "1"}',
    "",
    '{"problem": "two", "answer": 2.5, "id": "b"}',
    "nonsense",
    '{"problem": "three", "answer": ["1", "x"], "id": 9}',
    '{"problem": "four", "tests": "assert f(1)"}',
]


def test_a_file_of_ones_own(tmp_path):
    (tmp_path / "own.jsonl").write_text("\n".join(LINES), encoding="utf-8")
    task = load_task(str(tmp_path / "own.jsonl"))
    assert task.problems == (
        Problem("1", "one", ("1",)),
        Problem("b", "two", ("2.5",)),
        Problem("9", "three", ("1", "x")),
        Problem("6", "four", tests="assert f(1)"),
    )
    assert [p.kind for p in task.problems] == ["box"] * 3 + ["code"] and [
        p.parts for p in task.problems
    ] == [1, 1, 2, 1]
    assert [bad["line"] for bad in task.bad_lines] == [4] and task.answer_tokens == 1024
    assert len(load_task(str(tmp_path / "own.jsonl"), samples=2).problems) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON in UTF-8"),
        ('{"problem": "\\ud800", "answer": "1"}', "is not JSON in UTF-8"),
        ("[1]", "is [1]; it must be a JSON object"),
        ('{"problem": "x"}', 'must have one of "answer" and "tests"'),
        ('{"problem": "x", "answer": "1", "tests": "1"}', "must have one of"),
        ('{"problem": " ", "answer": "1"}', 'has no text as its "problem"'),
        ('{"answer": "1"}', 'has no text as its "problem"'),
        ('{"problem": "x", "answer": []}', 'has [] as its "answer"'),
        ('{"problem": "x", "answer": ["1", 2]}', "give a text, a number or a l"),
        ('{"problem": "x", "answer": true}', 'has true as its "answer"'),
        ('{"problem": "x", "tests": "def"}', '"tests" that are not Python'),
        (
            '{"problem": "x", "answer": "1", "Id": 1}',
            'has the unknown field "Id"; known are id, problem, answer, tests',
        ),
        ('{"problem": "x", "answer": "1", "id": [1]}', "has the id [1]"),
        ('{"problem": "x", "answer": "1", "id": "1"}', 'has the id "1" of a'),
        ("[" * 100_000, "is nested too deeply"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, words):
    (tmp_path / "own.jsonl").write_text(f"{LINES[0]}\n{line}\n", encoding="utf-8")
    task = load_task(str(tmp_path / "own.jsonl"))
    assert (
        len(task.problems) == 1
        and task.bad_lines[0]["line"] == 2
        and words in task.bad_lines[0]["error"]
    )


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        (
            "gsm8k5",
            {},
            r"the task gsm8k5 needs a folder with gsm8k_test.jsonl \(.*\); name it with --data-dir "
            r"or in JAXSHARE_DATA",
        ),
        (
            "aime",
            {"data": "nowhere"},
            r"needs a folder with aime2024.jsonl .* but nowhere does not exist",
        ),
        ("aime", {"data": "."}, r"but \. has no aime2024.jsonl"),
        ("sum", {}, "--task is 'sum'; it must be one of sums, sums-typed, sums-dependent, gsm"),
        ("nowhere.jsonl", {}, "the task file nowhere.jsonl cannot be read"),
        ("sums", {"samples": 0}, "--samples is 0"),
        ("sums", {"questions": (11, 11)}, "--questions is 11; a problem of sums has 1 to 10"),
        (
            "sums-dependent",
            {"questions": (1, 1)},
            "--questions is 1; a problem of sums-dependent has 2 to 10",
        ),
        ("sums", {"questions": (5, 11)}, "--questions is 5-11; a problem of sums has 1 to 10"),
        ("sums", {"questions": (7, 5)}, "--questions is 7-5; a problem of sums"),
    ],
)
def test_tasks_that_are_not_there(name, more, words, monkeypatch):
    monkeypatch.delenv("JAXSHARE_DATA", raising=False)
    with pytest.raises(ValueError, match=words):
        load_task(name, **more)


def test_a_file_without_a_line_that_can_be_run(tmp_path):
    (tmp_path / "own.jsonl").write_text("\n{}\n", encoding="utf-8")
    with pytest.raises(
        ValueError,
        match=r'no line of the task file .*own.jsonl can be run \(line 2 must have one of "answer" '
        r'and "te',
    ):
        load_task(str(tmp_path / "own.jsonl"))


# numbers


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson(right, of, low, high):
    """Newcombe (1998), table I, method 3."""
    assert wilson(right / of, of) == pytest.approx((low, high), abs=5e-5)
    assert wilson(1 - right / of, of) == pytest.approx((1 - high, 1 - low), abs=5e-5)


@pytest.mark.parametrize(
    ("value", "right"),
    [
        ("1, 20, 300", "111"),
        ("1,20,300", "111"),
        ("1, 20, 301", "110"),
        ("1, 20", "110"),
        ("20, 300", "000"),
        ("1, 20, 300, 4", "000"),
        ("", "000"),
        (None, "000"),
        ("1,, 300", "101"),
        (" 1 , 20 , 300 ", "111"),
    ],
)
def test_every_answer_of_a_list_counts(value, right):
    assert right_answers(("1", "20", "300"), value, str.__eq__) == tuple(r == "1" for r in right)


def test_commas_between_thousands():
    references = ("70000", "3", "1450000")
    for value in ("70,000, 3, 1,450,000", "70{,}000, 3, 1{,}450{,}000", "70000,3,1450000"):
        assert right_answers(references, value, str.__eq__) == (True,) * 3
    assert right_answers(references, "70,000, 3, 4, 5", str.__eq__) == (False,) * 3
    assert right_answers(("1,450",), "1,450", str.__eq__) == (True,)


def test_accuracy_is_the_mean_over_problems_of_the_part_that_is_right():
    marks = [
        ("a", 0, (1, 1, 1, 1, 0)),
        ("a", 1, (1, 1, 0, 0, 0)),
        ("b", 0, (0, 0, 0, 0, 0)),
        ("b", 1, (1, 1, 1, 1, 1)),
        ("c", 0, (1, 1)),
    ]
    scores = [
        Score(2, problem, number, 64, "x", tuple(map(bool, right)), number == 0)
        for problem, number, right in marks
    ]
    [point] = points(scores)
    assert point.accuracy == pytest.approx(((0.8 + 0.4) / 2 + 0.5 + 1) / 3)
    assert (point.workers, point.budget, point.problems, point.runs, point.written) == (
        2,
        64,
        3,
        5,
        0.6,
    )
    assert (point.low, point.high) == wilson(point.accuracy, 3)


def line(workers: int, *pairs: tuple[int, float]) -> list[Point]:
    return [Point(workers, budget, accuracy, 0, 1, 0, 1, 1) for budget, accuracy in pairs]


def test_passes_to_an_accuracy():
    found = passes_to(
        [
            *line(4, (64, 0.95), (128, 1)),
            *line(2, (256, 1.0), (64, 0.2), (128, 0.85)),
            *line(1, (64, 0.1), (128, 0.899)),
            *line(3, (64, 0.5), (128, 0.9), (256, 0.4)),
        ],
        0.9,
    )
    assert found == {1: None, 2: pytest.approx(128 + 128 * 0.05 / 0.15), 3: 128, 4: 64}
    assert [*found] == [1, 2, 3, 4]


def test_a_smallest_budget_that_is_enough_is_a_bound():
    found = [*line(1, (64, 0.95), (32, 0.9)), *line(2, (64, 1), (32, 0.8)), *line(4, (8, 1))]
    assert scoring.at_smallest_budget(found, 0.9) == [1, 4]
    assert scoring.at_smallest_budget([], 0.9) == []


def test_the_table():
    found = [
        Point(1, 64, 0.05, 0.0, 0.54, 0, 4, 4),
        Point(1, 128, 1.0, 0.5, 1, 0, 4, 4),
        Point(2, 64, 0.335, 0.1, 0.77, 0, 4, 4),
    ]
    assert scoring.table(found).splitlines() == [
        "passes        1 worker     2 workers",
        "    64      5.0 (0-54)  33.5 (10-77)",
        "   128  100.0 (50-100)              ",
    ]
    assert scoring.table(found[:1], "sequential").split()[:2] == ["passes", "sequential"]
    assert scoring.table(found[2:], "self-consistency").startswith("passes  self-consistency, 2\n")


@pytest.mark.parametrize("count", [4, 6])
def test_intervals_of_many_lines_are_bars_and_do_not_lie_over_each_other(count):
    """Bands of more lines would be one grey wash; the values stay as they are."""
    found = {
        str(n): [
            Point(n, budget, 0.1 * n, 0.1 * n - 0.05, 0.1 * n + 0.2, 0, 4, 4)
            for budget in (64, 128)
        ]
        for n in range(count)
    }
    (axes,) = plot.accuracy_picture(found, "a title").axes
    bars = [c for c in axes.collections if hasattr(c, "get_segments")]
    assert len(axes.collections) == count and len(bars) == (count if count > 4 else 0)
    for n, line in enumerate(axes.lines):
        assert [*line.get_ydata()] == pytest.approx([10 * n] * 2)
        assert [*line.get_xdata()] == pytest.approx([64, 128], rel=0.02)
    if bars:
        assert len({line.get_xdata()[0] for line in axes.lines}) == count
        assert [bar.get_segments()[0][:, 1] for bar in bars] == [
            pytest.approx([10 * n - 5, 10 * n + 20]) for n in range(count)
        ]


# whole evaluations, of a stand-in


PROBLEMS = {"1": (3, 4), "b": (5, 6), "3": (7, 8)}
"""Problems of two sums; the answers of the stand-in are in `answer`."""


def answer(problem: str, workers: int, budget: int) -> str | None:
    """With two workers both are right from 64 passes on, but for problem b; with one the first from
    64, both from 128. Before, nothing."""
    first, second = (str(2 * n) for n in PROBLEMS[problem])
    if budget < 64:
        return None
    if problem == "b":
        return "0, 0"
    return f"{first}, {second}" if workers == 2 or budget >= 128 else f"{first}, 0"


def result(spec: runs.RunSpec) -> dict:
    found = {
        str(budget): {
            "value": answer(spec.problem, spec.workers, budget),
            "text": "ü\u2028",
            "passes": budget,
            "extra_passes": 0 if budget >= 128 else 5,
        }
        for budget in spec.budgets
    }
    words = [{"text": f"{spec.seed}", "tokens": [1]}]
    return {
        "answers": found,
        "workers": {name: words for name in ("Alice", "Bob")[: spec.workers]},
        "passes": spec.budgets[-1],
    }


class Stand:
    """Makes runs in an order of its own, and breaks off after `lives` of them."""

    def __init__(
        self,
        lives: int | None = None,
        error: BaseException | None = None,
        refuses: str | None = None,
    ):
        self.lives, self.error, self.refuses = lives, error or RuntimeError("killed"), refuses
        self.made: list[runs.RunSpec] = []

    def __call__(self, model):
        def execute(specs, on_pass):
            specs = [*specs]
            random.Random(len(specs)).shuffle(specs)
            for spec in specs:
                if self.lives == len(self.made):
                    raise self.error
                on_pass(1)
                if spec.problem == self.refuses:
                    yield spec, ValueError("the problem is the longer part")
                    continue
                self.made.append(spec)
                yield (
                    spec,
                    Run(
                        spec.workers,
                        spec.problem,
                        spec.number,
                        spec.seed,
                        spec.text,
                        result(spec),
                    ),
                )

        return execute


class Letters:
    """In place of a Mathematician: the same to the letter."""

    check = staticmethod(lambda: None)
    same = staticmethod(str.__eq__)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def evaluation_in(folder: Path, read_printed=lambda: ("", "")):
    """Returns what runs an evaluation in a folder: evaluation(options...) -> (exit code, stdout,
    stderr)."""
    rows = [
        {"problem": f"Twice {a}, twice {b}", "answer": [str(2 * a), str(2 * b)], "id": name}
        for name, (a, b) in PROBLEMS.items()
    ]
    (folder / "own.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )

    def run(
        *arguments: str,
        stand=None,
        workers=(1, 2),
        budgets=(32, 64, 128, 256),
        sampling=(),
        load=None,
        out: str = "out",
        approximate: str | None = None,
        of: str | Path = "some/model",
    ):
        parser = argparse.ArgumentParser()
        evaluate.add_arguments(parser)
        options = parser.parse_args(
            [
                str(of),
                "--task",
                str(folder / "own.jsonl"),
                "--budgets",
                "x",
                "--out",
                str(folder / out),
                *arguments,
            ]
        )
        options.dtype, options.approximate_kv = None, approximate
        run.stand = stand or Stand()
        code = evaluate.run_evaluation(
            options, dict(sampling), workers, budgets, load or (lambda: model), run.stand
        )
        return code, *read_printed()

    model = types.SimpleNamespace(
        generation=Generation(),
        params={"some": np.zeros(1, np.float32)},
        dtype=np.dtype(np.float32),
        fingerprint="one",
        approximate_kv=None,
        adapters=None,
        adapter=None,
        tokenizer=None,
    )
    run.model, run.folder, run.out = model, folder, folder / "out"
    return run


@pytest.fixture
def evaluation(tmp_path, capsys, monkeypatch):
    """`evaluation_in` an empty folder, where answers are compared by letters."""
    for module in (report, plan):
        monkeypatch.setattr(module, "Mathematician", Letters)
    return evaluation_in(tmp_path, capsys.readouterr)


def json_lines(path: Path) -> list[dict]:
    return [json.loads(row) for row in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_an_evaluation_by_hand(evaluation):
    code, out, err = evaluation("--json")
    found = json.loads(out)
    assert code == 0 and err == ""
    accuracy = {(p["workers"], p["budget"]): p["accuracy"] for p in found["points"]}
    assert accuracy == pytest.approx(
        {
            (1, 32): 0,
            (1, 64): 1 / 3,
            (1, 128): 2 / 3,
            (1, 256): 2 / 3,
            (2, 32): 0,
            (2, 64): 2 / 3,
            (2, 128): 2 / 3,
            (2, 256): 2 / 3,
        }
    )
    assert (
        found["passes_to_90"] == {"1": None, "2": None}
        and found["passes_to_90_at_most"] == []
        and found["runs"] == 6
        and found["resumed"] == 0
    )
    assert [p["written"] for p in found["points"]] == [0, 0, 1, 1] * 2
    assert {path.name for path in evaluation.out.iterdir()} == {
        "settings.json",
        "runs.jsonl",
        "scores.jsonl",
        "result.json",
        "table.txt",
        "accuracy.png",
    }
    assert (evaluation.out / "accuracy.png").read_bytes()[:4] == b"\x89PNG"
    scores = json_lines(evaluation.out / "scores.jsonl")
    assert [(s["problem"], s["workers"], s["budget"]) for s in scores] == [
        (p, w, b) for p in PROBLEMS for w in (1, 2) for b in (32, 64, 128, 256)
    ]
    assert [s["right"] for s in scores[:4]] == [
        [False, False],
        [True, False],
        [True, True],
        [True, True],
    ]
    wrote = json_lines(evaluation.out / "runs.jsonl")
    assert {(w["problem"], w["workers"]) for w in wrote} == {
        (p, w) for p in PROBLEMS for w in (1, 2)
    }
    assert all(w["result"]["answers"]["32"]["text"] == "ü\u2028" for w in wrote)


@pytest.mark.parametrize("full", ["scores.jsonl", "result.json", "table.txt"])
def test_a_disk_that_is_full_at_the_end_costs_no_result(evaluation, monkeypatch, capsys, full):
    write = report.jsonl.write

    def failing(path, lines, do):
        if path.name == full:
            raise ValueError(
                f"{path} cannot be written (No space left on device); make room, and {do}"
            )
        write(path, lines, do)

    monkeypatch.setattr(report.jsonl, "write", failing)
    with pytest.raises(ValueError, match=rf"{full} cannot be written .*--resume goes on"):
        evaluation("--json")
    found = json.loads(capsys.readouterr().out)
    assert (
        found["runs"] == 6
        and found["points"]
        and found["compile_seconds"] >= 0
        and found["seconds"] > 0
    )
    monkeypatch.undo()
    for module in (report, plan):
        monkeypatch.setattr(module, "Mathematician", Letters)
    code, out, _ = evaluation("--json", "--resume")
    again = json.loads(out)
    assert code == 0 and again["points"] == found["points"] and again["resumed"] == 6


def test_answers_are_compared_as_mathematics_by_math_verify(evaluation, monkeypatch):
    pytest.importorskip("math_verify")
    for module in (report, plan):
        monkeypatch.setattr(module, "Mathematician", Mathematician)
    rows = [{"problem": "x", "answer": "0.5"}, {"problem": "y", "answer": ["1/2", "70000"]}]
    (evaluation.folder / "own.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )

    def execute(model):
        return lambda specs, on_pass: (
            (
                p,
                Run(
                    1,
                    p.problem,
                    0,
                    0,
                    "",
                    {
                        "workers": {},
                        "passes": 64,
                        "answers": {
                            "64": {
                                "value": "\\frac{1}{2}, 70,000"
                                if p.problem == "2"
                                else "\\frac{2}{4}",
                                "extra_passes": 0,
                            }
                        },
                    },
                ),
            )
            for p in specs
        )

    _, out, _ = evaluation("--json", stand=execute, workers=(1,), budgets=(64,))
    assert json.loads(out)["points"][0]["accuracy"] == 1.0


@pytest.mark.slow
def test_runs_are_made_here(evaluation):
    """A model that writes a box after an empty line, which ends the problem."""
    rows = [
        {"problem": "Solve it.", "answer": "7"},
        {"problem": "Solve it, too.", "answer": "8"},
        {"problem": "it " * 5000, "answer": "7"},
    ]
    (evaluation.folder / "own.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    code, out, err = evaluation(
        "--json",
        "--method",
        "sequential",
        stand=execute,
        load=script,
        workers=(),
        budgets=(4, 2),
    )
    found = json.loads(out)
    assert (
        code == 3
        and "problem 3, sequential: the prompt has" in err
        and [r["problem"] for r in found["refused"]] == ["3"]
    )
    assert [(p["budget"], p["accuracy"], p["written"], p["problems"]) for p in found["points"]] == [
        (2, 0.5, 1, 2),
        (4, 0.5, 1, 2),
    ]
    assert [
        w["result"]["workers"]["Alice"][0]["text"]
        for w in json_lines(evaluation.out / "runs.jsonl")
    ] == ["\\boxed{7}"] * 2


def test_the_table_is_printed_and_kept(evaluation):
    code, out, err = evaluation(workers=(2,), budgets=(64, 32))
    assert (
        code == 0
        and out.splitlines()[1:3] == (evaluation.out / "table.txt").read_text().splitlines()[:2]
    )
    assert (
        out.splitlines()[0] == "accuracy in percent, with its interval of 95%, over 3 problems"
        and "66.7 (" in out
    )
    assert (
        "90%, 2 workers: not reached" in out
        and err == f"all texts and scores are in {evaluation.out}\n"
    )


def test_typed_sums_take_the_forms_in_turn():
    task = load_task("sums-typed", samples=23, questions=(1, 3))
    assert [problem.id for problem in task.problems[:2]] == [
        "sentence, numbered 1",
        "sentence, lines 1",
    ]
    assert (
        task.problems[11].id == "sentence, numbered 2"
        and task.problems[22].id == "sentence, numbered 3"
    )
    by_form = {problem.id: problem for problem in task.problems}
    assert by_form["what is 1"].text.startswith("What is ") and by_form["what is 1"].text.endswith(
        "?"
    )
    assert task == load_task("sums-typed", samples=23, questions=(1, 3)) and all(
        problem.exact for problem in task.problems
    )


def test_a_run_ends_with_a_box_for_all_of_its_questions():
    def rule(parts: int, kind: str = "box"):
        settings: dict = dict(budgets=(8,), answer_tokens=4, sampler=Sampler(), more={})
        return runs.RunSpec("p", "text", kind, parts, "workers", 2, 0, 0, **settings).rule

    assert rule(1).extract("\\boxed{7}") == "7" == rule(1).extract("\\boxed{7} and \\boxed{?}")
    assert rule(3).extract("\\boxed{7}, so \\boxed{8, 9}") is None
    assert rule(3).extract("\\boxed{7, 8, 9} or \\boxed{1, 2}") == "7, 8, 9"
    assert (
        rule(2).extract("\\boxed{1,234, 5}") == "1,234, 5"
        and rule(2).extract("\\boxed{(1, 2)}") is None
    )
    assert rule(1, "code").extract("```python\nx = 1\n```") == "x = 1"


def test_what_reaches_the_method(evaluation):
    evaluation(
        "--seeds",
        "2",
        "--seed",
        "7",
        "--layout",
        "interleaved",
        "--move",
        "reencode",
        "--ask-every",
        "0",
        "--answer-tokens",
        "9",
        "--stop-on",
        "eos",
        sampling={"temperature": 0.5},
    )
    made = evaluation.stand.made
    # all numbers of workers draw from the same
    assert len(made) == 12 and len({spec.seed for spec in made}) == 6
    assert {(p.budgets, p.answer_tokens, p.method, p.kind, p.sampler) for p in made} == {
        ((32, 64, 128, 256), 9, "workers", "box", Sampler(temperature=0.5))
    }
    assert made[0].more == {
        "layout": "interleaved",
        "move": "reencode",
        "ask_every": 0,
        "stop_on": "eos",
    }
    assert made[0].text.startswith("Twice")
    evaluation("--method", "sequential", workers=(), out="other")
    assert [(p.workers, p.method, p.more) for p in evaluation.stand.made] == [
        (1, "sequential", {})
    ] * 3


def test_the_format_reaches_the_method_and_is_one_of_the_settings(evaluation):
    evaluation("--format", "qwen3+user")
    assert {spec.more["format"].system for spec in evaluation.stand.made} == {COLLABORATIVE.system}
    assert not evaluation.stand.made[0].more["format"].in_system_role
    kept = json.loads((evaluation.out / "settings.json").read_bytes())["settings"]["format"]
    assert kept["name"] == "qwen3+user" and kept["texts"].startswith("sha256:")
    for again in ((), ("--format", "qwen3")):
        said = f"began with --format qwen3+user, not {'qwen3' if again else 'without it'}; give"
        with pytest.raises(ValueError, match=re.escape(said)):
            evaluation("--resume", *again)
    evaluation("--resume", "--format", "qwen3+user")
    assert evaluation.stand.made == []
    # a baseline has no headers
    evaluation("--method", "sequential", "--format", "qwen3-no-think", workers=(), out="alone")
    (form,) = {
        id(spec.more["format"]): spec.more["format"] for spec in evaluation.stand.made
    }.values()
    assert form == dataclasses.replace(
        PLAIN, think="never", chat_template_kwargs={"enable_thinking": False}
    )


def test_a_model_that_was_moved_goes_on_and_its_files_are_looked_at(evaluation):
    """Of a finished evaluation, too."""
    folder = evaluation.folder / "first"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"1")
    evaluation(of=folder)

    def no_model():
        raise AssertionError("the model is loaded")

    assert evaluation("--resume", of=folder, load=no_model)[0] == 0
    moved = folder.rename(evaluation.folder / "moved")
    loaded = []

    def load_moved():
        loaded.append(moved)
        return evaluation.model

    assert evaluation("--resume", of=moved, load=load_moved)[0] == 0 and loaded
    evaluation.model.fingerprint = "another"
    with pytest.raises(ValueError, match=f"began with the model {folder}, and {moved} is another"):
        evaluation("--resume", of=moved)


def test_an_evaluation_that_was_not_begun_is_said_to_begin(evaluation):
    assert f"no evaluation at {evaluation.out} yet: it begins now" in evaluation("--resume")[2]


@pytest.mark.parametrize("method", ["vote", "self-consistency", "workers"])
def test_equal_streams_are_warned_of(evaluation, method, caplog):
    evaluation("--method", method, workers=(1, 3), sampling={"temperature": 0})
    said = [record.getMessage() for record in caplog.records]
    told = ["all 3 streams will be equal" in text for text in said]
    assert told == [True] * (method != "workers")
    caplog.clear()
    evaluation("--method", method, workers=(1, 3), sampling={"temperature": 0.7}, out="warm")
    evaluation("--method", method, workers=(1,), sampling={"temperature": 0}, out="one")
    assert not caplog.records


def test_a_format_file_that_has_changed_does_not_go_on(evaluation):
    file = evaluation.folder / "own.json"
    file.write_text(json.dumps({"system": "{names} share.", "system_alone": "Alone."}))
    evaluation("--format", str(file))
    assert evaluation.stand.made[0].more["format"] == Format("{names} share.", "Alone.")
    file.write_text(json.dumps({"system": "{names} share!", "system_alone": "Alone."}))
    with pytest.raises(ValueError, match="the texts of --format have changed since"):
        evaluation("--resume", "--format", str(file))


def test_an_evaluation_without_a_format_goes_on_as_before(evaluation):
    evaluation()
    assert "format" not in json.loads((evaluation.out / "settings.json").read_bytes())["settings"]
    evaluation("--resume")
    with pytest.raises(ValueError, match="began without --format, not with --format qwq; give"):
        evaluation("--resume", "--format", "qwq")


def test_bad_lines_and_refused_problems_are_named_and_the_others_run(evaluation):
    with open(evaluation.folder / "own.jsonl", "a", encoding="utf-8") as file:
        file.write("nonsense\n")
    code, out, err = evaluation("--json", stand=Stand(refuses="b"))
    found = json.loads(out)
    assert (
        code == 3
        and ", line 4: " in err.splitlines()[0]
        and "problem b, " in err
        and err.count("\n") == 2
    )
    assert found["bad_lines"][0]["line"] == 4 and found["refused"] == [
        {"problem": "b", "error": "the problem is the longer part"}
    ]
    assert {p["problems"] for p in found["points"]} == {2}
    assert found["passes_to_90"] == pytest.approx({"1": 64 + 64 * 0.8, "2": 32 + 32 * 0.9})


def test_nothing_that_can_be_run(evaluation):
    file = evaluation.folder / "own.jsonl"
    file.write_text(file.read_text(encoding="utf-8").splitlines()[1], encoding="utf-8")
    with pytest.raises(
        ValueError,
        match=r"no problem of .*own.jsonl can be run; the first, b: the problem is the longer part",
    ):
        evaluation(stand=Stand(refuses="b"))


# broken off and resumed


@pytest.mark.parametrize("where", [0.0, 0.1, 0.35, 0.5, 0.77, 0.99])
def test_an_evaluation_broken_off_anywhere_comes_to_the_same(evaluation, where):
    evaluation()
    whole = {path.name: path.read_bytes() for path in evaluation.out.iterdir()}
    text = whole["runs.jsonl"]
    kept = text[: int(where * len(text))]
    (evaluation.out / "runs.jsonl").write_bytes(kept)
    for name in ("scores.jsonl", "result.json", "table.txt", "accuracy.png"):
        (evaluation.out / name).unlink()
    code, out, _ = evaluation("--resume", "--json")
    assert (
        code == 0
        and json.loads(out)["resumed"] == kept.count(b"\n")
        and len(evaluation.stand.made) == 6 - kept.count(b"\n")
    )
    again = (evaluation.out / "runs.jsonl").read_bytes()
    assert again.startswith(kept[: kept.rfind(b"\n") + 1]) and sorted(again.splitlines()) == sorted(
        text.splitlines()
    )
    for name in ("scores.jsonl", "table.txt", "accuracy.png", "settings.json"):
        assert (evaluation.out / name).read_bytes() == whole[name]


def test_a_complete_evaluation_needs_no_model(evaluation):
    evaluation()
    code, out, _ = evaluation(
        "--resume", "--json", load=lambda: pytest.fail("the model is not needed")
    )
    assert code == 0 and json.loads(out)["resumed"] == 6


def test_runs_that_finish_are_kept_whatever_comes_then(evaluation, capsys):
    with pytest.raises(RuntimeError, match="killed"):
        evaluation(stand=Stand(lives=2))
    with pytest.raises(KeyboardInterrupt):
        evaluation("--resume", stand=Stand(lives=3, error=KeyboardInterrupt()))
    assert (
        "5 of 6 runs are in" in (err := capsys.readouterr().err)
        and "--resume goes on with the evaluation" in err
    )
    evaluation("--resume")
    assert len(evaluation.stand.made) == 1


@pytest.mark.parametrize(
    ("arguments", "more", "words"),
    [
        ((), {}, "has an evaluation already; --resume goes on with it, or give another --out"),
        (
            ("--resume", "--seed", "4"),
            {},
            "began with --seed 0, not 4; give it as it was, or give another --out",
        ),
        (
            ("--resume",),
            {"budgets": (32,)},
            "began with --budgets 32,64,128,256, not 32; budgets cannot be added; ",
        ),
        (
            ("--resume",),
            {"sampling": {"temperature": 1.0}},
            "began without --temperature, not with --temperature 1.0",
        ),
        (
            ("--resume", "--samples", "2"),
            {},
            "began with --samples 3, not 2; problems cannot be added; ",
        ),
        (
            ("--resume",),
            {"approximate": "fp8"},
            "began without --approximate-kv, not with --approximate-kv fp8",
        ),
    ],
)
def test_other_settings_do_not_get_into_the_folder(evaluation, arguments, more, words):
    evaluation()
    before = (evaluation.out / "runs.jsonl").read_bytes()
    with pytest.raises(ValueError, match=words):
        evaluation(*arguments, **more)
    assert (evaluation.out / "runs.jsonl").read_bytes() == before


def test_another_model_of_the_same_name_does_not_go_on(evaluation):
    """It may have been trained in the meantime."""
    with pytest.raises(RuntimeError, match="killed"):
        evaluation(stand=Stand(lives=2))
    before = (evaluation.out / "runs.jsonl").read_bytes()
    evaluation.model.fingerprint = "another"
    with pytest.raises(
        ValueError,
        match=r"began with another model of this name: its parameters have changed; give another "
        r"--out",
    ):
        evaluation("--resume")
    assert (evaluation.out / "runs.jsonl").read_bytes() == before
    evaluation.model.fingerprint = "one"
    evaluation.model.generation = Generation(stop_tokens=(7,))
    with pytest.raises(ValueError, match=r"settings \(stop_tokens \[\], now \[7\]\) have changed"):
        evaluation("--resume")
    evaluation.model.generation = Generation()
    evaluation.model.params = {}  # known by its outline alone, on other machines
    assert evaluation("--resume")[0] == 0


def test_an_evaluation_of_an_earlier_version_goes_on_with_a_warning(evaluation, caplog):
    """It kept a fingerprint of the parameters alone."""
    with pytest.raises(RuntimeError, match="killed"):
        evaluation(stand=Stand(lives=2))
    settings = evaluation.out / "settings.json"
    kept = json.loads(settings.read_bytes())
    settings.write_text(
        json.dumps({name: kept[name] for name in ("format", "settings", "weights")})
    )
    evaluation.model.fingerprint = "another"
    with pytest.raises(ValueError, match="its parameters have changed"):
        evaluation("--resume")
    evaluation.model.fingerprint = "one"
    assert evaluation("--resume")[0] == 0
    [record] = caplog.records
    assert "goes on without a comparison of the dtype of its parameters, its tokenizer," in (
        record.getMessage()
    )


def test_two_starts_at_once_do_not_mix_two_evaluations(evaluation):
    """The second one starts while the first loads its model, when the folder is empty so far."""

    def load():
        for more in ((), ("--resume",)):
            with pytest.raises(InUseError, match="wait for it, or give another --out"):
                evaluation("--seed", "4", *more, load=lambda: pytest.fail("it was let in"))
        return evaluation.model

    stand = Stand()
    assert evaluation("--seed", "3", load=load, stand=stand)[0] == 0
    assert json.loads((evaluation.out / "settings.json").read_bytes())["settings"]["seed"] == 3
    assert len(json_lines(evaluation.out / "runs.jsonl")) == 6


LINE = {
    "workers": 1,
    "problem": "1",
    "number": 0,
    "seed": 0,
    "text": "",
    "result": {"workers": {}, "answers": {}, "passes": 0},
}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (b"nonsense", "Expecting value"),
        (b"[]", "argument after"),
        (b"{}", "missing"),
        (b'{"workers": 1}', "missing"),
        (None, "repeats"),
        (json.dumps(LINE | {"problem": "z"}).encode(), "it is of no run of this evaluation"),
        (json.dumps(LINE | {"result": {}}).encode(), "its result is not what a run has"),
        (json.dumps(LINE | {"workers": "1"}).encode(), "its workers is not what a run has"),
    ],
)
def test_damage_in_the_middle_is_named(evaluation, damage, words):
    evaluation()
    lines = (evaluation.out / "runs.jsonl").read_bytes().split(b"\n")
    (evaluation.out / "runs.jsonl").write_bytes(
        b"\n".join([*lines[:2], lines[0] if damage is None else damage, *lines[3:]])
    )
    with pytest.raises(
        ValueError,
        match=rf"line 3 of .*runs.jsonl is damaged \(.*{words}.*; take that line out, and --resume",
    ):
        evaluation("--resume")


# mistakes


@pytest.mark.parametrize(
    ("arguments", "more", "words"),
    [
        ((), {"budgets": ()}, "--budgets is empty"),
        ((), {"budgets": (64, 0)}, "--budgets has 0; the numbers start at 1"),
        ((), {"workers": (2, -1)}, "--workers has -1"),
        (("--seeds", "0"), {}, "--seeds is 0; it must be at least 1"),
        (
            ("--questions", "five"),
            {},
            "--questions is 'five'; give a number such as 5, or two such as 5-10",
        ),
        (("--answer-tokens", "0"), {}, "--answer-tokens is 0"),
        (("--method", "sequential"), {}, "sequential does not depend on their number"),
        (
            ("--method", "vote", "--layout", "combined"),
            {},
            "--layout is of the method workers, and the method is vote",
        ),
        (("--method", "vote", "--ask-every", "3"), {}, "--ask-every is of the method workers"),
        (("--test-seconds", "0"), {}, "seconds is 0.0"),
        (("--beside", "nowhere"), {}, "--beside is nowhere, which has no finished evaluation"),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(evaluation, arguments, more, words):
    with pytest.raises(ValueError, match=words):
        evaluation(*arguments, load=lambda: pytest.fail("the model is not needed"), **more)
    assert not evaluation.out.exists()


def test_seeds_that_would_write_the_same_are_refused(evaluation):
    with pytest.raises(
        ValueError,
        match="--seeds is 2, but at temperature 0 all of them would write the same; give a "
        "--temperature",
    ):
        evaluation("--seeds", "2")
    assert not (evaluation.out / "settings.json").exists()


def test_lines_of_others_are_drawn_beside(evaluation):
    evaluation("--method", "self-consistency", out="first")
    alone = evaluation("--json", out="alone")[1]
    assert evaluation("--json", "--beside", str(evaluation.folder / "first"), out="both")[0] == 0
    both = json.loads((evaluation.folder / "both" / "result.json").read_text())
    assert both["points"] == json.loads(alone)["points"]
    pictures = [
        (evaluation.folder / name / "accuracy.png").read_bytes() for name in ("alone", "both")
    ]
    assert pictures[0] != pictures[1]
    with pytest.raises(
        ValueError, match="whose problems are others; name an evaluation of the same ones"
    ):
        evaluation("--samples", "1", "--beside", str(evaluation.folder / "first"), out="third")


# what results are from, and marks without runs


def test_results_say_what_they_are_from(evaluation):
    found = json.loads(evaluation("--json", "--seed", "3")[1])
    assert found["model"]["weights"] == "one" and found["model"]["dtype"] == "float32"
    assert found["settings"]["seed"] == 3 and found["settings"]["seeds"] == 1
    assert found["versions"]["jaxshare"] == jaxshare.__version__
    assert found["versions"]["numpy"] == np.__version__
    assert found["marked"]["problems"] == found["settings"]["problems"]
    assert found["marked"]["sandbox"] is None and found["marked"]["limits"]["seconds"] == 10
    assert {"jaxshare", "jaxshare.models", "jaxshare.serving.workers"} <= {*found["code"]}
    # The code of the checkout is that of no other package.
    assert len({*found["code"].values()}) == len(found["code"])


def test_an_evaluation_of_other_code_is_not_gone_on_with(evaluation, monkeypatch):
    with pytest.raises(RuntimeError, match="killed"):
        evaluation(stand=Stand(lives=2))
    now = provenance.code()
    monkeypatch.setattr(provenance, "code", lambda: {**now, "jaxshare.serving.workers": "other"})
    with pytest.raises(
        ValueError,
        match=r"began with other code, of jaxshare \S+: jaxshare.serving.workers has changed, and its "
        "runs may be different; give another --out",
    ):
        evaluation("--resume", load=lambda: pytest.fail("the model is not needed"))
    monkeypatch.undo()
    for module in (report, plan):
        monkeypatch.setattr(module, "Mathematician", Letters)
    assert evaluation("--resume")[0] == 0
    # What has all its runs is marked by the code of today.
    monkeypatch.setattr(provenance, "code", lambda: {**now, "jaxshare": "other"})
    assert evaluation("--resume")[0] == 0


@pytest.fixture
def rescored(evaluation, capsys, monkeypatch):
    """Returns what marks an evaluation again: rescored(options...) -> (exit code, result, stderr)."""
    monkeypatch.setattr(rescore, "Mathematician", Letters)

    def run(*arguments: str):
        code = main.main(["rescore", str(evaluation.out), "--json", *arguments])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else None, err

    return run


def test_marks_are_made_again_without_runs(evaluation, rescored):
    _, out, _ = evaluation("--json")
    first, texts = json.loads(out), (evaluation.out / "runs.jsonl").read_bytes()
    scores = (evaluation.out / "scores.jsonl").read_bytes()
    (evaluation.out / "scores.jsonl").unlink()
    code, again, err = rescored()
    same = ("settings", "model", "versions", "code", "points", "passes_to_90", "runs", "marked")
    assert code == 0 and err == "" and [again[n] for n in same] == [first[n] for n in same]
    assert (evaluation.out / "scores.jsonl").read_bytes() == scores
    assert (evaluation.out / "runs.jsonl").read_bytes() == texts
    # An answer of the task's file that is mended changes the marks.
    file = evaluation.folder / "own.jsonl"
    before = file.read_text()
    file.write_text(before.replace('["10", "12"]', '["0", "0"]'))
    code, mended, err = rescored()
    assert code == 0 and "the answers or tests of" in err and err.count("\n") == 1
    assert mended["marked"]["problems"] != mended["settings"]["problems"]
    accuracy = {(p["workers"], p["budget"]): p["accuracy"] for p in mended["points"]}
    assert accuracy[2, 64] == 1 and mended["passes_to_90"]["2"] == pytest.approx(32 + 32 * 0.9)
    file.write_text(before.replace("Twice 5", "Thrice 5"))
    assert rescored()[0] == 1
    file.write_text(before.splitlines()[0])
    assert rescored()[0] == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("Twice 5", "Thrice 5"), "problem b of {} has another text than"),
        (lambda text: text.replace('"id": "b"', '"id": "c"'), "problem b of {} is another problem"),
        (lambda text: "", "no line of the task file {} can be run"),
    ],
)
def test_marks_of_other_problems_are_refused(evaluation, rescored, change, words):
    evaluation()
    file = evaluation.folder / "own.jsonl"
    file.write_text(change(file.read_text()))
    code, result, err = rescored()
    assert code == 1 and result is None and words.format(file) in err


def test_missing_runs_are_counted(evaluation, rescored):
    with pytest.raises(RuntimeError, match="killed"):
        evaluation(stand=Stand(lives=4))
    code, result, err = rescored()
    assert code == 3 and result["runs"] == 4 and "2 of 6 runs are not in" in err
    assert main.main(["rescore", str(evaluation.folder / "nowhere")]) == 1


# programs


def test_programs_are_marked_by_their_tests(tmp_path):
    problem = Problem("p", "double", tests="assert f(3) == 6")
    values = {"64": None, "128": "def f(x):\n    return x", "256": "def f(x):\n    return 2 * x"}
    answers = {budget: {"value": value, "extra_passes": 3} for budget, value in values.items()}
    scorer = scoring.Scorer([problem], None)
    found = scorer.score(
        Run(1, "p", 0, 0, "double", {"workers": {}, "answers": answers, "passes": 256})
    )
    assert [(s.budget, s.right) for s in found] == [(64, (False,)), (128, (False,)), (256, (True,))]
    assert [s.error for s in found] == [
        "there is no program",
        "the tests: AssertionError: ",
        None,
    ] and not any(s.written for s in found)


# the embedded model


@pytest.mark.slow
def test_the_embedded_model_solves_sums_in_one_run_for_all_budgets():
    task, model = load_task("sums", samples=1), load(EMBEDDED)
    [spec] = run_specs(
        task.problems,
        method="workers",
        workers=[2],
        budgets=[160, 48],
        seeds=1,
        seed=0,
        answer_tokens=task.answer_tokens,
        sampler=Sampler(),
        more={"layout": "combined", "ask_every": 0},
    )
    seen = []
    run = solve(model, spec, seen.append)
    scorer = scoring.Scorer(task.problems, None)
    early, late = scorer.score(Run.read(json.dumps(vars(run)).encode()))
    # Runs of an earlier version, which had "ended" for "finish_reason", are read as before.
    assert run.result["finish_reason"] == "answer"
    former = {**run.result, "ended": "answer"}
    del former["finish_reason"]
    given = {**vars(run), "result": former}
    assert scorer.score(Run.read(json.dumps(given).encode())) == [early, late]
    assert (
        late.budget == 160
        and all(late.right)
        and late.written
        and run.result["answers"]["160"]["passes"] < 160
    )
    assert early.budget == 48 and not early.written and run.result["answers"]["48"]["passes"] == 48
    written = "".join(step["text"] for steps in run.result["workers"].values() for step in steps)
    assert (
        arithmetic.boxed(written) == [*task.problems[0].answers]
        and seen == sorted(seen)
        and seen[-1] == run.result["passes"]
    )


def begin(folder: Path, name: str, *more: str) -> subprocess.Popen:
    """Starts `jaxshare evaluate` on the embedded model; processes share what they compile."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    with (
        open(folder / f"{name}.err", "w", encoding="utf-8") as errors,
        open(folder / f"{name}.out", "w", encoding="utf-8") as out,
    ):
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "jaxshare.serving.cli.main",
                "evaluate",
                "embedded",
                "--task",
                "sums",
                "--samples",
                "3",
                "--workers",
                "1,2",
                "--budgets",
                "64,128,224",
                "--temperature",
                "1.2",
                "--seeds",
                "2",
                "--concurrency",
                "2",
                "--json",
                "--out",
                str(folder / name),
                *more,
            ],
            env=environment,
            stderr=errors,
            stdout=out,
        )


@pytest.mark.slow
def test_an_evaluation_killed_comes_to_what_an_unbroken_one_does(tmp_path):
    assert begin(tmp_path, "whole").wait(timeout=900) == 0, (tmp_path / "whole.err").read_text()
    for lines in (1, 5, 9):
        name = f"killed {lines}"
        process = begin(tmp_path, name)
        file = tmp_path / name / "runs.jsonl"
        while process.poll() is None and not (
            file.exists() and file.read_bytes().count(b"\n") >= lines
        ):
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -9
        kept = file.read_bytes().rpartition(b"\n")[0].splitlines()
        assert begin(tmp_path, name, "--resume").wait(timeout=900) == 0, (
            tmp_path / f"{name}.err"
        ).read_text()
        # not run again
        assert 0 < len(kept) < 12 and file.read_bytes().splitlines()[: len(kept)] == kept
        for written in ("scores.jsonl", "table.txt"):
            assert (tmp_path / name / written).read_bytes() == (
                tmp_path / "whole" / written
            ).read_bytes()
        texts = [
            {
                (r["problem"], r["workers"], r["number"]): r["result"]["workers"]
                for r in json_lines(tmp_path / n / "runs.jsonl")
            }
            for n in (name, "whole")
        ]
        assert texts[0] == texts[1] and len(texts[0]) == 12
        found = json.loads((tmp_path / f"{name}.out").read_text())
        assert (
            found["resumed"] == len(kept)
            and found["passes_to_90"]
            == json.loads((tmp_path / "whole.out").read_text())["passes_to_90"]
        )


def test_the_command_line(capsys, tmp_path):
    for arguments, words in (
        (["--budgets", "64,x"], "--budgets is '64,x'; it must be whole numbers"),
        (["--budgets", "64", "--workers", "two"], "--workers is 'two'"),
        (["--budgets", "64", "--temperature", "-1"], "temperature is -1"),
        (["--budgets", "64", "--tensor", "0"], "--tensor is 0"),
    ):
        assert (
            main.main(
                [
                    "evaluate",
                    "embedded",
                    "--task",
                    "sums",
                    "--out",
                    str(tmp_path / "out"),
                    *arguments,
                ]
            )
            == 1
        )
        out, err = capsys.readouterr()
        assert out == "" and words in err and err.count("\n") == 1
