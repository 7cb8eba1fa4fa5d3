"""The files of commands: a place that cannot be written is named before any work, and a full disk
costs no result."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest

from jaxshare import FinishReason, __version__, models
from jaxshare.serving.checkpoints import CheckpointStore, SaveError
from jaxshare.serving.cli import main
from jaxshare.serving.evaluation import runs
from jaxshare.serving.kvcache import sharing_cost
from jaxshare.serving.locks import OutputLock
from jaxshare.serving.tuning import calibration
from jaxshare.serving.workers.inspection import plots
from jaxshare.serving.workers.inspection.probe import BlockExtent, Listed, Snapshot
from jaxshare.serving.workers.results import Answer, Result
from tests.helpers import mostly_slow
from tests.serving.cli.test_main import PROBLEM

FULL = Path("/dev/full")
RUN = runs.Run(2, "1", 0, 0, "", {"workers": {}, "answers": {}, "passes": 0})
full_disk = pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main.main(arguments)
    return code, *capsys.readouterr()


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with a file, a folder, a snapshot and a program of agents; commands begin in it."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("before", encoding="utf-8")
    Path("folder").mkdir()
    Snapshot(1, (BlockExtent("prompt", 0, 2, 2, 8),), {"Alice": (Listed("prompt", 0, 2),)}).save(
        "run.json"
    )
    Path("agent.py").write_text("raise RuntimeError('it was loaded')\n", encoding="utf-8")
    (tmp_path / "evaluated").mkdir()
    return tmp_path


# The model does not exist: an error that names it would say that the place was looked at too late.
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "workers no/model --problem x --save missing/x.json",
            "--save is 'missing/x.json', but there is no folder missing; give a file in",
        ),
        ("workers no/model --problem x --save folder", "--save is 'folder', but that is a folder"),
        (
            "workers no/model --problem x --trace missing/x",
            "--trace is 'missing/x', but there is no folder missing",
        ),
        ("workers no/model --problem x --trace ''", "--trace is '', but that is a folder"),
        (
            "workers no/model --problem x --checkpoint file",
            "--checkpoint is 'file', but that is a file; give a folder that can be written",
        ),
        (
            "workers no/model --problem x --checkpoint file/a/b",
            "--checkpoint is 'file/a/b', but {0}/file is a file",
        ),
        (
            "evaluate no/model --task no.jsonl --budgets 8 --out file",
            "--out is 'file', but that is a file",
        ),
        (
            "batch no/model --input no.jsonl --output missing/x",
            "--output is 'missing/x', but there is no folder missing",
        ),
        (
            "batch no/model --input no.jsonl --output folder",
            "--output is 'folder', but that is a folder",
        ),
        (
            "agents run agent.py --trace missing/x",
            "--trace is 'missing/x', but there is no folder missing",
        ),
        ("agents run agent.py --plots file", "--plots is 'file', but that is a file"),
        ("inspect run.json --out file", "--out is 'file', but that is a file"),
        ("convert no/model file/target", "TARGET is 'file/target', but {0}/file is a file"),
        ("tune --model no/model --output folder", "--output is 'folder', but that is a folder"),
        (
            "tune --model no/model",
            "JAXSHARE_CACHE is '{0}/file/cache/tiles.json', but {0}/file is a file",
        ),
        (
            "calibrate no/model",
            "JAXSHARE_CACHE is '{0}/file/cache/costs.json', but {0}/file is a file",
        ),
    ],
)
def test_places_are_looked_at_before_any_work(place, capsys, monkeypatch, command, words):
    monkeypatch.setenv("JAXSHARE_CACHE", str(place / "file" / "cache"))
    before = sorted(place.rglob("*"))
    code, out, err = run(capsys, *shlex.split(command))
    assert (code, out) == (1, "") and words.format(place) in err and err.count("\n") == 1
    assert sorted(place.rglob("*")) == before and Path("file").read_text() == "before"


@pytest.mark.skipif(
    not Path("/proc/self").is_dir(), reason="needs a folder in which even root can make no file"
)
@pytest.mark.parametrize(
    "command",
    [
        "workers no/model --problem x --save /proc/x.json",
        "workers no/model --problem x --trace /proc/x",
        "batch no/model --input x --output /proc/x",
        "workers no/model --problem x --checkpoint /proc/x",
        "evaluate no/model --task x.jsonl --budgets 8 --out /proc/x/y",
        "agents run agent.py --plots /proc/x",
        "inspect run.json --out /proc/x",
        "convert no/model /proc/x",
        "tune --output /proc/x --model x",
    ],
)
def test_folders_that_nothing_can_be_written_in_are_named(place, capsys, command):
    code, out, err = run(capsys, *shlex.split(command))
    assert (code, out) == (1, "") and "but nothing can be written in /proc (" in err


def test_nothing_is_made_for_a_run_that_fails_later(place, capsys):
    before = sorted(place.rglob("*"))
    for command in (
        "workers no/model --problem x --save x.json --trace x.trace --checkpoint saves",
        "convert no/model target",
        "batch no/model --input in --output out",
        "evaluate no/model --task sums --budgets 8 --out out/put",
    ):
        (place / "in").write_text('{"prompt": "x"}\n', encoding="utf-8")
        code, _, err = run(capsys, *shlex.split(command))
        (place / "in").unlink()
        assert code == 1 and "no/model" in err
        assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("workers no/model --problem x --save {}", "x.json"),
        ("workers no/model --problem x --trace {}", "x.trace"),
        ("workers no/model --problem x --checkpoint {}", "saves/"),
        ("batch no/model --input in --output {}", "out.jsonl"),
        ("evaluate no/model --task sums --budgets 8 --out {}", "evaluated/"),
        ("judge judged --endpoint http://localhost:1/v1 --model m", "judged/gradings.jsonl"),
        ("agents run agent.py --trace {}", "trace.json"),
        ("agents run agent.py --plots {}", "plots/"),
        ("inspect run.json --out {}", "pictures/"),
        ("convert no/model {}", "target"),
    ],
)
def test_an_output_that_another_has_is_named_before_any_work(place, capsys, command, output):
    Path("in").write_text('{"prompt": "x"}\n', encoding="utf-8")
    Path("judged").mkdir()
    (place / "judged" / "settings.json").write_text(
        json.dumps({"format": "jaxshare evaluation 2", "settings": {"method": "workers"}})
    )
    with open("judged/runs.jsonl", "ab") as file:
        runs.write_run(file, RUN)
    lock = OutputLock.of_folder if output.endswith("/") else OutputLock.of_file
    before = sorted(place.rglob("*"))
    with lock(output, ""):
        locked = sorted(place.rglob("*"))
        code, _, err = run(capsys, *shlex.split(command.format(output)))
        assert sorted(place.rglob("*")) == locked
    assert code == 1 and err.count("\n") == 1
    assert f"the output {output.rstrip('/')} is being written by this process already; " in err
    assert sorted(place.rglob("*")) == before


# Disks that are full by then.


class Session:
    """Stands in for `Workers`: its first save fails, and so does the one that its end waits for."""

    names, passes, settings = ("Alice",), 0, MappingProxyType({})
    result = Result(
        ("Alice",), [], {8: Answer("85", "85", 8, 0)}, 8, FinishReason.ANSWER, 0.5, 0.1, 64, 2.5
    )

    def __init__(self, model, **settings):
        self.runs: list[str | None] = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.runs[0]:
            raise SaveError("the last save is not whole")

    def run(self, finish_at, *, on_event, save_to=None, save_every=0):
        self.runs.append(save_to)
        if save_to and "first" in save_to:
            raise SaveError("nothing could be saved")
        return self.result

    @property
    def trace(self):
        return SimpleNamespace(save=lambda file: Path(file).write_text("x" * 10**6))


@full_disk
@pytest.mark.parametrize(
    ("saves", "said"),
    [
        (
            "first",
            [
                "nothing could be saved; the session goes on without saves",
                "jaxshare: error: nothing could be saved",
            ],
        ),
        ("last", ["jaxshare: error: the last save is not whole"]),
    ],
)
def test_a_session_goes_on_where_its_saves_cannot_be_written(
    capsys, tmp_path, monkeypatch, saves, said
):
    monkeypatch.setattr("jaxshare.serving.cli.workers.Workers", Session)
    monkeypatch.setattr(
        models,
        "load",
        lambda *_, **__: SimpleNamespace(generation=models.Generation(), tokenizer=object()),
    )
    code, out, err = run(
        capsys,
        "workers",
        "m",
        "--problem",
        "x",
        "--json",
        "--checkpoint",
        str(tmp_path / saves),
        "--trace",
        str(FULL),
    )
    assert (
        code == 1
        and json.loads(out) == Session.result.as_json()
        and json.loads(out)["compile_seconds"] == 2.5
    )
    assert (
        all(line in err for line in said)
        and "No space left on device); give another place to --trace" in err
    )


@pytest.mark.slow
@full_disk
def test_workers_print_their_result_where_nothing_can_be_saved(capsys, tmp_path, monkeypatch):
    def save(*_, **__):
        raise SaveError("nothing could be saved (the disk is full)")

    monkeypatch.setattr(CheckpointStore, "save", save)
    code, out, err = run(
        capsys,
        "workers",
        "embedded",
        "--problem",
        PROBLEM,
        "--budget",
        "320",
        "--finish-at",
        "32,320",
        "--json",
        "--save",
        str(FULL),
        "--trace",
        str(tmp_path / "run.trace"),
        "--checkpoint",
        str(tmp_path / "saves"),
        "--checkpoint-every",
        "16",
    )
    assert code == 1
    result = json.loads(out)
    assert (
        result["answers"]["320"]["value"] == "85, 84, 73, 67, 45"
        and result["answers"]["32"]["passes"] == 32
    )
    assert result["compile_seconds"] >= 0
    assert (
        "the session goes on without saves" in err
        and "No space left on device); give another place to --save" in err
    )
    assert "jaxshare: error: nothing could be saved (the disk is full)" in err
    assert (tmp_path / "run.trace").is_file() and FULL.is_char_device()


@full_disk
def test_agents_print_their_result_where_no_trace_can_be_written(capsys, tmp_path):
    file = tmp_path / "one.py"
    file.write_text(
        "from jaxshare.serving.agents import agent\n@agent\nasync def one():\n    return "
        "7\n\nAGENT, MODEL = one, 'scripted'\ndef scripted(): return None\n",
        encoding="utf-8",
    )
    code, out, err = run(capsys, "agents", "run", str(file), "--json", "--trace", str(FULL))
    assert code == 1 and json.loads(out)["value"] == 7 and json.loads(out)["written"] == []
    assert "No space left on device); give another place to --trace or --plots" in err


def test_pictures_that_cannot_be_written_leave_the_tables(place, capsys, monkeypatch):
    pytest.importorskip("matplotlib")

    class Figure:
        def savefig(self, file):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(plots, "cache_picture", lambda snapshot: Figure())
    code, out, err = run(capsys, "inspect", "run.json", "--out", "folder", "--json")
    assert code == 1 and json.loads(out)["passes"] == 1 and json.loads(out)["pictures"] == []
    assert "the pictures cannot be written to folder" in err and "--out" in err
    code, out, err = run(capsys, "inspect", "run.json", "--out", "folder")
    assert code == 1 and "prompt" in out and "No space left" in err


def test_costs_that_cannot_be_kept_are_printed(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSHARE_CACHE", str(tmp_path))

    def save(*_):
        raise OSError(28, "No space left on device")

    costs = sharing_cost.DEFAULT
    points = [calibration.Timing(2, 64, 128, shared, 5.0) for shared in (True, False)]
    monkeypatch.setattr(models, "load", lambda *_, **__: None)
    monkeypatch.setattr(calibration, "calibrate", lambda model: (costs, points))
    monkeypatch.setattr(sharing_cost, "save_costs", save)
    code, out, err = run(capsys, "calibrate", "m", "--json")
    found = json.loads(out)
    assert code == 1 and found["costs"] == costs.as_json() and found["file"] is None
    assert "No space left" in err and "JAXSHARE_CACHE" in err


@full_disk
@pytest.mark.parametrize("unbuffered", mostly_slow(["", "1"]))
def test_a_full_standard_output_is_said_in_a_sentence(place, unbuffered):
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "jaxshare.serving.cli", "inspect", "run.json", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 1 and done.stderr.splitlines() == [
        "jaxshare: error: the standard output cannot be written (No space left on device); make "
        "room on its disk, or give another place"
    ]


# What all commands take.


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main.main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"jaxshare {__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        "generate no/model --prompt x --debug",
        "--debug generate no/model --prompt x",
        "workers no/model --problem x --debug",
        "batch no/model --input in --output out --debug",
        "evaluate no/model --task sums --budgets 8 --out out --debug",
        "judge folder --endpoint http://x/v1 --model m --debug",
        "convert no/model target --debug",
        "calibrate no/model --debug",
        "tune --model no/model --debug",
        "inspect no.json --debug",
        "agents run agent.py --debug -- x",
        "--debug agents run agent.py -- x",
        "demo --debug --model no/model",
    ],
)
def test_debug_shows_the_traceback_of_every_command(place, capsys, monkeypatch, command):
    monkeypatch.setenv("JAXSHARE_CACHE", str(place / "cache"))
    code, out, err = run(capsys, *shlex.split(command))
    *traceback, last = err.splitlines()
    expected = 2 if command.startswith("batch") else 1  # its input is refused
    assert (
        (code, out) == (expected, "")
        and last.startswith("jaxshare: error: ")
        and last not in traceback
    )
    assert "Traceback (most recent call last):" in traceback and any(
        line.startswith('  File "') for line in traceback
    )
    code, _, err = run(capsys, *[word for word in shlex.split(command) if word != "--debug"])
    assert code == expected and err.splitlines() == [last]


def test_a_mistake_in_jaxshare_keeps_its_traceback(monkeypatch, tmp_path):
    def broken(*_, **__):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(models, "load", broken)
    monkeypatch.setenv("JAXSHARE_CACHE", str(tmp_path))
    for arguments in (["calibrate", "m"], ["calibrate", "m", "--debug"]):
        with pytest.raises(RuntimeError, match="a mistake"):
            main.main(arguments)
