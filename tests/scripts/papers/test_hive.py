"""scripts.papers.hive: its arithmetic, its arguments, and runs that are killed and gone on with."""

import asyncio
import dataclasses
import itertools
import json
import os
import subprocess
import sys

import pytest

from jaxshare import models
from jaxshare.serving.agents import BestOfN, Runtime
from jaxshare.serving.agents.backends import ScriptedModel
from jaxshare.serving.kvcache.pool import whole_tiles
from scripts.bench.lib import ROOT
from scripts.bench.parts.logits_cache.puzzles import example
from scripts.papers import hive, hive_game24, hive_residency
from scripts.papers.folder import PaperFolder
from tests.processes import wait_for

PUZZLES = "4 9 10 13\n1 1 1 1\n3 3 8 8\n"


@pytest.fixture
def puzzles(tmp_path):
    file = tmp_path / "puzzles.txt"
    file.write_text(PUZZLES)
    return file


def scripted(folder, puzzles, *more):
    sizes = ("--chains", "4", "--keep", "2,5", "--breadth", "4")
    output = ("--output", str(folder), "--data", str(puzzles), "--json")
    return ["game24", "--model", "scripted", *sizes, *output, *more]


# The game of 24.


def test_the_puzzles_are_those_of_the_ranks(tmp_path):
    file = tmp_path / "game24.csv"
    lines = [f"{rank},{rank} 1 2 3" for rank in range(1, 1201)]
    file.write_text("\n".join(["Rank,Puzzles", *lines]))

    def firsts(*how):
        ranks, found = hive_game24.chosen(file, *how)
        assert [numbers[0] for numbers in found] == [*range(ranks[0], ranks[1] + 1)]
        return ranks

    assert firsts(None, None) == (901, 1000)  # as in the paper of Tree of Thoughts
    assert firsts(None, 3) == (901, 903) and firsts("7-9", None) == (7, 9)
    assert firsts("7-9", 100) == (7, 9) and firsts("1200-1200", 1) == (1200, 1200)
    file.write_text("\n".join(["Rank,Puzzles", *lines[:150]]))
    assert firsts(None, None) == (51, 150)
    file.write_text("\n".join(["Rank,Puzzles", *lines[:2]]))
    assert firsts(None, None) == (1, 2)
    for wrong in ("0-2", "2-1", "1-3", "1", "a-b"):
        with pytest.raises(ValueError, match=r"--ranks is .* such as 1-2"):
            hive_game24.chosen(file, wrong, None)


def test_searches_of_the_scripted_model_cost_the_calls_that_it_had(tmp_path, puzzles, capsys):
    assert hive.main(scripted(tmp_path / "out", puzzles)) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["search"]: row for row in report["results"]["rows"]}
    # Of the three puzzles the second has no solution.
    assert {name: round(3 * row["solved"]) for name, row in rows.items()} == {
        "ToT, keep 2": 2,
        "ToT, keep 5": 2,
        "best of 1 chain": 2,  # its first proposal is always a right one
        "best of 2 chains": 2,
        "best of 4 chains": 2,
    }
    assert rows["best of 4 chains"]["calls"] == 4 * rows["best of 1 chain"]["calls"] == 12
    folder = PaperFolder.read(tmp_path / "out", "hive game24")
    for keep in (2, 5):
        model = example().scripted()
        solver, _ = hive_game24.solver_of({"search": "tot", "keep": keep}, 4, 4)
        for puzzle, each in zip(
            PUZZLES.splitlines(),
            folder.value({"search": "tot", "keep": keep})["puzzles"],
            strict=True,
        ):
            before = len(model.calls)
            numbers = [*map(int, puzzle.split())]
            try:
                asked(model, solver, numbers)
            except Exception:
                assert puzzle == "1 1 1 1" and each["expression"] is None
            assert each["calls"] == len(model.calls) - before and each["puzzle"] == numbers
    assert {file.name for file in (tmp_path / "out").iterdir() if file.name[0] != "."} == {
        *("settings.json", "points.jsonl", "result.json", "game24.png"),
        *("tot-2.journal", "tot-5.journal", "chains.journal"),
    }


def asked(model, solver, numbers):
    return asyncio.run(Runtime(model).run(solver, numbers))


def test_what_is_solved_is_worked_out_again_for_every_report(tmp_path, puzzles, capsys):
    out = tmp_path / "out"
    assert hive.main(scripted(out, puzzles)) == 0
    before = capsys.readouterr().out
    saved = PaperFolder.read(out, "hive game24")
    key = {"search": "tot", "keep": 2}
    value = json.loads(json.dumps(saved.value(key)))
    value["puzzles"][0]["expression"] = "4 * 9 - 13 + 10"  # is 33
    saved._points[json.dumps(key, sort_keys=True)] = key, value
    rows = {row["search"]: row["solved"] for row in hive_game24.results(saved)["rows"]}
    assert rows["ToT, keep 2"] == pytest.approx(1 / 3) and rows["ToT, keep 5"] == pytest.approx(
        2 / 3
    )
    (out / "result.json").unlink()
    (out / "game24.png").unlink()
    assert hive.main(["game24", "--redraw", "--output", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"] == json.loads(before)["results"]
    assert (out / "result.json").exists() and (out / "game24.png").exists()


def test_the_best_of_k_chains_is_that_of_all_choices_of_k():
    right, wrong = "(1 + 1 + 4) * 6 - 12", None
    texts = [["4 * 6 * 1 * 1", wrong, wrong, "6 * 4"], [wrong, "6 * 4 / 1 / 1", right, "24"]]
    value = {
        "puzzles": [
            {"puzzle": [1, 1, 4, 6], "expressions": each, "calls": 12, "new_tokens": 40}
            for each in texts
        ]
    }
    rows = {row["chains"]: row for row in hive_game24._rows_of_chains(value)}
    sure = [[text in ("4 * 6 * 1 * 1", "6 * 4 / 1 / 1") for text in each] for each in texts]
    for k, row in rows.items():
        chosen = [[*itertools.combinations(each, k)] for each in sure]
        best = [sum(map(any, each)) / len(each) for each in chosen]
        assert row["solved"] == pytest.approx(sum(best) / 2) and row["calls"] == 3 * k
    assert [*rows] == [1, 2, 4]


def test_variables_of_the_chat_template_come_to_every_call():
    model = example().scripted()
    solver = example().solve.under(BestOfN(1, lambda state: 1.0))
    asked(hive_game24.ChatVariables(model, {"enable_thinking": False}), solver, [4, 6])
    assert [call.chat_template_kwargs for call in model.calls] == [{"enable_thinking": False}]


def test_a_model_that_answers_nothing_is_an_error_with_its_reason(
    tmp_path, puzzles, capsys, monkeypatch
):
    monkeypatch.setattr(example(), "scripted", lambda: ScriptedModel({}))
    assert hive.main(scripted(tmp_path / "out", puzzles)) == 2
    said = capsys.readouterr().err
    assert "the model has answered nothing" in said and "has no answer to what agent solve" in said


# Section 8.3 and figure 9.


def test_table_1_has_the_repeats_of_all_policies_and_the_papers_numbers():
    names = ["ample", "contribution", "lru"]

    def measured(hot, evicted, said="x"):
        agents = ("decision", "patcher", "viewer", "summary", "searcher")
        found = {name: 50 for name in agents} | {"patcher": hot, "viewer": hot}
        counts = {"prompt": dict.fromkeys(agents, 100), "found": found, "evicted": evicted}
        calls = [["patcher", 0.1, 0.4], ["viewer", 0.3, 0.6], ["summary", 1.0, 2.0]]
        zeros = dict.fromkeys(("to_host", "fetched", "preemptions"), 0)
        return {
            "seconds": 2.0,
            "counts": counts,
            **zeros,
            "calls": calls,
            "said": said,
            "contributions": [],
            "capacity": 9,
        }

    values = {
        ("ample", 0): measured(95, 0),
        ("contribution", 0): measured(90, 200),
        ("lru", 0): measured(80, 500),
        ("ample", 1): measured(95, 0),
        ("contribution", 1): measured(94, 100, "y"),
        ("lru", 1): measured(90, 300),
        ("ample", 2): measured(0, 0),  # the others were interrupted
    }
    folder = PaperFolder(None, "hive section8_3", {"policies": names, "tasks": 4}, {}, {})
    for (name, repeat), value in values.items():
        key = {"rounds": 7, "repeat": repeat, "policy": name}
        folder._points[json.dumps(key)] = key, value
    [found] = hive_residency.section_results(folder)["tables"]
    rows = {row["policy"]: row for row in found["policies"]}
    assert rows["contribution"]["hot_hit_rate"] == pytest.approx(0.92)
    assert rows["lru"]["hot_hit_rate"] == pytest.approx(0.85)
    assert rows["lru"]["evicted_tokens"] == 800 and found["repeats"] == 2
    assert found["different_ends"] == 1
    text = hive_residency.section_text({"tables": [found]})
    assert "0.903" in text and "18549" in text and "1 runs have come to another end" in text


def test_room_is_counted_in_letters_of_the_workflow():
    class Pairs:
        """Two letters are a token."""

        def encode(self, text, **options):
            return [0] * (len(text) // 2)

    embedded = models.outline("embedded")
    assert hive_residency.tokens_of_letters(embedded) == pytest.approx(1.0, abs=0.1)
    halved = dataclasses.replace(embedded, tokenizer=Pairs())
    assert hive_residency.tokens_of_letters(halved) == 0.5


def test_memory_has_room_for_the_longest_prompt_or_is_refused():
    model = models.load("embedded")
    settings = {"seed": 0, "tasks": 1, "quick": True}
    runner = hive_residency.Repairs(model, settings, {})
    # Patcher reads the rules, its prompt, the source and the record of all but the last turn.
    assert 120 + 290 + 450 + 7 * (45 + 30) < runner.longest(2) < 4000
    for rounds in (1, 2, 7):
        assert whole_tiles(runner.capacity(rounds)) >= runner.longest(rounds)
    four = dataclasses.replace(runner, settings={**settings, "tasks": 4, "quick": False})
    assert four.capacity(7) == round(4 * 4750 * hive_residency.tokens_of_letters(model))
    given = dataclasses.replace(runner, engine={"kv_bytes": 2**21})
    with pytest.raises(ValueError, match=r"--kv-bytes has room for 1024 tokens, .* give at least"):
        given.capacity(2)


# Arguments.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["game24", "--data", "FILE", "--breadth", "0"], ["--breadth is 0"]),
        (["game24", "--data", "FILE", "--keep", "2,2"], ["--keep is '2,2'"]),
        (["game24", "--data", "no.csv"], ["--data is no.csv", "no such file"]),
        (["game24", "--data", "FILE", "--chat", "[]"], ["--chat is '[]'", "enable_thinking"]),
        (["game24", "--data", "FILE", "--model", "scripted", "--policy", "lru"], ["--policy"]),
        (["game24", "--data", "FILE", "--resample", "hotspot"], ["--logits-cache SIZE"]),
        (["game24", "--data", "FILE", "--max-concurrency", "0"], ["--max-concurrency is 0"]),
        (["section8_2", "--data", "FILE", "--temperatures", "0"], ["--temperatures is '0'"]),
        (["section8_2", "--data", "FILE", "--searches", "0"], ["--searches is 0"]),
        (["section8_2", "--data", "FILE", "--model", "scripted"], ["--model is scripted"]),
        (
            ["section8_2", "--logits-cache", "1GiB", "--resample", "hotspot"],
            ["--resample is hotspot"],
        ),
        (["section8_3", "--model", "scripted"], ["--model is scripted"]),
        (["section8_3", "--rounds", "x"], ["--rounds is 'x'"]),
        (["section8_3", "--kv-bytes", "much"], ["--kv-bytes is 'much'"]),
        (["figure9", "--policy", "lru"], ["--policy is lru", "contribution"]),
        (["figure9", "--redraw"], ["has no experiment"]),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(arguments, words, capsys, tmp_path, puzzles):
    named = [str(puzzles) if word == "FILE" else word for word in arguments]
    try:
        code = hive.main([*named, "--output", str(tmp_path / "out")])
    except SystemExit as stopped:
        code = stopped.code
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1 and all(word in said for word in words), said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("experiment", ["game24", "section8_2"])
@pytest.mark.parametrize(
    ("line", "words"),
    [("3 3 8 x", "line 2 of"), ("3 3 8", "line 2 of")],
)
def test_a_corrupt_puzzle_is_named_before_anything_runs(
    experiment, line, words, tmp_path, capsys, puzzles
):
    puzzles.write_text(f"1 1 4 6\n{line}\n")
    command = [experiment, "--data", str(puzzles), "--output", str(tmp_path / "out")]
    assert hive.main(command) == 2
    said = capsys.readouterr().err
    assert f"{words} {puzzles}" in said and line.split()[-1] in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


# Interruptions.


def lines_of(file, word):
    return file.read_bytes().count(word) if file.exists() else 0


def killed(command, is_far_enough):
    """Runs a command until the condition holds, and kills it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.papers.hive", *command],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ,
    )
    try:
        wait_for(lambda: is_far_enough() or process.poll() is not None, 600)
    finally:
        process.kill()
        assert process.wait() == -9


def known_points(folder):
    lines = (folder / "points.jsonl").read_bytes().split(b"\n")[:-1]
    return [line for line in lines if b'"key"' in line]


def refused(command, words, capsys):
    assert hive.main(command) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


@pytest.mark.slow
def test_a_search_that_is_killed_asks_for_nothing_again_and_comes_to_the_same(tmp_path, capsys):
    file = tmp_path / "puzzles.txt"
    file.write_text("4 9 10 13\n1 1 4 6\n3 3 8 8\n2 3 5 12\n1 3 4 6\n" * 20)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert hive.main(scripted(whole, file)) == 0
    expected = json.loads(capsys.readouterr().out)["results"]
    journal = cut / "tot-5.journal"
    killed(scripted(cut, file), lambda: lines_of(journal, b"\n") > 100)
    first, entries = known_points(cut), lines_of(journal, b"\n")
    assert len(first) == 1
    refused(scripted(cut, file), ["--resume goes on"], capsys)
    other = [*scripted(cut, file, "--resume"), "--seed", "1"]
    refused(other, ["began with seed 0, not 1"], capsys)
    named = [*scripted(cut, file, "--resume"), "--model", "embedded"]
    refused(named, ['began with model "scripted", not "embedded"'], capsys)
    assert hive.main(scripted(cut, file, "--resume")) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    untimed = [[{**row, "seconds": 0} for row in each["rows"]] for each in (found, expected)]
    assert untimed[0] == untimed[1]
    assert known_points(cut)[0] == first[0]
    assert lines_of(journal, b"\n") == lines_of(whole / "tot-5.journal", b"\n") >= entries
    after = (cut / "points.jsonl").read_bytes()
    assert hive.main(scripted(cut, file, "--resume")) == 0  # nothing is left to do
    assert known_points(cut) == [line for line in after.split(b"\n") if b'"key"' in line]


SMALL = {
    "game24": ["--puzzles", "2", "--chains", "2", "--keep", "1", "--breadth", "2"],
    "section8_2": ["--puzzles", "2", "--searches", "1", "--tokens", "12", "--turns", "1"],
    "section8_3": ["--rounds", "1", "--tasks", "2", "--kv-bytes", "5MiB"],
    "figure9": ["--rounds", "1,2", "--tasks", "1"],
}
POINTS = {"game24": 2, "section8_2": 5, "section8_3": 3, "figure9": 2}
PICTURES = {
    "game24": ["game24.png"],
    "section8_2": ["figure8.png", "supervisors.png"],
    "section8_3": ["table1.png"],
    "figure9": ["figure9-1.png", "figure9-2.png"],
}


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [*SMALL])
def test_an_experiment_on_the_embedded_model_goes_on_after_a_kill(experiment, tmp_path, capsys):
    out, file = tmp_path / "out", tmp_path / "puzzles.txt"
    file.write_text(PUZZLES)
    data = ["--data", str(file)] * (experiment in ("game24", "section8_2"))
    command = [experiment, "--quick", *SMALL[experiment], *data, "--output", str(out)]
    killed(command, lambda: lines_of(out / "points.jsonl", b'"key"') >= 1)
    before = known_points(out)
    assert hive.main([*command, "--resume", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    after = known_points(out)
    assert after[: len(before)] == before and len(after) == POINTS[experiment]
    assert report["pictures"] == PICTURES[experiment]
    for name in report["pictures"]:
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert report["model"]["weights"] and report["settings"]["model"] == "embedded"
    assert len(report["runs"]) == 2 and all("--output out" in r["command"] for r in report["runs"])
    assert report["versions"]["jax"] and report["settings"]["seed"] == 0
    check_results(experiment, report["results"])
    refused([*command, "--resume", "--seed", "3"], ["began with seed 0, not 3"], capsys)


def check_results(experiment, results):
    if experiment == "game24":
        assert results["rows"][0]["search"] == "ToT, keep 1"
        assert all(row["calls"] > 0 for row in results["rows"])
    elif experiment == "section8_2":
        assert [point["temperature"] for point in results["points"]] == [0.2, 1.0]
        assert all(point["different_from_baseline"] == 0 for point in results["points"])
        assert [point["supervisor"] for point in results["searches"]] == ["ToT", "ToT"]
    elif experiment == "section8_3":
        [one] = results["tables"]
        rows = {row["policy"]: row for row in one["policies"]}
        assert rows["ample"]["evicted_tokens"] == 0 < rows["lru"]["evicted_tokens"]
        assert one["different_ends"] == 0
    else:
        for run in results["runs"]:
            shares = [each for _, each in run["contributions"]]
            assert all(0.3 < sum(each.values()) < 1.001 for each in shares)
            assert len(shares) == 13 * run["rounds"]  # calls of a round: 2 + 8 + 2 + 1
