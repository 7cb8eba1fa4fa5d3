"""Folders of the papers' experiments: points survive, other experiments are kept out by name."""

import argparse
import json

import pytest

from jaxshare import models
from jaxshare.models import EMBEDDED
from scripts.papers import folder

SETTINGS = {"batches": [1, 8], "seed": 0}
NAME = "hydragen throughput"


@pytest.fixture(scope="module")
def model():
    return models.load(EMBEDDED)


def opened(path, model, settings=SETTINGS, name=NAME, *, resume=False):
    return folder.opened(path, name, settings, model, resume=resume, command="python -m it")


def test_points_are_there_again_after_an_interruption(tmp_path, model):
    with pytest.raises(KeyboardInterrupt), opened(tmp_path, model) as first:
        first.add({"batch": 1, "prefix": 2}, {"seconds": [0.5]})
        raise KeyboardInterrupt
    with open(tmp_path / folder.POINTS, "ab") as file:
        file.write(b'{"key": {"batch": 8')  # a killed process was at it
    with opened(tmp_path, model, resume=True) as second:
        assert {"prefix": 2, "batch": 1} in second and {"batch": 8, "prefix": 2} not in second
        second.add({"batch": 8, "prefix": 2}, {"seconds": [0.7]})
        report = second.report({"found": 1})
    read = folder.PaperFolder.read(tmp_path, NAME)
    assert read.points() == [
        ({"batch": 1, "prefix": 2}, {"seconds": [0.5]}),
        ({"batch": 8, "prefix": 2}, {"seconds": [0.7]}),
    ]
    assert read.value({"batch": 8, "prefix": 2}) == {"seconds": [0.7]}
    assert len(read.runs) == 2 and all(run["machine"]["cores"] >= 1 for run in read.runs)
    saved = json.loads((tmp_path / folder.RESULT).read_text())
    del saved["checksum"]
    assert saved == report and saved["model"]["weights"] == model.fingerprint
    assert saved["versions"]["jax"] and saved["results"] == {"found": 1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"settings": {**SETTINGS, "seed": 1}}, "began with seed 0, not 1"),
        ({"name": "hydragen apps"}, "has the experiment 'hydragen throughput'"),
        ({"resume": False}, "--resume goes on"),
    ],
)
def test_another_experiment_is_kept_out(tmp_path, model, change, said):
    with opened(tmp_path, model):
        pass
    with (
        pytest.raises(ValueError, match=said),
        opened(tmp_path, model, **{"resume": True, **change}),
    ):
        pass


def test_another_model_is_kept_out(tmp_path, model):
    with opened(tmp_path, model):
        pass
    other = models.load(EMBEDDED, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"another model.*dtype"):
        opened(tmp_path, other, resume=True).__enter__()


def test_a_damaged_line_is_named(tmp_path, model):
    with opened(tmp_path, model) as first:
        first.add({"batch": 1}, 5)
    path = tmp_path / folder.POINTS
    path.write_bytes(path.read_bytes().replace(b'"value": 5', b'"value": 6'))
    with pytest.raises(ValueError, match=r"line 2 of .*points.jsonl is damaged.*checksum"):
        folder.PaperFolder.read(tmp_path, NAME)


def test_one_process_at_a_time_writes_a_folder(tmp_path, model):
    with opened(tmp_path, model), pytest.raises(ValueError, match=r"in use|this process"):
        opened(tmp_path, model, resume=True).__enter__()


def test_refusals_are_one_sentence_and_a_code(capsys):
    def refuse():
        raise ValueError("--batches is 0; give 1 or more")

    def interrupt():
        raise KeyboardInterrupt

    assert folder.exit_code("it", refuse) == 2 and folder.exit_code("it", interrupt) == 130
    assert capsys.readouterr().err.splitlines() == [
        "it: --batches is 0; give 1 or more",
        "it: interrupted; --resume goes on after the last point",
    ]


def test_arguments_are_checked_before_any_work(tmp_path, capsys):
    parser = folder.Parser(prog="it")
    folder.add_arguments(parser)
    for arguments, said in (
        (["--output", str(tmp_path), "--seed", "-1"], "--seed is -1"),
        (["--output", str(tmp_path), "--resume", "--redraw"], "--resume and --redraw"),
        (["--output", __file__], "--output is"),
        ([], "--output"),
    ):
        with pytest.raises(SystemExit):
            folder.check_arguments(parser, parser.parse_args(arguments))
        assert said in capsys.readouterr().err
    given = parser.parse_args(["--output", str(tmp_path)])
    assert isinstance(given, argparse.Namespace) and given.model == EMBEDDED and given.tensor == 1
