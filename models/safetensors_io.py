"""Weights in Hugging Face form: safetensors files, single or sharded, to `Decoder` parameters.

Every tensor is checked before the first is read. Parameters are read one at a time, the largest
first: the memory beyond them, one parameter and its converted copy, is small by the time they fill
memory. Files are reopened for every tensor, since the pages of an open mapping
count as memory.
"""

import contextlib
import dataclasses
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from jaxshare.models.config import FAMILIES, ModelConfig
from jaxshare.models.config_fields import cut, first_line, read_json
from jaxshare.models.tensor_names import (
    ExpectedTensor,
    Part,
    as_stored,
    assembled,
    expected_tensors,
    kept_dtype,
    prefix_of,
    stored_shapes,
)

DTYPES = {"BF16": jnp.bfloat16, "F16": jnp.float16, "F32": jnp.float32}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

CHECK_VARIABLE = "JAXSHARE_CHECK_WEIGHTS"
"""The environment variable that is "off" where parameters may be NaN or infinite."""
_MAX_PROBLEMS = 100
"""The most tensors that an error lists."""
PROGRESS_BYTES = 2**30
"""Reading this much takes long enough for a progress bar."""


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
        return _read_header(folder / SINGLE)
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
        for tensor, stored in _read_header(folder / name).items():
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
        listed = [cut(problem) for problem in sorted(problems)[:_MAX_PROBLEMS]]
        raise CheckpointError(
            f"{index} does not match its shards: {'; '.join(listed)}; fetch the checkpoint again"
        )
    return tensors


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _read_header(file: Path) -> dict[str, StoredTensor]:
    with opened(file) as tensors:
        names = tensors.keys()  # `tensors` is no dict and cannot be iterated
        slices = {name: tensors.get_slice(name) for name in names}
        return {
            name: StoredTensor(file, tuple(s.get_shape()), s.get_dtype())
            for name, s in slices.items()
        }


@contextlib.contextmanager
def opened(file: Path):
    """Opens a safetensors file; raises CheckpointError if it is not a complete one."""
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


def match_tensors(
    config: ModelConfig, stored: dict[str, StoredTensor], source: Path
) -> dict[str, ExpectedTensor]:
    """Checks every stored tensor against the model, and returns the model's parameters.

    Raises:
      CheckpointError: lists all that are missing, unexpected, of a wrong shape or of a dtype that
        is not a plain float.
    """
    expected = as_stored(expected_tensors(config), stored)
    shapes = stored_shapes(expected)
    parts = [part for tensor in expected.values() for part in tensor.parts if part.scales]
    packed = {name for part in parts for name in (part.name, part.scales)}
    problems = [f"{name} is missing" for name in shapes.keys() - stored.keys()]
    problems += [
        f"{name} is unexpected"
        for name in stored.keys() - shapes.keys()
        if not _ignored(name, config)
    ]
    for name in shapes.keys() & stored.keys():
        if stored[name].shape != shapes[name]:
            problems.append(f"{name} has shape {stored[name].shape}, not {shapes[name]}")
        dtypes = ("U8",) if name in packed else tuple(DTYPES)
        if stored[name].dtype not in dtypes:
            problems.append(
                f"{name} has dtype {stored[name].dtype}, not one of {', '.join(dtypes)}"
            )
    if problems:
        numbered = sorted(
            problems,
            key=lambda text: [
                int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)
            ],
        )
        listed = numbered[:_MAX_PROBLEMS]
        if len(numbered) > len(listed):
            listed.append(f"and {len(numbered) - len(listed)} more")
        raise CheckpointError(
            f"the tensors in {source} are not those that its config.json describes: "
            f"{'; '.join(listed)}; fetch the checkpoint again, or correct its config.json"
        )
    return expected


_OF_IMAGES = "vision_tower.", "multi_modal_projector."


def _ignored(name: str, config: ModelConfig) -> bool:
    """Returns True for rope frequencies, which config.json gives, for a tied head, for layers after
    the last that predict later tokens, in families that have them, and for parts that are of
    images."""
    prefix = prefix_of(config)
    if prefix and name.startswith(_OF_IMAGES):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    is_later = layer is not None and int(layer[1]) >= config.num_layers
    if is_later and FAMILIES[config.architecture].predicts_later_tokens:
        return True
    return name.endswith(".rotary_emb.inv_freq") or (
        name == f"{prefix}lm_head.weight" and config.tie_embeddings
    )


def read_params(
    stored: dict[str, StoredTensor],
    expected: dict[str, ExpectedTensor],
    dtype: jnp.dtype,
    put: Callable[[tuple[str, ...], np.ndarray], Array] | None = None,
    check: bool = True,
    done: Mapping[tuple[str, ...], Array] | None = None,
) -> dict[str, Any]:
    """Reads the tensors into a tree of arrays for `Decoder.apply`.

    Args:
      stored: from `stored_tensors`.
      expected: from `match_tensors`.
      dtype: of the parameters.
      put: (path, value on the host) -> value on its devices; default the default device.
      check: refuse what is not finite.
      done: the other parameters, which have been read (`jaxshare.models.partial_reads`).

    Raises:
      CheckpointError: a file that became unreadable, or a tensor that is not finite.
    """
    params: dict[tuple[str, ...], Array] = dict(done or {})
    for name, value in read_tensors(stored, expected):
        path = expected[name].path
        kept = kept_dtype(path, dtype)
        if check and not _is_finite(value, kept):
            part = next(
                part
                for part, one in zip(expected[name].parts, value, strict=False)
                if not expected[name].is_stacked or not _is_finite(one, kept)
            )
            raise not_finite(f"{stored[part.name].file}: {part.name}", value.dtype, kept)
        params[path] = put(path, value.astype(kept)) if put else _on_device(value, kept)
        params[path].block_until_ready()
    return {"params": nested(params)}


def _is_finite(value: Float[np.ndarray, "..."], dtype: jnp.dtype) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(largest(value).astype(dtype)))


def _on_device(value: np.ndarray, dtype: jnp.dtype) -> Array:
    """A copy of an array of a file, whose conversion takes a program for each shape."""
    if value.dtype == dtype:
        return jax.device_put(np.array(value))
    return jnp.asarray(value).astype(dtype)


_BITS_AT_ONCE = 2**18
"""As many numbers as fit in a processor's cache."""


def largest(value: Float[np.ndarray, "..."]) -> Any:
    """Returns the largest magnitude among numbers, in their dtype; NaN is larger than infinity.

    Magnitudes of one sign are ordered as their bits are, so no number is converted: this takes a
    small part of the time of reading them.
    """
    bits = value.reshape(-1).view(f"u{value.itemsize}")
    mask = bits.dtype.type(2 ** (8 * value.itemsize - 1) - 1)
    most = max(
        ((bits[i : i + _BITS_AT_ONCE] & mask).max() for i in range(0, bits.size, _BITS_AT_ONCE)),
        default=mask.dtype.type(0),
    )
    return np.asarray(most, bits.dtype).view(value.dtype)[()]


def not_finite(name: str, stored: Any, dtype: Any) -> CheckpointError:
    """Returns the error for a tensor that has NaN or infinity, in the dtype of the parameters."""
    kinds = jnp.dtype(stored).name, jnp.dtype(dtype).name
    return CheckpointError(
        f"{name} has values that are NaN or infinite{'' if kinds[0] == kinds[1] else ' as ' + kinds[1]}"
        f", so the model would compute nothing but NaN; fetch the checkpoint again, "
        f"{'' if kinds[0] == kinds[1] else f'or load it as {kinds[0]}, '}or load it as it is with "
        f"check=False, on the command line with {CHECK_VARIABLE}=off"
    )


def nested(values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Turns {("a", "b"): x} into {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def read_tensors(
    stored: dict[str, StoredTensor], expected: dict[str, ExpectedTensor]
) -> Iterator[tuple[str, Float[np.ndarray, "..."]]]:
    """Yields (name, value) of the expected parameters in their stored dtype, the largest first.

    Raises:
      CheckpointError: a file that became unreadable.
    """

    def size(tensor: ExpectedTensor) -> int:
        dtype = DTYPES.get(stored[tensor.parts[0].name].dtype, jnp.bfloat16)
        return math.prod(tensor.shape) * np.dtype(dtype).itemsize

    total = sum(map(size, expected.values()))
    quiet = total < PROGRESS_BYTES and not sys.stderr.isatty()
    with tqdm(
        total=total, desc="reading weights", unit="B", unit_scale=True, disable=quiet, leave=False
    ) as bar:

        def read(part: Part) -> np.ndarray:
            with contextlib.ExitStack() as files:

                def tensor(name: str) -> Any:
                    return files.enter_context(opened(stored[name].file)).get_slice(name)

                value = part.taken(tensor)
            bar.update(value.nbytes)
            return value

        for name in sorted(expected, key=lambda name: -math.prod(expected[name].shape)):
            yield name, assembled(expected[name], read)
