"""What the benchmark of collaboration makes of accuracies: against numbers worked out by hand."""

import dataclasses
import json
import random

import pytest

from jaxshare.serving.evaluation import Point
from jaxshare.serving.evaluation.arithmetic import make_problem
from scripts.bench import collaboration as bench
from scripts.bench.parts.collaboration import going_on


def found(lines, passes=None):
    """Of {workers: {budget: accuracy}}, with intervals of 0.1 to each side."""
    points = tuple(
        Point(count, budget, value, value - 0.1, value + 0.1, 0.0, 4, 4)
        for count, line in lines.items()
        for budget, value in line.items()
    )
    return bench.Found(points, passes or {})


def test_goals_by_hand():
    base = found(
        {
            1: {16: 0.0, 32: 0.5, 48: 1.0},
            2: {16: 0.1, 32: 0.8, 48: 1.0},
            4: {16: 0.5, 32: 0.9, 48: 0.95},
            6: {16: 0.9, 32: 0.9, 48: 0.97},
        },
        {1: 50.0, 2: 31.0, 4: 15.0, 6: None},
    )
    others = {
        "vote": found({2: {16: 0.9, 32: 0.7, 48: 1.0}, 4: {16: 0.0, 32: 0.5, 48: 1.0}}),
        "encoded anew": found({2: {16: 0.31, 32: 0.8, 48: 1.0}, 4: {16: 0.31, 32: 0.72, 48: 0.95}}),
        "five to ten": found({1: {16: 0.0}}, {1: 100.0, 2: 50.0, 4: None}),
    }
    goals = {goal.name: goal for goal in bench.goals({"workers": base, **others})}
    expected = {
        "2 workers: passes to 90%, times those of one; five questions": (31 / 50, False),
        "4 workers: passes to 90%, times those of one; five questions": (15 / 50, True),
        "2 workers: passes to 90%, times those of one; five to ten questions": (0.5, True),
        "4 workers: passes to 90%, times those of one; five to ten questions": (None, None),
        # the smallest budget is left out
        "2 workers: points of accuracy above self-consistency by vote at the worst budget": (
            0.0,
            True,
        ),
        "4 workers: points of accuracy above self-consistency by vote at the worst budget": (
            -5.0,
            False,
        ),
        "rotated or encoded anew: budgets at which the 95% intervals lie apart": (1, False),
        "6 workers: points of accuracy above 4 at the largest budget": (2.0, True),
    }
    assert goals.keys() == expected.keys()
    for name, (measured, met) in expected.items():
        assert (
            goals[name].measured == (None if measured is None else pytest.approx(measured))
            and goals[name].met is met
        ), name


def test_questions_that_use_another_answer_are_counted_by_themselves(tmp_path):
    """Their marks, at the last budget, against the prompts' own words."""
    scores, expected = [], {1: [], 2: []}
    for i in range(3):
        problem = make_problem(random.Random(f"evaluate/sums-dependent/{i}"), 5, dependent=True)
        asked = ["answer of" in line for line in problem.prompt().splitlines()[1:]]
        for workers, budget, marks in ((1, 9, [i > 0] * 5), (2, 9, asked), (2, 5, [False] * 5)):
            scores.append(
                {"workers": workers, "problem": str(i + 1), "budget": budget, "right": marks}
            )
        expected[1] += [i > 0] * sum(asked)
        expected[2] += [True] * sum(asked)
    (tmp_path / "scores.jsonl").write_text("\n".join(map(json.dumps, scores)))
    counted = going_on(tmp_path, 5)
    assert counted == {n: pytest.approx(sum(marks) / len(marks)) for n, marks in expected.items()}
    case = dataclasses.replace(found({}), going_on=counted)
    assert [goal.met for goal in bench.goals({"dependent": case})[2:4]] == [False, True]


def test_what_was_not_run_is_neither_met_nor_missed():
    goals = bench.goals({"workers": found({1: {16: 0.0}, 2: {16: 0.1}}, {1: 50.0, 2: 31.0})})
    assert [goal.met for goal in goals] == [False, None, None]
    alone = bench.goals({"encoded anew": found({2: {16: 0.3}}), "vote": found({2: {16: 0.3}})})
    assert {goal.met for goal in alone} == {None}, "there is nothing to compare them with"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--problems", "0"], "--problems is 0, but at least 1 is needed"),
        (["--only", "nothing"], "--only has 'nothing', but it must be some of"),
        (["--only", "vote", "--quick"], "leave out --quick"),
        (["--output", "nowhere/x.json"], "--output is nowhere/x.json, but it must name"),
    ],
)
def test_mistakes(capsys, arguments, words):
    with pytest.raises(SystemExit) as error:
        bench.main(arguments)
    assert error.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.slow
def test_a_quick_run_reports_and_goes_on_with_what_is_there(tmp_path, capsys):
    arguments = [
        "--quick",
        "--problems",
        "1",
        "--out",
        str(tmp_path / "runs"),
        "--plots",
        str(tmp_path / "plots"),
        "--json",
    ]
    assert bench.main(arguments) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["goals"][0]["goal"] == 0.52 and {*first["results"]} == {*bench.QUICK}
    assert (tmp_path / "plots" / "collaboration-workers.png").stat().st_size > 10_000
    assert bench.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["results"] == first["results"]
