"""GGUF files: what their metadata says, and where their tensors are."""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from jaxshare.extras import MissingExtraError
from jaxshare.models.config_fields import cut, first_line
from jaxshare.models.gguf.blocks import BLOCK_KINDS
from jaxshare.models.gguf.bounds import BigEndianError, check_bounds
from jaxshare.models.safetensors_files import CheckpointError

SUFFIX = ".gguf"
PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(np.uint16)}
"""The kinds of plain tensors, and the dtypes of their bits."""


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """A tensor in a file.

    Attributes:
      kind: its type, as llama.cpp names it.
      shape: of its numbers, the axis of a row's last.
      start: the byte at which it begins.
    """

    kind: str
    shape: tuple[int, ...]
    start: int

    @property
    def stored(self) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and shape of what the file has: of plain numbers, or of bytes of blocks."""
        if self.kind in PLAIN:
            return PLAIN[self.kind], self.shape
        form = BLOCK_KINDS[self.kind]
        blocks = self.shape[-1] // form.numbers
        return np.dtype(np.uint8), (*self.shape[:-1], blocks * form.size)


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """A file whose header was read.

    Attributes:
      path: of the file.
      values: of its metadata by their keys.
      tensors: by their names.
    """

    path: Path
    values: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture"))

    def stored(
        self, name: str, start: int = 0, stop: int | None = None
    ) -> Shaped[np.ndarray, "..."]:
        """Returns rows of a tensor as the file has them.

        Raises:
          CheckpointError: the file has become shorter.
        """
        tensor = self.tensors[name]
        dtype, (rows, *rest) = tensor.stored
        stop = rows if stop is None else stop
        row = math.prod(rest)
        count, first = (stop - start) * row, tensor.start + start * row * dtype.itemsize
        try:
            found = np.fromfile(self.path, dtype, count, offset=first)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error})") from error
        if found.size != count:
            raise CheckpointError(f"{self.path} ends within {name}; fetch it again")
        return found.reshape(stop - start, *rest)


def find(path: Path) -> Path | None:
    """Returns the GGUF file that a path stands for: itself, or the only weights of a folder.

    Raises:
      CheckpointError: a folder with several.
    """
    if path.suffix == SUFFIX and path.is_file():
        return path
    if not path.is_dir():
        return None
    names = sorted(each.name for each in path.iterdir())
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return None
    found = [name for name in names if name.endswith(SUFFIX) and not name.startswith("mmproj")]
    if len(found) > 1:
        raise CheckpointError(
            f"{path} has several GGUF files, {', '.join(map(cut, found[:9]))}: give the path of one"
        )
    return path / found[0] if found else None


def read_header(path: Path) -> GGUFFile:
    """Reads the metadata of a file, and the places of its tensors.

    Raises:
      MissingExtraError: the package gguf is not installed.
      CheckpointError: a file that is truncated or corrupt, one of several parts, or tensors of a
        kind that is not read.
    """
    try:
        import gguf  # here, because it is an option
    except ImportError as error:
        raise MissingExtraError(
            f"{path} is read with the package gguf, which is not installed", "gguf"
        ) from error

    with path.open("rb") as content:
        start = content.read(64)
    if start[:4] != b"GGUF":
        pointer = start.startswith(b"version https://git-lfs")
        raise CheckpointError(
            f"{path} is no GGUF file"
            + (": it is a Git LFS pointer; run git lfs pull" if pointer else "; fetch it again")
        )
    try:
        check_bounds(path)
        reader = gguf.GGUFReader(path)
        values = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {
            each.name: GGUFTensor(
                each.tensor_type.name, tuple(map(int, each.shape[::-1])), int(each.data_offset)
            )
            for each in reader.tensors
        }
    except BigEndianError as error:
        raise CheckpointError(
            f"{path} has big-endian numbers; give one of little-endian numbers"
        ) from error
    except Exception as error:  # of many types: the package checks little itself
        raise CheckpointError(
            f"{path} is not a complete GGUF file that can be read ({first_line(error)}); it is "
            "truncated or corrupt, or of a kind that the package gguf does not know: fetch it "
            "again, or install a newer gguf"
        ) from error
    _check(path, values, tensors)
    _check_places(path, tensors, reader.data_offset)
    return GGUFFile(path, values, tensors)


def _check(path: Path, values: dict[str, Any], tensors: dict[str, GGUFTensor]) -> None:
    if (parts := values.get("split.count", 1)) != 1:
        raise CheckpointError(
            f"{path} is one of {parts} parts: merge them with llama-gguf-split --merge"
        )
    kinds = {each.kind: name for name, each in tensors.items()}
    if unknown := sorted(kinds.keys() - PLAIN.keys() - BLOCK_KINDS.keys()):
        raise CheckpointError(
            f"{path} has tensors of kind {', '.join(unknown)}, for example {kinds[unknown[0]]}; "
            f"read are {', '.join((*PLAIN, *BLOCK_KINDS))}: give a file with those alone, for "
            "example one named Q4_K_M or Q8_0"
        )


def _check_places(path: Path, tensors: dict[str, GGUFTensor], start: int) -> None:
    """Refuses tensors outside the file, and those that share bytes with another or with the header."""
    size, before, end = os.path.getsize(path), "its header", start
    for name, each in sorted(tensors.items(), key=lambda item: item[1].start):
        dtype, shape = each.stored
        if each.start < end:
            raise CheckpointError(
                f"{path} is corrupt: {cut(name)} begins within {cut(before)}; fetch it again"
            )
        before, end = name, each.start + math.prod(shape) * dtype.itemsize
        if end > size:
            raise CheckpointError(
                f"{path} ends within {cut(name)}: it is truncated; fetch it again"
            )
