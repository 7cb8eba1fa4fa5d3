"""Files that are written whole or not at all, and checks beforehand that a file can be written."""

import contextlib
import errno
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_ADVICE = {
    errno.ENOSPC: "make room on its disk, or give another place",
    errno.EDQUOT: "make room in your quota of its disk, or give another place",
    errno.EFBIG: "raise the limit on the size of files, or give another place",
    errno.EROFS: "its file system is read-only: give a place on another one",
    errno.EIO: "its disk has failed: give a place on another one",
}
DISK_ERRORS = frozenset(_ADVICE)
"""The system's errors of a disk that takes nothing more, as `errno` has them."""
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)
"""Errors of file systems that cannot bring a folder to the disk by itself."""


class WriteError(OSError):
    """A file cannot be written; the text says which, why, and what would do.

    `errno` and `strerror` are those of the system's error.
    """

    @classmethod
    def of(cls, file: str | os.PathLike, error: OSError) -> "WriteError":
        """Returns the error for a file that could not be written because of `error`."""
        return cls(error.errno or errno.EIO, reason(error), os.fspath(file))

    def __str__(self) -> str:
        advice = _ADVICE.get(self.errno or 0, "give a place that can be written")
        return f"{self.filename} cannot be written ({self.strerror}); {advice}"


def reason(error: OSError) -> str:
    """Returns what the system says of an error, without the file and the advice."""
    return error.strerror or str(error)


@contextlib.contextmanager
def whole_file(file: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Opens a file that takes its name when all is written and on the disk; where that fails, the
    old file stays. A reader never sees half of it, nor does one after a power loss. Makes the
    folder. A device or a pipe, such as /dev/stdout, is written to directly.

    Args:
      file: its name; a link is followed.
      mode: "w" for text in UTF-8, "wb" for bytes.

    Raises:
      WriteError: it cannot be written.
    """
    name, encoding = file, None if "b" in mode else "utf-8"
    file = Path(os.path.realpath(file))
    # a random name, since several processes may write one file
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        if file.exists() and not file.is_file() and not file.is_dir():
            with open(file, mode, encoding=encoding) as special:
                yield special
            return
        make_folder(file.parent)
        with open(temporary, mode, encoding=encoding) as whole:
            yield whole
            whole.flush()
            os.fsync(whole.fileno())
        os.replace(temporary, file)
        sync_folder(file.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):  # of a disk that takes nothing more
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, WriteError):
            raise WriteError.of(name, error) from error
        raise


def make_folder(folder: Path) -> None:
    """Makes a folder with its parents, if they are missing, so that they survive a power loss.

    Raises:
      OSError: it cannot be made.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Brings the names of a folder's files to the disk, where the file system has a way to.

    Raises:
      OSError: the disk has failed.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def sync_tree(folder: Path) -> None:
    """Brings all that a folder holds to the disk, its files first.

    Raises:
      OSError: the disk has failed.
    """
    for path, _, names in os.walk(folder, topdown=False):
        for name in names:
            descriptor = os.open(os.path.join(path, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(path))


def unwritable_file(file: str | os.PathLike, *, makes_folder: bool = False) -> str | None:
    """The reason why a file cannot be written, as a clause such as "that is a folder", or None if
    it can be. Nothing is created, and nothing in the file changes.

    Args:
      file: its name.
      makes_folder: True if the writer creates a missing folder.
    """
    real, parent = Path(os.path.realpath(file)), Path(file).parent
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(real)  # exists() hides more errors, and from Python 3.14 on all of them
        exists = real.exists()
        if real.is_dir():
            return "that is a folder"
        if exists and not real.is_file():
            return None if os.access(real, os.W_OK) else "that cannot be written"
        if exists:
            open(real, "r+b").close()
    except OSError as error:
        return f"that cannot be written ({error.strerror})"
    if not real.parent.is_dir():
        if makes_folder:
            why = unwritable_folder(real.parent)
            return f"{real.parent} is a file" if why == "that is a file" else why
        return f"there is no folder {real.parent if parent.is_dir() else parent}"
    return _unwritable_in(real.parent)


def unwritable_folder(folder: str | os.PathLike) -> str | None:
    """The reason why nothing can be written in a folder that the writer creates, with its parents,
    if it is missing; or None. Nothing is created."""
    real = existing = Path(os.path.realpath(folder))
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        return "that is a file" if existing == real else f"{existing} is a file"
    return _unwritable_in(existing)


def _unwritable_in(folder: Path) -> str | None:
    try:  # os.access misses some of the reasons
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"nothing can be written in {folder} ({error.strerror})"
    return None


def check_file(option: str, file: str | os.PathLike | None, *, makes_folder: bool = False) -> None:
    """Refuses, before any work is done for it, a file that cannot be written (`unwritable_file`).

    Args:
      option: the option that named the file, such as "--output".

    Raises:
      ValueError: it cannot be written; names the option.
    """
    if file is not None and (why := unwritable_file(file, makes_folder=makes_folder)):
        raise ValueError(
            f"{option} is {os.fspath(file)!r}, but {why}; give a file in a folder that is there "
            "and can be written"
        )


def check_folder(option: str, folder: str | os.PathLike | None) -> None:
    """Refuses, before any work is done for it, a folder that nothing can be written in. As
    `unwritable_folder`.

    Raises:
      ValueError: nothing can be written in it; names the option.
    """
    if folder is not None and (why := unwritable_folder(folder)):
        raise ValueError(
            f"{option} is {os.fspath(folder)!r}, but {why}; give a folder that can be written"
        )


def cache_folder() -> Path:
    """The folder $JAXSHARE_CACHE, or the system's folder for caches. It may not exist yet."""
    import platformdirs  # here, because only programs on a GPU or with a cost rule need it

    return Path(os.environ.get("JAXSHARE_CACHE") or platformdirs.user_cache_dir("jaxshare"))


def write_json(file: Path, data: Any) -> None:
    """Writes a whole file of JSON or, where that fails, leaves the old one (`whole_file`).

    Raises:
      WriteError: it cannot be written.
    """
    with whole_file(file) as whole:
        json.dump(data, whole, indent=2)
