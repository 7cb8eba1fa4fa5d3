"""A batch: what is known of it, and the answers that it has so far, both on the disk."""

import contextlib
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

from jaxshare.paths import whole_file
from jaxshare.serving.http.batches.file_store import ANSWERS, OUTPUT, FileStore, StoredFile
from jaxshare.serving.http.batches.lines import LineAnswer
from jaxshare.serving.http.identities import new_id

VALIDATING, IN_PROGRESS, FINALIZING = "validating", "in_progress", "finalizing"
COMPLETED, FAILED, EXPIRED = "completed", "failed", "expired"
CANCELLING, CANCELLED = "cancelling", "cancelled"
ENDED = (COMPLETED, FAILED, EXPIRED, CANCELLED)
"""States of a batch, and those that it does not leave."""
_STATES = (VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING, *ENDED)


@dataclasses.dataclass
class Batch:
    """The facts of a batch.

    Attributes:
      identity, owner: see `StoredFile`.
      endpoint, input_file_id, completion_window, metadata: as it was asked for.
      created_at, expires_at: in seconds since 1970.
      status: one of the states; `times` has the second of each that it has had.
      end: the state in which it ends once its answers are files.
      total, completed, failed: lines in all, answered, and with errors.
      errors: what is wrong with the file, in OpenAI's form.
      output_file_id, error_file_id: of its answers, once there are any.
    """

    identity: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    created_at: int
    expires_at: int
    status: str = VALIDATING
    times: dict[str, int] = dataclasses.field(default_factory=dict)
    end: str = COMPLETED
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def has_ended(self) -> bool:
        """True if nothing of it is left to do."""
        return self.status in ENDED

    def enter(self, status: str, folder: Path) -> None:
        """Brings a state to the disk, and then takes it.

        Raises:
          OSError: the disk is full.
        """
        times = {**self.times, status: int(time.time())}
        facts = {**dataclasses.asdict(self), "status": status, "times": times}
        with whole_file(folder / f"{self.identity}.json") as file:
            file.write(json.dumps(facts))
        self.status, self.times = status, times

    def fail(self, code: str, message: str) -> None:
        """Adds a reason why it fails as a whole."""
        self.errors.append({"code": code, "line": None, "message": message, "param": None})

    def as_json(self) -> dict[str, Any]:
        """Returns the batch in OpenAI's form."""
        errors = {"object": "list", "data": self.errors} if self.errors else None
        names = [name for name in _STATES if name != VALIDATING]
        return {
            "id": self.identity,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            # They are files when it has ended.
            "output_file_id": self.output_file_id if self.has_ended else None,
            "error_file_id": self.error_file_id if self.has_ended else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(name) for name in names},
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": self.metadata,
        }


def read_batch(path: Path) -> Batch | None:
    """Returns the facts of a batch; None where they cannot be read."""
    try:
        return Batch(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


class BatchAnswers:
    """The answers of a batch so far: two files, one with those of status 200, one with the others.

    They grow by whole lines. A line that a kill has cut off is cut off when they are opened again.

    Args:
      batch: of which they are; its counts follow them.
      files: whose quota they count towards.

    Attributes:
      done: the names of the lines that have been answered.

    Raises:
      OSError: they cannot be opened.
    """

    def __init__(self, batch: Batch, files: FileStore):
        self._batch, self._files, self.done = batch, files, set[str]()
        self._opened: list[BinaryIO] = []
        try:
            for path in _paths(batch, files):
                self._opened.append(path.open("a+b", buffering=0))
            batch.completed, batch.failed = map(self._read, self._opened)
        except BaseException:
            self.close()
            raise

    def _read(self, file: BinaryIO) -> int:
        """Finds the lines that are there; returns their number."""
        file.seek(0)
        size = count = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            self.done.add(json.loads(line)["custom_id"])
            size, count = size + len(line), count + 1
        self._files.give(max(os.fstat(file.fileno()).st_size - size, 0))
        file.truncate(size)
        return count

    def add(self, answer: LineAnswer) -> None:
        """Writes the answer to a line, unless it has one.

        Raises:
          ApiError: the quota does not suffice.
          OSError: the disk is full.
        """
        if answer.custom_id in self.done:
            return
        line = json.dumps(answer.as_json(), ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        file = self._opened[0 if answer.is_complete else 1]
        self._files.take(len(line))
        start, rest = os.fstat(file.fileno()).st_size, memoryview(line)
        try:
            while rest:  # a disk that fills up takes a part of it
                rest = rest[file.write(rest) or 0 :]
        except OSError:
            self._files.give(len(line))
            with contextlib.suppress(OSError):
                file.truncate(start)
            raise
        self.done.add(answer.custom_id)
        if answer.is_complete:
            self._batch.completed += 1
        else:
            self._batch.failed += 1

    def close(self) -> None:
        """Closes the files."""
        for file in self._opened:
            file.close()

    def sync(self) -> None:
        """Brings the answers to the disk.

        Raises:
          OSError: it has failed.
        """
        for file in self._opened:
            os.fsync(file.fileno())

    def name_files(self) -> None:
        """Gives the files that have lines their identities."""
        if self._batch.completed and not self._batch.output_file_id:
            self._batch.output_file_id = new_id("file-")
        if self._batch.failed and not self._batch.error_file_id:
            self._batch.error_file_id = new_id("file-")


def publish(batch: Batch, files: FileStore) -> None:
    """Makes files of the client of the answers of a batch that is FINALIZING.

    It may be called again after a kill, since the batch has the identities of the files. Answers
    that are files already stay as they are.

    Raises:
      OSError: the disk has failed.
    """
    kinds = (("output_file_id", "output"), ("error_file_id", "errors"))
    for path, (field, kind) in zip(_paths(batch, files), kinds, strict=True):
        identity = getattr(batch, field)
        if identity is None:
            path.unlink(missing_ok=True)
            continue
        name = f"{batch.identity}_{kind}.jsonl"
        files.move_in(path, StoredFile(identity, batch.owner, name, OUTPUT, 0, int(time.time())))


def _paths(batch: Batch, files: FileStore) -> list[Path]:
    """Where the answers of a batch are until they are files: those of status 200, and others."""
    return [files.batches / f"{batch.identity}{suffix}" for suffix in ANSWERS]
