"""Quantised models in the form of compressed-tensors, which transformers and vLLM read.

Integer codes are "pack-quantized": words of 32 bits with the codes of a row one after the other, the
first in the lowest bits. Codes of fp8 are "float-quantized": a tensor of them beside their scales.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int, Integer, Shaped

from jaxshare.models.config import ModelConfig
from jaxshare.models.quantisation.making import Making, Value
from jaxshare.models.quantisation.rounding import Rounding
from jaxshare.models.tensor_names import ExpectedTensor, prefix_of, taken_apart
from jaxshare.quantised import FORMATS, QuantisedTensor

_WORD = 32


def check_form(expected: Iterable[ExpectedTensor]) -> None:
    """Raises ValueError for a model whose layers' matrices this form has no names for."""
    if any(part.matrix is not None for tensor in expected for part in tensor.parts):
        raise ValueError(
            "the matrices of this model's experts are one tensor, for which compressed-tensors has "
            "no form; write it in Orbax form (--form orbax)"
        )


def stored_tensors_of(
    expected: Mapping[str, ExpectedTensor], values: Iterable[tuple[str, Value]]
) -> Iterator[tuple[str, Shaped[np.ndarray, "..."]]]:
    """Yields (name, value) of each tensor of a checkpoint.

    Args:
      expected: the model's parameters.
      values: (name, value) of each, those of a layer next to each other.
    """
    for several in _together(expected, values):
        plain = {n: v for n, v in several.items() if not isinstance(v, QuantisedTensor)}
        yield from taken_apart({name: expected[name] for name in plain}, plain.__getitem__)
        found = {n: v for n, v in several.items() if isinstance(v, QuantisedTensor)}
        yield from _quantised_tensors({name: expected[name] for name in found}, found)


def _together(
    expected: Mapping[str, ExpectedTensor], values: Iterable[tuple[str, Value]]
) -> Iterator[dict[str, Value]]:
    """Parameters by layer, since some have parts of one tensor."""
    several, last = dict[str, Value](), None
    for name, value in values:
        if expected[name].path[0] != last and several:
            yield several
            several = {}
        last = expected[name].path[0]
        several[name] = value
    yield several


def _quantised_tensors(
    expected: Mapping[str, ExpectedTensor], values: Mapping[str, QuantisedTensor]
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of quantised parameters, array by array."""
    names = ["codes", "scales"]
    if any(value.zeros is not None for value in values.values()):
        names.append("zeros")
    for array in names:
        of_array = {name: _array(value, array) for name, value in values.items()}
        places = {
            name: dataclasses.replace(
                tensor,
                parts=tuple(
                    dataclasses.replace(part, shape=(*part.shape[:-1], of_array[name].shape[-1]))
                    for part in tensor.parts
                ),
            )
            for name, tensor in expected.items()
        }
        bits = {
            part.name: values[name].code_format.bits
            for name, tensor in expected.items()
            for part in tensor.parts
        }
        for stored, value in taken_apart(places, of_array.__getitem__):
            yield from _stored(stored.removesuffix("weight"), array, value, bits[stored])


def _array(value: QuantisedTensor, name: str) -> np.ndarray:
    """One of a tensor's arrays [..., O, _], with a code, scale or zero each."""
    if name != "codes":
        return getattr(value, name)
    if value.code_format.bits == 8:
        return value.codes
    groups = value.codes.reshape(*value.scales.shape, -1)
    return np.concatenate([groups & 15, groups >> 4], axis=-1).reshape(value.shape)


def _stored(
    prefix: str, array: str, value: np.ndarray, bits: int
) -> Iterator[tuple[str, np.ndarray]]:
    """One array of a whole tensor as it is stored."""
    if array == "scales":
        yield f"{prefix}weight_scale", value
    elif array == "zeros":
        yield f"{prefix}weight_zero_point", packed_words(value.T, bits).T
    elif value.dtype.kind in "iu":
        unsigned = value if bits == 4 else (value.astype(np.int16) + 128)
        yield f"{prefix}weight_packed", packed_words(unsigned, bits)
        yield f"{prefix}weight_shape", np.asarray(value.shape, np.int64)
    else:
        yield f"{prefix}weight", value


def packed_words(codes: Integer[np.ndarray, "O I"], bits: int) -> Int[np.ndarray, "O W"]:
    """Packs codes, which are not negative, into words of a row each; the last may have room."""
    in_word = _WORD // bits
    padded = np.pad(codes.astype(np.uint32), ((0, 0), (0, -codes.shape[1] % in_word)))
    shifts = np.arange(in_word, dtype=np.uint32) * bits
    words = padded.reshape(len(codes), -1, in_word) << shifts
    return np.bitwise_or.reduce(words, axis=-1).view(np.int32)


def quantization_config(
    config: ModelConfig, expected: Mapping[str, ExpectedTensor], making: Making
) -> dict[str, Any]:
    """Returns what config.json says of a quantised model."""
    schemes: dict[tuple[Rounding, int | None], list[str]] = {}
    ignored = list[str]()
    for tensor in expected.values():
        if tensor.path[-1] not in ("kernel", "embedding"):
            continue
        modules = [part.name.removesuffix(".weight") for part in tensor.parts]
        rounding = making.of(tensor.path, tensor.shape)
        if rounding is None:
            ignored += modules if tensor.path[-1] == "kernel" else []
            continue
        group = rounding.group_of(tensor.shape[-1])
        key = rounding, None if rounding.group is None else group
        schemes.setdefault(key, []).extend(modules)
    if config.tie_embeddings:
        ignored.append(f"{prefix_of(config)}lm_head")
    # Where several schemes could match a module, programs do not agree on which of them counts.
    groups = {
        f"group_{number}": {
            "targets": ["Linear"] if len(schemes) == 1 else sorted({*modules}),
            "weights": _weights(*key),
            "input_activations": None,
            "output_activations": None,
        }
        for number, (key, modules) in enumerate(schemes.items())
    }
    is_float = making.rounding.format == "fp8"
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if is_float else "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": groups,
        "ignore": sorted({*ignored}),
    }


def _weights(rounding: Rounding, group: int | None) -> dict[str, Any]:
    return {
        "num_bits": FORMATS[rounding.format].bits,
        "type": "float" if rounding.format == "fp8" else "int",
        "symmetric": not rounding.zeros,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
        "observer": "minmax",
        "actorder": None,
    }
