"""Quantised tensors: codes of few bits, and a scale for each group of inputs.

A `QuantisedTensor` stands where a plain array [..., out, in] may: it is one node of a tree of
parameters, its arrays are split over devices, saved and indexed as those of any other tree. The
core's products take either (`jaxshare.models.linear`).

Two codes of four bits share a byte: of each group the first half of the inputs is in the low bits,
the second half in the high bits. So the numbers of a group come out of its bytes without being
interleaved, and rows and groups can be split over devices as they are.

Axis letters: O outputs, I inputs, G groups of inputs, N inputs of a group, B bytes of a row.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Shaped


@dataclasses.dataclass(frozen=True)
class CodeFormat:
    """A format says what codes stand for.

    Attributes:
      name: in `FORMATS`.
      bits: of a code, 8 or 4.
      storage: the dtype of the array that has the codes.
      middle: subtracted from the numbers of codes where no zeros are given.
      table: the numbers of all codes, where they are not the codes themselves.
      largest: the magnitude of the number that a scale is chosen by.
    """

    name: str
    bits: int
    storage: np.dtype
    middle: int = 0
    table: tuple[float, ...] = ()
    largest: float = 0.0


_MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The quantiles of a normal distribution that QLoRA gives (Dettmers et al. 2023, appendix E)."""

FORMATS: Mapping[str, CodeFormat] = {
    each.name: each
    for each in (
        CodeFormat("int8", 8, np.dtype(np.int8), largest=127.0),
        CodeFormat("int4", 4, np.dtype(np.uint8), middle=8, largest=7.0),
        CodeFormat("fp8", 8, np.dtype(ml_dtypes.float8_e4m3fn), largest=448.0),
        CodeFormat(
            "mxfp4",
            4,
            np.dtype(np.uint8),
            table=(*_MXFP4, *(-x for x in _MXFP4)),
            largest=6.0,
        ),
        CodeFormat("nf4", 4, np.dtype(np.uint8), table=_NF4, largest=1.0),
    )
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QuantisedTensor:
    """Numbers [..., O, I] as codes: (number of the code - zero) * scale - offset.

    All arrays may be NumPy's; functions of a tensor of NumPy arrays then return such.

    Attributes:
      codes: [..., O, B] in the format's storage dtype; B is I, or I / 2 for codes of four bits.
      scales: [..., O, G], of any float dtype; all groups are of I / G inputs.
      zeros: int[..., O, G], subtracted from the numbers of codes; None for the format's `middle`.
      offsets: float[..., O, G], subtracted after scaling; None for none.
      order: int[I], the inputs in the order in which they are grouped; None for their own. The
        numbers of `codes` are in this order, those that `dequantised` returns in their own.
      format: the name of a `CodeFormat`.
      dtype: of the numbers that the tensor stands for, those of a model's plain parameters.
    """

    codes: Shaped[Any, "*_ O B"]
    scales: Float[Any, "*_ O G"]
    zeros: Int[Array | np.ndarray, "*_ O G"] | None = None
    offsets: Float[Array | np.ndarray, "*_ O G"] | None = None
    order: Int[Array | np.ndarray, " I"] | None = None
    format: str = dataclasses.field(default="int8", metadata={"static": True})
    dtype: np.dtype = dataclasses.field(default=np.dtype(np.float32), metadata={"static": True})

    @property
    def code_format(self) -> CodeFormat:
        return FORMATS[self.format]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.code_format.bits)

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    def group(self) -> int:
        """The inputs that share a scale."""
        return self.shape[-1] // self.scales.shape[-1]

    def check(self, name: str) -> None:
        """Raises ValueError if arrays do not fit together, or their numbers are not sound.

        Args:
          name: of the tensor, for the message.
        """
        self.check_shapes(name)
        if problem := self.problem_of_numbers():
            raise ValueError(f"{name} has {problem}")

    def problem_of_numbers(self) -> str:
        """Names what is wrong with scales and codes; empty if they are finite, and scales not 0."""
        scales, codes = np.asarray(self.scales).astype(np.float32), np.asarray(self.codes)
        if not np.isfinite(scales).all():
            return "scales that are NaN or infinite"
        if not scales.all():
            return "scales that are zero"
        is_float = codes.dtype.kind not in "iu"
        return "codes that are NaN" if is_float and not np.isfinite(codes).all() else ""

    def check_shapes(self, name: str) -> None:
        """Raises ValueError if arrays do not fit together; looks at their shapes and dtypes alone.

        Args:
          name: of the tensor, for the message.
        """
        if self.format not in FORMATS:
            raise ValueError(
                f"{name} is quantised as {self.format}, which is not known; known are "
                f"{', '.join(FORMATS)}"
            )
        codes, scales, inputs = self.codes, self.scales, self.shape[-1]
        if codes.dtype != self.code_format.storage:
            raise ValueError(
                f"{name} has codes of dtype {codes.dtype}, but {self.format} has "
                f"{self.code_format.storage}"
            )
        if scales.ndim != codes.ndim or scales.shape[:-1] != codes.shape[:-1]:
            raise ValueError(
                f"{name} has scales of shape {scales.shape}; for numbers of shape {self.shape} "
                "there must be some for each row"
            )
        if (
            not scales.shape[-1]
            or inputs % scales.shape[-1]
            or self.group * self.code_format.bits % 8
        ):
            raise ValueError(
                f"{name} has {scales.shape[-1]} scales a row, which do not divide its {inputs} "
                "inputs into groups of whole bytes"
            )
        for each, kind in ((self.zeros, "zeros"), (self.offsets, "offsets")):
            if each is not None and each.shape != scales.shape:
                raise ValueError(
                    f"{name} has {kind} of shape {each.shape}, and scales of shape {scales.shape}; "
                    "they must be the same"
                )
        if self.order is not None and self.order.shape != (inputs,):
            raise ValueError(
                f"{name} has an order of shape {self.order.shape}, but {inputs} inputs"
            )

    def map_rows(self, function: Callable[[Any], Any]) -> "QuantisedTensor":
        """Applies a function of arrays [..., O, _] that leaves their last axis alone to each."""
        kept = {name: getattr(self, name) for name in ("codes", "scales", "zeros", "offsets")}
        found = {name: None if each is None else function(each) for name, each in kept.items()}
        return dataclasses.replace(self, **found)

    def __getitem__(self, index: Any) -> "QuantisedTensor":
        """Takes matrices or rows: any index of axes before the last."""
        return self.map_rows(lambda each: each[index])

    def ordered(self, x: Shaped[Array, "*_ I"]) -> Shaped[Array, "*_ I"]:
        """Returns inputs in the order of the codes."""
        return x if self.order is None else jnp.take(x, self.order, axis=-1)

    def numbers(self) -> Float[Any, "*_ O G N"]:
        """The numbers of all codes in float32, by group, before zeros, scales and offsets."""
        numpy: Any = np if isinstance(self.codes, np.ndarray) else jnp
        kind = self.code_format
        groups = self.codes.reshape(*self.scales.shape, -1)
        if kind.bits == 4:
            groups = numpy.concatenate([groups & 15, groups >> 4], axis=-1)
        if kind.table:
            return numpy.asarray(kind.table, np.float32)[groups]
        return groups.astype(np.float32)

    def dequantised(self, dtype: DTypeLike | None = None) -> Float[Any, "*_ O I"]:
        """Returns the numbers, computed in float32 and rounded to `dtype`, by default the tensor's."""
        numpy: Any = np if isinstance(self.codes, np.ndarray) else jnp
        found, kind = self.numbers(), self.code_format
        if self.zeros is not None:
            found = found - self.zeros[..., None].astype(np.float32)
        elif kind.middle:
            found = found - np.float32(kind.middle)
        found = found * self.scales[..., None].astype(np.float32)
        if self.offsets is not None:
            found = found - self.offsets[..., None].astype(np.float32)
        found = found.reshape(self.shape).astype(self.dtype if dtype is None else dtype)
        if self.order is not None:
            found = numpy.take(found, numpy.argsort(self.order), axis=-1)
        return found


def is_quantised(value: Any) -> bool:
    """True for a quantised tensor, as `is_leaf` of functions of trees of parameters."""
    return isinstance(value, QuantisedTensor)


def concatenated(tensors: Sequence[QuantisedTensor]) -> QuantisedTensor | None:
    """Returns tensors [_, I] as one, row after row; None where they are quantised in different
    ways, or have orders of their own."""
    first = tensors[0]
    alike = jax.tree.structure(first)
    same = all(jax.tree.structure(each) == alike for each in tensors)
    if not same or first.order is not None or len({each.group for each in tensors}) > 1:
        return None
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *tensors)


def packed_codes(codes: Shaped[np.ndarray, "*_ I"], group: int) -> Shaped[np.ndarray, "*_ B"]:
    """Packs codes of four bits, two a byte, in the order that `QuantisedTensor` has for groups of
    this size, which must be even."""
    groups = codes.reshape(*codes.shape[:-1], -1, 2, group // 2).astype(np.uint8)
    return (groups[..., 0, :] | groups[..., 1, :] << 4).reshape(*codes.shape[:-1], -1)


def quantised(
    value: Float[np.ndarray, "*_ O I"],
    format: str,
    group: int | None = None,
    *,
    scale_dtype: DTypeLike = np.float32,
) -> QuantisedTensor:
    """Quantises numbers, each to the code that is nearest, with the scale by which the largest of a
    group is the format's largest.

    Args:
      value: the numbers.
      format: the name of a `CodeFormat`.
      group: inputs that share a scale; default all of a row.
      scale_dtype: of the scales, which are rounded first.

    Raises:
      ValueError: a format that is not known, or groups that do not divide the inputs.
    """
    inputs = value.shape[-1]
    size = inputs if group is None else group
    if format not in FORMATS:
        raise ValueError(f"{format} is no format of codes; known are {', '.join(FORMATS)}")
    kind = FORMATS[format]
    if size < 1 or inputs % size or size * kind.bits % 8:
        raise ValueError(
            f"groups of {size} do not divide {inputs} inputs"
            if size < 1 or inputs % size
            else f"groups of {size} codes of {kind.bits} bits are not whole bytes"
        )
    groups = value.astype(np.float32).reshape(*value.shape[:-1], -1, size)
    most = np.abs(groups).max(axis=-1)
    scales = np.where(most > 0, most / np.float32(kind.largest), 1).astype(scale_dtype)
    scaled = groups / np.where(scales == 0, 1, scales).astype(np.float32)[..., None]
    if kind.table:
        codes = _nearest(scaled, kind.table)
    elif kind.storage == ml_dtypes.float8_e4m3fn:
        codes = np.clip(scaled, -kind.largest, kind.largest).astype(kind.storage)
    else:
        codes = np.clip(np.rint(scaled), -kind.largest - 1, kind.largest)
        codes = (codes + kind.middle).astype(kind.storage)
    codes = codes.reshape(value.shape)
    if kind.bits == 4:
        codes = packed_codes(codes, size)
    return QuantisedTensor(codes, scales, format=format, dtype=np.dtype(value.dtype))


def _nearest(values: np.ndarray, table: tuple[float, ...]) -> np.ndarray:
    """The code whose number is nearest to each value."""
    numbers = np.asarray(table, np.float32)
    order = np.argsort(numbers, kind="stable")
    middles = (numbers[order][1:] + numbers[order][:-1]) / 2
    return order[np.searchsorted(middles, values)].astype(np.uint8)
