"""Stored forms: the arrays that a checkpoint has in place of the matrix of a linear layer."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np

from jaxshare.quantised import QuantisedTensor

FLOATS = ("BF16", "F16", "F32")
"""The dtypes of plain tensors and of scales, as safetensors names them."""


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array that a checkpoint has.

    Attributes:
      shapes: those that it may have; none for any.
      dtypes: those that it may have, as safetensors names them.
      is_optional: True for one that may be missing.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = FLOATS
    is_optional: bool = False


class StoredForm(abc.ABC):
    """A form in which a checkpoint has the matrices [out, in] of linear layers. The name of an array
    is that of the layer, a dot and the array's own.

    Forms are frozen dataclasses.

    Attributes:
      main: the array that has the codes.
      main_dtypes: its dtypes.
      unused: arrays that a layer may have beside those of `arrays`, and that are not read, because
        the inputs of products stay in the model's dtype.
    """

    main: ClassVar[str] = "weight"
    main_dtypes: ClassVar[tuple[str, ...]]
    unused: ClassVar[frozenset[str]] = frozenset()

    @abc.abstractmethod
    def arrays(self, shape: tuple[int, ...]) -> dict[str, StoredArray]:
        """Returns the arrays of a matrix of this shape, by their own names."""

    @abc.abstractmethod
    def problem(self, shape: tuple[int, ...]) -> str:
        """Returns why no matrix of this shape can be stored so; empty where one can."""

    @abc.abstractmethod
    def read(self, arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> QuantisedTensor:
        """Returns a matrix.

        Args:
          arrays: those that the checkpoint has of those of `arrays`, which were checked.
          shape: of the matrix.

        Raises:
          ValueError: contents that do not make a matrix.
        """

    def for_layer(self, layer: str, stored: Mapping[str, Any]) -> Self:
        """Returns the form with the names of arrays that a layer has among tensors of a checkpoint,
        in methods whose checkpoints use several names."""
        return self

    def is_stored(self, layer: str, stored: Mapping[str, Any]) -> bool:
        """Returns whether a layer is in this form; `stored` has anything with a `dtype` by name."""
        found = stored.get(f"{layer}.{self.main}")
        return found is not None and (self.main != "weight" or found.dtype in self.main_dtypes)

    def present(
        self, layer: str, shape: tuple[int, ...], stored: Mapping[str, Any]
    ) -> tuple[str, ...]:
        """Returns the arrays that a layer must have, and the optional ones that are there."""
        return tuple(
            name
            for name, array in self.arrays(shape).items()
            if not array.is_optional or f"{layer}.{name}" in stored
        )


def group_problem(inputs: int, group: int, bits: int) -> str:
    """Returns why the inputs of a row cannot be in groups of this size; empty where they can."""
    if inputs % group:
        return f"groups of {group} do not divide its {inputs} inputs"
    if group * bits % 8:
        return f"groups of {group} codes of {bits} bits are not whole bytes"
    return ""
