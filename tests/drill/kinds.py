"""Every kind of file that is read back, with random content: the table of the tests and the drill."""

import contextlib
import dataclasses
import functools
import os
import random
import shutil
import string
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from jaxshare import Sampler
from jaxshare.models.config import ModelConfig
from jaxshare.models.safetensors_files import stored_tensors
from jaxshare.serving import checksums, jsonl
from jaxshare.serving.agents import agent
from jaxshare.serving.agents.journal import Journal
from jaxshare.serving.agents.requests import Message
from jaxshare.serving.agents.search_log import LoggedRun, LoggedState, SearchLog
from jaxshare.serving.checkpoints import CheckpointStore, SavedCheckpoint, SaveError
from jaxshare.serving.cli.evaluation import judge as judge_command
from jaxshare.serving.evaluation import folder as evaluation_folder
from jaxshare.serving.evaluation import runs, scoring
from jaxshare.serving.evaluation.judge import Grading
from jaxshare.serving.workers.inspection.probe import (
    AttentionShare,
    BlockExtent,
    Listed,
    Snapshot,
)
from jaxshare.trace.trace import Trace
from tests.core.trace.test_trace import random_session
from tests.drill.damage import Readable
from tests.paths import ROOT
from tests.serving.cli.test_batch import LINES, job_in

Kind = Callable[[Path, random.Random], Sequence[Readable]]
"""Makes the files of a kind in an empty folder."""


def words(rng: random.Random, most: int = 40) -> str:
    """A random text, some of it not of ASCII."""
    letters = string.ascii_letters + string.digits + ' \n"\\{}[]:,é漢☃\u2028'
    return "".join(rng.choice(letters) for _ in range(rng.randrange(1, most)))


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Runs a command without its lines."""
    with open(os.devnull, "w") as none, contextlib.ExitStack() as both:
        both.enter_context(contextlib.redirect_stderr(none))
        both.enter_context(contextlib.redirect_stdout(none))
        yield


def random_journal(rng: random.Random, journal: Journal | None = None) -> Journal:
    """A journal with values, errors and pickles."""
    journal = journal or Journal()
    for number in range(rng.randrange(3, 8)):
        key = f"{words(rng, 8)}{number}", tuple(rng.randrange(4) for _ in range(rng.randrange(4)))
        spent = [rng.randrange(9) for _ in range(3)]
        if rng.random() < 0.2:
            journal.record_error(key, ValueError(words(rng)), spent)
        else:
            value = rng.choice([words(rng), rng.random(), None, {"a": [1, words(rng)]}, 1 + 2j])
            messages = (Message("user", words(rng)), Message("assistant", words(rng)))
            journal.record_value(key, value, messages, spent)
    return journal


def random_log(rng: random.Random) -> SearchLog:
    """A search log of one to three runs."""
    fates = ("accepted", "kept", "pruned", "failed", "waiting")

    def state(path: tuple[int, ...], parent: tuple[int, ...] | None) -> LoggedState:
        score = rng.choice([None, rng.random()])
        fate, value = rng.choice(fates), words(rng)
        return LoggedState(path, parent, fate, "end", rng.randrange(9), score, 1, value, 0.0, 0.25)

    def run(name: str) -> LoggedRun:
        states = (state((), None), *(state((n,), ()) for n in range(rng.randrange(1, 4))))
        error, counts = rng.choice([None, words(rng)]), [rng.randrange(99) for _ in range(3)]
        return LoggedRun(name, "one", "Single", None, 0.0, 0.25, *counts, words(rng), error, states)

    return SearchLog(tuple(run(f"run {n}") for n in range(rng.randrange(1, 4))))


def random_snapshot(rng: random.Random) -> Snapshot:
    """A snapshot of two workers and a prompt."""
    blocks = tuple(
        BlockExtent(name, 8 * n, rng.randrange(2, 9), 8, 256)
        for n, name in enumerate(("prompt", "Alice", "Bob"))
    )
    rows = {
        name: (Listed("prompt", 0, blocks[0].length), Listed(name, blocks[0].length, 2))
        for name in ("Alice", "Bob")
    }
    shares = tuple(AttentionShare(n, "Bob", {"prompt": rng.random()}) for n in range(2))
    return Snapshot(rng.randrange(1, 99), blocks, rows, shares)


def _saved(folder: Path, name: str, value: Any, least: int, every: int = 16) -> list[Readable]:
    """The file of a value that has `save` and `load`."""
    file = folder / name
    value.save(file)
    return [Readable(file, lambda: type(value).load(file), every, least=least)]


def _journal(folder: Path, rng: random.Random) -> list[Readable]:
    file = folder / "journal.json"
    random_journal(rng).save(file)

    def read() -> Any:
        entries = Journal.load(file)._entries
        return [(key, dataclasses.asdict(entry)) for key, entry in entries.items()]

    return [Readable(file, read, 16, least=31)]


@agent
async def nothing() -> None:
    """An agent of which a journal is."""


def _growing_journal(folder: Path, rng: random.Random) -> list[Readable]:
    """A journal that grows in a file: what is lost at its end is asked for again."""
    file = folder / "growing"
    with Journal.open(file) as journal:
        journal.begin(nothing, (), {}, 0)
        random_journal(rng, journal)
        entries = dict(journal._entries)

    def read() -> bool:
        with Journal.open(file, pickles=True) as journal:
            return all(entries[key] == entry for key, entry in journal._entries.items())

    return [Readable(file, read, 16, least=31)]


def _trace(folder: Path, rng: random.Random) -> list[Readable]:
    file = folder / "one.trace"
    random_session(rng.randrange(10**6))[0].trace().save(file)
    return [Readable(file, lambda: Trace.load(file).to_bytes(), 32, least=61)]


def _batch_job(folder: Path, rng: random.Random, is_begun: bool) -> list[Readable]:
    job = job_in(folder)
    lines = [*LINES, {"prompt": words(rng), "n": rng.randrange(1, 4)}]
    given = ("--n", "2", "--max-new-tokens", str(rng.randrange(2, 5)))
    seed, other = rng.sample(range(1000), 2)

    def run(seed: int, name: str, *more: str, **lives: int) -> None:
        with quietly():
            job(lines, *given, "--seed", str(seed), *more, name=name, **lives)

    for number, name in ((seed, "out.jsonl"), (other, "other")):
        if is_begun:
            with contextlib.suppress(RuntimeError):
                run(number, name, lives=rng.randrange(3, 8))
        else:
            run(number, name)

    def read() -> bytes:
        shutil.copy(job.output, folder / "again")
        shutil.copy(job.job, folder / "again.job")
        run(seed, "again", "--resume")
        return (folder / "again").read_bytes()

    # Lines that are sampled already have no settings, so that those of a job that has begun could
    # be of another one.
    others = None if is_begun else (folder / "other").read_bytes()
    return [
        Readable(job.output, read, name="the output", other=others, least=11),
        Readable(job.job, read, name="again", other=(folder / "other.job").read_bytes(), least=11),
    ]


def _evaluation(folder: Path, rng: random.Random) -> list[Readable]:
    settings = {"problems": [words(rng)], "method": "workers", "seed": 3}
    keys = {(2, str(problem), 0) for problem in range(4)}
    result = {"workers": ["Alice"], "answers": {"8": words(rng)}, "passes": 8, "words": "x" * 80}
    model, scratch = {"weights": "f" * 60}, folder / "scratch"
    made = {key: runs.Run(*key, rng.randrange(99), words(rng), result) for key in sorted(keys)}
    with contextlib.ExitStack() as files:
        file = evaluation_folder.create_runs(files, folder, settings, model)
        for run in made.values():
            runs.write_run(file, run)

    def read() -> list[str]:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        for name in (evaluation_folder.SETTINGS, evaluation_folder.RUNS):
            shutil.copy(folder / name, scratch)
        with contextlib.ExitStack() as files:
            file, found = evaluation_folder.open_runs(files, scratch, settings, True, keys)
            assert file
            lost = keys - {run.key for run in found}  # made again
            return sorted(map(repr, [*found, *(made[key] for key in lost)]))

    other = folder / "other"
    with contextlib.ExitStack() as files:
        evaluation_folder.create_runs(files, other, settings | {"seed": 4}, model)
    changed = (other / evaluation_folder.SETTINGS).read_bytes()
    return [
        Readable(folder / evaluation_folder.RUNS, read, least=11),
        # Where it says other settings, the error names the folder.
        Readable(
            folder / evaluation_folder.SETTINGS, read, name=str(scratch), other=changed, least=6
        ),
    ]


def _result(folder: Path, rng: random.Random) -> list[Readable]:
    settings = {"problems": [words(rng)], "method": "workers"}
    points = [scoring.Point(n, 64, rng.random(), 0.25, 0.75, 1.0, 4, 8) for n in (1, 2)]
    file = folder / evaluation_folder.RESULT

    def content(problems: list[str]) -> bytes:
        about = settings | {"problems": problems}
        result = {"settings": about, "points": [*map(dataclasses.asdict, points)]}
        return jsonl.line(checksums.sealed(result))

    file.write_bytes(content(settings["problems"]))
    return [
        Readable(
            file,
            lambda: evaluation_folder.read_lines(folder, settings),
            16,
            name=str(folder),
            other=content(["another"]),
            least=21,
        )
    ]


def _gradings(folder: Path, rng: random.Random) -> list[Readable]:
    settings = {"problems": [words(rng)], "method": "workers"}
    gradings = {
        (2, f"problem {n}", 0, 0): Grading(2, f"problem {n}", 0, 0, rng.randrange(1, 7), words(rng))
        for n in range(4)
    }
    graded, other, scratch = folder / "graded", folder / "other", folder / "scratch"
    for path, about in ((graded, settings), (other, settings | {"method": "sequential"})):
        path.mkdir()
        with contextlib.ExitStack() as files:
            file, _ = judge_command._open(files, path, about)
            for grading in gradings.values():
                jsonl.append(file, dataclasses.asdict(grading), "again")

    def read() -> bool:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(graded, scratch)
        with contextlib.ExitStack() as files:
            _, found = judge_command._open(files, scratch, settings)
        return all(gradings[key] == found[key] for key in found)  # lost ones are requested again

    changed = (other / judge_command.SETTINGS).read_bytes()
    return [
        Readable(graded / judge_command.GRADINGS, read, least=4),
        Readable(graded / judge_command.SETTINGS, read, name=str(scratch), other=changed, least=4),
    ]


def _model(folder: Path, rng: random.Random) -> list[Readable]:
    """Other programs' formats have no checksums, so numbers may change; what cannot be read is
    named, and nothing ends in a traceback."""
    shutil.copy(ROOT / "models" / "embedded" / "config.json", folder)
    tensors = {
        f"{name}.weight": np.full((4, rng.randrange(1, 9)), rng.random(), dtype)
        for name, dtype in (("a", np.float32), ("b", np.float16))
    }
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    config, weights = folder / "config.json", folder / "model.safetensors"
    return [
        Readable(config, lambda: ModelConfig.from_json(folder), 4, is_checked=False, least=61),
        Readable(weights, lambda: repr(stored_tensors(folder)), 4, is_checked=False, least=61),
    ]


def files_of_checkpoint(folder: Path, every: int) -> list[Readable]:
    """All files of the newest checkpoint of a folder; the one before it has the other contents."""
    with SavedCheckpoint(folder) as saved:
        number = saved.number

    def read() -> Any:
        with SavedCheckpoint(folder, number) as saved:
            arrays = saved.arrays()
            return repr(saved.metadata), {
                name: np.asarray(array).tobytes() for name, array in arrays.items()
            }

    found = []
    for file in sorted((folder / str(number)).rglob("*")):
        if file.is_file():
            # At most some 100 places of a large file, which take a checksum of it each.
            places = max(every, file.stat().st_size // 100)
            found.append(Readable(file, read, places, errors=(SaveError,), least=0))
    return found


def _checkpoint(folder: Path, rng: random.Random) -> list[Readable]:
    store, numbers = CheckpointStore(folder), np.random.default_rng(rng.randrange(10**6))
    arrays = {
        "keys.0": numbers.normal(size=(2, rng.randrange(20, 60))),
        "logits.tokens": np.arange(9),
        "none": np.ones(0),
    }
    for which in ("first", "second"):
        store.save(arrays, {"which": which, "words": words(rng)}, wait=True)
    store.close()
    return files_of_checkpoint(folder, 512)


@functools.cache
def _made_once(make: Callable[[Path], None]) -> tempfile.TemporaryDirectory[str]:
    """A folder with a checkpoint that takes seconds to compile what is in it."""
    made = tempfile.TemporaryDirectory(prefix="jaxshare-drill-")
    make(Path(made.name))
    return made


def _copied(make: Callable[[Path], None], folder: Path, _: random.Random) -> list[Readable]:
    shutil.copytree(_made_once(make).name, folder, dirs_exist_ok=True)
    return files_of_checkpoint(folder, EVERY_OF_SESSIONS)


EVERY_OF_SESSIONS = 64


def _save_session(folder: Path) -> None:
    from tests.serving.workers.test_checkpoint import saved_at

    saved_at(folder, 20, record=True).close()


def _save_engine(folder: Path) -> None:
    from tests.serving.engine.test_checkpoint import Stepped, asked

    with Stepped(256, logits_cache=10**6, kept_logits=8) as engine:
        asked(engine, sampler=Sampler(temperature=1.0), resample="stepwise")
        engine.save(folder, wait=True)


QUICK: dict[str, Kind] = {
    "journal": _journal,
    "growing journal": _growing_journal,
    "search log": lambda folder, rng: _saved(folder, "log.json", random_log(rng), 31),
    "snapshot": lambda folder, rng: _saved(folder, "value.json", random_snapshot(rng), 31),
    "trace": _trace,
    "batch job that has begun": lambda folder, rng: _batch_job(folder, rng, True),
    "batch job": lambda folder, rng: _batch_job(folder, rng, False),
    "evaluation": _evaluation,
    "result of an evaluation": _result,
    "gradings": _gradings,
    "model": _model,
}
"""The kinds that are made and read in milliseconds."""

CHECKPOINTS: dict[str, Kind] = {
    "checkpoint": _checkpoint,
    "checkpoint of a session": functools.partial(_copied, _save_session),
    "checkpoint of an engine": functools.partial(_copied, _save_engine),
}

KINDS = QUICK | CHECKPOINTS
"""Every kind of file that is read back."""
