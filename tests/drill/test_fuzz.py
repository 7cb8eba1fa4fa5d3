"""Contents that once ended in a traceback, or took too much, are values or sentences now.

New ones are found by the part `fuzz` of the drill, which keeps what fails in the system's folder of
temporary files; they belong to tests/fixtures/fuzz, in the folder of their kind.
"""

import subprocess
import sys

import hypothesis
import pytest

from jaxshare.models import chat_rendering
from scripts.drill import fuzz, reader
from tests.drill.fuzz_targets import TARGETS, Target, wrong
from tests.paths import ROOT

CORPUS = sorted((ROOT / "tests" / "fixtures" / "fuzz").glob("*/*"))
QUICK = [kind for kind in TARGETS if kind != "checkpoint"]


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(
            file,
            id=f"{file.parent.name}-{file.name}",
            marks=[pytest.mark.slow] if file.parent.name == "checkpoint" else [],
        )
        for file in CORPUS
    ],
)
def test_what_once_failed(tmp_path, monkeypatch, file):
    monkeypatch.setattr(chat_rendering, "RENDER_SECONDS", 1.0)
    assert not wrong(file.parent.name, tmp_path, file.read_bytes())


@pytest.mark.parametrize("kind", QUICK)
def test_a_valid_content_is_read(tmp_path, kind):
    target = TARGETS[kind]
    assert not wrong(kind, tmp_path, target.valid())
    target.read(tmp_path)
    if target.encode:
        (tmp_path / target.file).write_bytes(target.encode(target.value()))
        target.read(tmp_path)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (SystemExit(), "SystemExit"),
        (ValueError("two\nlines of {folder}"), "an error in several lines"),
        (ValueError("it is damaged"), "an error that does not name the file"),
        (ValueError("{folder} " + "x" * 30_000), "an error of 30"),
        (PermissionError("{folder}"), "PermissionError"),
    ],
)
def test_an_error_that_is_no_sentence_is_found(tmp_path, monkeypatch, error, words):
    def read(folder):
        raise type(error)(*(str(word).replace("{folder}", str(folder)) for word in error.args))

    monkeypatch.setitem(TARGETS, "config", Target("config.json", lambda: b"{}", read))
    assert wrong("config", tmp_path, b"{}").startswith(words)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise SystemExit(3)", "it ends the process, with status 3"),
        ("import time; time.sleep(60)", "it takes more than"),
    ],
)
def test_a_reader_that_takes_too_long_or_ends_its_process_is_found(monkeypatch, program, words):
    popen, command = subprocess.Popen, [sys.executable, "-S", "-c", f"input(); {program}"]
    monkeypatch.setattr(reader, "_START_SECONDS", 0.5)
    monkeypatch.setattr(reader, "_END_SECONDS", 0.1)
    monkeypatch.setattr(subprocess, "Popen", lambda _, **more: popen(command, **more))
    asked = reader.Reader("any")
    assert asked.ask({}, 0.3)["wrong"].startswith(words)
    asked.close()


def drawn(seed: int) -> list[bytes]:
    """The contents of a seed."""
    found: list[bytes] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=60, database=None, phases=[hypothesis.Phase.generate])
    @hypothesis.given(fuzz.contents(TARGETS["generation"]))
    def keep(content: bytes) -> None:
        found.append(content)

    keep()
    return found


def test_the_contents_of_a_seed_are_the_same_and_of_many_forms():
    assert drawn(3) == drawn(3) and len({*drawn(3)}) > 30
