"""Model checkpoints in Orbax form: written by `jaxshare convert`, restored directly onto a mesh.

A folder holds the files of a Hugging Face folder except its weights (config.json, the tokenizer),
and `params`, an Orbax checkpoint of the parameters of `Decoder`. Every device reads its own part of
each, so a model that no host could hold can be restored. A folder is written under a temporary name
and renamed at the end, so that it is never incomplete.
"""

import asyncio
import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxshare import paths, sharding
from jaxshare.models.config import ModelConfig
from jaxshare.models.config_fields import first_line, read_json
from jaxshare.models.safetensors_io import (
    INDEX,
    SINGLE,
    CheckpointError,
    match_tensors,
    nested,
    not_finite,
    read_tensors,
    stored_tensors,
)
from jaxshare.models.tensor_names import (
    ExpectedTensor,
    expected_tensors,
    kept_dtype,
    taken_apart,
    tensor_name,
)
from jaxshare.models.tensor_parallel import ShardedDecoder, fit, fit_params, repeats
from jaxshare.pallas.device import default_device

PARAMS = "params"
_MAX_SHARD_BYTES = 5 * 10**9
"""The largest safetensors file that is written, as in the Hugging Face libraries."""
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


def is_checkpoint(folder: Path) -> bool:
    """Returns True if a folder holds a model in Orbax form."""
    return (folder / PARAMS / "_METADATA").is_file()


def convert(source: Path, target: Path) -> dict[str, Any]:
    """Converts a model from Hugging Face form to Orbax form, or back.

    Every tensor keeps its dtype and its bits.

    Args:
      source: a folder in either form.
      target: a folder that does not exist yet.

    Returns:
      A summary: "form" ("orbax" or "huggingface"), "tensors", "bytes".

    Raises:
      FileNotFoundError, CheckpointError: see `load`.
      ValueError: a target that exists, or a folder that cannot be made for it.
      WriteError: the target cannot be written; nothing of it is left.
    """
    if target.exists():
        raise ValueError(f"{target} exists; give a folder that does not, or delete it first")
    if not (source / "config.json").is_file():
        raise FileNotFoundError(
            f"{source} has no config.json: a model folder holds config.json and model.safetensors, "
            f"or {PARAMS} as `jaxshare convert` writes it"
        )
    config = ModelConfig.from_json(source)
    from_orbax = is_checkpoint(source)
    tensors = _read_orbax(source, config) if from_orbax else _read_safetensors(source, config)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ValueError(f"{target} cannot be written ({error}); give a place that can") from error
    try:
        partial.chmod(0o777 & ~_umask())
        for file in source.iterdir():
            is_weights = file.name.endswith(_WEIGHT_SUFFIXES)
            if file.is_file() and not is_weights and not file.name.startswith("."):
                shutil.copyfile(file, partial / file.name)
        if from_orbax:
            _remove_quantization(partial / "config.json")
        sizes = (
            _write_safetensors(partial, tensors)
            if from_orbax
            else _write_orbax(partial, tensors, config)
        )
        paths.sync_tree(partial)
        os.rename(partial, target)
        paths.sync_folder(target.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if failed := _write_failure(error):
            raise paths.WriteError.of(target, failed) from error
        raise
    form = "huggingface" if from_orbax else "orbax"
    return {"form": form, "tensors": len(sizes), "bytes": sum(sizes)}


def _remove_quantization(file: Path) -> None:
    """Makes a configuration that of plain weights, as which parameters are written."""
    settings = read_json(file)
    if settings.pop("quantization_config", None) is not None:
        file.write_text(json.dumps(settings, indent=2) + "\n")


def _write_failure(error: BaseException) -> OSError | None:
    """Returns the system's error where a write has failed; safetensors has it in its text."""
    if isinstance(error, SafetensorError) and (found := re.search(r"os error (\d+)", str(error))):
        return OSError(int(found[1]), os.strerror(int(found[1])))
    return error if isinstance(error, OSError) and error.errno != errno.ENOENT else None


def write_tensors(tensors: dict[str, Float[np.ndarray, "..."]], file: Path) -> None:
    """Writes a safetensors file that transformers reads, with the default permissions."""
    save_file(tensors, file, metadata={"format": "pt"})
    # The library's own files are readable by their owner alone.
    file.chmod(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _read_safetensors(folder: Path, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Reads (name, value) of each parameter of a folder in Hugging Face form."""
    stored = stored_tensors(folder)
    return read_tensors(stored, match_tensors(config, stored, folder))


def _read_orbax(folder: Path, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, value) of each tensor of a checkpoint from a folder in Orbax form, one at a
    time.

    Raises:
      CheckpointError: data that cannot be read.
    """
    import orbax.checkpoint as ocp  # here, because it takes seconds

    expected = expected_tensors(config)
    stored = match_metadata(folder, expected)
    cpu = SingleDeviceSharding(jax.devices("cpu")[0])
    with ocp.PyTreeCheckpointer() as checkpointer:

        def value(name: str) -> np.ndarray:
            # Given a tree with one leaf, Orbax reads that leaf alone.
            path, shape = expected[name].path, expected[name].shape
            leaf = nested({path: jax.ShapeDtypeStruct(shape, stored[path], sharding=cpu)})
            arguments = jax.tree.map(
                lambda x: ocp.ArrayRestoreArgs(sharding=cpu, global_shape=x.shape, dtype=x.dtype),
                leaf,
            )
            try:
                with waiting_for_reads():
                    restored = checkpointer.restore(
                        (folder / PARAMS).resolve(),
                        args=ocp.args.PyTreeRestore(
                            item=leaf, restore_args=arguments, partial_restore=True
                        ),
                    )
            except Exception as error:
                raise CheckpointError(
                    f"{folder / PARAMS} cannot be read ({root_cause(error)}); convert the model "
                    "again"
                ) from error
            return np.asarray(jax.tree.leaves(restored)[0])

        yield from taken_apart(expected, value)


def _write_orbax(
    folder: Path, tensors: Iterator[tuple[str, np.ndarray]], config: ModelConfig
) -> list[int]:
    """Writes all tensors; returns the bytes of each."""
    import orbax.checkpoint as ocp

    expected = expected_tensors(config)
    values = {expected[name].path: value for name, value in tensors}
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save((folder / PARAMS).resolve(), nested(values))
            checkpointer.wait_until_finished()
    except Exception as error:  # many types, most often of a full disk
        raise ValueError(
            f"{PARAMS} cannot be written ({root_cause(error)}); make room on the disk of the "
            "target, or give another one"
        ) from error
    return [value.nbytes for value in values.values()]


def _write_safetensors(folder: Path, tensors: Iterator[tuple[str, np.ndarray]]) -> list[int]:
    """Writes all tensors to one file, or to several with an index where they are large.

    Returns:
      The bytes of each tensor.
    """
    shard: dict[str, np.ndarray] = {}
    names: list[list[str]] = []
    sizes: list[int] = []

    def flush() -> None:
        write_tensors(shard, folder / f"part-{len(names)}")
        names.append([*shard])
        shard.clear()

    for name, value in tensors:
        if shard and sum(v.nbytes for v in shard.values()) + value.nbytes > _MAX_SHARD_BYTES:
            flush()
        shard[name] = np.ascontiguousarray(value)
        sizes.append(value.nbytes)
    flush()
    if len(names) == 1:
        (folder / "part-0").rename(folder / SINGLE)
        return sizes
    weight_map = {}
    for i, in_shard in enumerate(names):
        file = f"model-{i + 1:05}-of-{len(names):05}.safetensors"
        (folder / f"part-{i}").rename(folder / file)
        weight_map |= dict.fromkeys(in_shard, file)
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return sizes


def match_metadata(
    folder: Path, expected: Mapping[str, ExpectedTensor]
) -> dict[tuple[str, ...], jnp.dtype]:
    """Checks a checkpoint's metadata against the model, and returns each parameter's dtype by path.

    Raises:
      CheckpointError: it cannot be read, or its parameters are not those of the model; lists all
        that differ.
    """
    import orbax.checkpoint as ocp

    try:
        with ocp.StandardCheckpointer() as checkpointer:
            tree: Any = checkpointer.metadata((folder / PARAMS).resolve())
            tree = getattr(tree, "item_metadata", tree)
            stored = {
                tuple(str(getattr(key, "key", key)) for key in keys): leaf
                for keys, leaf in jax.tree.leaves_with_path(getattr(tree, "tree", tree))
            }
            shapes = {path: (tuple(leaf.shape), leaf.dtype) for path, leaf in stored.items()}
    except Exception as error:  # many types, from a missing file to a format this Orbax rejects
        raise CheckpointError(
            f"{folder / PARAMS} is not a complete Orbax checkpoint ({root_cause(error)}); convert "
            "the model again"
        ) from error
    expected_shapes = {tensor.path: tensor.shape for tensor in expected.values()}
    problems = [f"{'/'.join(path)} is missing" for path in expected_shapes.keys() - shapes.keys()]
    problems += [
        f"{'/'.join(path)} is unexpected_shapes" for path in shapes.keys() - expected_shapes.keys()
    ]
    problems += [
        f"{'/'.join(path)} has shape {shapes[path][0]}, not {expected_shapes[path]}"
        for path in expected_shapes.keys() & shapes.keys()
        if shapes[path][0] != expected_shapes[path]
    ]
    if problems:
        raise CheckpointError(
            f"the parameters in {folder / PARAMS} are not those that its config.json describes: "
            f"{'; '.join(sorted(problems))}; they are of another architecture: convert the model "
            "again"
        )
    return {path: jnp.dtype(dtype) for path, (_, dtype) in shapes.items()}


def restore_params(
    folder: Path,
    config: ModelConfig,
    expected: Mapping[str, ExpectedTensor],
    dtype: jnp.dtype,
    mesh: Mesh | None,
    check: bool = True,
) -> dict[str, Any]:
    """Restores the parameters of a checkpoint, each part directly on its device.

    Args:
      folder, config: the checkpoint in Orbax form, and the whole model.
      expected, dtype: its parameters, checked by `match_metadata`, and their dtype in the result.
      mesh: the devices; None for the default device.
      check: refuse what is not finite.

    Raises:
      CheckpointError: data that cannot be read, or a tensor that is not finite.
    """
    import orbax.checkpoint as ocp

    module = None if mesh is None else ShardedDecoder(fit(config, mesh), mesh)

    def initial_sharding(path: tuple[str, ...]) -> Sharding:
        if module is None:
            return SingleDeviceSharding(default_device())
        if repeats(path, config, module.mesh) > 1:  # replicated until its heads are repeated
            return NamedSharding(module.mesh, PartitionSpec())
        return sharding.sharding(module.mesh, module.names(path))

    def form(tensor: ExpectedTensor) -> jax.ShapeDtypeStruct:
        kept = kept_dtype(tensor.path, dtype)
        return jax.ShapeDtypeStruct(tensor.shape, kept, sharding=initial_sharding(tensor.path))

    target = nested({tensor.path: form(tensor) for tensor in expected.values()})
    try:
        with ocp.StandardCheckpointer() as checkpointer, waiting_for_reads():
            params = checkpointer.restore((folder / PARAMS).resolve(), target)
    except Exception as error:
        raise CheckpointError(
            f"{folder / PARAMS} cannot be restored ({root_cause(error)}); convert the model again"
        ) from error
    if check:
        _check_finite(params, folder / PARAMS, config, dtype, mesh)
    if module is None:
        return {"params": params}

    def repeat_heads(keys: Any, value: jax.Array) -> jax.Array:
        path = tuple(key.key for key in keys)
        if repeats(path, config, module.mesh) == 1:
            return value
        target = sharding.sharding(module.mesh, module.names(path))
        return jax.jit(lambda v: fit_params(v, path, config, module.mesh), out_shardings=target)(
            value
        )

    return {"params": jax.tree.map_with_path(repeat_heads, params)}


def _check_finite(
    params: dict[str, Any], source: Path, config: ModelConfig, dtype: Any, mesh: Mesh | None
) -> None:
    """Raises CheckpointError for the first parameter that is not finite; on its devices."""
    target = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    finite = jax.jit(lambda value: jnp.isfinite(value).all(), out_shardings=target)
    # All are started before the first is waited for.
    for keys, is_finite in jax.tree.leaves_with_path(jax.tree.map(finite, params)):
        if not is_finite:
            name = tensor_name(tuple(key.key for key in keys), config)
            raise not_finite(f"{source}: {name}", dtype, dtype)


_READ_TIMEOUT = 60.0
"""Seconds to wait for pending reads when an event loop closes."""

_patching = threading.RLock()
"""Held while `asyncio.new_event_loop` is patched, so that each thread restores what it found."""


class _DrainingEventLoop(asyncio.SelectorEventLoop):
    """An event loop that waits for its pending tasks before it closes."""

    def close(self) -> None:
        tasks = set() if self.is_closed() else asyncio.all_tasks(self)
        if tasks:
            self.run_until_complete(asyncio.wait(tasks, timeout=_READ_TIMEOUT))
        super().close()


@contextlib.contextmanager
def waiting_for_reads() -> Iterator[None]:
    """Makes Orbax wait for its pending reads when one of them fails.

    Orbax closes its event loop at the first error while other reads still run. Each of those would
    later report an error of its own, when it ends or is garbage-collected.
    """
    with _patching:
        thread, original = threading.get_ident(), asyncio.new_event_loop
        asyncio.new_event_loop = lambda: (
            _DrainingEventLoop() if threading.get_ident() == thread else original()
        )
        try:
            yield
        finally:
            asyncio.new_event_loop = original


def root_cause(error: BaseException) -> str:
    """Returns the message of the first error in a chain.

    Orbax wraps TensorStore's errors in errors that name no more than the index of an array.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
