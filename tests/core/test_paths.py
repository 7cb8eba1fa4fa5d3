"""Files are written whole or not at all, and what cannot be written is known before any work is
done for it."""

import errno
import os
import stat
from pathlib import Path

import pytest

from jaxshare.paths import (
    WriteError,
    check_file,
    check_folder,
    unwritable_file,
    unwritable_folder,
    whole_file,
)

no_proc = pytest.mark.skipif(
    not Path("/proc/self").is_dir(), reason="needs a folder in which even root can make no file"
)


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    """The sizes and contents of everything in a folder."""
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "file").write_text("before", encoding="utf-8")
    (tmp_path / "pipe").symlink_to("/dev/null")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone" / "file")
    (tmp_path / "new").symlink_to(tmp_path / "not yet")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("result.json", None),
        ("file", None),
        ("pipe", None),
        ("new", None),
        ("", "that is a folder"),
        ("missing/result.json", "there is no folder {0}/missing"),
        ("file/result.json", "there is no folder {0}/file"),
        ("nowhere", "there is no folder {0}/gone"),
        ("x" * 300, "cannot be written (File name too long)"),
    ],
)
def test_files_that_can_be_written_and_others(folder, name, why):
    before = everything(folder)
    found = unwritable_file(folder / name)
    assert found is None if why is None else why.format(folder) in found
    assert everything(folder) == before, "looking changes nothing"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", None),
        ("a/b/c", None),
        ("new", None),
        ("file", "that is a file"),
        ("file/a/b", "{0}/file is a file"),
    ],
)
def test_folders_that_can_be_written_and_others(folder, name, why):
    before = everything(folder)
    assert unwritable_folder(folder / name) == (why and why.format(folder))
    assert everything(folder) == before


@no_proc
def test_a_folder_in_which_no_file_can_be_made():
    assert "nothing can be written in /proc" in str(unwritable_file("/proc/x.json"))
    assert "nothing can be written in /proc" in str(unwritable_folder("/proc/a/b"))
    assert "nothing can be written in /proc" in str(
        unwritable_file("/proc/a/x.json", makes_folder=True)
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_permissions_count(folder):
    (folder / "file").chmod(stat.S_IRUSR)
    assert "cannot be written (Permission denied)" in str(unwritable_file(folder / "file"))
    (folder / "locked").mkdir(mode=0o500)
    assert "nothing can be written in" in str(unwritable_file(folder / "locked" / "x"))
    assert "nothing can be written in" in str(unwritable_folder(folder / "locked"))


def test_folders_that_are_made_on_the_way_need_not_be_there(folder):
    assert unwritable_file(folder / "a" / "b" / "x.json", makes_folder=True) is None
    for name in ("file/x.json", "file/a/x.json"):
        assert unwritable_file(folder / name, makes_folder=True) == f"{folder}/file is a file"


def test_an_error_names_the_option_and_what_would_do(folder):
    with pytest.raises(
        ValueError,
        match=r"^--save is '.*', but that is a folder; give a file in a folder that is there",
    ):
        check_file("--save", folder)
    with pytest.raises(
        ValueError,
        match=r"^--out is '.*/file', but that is a file; give a folder that can be written$",
    ):
        check_folder("--out", folder / "file")
    check_file("--save", None)
    check_folder("--out", None)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_an_error_leaves_the_old_file_and_says_what_would_do(folder, monkeypatch, number, call):
    def failing(*_):
        raise OSError(number, os.strerror(number))

    before = everything(folder)
    with monkeypatch.context() as patched:
        if call != "write":
            patched.setattr(os, call, failing)
        with pytest.raises(WriteError) as raised, whole_file(folder / "file") as file:
            file.write("half of it")
            if call == "write":
                failing()
    assert everything(folder) == before, "the old file, and nothing beside it"
    assert raised.value.errno == number
    start, advice = str(raised.value).split("; " if number == errno.ENOSPC else ": ", 1)
    assert start.startswith(f"{folder / 'file'} cannot be written ({os.strerror(number)})")
    assert "give" in advice and "place" in advice


@no_proc
def test_a_new_name_is_on_the_disk_too(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def watched(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    with whole_file(tmp_path / "a" / "b" / "file") as file:
        file.write("x")
    made, whole = synced[:2], synced[2:]
    assert sorted(made) == [str(tmp_path), str(tmp_path / "a")]
    assert whole[0].endswith(".tmp") and whole[1:] == [str(tmp_path / "a" / "b")]


def test_a_device_stays_one(folder):
    with whole_file(folder / "pipe") as file:
        file.write("lost")
    assert Path("/dev/null").is_char_device() and (folder / "pipe").is_symlink()
    if Path("/dev/full").exists():
        with pytest.raises(OSError, match="No space left"), whole_file(Path("/dev/full")) as file:
            file.write("x")
        assert Path("/dev/full").is_char_device()
