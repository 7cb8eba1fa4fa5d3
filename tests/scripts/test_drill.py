"""The drill reports what ran and what held; a short form of every part runs here."""

import json
import random

import pytest

from scripts.drill import run
from scripts.drill.drill import Drill


def sometimes(rng: random.Random, folder) -> int:
    assert not list(folder.iterdir())
    if folder.name in ("sometimes-4", "sometimes-6"):
        raise ValueError("what was kept is gone")
    return 2


PARTS = (
    Drill("sometimes", "a promise", "a fault", sometimes),
    Drill("always", "another promise", "another fault", lambda rng, folder: 1),
)


def test_a_promise_that_does_not_hold_is_named_with_its_seed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run, "DRILLS", PARTS)
    given = ["--cases", "4", "--seed", "3", "--json", "--output", str(tmp_path / "out.json")]
    assert run.main(given) == 1
    printed, errors = capsys.readouterr()
    assert "sometimes, seed 4: ValueError: what was kept is gone" in errors
    found = json.loads(printed)
    assert json.loads((tmp_path / "out.json").read_text()) == found
    first, second = found["parts"]
    assert (first["cases"], first["faults"], first["survived"]) == (4, 4, 2)
    assert [failure["seed"] for failure in first["failures"]] == [4, 6]
    assert (second["cases"], second["faults"], second["survived"]) == (4, 4, 4)
    assert [goal["met"] for goal in found["goals"]] == [False, True]


def test_parts_are_chosen_by_name_and_run_at_least_one_case(monkeypatch, capsys):
    monkeypatch.setattr(run, "DRILLS", PARTS)
    assert run.main(["--parts", "always", "--minutes", "0"]) == 0
    assert "another promise" in (out := capsys.readouterr().out) and "a fault" not in out
    for wrong, words in (
        (["--parts", "never"], "--parts"),
        (["--minutes", "-1"], "--minutes is -1.0; give 0 or more"),
        (["--minutes", "nan"], "--minutes is nan"),
        (["--cases", "0"], "--cases is 0; give at least 1"),
    ):
        with pytest.raises(SystemExit):
            run.main(wrong)
        assert words in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("part", [drill.name for drill in run.DRILLS])
def test_every_promise_holds_in_a_few_cases(part, capsys):
    cases = "2" if part.startswith("kill") else "12"
    assert run.main(["--parts", part, "--cases", cases, "--minutes", "3"]) == 0, capsys.readouterr()
