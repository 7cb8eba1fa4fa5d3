"""Model checkpoints in Orbax form: written by `jaxshare convert`, restored directly onto a mesh.

A folder holds the files of a Hugging Face folder except its weights (config.json, the tokenizer),
and `params`, an Orbax checkpoint of the parameters of `Decoder`. Every device reads its own part of
each, so a model that no host could hold can be restored. A folder is written under a temporary name
and renamed at the end, so that it is never incomplete.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Float
from safetensors.numpy import save_file

from jaxshare import progress, sharding
from jaxshare.models.config import ModelConfig
from jaxshare.models.config_fields import read_json, some_of
from jaxshare.models.model_folder import check_folders, new_folder, umask, write_settings
from jaxshare.models.orbax_package import orbax
from jaxshare.models.orbax_reading import root_cause, waiting_for_reads
from jaxshare.models.quantisation.saved import as_saved, parameters_of, restored
from jaxshare.models.quantisation.settings import quantisation_of
from jaxshare.models.safetensors_files import INDEX, SINGLE, CheckpointError, stored_tensors
from jaxshare.models.safetensors_io import (
    check_numbers,
    is_checked,
    match_tensors,
    nested,
    not_finite,
    read_sound,
    read_tensors,
)
from jaxshare.models.soundness import is_sound
from jaxshare.models.tensor_names import (
    ExpectedTensor,
    Parameter,
    expected_tensors,
    kept_dtype,
    taken_apart,
    tensor_name,
)
from jaxshare.models.tensor_parallel import (
    ShardedDecoder,
    check_split,
    fit,
    fit_params,
    names_of_array,
    param_path,
    repeats,
)
from jaxshare.pallas.device import default_device
from jaxshare.quantised import is_quantised

PARAMS = "params"
_MAX_SHARD_BYTES = 5 * 10**9
"""The largest safetensors file that is written, as in the Hugging Face libraries."""


def is_checkpoint(folder: Path) -> bool:
    """Returns True if a folder holds a model in Orbax form."""
    return (folder / PARAMS / "_METADATA").is_file()


def convert(source: Path, target: Path) -> dict[str, Any]:
    """Converts a model from Hugging Face form to Orbax form, or back.

    Every tensor keeps its dtype and its bits, and quantised ones stay quantised in Orbax form. What is
    NaN or infinite is refused, unless JAXSHARE_CHECK_WEIGHTS is "off".

    Args:
      source: a folder in either form.
      target: a folder that does not exist yet.

    Returns:
      A summary: "form" ("orbax" or "huggingface"), "tensors", "bytes".

    Raises:
      FileNotFoundError, CheckpointError: see `load`.
      ValueError: a target that exists, or a folder that cannot be made for it; or quantised
        parameters in Orbax form, for which there is no Hugging Face form.
      WriteError: the target cannot be written; nothing of it is left.
    """
    check_folders(source, target)
    config = ModelConfig.from_json(source)
    from_orbax = is_checkpoint(source)
    read = _read_orbax if from_orbax else _read_safetensors
    tensors: Iterator[tuple[str, Any]] = read(source, config)
    with new_folder(source, target) as partial:
        if from_orbax:
            _remove_quantization(partial / "config.json")
        sizes = (
            write_safetensors(partial, tensors)
            if from_orbax
            else write_orbax(partial, tensors, config)
        )
    form = "huggingface" if from_orbax else "orbax"
    return {"form": form, "tensors": len(sizes), "bytes": sum(sizes)}


def _remove_quantization(file: Path) -> None:
    """Makes a configuration that of plain weights, as which parameters are written."""
    settings = read_json(file)
    if settings.pop("quantization_config", None) is not None:
        write_settings(file, settings)


def write_tensors(tensors: dict[str, Float[np.ndarray, "..."]], file: Path) -> None:
    """Writes a safetensors file that transformers reads, with the default permissions."""
    save_file(tensors, file, metadata={"format": "pt"})
    # The library's own files are readable by their owner alone.
    file.chmod(0o666 & ~umask())


ReadSome = Callable[[Mapping[str, ExpectedTensor]], Iterator[tuple[str, Any]]]
"""Yields (name, value) of some of a model's parameters."""


@contextlib.contextmanager
def plain_parameters(folder: Path, config: ModelConfig) -> Iterator[ReadSome]:
    """Opens a folder in either form; gives what reads some of its parameters.

    Raises:
      FileNotFoundError, CheckpointError: as `load`.
      ValueError: quantised parameters.
    """
    if not is_checkpoint(folder):
        stored = stored_tensors(folder)
        places = match_tensors(config, stored, folder)
        yield lambda some: read_sound(stored, {name: places[name] for name in some})
        return
    advice = "quantising it again would lose more; give the model that it was made from"
    with _orbax_values(folder, expected_tensors(config), advice, check=True) as value:
        yield lambda some: ((name, value(name)) for name in some)


def _read_safetensors(folder: Path, config: ModelConfig) -> Iterator[tuple[str, Parameter]]:
    """Reads (name, value) of each parameter of a folder in Hugging Face form."""
    stored = stored_tensors(folder)
    places = match_tensors(config, stored, folder, quantisation_of(folder))
    return (read_sound if is_checked() else read_tensors)(stored, places)


def _read_orbax(folder: Path, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, value) of each tensor of a checkpoint from a folder in Orbax form, one at a
    time.

    Raises:
      CheckpointError: data that cannot be read.
      ValueError: quantised parameters.
    """
    expected = expected_tensors(config)
    advice = (
        "quantised parameters are not written in Hugging Face form; use the checkpoint that it was "
        "converted from"
    )
    with _orbax_values(folder, expected, advice, is_checked()) as value:
        yield from taken_apart(expected, value)


@contextlib.contextmanager
def _orbax_values(
    folder: Path, expected: Mapping[str, ExpectedTensor], advice: str, check: bool
) -> Iterator[Callable[[str], np.ndarray]]:
    """Opens a folder in Orbax form; gives what reads the parameter of a name.

    Raises:
      CheckpointError: data that cannot be read, or with `check` is not finite.
      ValueError: quantised parameters, with this advice.
    """
    ocp = orbax()

    stored = match_metadata(folder, expected)
    for path, parameter in stored.items():
        if is_quantised(parameter):
            raise ValueError(
                f"{'/'.join(path)} in {folder} is quantised ({parameter.format}), and {advice}"
            )
    cpu = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    with ocp.PyTreeCheckpointer() as checkpointer:

        def value(name: str) -> np.ndarray:
            # Given a tree with one leaf, Orbax reads that leaf alone.
            path, shape = expected[name].path, expected[name].shape
            leaf = nested({path: jax.ShapeDtypeStruct(shape, stored[path].dtype, sharding=cpu)})
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
            found = np.asarray(jax.tree.leaves(restored)[0])
            if check:
                check_numbers(f"{folder / PARAMS}: {name}", found)
            return found

        yield value


def write_orbax(
    folder: Path, tensors: Iterator[tuple[str, Parameter]], config: ModelConfig
) -> list[int]:
    """Writes all tensors; returns the bytes of each."""
    ocp = orbax()

    expected = expected_tensors(config)
    values = {expected[name].path: value for name, value in tensors}
    total = progress.size(sum(value.nbytes for value in values.values()))
    try:
        with progress.work(f"writing {total}"), ocp.StandardCheckpointer() as checkpointer:
            saved = {path: as_saved(value) for path, value in values.items()}
            checkpointer.save((folder / PARAMS).resolve(), nested(saved))
            checkpointer.wait_until_finished()
    except Exception as error:  # many types, most often of a full disk
        raise ValueError(
            f"{PARAMS} cannot be written ({root_cause(error)}); make room on the disk of the "
            "target, or give another one"
        ) from error
    return [value.nbytes for value in values.values()]


def write_safetensors(folder: Path, tensors: Iterator[tuple[str, np.ndarray]]) -> list[int]:
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
    write_settings(folder / INDEX, index)
    return sizes


def match_metadata(
    folder: Path, expected: Mapping[str, ExpectedTensor]
) -> dict[tuple[str, ...], Any]:
    """Checks a checkpoint's metadata against the model.

    Returns:
      The parameters by their paths: anything with a shape and a dtype, or a quantised tensor whose
      arrays are such.

    Raises:
      CheckpointError: it cannot be read, or its parameters are not those of the model; names
        some that differ.
    """
    ocp = orbax()

    try:
        with ocp.StandardCheckpointer() as checkpointer:
            tree: Any = checkpointer.metadata((folder / PARAMS).resolve())
            tree = getattr(tree, "item_metadata", tree)
            stored = {
                tuple(str(getattr(key, "key", key)) for key in keys): leaf
                for keys, leaf in jax.tree.leaves_with_path(getattr(tree, "tree", tree))
            }
            leaves = {
                path: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)
                for path, leaf in stored.items()
            }
            found, problems = parameters_of(leaves)
    except Exception as error:  # many types, from a missing file to a format this Orbax rejects
        raise CheckpointError(
            f"{folder / PARAMS} is not a complete Orbax checkpoint ({root_cause(error)}); convert "
            "the model again"
        ) from error
    shapes = {tensor.path: tensor.shape for tensor in expected.values()}
    problems += [f"{'/'.join(path)} is missing" for path in shapes.keys() - found.keys()]
    problems += [f"{'/'.join(path)} is unexpected" for path in found.keys() - shapes.keys()]
    problems += [
        f"{'/'.join(path)} has shape {found[path].shape}, not {shapes[path]}"
        for path in shapes.keys() & found.keys()
        if found[path].shape != shapes[path]
    ]
    if problems:
        raise CheckpointError(
            f"the parameters in {folder / PARAMS} are not those that its config.json describes: "
            f"{some_of(problems)}; they are of another architecture: convert the model "
            "again"
        )
    return found


def restore_params(
    folder: Path,
    config: ModelConfig,
    parameters: Mapping[tuple[str, ...], Any],
    dtype: jnp.dtype,
    mesh: Mesh | None,
    check: bool = True,
) -> dict[str, Any]:
    """Restores the parameters of a checkpoint, each part directly on its device.

    Args:
      folder, config: the checkpoint in Orbax form, and the whole model.
      parameters: from `match_metadata`.
      dtype: of the parameters in the result; quantised ones stand for numbers of it.
      mesh: the devices; None for the default device.
      check: refuse what is not finite.

    Raises:
      CheckpointError: data that cannot be read, or a tensor that is not finite.
      ValueError: the groups of a quantised one do not divide over the devices.
    """
    ocp = orbax()

    module = None if mesh is None else ShardedDecoder(fit(config, mesh), mesh)

    target = _targets(parameters, config, dtype, module)
    total = progress.size(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(target)))
    try:
        with (
            progress.work(f"reading {total} of weights"),
            ocp.StandardCheckpointer() as checkpointer,
            waiting_for_reads(),
        ):
            tree = checkpointer.restore((folder / PARAMS).resolve(), target)
    except Exception as error:
        raise CheckpointError(
            f"{folder / PARAMS} cannot be restored ({root_cause(error)}); convert the model again"
        ) from error
    params = nested(restored(tree, parameters, dtype))
    if check:
        _check_finite(params, folder / PARAMS, config, dtype, mesh)
    if module is None:
        return {"params": params}

    def repeat_heads(keys: Any, value: Any) -> Any:
        path = param_path(keys)
        if repeats(path, config, module.mesh) == 1:
            return value
        run = jax.jit(
            lambda value: fit_params(value, path, config, module.mesh),
            out_shardings=jax.tree.map_with_path(
                lambda keys, leaf: _sharding(module, path, keys, leaf), value
            ),
        )
        return run(value)

    return {"params": jax.tree.map_with_path(repeat_heads, params, is_leaf=is_quantised)}


def _targets(
    parameters: Mapping[tuple[str, ...], Any],
    config: ModelConfig,
    dtype: jnp.dtype,
    module: ShardedDecoder | None,
) -> dict[str, Any]:
    """The tree of arrays to restore, with their dtypes and devices. Parameters whose heads will be
    repeated are on all devices until then."""

    def placed(path: tuple[str, ...], keys: Any, leaf: Any) -> Sharding:
        if module is None:
            return SingleDeviceSharding(default_device())
        if repeats(path, config, module.mesh) > 1:
            return NamedSharding(module.mesh, PartitionSpec())
        return _sharding(module, path, keys, leaf)

    def target(path: tuple[str, ...], parameter: Any) -> Any:
        if is_quantised(parameter) and module is not None:
            check_split(parameter, path, module)

        def of_array(keys: Any, leaf: Any) -> jax.ShapeDtypeStruct:
            kept = leaf.dtype if is_quantised(parameter) else kept_dtype(path, dtype)
            return jax.ShapeDtypeStruct(leaf.shape, kept, sharding=placed(path, keys, leaf))

        return as_saved(jax.tree.map_with_path(of_array, parameter))

    return nested({path: target(path, parameter) for path, parameter in parameters.items()})


def _sharding(module: ShardedDecoder, path: tuple[str, ...], keys: Any, leaf: Any) -> Sharding:
    """The sharding of a parameter; or of an array of a quantised one, which `keys` lead to."""
    names = module.names(path)
    return sharding.sharding(module.mesh, names_of_array(names, keys, leaf) if keys else names)


def _check_finite(
    params: dict[str, Any], source: Path, config: ModelConfig, dtype: Any, mesh: Mesh | None
) -> None:
    """Raises CheckpointError for the first parameter that is not finite, or that has scales of zero;
    on its devices."""
    target = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    finite = jax.jit(is_sound, out_shardings=target)
    # All are started before the first is waited for.
    found = jax.tree.map(finite, params, is_leaf=is_quantised)
    values = jax.tree.leaves(params, is_leaf=is_quantised)
    for (keys, is_finite), value in zip(jax.tree.leaves_with_path(found), values, strict=True):
        if is_finite:
            continue
        name = f"{source}: {tensor_name(param_path(keys), config)}"
        if is_quantised(value):
            raise CheckpointError(
                f"{name} has scales that are zero, NaN or infinite, or codes that are NaN; convert "
                f"the model again, or load it as it is with check=False"
            )
        raise not_finite(name, dtype, dtype)
