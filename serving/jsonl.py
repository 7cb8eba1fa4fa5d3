"""Result files: JSON lines appended by one process alone, and files that are written atomically."""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxshare.paths import WriteError, reason, sync_folder, whole_file
from jaxshare.serving import checksums


def line(value: Any) -> bytes:
    """Encodes a value as a line of JSON."""
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def sha256(data: bytes) -> str:
    """Returns the hash that identifies an input."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def open_alone(path: Path, mode: str, advice: str) -> BinaryIO:
    """Opens a file for writing by this process alone; two processes would do every job twice.

    It has no buffer, so that closing it writes nothing.

    Args:
      path: of the file.
      mode: as `open` takes it.
      advice: the end of the error message.

    Raises:
      ValueError: a file that cannot be written, or that another process is writing.
    """
    file: Any = None
    try:
        file = open(path, mode, buffering=0)  # noqa: SIM115, the caller closes it
        if "x" in mode:
            sync_folder(path.parent)
    except BaseException as error:
        if file:
            file.close()
        if not isinstance(error, OSError):
            raise
        raise ValueError(f"the output {WriteError.of(path, error)}; {advice}") from error
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


def append(file: BinaryIO, value: Mapping[str, Any], advice: str, *, sync: bool = False) -> None:
    """Appends a line with its checksum: the whole line, or nothing of it.

    Args:
      file: of `open_alone`, at its end.
      value: JSON values by name.
      advice: the end of the error message.
      sync: bring it to the disk at once, so that it survives a power loss: for lines that take long
        to make and are not written again.

    Raises:
      ValueError: it cannot be written.
    """
    rest = memoryview(line(checksums.sealed(value)))
    start = file.tell()
    try:
        while rest:  # a disk that fills up takes a part of it
            rest = rest[file.write(rest) :]
        if sync:
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            file.truncate(start)
        raise ValueError(f"the output {WriteError.of(file.name, error)}; {advice}") from error


def lines_of(file: BinaryIO) -> list[bytes]:
    """Reads the complete lines of a file; an incomplete last one is cut off.

    A killed process may have left it.

    Raises:
      ValueError: the file cannot be read, or not be cut off.
    """
    try:
        *lines, incomplete = file.read().split(b"\n")
        file.truncate(file.seek(-len(incomplete), os.SEEK_END))
    except OSError as error:
        raise ValueError(
            f"{file.name} cannot be read and continued ({reason(error)}); copy it to a disk that "
            "works, and go on there"
        ) from error
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
        raise ValueError(f"{WriteError.of(path, error)}; {advice}") from error


def read_settings(path: Path, format: str) -> dict[str, Any]:
    """Reads the settings of a file {"format": ..., "settings": {...}}, with or without a checksum.

    Raises:
      ValueError: the file is missing or damaged, or has another format.
    """
    try:
        content = checksums.loads(path.read_bytes())
        if content["format"] != format:
            raise ValueError(f"its format is not {format!r}")
        return {**content["settings"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def check_settings(
    start: str,
    saved: Mapping[str, Any],
    given: Mapping[str, Any],
    advice: str,
    *,
    causes: Mapping[str, str] | None = None,
    notes: Mapping[str, str] | None = None,
    as_options: bool = False,
) -> None:
    """Checks that settings have not changed since a job started.

    Args:
      start: the start of the error message, such as "the job of out.jsonl began".
      saved: the settings at that time.
      given: the settings now.
      advice: the end of the error message.
      causes: by the name of a setting whose values say nothing to a person, the sentence that does.
        These are compared last, since another setting may be why they differ.
      notes: by the name of a setting, what is said beside its values.
      as_options: the settings are options of the command, and named so.

    Raises:
      ValueError: a setting has changed.
    """
    causes, notes = causes or {}, notes or {}
    for name in sorted({**saved, **given}, key=lambda name: name in causes):
        then, now = saved.get(name), given.get(name)
        if then == now:
            continue
        if name in causes:
            what = causes[name]
        elif as_options:
            what = f"{start} {_options(name, then, now)}"
        else:
            what = f"{start} with {name} {json.dumps(then)}, not {json.dumps(now)}"
        note = f"; {notes[name]}" if name in notes else ""
        raise ValueError(f"{what}{note}; give it as it was, or {advice}")


def _options(name: str, then: Any, now: Any) -> str:
    """The values of an option, as they were given: "with --n 2, not 3", "without --chat, ..."."""
    option = f"--{name.replace('_', '-')}"
    if then is None or then is False:
        return f"without {option}, not with {_option(option, now)}"
    if now is None or now is False:
        return f"with {_option(option, then)}, not without it"
    return f"with {_option(option, then)}, not {_option('', now)}"


def _option(option: str, value: Any) -> str:
    if value is True:
        return option
    if isinstance(value, list) and all(isinstance(each, int | str) for each in value):
        value = ",".join(map(str, value))
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{option} {text}".strip()
