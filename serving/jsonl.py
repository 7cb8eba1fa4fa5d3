"""Files of results: JSON lines that are appended as results come, by one process alone, and files
that are written whole or not at all."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxshare.paths import whole_file


def line(value: Any) -> bytes:
    """A value as a line of JSON."""
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def sha256(data: bytes) -> str:
    """What tells one input from another."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def open_alone(path: Path, mode: str, do: str) -> BinaryIO:
    """Opens a file to write to it, for this process alone: two that go on with one job would do
    everything twice.

    Args:
      path, mode: as `open` takes them.
      do: what to advise where that cannot be.

    Raises:
      ValueError: a file that cannot be written, or that another process is writing.
    """
    try:
        file: Any = open(path, mode)  # noqa: SIM115, the caller closes it
    except OSError as error:
        raise ValueError(f"the output {path} cannot be written ({error}); {do}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ValueError(
            f"the output {path} is being written by another process; wait for it, or {do}"
        ) from error
    except OSError:  # some file systems have no locks
        pass
    return file


def append(file: BinaryIO, value: Any, do: str) -> None:
    """Writes a line behind the others, at once.

    Raises:
      ValueError: no room; `do` is what to advise.
    """
    try:
        file.write(line(value))
        file.flush()
    except OSError as error:
        raise ValueError(
            f"the output {file.name} cannot be written ({error}); make room, and {do}"
        ) from error


def lines_of(file: BinaryIO) -> list[bytes]:
    """The lines that are there already. A last one that was being written when its writer was
    killed is cut off."""
    *lines, rest = file.read().split(b"\n")
    file.truncate(file.seek(-len(rest), os.SEEK_END))
    return lines


def write(path: Path, lines: Iterable[bytes], do: str) -> None:
    """Writes a file whole or not at all.

    Raises:
      ValueError: it cannot be written; `do` is what to advise.
    """
    try:
        with whole_file(path, "wb") as file:
            file.writelines(lines)
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error}); make room, and {do}") from error


def read_settings(path: Path, format: str) -> dict[str, Any]:
    """The settings that a file {"format": ..., "settings": {...}} keeps.

    Raises:
      ValueError: there is none, it is damaged, or it has another format.
    """
    try:
        known = json.loads(path.read_bytes())
        if known["format"] != format:
            raise ValueError(f"its format is not {format!r}")
        return {**known["settings"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def check_settings(began: str, then: Mapping[str, Any], now: Mapping[str, Any], do: str) -> None:
    """Finds what has changed since work began.

    Args:
      began: what did: "the job of out.jsonl began".
      then, now: settings.
      do: what to advise beside giving them as they were.

    Raises:
      ValueError: a setting is another one.
    """
    for name in {**then, **now}:
        if then.get(name) != now.get(name):
            raise ValueError(
                f"{began} with {name} {json.dumps(then.get(name))}, not "
                f"{json.dumps(now.get(name))}; give it as it was, or {do}"
            )
