"""Checksums by which damage is found on reading: BLAKE3 of JSON values, of lines and of files.

A value that is written has the field "checksum", which is of its other fields; values of former
versions have none, and are read all the same. A folder has a list of the checksums of its files.
"""

import difflib
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from jaxshare.paths import sync_tree, whole_file

FIELD = "checksum"
_BYTES = 8
"""Bytes of a checksum: among 2^32 lines, a damaged one has a chance of 2^-32 to match one."""


def checksum(data: bytes) -> str:
    """Returns the checksum of bytes, as 16 hexadecimal digits."""
    return blake3(data).hexdigest(length=_BYTES)


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a JSON value with its checksum as the first field.

    Bytes that are lost between two texts of a line leave JSON; after the last text they would take
    the checksum with them.
    """
    return {FIELD: _checksum_of(value), **value}


def unsealed(value: Any) -> Any:
    """Returns a JSON value without its checksum, which is checked where it has one.

    Raises:
      ValueError: the value has changed since `sealed`.
    """
    if not isinstance(value, dict):
        return value
    if FIELD not in value:
        # Damage may reach the name of the field; then the value only looks like one without.
        first = next(iter(value), "")[:40]
        if difflib.get_close_matches(FIELD, [first]):
            raise ValueError(f"its first field is {first!r}, which may have been {FIELD!r}")
        return value
    content = {name: part for name, part in value.items() if name != FIELD}
    if value[FIELD] != _checksum_of(content):
        raise ValueError("its checksum is not that of its content")
    return content


def parse(text: str | bytes) -> Any:
    """Parses JSON.

    Raises:
      ValueError: it is not JSON, or is nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def loads(text: str | bytes) -> Any:
    """Parses JSON and returns its value `unsealed`.

    Raises:
      ValueError: it is not JSON, is nested too deeply to be read, or has changed.
    """
    return unsealed(parse(text))


def _checksum_of(value: Mapping[str, Any]) -> str:
    # Through one form, so that spaces in a line do not count.
    return checksum(json.dumps(value).encode())


def write_list(folder: Path, name: str, leave_out: Collection[str] = ()) -> None:
    """Brings all files of a folder to the disk, and writes the list of their checksums.

    Args:
      folder: with folders in it.
      name: of the list, a file in the folder.
      leave_out: names of files at the top of the folder that are not in the list.

    Raises:
      OSError: it cannot be written, or a file cannot be read.
    """
    sync_tree(folder)
    files = {
        path: _file_checksum(folder / path) for path in _files(folder) if path not in leave_out
    }
    with whole_file(folder / name) as file:
        json.dump(sealed({"files": files}), file, indent=1)


def check_list(folder: Path, name: str) -> None:
    """Checks the files of a folder against the list that `write_list` has written.

    Args:
      folder, name: see `write_list`.

    Raises:
      ValueError: a file is missing or has changed, or the list cannot be read; names the file.
      OSError: a file cannot be read.
    """
    try:
        files = loads((folder / name).read_bytes())["files"]
        wanted = {str(path): str(digest) for path, digest in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / name} is damaged: {error}") from error
    for path, digest in wanted.items():
        if not (folder / path).is_file():
            raise ValueError(f"{folder / path} is missing")
        if _file_checksum(folder / path) != digest:
            raise ValueError(f"{folder / path} is damaged: its checksum is not the saved one")


def _files(folder: Path) -> list[str]:
    """Lists the files in a folder and the folders in it, by their paths from the folder."""
    return sorted(
        os.path.relpath(os.path.join(path, name), folder)
        for path, _, names in os.walk(folder)
        for name in names
    )


def _file_checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, blake3).hexdigest()  # pyright: ignore[reportArgumentType]
