"""Saved sessions of workers: a folder of the server, with a quota."""

import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from jaxshare.paths import WriteError, make_folder, reason, whole_file
from jaxshare.serving.checkpoints import SaveError
from jaxshare.serving.http.errors import ApiError, bad_request
from jaxshare.serving.http.sessions.running import RunningSession
from jaxshare.serving.inputs import token_bytes
from jaxshare.serving.workers import Workers

_log = logging.getLogger("jaxshare.http")

_IDENTITY = re.compile(r"session[0-9a-f]{32}")
_FACTS, _CHECKPOINTS = "session.json", "checkpoints"
_OTHER_BYTES = 2**20
"""The bytes of a save that are kept free for all but keys and values: its texts and its lists."""
_SHOWN = 256
"""The characters of a problem that lists of saves have."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """The facts of a saved session, which stand beside its checkpoints.

    Attributes:
      identity, owner, finish_at: see `RunningSession`.
      names: of the workers.
      problem: its first 256 characters.
      passes: of the session at its newest save.
      saved_at: the time of that, in seconds since 1970.
    """

    identity: str
    owner: str
    finish_at: tuple[int, ...]
    names: tuple[str, ...]
    problem: str
    passes: int
    saved_at: int

    def as_json(self, size: int) -> dict[str, Any]:
        """Returns what clients see of it; `size` is in bytes."""
        return {
            "id": self.identity,
            "object": "workers.save",
            "names": [*self.names],
            "problem": self.problem,
            "passes": self.passes,
            "saved_at": self.saved_at,
            "bytes": size,
        }


class SavedSessions:
    """Saves sessions into a folder, and finds them there after a restart.

    Each has a folder of its own, named by its identity, which the server has made: no request names
    a path. A session's newest save is the one that is restored; the one before it is kept in case
    the newest is damaged.

    Args:
      folder: None takes no saves.
      max_bytes: of all saves together.
    """

    def __init__(self, folder: str | None, max_bytes: int):
        self._folder = None if folder is None else Path(folder)
        self._max_bytes = max_bytes
        self._one = threading.Lock()  # saves are counted and written one at a time

    def save(self, running: RunningSession, workers: Workers) -> dict[str, Any]:
        """Saves a session; in its thread.

        Raises:
          ApiError: there is no folder, the quota does not suffice, or the disk is full.
        """
        folder = self._root() / running.identity
        expected = sum(workers.block_lengths.values()) * token_bytes(workers.model) + _OTHER_BYTES
        with self._one:
            used = _size(self._root())
            if used + expected > self._max_bytes:
                raise ApiError(
                    507,
                    f"this save would take about {expected} bytes beside {used} of others, of "
                    f"{self._max_bytes} that the server keeps; delete saves, or give the server "
                    "more with --sessions-bytes",
                    code="storage_full",
                )
            saved = Saved(
                running.identity,
                running.owner,
                running.finish_at,
                workers.names,
                workers.settings["problem"][:_SHOWN],
                workers.passes,
                int(time.time()),
            )
            try:
                make_folder(folder)
                workers.save(folder / _CHECKPOINTS, wait=True)
                with whole_file(folder / _FACTS) as file:
                    file.write(json.dumps(dataclasses.asdict(saved)))
            except (OSError, WriteError, SaveError) as error:
                _log.error("a session of workers could not be saved: %s", error)
                raise ApiError(
                    507,
                    "the session could not be saved; the log of the server has the reason",
                    code="storage_failed",
                ) from error
            return saved.as_json(_size(folder))

    def list(self, owner: str) -> list[dict[str, Any]]:
        """Returns the saves of a key, the newest first; none where the server keeps none."""
        if self._folder is None:
            return []
        mine = [
            each
            for path in self._folder.glob("session*")
            if (each := _read(path)) and each.owner == owner
        ]
        mine.sort(key=lambda saved: saved.saved_at, reverse=True)
        return [each.as_json(_size(self._folder / each.identity)) for each in mine]

    def find(self, identity: str, owner: str) -> tuple[Saved, Path]:
        """Returns the facts of a save, and the folder of its checkpoints.

        Raises:
          ApiError: there is no folder, or this key has no such save (404).
        """
        path = self._root() / identity
        saved = _read(path) if _IDENTITY.fullmatch(identity) else None
        if saved is None or saved.owner != owner:
            raise ApiError(
                404,
                "there is no such save; GET /v1/workers/saves lists those that are",
                param="identity",
            )
        return saved, path / _CHECKPOINTS

    def delete(self, identity: str, owner: str) -> None:
        """Deletes a save.

        Raises:
          ApiError: see `find`.
        """
        _, path = self.find(identity, owner)
        with self._one:
            shutil.rmtree(path.parent, ignore_errors=True)

    def _root(self) -> Path:
        if self._folder is None:
            raise bad_request(
                "this server keeps no saves of sessions; start it with --sessions-folder",
                code="no_sessions_folder",
            )
        return self._folder


def make_root(folder: str) -> None:
    """Makes the folder of saves, and writes a file there, so that the first save does not fail.

    Raises:
      ValueError: it cannot be written.
    """
    try:
        make_folder(Path(folder))
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"-")
    except OSError as error:
        raise ValueError(
            f"--sessions-folder {folder} cannot be written ({reason(error)}); give another folder"
        ) from error


def _read(path: Path) -> Saved | None:
    """The facts of a save, or None where there are none that can be read."""
    try:
        found = json.loads((path / _FACTS).read_bytes())
        return Saved(
            **{**found, "finish_at": tuple(found["finish_at"]), "names": tuple(found["names"])}
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _size(folder: Path) -> int:
    """The bytes of all files of a folder; those that disappear meanwhile are left out."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_size
    return total
