"""Locks on outputs: one holder at a time, whatever happened to the one before it."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxshare.serving import locks
from jaxshare.serving.checkpoints import CheckpointStore, SaveError
from jaxshare.serving.errors import InUseError
from jaxshare.serving.locks import OutputLock

HOLD = """
import sys
from jaxshare.serving.locks import OutputLock
lock = OutputLock.of_folder(sys.argv[1], "")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(locks, "_SECONDS", 0.1)


def test_another_process_is_named_and_its_crash_frees_the_lock(tmp_path, impatient):
    folder = tmp_path / "new" / "folder"
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=-1
    )
    assert holder.stdout and holder.stdout.readline() == b"locked\n"
    link = tmp_path / "link"
    link.symlink_to(folder)
    for name in (folder, link, os.path.relpath(folder)):
        with pytest.raises(InUseError) as refused:
            OutputLock.of_folder(name, "give another --out")
        assert str(refused.value) == (
            f"the output {name} is being written by process {holder.pid} on "
            f"{socket.gethostname()}; wait for it, or give another --out"
        )
    with pytest.raises(SaveError, match=f"by process {holder.pid} on .*another folder for the"):
        CheckpointStore(folder)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    [left] = folder.iterdir()  # it keeps nothing out
    assert left.read_text().startswith(f"{holder.pid} ")
    with OutputLock.of_folder(folder, ""):
        assert left.read_text() == f"{os.getpid()} {socket.gethostname()}\n"
    assert not left.exists() and folder.is_dir()


def test_a_lock_leaves_nothing_behind(tmp_path):
    before = sorted(tmp_path.rglob("*"))
    with OutputLock.of_file(tmp_path / "a" / "b" / "out.jsonl", "") as lock:
        assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == [
            ".out.jsonl.jaxshare-lock"
        ]
    lock.release()  # again, which does nothing
    with OutputLock.of_folder(tmp_path / "c" / "d", ""):
        pass
    assert sorted(tmp_path.rglob("*")) == before
    with OutputLock.of_folder(tmp_path / "e", ""):
        (tmp_path / "e" / "kept").touch()
    assert [path.name for path in (tmp_path / "e").iterdir()] == ["kept"]


def test_one_process_does_not_take_a_lock_twice(tmp_path):
    (tmp_path / "folder").mkdir()
    with OutputLock.of_file(tmp_path / "out", ""), OutputLock.of_folder(tmp_path / "folder", ""):
        for again in (
            lambda: OutputLock.of_file(tmp_path / "folder" / ".." / "out", "give another"),
            lambda: OutputLock.of_folder(tmp_path / "folder", "give another"),
        ):
            with pytest.raises(InUseError, match="is being written by this process already; wait"):
                again()
        OutputLock.of_file(tmp_path / "other", "").release()
    OutputLock.of_file(tmp_path / "out", "").release()


def test_a_lock_that_lends_has_one_borrower_at_a_time(tmp_path):
    with OutputLock.of_folder(tmp_path, "", lends=True):
        for _ in range(2):
            with OutputLock.of_folder(tmp_path, ""), pytest.raises(InUseError):
                OutputLock.of_folder(tmp_path, "")
            assert (tmp_path / ".jaxshare-lock").exists()
    assert [*tmp_path.iterdir()] == []


def test_the_newest_store_of_a_process_has_the_folder(tmp_path):
    """A session that is restored goes on saving, though the one before it was not closed."""
    array = {"a": np.arange(3)}
    with OutputLock.of_folder(tmp_path, "", lends=True):  # as the command does
        first = CheckpointStore(tmp_path)
        assert first.save(array, {}) == 1
        second = CheckpointStore(tmp_path)
        assert CheckpointStore.of(tmp_path, second) is second and second.save(array, {}) == 2
        with pytest.raises(SaveError, match="has the checkpoints of a newer session or engine"):
            CheckpointStore.of(tmp_path, first)
        first.close()
        second.close()
        assert (tmp_path / ".jaxshare-lock").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that none can write in")
def test_places_that_cannot_be_locked_are_named(tmp_path, impatient):
    (tmp_path / "file").touch()
    for make, words in (
        (lambda: OutputLock.of_folder("/proc/x", "give another --out"), "/proc/x'"),
        (
            lambda: OutputLock.of_file("/proc/x.json", "give another --out"),
            "no file can be made in /proc",
        ),
        (lambda: OutputLock.of_folder(tmp_path / "file", "give another --out"), "Not a directory"),
        (lambda: OutputLock.of_file(tmp_path / ("x" * 255), "give another --out"), "too long"),
    ):
        with pytest.raises(
            ValueError, match=f"cannot be written .*({words}).*; give another --out"
        ):
            make()
    os.mkfifo(tmp_path / "pipe")
    with OutputLock.of_file(tmp_path / "pipe", ""), OutputLock.of_file(tmp_path / "pipe", ""):
        pass  # a pipe has no lock


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with OutputLock.of_file(tmp_path / "out", "") as first:
        assert first is not None
        with pytest.raises(InUseError, match="by this process already"):
            OutputLock.of_file(tmp_path / "out", "")
    [record] = caplog.records
    assert "out has no locks (Function not implemented), so nothing keeps" in record.getMessage()


def test_a_file_that_is_changed_by_two_keeps_both_changes(tmp_path, monkeypatch):
    file = tmp_path / "costs.json"
    with locks.updating(file):
        file.write_text("one")
    monkeypatch.setattr(locks, "_UPDATE_SECONDS", 0.1)
    with (
        locks.updating(file),
        pytest.raises(OSError, match=r"costs.json is being written by this process already"),
        locks.updating(file),
    ):
        pytest.fail("it was locked twice")
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]
