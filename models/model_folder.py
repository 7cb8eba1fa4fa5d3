"""Folders of models that are made of others: written under a temporary name and renamed at the end,
so that they are never incomplete."""

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from jaxshare import paths
from jaxshare.models.safetensors_files import INDEX

_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".msgpack",
    ".h5",
    INDEX.rpartition("/")[2],
)


def check_folders(source: Path, target: Path) -> None:
    """Raises FileNotFoundError for a source that is no model, ValueError for a target that exists."""
    check_target(target)
    if not (source / "config.json").is_file():
        raise FileNotFoundError(
            f"{source} has no config.json: a model folder holds config.json and model.safetensors, "
            "or params as `jaxshare convert` writes it"
        )


def check_target(target: Path) -> None:
    """Raises ValueError for a target that exists."""
    if target.exists():
        raise ValueError(f"{target} exists; give a folder that does not, or delete it first")


def write_settings(file: Path, settings: Mapping[str, Any]) -> None:
    """Writes a file of settings, such as config.json, in a folder that is being made."""
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def new_folder(source: Path, target: Path) -> Iterator[Path]:
    """Makes a folder with the files of a model but its weights, to be written to; it becomes the
    target at the end of the with statement, and goes where that fails. A source that is a file has
    no others.

    Raises:
      ValueError: a folder that cannot be made for the target.
      WriteError: the target cannot be written; nothing of it is left.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ValueError(f"{target} cannot be written ({error}); give a place that can") from error
    try:
        partial.chmod(0o777 & ~umask())
        for file in source.iterdir() if source.is_dir() else ():
            is_weights = file.name.endswith(_WEIGHT_SUFFIXES)
            if file.is_file() and not is_weights and not file.name.startswith("."):
                shutil.copyfile(file, partial / file.name)
        yield partial
        paths.sync_tree(partial)
        os.rename(partial, target)
        paths.sync_folder(target.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if failed := _write_failure(error):
            raise paths.WriteError.of(target, failed) from error
        raise


def _write_failure(error: BaseException) -> OSError | None:
    """Returns the system's error where a write has failed; safetensors has it in its text."""
    if isinstance(error, SafetensorError) and (found := re.search(r"os error (\d+)", str(error))):
        return OSError(int(found[1]), os.strerror(int(found[1])))
    return error if isinstance(error, OSError) and error.errno != errno.ENOENT else None


def umask() -> int:
    """Returns the permissions that new files do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
