"""Files of clients: what they upload, and what batches write; in a folder of the server's."""

import contextlib
import dataclasses
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from jaxshare.paths import make_folder, reason, sync_folder, whole_file
from jaxshare.serving.errors import InUseError
from jaxshare.serving.http.errors import ApiError, bad_request
from jaxshare.serving.http.identities import new_id
from jaxshare.serving.locks import OutputLock

_log = logging.getLogger("jaxshare.http")

_IDENTITY = re.compile(r"file-[0-9a-f]{32}")
_MOST_NAME = 255
_OTHER = "give another --files-folder"

_MOST_FILES = 10_000
"""The most files of all clients."""
ANSWERS = (".output", ".error")
"""The suffixes of the answers of a batch that is not complete."""
INPUT, OUTPUT = "batch", "batch_output"
"""Purposes of files."""


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """The facts of a file, which stand beside it.

    Attributes:
      identity: by which clients name it.
      owner: the hash of the key that it was made with; another one does not see it.
      filename: as the client has it; no file here has this name.
      purpose: INPUT or OUTPUT.
      bytes: of its content.
      created_at: in seconds since 1970.
    """

    identity: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int

    def as_json(self) -> dict[str, Any]:
        """Returns the file in OpenAI's form."""
        return {
            "id": self.identity,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileStore:
    """Keeps files in one folder, which no other server uses meanwhile.

    A file has the name of its identity, which the server has made: no request names a path. All
    methods may be called in any thread.

    Args:
      folder: made if it is missing.
      max_bytes: of all files, and of the answers that batches have written so far.

    Raises:
      ValueError: the folder cannot be made or read, or another server has it.
    """

    def __init__(self, folder: str, max_bytes: int):
        self._max_bytes, self._changed = max_bytes, threading.Lock()
        self._folder, self.batches = Path(folder) / "files", Path(folder) / "batches"
        self._files: dict[str, StoredFile] = {}
        try:
            self._lock = OutputLock.of_folder(folder, _OTHER)
        except InUseError as error:
            raise ValueError(str(error)) from error
        try:
            make_folder(self._folder)
            make_folder(self.batches)
            self._read()
        except BaseException as error:
            self._lock.release()
            if not isinstance(error, OSError):
                raise
            raise ValueError(
                f"--files-folder {folder} cannot be written ({reason(error)}); {_OTHER}"
            ) from error

    def _read(self) -> None:
        """Reads what is there. What an upload has left that was cut off is deleted; a file whose facts
        cannot be read stays, and counts."""
        self._used = 0
        for path in self.batches.iterdir():
            if path.suffix in ANSWERS:
                self._used += path.stat().st_size
            elif path.suffix != ".json":
                path.unlink()
        for path in self._folder.iterdir():
            if _IDENTITY.fullmatch(path.name):
                file = _facts(path)
                if file:
                    self._files[file.identity] = file
                elif path.with_name(f"{path.name}.json").exists():  # of another version, perhaps
                    _log.warning("the facts of %s cannot be read; it is kept, unseen", path.name)
                else:
                    _log.warning("an upload that was not completed is deleted")
                    path.unlink()
                    continue
                self._used += path.stat().st_size
            elif not path.name.endswith(".json") or not path.with_suffix("").exists():
                path.unlink()

    def close(self) -> None:
        """Lets other servers use the folder."""
        self._lock.release()

    @property
    def used(self) -> int:
        """The bytes of all files."""
        return self._used

    def take(self, size: int) -> None:
        """Counts bytes that are about to be written.

        Raises:
          ApiError: the quota does not suffice (507).
        """
        with self._changed:
            if self._used + size > self._max_bytes:
                raise ApiError(
                    507,
                    f"the server keeps {self._max_bytes} bytes of files, and this would be more; "
                    "delete some, or start it with more --files-bytes",
                    code="storage_full",
                )
            self._used += size

    def give(self, size: int) -> None:
        """Counts bytes that are there no more."""
        with self._changed:
            self._used -= size

    def upload(self) -> "Upload":
        """Begins a file.

        Raises:
          ApiError: the disk takes no file, or there are as many as there may be (507).
        """
        if len(self._files) >= _MOST_FILES:
            raise ApiError(
                507,
                f"the server keeps {_MOST_FILES} files, the most that it takes; delete some",
                code="storage_full",
            )
        identity = new_id("file-")
        return Upload(self, identity, self._folder / identity)

    def add(self, file: StoredFile) -> None:
        """Makes a file known whose content is in its place.

        Raises:
          OSError: the disk is full.
        """
        self._write_facts(file)
        with self._changed:
            self._files[file.identity] = file

    def _write_facts(self, file: StoredFile) -> None:
        with whole_file(self._folder / f"{file.identity}.json") as facts:
            facts.write(json.dumps(dataclasses.asdict(file)))

    def move_in(self, content: Path, file: StoredFile) -> None:
        """Makes a file of what a batch has written; may be called again after a kill.

        The facts come first: content without them would be deleted at the next start.

        Raises:
          OSError: the disk has failed.
        """
        target = self._folder / file.identity
        is_left = content.exists()
        size = (content if is_left else target).stat().st_size
        made = dataclasses.replace(file, bytes=size)
        self._write_facts(made)
        if is_left:
            os.replace(content, target)
            sync_folder(self._folder)
        with self._changed:
            self._files[made.identity] = made

    def remove_answers(self, identity: str) -> None:
        """Deletes what is left of the answers of a batch that has ended."""
        for suffix in ANSWERS:
            path = self.batches / f"{identity}{suffix}"
            with contextlib.suppress(OSError):
                size = path.stat().st_size
                path.unlink()
                self.give(size)

    def find(self, identity: str, owner: str, param: str = "file_id") -> StoredFile:
        """Returns the facts of a file.

        Raises:
          ApiError: this key has no such file (404).
        """
        found = self._files.get(identity)
        if found is None or found.owner != owner:
            raise ApiError(
                404, "there is no such file; GET /v1/files lists those that are", param=param
            )
        return found

    def list(self, owner: str) -> list[StoredFile]:
        """Returns the files of a key, the newest first."""
        return newest_first([*self._files.values()], owner)

    def open(self, file: StoredFile) -> BinaryIO:
        """Opens the content of a file.

        Raises:
          OSError: it is not there any more.
        """
        return open(self._folder / file.identity, "rb")

    def path(self, file: StoredFile) -> Path:
        """Returns where the content of a file is."""
        return self._folder / file.identity

    def delete(self, identity: str, owner: str) -> None:
        """Deletes a file.

        Raises:
          ApiError: see `find`.
        """
        file = self.find(identity, owner)
        with self._changed:
            if self._files.pop(identity, None) is None:
                return
            self._used -= file.bytes
        # First the facts: what is left without them after a kill is deleted at the next start.
        for path in (self._folder / f"{identity}.json", self._folder / identity):
            with contextlib.suppress(OSError):
                path.unlink()


class Upload:
    """A file while it comes in; without `complete` nothing of it stays."""

    def __init__(self, store: FileStore, identity: str, path: Path):
        self._store, self._identity, self._path = store, identity, path
        self._size, self._is_complete = 0, False
        self._file = on_disk(lambda: path.open("xb"))

    def write(self, data: bytes) -> None:
        """Writes a part.

        Raises:
          ApiError: the quota or the disk does not suffice (507).
        """
        self._store.take(len(data))
        self._size += len(data)
        on_disk(lambda: self._file.write(data))

    def complete(self, filename: str, purpose: str, owner: str) -> StoredFile:
        """Brings it to the disk, and makes it known.

        Raises:
          ApiError: it is empty (400), or see `write`.
        """
        if not self._size:
            raise bad_request("file is empty", "file")
        made = StoredFile(
            self._identity, owner, filename[:_MOST_NAME], purpose, self._size, int(time.time())
        )

        def finish() -> None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._store.add(made)

        on_disk(finish)
        self._is_complete = True
        return made

    def abandon(self) -> None:
        """Deletes what has been written, unless it is complete."""
        with contextlib.suppress(OSError):  # of a full disk: buffered bytes have no room
            self._file.close()
        if not self._is_complete:
            self._store.give(self._size)
            self._size = 0
            self._path.unlink(missing_ok=True)


class Owned(Protocol):
    """A thing that belongs to a key."""

    @property
    def owner(self) -> str: ...
    @property
    def created_at(self) -> int: ...


def newest_first[Thing: Owned](found: Iterable[Thing], owner: str) -> list[Thing]:
    """Returns what belongs to a key, the newest first; of one second, what came last."""
    mine = [each for each in found if each.owner == owner]
    return sorted(reversed(mine), key=lambda each: each.created_at, reverse=True)


def on_disk[Value](work: Callable[[], Value], what: str = "file") -> Value:
    """Does something with the disk.

    Args:
      work: to be done.
      what: is written.

    Raises:
      ApiError: it has failed (507); the reason is in the log.
    """
    try:
        return work()
    except OSError as error:
        _log.error("a %s could not be written: %s", what, error)
        raise ApiError(
            507,
            f"the {what} could not be written; the log of the server has the reason",
            code="storage_failed",
        ) from error


def _facts(path: Path) -> StoredFile | None:
    """The facts of a file, or None where there are none that can be read."""
    try:
        return StoredFile(**json.loads(path.with_name(f"{path.name}.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def no_folder() -> ApiError:
    """Returns the error of a server that keeps no files."""
    return bad_request(
        "this server keeps no files; start it with --files-folder", code="no_files_folder"
    )
