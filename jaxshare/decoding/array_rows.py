"""Arrays of a decode state that are made or changed on the host, which starts no program for that."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike


def filled(shape: int | Sequence[int], value: Any = 0, dtype: Any = np.int32) -> Array:
    """A new array of one value. `jnp.full` compiles a program for each shape."""
    return jax.device_put(np.full(shape, value, dtype))


def with_row(array: Array | np.ndarray, row: int, value: ArrayLike) -> Array:
    """The array with another entry for one row; on the host where it is there."""
    if not isinstance(array, np.ndarray):
        return array.at[row].set(value)
    changed = array.copy()
    changed[row] = value
    return changed  # pyright: ignore[reportReturnType]
