"""The tensors of a checkpoint in Hugging Face form: safetensors files, single or sharded."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxshare.models.config_fields import cut, first_line, read_json, some_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_OCTETS = {"F8_E4M3": jnp.float8_e4m3fn, "F8_E8M0": jnp.float8_e8m0fnu}
"""Dtypes of eight bits for which safetensors has no NumPy array."""


class CheckpointError(ValueError):
    """A weights file cannot be read, or its tensors do not fit the model; the message lists them."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, with its shape and dtype as safetensors names them."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint folder, by name, from the headers of its files alone.

    Raises:
      FileNotFoundError: no safetensors in the folder, or a shard of the index is missing.
      CheckpointError: a file that is truncated or corrupt, or an index that does not match its
        shards.
    """
    if (folder / SINGLE).is_file():
        return tensors_of_file(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _read_index(folder)
    others = sorted(
        p.name
        for p in folder.iterdir()
        if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".safetensors", ".gguf")
    )
    pickled = [name for name in others if not name.endswith((".safetensors", ".gguf"))]
    advice = (
        "pickled weights are never loaded, because they can run code: convert them to safetensors"
        if pickled
        else f"weights are read from {SINGLE}, or from shards that {INDEX} lists"
    )
    raise FileNotFoundError(
        f"{folder} has no {SINGLE} and no {INDEX}{f', only {others[0]}' if others else ''}; "
        f"{advice}"
    )


def _read_index(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise CheckpointError(
            f"{index} must have a weight_map from the names of tensors to the files that hold "
            "them; fetch it again"
        )
    tensors: dict[str, StoredTensor] = {}
    problems = []
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise CheckpointError(
                f"{index} names the file {cut(name)!r}, but shards must be in the same folder"
            )
        if not _is_file(folder / name):
            raise FileNotFoundError(
                f"{folder} has no {cut(name)}, which {INDEX} lists: fetch the missing shard"
            )
        for tensor, stored in tensors_of_file(folder / name).items():
            if weight_map.get(tensor) == name:
                tensors[tensor] = stored
            else:
                problems.append(
                    f"{tensor} is in {name} and listed "
                    f"{f'in {weight_map[tensor]}' if tensor in weight_map else 'nowhere'}"
                )
    problems += [
        f"{tensor} is listed in {weight_map[tensor]} and not there"
        for tensor in weight_map.keys() - tensors.keys()
    ]
    if problems:
        raise CheckpointError(
            f"{index} does not match its shards: {some_of(map(cut, problems))}; fetch the checkpoint "
            "again"
        )
    return tensors


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def tensors_of_file(file: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of one file, by name, from its header alone.

    Raises:
      CheckpointError: it is truncated or corrupt.
    """
    with _open(file) as tensors:
        names = tensors.keys()  # `tensors` is no dict and cannot be iterated
        slices = {name: tensors.get_slice(name) for name in names}
        return {
            name: StoredTensor(file, tuple(s.get_shape()), s.get_dtype())
            for name, s in slices.items()
        }


@contextlib.contextmanager
def _open(file: Path):
    try:
        with safe_open(file, framework="numpy") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        with file.open("rb") as content:
            pointer = content.read(64).startswith(b"version https://git-lfs")
        reason = (
            "it is a Git LFS pointer: run git lfs pull"
            if pointer
            else "it is truncated or corrupt: fetch it again"
        )
        raise CheckpointError(
            f"{file} is not a complete safetensors file ({first_line(error)}); {reason}"
        ) from error


@contextlib.contextmanager
def opened(tensor: StoredTensor, name: str) -> Iterator[Any]:
    """Opens a tensor: inside a with statement it is what can be sliced.

    Raises:
      CheckpointError: a file that cannot be read.
    """
    if tensor.dtype in _OCTETS:
        yield _read_octets(tensor, name)
        return
    with _open(tensor.file) as tensors:
        yield tensors.get_slice(name)


def _read_octets(tensor: StoredTensor, name: str) -> np.ndarray:
    """Reads a tensor of a dtype of eight bits, for which safetensors has no NumPy array."""
    with tensor.file.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        start, stop = json.loads(file.read(size))[name]["data_offsets"]
        file.seek(8 + size + start)
        content = file.read(stop - start)
    if len(content) != math.prod(tensor.shape):
        raise CheckpointError(f"{tensor.file} is truncated: fetch it again")
    return np.frombuffer(content, _OCTETS[tensor.dtype]).reshape(tensor.shape)
