"""Everything that writes files, with random content: the table of the tests and the drill."""

import contextlib
import dataclasses
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from jaxshare.paths import write_json
from jaxshare.serving import jsonl
from jaxshare.serving.agents.journal import Journal
from jaxshare.serving.cli.evaluation import judge as judge_command
from jaxshare.serving.cli.evaluation import plan, report
from jaxshare.serving.evaluation import plot
from jaxshare.serving.evaluation.folder import RUNS, SCORES, TABLE
from jaxshare.serving.evaluation.judge import Grading
from tests.core.trace.test_trace import random_session
from tests.drill import server_writers
from tests.drill.disk_faults import Writer
from tests.drill.kinds import nothing, quietly, random_journal, random_log, random_snapshot, words
from tests.serving.cli.test_batch import LINES, job_in
from tests.serving.evaluation.test_evaluate import Letters, evaluation_in

Make = Callable[[Path, random.Random], Writer]
"""Makes an action that writes in an empty folder."""


def whole_file(folder: Path, writes: Callable[[Path], Any], writes_new: Callable[[Path], Any]):
    """The writer of one file: the old content or the new one, and nothing beside it."""
    inside, texts = folder / "folder", []
    file = inside / "file.json"
    for write in (writes, writes_new):
        write(file)
        texts.append(file.read_bytes())
    assert texts[0] != texts[1]

    def after(done: bool) -> None:
        assert file.read_bytes() in (texts[1:] if done else texts), "it is neither"
        assert [*inside.iterdir()] == [file], "something is left beside it"

    return Writer(inside, lambda: _only(file, {file: texts[0]}), lambda: writes_new(file), after)


def _only(file: Path, contents: dict[Path, bytes]) -> None:
    """Leaves these files alone in the folder of a file."""
    for path in file.parent.iterdir():
        path.unlink()
    for path, content in contents.items():
        path.write_bytes(content)


def _of(make: Callable[[random.Random], Any]) -> Make:
    """The writer of values that have a method `save`."""

    def made(folder: Path, rng: random.Random) -> Writer:
        old, new = make(rng), make(rng)
        return whole_file(folder, old.save, new.save)

    return made


def _trace(rng: random.Random) -> Any:
    return random_session(rng.randrange(10**6))[0].trace()


def _lines(folder: Path, rng: random.Random) -> Writer:
    def write(file: Path, count: int) -> None:
        jsonl.write(file, [b"line\n"] * count, "go on with --resume")

    old, new = rng.randrange(1, 5000), rng.randrange(5000, 20_000)
    return whole_file(folder, lambda file: write(file, old), lambda file: write(file, new))


def _json(folder: Path, rng: random.Random) -> Writer:
    old, new = {"costs": rng.random()}, {"costs": [rng.random()] * rng.randrange(3000)}
    return whole_file(
        folder, lambda file: write_json(file, old), lambda file: write_json(file, new)
    )


def batch_job(folder: Path, rng: random.Random, lives: int | None) -> Writer:
    """A batch job that starts or, with `lives`, goes on after as many completions."""
    job, inside = job_in(folder), folder / "out"
    inside.mkdir()
    lines = [*LINES, {"prompt": words(rng), "n": rng.randrange(1, 4)}]
    given = ("--n", "2", "--max-new-tokens", "3", "--seed", str(rng.randrange(99)))

    def run(*more: str, name: str = "out/x", **options: Any) -> None:
        with quietly():
            job(lines, *given, *more, name=name, **options)

    run(name="unbroken")
    begun = {}
    if lives:
        with contextlib.suppress(RuntimeError):
            run(lives=lives)
            raise AssertionError("it was not broken off")
        begun = {path: path.read_bytes() for path in inside.iterdir()}

    def is_complete() -> None:
        raise AssertionError("it is complete, and samples again")

    def after(done: bool) -> None:
        assert {path.name for path in inside.iterdir()} <= {"x", "x.job"}
        if not done:
            run("--resume")
        assert (inside / "x").read_bytes() == (folder / "unbroken").read_bytes()
        run("--resume", load=is_complete)

    return Writer(inside, lambda: _only(inside / "x", begun), lambda: run("--resume"), after)


def evaluation(folder: Path, rng: random.Random) -> Writer:
    """An evaluation, from its start to its table."""
    run = evaluation_in(folder)
    seed = ("--seed", str(rng.randrange(99)))

    def act(**options: Any) -> None:
        with contextlib.ExitStack() as patches:
            patches.enter_context(quietly())
            for module in (report, plan):
                patches.enter_context(mock.patch.object(module, "Mathematician", Letters))
            patches.enter_context(mock.patch.object(plot, "available", lambda: False))
            run("--resume", *seed, **options)

    act(out="unbroken")

    def after(done: bool) -> None:
        if not done:
            act()
        for name in (RUNS, SCORES, TABLE):
            found, unbroken = run.out / name, folder / "unbroken" / name
            assert sorted(found.read_bytes().split(b"\n")) == sorted(
                unbroken.read_bytes().split(b"\n")
            ), f"{name} differs from that of the unbroken evaluation"

    return Writer(run.out, lambda: shutil.rmtree(run.out, ignore_errors=True), act, after)


def _gradings(folder: Path, rng: random.Random) -> Writer:
    """The gradings of a judge: those that were written are there, whole."""
    settings, graded = {"problems": [words(rng)]}, folder / "graded"
    gradings = [
        Grading(2, f"problem {n}", 0, 0, rng.randrange(1, 7), words(rng))
        for n in range(rng.randrange(2, 6))
    ]
    written: list[Grading] = []

    def before() -> None:
        shutil.rmtree(graded, ignore_errors=True)
        graded.mkdir()
        written.clear()

    def act() -> None:
        with contextlib.ExitStack() as files:
            file, found = judge_command._open(files, graded, settings)
            for grading in gradings:
                if grading not in found.values():
                    jsonl.append(file, dataclasses.asdict(grading), "--resume goes on", sync=True)
                    written.append(grading)

    def after(done: bool) -> None:
        with contextlib.ExitStack() as files:
            _, found = judge_command._open(files, graded, settings)
        assert all(grading in found.values() for grading in written), "one is lost"
        act()
        with contextlib.ExitStack() as files:
            _, found = judge_command._open(files, graded, settings)
        assert sorted(map(repr, found.values())) == sorted(map(repr, gradings))

    return Writer(graded, before, act, after)


def growing_journal(folder: Path, rng: random.Random) -> Writer:
    """Entries of a journal that grows in a file; none that was recorded is lost."""
    file, written = folder / "journal", []
    entries = random_journal(rng)._entries

    def before() -> None:
        file.unlink(missing_ok=True)
        written.clear()

    def act() -> None:
        with Journal.open(file) as journal:
            journal.begin(nothing, (), {}, 0)
            for key, entry in entries.items():
                if key not in journal._entries:
                    journal._keep(key, entry, entry.messages, entry.spent)
                    written.append(key)

    def found() -> Any:
        with Journal.open(file, pickles=True) as journal:
            return dict(journal._entries)

    def after(done: bool) -> None:
        assert {*written} <= found().keys(), "one is lost"
        act()
        assert found() == entries

    return Writer(folder, before, act, after)


WHOLE_FILES: dict[str, Make] = {
    "journal": _of(random_journal),
    "search log": _of(random_log),
    "snapshot": _of(random_snapshot),
    "trace": _of(_trace),
    "lines": _lines,
    "numbers": _json,
}
"""What is written in one piece."""

JOBS: dict[str, Make] = {
    "batch job": lambda folder, rng: batch_job(folder, rng, None),
    "batch job that goes on": lambda folder, rng: batch_job(folder, rng, rng.randrange(2, 8)),
    "evaluation": evaluation,
    "gradings": _gradings,
    "growing journal": growing_journal,
    "batch over HTTP": server_writers.batch_over_http,
    "upload": server_writers.upload,
}
"""What is written bit by bit, and goes on after a fault."""

WRITERS = WHOLE_FILES | JOBS
