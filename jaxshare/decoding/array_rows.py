"""Arrays of a decode state that are made or changed on the host, which starts no program for that."""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxshare.layout import is_concrete

_stays_on_host = contextvars.ContextVar("stays_on_host", default=False)


@contextlib.contextmanager
def arrays_on_host() -> Iterator[None]:
    """Lets `placed` and `filled` leave arrays on the host: for states that are moved there anyway, and
    for those that a dispatch takes next, which costs less than a transfer for each array."""
    token = _stays_on_host.set(True)
    try:
        yield
    finally:
        _stays_on_host.reset(token)


def placed(arrays: Any) -> Any:
    """Arrays of the host on the device, or as they are within `arrays_on_host`."""
    return arrays if _stays_on_host.get() else jax.device_put(arrays)


def filled(shape: int | Sequence[int], value: Any = 0, dtype: Any = np.int32) -> Array:
    """A new array of one value. `jnp.full` compiles a program for each shape."""
    return placed(np.full(shape, value, dtype))


def with_row(array: Array | np.ndarray, row: int, value: ArrayLike) -> Array:
    """The array with another entry for one row; on the host where it is there."""
    if not isinstance(array, np.ndarray):
        return array.at[row].set(value)
    changed = array.copy()
    changed[row] = value
    return changed  # pyright: ignore[reportReturnType]


def with_fields[T](of: T, **fields: Any) -> T:
    """An object of a frozen dataclass with other values of some fields, where nothing is derived from
    them. `dataclasses.replace` sets all of them anew, in a decode state forty, which takes ten times
    as long."""
    changed = object.__new__(type(of))
    changed.__dict__.update(of.__dict__, **fields)
    return changed


def with_own_buffers[T](state: T) -> T:
    """The state with a buffer for each array, so that a caller's jit can take all as donated."""
    seen: set[int] = set()

    def own(array: Array) -> Array:
        repeated = id(array) in seen
        seen.add(id(array))
        if not repeated:
            return array
        return placed(np.array(array)) if is_concrete(array) else jnp.copy(array)

    return jax.tree.map(own, state)


def shapes_of(arrays: Any) -> Any:
    """A `ShapeDtypeStruct` for each array, with which a program for such arrays is compiled."""
    return jax.tree.map(_shape_of, arrays)


def _shape_of(array: Array | np.ndarray) -> jax.ShapeDtypeStruct:
    if not isinstance(array, Array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype)
    # An array that was put nowhere on purpose goes where others of the call are.
    sharding = array.sharding if array.committed else None
    return jax.ShapeDtypeStruct(
        array.shape, array.dtype, sharding=sharding, weak_type=array.weak_type
    )
