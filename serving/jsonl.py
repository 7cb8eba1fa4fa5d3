"""Result files: JSON lines appended by one process alone, and files that are written atomically."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxshare.paths import whole_file


def line(value: Any) -> bytes:
    """Encodes a value as a line of JSON."""
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def sha256(data: bytes) -> str:
    """Returns the hash that identifies an input."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def open_alone(path: Path, mode: str, advice: str) -> BinaryIO:
    """Opens a file for writing by this process alone; two processes would do every job twice.

    Args:
      path: of the file.
      mode: as `open` takes it.
      advice: the end of the error message.

    Raises:
      ValueError: a file that cannot be written, or that another process is writing.
    """
    try:
        file: Any = open(path, mode)  # noqa: SIM115, the caller closes it
    except OSError as error:
        raise ValueError(f"the output {path} cannot be written ({error}); {advice}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ValueError(
            f"the output {path} is being written by another process; wait for it, or {advice}"
        ) from error
    except OSError:  # some file systems have no locks
        pass
    return file


def append(file: BinaryIO, value: Any, advice: str) -> None:
    """Appends a line and flushes it.

    Raises:
      ValueError: it cannot be written; the message ends with `advice`.
    """
    try:
        file.write(line(value))
        file.flush()
    except OSError as error:
        raise ValueError(
            f"the output {file.name} cannot be written ({error}); make room, and {advice}"
        ) from error


def lines_of(file: BinaryIO) -> list[bytes]:
    """Reads the complete lines of a file; an incomplete last one is cut off.

    A killed process may have left it.
    """
    *lines, incomplete = file.read().split(b"\n")
    file.truncate(file.seek(-len(incomplete), os.SEEK_END))
    return lines


def write(path: Path, lines: Iterable[bytes], advice: str) -> None:
    """Writes a file atomically.

    Raises:
      ValueError: it cannot be written; the message ends with `advice`.
    """
    try:
        with whole_file(path, "wb") as file:
            file.writelines(lines)
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error}); make room, and {advice}") from error


def read_settings(path: Path, format: str) -> dict[str, Any]:
    """Reads the settings of a file {"format": ..., "settings": {...}}.

    Raises:
      ValueError: the file is missing or damaged, or has another format.
    """
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != format:
            raise ValueError(f"its format is not {format!r}")
        return {**content["settings"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def check_settings(
    start: str, saved: Mapping[str, Any], given: Mapping[str, Any], advice: str
) -> None:
    """Checks that settings have not changed since a job started.

    Args:
      start: the start of the error message, such as "the job of out.jsonl began".
      saved: the settings at that time.
      given: the settings now.
      advice: the end of the error message.

    Raises:
      ValueError: a setting has changed.
    """
    for name in {**saved, **given}:
        if saved.get(name) != given.get(name):
            raise ValueError(
                f"{start} with {name} {json.dumps(saved.get(name))}, not "
                f"{json.dumps(given.get(name))}; give it as it was, or {advice}"
            )
