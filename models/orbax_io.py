"""Checkpoints in Orbax form: what `jaxshare convert` writes, and what is restored straight onto a
mesh.

A folder holds what a Hugging Face folder holds beside its weights (config.json, the tokenizer), and
`params`, an Orbax checkpoint of the parameters as `Decoder` has them. Every device reads its own
part of each, so a model that no host could hold can be restored. A folder is written under another
name and renamed at its end: what is there is whole.
"""

import asyncio
import contextlib
import json
import os
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
from safetensors.numpy import save_file

from jaxshare import sharding
from jaxshare.models.config import ModelConfig
from jaxshare.models.config_fields import first_line
from jaxshare.models.safetensors_io import (
    INDEX,
    SINGLE,
    CheckpointError,
    Wanted,
    match_tensors,
    nested,
    read_tensors,
    stored_tensors,
    wanted_tensors,
)
from jaxshare.models.tensor_parallel import ShardedDecoder, fit, fit_params, repeats
from jaxshare.pallas.device import default_device

PARAMS = "params"
_SHARD = 5 * 10**9
"""Bytes of a safetensors file at most, as the Hugging Face libraries cut them."""
_WEIGHTS = (
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
    """Whether a folder holds a model in Orbax form."""
    return (folder / PARAMS / "_METADATA").is_file()


def convert(source: Path, target: Path) -> dict[str, Any]:
    """Writes a model in the other form: from Hugging Face's to Orbax, or back. Every tensor keeps
    its dtype and its bits.

    Args:
      source: a folder in either form.
      target: a folder that does not exist yet.

    Returns:
      What was written: "form" ("orbax" or "huggingface"), "tensors", "bytes".

    Raises:
      FileNotFoundError, CheckpointError: see `load`.
      ValueError: a target that exists, or that cannot be written.
    """
    if target.exists():
        raise ValueError(f"{target} exists; give a folder that does not, or take it away first")
    if not (source / "config.json").is_file():
        raise FileNotFoundError(
            f"{source} has no config.json: a model folder holds config.json and model.safetensors, "
            f"or {PARAMS} as `jaxshare convert` writes it"
        )
    config = ModelConfig.from_json(source)
    back = is_checkpoint(source)
    tensors = _restored(source, config) if back else _stored(source, config)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        whole = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ValueError(f"{target} cannot be written ({error}); give a place that can") from error
    try:
        whole.chmod(0o777 & ~_umask())
        for file in source.iterdir():
            if (
                file.is_file()
                and not file.name.endswith(_WEIGHTS)
                and not file.name.startswith(".")
            ):
                shutil.copyfile(file, whole / file.name)
        sizes = _write_safetensors(whole, tensors) if back else _write_orbax(whole, tensors, config)
        os.rename(whole, target)
    except BaseException:
        shutil.rmtree(whole, ignore_errors=True)
        raise
    return {"form": "huggingface" if back else "orbax", "tensors": len(sizes), "bytes": sum(sizes)}


def write_tensors(tensors: dict[str, np.ndarray], file: Path) -> None:
    """Writes a safetensors file that transformers reads, for whoever may read new files:
    safetensors itself writes for the user alone."""
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _stored(folder: Path, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """(name, value) of each tensor of a folder in Hugging Face form."""
    stored = stored_tensors(folder)
    return read_tensors(stored, match_tensors(config, stored, folder))


def _restored(folder: Path, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """(name, value) of each tensor of a folder in Orbax form, one at a time.

    Raises:
      CheckpointError: data that cannot be read.
    """
    import orbax.checkpoint as ocp  # here, because it takes seconds

    wanted = wanted_tensors(config)
    stored = match_metadata(folder, wanted)
    cpu = SingleDeviceSharding(jax.devices("cpu")[0])
    with ocp.PyTreeCheckpointer() as checkpointer:
        for name, (path, shape) in sorted((name, (w.path, w.shape)) for name, w in wanted.items()):
            # Of a tree that has one leaf Orbax reads that alone.
            leaf = nested({path: jax.ShapeDtypeStruct(shape, stored[path], sharding=cpu)})
            arguments = jax.tree.map(
                lambda x: ocp.ArrayRestoreArgs(sharding=cpu, global_shape=x.shape, dtype=x.dtype),
                leaf,
            )
            try:
                with ended_reads():
                    found = checkpointer.restore(
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
            yield name, np.asarray(jax.tree.leaves(found)[0])


def _write_orbax(
    folder: Path, tensors: Iterator[tuple[str, np.ndarray]], config: ModelConfig
) -> list[int]:
    import orbax.checkpoint as ocp

    wanted = wanted_tensors(config)
    values = {wanted[name].path: value for name, value in tensors}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / PARAMS).resolve(), nested(values))
        checkpointer.wait_until_finished()
    return [value.nbytes for value in values.values()]


def _write_safetensors(folder: Path, tensors: Iterator[tuple[str, np.ndarray]]) -> list[int]:
    """In one file, or in several with an index where they are large."""
    parts: list[dict[str, np.ndarray]] = [{}]
    names: list[list[str]] = []
    sizes: list[int] = []

    def flush() -> None:
        file = folder / f"part-{len(names)}"
        write_tensors(parts[-1], file)
        names.append([*parts[-1]])
        parts[-1] = {}

    for name, value in tensors:
        if parts[-1] and sum(v.nbytes for v in parts[-1].values()) + value.nbytes > _SHARD:
            flush()
        parts[-1][name] = np.ascontiguousarray(value)
        sizes.append(value.nbytes)
    flush()
    if len(names) == 1:
        (folder / "part-0").rename(folder / SINGLE)
        return sizes
    places = {}
    for i, own in enumerate(names):
        file = f"model-{i + 1:05}-of-{len(names):05}.safetensors"
        (folder / f"part-{i}").rename(folder / file)
        places |= dict.fromkeys(own, file)
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": places}, indent=2) + "\n"
    )
    return sizes


def match_metadata(folder: Path, wanted: Mapping[str, Wanted]) -> dict[tuple[str, ...], jnp.dtype]:
    """The dtype of every parameter of a checkpoint, by path, from its metadata alone.

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
    except (
        Exception
    ) as error:  # of many kinds, from a missing file to a format that this Orbax does not know
        raise CheckpointError(
            f"{folder / PARAMS} is not a whole Orbax checkpoint ({root_cause(error)}); convert the "
            "model again"
        ) from error
    expected = {w.path: w.shape for w in wanted.values()}
    problems = [f"{'/'.join(path)} is missing" for path in expected.keys() - shapes.keys()]
    problems += [f"{'/'.join(path)} is unexpected" for path in shapes.keys() - expected.keys()]
    problems += [
        f"{'/'.join(path)} has shape {shapes[path][0]}, not {expected[path]}"
        for path in expected.keys() & shapes.keys()
        if shapes[path][0] != expected[path]
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
    wanted: Mapping[str, Wanted],
    dtype: jnp.dtype,
    mesh: Mesh | None,
) -> dict[str, Any]:
    """The parameters of a checkpoint, each part on the device that it is for.

    Args:
      folder: in Orbax form.
      config: of the whole model.
      wanted: its parameters; `match_metadata` has found that they are there.
      dtype: what all are converted to.
      mesh: to lay them on; None for the default device.

    Raises:
      CheckpointError: data that cannot be read.
    """
    import orbax.checkpoint as ocp

    module = None if mesh is None else ShardedDecoder(fit(config, mesh), mesh)

    def where(path: tuple[str, ...]) -> Sharding:
        if module is None:
            return SingleDeviceSharding(default_device())
        whole = repeats(path, config, module.mesh) > 1  # until its heads are repeated
        return (
            NamedSharding(module.mesh, PartitionSpec())
            if whole
            else sharding.sharding(module.mesh, module.names(path))
        )

    target = nested(
        {
            w.path: jax.ShapeDtypeStruct(w.shape, dtype, sharding=where(w.path))
            for w in wanted.values()
        }
    )
    try:
        with ocp.StandardCheckpointer() as checkpointer, ended_reads():
            params = checkpointer.restore((folder / PARAMS).resolve(), target)
    except Exception as error:
        raise CheckpointError(
            f"{folder / PARAMS} cannot be restored ({root_cause(error)}); convert the model again"
        ) from error
    if module is None:
        return {"params": params}

    def fitted(keys: Any, value: jax.Array) -> jax.Array:
        path = tuple(key.key for key in keys)
        if repeats(path, config, module.mesh) == 1:
            return value
        where = sharding.sharding(module.mesh, module.names(path))
        return jax.jit(lambda v: fit_params(v, path, config, module.mesh), out_shardings=where)(
            value
        )

    return {"params": jax.tree.map_with_path(fitted, params)}


_PATIENCE = 60.0
"""Seconds that reads under way are waited for."""


_one_at_a_time = threading.RLock()


class _PatientEventLoop(asyncio.SelectorEventLoop):
    """An event loop that does not close before its tasks have ended."""

    def close(self) -> None:
        tasks = set() if self.is_closed() else asyncio.all_tasks(self)
        if tasks:
            self.run_until_complete(asyncio.wait(tasks, timeout=_PATIENCE))
        super().close()


@contextlib.contextmanager
def ended_reads() -> Iterator[None]:
    """Where Orbax is to restore something: a read that fails leaves no others under way.

    Orbax closes its event loop at the first error while other reads still run, and each of those
    then complains by itself, after the error that says what is wrong, at whatever moment it ends or
    is collected.
    """
    with _one_at_a_time:  # so that each thread puts back what it has found
        here, others = threading.get_ident(), asyncio.new_event_loop
        asyncio.new_event_loop = lambda: (
            _PatientEventLoop() if threading.get_ident() == here else others()
        )
        try:
            yield
        finally:
            asyncio.new_event_loop = others


def root_cause(error: BaseException) -> str:
    """What was wrong at first: Orbax wraps what TensorStore says in errors that name the index of
    an array alone."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
