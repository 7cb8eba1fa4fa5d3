"""Memory for the sides of a point of `scripts.papers.hydragen`: what does not fit is left out, and
said to be."""

from collections.abc import Callable

import jax

from jaxshare.models import LoadedModel
from jaxshare.serving.branches.row_budget import free_bytes

_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
"""The start of XLA's errors for that."""


class SideRoom:
    """The memory for keys and values of all sides of a point together.

    Args:
      model: as loaded.
      gib: the most for all sides; None for what is free now.

    Attributes:
      left_out: why sides do not fit, by side.
    """

    def __init__(self, model: LoadedModel, gib: float | None):
        self._left = free_bytes(model) if gib is None else int(gib * 2**30)
        self.left_out: dict[str, str] = {}

    def prepare[T](self, side: str, taken: int, make: Callable[[], T]) -> T | None:
        """Calls `make` for a side that takes so many bytes; None where it does not fit."""
        if taken > self._left:
            self.left_out[side] = (
                f"keys and values of {taken / 2**30:.2f} GiB, more than {self._left / 2**30:.2f} GiB "
                "that are left"
            )
            return None
        try:
            made = make()
        except jax.errors.JaxRuntimeError as error:
            if _OUT_OF_MEMORY not in str(error):
                raise
            self.left_out[side] = "the device has not enough memory"
            return None
        self._left -= taken
        return made
