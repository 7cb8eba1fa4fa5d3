"""The parameters of a model from the tensors of a GGUF file."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from jaxshare import progress
from jaxshare.models.config import FAMILIES, ModelConfig
from jaxshare.models.config_fields import cut, some_of
from jaxshare.models.gguf.blocks import quantised_blocks
from jaxshare.models.gguf.file import PLAIN, GGUFFile
from jaxshare.models.gguf.settings import ROPE_TENSORS, architecture_of
from jaxshare.models.safetensors_files import CheckpointError
from jaxshare.models.safetensors_io import largest, nested, not_finite
from jaxshare.models.tensor_names import ExpectedTensor, Parameter, expected_tensors, kept_dtype
from jaxshare.quantised import QuantisedTensor

_MODULES = {
    ("embed",): "token_embd",
    ("norm",): "output_norm",
    ("head",): "output",
    ("attention_norm",): "attn_norm",
    ("attention_post_norm",): "post_attention_norm",
    ("mlp_norm",): "ffn_norm",
    ("mlp_post_norm",): "post_ffw_norm",
    ("attention",): "attn",
    ("attention", "qkv"): "attn_qkv",
    **{("attention", name): f"attn_{name}" for name in ("q", "k", "v", "q_norm", "k_norm")},
    ("attention", "o"): "attn_output",
    **{("mlp", name): f"ffn_{name}" for name in ("gate", "up", "down")},
    ("mlp", "gate_up"): "ffn_up",
    ("moe", "router"): "ffn_gate_inp",
    ("moe",): "exp_probs_b",
    **{("moe", name): f"ffn_{name}_exps" for name in ("gate", "up", "down")},
    **{("moe", "shared", name): f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
    ("moe", "shared_gate"): "ffn_gate_inp_shexp",
}
"""The modules of a model by their paths in a layer, in the words of llama.cpp."""
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": _BFLOAT16}
_OF_GPT_OSS = {("mlp_norm",): "post_attention_norm"}
_PROGRESS_BYTES = 2**30
"""Reading this much takes long enough for a progress bar."""


@dataclasses.dataclass(frozen=True)
class _StoredRows:
    """Where a file has a parameter.

    Attributes:
      name: of the tensor.
      shape: of the whole tensor.
      start, stop: the rows that are of the parameter.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


def match(file: GGUFFile, config: ModelConfig) -> dict[str, tuple[ExpectedTensor, _StoredRows]]:
    """Checks every tensor of a file against the model, and returns the places of its parameters.

    Raises:
      CheckpointError: lists all that are missing, unexpected or of a wrong shape.
    """
    is_paired = architecture_of(file).is_paired
    expected = expected_tensors(dataclasses.replace(config, rope_interleaved=is_paired))
    found = {
        name: (tensor, _place(file.architecture, config, tensor))
        for name, tensor in expected.items()
    }
    shapes = {place.name: place.shape for _, place in found.values()}
    unexpected = file.tensors.keys() - shapes.keys() - ROPE_TENSORS
    problems = [f"{name} is missing" for name in shapes.keys() - file.tensors.keys()]
    problems += [f"{cut(name)} is unexpected" for name in unexpected]
    for name in shapes.keys() & file.tensors.keys():
        given = file.tensors[name].shape
        # A matrix of one row may be stored as a row.
        if given not in (shapes[name], shapes[name][1:] if shapes[name][0] == 1 else None):
            problems.append(f"{name} has shape {given}, not {shapes[name]}")
        elif len(shapes[name]) == 1 and file.tensors[name].kind not in PLAIN:
            problems.append(f"{name} is quantised as {file.tensors[name].kind}, but no matrix")
    if problems:
        raise CheckpointError(
            f"the tensors in {file.path} are not those of its metadata: {some_of(problems)}; fetch "
            "it again"
        )
    return found


def _place(architecture: str, config: ModelConfig, tensor: ExpectedTensor) -> _StoredRows:
    *module, leaf = tensor.path
    layer = ""
    if module[0].startswith("layers_"):
        layer, module = f"blk.{module[0].removeprefix('layers_')}.", module[1:]
    whole, start, stop = tensor.shape, 0, tensor.shape[0]
    for fused in FAMILIES[config.architecture].fused:
        part = tensor.parts[0]
        if part.shape != tensor.shape and module[-1] in _PARTS[fused]:
            module[-1], whole, start, stop = fused, part.shape, part.start, part.stop
    modules = _MODULES | (_OF_GPT_OSS if architecture == "gpt-oss" else {})
    end = {"bias": ".bias", "choice_bias": ".bias", "sinks": "_sinks.weight"}.get(leaf, ".weight")
    return _StoredRows(f"{layer}{modules[tuple(module)]}{end}", whole, start, stop)


_PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def stored_dtype(file: GGUFFile) -> np.dtype:
    """Returns the dtype of a model whose settings give none: that of its matrices, or bfloat16 where
    some are quantised."""
    kinds = {each.kind for each in file.tensors.values() if len(each.shape) > 1}
    return _DTYPES.get(kinds.pop(), _BFLOAT16) if len(kinds) == 1 else _BFLOAT16


def read(
    file: GGUFFile,
    places: Mapping[str, tuple[ExpectedTensor, _StoredRows]],
    dtype: Any,
    put: Callable[[tuple[str, ...], Any], Any] | None = None,
    check: bool = True,
) -> dict[str, Any]:
    """Reads the parameters for `Decoder.apply`, one after the other, the largest first.

    Quantised matrices stay packed.

    Args:
      file: to read.
      places: from `match`.
      dtype: of the parameters, and of the numbers that quantised ones stand for.
      put: (path, value on the host) -> value on its devices; default the default device.
      check: refuse what is not finite.

    Raises:
      CheckpointError: a file that became unreadable, or a tensor that is not finite.
    """
    total = sum(int(np.prod(tensor.shape)) for tensor, _ in places.values())
    params: dict[tuple[str, ...], Any] = {}
    adds_one = architecture_of(file).norms_add_one
    with progress.work("reading weights", total, "numbers") as work:
        for tensor, place in sorted(places.values(), key=lambda each: -np.prod(each[0].shape)):
            path = tensor.path
            less = int(adds_one and path[-1] == "scale")
            value = _value(file, tensor, place, kept_dtype(path, dtype), check, less)
            params[path] = (
                put(path, value) if put else jax.device_put(jax.tree.map(np.array, value))
            )
            jax.block_until_ready(params[path])
            work.update(int(np.prod(tensor.shape)))
    return {"params": nested(params)}


def read_stored(
    file: GGUFFile, places: Mapping[str, tuple[ExpectedTensor, _StoredRows]]
) -> Iterator[tuple[str, Parameter]]:
    """Yields (name, value on the host) of each parameter, plain ones in the dtype of the file.

    Raises:
      CheckpointError: see `read`.
    """
    adds_one = architecture_of(file).norms_add_one
    for name, (tensor, place) in places.items():
        less = int(adds_one and tensor.path[-1] == "scale")
        kind = file.tensors[place.name].kind
        dtype = _DTYPES.get(kind, _BFLOAT16)
        yield name, _value(file, tensor, place, np.float32 if less else dtype, True, less)


def _value(
    file: GGUFFile, tensor: ExpectedTensor, place: _StoredRows, dtype: Any, check: bool, less: int
) -> Shaped[np.ndarray, "..."] | QuantisedTensor:
    """A parameter on the host; of plain numbers `less` is subtracted."""
    stored = file.tensors[place.name]
    rows = (0, None) if len(stored.shape) < len(place.shape) else (place.start, place.stop)
    raw: Any = file.stored(place.name, *rows)
    if raw.ndim < len(place.shape):
        raw = raw[None]
    if tensor.order is not None:
        raw = tensor.order.read(raw)
    name = f"{file.path}: {place.name}"
    if stored.kind in PLAIN:
        value = raw.view(ml_dtypes.bfloat16) if stored.kind == "BF16" else raw
        value = value.astype(np.float32) - np.float32(less) if less else value
        with np.errstate(over="ignore"):
            if check and not np.isfinite(largest(value).astype(dtype)):
                raise not_finite(name, value.dtype, dtype)
            return np.array(value.astype(dtype))
    found = quantised_blocks(stored.kind, raw, np.dtype(dtype))
    if check:
        try:
            found.check(name)
        except ValueError as error:
            raise CheckpointError(f"{error}; fetch the file again") from error
        if found.offsets is not None and not np.isfinite(np.asarray(found.offsets)).all():
            raise CheckpointError(f"{name} has offsets that are NaN or infinite; fetch it again")
    return found
