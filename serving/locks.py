"""Locks on outputs: one job, session or engine at a time writes a file or a folder.

    with OutputLock.of_file(path, "give another --output"):
        ...  # all that looks at the output and writes it

A lock is taken before anything is written, and held for the life of the job or session. It is a
lock of the operating system (`filelock`) on a small file of its own, beside an output file and
inside an output folder. The small file has the process and the host of the holder, and goes with
the lock. A crash frees the lock: the small file that it leaves keeps nothing out.

On a network file system the lock holds between machines where the file system has such locks: NFS
4, NFS 3 with its lock service, Lustre mounted with `flock`, and most others. Where it has none, a
warning is logged and the work goes on without. One folder under two names of its own on two
machines is one output; under two hard links, two.
"""

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from jaxshare.paths import DISK_ERRORS, WriteError
from jaxshare.serving.errors import InUseError

_SUFFIX = ".jaxshare-lock"
_SECONDS = 1.0
"""The time to wait for a lock, which a killed holder may need to be gone."""
_UPDATE_SECONDS = 30.0
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
"""The errors of file systems without locks."""

_log = logging.getLogger("jaxshare")
_held: "dict[Path, OutputLock]" = {}
"""The locks of this process by their files."""
_guard = threading.RLock()  # a collected session may release its lock while this is held


class OutputLock:
    """An output that nothing else writes until `release`, which the end of a `with` block calls."""

    def __init__(
        self,
        output: Path,
        file: Path,
        advice: str,
        *,
        lends: bool = False,
        seconds: float | None = None,
    ):
        """Takes the lock; `of_file` and `of_folder` say where its file is."""
        self._output, self._file, self._advice, self._lends = output, file, advice, lends
        self._pid, self._made, self._descriptor = os.getpid(), [], -1
        self._lock: FileLock | None = None
        self._lender: OutputLock | None = None
        with _guard:
            if (holder := _held.get(file)) and not holder._lends:
                raise self._in_use("this process already")
            if holder:
                self._lender, holder._lends = holder, False
                return
            _held[file] = self
        try:
            self._acquire(time.monotonic() + (_SECONDS if seconds is None else seconds))
        except BaseException:
            self.release()
            raise

    @classmethod
    def of_file(
        cls, path: str | os.PathLike, advice: str, *, seconds: float | None = None
    ) -> "OutputLock | contextlib.nullcontext[None]":
        """Locks a file that is there or will be; a device or a pipe has no lock.

        Args:
          path: of the file; a link is followed, and a missing folder is made.
          advice: the end of error messages, such as "give another --output".
          seconds: the time to wait for the lock; default 1.

        Raises:
          InUseError: another process, or this one, holds the lock.
          ValueError: no lock file can be written beside the file.
        """
        real = Path(os.path.realpath(path))
        if real.exists() and not real.is_file() and not real.is_dir():
            return contextlib.nullcontext()
        return cls(
            Path(path),
            real.with_name(f".{real.name}{_SUFFIX}"),
            advice,
            seconds=seconds,
        )

    @classmethod
    def of_folder(cls, path: str | os.PathLike, advice: str, *, lends: bool = False) -> Self:
        """Locks a folder, which is made if it is missing, and removed again if it stays empty.

        Args:
          path, advice: see `of_file`.
          lends: let one other holder of this process take the lock too, such as the session for
            which a command has locked the folder in advance.

        Raises:
          InUseError, ValueError: see `of_file`.
        """
        file = Path(os.path.realpath(path)) / _SUFFIX
        return cls(Path(path), file, advice, lends=lends)

    def release(self) -> None:
        """Gives the lock back; does nothing where it has been, or in a forked process."""
        if self._pid != os.getpid():
            return
        if self._lender:
            with _guard:
                self._lender._lends, self._lender = True, None
            return
        if self._lock:
            # Removed while it is locked: filelock lets nothing lock a file that has no name.
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(self._descriptor), os.stat(self._file)):
                    self._file.unlink()
            self._lock.release()
            self._lock = None
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()
        self._made = []
        with _guard:
            if _held.get(self._file) is self:
                del _held[self._file]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _acquire(self, deadline: float) -> None:
        """Takes the lock of the operating system, which may take several attempts."""
        # not of this thread alone, because a session ends where it is collected
        lock = FileLock(self._file, thread_local=False, on_acquired=self._sign)
        while True:
            late = time.monotonic() > deadline
            try:
                self._make_folder()
                lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
                self._lock = lock
                return
            except Timeout as error:
                if not self._file.exists():  # which filelock takes for one that is being replaced
                    raise self._unwritable(f"no file can be made in {self._file.parent}") from error
                raise self._in_use(_holder(self._file)) from error
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    _log.warning(
                        "warning: the file system of %s has no locks (%s), so nothing keeps a "
                        "second process out of it; start none",
                        self._output,
                        error.strerror,
                    )
                    return
                # A holder that ended removed the folder, or the file, between two of our steps.
                if late or not isinstance(error, FileNotFoundError):
                    raise self._unwritable(error) from error
                time.sleep(0.01)

    def _make_folder(self) -> None:
        folder = self._file.parent
        for each in [*reversed(folder.parents), folder]:
            if each.is_dir():
                continue
            try:
                each.mkdir()
                self._made.append(each)
            except FileExistsError as error:
                if not each.is_dir():  # else another process has just made it
                    raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(each)) from error

    def _sign(self, descriptor: int) -> None:
        """Writes process and host into the file that has just been locked.

        Raises:
          FileNotFoundError: the file has no name, or its name is another file's. Some network file
            systems do not tell filelock.
        """
        if not os.path.samestat(os.fstat(descriptor), os.stat(self._file)):
            raise FileNotFoundError(errno.ENOENT, "replaced by another process", str(self._file))
        self._descriptor = descriptor
        signature = f"{os.getpid()} {socket.gethostname()}\n".encode()
        os.pwrite(descriptor, signature, 0)
        os.ftruncate(descriptor, len(signature))

    def _unwritable(self, reason: object) -> ValueError:
        if isinstance(reason, OSError) and reason.errno in DISK_ERRORS:
            return ValueError(f"the output {WriteError.of(self._output, reason)}; {self._advice}")
        return ValueError(f"the output {self._output} cannot be written ({reason}); {self._advice}")

    def _in_use(self, holder: str) -> InUseError:
        return InUseError(
            f"the output {self._output} is being written by {holder}; wait for it, or "
            f"{self._advice}"
        )


@contextlib.contextmanager
def updating(file: Path) -> Iterator[None]:
    """Locks a file while it is read, changed and written, so that no change of another is lost.

    Raises:
      OSError: no lock file can be written beside it, or another process has it for too long.
    """
    try:
        lock = OutputLock.of_file(file, "try again", seconds=_UPDATE_SECONDS)
    except ValueError as error:
        raise OSError(str(error)) from error
    with lock:
        yield


def _holder(file: Path) -> str:
    """The process and host in a lock file, in words."""
    try:
        pid, host = file.read_text(encoding="utf-8").splitlines()[0].split(" ", 1)
        return f"process {int(pid)} on {host}"
    except (OSError, ValueError, IndexError):
        return "another process"
