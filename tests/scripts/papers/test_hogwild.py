"""Figures of Hogwild! Inference: what they are composed of, their arithmetic by hand, and mistakes."""

import argparse
import dataclasses
import json
import re

import pytest

from jaxshare.serving.cli.evaluation import evaluate
from jaxshare.serving.evaluation import Run, plot
from jaxshare.serving.evaluation.checkers import sandbox
from scripts.papers import hogwild, hogwild_accuracy, hogwild_cases, hogwild_judge, hogwild_latency
from scripts.papers.hogwild_figures import FIGURES, FigureSettings, panels_of
from scripts.papers.hogwild_options import parse

MODEL = "Qwen/QwQ-32B"


def lines(figure: str, **given) -> list[list[str]]:
    """The labels of each panel of a figure."""
    return [
        [line.label for line in panel.lines]
        for panel in panels_of(figure, FigureSettings((MODEL,), **given))
    ]


def evaluated(words) -> argparse.Namespace:
    """The options that `jaxshare evaluate` makes of a line's words."""
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    return parser.parse_args([*words, "--out", "x"])


# what figures are composed of


def test_the_settings_of_the_paper():
    by_figure = {name: panels_of(name, FigureSettings((MODEL,))) for name in FIGURES}
    tasks = {name: [panel.task for panel in panels] for name, panels in by_figure.items()}
    assert tasks == {
        "figure3": ["gsm8k5", "limo", "limo"],
        "figure4": ["limo"],
        "figure5": ["olympiad", "olympiad-physics"],
        "figure6": ["livecodebench-v5", "aime2025"],
        "figure8": ["limo"],
        "e1": ["limo", "limo"],
        "e2": ["limo", "olympiad", "olympiad-physics", "livecodebench-v5", "aime2025"],
        "levels": ["limo"],
        "judge": ["limo"],
    }
    sums = panels_of("figure3", FigureSettings((MODEL,)))[0]
    assert {evaluated(line.words).samples for line in sums.lines} == {128}  # section 4.1
    code, aime = by_figure["figure6"]  # section 4.2
    assert {evaluated(line.words).seeds for line in code.lines} == {8}
    assert {evaluated(line.words).dates for line in code.lines} == {"2024-08-01,2025-01-31"}
    assert {evaluated(line.words).seeds for line in aime.lines} == {10}
    assert {evaluated(line.words).budgets for line in by_figure["levels"][0].lines} == {"4096"}


def test_lines_are_the_methods_of_the_paper():
    def methods(figure: str, panel: int) -> set[tuple]:
        found = panels_of(figure, FigureSettings((MODEL,)))[panel].lines
        options = [evaluated(line.words) for line in found]
        return {(o.method, o.workers, o.layout, o.move, o.ask_every) for o in options}

    base, two = ("sequential", None, None, None, None), ("workers", "2", None, None, None)
    assert methods("figure3", 1) == {
        base,
        two,
        ("no-early-stop", None, None, None, None),
        ("skeleton", "2", None, None, None),
        ("skeleton-unlimited", None, None, None, None),
        ("self-consistency", "2", None, None, None),
    }
    assert methods("e1", 0) == {
        base,
        two,
        ("workers", "2", "contiguous", None, None),
        ("workers", "2", "interleaved", None, None),
        ("workers", "2", None, None, 0),
        ("workers", "2", None, "reencode", None),
    }
    counts = {("workers", n, None, None, None) for n in "12346"}
    assert methods("e1", 1) == {base, *counts}
    assert methods("levels", 0) == {
        two,
        ("self-consistency", "2", None, None, None),
        ("workers", "2", "interleaved", None, None),
    }


def test_an_evaluation_is_shared_where_it_is_the_same_and_only_there():
    def folders(**given) -> dict[str, str]:
        settings = FigureSettings((MODEL,), **given)
        return {
            line.label: line.folder
            for figure in ("figure4", "e1")
            for panel in panels_of(figure, settings)
            for line in panel.lines
        }

    paper = folders()
    assert len({*paper.values()}) == len(paper) == 10
    [only] = panels_of("figure4", FigureSettings((MODEL,)))
    assert {line.folder for line in only.lines} <= {*paper.values()}
    for given in ({"seed": 1}, {"budgets": (8,)}, {"samples": 3}, {"more": ("--top-k", "5")}):
        assert not {*paper.values()} & {*folders(**given).values()}
    assert not {*paper.values()} & {
        line.folder
        for panel in panels_of("e1", FigureSettings(("other/QwQ-32B",)))
        for line in panel.lines
    }


def test_what_is_given_takes_the_place_of_the_papers():
    settings = FigureSettings((MODEL,), task="own.jsonl", workers=(3,), seeds=2, ask_every=7)
    first, second = panels_of("figure3", settings)  # two of its tasks have become the same
    assert [line.label for line in second.lines] == ["baseline", "3 workers"]
    assert first.title == second.title == "own, QwQ-32B"
    options = evaluated(second.lines[1].words)
    assert (options.seeds, options.ask_every, options.budgets[:9]) == (2, 7, "1024,2048")
    assert "--ask-every" not in second.lines[0].words
    assert lines("figure4", workers=(2, 4)) == [["baseline", "2 workers", "4 workers"]]
    two = panels_of("figure4", FigureSettings((MODEL, "b")))
    assert [panel.title for panel in two] == ["LIMO, QwQ-32B", "LIMO, b"]


def test_devices_are_no_part_of_what_decides_texts(tmp_path):
    def words(*more: str) -> tuple:
        options = parse(["figure4", "--model", "m", "--out", str(tmp_path), *more])
        return options.given, options.where

    plain, nowhere = words()
    same, where = words("--tensor", "2", "--data-dir", "d", "--concurrency", "3", "--ray")
    assert same == plain and nowhere == ()
    assert where == ("--data-dir", "d", "--tensor", "2", "--ray", "local", "--concurrency", "3")
    other, _ = words("--temperature", "0.6", "--adapter", "a=f", "--format", "qwen3")
    assert other.more == ("--format", "qwen3", "--temperature", "0.6", "--adapter", "a=f")


# arithmetic


def test_seconds_are_those_of_passes_whose_history_grows():
    known = [(10, 1.0), (20, 2.0), (40, 3.0)]
    # two workers from 8 tokens: histories of 8, 10, 12, 14
    assert hogwild_latency.seconds_of(4, 2, known, 8) == pytest.approx(1 + 1 + 1.2 + 1.4)
    # beyond the longest history the last slope, 1/20, goes on
    assert hogwild_latency.seconds_of(2, 20, known, 40) == pytest.approx(3 + 4)
    assert hogwild_latency.seconds_of(3, 4, [(64, 0.5)]) == pytest.approx(1.5)
    assert hogwild_latency.seconds_of(0, 1, known) == 0
    # latencies that fall, as noise has them, never go below the last
    assert hogwild_latency.seconds_of(1, 1, [(1, 2.0), (2, 1.0)], 100) == pytest.approx(1)


def timed(history: int, **milliseconds: float) -> dict:
    """A measurement: milliseconds of passes by number of workers, such as w2=4."""
    return {
        "history": history,
        "workers": {
            name[1:]: {
                "pass_milliseconds": each,
                "tokens_per_second": int(name[1:]) / each * 1e3,
                "plan_microseconds": 7.4,
                "attention_microseconds_a_layer": None if name == "w2" else 12.6,
                "round_seconds": [each / 1e3, each / 1e3, 3 * each / 1e3],
            }
            for name, each in milliseconds.items()
        },
    }


def test_tables_1_and_2():
    found = [timed(100, w1=10, w2=20), timed(300, w1=10, w2=40)]
    assert [
        row.split("|")[1:-1]
        for row in hogwild_latency.table1(found).splitlines()
        if re.match(r"\| \d", row)
    ] == [
        [" 1 ", " 100.0 ", " 100.0 "],
        [" 2 ", " 100.0 ", " 50.0 "],
        [" 1 ", " 10 ", " 10 "],
        [" 2 ", " 20 ", " 40 "],
        [" 1 ", " 1 ", " 3 "],  # 100 and 300 passes of 10 ms
        # 50 passes of 20 ms; 150 of 20 ms and, from the 50th on, of 0.1 ms for each further token
        [" 2 ", " 1 ", f" {150 * 0.02 + 1e-4 * sum(range(0, 200, 2)):.3g} "],
    ]
    assert "| 300 | 13 | - | 7 | 7 |" in hogwild_latency.table2(found)


def test_correlation_with_people():
    assert hogwild_judge.correlation([[1, 2], [2, 4], [3, 6]]) == pytest.approx(1)
    assert hogwild_judge.correlation([[1, 3], [2, 1], [3, 2]]) == pytest.approx(-0.5)
    assert hogwild_judge.correlation([[1, 3], [1, 4]]) is None
    assert hogwild_judge.correlation([[1, 3]]) is None


def test_levels_of_people_are_read_and_bad_lines_named(tmp_path):
    file = tmp_path / "human.jsonl"
    file.write_text(
        '{"folder": "e/a", "problem": 7, "level": 2.5}\n'
        '{"folder": "e/a", "problem": "8", "number": 1, "level": 6}\n'
    )
    assert hogwild_judge.read_human(str(file)) == {("e/a", "7", 0): 2.5, ("e/a", "8", 1): 6.0}
    assert hogwild_judge.read_human(None) == {}
    for line, words in (
        ('{"folder": "e/a", "problem": "8", "level": 7}', "the level is 7, but it must be 1 to 6"),
        ("[1]", "TypeError"),
        ("{", "JSONDecodeError"),
        ('{"folder": "e/a"}', "KeyError: 'problem'"),
    ):
        file.write_text('{"folder": "a", "problem": "1", "level": 1}\n' + line + "\n")
        with pytest.raises(ValueError, match=r"line 2 of .* is no level of a run") as error:
            hogwild_judge.read_human(str(file))
        assert words in str(error.value)
    with pytest.raises(ValueError, match=r"--human is .*nowhere.*, which cannot be read"):
        hogwild_judge.read_human(str(tmp_path / "nowhere"))


def test_pictures_go_into_rows_of_three_and_lines_keep_their_looks():
    for count, rows in ((1, 1), (3, 1), (4, 2), (7, 3)):
        figure, axes = plot.panels(count)
        assert len(axes) == len(figure.axes) == count
        assert figure.get_size_inches()[1] == pytest.approx(4.2 * rows)

    def line(label: str) -> dict:
        point = {"workers": 1, "budget": 8, "accuracy": 0.5, "low": 0.4, "high": 0.6}
        counts = {"written": 0, "problems": 4, "runs": 4}
        return {"label": label, "points": [{**point, **counts, "seconds": 2.5}]}

    drawn = hogwild_accuracy.picture(
        [
            {"title": "a", "lines": [*map(line, "uvwxy")]},
            {"title": "b", "lines": [*map(line, "abcdefgyhi")]},
        ]
    )
    first, second = (
        {drawn.get_label(): (drawn.get_color(), drawn.get_marker()) for drawn in axes.lines}
        for axes in drawn.axes
    )
    assert first["y"] == second["y"] and len({*first.values()}) == 5
    assert len({*second.values()}) == 10
    assert drawn.axes[0].get_xlabel() == "seconds"
    assert drawn.axes[0].lines[0].get_xdata().tolist() == [2.5]


# mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["figure2"], "invalid choice: 'figure2'"),
        (["figure3"], "--model is missing"),
        (["figure3", "--model", "a", "--model", "b"], "--model is given 2 times"),
        (["figure4", "--model", "a", "--model", "a"], "--model a is given twice"),
        (["levels", "--quick"], "levels needs a judge"),
        (["judge", "--quick", "--endpoint", "http://x/v1"], "judge needs a judge"),
        (
            ["levels", "--quick", "--endpoint", "http://x/v1", "--judge", "m", "--workers", "1,2"],
            "--workers has 1, but levels needs workers that have others",
        ),
        (["table1", "--quick", "--samples", "3"], "--samples is given, but it is of"),
        (["figure3", "--quick", "--histories", "64"], "--histories is given, but it is of"),
        (["figure3", "--quick", "--judge", "m"], "--judge is given, but it is of judge, levels"),
        (["table1", "--rescore"], "--rescore is given, but table1 has no marks"),
        (["figure3", "--redraw", "--rescore"], "--redraw and --rescore are both given"),
        (["figure3", "--quick", "--workers", "2,2"], "--workers is '2,2'"),
        (["figure3", "--quick", "--problems", "0"], "--samples is 0"),
        (["figure1", "--quick", "--workers", "2,3"], "--workers has 2 numbers"),
        (["table2", "--quick", "--steps", "449"], "--steps is 449, but it must be at most 448"),
        (["figure3", "--quick", "--seed", "-1"], "--seed is -1"),
    ],
)
def test_mistakes_of_the_command(capsys, tmp_path, arguments, words):
    with pytest.raises(SystemExit) as error:
        hogwild.main([*arguments, "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert error.value.code == 2 and words in said and said.count("\n") <= 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["figure3", "--model", "embedded", "--data-dir", "{}"], "gsm8k_test.jsonl"),
        (["figure3", "--quick", "--task", "song"], "--task is 'song'"),
        (["figure1", "--quick", "--task", "{}/x.jsonl"], "x.jsonl"),
        (
            ["levels", "--quick", "--endpoint", "localhost", "--judge", "m"],
            "the endpoint is 'localhost'; it must be an address",
        ),
        (["figure4", "--redraw"], "has no experiment that can be read"),
        (["figure4", "--rescore"], "has no experiment that can be read"),
        (["table1", "--quick", "--histories", "8192"], "--histories has 8192"),
    ],
)
def test_mistakes_that_are_known_before_anything_is_run(capsys, tmp_path, arguments, words):
    given = [argument.replace("{}", str(tmp_path)) for argument in arguments]
    assert hogwild.main([*given, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert not (tmp_path / "out" / "evaluations").exists()


# an interrupt of a measurement, and a hostile program


def test_a_table_goes_on_after_the_last_history(tmp_path, monkeypatch, capsys):
    """In place of passes that are timed, numbers."""
    measured: list[int] = []

    def measure(model, other, workers, history, *rest):
        if len(measured) == 1 and history not in measured:
            measured.append(history)
            raise KeyboardInterrupt
        measured.append(history)
        assert workers == (1, 2)
        return timed(history, w1=history / 10, w2=history / 5)

    monkeypatch.setattr(hogwild_latency, "measure", measure)
    arguments = ["table1", "--quick", "--histories", "300,100,200", "--workers", "2"]
    arguments += ["--out", str(tmp_path), "--json"]
    assert hogwild.main(arguments) == 130
    assert hogwild.main(arguments) == 2 and "--resume goes on" in capsys.readouterr().err
    assert hogwild.main([*arguments, "--rounds", "5", "--resume"]) == 2
    assert "began with rounds 3, not 5" in capsys.readouterr().err
    assert hogwild.main([*arguments, "--resume"]) == 0
    assert measured == [100, 200, 200, 300]
    report = json.loads(capsys.readouterr().out)
    assert [row["history"] for row in report["results"]] == [100, 200, 300]
    assert report["results"][0]["workers"]["1"]["seconds_to_tokens"] == pytest.approx(1.0)
    assert report["model"]["weights"] and report["versions"]["jax"] and len(report["runs"]) == 2
    table = (tmp_path / "table1" / "table.md").read_text()
    assert "| workers | 100 | 200 | 300 |" in table
    (tmp_path / "table1" / "table.md").unlink()
    assert hogwild.main(["table1", "--redraw", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "table1" / "table.md").read_text() == table and len(measured) == 4


HOSTILE = """
import os, socket, sys
try: open({escaped!r}, "w").write("out")
except OSError: pass
try: socket.create_connection(("127.0.0.1", {port}), 1).send(b"out")
except OSError: pass
for number in range(3, 64):
    try: os.write(number, b'{{"error": null}}')
    except OSError: pass
os._exit(0)
"""
RIGHT = "def square(x):\n    return x * x\n"


def test_a_hostile_program_is_wrong_and_reaches_nothing(tmp_path, monkeypatch, capsys):
    """The runs are a stand-in's, whose workers write the hostile program and whose baseline a right
    one; the judge of programs is the real one."""
    escaped = tmp_path / "escaped"
    hostile = HOSTILE.format(escaped=str(escaped), port=9)
    task = {"problem": "Write square(x).", "tests": "assert square(3) == 9"}
    (tmp_path / "own.jsonl").write_text(json.dumps(task) + "\n")

    def execute(model, concurrency=None):
        def run(specs, on_pass):
            for spec in specs:
                program = hostile if spec.method == "workers" else RIGHT
                answer = {"value": program, "text": "", "passes": 8, "extra_passes": 0}
                answers = {str(budget): answer for budget in spec.budgets}
                result = {"answers": answers, "workers": {}, "passes": 8}
                fields = spec.workers, spec.problem, spec.number, spec.seed, spec.text
                yield spec, Run(*fields, result)

        return run

    monkeypatch.setattr(hogwild_cases.execution, "execute", execute)
    arguments = ["figure4", "--quick", "--task", str(tmp_path / "own.jsonl"), "--budgets", "8"]
    arguments += ["--problems", "1", "--out", str(tmp_path / "out"), "--json"]
    assert hogwild.main(arguments) == 0
    baseline, workers = json.loads(capsys.readouterr().out)["results"]["panels"][0]["lines"]
    assert baseline["points"][0]["accuracy"] == 1 and workers["points"][0]["accuracy"] == 0
    assert workers["marked"]["sandbox"] == sandbox.ways()[0].name
    assert not escaped.exists() or len(sandbox.ways()) == 1  # which a notice says


def test_settings_can_be_kept_as_json():
    for figure in FIGURES:
        for panel in panels_of(figure, FigureSettings((MODEL,))):
            saved = json.loads(json.dumps(dataclasses.asdict(panel)))
            assert hogwild_accuracy.Panel.read(saved) == panel
