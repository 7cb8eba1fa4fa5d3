"""Each operation on the disk fails in turn, with each error: the old state is intact or the new one
is there whole, and the error says what would do."""

import contextlib
import dataclasses
import errno
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.drill.disk_faults import ALL, ERRORS, POWER_LOSS, SHORT, Writer, each_fault, one_fault
from tests.drill.writers import WHOLE_FILES, WRITERS, batch_job, evaluation
from tests.helpers import mostly_slow

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

    writer = Writer(tmp_path, lambda: file.write_text("old") and None, write_over, after)
    with pytest.raises(AssertionError, match="it is neither"):
        each_fault(writer)
    with pytest.raises(AssertionError, match="it is neither"):
        each_fault(dataclasses.replace(writer, act=lambda: rename(file)), (POWER_LOSS,))
    raising = dataclasses.replace(
        writer, act=lambda: file.write_text("new"), after=lambda done: None
    )
    with pytest.raises(AssertionError, match=r"operation 1, \['open'\]: OSError"):
        each_fault(raising)


def test_a_fault_may_pass(tmp_path):
    file = tmp_path / "file"

    def write_twice() -> None:
        with contextlib.suppress(OSError):
            file.write_text("first", encoding="utf-8")
        file.write_text("second", encoding="utf-8")

    def after(done: bool) -> None:
        assert done and file.read_text(encoding="utf-8") == "second"

    writer = Writer(tmp_path, lambda: None, write_twice, after)
    assert one_fault(writer, 2, errno.EIO, once=True).fired
    assert not one_fault(writer, 99, errno.EIO).fired


@pytest.mark.parametrize("kind", WHOLE_FILES)
def test_whole_files(tmp_path, kind):
    # also where the power is lost as soon as it is written
    count = each_fault(WHOLE_FILES[kind](tmp_path, random.Random(0)))
    assert count >= 24, "open, write, fsync and rename, with six errors"


QUICK = (errno.ENOSPC, SHORT, POWER_LOSS)


@pytest.mark.parametrize(
    ("lives", "errors"), mostly_slow([(3, QUICK), (3, ALL), (None, ALL)], several=True)
)
def test_a_batch_job_goes_on_after_any_fault(tmp_path, lives, errors):
    count = each_fault(batch_job(tmp_path, random.Random(0), lives), errors)
    assert count > 15 * len(errors)


@pytest.mark.slow
@pytest.mark.parametrize("errors", [(POWER_LOSS,), ALL])
def test_an_evaluation_goes_on_after_any_fault(tmp_path, errors):
    assert each_fault(evaluation(tmp_path, random.Random(0)), errors) > 20 * len(errors)


@pytest.mark.parametrize("error", ERRORS)
def test_a_disk_on_which_no_folder_can_be_made_is_said_with_what_would_do(tmp_path, error):
    faults = one_fault(evaluation(tmp_path, random.Random(0)), 1, error)
    assert faults.done == ["mkdir"], "of the lock, before all else"


def test_gradings_that_were_written_are_there_after_any_fault(tmp_path):
    assert each_fault(WRITERS["gradings"](tmp_path, random.Random(0)), ALL) > 8 * len(ALL)


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


@pytest.mark.parametrize(("kind", "least"), [("batch over HTTP", 20), ("upload", 6)])
@pytest.mark.parametrize("errors", mostly_slow([(errno.ENOSPC,), (*ERRORS[1:], SHORT, POWER_LOSS)]))
def test_what_the_server_writes_survives_every_fault(tmp_path, kind, least, errors):
    assert each_fault(WRITERS[kind](tmp_path, random.Random(0)), errors) > least * len(errors)
