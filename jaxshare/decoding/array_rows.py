"""Changes of single rows of a decode state's arrays, between dispatches."""

import numpy as np
from jax import Array
from jax.typing import ArrayLike


def with_row(array: Array | np.ndarray, row: int, value: ArrayLike) -> Array:
    """The array with another entry for one row; on the host where it is there."""
    if not isinstance(array, np.ndarray):
        return array.at[row].set(value)
    changed = array.copy()
    changed[row] = value
    return changed  # pyright: ignore[reportReturnType]
