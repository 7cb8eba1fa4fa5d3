"""scripts/bench/rollouts.py: its goals, its table, and what it refuses."""

import pytest

from scripts.bench import rollouts

RESULT = {
    "model": "random",
    "prompts": 4,
    "prompt_tokens": 9,
    "samples": 2,
    "tokens_per_second": {rollouts.SHARED: 90.0, rollouts.UNSHARED: 45.0},
    "update_seconds": {rollouts.UPDATE: [0.5, 0.25], rollouts.COPY: [0.2, 0.3]},
    "same_texts": 0.75,
    "faster": {"median": 2.0, "lowest": 1.5, "highest": 2.5},
    "update_by_copy": 1.25,
}


def test_goals_and_table():
    met = [(goal.measured, goal.goal, goal.met) for goal in rollouts.goals([RESULT])]
    assert met == [(2.0, 1.3, True), (1.25, 1.2, False)]
    where = {"cpu": "a CPU", "cores": 2, "load_average": 0.0}
    report = {"machine": where, "versions": {"jax": "1"}, "results": [RESULT]}
    text = rollouts.as_text(report)
    for words in ("4 prompts of 9, 2 samples each", "250.0", "200.0", "90", "75%"):
        assert words in text


@pytest.mark.parametrize("given", [["--seed", "-1"], ["--rounds", "0"], ["--output", "/no/where"]])
def test_wrong_arguments_are_refused(given, capsys):
    with pytest.raises(SystemExit) as ended:
        rollouts.main(given)
    assert ended.value.code == 2 and given[0] in capsys.readouterr().err
