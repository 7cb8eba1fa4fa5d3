"""Each operation on the disk fails in turn, with each error: the old state is intact or the new one
is there whole, and the error says what would do."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jaxshare.serving import jsonl
from jaxshare.serving.evaluation import plot
from jaxshare.serving.evaluation.folder import RUNS, SCORES, TABLE
from tests.core.trace.test_trace import random_session
from tests.drill.disk_faults import ALL, POWER_LOSS, SHORT, each_fault
from tests.drill.test_damage import LOG, SNAPSHOT
from tests.helpers import mostly_slow
from tests.serving.agents.test_journal import recorded
from tests.serving.cli.test_batch import LINES, job  # noqa: F401, a fixture
from tests.serving.evaluation.test_evaluate import evaluation  # noqa: F401, a fixture

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="needs the names of descriptors"
)


def test_the_drill_finds_a_writer_that_destroys_what_was_there(tmp_path):
    file = tmp_path / "file"

    def write_over() -> None:
        with contextlib.suppress(OSError):
            file.write_text("new", encoding="utf-8")

    def rename(file: Path) -> None:
        file.with_name("new").write_text("new", encoding="utf-8")
        os.replace(file.with_name("new"), file)

    def after(done: bool) -> None:
        assert file.read_text(encoding="utf-8") in ("old", "new"), "it is neither"

    with pytest.raises(AssertionError, match="it is neither"):
        each_fault(tmp_path, lambda: file.write_text("old"), write_over, after)
    with pytest.raises(AssertionError, match="it is neither"):
        each_fault(
            tmp_path, lambda: file.write_text("old"), lambda: rename(file), after, (POWER_LOSS,)
        )
    with pytest.raises(AssertionError, match=r"operation 1, \['open'\]: OSError"):
        each_fault(
            tmp_path,
            lambda: file.write_text("old"),
            lambda: file.write_text("new"),
            lambda done: None,
        )


WRITERS = {
    "journal": lambda file, n: recorded(str(n)).save(file),
    "search log": lambda file, n: type(LOG)(LOG.runs * n).save(file),
    "snapshot": lambda file, n: type(SNAPSHOT)(n, SNAPSHOT.blocks, SNAPSHOT.rows).save(file),
    "trace": lambda file, n: random_session(n)[0].trace().save(file),
    "lines": lambda file, n: jsonl.write(file, [b"line\n"] * 5000 * n, "go on with --resume"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_whole_files(tmp_path, kind):
    folder = tmp_path / "folder"
    file, texts = folder / "file.json", []
    for n in (1, 2):
        WRITERS[kind](file, n)
        texts.append(file.read_bytes())
    assert texts[0] != texts[1]

    def after(done: bool) -> None:
        assert file.read_bytes() in (texts if not done else texts[1:])
        assert [*folder.iterdir()] == [file], "nothing is left beside it"

    # also where the power is lost as soon as it is written
    count = each_fault(
        folder, lambda: file.write_bytes(texts[0]), lambda: WRITERS[kind](file, 2), after
    )
    assert count >= 20, "open, write, fsync and rename, with five errors"


QUICK = (errno.ENOSPC, SHORT, POWER_LOSS)


@pytest.mark.parametrize(
    ("lives", "errors"), mostly_slow([(3, QUICK), (3, ALL), (None, ALL)], several=True)
)
def test_a_batch_job_goes_on_after_any_fault(job, lives, errors):  # noqa: F811
    given, folder = (LINES, "--n", "2", "--max-new-tokens", "3"), job.folder / "out"
    folder.mkdir()
    job(*given, name="unbroken")
    begun = {}
    if lives:
        with pytest.raises(RuntimeError):
            job(*given, name="out/x", lives=lives)
        begun = {path: path.read_bytes() for path in folder.iterdir()}

    def before() -> None:
        for path in folder.iterdir():
            path.unlink()
        for path, content in begun.items():
            path.write_bytes(content)

    def after(done: bool) -> None:
        assert {path.name for path in folder.iterdir()} <= {"x", "x.job"}
        if not done:
            job(*given, "--resume", name="out/x")
        assert (folder / "x").read_bytes() == (job.folder / "unbroken").read_bytes()
        job(*given, "--resume", name="out/x", load=lambda: pytest.fail("it is complete"))

    def act() -> None:
        job(*given, "--resume", name="out/x")

    assert each_fault(folder, before, act, after, errors) > 15 * len(errors)


@pytest.mark.parametrize("errors", mostly_slow([(POWER_LOSS,), ALL]))
def test_an_evaluation_goes_on_after_any_fault(evaluation, monkeypatch, errors):  # noqa: F811
    monkeypatch.setattr(plot, "available", lambda: False)
    evaluation(out="unbroken")
    folder = evaluation.out
    compared = (RUNS, SCORES, TABLE)

    def after(done: bool) -> None:
        if not done:
            evaluation("--resume")
        for name in compared:
            found, unbroken = folder / name, evaluation.folder / "unbroken" / name
            assert sorted(found.read_bytes().split(b"\n")) == sorted(
                unbroken.read_bytes().split(b"\n")
            )

    count = each_fault(
        folder,
        lambda: shutil.rmtree(folder, ignore_errors=True),
        lambda: evaluation("--resume"),
        after,
        errors,
    )
    assert count > 20 * len(errors)


LIMITED = """
    import resource, signal, sys
    import numpy as np
    from jaxshare.serving.checkpoints import CheckpointStore, SavedCheckpoint, SaveError
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard, arrays = resource.getrlimit(resource.RLIMIT_FSIZE)[1], {"keys": np.random.default_rng(0).normal(size=9000)}
    store = CheckpointStore(sys.argv[1])
    store.save(arrays, {"which": 0}, wait=True)
    for limit in map(int, sys.argv[2:]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            store.save(arrays, {"which": limit}, wait=True)
        except SaveError as error:
            said = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert said.startswith(f"no checkpoint could be written to {sys.argv[1]} ("), said
        assert "make room on its disk, or give another folder" in said and "\\n" not in said, said
        with SavedCheckpoint(sys.argv[1]) as saved:
            assert saved.metadata == {"which": 0}, (limit, saved.metadata)
            np.testing.assert_array_equal(saved.arrays()["keys"], arrays["keys"])
    store = CheckpointStore(sys.argv[1])
    store.save(arrays, {"which": "after"}, wait=True)
    with SavedCheckpoint(sys.argv[1]) as saved:
        assert saved.metadata == {"which": "after"}
"""


@pytest.mark.parametrize(
    "limits",
    [(0, 60, 1000, 30000), pytest.param((*range(0, 1400, 40), 4000), marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_a_checkpoint_that_is_too_large_for_its_disk_leaves_the_one_before_it(tmp_path, limits):
    """Orbax writes by itself, so the system limits the size of files, from nothing on."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(LIMITED), str(tmp_path), *map(str, limits)],
        capture_output=True,
        timeout=300,
        text=True,
    )
    assert done.returncode == 0, done.stderr
