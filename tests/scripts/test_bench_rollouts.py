"""scripts/bench/rollouts.py: its goals, its table, and what it refuses."""

import pytest

from scripts.bench import rollouts
from scripts.bench.parts.rollouts import groups

RESULT = {
    "model": "random",
    "prompts": 4,
    "prompt_tokens": 9,
    "samples": 2,
    "tokens_per_second": {rollouts.SHARED: 90.0, rollouts.UNSHARED: 45.0, rollouts.TUNIX: 18.0},
    "update_seconds": {rollouts.UPDATE: [0.5, 0.25], rollouts.COPY: [0.2, 0.3]},
    "same_texts": 0.75,
    "faster": {"median": 2.0, "lowest": 1.5, "highest": 2.5},
    "faster_than_tunix": {"median": 5.0, "lowest": 4.5, "highest": 5.5},
    "tunix_logprobs_differ": 1e-5,
    "update_by_copy": 1.25,
}


def test_goals_and_table():
    met = [(goal.measured, goal.goal, goal.met) for goal in rollouts.goals([RESULT])]
    assert met == [(2.0, 1.3, True), (5.0, 4.0, True), (1.25, 1.2, False)]
    without = rollouts.goals([RESULT | {"faster_than_tunix": None}])
    assert [goal.met for goal in without] == [True, None, False]
    where = {"cpu": "a CPU", "cores": 2, "load_average": 0.0}
    report = {"machine": where, "versions": {"jax": "1"}, "results": [RESULT]}
    text = rollouts.as_text(report)
    for words in ("4 prompts of 9, 2 samples each", "250.0", "200.0", "90", "18", "75%", "1.0e-05"):
        assert words in text


@pytest.mark.parametrize(("key", "what"), rollouts.SCALED.items())
def test_groups_take_a_core_each(key, what, monkeypatch):
    monkeypatch.setattr(groups, "cores", lambda: 2)
    taken = {1: {"samples": 32, "seconds": [9.0, 8.0]}, 2: {"samples": 64, "seconds": [10.0]}}
    monkeypatch.setattr(
        groups, "seconds_of", lambda n, tiny, ray: taken[n] | {"update_seconds": [0.1]}
    )
    found = groups.scaling(2, tiny=True, ray=key == "ray")
    assert found["samples_per_second"] == [4.0, 6.4] and found["efficiency"] == 0.8
    assert rollouts.goal_of_groups(found, what).met is False
    assert rollouts.goal_of_groups(found, what).name.startswith(f"2 {what}: ")
    many = groups.scaling(3, tiny=True)
    assert many["why"] == "3 groups take a core each, and there are 2"
    assert rollouts.goal_of_groups(many, what).met is None
    where = {"cpu": "a CPU", "cores": 2, "load_average": 0.0}
    report = {"machine": where, "versions": {"jax": "1"}, "results": [RESULT]}
    assert "not measured: 3 groups" in rollouts.as_text(report | {key: many})
    assert f"{what}: 2, samples/s" in (text := rollouts.as_text(report | {key: found}))
    assert "6.40" in text


@pytest.mark.parametrize(
    "given",
    [["--seed", "-1"], ["--rounds", "0"], ["--output", "/no/where"], ["--groups", "1"], ["--ray"]],
)
def test_wrong_arguments_are_refused(given, capsys):
    with pytest.raises(SystemExit) as ended:
        rollouts.main(given)
    assert ended.value.code == 2 and given[0] in capsys.readouterr().err
