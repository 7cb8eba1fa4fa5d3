"""The drill reports what ran and what held; a short form of every part runs here."""

import json
import random

import pytest

from scripts.drill import run, table
from scripts.drill.census import Census, growth
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


def test_a_leak_is_what_there_is_more_of_after_each_of_the_last_waves():
    def held(*numbers):
        return [Census({"arrays": n, "threads of the system": 9 * n}, 0, 0) for n in numbers]

    assert growth(held(4, 6, 5), held(7, 9, 8)) == {
        "arrays": (6, 7),
        "threads of the system": (54, 63),
    }
    assert growth(held(4, 6, 5), held(7, 6, 8)) == {}, "it varies"
    assert growth(held(0, 0), [Census({"handles": 2}, 0, 0)]) == {"handles": (0, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("part", [drill.name for drill in run.DRILLS])
def test_every_promise_holds_in_a_few_cases(part, capsys):
    cases = "2" if part.startswith("kill") else "12"
    code = run.main(["--parts", part, "--cases", cases, "--minutes", "3"])
    assert code == 0, capsys.readouterr().err


def test_documents_have_the_results():
    for document in table.DOCUMENTS:
        assert document.read_text(encoding="utf-8") == table.written(document)
    parts = table.results()
    assert [part["part"] for part in parts] == [drill.name for drill in run.DRILLS]
    document, readme = (file.read_text(encoding="utf-8") for file in table.DOCUMENTS)
    for part, drill in zip(parts, run.DRILLS, strict=True):
        assert f"`{drill.name}` | {drill.promise} | {drill.fault} | {part['cases']:,} |" in document
        assert f"`{drill.name}`" in document.partition("## What each part does")[2]
    assert f"{sum(part['faults'] for part in parts):,} faults were thrown" in readme


def test_a_part_with_a_file_of_its_own_is_taken_from_there(tmp_path):
    def part(name, cases, survived):
        counts = {"cases": cases, "faults": 2 * cases, "survived": survived}
        return {"part": name, "promise": "a promise", "fault": "a fault", **counts}

    for file, parts in (
        ("drill.json", [part("kill-it", 1000, 999), part("soak", 1, 1)]),
        ("drill-soak.json", [part("soak", 50, 50)]),
    ):
        (tmp_path / file).write_text(json.dumps({"parts": parts}))
    found = table.results(tmp_path)
    lines = table.table(found).splitlines()
    assert lines[2] == "| `kill-it` | a promise | a fault | 1,000 | 2,000 | 999 |"
    assert lines[3] == "| `soak` | a promise | a fault | 50 | 100 | 50 |" and len(lines) == 4
    assert table.sentence(found) == (
        "In its last long run 2,100 faults were thrown in 1,050 cases of 2 kinds, 2,000 of them "
        "`kill -9`, and the promise held in 1,049 of them.\n"
    )
