"""Reading onto a mesh: from the files come the parts alone that this process's devices have.

A part is some rows or columns of a tensor, or some experts. What several devices have is read once.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from jaxshare import progress, sharding
from jaxshare.models.config import ModelConfig
from jaxshare.models.safetensors_files import StoredTensor, opened
from jaxshare.models.safetensors_io import DTYPES, largest, not_finite
from jaxshare.models.tensor_names import ExpectedTensor, Part, kept_dtype
from jaxshare.models.tensor_parallel import ParamPath, ShardedDecoder, repeats

Index = tuple[tuple[int, int], ...]
"""A part of an array: the first index along each axis, and the one after the last."""
Read = Callable[[str, Index], Shaped[np.ndarray, "..."]]
"""(name, part) -> the part of a tensor of the checkpoint."""


def can_be_read_in_parts(tensor: ExpectedTensor, stored: Mapping[str, StoredTensor]) -> bool:
    """Returns whether a parameter's tensors are plain numbers; quantised ones are read whole."""
    return all(not part.is_quantised and stored[part.name].dtype in DTYPES for part in tensor.parts)


@dataclasses.dataclass(frozen=True)
class PartialReader:
    """Reads parts of a model's parameters.

    Attributes:
      stored: the tensors of the checkpoint.
      expected: the parameters that are read, all of which `can_be_read_in_parts`.
      config: of the checkpoint's model.
      module: of the model on the mesh.
      dtype: of the parameters.
      check: refuse what is not finite.
    """

    stored: Mapping[str, StoredTensor]
    expected: Mapping[str, ExpectedTensor]
    config: ModelConfig
    module: ShardedDecoder
    dtype: jnp.dtype
    check: bool = True

    def arrays(self) -> dict[ParamPath, jax.Array]:
        """Reads all parameters onto the mesh, the largest first.

        Raises:
          CheckpointError: a file that became unreadable, or a tensor that is not finite.
        """
        params: dict[ParamPath, jax.Array] = {}
        mine = [each for each in self.module.mesh.devices.flat if _is_here(each)]
        for path, shape, parts in self.parts(mine):
            placed = [jax.device_put(parts[device], device) for device in mine]
            target = sharding.sharding(self.module.mesh, self.module.names(path))
            params[path] = jax.make_array_from_single_device_arrays(shape, target, placed)
            params[path].block_until_ready()
        return params

    def parts(
        self, devices: list[Any]
    ) -> Iterator[tuple[ParamPath, tuple[int, ...], dict[Any, Shaped[np.ndarray, "..."]]]]:
        """Yields (path, shape, part of each of these devices) of all parameters; devices with the
        same part have one array."""
        by_size = sorted(self.expected.values(), key=lambda tensor: -math.prod(tensor.shape))
        split = [(tensor, *self._split(tensor, devices)) for tensor in by_size]
        item = jnp.dtype(self.dtype).itemsize
        total = sum(item * _size(part) for _, _, places in split for part in {*places.values()})
        with progress.work("reading parts of weights", total, "B") as work:
            for tensor, shape, places in split:
                read: dict[Index, np.ndarray] = {}
                for part in places.values():
                    if part not in read:
                        read[part] = self._read(tensor, part)
                        work.update(item * _size(part))
                yield tensor.path, shape, {device: read[part] for device, part in places.items()}

    def _split(
        self, tensor: ExpectedTensor, devices: list[Any]
    ) -> tuple[tuple[int, ...], dict[Any, Index]]:
        """The shape of a parameter on the mesh, and the part of each device."""
        times = repeats(tensor.path, self.config, self.module.mesh)
        shape = tensor.shape[0] * times, *tensor.shape[1:]
        target = sharding.sharding(self.module.mesh, self.module.names(tensor.path))
        found = target.devices_indices_map(shape)
        return shape, {
            device: tuple(
                each.indices(size)[:2] for each, size in zip(found[device], shape, strict=True)
            )
            for device in devices
        }

    def _read(self, tensor: ExpectedTensor, index: Index) -> Shaped[np.ndarray, "..."]:
        """A part of a parameter on the mesh, in its dtype."""
        dtype = kept_dtype(tensor.path, self.dtype)
        read = functools.partial(self._of_file, dtype)
        times = repeats(tensor.path, self.config, self.module.mesh)
        if times == 1:
            return part_of(tensor, index, read, dtype)
        # Each head of the checkpoint is there several times.
        (start, stop), *rest = index
        size = self.config.head_dim
        heads = np.arange(start // size, stop // size) // times
        first, last = int(heads[0]), int(heads[-1]) + 1
        value = part_of(tensor, ((first * size, last * size), *rest), read, dtype)
        by_head = value.reshape(last - first, size, *value.shape[1:])[heads - first]
        return by_head.reshape(-1, *value.shape[1:])

    def _of_file(self, dtype: jnp.dtype, name: str, index: Index) -> Shaped[np.ndarray, "..."]:
        # A file is opened for each part, since the pages of an open mapping count as memory.
        with opened(self.stored[name], name) as tensor:
            value = tensor[tuple(slice(*each) for each in index)]
        if self.check:
            with np.errstate(over="ignore"):
                is_finite = np.isfinite(largest(value).astype(dtype))
            if not is_finite:
                raise not_finite(f"{self.stored[name].file}: {name}", value.dtype, dtype)
        return value


def part_of(
    tensor: ExpectedTensor, index: Index, read: Read, dtype: jnp.dtype
) -> Shaped[np.ndarray, "..."]:
    """Returns a part of a parameter, of which `read` gives parts of tensors.

    Args:
      tensor: the parameter.
      index: the part.
      read: gives parts of the checkpoint's tensors, of any float dtype.
      dtype: of the result.
    """
    if not tensor.is_stacked:
        return _in_order(tensor, index, read).astype(dtype, copy=False)
    (first, last), *rest = index
    # In the dtype of the result from the start, so that no more than one expert is held beside it.
    whole = np.empty([stop - start for start, stop in index], dtype)
    for place, part in enumerate(tensor.parts[first:last]):
        whole[place] = _rows(part, rest[0], tuple(rest[1:]), read).astype(dtype, copy=False)
    return whole


def _in_order(tensor: ExpectedTensor, index: Index, read: Read) -> Shaped[np.ndarray, "..."]:
    """A part of a parameter that is not stacked, its rows in the order of this library."""
    (part,), order, ((start, stop), *rest) = tensor.parts, tensor.order, index
    # Rows are ordered within a head, and those of a group are together: these are read whole.
    unit = order.head_dim if order else part.stop - part.start if part.groups > 1 else 1
    first, last = start // unit * unit, -(-stop // unit) * unit
    value = _rows(part, (first, last), tuple(rest), read)
    value = value if order is None else np.asarray(order.read(value))
    return value[start - first : stop - first]


def _rows(part: Part, rows: tuple[int, int], rest: Index, read: Read) -> Shaped[np.ndarray, "..."]:
    """Rows of those that `Part.taken` gives, and of these a part along the other axes."""
    start, stop = rows
    if part.matrix is not None:
        one = part.matrix, part.matrix + 1
        taken = part.start + start * part.step, part.start + (stop - 1) * part.step + 1
        if part.is_transposed:
            return read(part.name, (one, *rest, taken))[0].T[:: part.step]
        return read(part.name, (one, taken, *rest))[0][:: part.step]
    if part.groups == 1:
        return read(part.name, ((part.start + start, part.start + stop), *rest))
    size, taken_size = part.shape[0] // part.groups, part.stop - part.start
    firsts = (group * size + part.start for group in range(start // taken_size, stop // taken_size))
    pieces = [read(part.name, ((first, first + taken_size), *rest)) for first in firsts]
    return np.concatenate(pieces)


def _size(index: Index) -> int:
    return math.prod(stop - start for start, stop in index)


def _is_here(device: Any) -> bool:
    return device.process_index == jax.process_index()
