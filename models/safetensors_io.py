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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxshare import progress
from jaxshare.models.config import FAMILIES, ModelConfig
from jaxshare.models.config_fields import some_of
from jaxshare.models.quantisation.matching import Quantisation
from jaxshare.models.safetensors_files import (
    CheckpointError,
    StoredTensor,
    opened,
)
from jaxshare.models.tensor_names import (
    ExpectedTensor,
    Parameter,
    Part,
    as_stored,
    assembled,
    expected_tensors,
    kept_dtype,
    prefix_of,
    stored_arrays,
)
from jaxshare.quantised import QuantisedTensor
from jaxshare.switches import is_on

DTYPES = {"BF16": jnp.bfloat16, "F16": jnp.float16, "F32": jnp.float32}

CHECK_VARIABLE = "JAXSHARE_CHECK_WEIGHTS"
"""The environment variable that is "off" where parameters may be NaN or infinite."""


def is_checked() -> bool:
    """Returns whether parameters are refused where they are NaN or infinite, if nothing is said.

    Raises:
      ValueError: the environment variable is neither on nor off.
    """
    return is_on(CHECK_VARIABLE)


def match_tensors(
    config: ModelConfig,
    stored: dict[str, StoredTensor],
    source: Path,
    quantisation: Quantisation | None = None,
) -> dict[str, ExpectedTensor]:
    """Checks every stored tensor against the model, and returns the model's parameters.

    Args:
      config: of the model.
      stored: from `stored_tensors`.
      source: the folder, for messages.
      quantisation: the settings of quantised matrices, if there are some.

    Raises:
      CheckpointError: names some of those that are missing, unexpected, of a wrong shape or of a
        dtype that is not a plain float, or that of an array of a quantised matrix.
    """
    expected = as_stored(expected_tensors(config), stored, quantisation)
    arrays = stored_arrays(expected)
    problems = [f"{name} is missing" for name in arrays.keys() - stored.keys()]
    unexpected = [name for name in stored.keys() - arrays.keys() if not _ignored(name, config)]
    problems += _problems_of_quantised(expected, stored, unexpected, quantisation)
    problems += [f"{name} is unexpected" for name in unexpected]
    advice = ""
    if quantisation is None and any(name.endswith(_OF_QUANTISED) for name in unexpected):
        advice = (
            "; some are of quantised matrices, which are read where config.json has the "
            "quantization_config that they were made with"
        )
    for name in arrays.keys() & stored.keys():
        array, found = arrays[name], stored[name]
        if array.shapes and found.shape not in array.shapes:
            wanted = " or ".join(map(str, array.shapes))
            problems.append(f"{name} has shape {found.shape}, not {wanted}")
        if found.dtype not in array.dtypes:
            problems.append(f"{name} has dtype {found.dtype}, not one of {', '.join(array.dtypes)}")
    if problems:
        raise CheckpointError(
            f"the tensors in {source} are not those that its config.json describes: "
            f"{some_of(problems)}{advice}; fetch the checkpoint again, or correct its config.json"
        )
    return expected


def _problems_of_quantised(
    expected: Mapping[str, ExpectedTensor],
    stored: Mapping[str, StoredTensor],
    unexpected: list[str],
    quantisation: Quantisation | None,
) -> list[str]:
    """Lists what is wrong with quantised matrices, beyond arrays that are missing.

    Args:
      expected, stored: see `match_tensors`.
      unexpected: tensors that are not expected, of which those are taken out that are not read.
      quantisation: see `match_tensors`.
    """
    problems: list[str] = []
    forms: dict[str, Part] = {}
    for tensor in expected.values():
        forms |= {part.layer: part for part in tensor.parts if part.form is not None}
        if len({type(part.form) for part in tensor.parts}) > 1:
            problems.append(
                f"{tensor.parts[0].layer} and the same layer of the other experts are not all "
                "quantised, or not all in one form"
            )
    for layer, part in forms.items():
        assert part.form is not None
        if problem := part.form.problem(part.shape):
            problems.append(f"{layer} cannot be quantised so: {problem}")
    for name in [*unexpected]:
        layer, _, array = name.rpartition(".")
        if (part := forms.get(layer)) is None:
            if quantisation is not None and array in _OF_CACHES:
                unexpected.remove(name)
            continue
        assert part.form is not None
        if name == part.name:
            unexpected.remove(name)
            problems.append(f"{name} is there beside {layer}.{part.arrays[0]}: keep one of them")
        elif array in part.form.unused and (array != "bias" or _is_zero(stored[name], name)):
            unexpected.remove(name)
    return problems


_OF_QUANTISED = ".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv"
_OF_CACHES = frozenset(
    {f"{one}_{kind}" for one in "qkv" for kind in ("scale", "zero_point")} | {"prob_scale"}
)
"""Scales of cached keys and values, which have the model's dtype here."""


def _is_zero(tensor: StoredTensor, name: str) -> bool:
    with opened(tensor, name) as values:
        return not values[...].any()


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
    put: Callable[[tuple[str, ...], Parameter], Any] | None = None,
    check: bool = True,
    done: Mapping[tuple[str, ...], Any] | None = None,
) -> dict[str, Any]:
    """Reads the tensors into a tree of arrays, and of quantised tensors, for `Decoder.apply`.

    Args:
      stored: from `stored_tensors`.
      expected: from `match_tensors`.
      dtype: of plain parameters, and of the numbers that quantised ones stand for.
      put: (path, value on the host) -> value on its devices; default the default device.
      check: refuse what is not finite.
      done: the other parameters, which have been read (`jaxshare.models.partial_reads`).

    Raises:
      CheckpointError: a file that became unreadable, a tensor that is not finite, or a quantised
        one with scales that are zero or not finite.
    """
    params: dict[tuple[str, ...], Any] = dict(done or {})
    for name, value in read_tensors(stored, expected):
        path = expected[name].path
        kept = kept_dtype(path, dtype)
        if check:
            _check_finite(value, expected[name], stored, kept)
        params[path] = put(path, _in_dtype(value, kept)) if put else _on_device(value, kept)
        jax.block_until_ready(params[path])
    return {"params": nested(params)}


def read_sound(
    stored: dict[str, StoredTensor], expected: dict[str, ExpectedTensor]
) -> Iterator[tuple[str, Parameter]]:
    """Yields (name, value on the host) of each parameter, as stored, and refuses what is not finite.

    Raises:
      CheckpointError: see `read_params`.
    """
    for name, value in read_tensors(stored, expected):
        dtype = value.dtype if isinstance(value, np.ndarray) else np.dtype(np.float32)
        _check_finite(value, expected[name], stored, dtype)
        yield name, value


def check_numbers(name: str, value: Float[np.ndarray, "..."]) -> None:
    """Raises CheckpointError, with this name, for numbers that are NaN or infinite."""
    if not _is_finite(value, value.dtype):
        raise not_finite(name, value.dtype, value.dtype)


def _check_finite(
    value: Parameter,
    expected: ExpectedTensor,
    stored: Mapping[str, StoredTensor],
    dtype: jnp.dtype,
) -> None:
    """Raises CheckpointError for a parameter that is not finite, or that has scales of zero."""
    if not isinstance(value, QuantisedTensor) and _is_finite(value, dtype):
        return
    for index, part in enumerate(expected.parts):
        one = value[index] if expected.is_stacked else value
        if not isinstance(one, QuantisedTensor):
            if not _is_finite(one, dtype):
                raise not_finite(f"{stored[part.name].file}: {part.name}", one.dtype, dtype)
        elif problem := one.problem_of_numbers():
            raise CheckpointError(
                f"{stored[part.first_name].file}: {part.layer} has {problem}; fetch "
                "the checkpoint again, or load it as it is with check=False, on the command line "
                f"with {CHECK_VARIABLE}=off"
            )


def _in_dtype(value: Parameter, dtype: jnp.dtype) -> Parameter:
    """A parameter in a dtype; the arrays of a quantised one keep theirs."""
    if isinstance(value, QuantisedTensor):
        return dataclasses.replace(value, dtype=dtype)
    return value.astype(dtype)


def _is_finite(value: Float[np.ndarray, "..."], dtype: jnp.dtype) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(largest(value).astype(dtype)))


def _on_device(value: Parameter, dtype: jnp.dtype) -> Any:
    """A copy of an array of a file. To convert it on the device takes a program for each shape, which
    small ones are not worth."""
    if isinstance(value, QuantisedTensor):
        return jax.tree.map(lambda each: jax.device_put(np.array(each)), _in_dtype(value, dtype))
    if value.size <= _SMALL:
        with np.errstate(over="ignore"):
            return jax.device_put(np.array(value, dtype))
    return jax.device_put(np.array(value)).astype(dtype)


_SMALL = 2**16
"""As many numbers as a host converts sooner than a program is compiled."""

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
) -> Iterator[tuple[str, Parameter]]:
    """Yields (name, value) of the expected parameters in their stored dtype, the largest first.

    Raises:
      CheckpointError: a file that became unreadable, or arrays that make no quantised matrix.
    """

    def size(tensor: ExpectedTensor) -> int:
        first = tensor.parts[0]
        if first.is_quantised:
            return math.prod(tensor.shape)
        dtype = DTYPES.get(stored[first.name].dtype, jnp.bfloat16)
        return math.prod(tensor.shape) * np.dtype(dtype).itemsize

    total = sum(map(size, expected.values()))
    with progress.work("reading weights", total, "B") as work:

        def read(part: Part) -> Parameter:
            with contextlib.ExitStack() as files:

                def tensor(name: str) -> Any:
                    return files.enter_context(opened(stored[name], name))

                try:
                    value = part.taken(tensor)
                except ValueError as error:
                    if part.form is None or isinstance(error, CheckpointError):
                        raise
                    raise CheckpointError(
                        f"{stored[part.first_name].file}: {part.layer} cannot be "
                        f"read: {error}; fetch the checkpoint again"
                    ) from error
            work.update(value.size if part.is_quantised else value.nbytes)
            return value

        for name in sorted(expected, key=lambda name: -math.prod(expected[name].shape)):
            try:
                value = assembled(expected[name], read)
            except ValueError as error:  # of experts that cannot be stacked
                if isinstance(error, CheckpointError):
                    raise
                layer = expected[name].parts[0].layer
                raise CheckpointError(f"{layer} cannot be read: {error}") from error
            yield name, value
