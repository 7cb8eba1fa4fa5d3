"""Every kind of file that is read back, damaged in every 64th byte: the same result, or an error
that names the file."""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from jaxshare import Sampler
from jaxshare.models.config import ModelConfig
from jaxshare.models.safetensors_io import stored_tensors
from jaxshare.serving import checksums, jsonl
from jaxshare.serving.agents.journal import Journal
from jaxshare.serving.agents.search_log import LoggedRun, LoggedState, SearchLog
from jaxshare.serving.checkpoints import CheckpointStore, SavedCheckpoint, SaveError
from jaxshare.serving.cli.evaluation import judge as judge_command
from jaxshare.serving.evaluation import folder as evaluation_folder
from jaxshare.serving.evaluation import runs, scoring
from jaxshare.serving.evaluation.folder import RESULT
from jaxshare.serving.evaluation.judge import Grading
from jaxshare.serving.workers.inspection.probe import BlockExtent, Listed, Snapshot
from jaxshare.trace.trace import Trace
from tests.core.trace.test_trace import random_session
from tests.drill.damage import Outcome, damages, survive
from tests.paths import ROOT
from tests.serving.agents.test_journal import recorded
from tests.serving.cli.test_batch import LINES, job  # noqa: F401, a fixture

SNAPSHOT = Snapshot(1, (BlockExtent("prompt", 0, 2, 2, 8),), {"Alice": (Listed("prompt", 0, 2),)})
STATE = LoggedState((), None, "accepted", "end", 3, 0.5, 1, "'85'", 0.0, 0.25)
LOG = SearchLog(
    (LoggedRun("one", "one", "Single", None, 0.0, 0.25, 1, 7, 12, "'85'", None, (STATE,) * 3),)
)


def test_the_damages_are_flips_cuts_and_zeroes():
    content = bytes(range(130))
    found = dict(damages(content))
    assert len(found) == 9 and found["cut at byte 64"] == content[:64]
    assert found["bit 1 of byte 64 flipped"] == content[:64] + b"\x42" + content[65:]
    assert found["2 zeroes at byte 128"] == content[:128] + bytes(2)
    assert found["64 zeroes at byte 0"] == bytes(64) + content[64:]


def test_the_drill_finds_a_reader_that_takes_what_it_gets(tmp_path):
    file = tmp_path / "numbers.json"
    file.write_text(json.dumps([*range(10, 60)]))
    with pytest.raises(AssertionError, match=r"numbers.json, .* (flipped|zeroes|cut)"):
        survive(file, lambda: sum(json.loads(file.read_bytes())), name="numbers")
    sizes = {len(file.read_bytes()): 1}
    with pytest.raises(AssertionError, match=r"numbers\.json, cut at byte 0: KeyError"):
        survive(file, lambda: sizes[len(file.read_bytes())])
    assert json.loads(file.read_bytes()) == [*range(10, 60)], "it is as it was"


@pytest.mark.parametrize("lives", [4, None], ids=["begun", "complete"])
def test_a_batch_job(job, lives):  # noqa: F811
    given = (LINES, "--n", "2", "--max-new-tokens", "3")
    with contextlib.nullcontext() if lives is None else pytest.raises(RuntimeError):
        job(*given, lives=lives)

    def read():
        shutil.copy(job.output, job.folder / "again")
        shutil.copy(job.job, job.folder / "again.job")
        job(*given, "--resume", name="again")
        return (job.folder / "again").read_bytes()

    assert survive(job.output, read, name="the output").named > 10
    assert survive(job.job, read, name="again.job").named > 10


def test_a_journal(tmp_path):
    recorded().save(tmp_path / "journal.json")

    def read():
        journal = Journal.load(tmp_path / "journal.json")
        return [(key, dataclasses.asdict(entry)) for key, entry in journal._entries.items()]

    assert survive(tmp_path / "journal.json", read, every=16).named > 30


@pytest.mark.parametrize("value", [SNAPSHOT, LOG], ids=["snapshot", "search log"])
def test_snapshots_and_search_logs(tmp_path, value):
    value.save(tmp_path / "value.json")
    outcome = survive(
        tmp_path / "value.json", lambda: type(value).load(tmp_path / "value.json"), every=16
    )
    assert outcome.named > 30


def test_a_trace(tmp_path):
    random_session(0)[0].trace().save(tmp_path / "one.trace")
    outcome = survive(
        tmp_path / "one.trace", lambda: Trace.load(tmp_path / "one.trace").to_bytes(), every=32
    )
    assert outcome.named == outcome.cases > 60


def test_the_folder_of_an_evaluation(tmp_path):
    settings = {"problems": ["a"], "method": "workers", "seed": 3}
    keys = {(2, str(problem), 0) for problem in range(4)}
    result = {"workers": ["Alice"], "answers": {"8": "85"}, "passes": 8, "words": "x" * 80}
    with contextlib.ExitStack() as files:
        file = evaluation_folder.create_runs(files, tmp_path, settings, {"weights": "f" * 60})
        for count, problem, number in sorted(keys):
            runs.write_run(file, runs.Run(count, problem, number, 7, "what?", result))

    def read():
        scratch = tmp_path / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        for name in (evaluation_folder.SETTINGS, evaluation_folder.RUNS):
            shutil.copy(tmp_path / name, scratch)
        with contextlib.ExitStack() as files:
            file, made = evaluation_folder.open_runs(files, scratch, settings, True, keys)
            assert file
            for count, problem, number in sorted(keys - {run.key for run in made}):
                made.append(runs.Run(count, problem, number, 7, "what?", result))
        return sorted(map(repr, made))

    assert survive(tmp_path / evaluation_folder.RUNS, read).named > 10
    assert survive(tmp_path / evaluation_folder.SETTINGS, read).named > 5


def test_another_evaluation_and_gradings(tmp_path):
    settings = {"problems": ["a"], "method": "workers"}
    points = [scoring.Point(n, 64, 0.5, 0.25, 0.75, 1.0, 4, 8) for n in (1, 2)]
    result = {"settings": settings, "points": [*map(dataclasses.asdict, points)]}
    jsonl.write(tmp_path / RESULT, [jsonl.line(checksums.sealed(result))], "again")

    def read_result():
        return evaluation_folder.read_lines(tmp_path, settings)

    assert survive(tmp_path / RESULT, read_result, every=16).named > 20
    graded = tmp_path / "graded"
    graded.mkdir()
    with contextlib.ExitStack() as files:
        file, _ = judge_command._open(files, graded, settings)
        gradings = {
            (2, f"problem {n}", 0, 0): Grading(2, f"problem {n}", 0, 0, 1 + n, "They agree.")
            for n in range(4)
        }
        for grading in gradings.values():
            jsonl.append(file, dataclasses.asdict(grading), "again")

    def read_gradings():
        scratch = tmp_path / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(graded, scratch)
        with contextlib.ExitStack() as files:
            _, found = judge_command._open(files, scratch, settings)
        return all(gradings[key] == found[key] for key in found)  # lost ones are requested again

    for name in (judge_command.GRADINGS, judge_command.SETTINGS):
        assert survive(graded / name, read_gradings).named > 3


def test_models(tmp_path):
    """Other programs' formats have no checksums, so numbers may change; what cannot be read is
    named, and nothing ends in a traceback."""
    shutil.copy(ROOT / "models" / "embedded" / "config.json", tmp_path)
    tensors = {"a.weight": np.ones((4, 4), np.float32), "b.weight": np.ones(4, np.float16)}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    for name, read in (
        ("config.json", lambda: ModelConfig.from_json(tmp_path)),
        ("model.safetensors", lambda: repr(stored_tensors(tmp_path))),
    ):
        outcome = survive(tmp_path / name, read, every=4, is_checked=False)
        assert outcome.named > 60


def damaged_checkpoint(folder: Path, every: int) -> Outcome:
    """Damages every file of the newest checkpoint of a folder."""
    with SavedCheckpoint(folder) as saved:
        number = saved.number

    def read():
        with SavedCheckpoint(folder, number) as saved:
            arrays = saved.arrays()
            return repr(saved.metadata), {
                name: np.asarray(array).tobytes() for name, array in arrays.items()
            }

    whole = Outcome()
    for file in sorted((folder / str(number)).rglob("*")):
        if file.is_file():
            size = file.stat().st_size
            # At most some 100 places of a large file, which take a checksum of it each.
            found = survive(file, read, every=max(every, size // 100), errors=(SaveError,))
            whole.cases += found.cases
            whole.named += found.named
            whole.same += found.same
    return whole


def test_a_checkpoint(tmp_path):
    store, rng = CheckpointStore(tmp_path), np.random.default_rng(0)
    arrays = {"keys.0": rng.normal(size=(2, 40)), "logits.tokens": np.arange(9), "none": np.ones(0)}
    for which in ("first", "second"):
        store.save(arrays, {"which": which}, wait=True)
    store.close()
    outcome = damaged_checkpoint(tmp_path, 512)
    assert outcome.named > 30 and outcome.named + outcome.same == outcome.cases


@pytest.mark.slow
def test_checkpoints_of_a_session_and_of_an_engine_with_its_logits_cache(tmp_path):
    from tests.serving.engine.test_checkpoint import Stepped, asked
    from tests.serving.workers.test_checkpoint import saved_at

    saved_at(tmp_path / "session", 20, record=True)
    with Stepped(256, logits_cache=10**6, kept_logits=8) as engine:
        asked(engine, sampler=Sampler(temperature=1.0), resample="stepwise")
        engine.save(tmp_path / "engine", wait=True)
    for name in ("session", "engine"):
        outcome = damaged_checkpoint(tmp_path / name, 64)
        print(name, outcome)
        assert outcome.named > 300 and outcome.named + outcome.same == outcome.cases
