"""Weights in Hugging Face form: safetensors files, single or sharded, to the parameters of a
`Decoder`.

Every tensor is accounted for before the first is read, and then read one at a time, the largest
first: what is held besides the parameters, one tensor and its converted copy, is small by the time
the parameters are many. Files are opened anew for every tensor, since the pages of an open mapping
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
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from jaxshare.models.config import ModelConfig
from jaxshare.models.config_fields import read_json
from jaxshare.models.layers import Decoder

DTYPES = {"BF16": jnp.bfloat16, "F16": jnp.float16, "F32": jnp.float32}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_LARGE = 2**30  # bytes from which reading takes long enough for a progress bar


class CheckpointError(ValueError):
    """A weights file that cannot be read, or tensors that are not those of the model; the message
    lists them all."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor as a file holds it: shape and dtype as safetensors names them."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A parameter: its path under "params", and its shape."""

    path: tuple[str, ...]
    shape: tuple[int, ...]


def wanted_tensors(config: ModelConfig) -> dict[str, Wanted]:
    """The tensors that a checkpoint of this configuration holds, by name."""
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    tree = jax.eval_shape(
        lambda t: Decoder(config).init(jax.random.key(0), t, method=Decoder.causal), tokens
    )
    wanted = {}
    for keys, leaf in jax.tree.leaves_with_path(tree["params"]):
        path = tuple(key.key for key in keys)
        wanted[tensor_name(path)] = Wanted(path, leaf.shape)
    return wanted


def tensor_name(path: tuple[str, ...]) -> str:
    """The name in a checkpoint of the parameter at `path`, for example ("layers_0", "attention",
    "q", "kernel")."""
    if path[0].startswith("layers_"):
        module = f"model.layers.{path[0].removeprefix('layers_')}.{_MODULES[path[1:-1]]}"
    else:
        module = _MODULES[path[:-1]]
    return f"{module}.{'bias' if path[-1] == 'bias' else 'weight'}"


_MODULES = {
    ("embed",): "model.embed_tokens",
    ("norm",): "model.norm",
    ("head",): "lm_head",
    ("attention_norm",): "input_layernorm",
    ("mlp_norm",): "post_attention_layernorm",
    **{("attention", name): f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")},
    **{("attention", name): f"self_attn.{name}" for name in ("q_norm", "k_norm")},
    **{("mlp", name): f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """The tensors of a checkpoint folder, by name, from the headers of its files alone.

    Raises:
      FileNotFoundError: no safetensors in the folder, or a shard of the index is not there.
      CheckpointError: a file that is truncated or corrupt, or an index that does not tell what its
        shards hold.
    """
    if (folder / SINGLE).is_file():
        return _header(folder / SINGLE)
    if (folder / INDEX).is_file():
        return _sharded(folder)
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


def _sharded(folder: Path) -> dict[str, Stored]:
    index = folder / INDEX
    places = read_json(index).get("weight_map")
    if (
        not isinstance(places, dict)
        or not places
        or not all(isinstance(file, str) for file in places.values())
    ):
        raise CheckpointError(
            f"{index} must have a weight_map from the names of tensors to the files that hold "
            "them; fetch it again"
        )
    tensors: dict[str, Stored] = {}
    problems = []
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise CheckpointError(
                f"{index} names the file {name!r}, but shards stand in the same folder"
            )
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} has no {name}, which {INDEX} lists: fetch the missing shard"
            )
        for tensor, stored in _header(folder / name).items():
            if places.get(tensor) == name:
                tensors[tensor] = stored
            else:
                problems.append(
                    f"{tensor} is in {name} and listed "
                    f"{f'in {places[tensor]}' if tensor in places else 'nowhere'}"
                )
    problems += [
        f"{tensor} is listed in {places[tensor]} and not there"
        for tensor in places.keys() - tensors.keys()
    ]
    if problems:
        raise CheckpointError(
            f"{index} does not tell what its shards hold: {'; '.join(sorted(problems))}; fetch the "
            "checkpoint again"
        )
    return tensors


def _header(file: Path) -> dict[str, Stored]:
    with _opened(file) as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118, it is no dict
        return {
            name: Stored(file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()
        }


@contextlib.contextmanager
def _opened(file: Path):
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
            f"{file} is not a whole safetensors file ({error}); {reason}"
        ) from error


def match_tensors(
    config: ModelConfig, stored: dict[str, Stored], source: Path
) -> dict[str, Wanted]:
    """Accounts for every tensor; the result says what each one that is needed becomes.

    Raises:
      CheckpointError: lists all that are missing, unexpected, of a wrong shape or of a dtype that
        is not a plain float.
    """
    wanted = wanted_tensors(config)
    problems = [f"{name} is missing" for name in wanted.keys() - stored.keys()]
    problems += [
        f"{name} is unexpected"
        for name in stored.keys() - wanted.keys()
        if not _ignored(name, config)
    ]
    for name in wanted.keys() & stored.keys():
        if stored[name].shape != wanted[name].shape:
            problems.append(f"{name} has shape {stored[name].shape}, not {wanted[name].shape}")
        if stored[name].dtype not in DTYPES:
            problems.append(
                f"{name} has dtype {stored[name].dtype}, not one of {', '.join(DTYPES)}"
            )
    if problems:
        numbered = sorted(
            problems,
            key=lambda text: [
                int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)
            ],
        )
        raise CheckpointError(
            f"the tensors in {source} are not those that its config.json describes: "
            f"{'; '.join(numbered)}; fetch the checkpoint again, or correct its config.json"
        )
    return wanted


def _ignored(name: str, config: ModelConfig) -> bool:
    """Old checkpoints hold the rope frequencies, which config.json gives; a tied head is the
    embedding."""
    return name.endswith(".rotary_emb.inv_freq") or (
        name == "lm_head.weight" and config.tie_embeddings
    )


def read_params(
    stored: dict[str, Stored],
    wanted: dict[str, Wanted],
    dtype: jnp.dtype,
    place: Callable[[tuple[str, ...], np.ndarray], Array] | None = None,
) -> dict[str, Any]:
    """Reads the tensors into a tree of arrays for `Decoder.apply`.

    Args:
      stored, wanted: from `stored_tensors` and `match_tensors`.
      dtype: what every parameter is converted to.
      place: puts a parameter, given its path and its value on the host, to where it is to be;
        default the default device.

    Raises:
      CheckpointError: a file that became unreadable.
    """
    params: dict[tuple[str, ...], Array] = {}
    for name, value in read_tensors(stored, wanted):
        path = wanted[name].path
        params[path] = (
            place(path, value.astype(dtype)) if place else jnp.asarray(value).astype(dtype)
        )
        params[path].block_until_ready()
    return {"params": nested(params)}


def nested(values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """{("a", "b"): x} -> {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def read_tensors(
    stored: dict[str, Stored], wanted: dict[str, Wanted]
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, value) of the wanted tensors, the largest first, one at a time, as the files have
    them.

    Raises:
      CheckpointError: a file that became unreadable.
    """
    total = sum(
        stored[name].size * np.dtype(DTYPES[stored[name].dtype]).itemsize for name in wanted
    )
    quiet = total < _LARGE and not sys.stderr.isatty()
    with tqdm(
        total=total, desc="reading weights", unit="B", unit_scale=True, disable=quiet, leave=False
    ) as bar:
        for name in sorted(wanted, key=lambda name: -stored[name].size):
            with _opened(stored[name].file) as tensors:
                value = tensors.get_tensor(name)
            yield name, value
            bar.update(value.nbytes)
