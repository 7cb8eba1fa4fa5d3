"""The file of a journal that grows with its run: sealed lines, each on the disk before it counts.

The first line says what the run is of; every line has its number and a checksum, so that one that
is damaged, lost or moved is found. Only the last line can be torn, by a kill or a power loss.
"""

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxshare.paths import WriteError, sync_folder, unwritable_file
from jaxshare.serving import checksums
from jaxshare.serving.locks import OutputLock

FORMAT = "jaxshare agents journal 3"
_NUMBER = "number"
_BEGIN = f'{{"{checksums.FIELD}": "'.encode()
"""Bytes that every line begins with."""

_log = logging.getLogger("jaxshare")


class DamageError(ValueError):
    """A line of a journal is not as it was written, or the file is no journal."""


def is_lines(data: bytes) -> bool:
    """True for the bytes of a file that this module has written, unless its first line is torn."""
    return data.startswith(_BEGIN)


def read_lines(file: str | os.PathLike, data: bytes) -> tuple[list[dict[str, Any]], int]:
    """(the values of all lines, the number of bytes that they take).

    A torn last line is left out.

    Raises:
      DamageError: a line is not as it was written; names the line.
    """
    values: list[dict[str, Any]] = []
    *whole, last = data.split(b"\n")
    for number, line in enumerate([*whole, last] if last else whole, 1):
        try:
            value = checksums.parse(line)
        except ValueError as error:
            if number > len(whole):
                break  # the last line, which was cut while it was written
            raise _damaged(file, number, error) from error
        try:
            if not isinstance(value, dict) or checksums.FIELD not in value:
                raise ValueError("it has no checksum")
            value = checksums.unsealed(value)
            if (found := value.pop(_NUMBER, None)) != number:
                raise ValueError(f"it says that it is line {found}")
        except ValueError as error:
            raise _damaged(file, number, error) from error
        values.append(value)
    if values and values[0].get("format") != FORMAT:
        raise DamageError(
            f"{file} has the format {values[0].get('format')!r}, and this version of jaxshare "
            f"writes {FORMAT!r}; go on with the version that began it, or give another file"
        )
    return values, sum(len(line) + 1 for line in data.split(b"\n")[: len(values)])


def _damaged(file: str | os.PathLike, number: int, error: ValueError) -> DamageError:
    return DamageError(
        f"line {number} of the journal {file} is damaged: {error}; restore the file from a copy, "
        "or give another one to begin anew"
    )


class JournalFile:
    """A journal's file, locked and open for more lines.

    Attributes:
      path: its name.
      values: of the lines that it had; the first is the header. A reader may clear them.
      is_private: whether no other user can have written it.
    """

    def __init__(self, file: str | os.PathLike):
        """Takes the lock of a file, makes it if it is missing, and reads it.

        Raises:
          InUseError: another process, or this one, has it open.
          ValueError: it cannot be written, is damaged, or is no such journal.
          OSError: it cannot be read.
        """
        real = Path(os.path.realpath(file))
        if why := unwritable_file(file):
            raise ValueError(
                f"the journal is {os.fspath(file)!r}, but {why}; give a file in a folder that is "
                "there and can be written"
            )
        if real.exists() and not real.is_file():
            raise ValueError(f"the journal is {os.fspath(file)!r}, a device; give a file")
        self.path = Path(file)
        self._lock = OutputLock.of_file(file, "give another journal")
        self._file: BinaryIO | None = None
        self._error: WriteError | None = None
        try:
            data = real.read_bytes() if real.exists() else b""
            if not is_lines(data) and not _BEGIN.startswith(data):
                raise DamageError(
                    f"{file} is no journal that grows with its run; give a file that Journal.open "
                    "has made, or a new one (Journal.load reads those of Journal.save)"
                )
            self.values, size = read_lines(file, data)
            self._count = len(self.values)
            self._file = self._opened(real)
            self._make_ready(self._file, len(data), size)
        except BaseException:
            self.close()
            raise

    def _opened(self, real: Path) -> BinaryIO:
        """Opens the file, which is made if it is missing; what is in it is its user's alone."""
        try:
            if real.exists():
                return open(real, "r+b", buffering=0)
            made = open(real, "x+b", buffering=0)  # noqa: SIM115, the caller closes it
            os.fchmod(made.fileno(), 0o600)
            return made
        except OSError as error:
            raise WriteError.of(self.path, error) from error

    def _make_ready(self, file: BinaryIO, length: int, size: int) -> None:
        """Takes a torn line off, and ends a last line that only lacks its end."""
        status = os.fstat(file.fileno())
        self.is_private = status.st_uid == os.getuid() and not status.st_mode & 0o022
        try:
            file.seek(min(length, size))
            if size > length:
                file.write(b"\n")
            elif size < length:
                file.truncate(size)
                _log.warning(
                    "warning: the last line of the journal %s was cut off while it was written, and "
                    "is dropped; its call is made again",
                    self.path,
                )
            os.fsync(file.fileno())
            sync_folder(Path(os.path.realpath(self.path)).parent)
        except OSError as error:
            raise WriteError.of(self.path, error) from error

    def append(self, value: Mapping[str, Any]) -> None:
        """Writes one more line; it is on the disk when this returns.

        Raises:
          WriteError: the disk takes nothing more, now or before; the file has whole lines.
          ValueError: the journal was closed.
        """
        file = self.check()
        line = json.dumps(checksums.sealed({_NUMBER: self._count + 1, **value})).encode() + b"\n"
        start = file.tell()
        try:
            rest = memoryview(line)
            while rest:  # a disk that fills up takes a part of it
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                file.truncate(start)
            self._error = WriteError.of(self.path, error)
            raise self._error from error
        self._count += 1

    def check(self) -> BinaryIO:
        """Raises the error of `append` if nothing more can be written."""
        if self._error is not None:
            raise self._error
        if self._file is None:
            raise ValueError(f"the journal {self.path} was closed; open it again")
        return self._file

    def close(self) -> None:
        """Closes the file and gives the lock back; nothing more can be written."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if isinstance(self._lock, OutputLock):
            self._lock.release()
