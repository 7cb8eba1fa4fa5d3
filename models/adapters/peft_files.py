"""Adapters in the form of PEFT: a folder with adapter_config.json and adapter_model.safetensors."""

import collections
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxshare.argument_checks import shown
from jaxshare.models.adapters.adapter_params import (
    AdapterError,
    AdapterParams,
    LayerPath,
    LowRank,
    check_adapter,
    layer_shapes,
)
from jaxshare.models.adapters.peft_config import PeftSettings
from jaxshare.models.config import ModelConfig
from jaxshare.models.config_fields import ConfigError, read_json
from jaxshare.models.safetensors_files import (
    CheckpointError,
    StoredTensor,
    opened,
    tensors_of_file,
)
from jaxshare.models.tensor_names import RotaryOrder, expected_tensors, prefix_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BEFORE = "base_model.model."
_DTYPES = ("F32", "F16", "BF16")
_ENDS = {f".lora_{letter}{more}.weight": letter for letter in "AB" for more in ("", ".default")}


@dataclasses.dataclass(frozen=True)
class _ModulePart:
    """Some outputs of a module of the base, and the layer whose outputs they are."""

    path: LayerPath
    start: int
    stop: int
    order: RotaryOrder | None


def load_adapter(folder: str | os.PathLike, config: ModelConfig) -> AdapterParams:
    """Reads an adapter that PEFT has saved, with the matrices in the dtype that they are stored in.

    Args:
      folder: with adapter_config.json and adapter_model.safetensors.
      config: of the model, each kv head once.

    Raises:
      FileNotFoundError: there is no such folder, or one of the files is missing.
      AdapterError: a file cannot be read, a setting or a tensor is not supported, the tensors are not
        those that the settings describe, or the model lacks a layer that they are of, or has it in
        another shape; what is wrong is named.
    """
    folder = Path(folder)
    settings = PeftSettings.read(*_settings(folder))
    try:
        stored = tensors_of_file(folder / WEIGHTS)
        found = _pairs(stored, folder / WEIGHTS)
        modules = _modules(config)
        matrices: dict[LayerPath, LowRank] = {}
        for module, pair in found.items():
            places = _places(module, modules, config, folder, settings)
            matrices |= _matrices(module, pair, places, settings, folder)
    except CheckpointError as error:
        raise AdapterError(str(error)) from error
    if absent := [each for each in settings.targets if not any(_ends(m, each) for m in found)]:
        raise AdapterError(
            f"{folder / CONFIG} has {absent[0]!r} among target_modules, but {WEIGHTS} has no matrices "
            "of such a module; fetch the adapter again"
        )
    adapter = AdapterParams(matrices, settings.base)
    check_adapter(adapter, config, f"the adapter in {folder}")
    return adapter


def save_adapter(
    folder: str | os.PathLike, adapter: AdapterParams, config: ModelConfig, *, base: str = ""
) -> None:
    """Writes an adapter as PEFT reads it, its matrices in float32.

    Args:
      folder: to write to; made if it is missing, and files of an earlier adapter in it replaced.
      adapter: the adapter.
      config: of the model, each kv head once.
      base: the model's name or folder, for base_model_name_or_path; default that of the adapter.

    Raises:
      AdapterError: it is not one of the model, or its checkpoint has projections as one module that the
        adapter has other matrices or scales for.
    """
    check_adapter(adapter, config)
    tensors: dict[str, np.ndarray] = {}
    scales: dict[str, tuple[int, float]] = {}
    modules = {module: places for module, places in _modules(config).items() if places}
    for module, places in modules.items():
        if not any(place.path in adapter.matrices for place in places):
            continue
        a, b, scale = _as_module(module, places, adapter)
        tensors[f"{_BEFORE}{module}.lora_A.weight"] = a
        tensors[f"{_BEFORE}{module}.lora_B.weight"] = b
        scales[module] = len(a), scale
    settings = _written(scales, modules, base or adapter.base)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")


def _settings(folder: Path) -> tuple[dict[str, Any], str]:
    """The contents of adapter_config.json, and its name.

    Raises:
      FileNotFoundError, AdapterError: see `load_adapter`.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder; an adapter is a folder with {CONFIG}")
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(
            f"{folder} has no {CONFIG}; give a folder that PEFT's save_pretrained has written"
        )
    if not (folder / WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        advice = ", only adapter_model.bin: pickled weights are never loaded" if pickled else ""
        raise FileNotFoundError(f"{folder} has no {WEIGHTS}{advice}; save it as safetensors")
    try:
        return read_json(folder / CONFIG), str(folder / CONFIG)
    except ConfigError as error:
        raise AdapterError(str(error)) from error


def _modules(config: ModelConfig) -> dict[str, tuple[_ModulePart, ...]]:
    """The linear modules of a checkpoint of the model by name, with the layers whose outputs they
    have; none where adapters cannot be of them."""
    shapes = layer_shapes(config)
    found: dict[str, list[_ModulePart]] = {}
    for tensor in expected_tensors(config).values():
        if tensor.path[-1] != "kernel":
            continue
        for part in tensor.parts:
            places = found.setdefault(part.layer, [])
            if tensor.path[:-1] in shapes:
                path: Any = tensor.path[:-1]
                places.append(_ModulePart(path, part.start, part.stop, tensor.order))
    return {
        module: tuple(sorted(places, key=lambda place: place.start))
        for module, places in found.items()
    }


def _pairs(
    stored: Mapping[str, StoredTensor], file: Path
) -> dict[str, dict[str, tuple[str, StoredTensor]]]:
    """The two matrices of each module: its whole name without what PEFT puts before, then A or B."""
    found: dict[str, dict[str, tuple[str, StoredTensor]]] = {}
    for name, tensor in stored.items():
        end = next((end for end in _ENDS if name.endswith(end)), None)
        if end is None or not name.startswith(_BEFORE):
            raise AdapterError(
                f"{file} has the tensor {shown(name)}, which is not supported: only pairs of lora_A "
                "and lora_B of linear layers are"
            )
        if tensor.dtype not in _DTYPES:
            raise AdapterError(f"{file}: {name} is of dtype {tensor.dtype}, no plain float")
        found.setdefault(name[len(_BEFORE) : -len(end)], {})[_ENDS[end]] = name, tensor
    for module, pair in found.items():
        if len(pair) == 1:
            lacks = "A" if "B" in pair else "B"
            raise AdapterError(f"{file} lacks lora_{lacks} of {module}; fetch the adapter again")
    return found


def _places(
    module: str,
    modules: Mapping[str, tuple[_ModulePart, ...]],
    config: ModelConfig,
    folder: Path,
    settings: PeftSettings,
) -> tuple[_ModulePart, ...]:
    """The layers whose outputs a module of the base has.

    Raises:
      AdapterError: the model lacks it, or adapters cannot be of it.
    """
    prefix = prefix_of(config)
    # Models of texts and images have their language model under another name in each version.
    inner = module.removeprefix(prefix).removeprefix("model.language_model.")
    for name in (module, prefix + module, f"{prefix}{inner}", f"{prefix}model.{inner}"):
        if name in modules:
            if modules[name]:
                return modules[name]
            raise AdapterError(
                f"{folder} has matrices of {module}, and adapters of such a layer are not supported: "
                "they can be of projections of attention without latents and of MLPs without experts"
            )
    of = f" (it was made for {settings.base})" if settings.base else ""
    raise AdapterError(
        f"{folder} has matrices of {module}, a layer that the model does not have, or none that "
        f"adapters can be of; it is an adapter for another base{of}"
    )


def _matrices(
    module: str,
    pair: Mapping[str, tuple[str, StoredTensor]],
    places: tuple[_ModulePart, ...],
    settings: PeftSettings,
    folder: Path,
) -> dict[LayerPath, LowRank]:
    """The matrices of a module for each of the layers whose outputs it has."""
    a, b = (_read(*pair[letter]) for letter in "AB")
    rank, out = settings.rank_of(module), max(place.stop for place in places)
    if a.ndim != 2 or b.ndim != 2 or len(a) != rank or b.shape[1] != rank:
        raise AdapterError(
            f"{folder}: the matrices of {module} have shapes {list(a.shape)} and {list(b.shape)}, but "
            f"by {CONFIG} its rank is {rank}; fetch the adapter again"
        )
    if len(b) != out:
        of = f" ({settings.base})" if settings.base else ""
        raise AdapterError(
            f"{folder}: the matrices of {module} are for {len(b)} outputs, but the model's layer has "
            f"{out}; it is an adapter for another base{of}"
        )
    found: dict[LayerPath, LowRank] = {}
    for place in places:
        rows = b[place.start : place.stop]
        rows = rows if place.order is None else np.asarray(place.order.read(rows))
        found[place.path] = LowRank(a, rows, settings.scale_of(module))
    return found


def _read(name: str, tensor: StoredTensor) -> np.ndarray:
    with opened(tensor, name) as slices:
        return np.asarray(slices[:])


def _ends(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _as_module(
    module: str, places: tuple[_ModulePart, ...], adapter: AdapterParams
) -> tuple[np.ndarray, np.ndarray, float]:
    """The two matrices and the scale of a module of a checkpoint."""
    each = [(place, adapter.matrices.get(place.path)) for place in places]
    first = next(of for _, of in each if of is not None)
    a, rows = np.asarray(first.a, np.float32), []
    for place, of in each:
        if of is None:
            rows.append(np.zeros((place.stop - place.start, first.rank), np.float32))
            continue
        if of.scale != first.scale or not np.array_equal(np.asarray(of.a, np.float32), a):
            raise AdapterError(
                f"a checkpoint of this model has {module} as one layer, for which the adapter has "
                "several first matrices or scales; PEFT has one, so train it with one, or merge it"
            )
        b = np.asarray(of.b, np.float32)
        rows.append(b if place.order is None else place.order.written(b))
    return a, np.concatenate(rows), first.scale


def _written(
    scales: Mapping[str, tuple[int, float]], modules: Mapping[str, Any], base: str
) -> dict[str, Any]:
    """The contents of adapter_config.json, from the rank and the scale of each module."""
    kinds = collections.Counter((rank, rank * scale) for rank, scale in scales.values())
    (rank, alpha), _ = kinds.most_common(1)[0]
    own = {module: (rank, rank * scale) for module, (rank, scale) in scales.items()}
    ends = {module.rsplit(".", 1)[-1] for module in scales}
    whole = {
        end for end in ends if {m for m in modules if m.rsplit(".", 1)[-1] == end} <= {*scales}
    }
    rest = {module for module in scales if module.rsplit(".", 1)[-1] not in whole}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(whole | rest),
        "rank_pattern": {m: each[0] for m, each in own.items() if each[0] != rank},
        "alpha_pattern": {m: each[1] for m, each in own.items() if each[1] != alpha},
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
    }
