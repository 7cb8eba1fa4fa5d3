"""The arithmetic and arguments of the benchmark of evaluations; times are no matter for a test."""

import types

import pytest

from jaxshare.serving.evaluation import Run
from scripts.bench import evaluation as bench


def run_of(**tokens: list[list[int]]) -> Run:
    workers = {name: [{"tokens": each} for each in steps] for name, steps in tokens.items()}
    return Run(len(workers), "p", 0, 0, "", {"workers": workers, "answers": {}, "passes": 1})


def test_tokens_are_those_of_all_steps():
    assert bench.sampled(run_of(Alice=[[1, 2], [3]], Bob=[[4]])) == {"Alice": [1, 2, 3], "Bob": [4]}
    assert bench.sampled(run_of(Alice=[])) == {"Alice": []}


def sides(evaluation: float, engine: float, alone: float):
    """Sides that take these seconds a turn: for 64 tokens, for the engine's, and for 16."""
    found = types.SimpleNamespace(
        scale=bench.Scale(problems=4, alone=1, budget=4, rounds=3),
        tokens={bench.EVALUATION: 64, bench.ALONE: 16},
        served=types.SimpleNamespace(engine=types.SimpleNamespace(rows=16)),
        checked=0,
        evaluation=lambda: evaluation,
        engine=lambda: engine,
        alone=lambda: alone,
    )

    def check():
        found.checked += 1

    found.check = check
    return found


def test_the_ratio_is_of_tokens_a_second():
    given = sides(2.0, 1.0, 4.0)
    found = bench.measure("embedded", given, lambda what: None)
    assert found["tokens_per_second"] == {"evaluation": 32, "engine": 64, "one by one": 4}
    assert found["of_engine"]["median"] == 0.5 and found["of_one_by_one"]["median"] == 8
    assert given.checked == 2
    [goal] = bench.goals([found])
    assert goal.goal == 0.85 and not goal.met
    assert bench.goals([bench.measure("m", sides(1.0, 0.9, 4.0), lambda what: None)])[0].met


def test_texts_that_differ_are_an_error():
    key = (4, "p", 0)
    texts = {bench.EVALUATION: {key: [1]}, bench.ALONE: {key: [2]}}
    with pytest.raises(RuntimeError, match=r"the texts of problems \['p'\] differ"):
        bench.Sides.check(types.SimpleNamespace(texts=texts))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--models", "other"), "--models has 'other'"),
        (("--concurrency", "0"), "--concurrency is 0"),
        (("--budget", "5000"), "--budget is 5000"),
        (("--seed", "-1"), "--seed is -1"),
    ],
)
def test_mistakes_in_arguments_are_named(capsys, arguments, words):
    with pytest.raises(SystemExit) as raised:
        bench.parse(arguments)
    assert raised.value.code == 2 and words in capsys.readouterr().err


def test_quick_is_the_embedded_model_alone():
    assert (
        bench.parse(("--quick",)).models == ("embedded",) and bench.parse(()).models == bench.MODELS
    )
