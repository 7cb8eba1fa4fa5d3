"""Quantised matrices inside kernels that JAX lowers through Triton: a tile of codes becomes numbers
in registers.

Axis letters: O outputs, G groups of inputs that share a scale, L outputs of a tile, B bytes of a
row of a tile.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxshare.pallas.device import Device, current_device
from jaxshare.quantised import FORMATS, QuantisedTensor

_DTYPES = (jnp.bfloat16, jnp.float16)
_MIN_CAPABILITY = 80
_MIN_CAPABILITY_FP8 = 89
_MOST_ELEMENTS = 2**31
"""Of an array: a kernel's indices have 32 bits."""


class MatrixForm(NamedTuple):
    """The way in which matrices are kept: their format, None for plain ones; what is subtracted
    from all codes; inputs that share a scale; which further arrays there are; and whether scales are
    the exponents of powers of two."""

    format: str | None
    middle: int = 0
    group: int = 1
    has_zeros: bool = False
    has_offsets: bool = False
    has_powers: bool = False

    @property
    def is_packed(self) -> bool:
        return self.format is not None and FORMATS[self.format].bits == 4

    @property
    def is_exact(self) -> bool:
        """True if codes less their zeros are exact in bfloat16 and in float16."""
        return not self.has_offsets and self.format in ("int8", "int4", "fp8")


def in_arrays(kernel: Array | QuantisedTensor) -> tuple[MatrixForm, list[Any]]:
    """The form of matrices, and their arrays: codes, scales, and zeros and offsets if there are
    any."""
    if not isinstance(kernel, QuantisedTensor):
        return MatrixForm(None), [kernel]
    scales, powers = kernel.scales, kernel.scales.dtype == jnp.float8_e8m0fnu
    if powers:  # which Triton does not have
        scales = lax.bitcast_convert_type(scales, jnp.uint8)
    given = (kernel.codes, scales, kernel.zeros, kernel.offsets)
    form = MatrixForm(
        kernel.format,
        kernel.code_format.middle,
        kernel.group,
        kernel.zeros is not None,
        kernel.offsets is not None,
        powers,
    )
    return form, [each for each in given if each is not None]


def supported_device(x: Array, kernel: Array | QuantisedTensor) -> Device:
    """The GPU that a kernel for these rows and matrices is to run on.

    Raises:
      NotImplementedError: no such GPU, dtype or format, or arrays that are too large.
    """
    device = current_device()
    if device is None or device.capability < _MIN_CAPABILITY:
        raise NotImplementedError("it runs on NVIDIA GPUs from compute capability 8.0")
    if x.dtype not in _DTYPES:
        raise NotImplementedError(f"its rows are bfloat16 or float16; these are {x.dtype}")
    if isinstance(kernel, QuantisedTensor):
        if kernel.format == "fp8" and device.capability < _MIN_CAPABILITY_FP8:
            raise NotImplementedError("GPUs convert float8_e4m3fn from compute capability 8.9 on")
    elif kernel.dtype != x.dtype:
        raise NotImplementedError(f"rows are {x.dtype} and matrices {kernel.dtype}")
    if max(leaf.size for leaf in jax.tree.leaves((x, kernel))) >= _MOST_ELEMENTS:
        raise NotImplementedError("an array has 2 ** 31 elements or more")
    return device


def numbers(form: MatrixForm, codes: Array, byte: Array) -> list[tuple[Array, Array]]:
    """The numbers that codes [L, B] stand for, and the input that each column is of; twice where a
    byte has two."""
    if not form.is_packed:
        return [(codes, byte)]
    low, high = halves(form, byte)
    wide = codes.astype(jnp.int32)
    return [(_read(form, wide & 15), low), (_read(form, wide >> 4), high)]


def halves(form: MatrixForm, byte: Array) -> tuple[Array, Array]:
    """The inputs whose codes are in the low and in the high bits of bytes."""
    half = form.group // 2
    # No byte is negative, which `//` and `%` would ask.
    low = lax.div(byte, half) * form.group + lax.rem(byte, half)
    return low, low + half


def scaled(form: MatrixForm, number: Array, of_group: list[Callable[[], Array]]) -> Array:
    """The numbers of a matrix in float32, of those that its codes stand for.

    Args:
      form: of the matrix.
      number: of each code.
      of_group: the scales of these numbers, and the zeros and offsets that there are.
    """
    if form.format is None:
        return number
    scale, *more = of_group
    number = number.astype(jnp.float32)
    if form.has_zeros:
        number = number - more.pop(0)()
    elif form.middle:
        number = number - form.middle
    number = number * scale()
    return number - more.pop(0)() if form.has_offsets else number


def group_value(form: MatrixForm, found: Array, is_scale: bool) -> Array:
    """A scale, zero or offset, as it is stored, in float32."""
    if form.has_powers and is_scale:
        # The exponent's bits of a float32; the smallest power is less than these.
        return lax.bitcast_convert_type(found.astype(jnp.int32) << 23, jnp.float32)
    return found.astype(jnp.float32)


def less_zeros(
    form: MatrixForm, codes: Array, zero: Array | None, dtype: Any, interpret: bool
) -> list[Array]:
    """Codes [L, B] of an exact form less their zeros in `dtype`, bfloat16 or float16; twice where a
    byte has two.

    Args:
      form: for which `is_exact` holds.
      codes: as they are stored.
      zero: float32[L, 1]; None for the format's middle.
      dtype: of the result.
      interpret: do without what the interpreter lacks: instructions of PTX.
    """
    if form.is_packed:
        less = form.middle if zero is None else zero
        if interpret:
            wide = codes.astype(jnp.int32)
            codes_of = (wide & 15, wide >> 4)
            return [(each.astype(jnp.float32) - less).astype(dtype) for each in codes_of]
        # What is added, of the size that `nibbles` has made numbers by.
        add = (-less - BASE[jnp.dtype(dtype).name]) * jnp.ones(codes.shape, jnp.float32)
        return [
            _by_ptx(nibbles(jnp.dtype(dtype).name, high), dtype, codes, add.astype(dtype))
            for high in (False, True)
        ]
    if zero is not None:
        return [(codes.astype(jnp.float32) - zero).astype(dtype)]
    if form.format == "int8" and not interpret:
        return [_by_ptx(signed_bytes(jnp.dtype(dtype).name), dtype, codes)]
    return [codes.astype(dtype)]


# A number whose mantissa counts in ones has an integer in its last bits, so that a byte becomes one
# where it is put: by one instruction for two of them, and another that takes the rest away. Compilers
# make four or more of each. Numbers are kept in pairs, and are fewer than 256.

BASE = {"bfloat16": 128, "float16": 1024}
_HIGH_BYTE = {"bfloat16": "0x43434343", "float16": "0x64646464"}
_TYPE = {"bfloat16": "bf16x2", "float16": "f16x2"}
_ONE = {"bfloat16": "0x3F803F80", "float16": "0x3C003C00"}
_FIRST, _SECOND = "0x4140", "0x4342"
"""The bytes that `prmt` puts together: the first or the second two of four, each below a high one."""


def nibbles(dtype: str, high: bool) -> str:
    """PTX that makes four numbers of `dtype`, $0 and $1, of the low or high bits of four bytes, $2;
    plus $3 and $4, and the base of the dtype."""
    low = f"shr.b32 t, $2, 4; and.b32 t, t, {_NIBBLES};" if high else f"and.b32 t, $2, {_NIBBLES};"
    pairs = (
        f"prmt.b32 n, t, {_HIGH_BYTE[dtype]}, {bytes_}; "
        f"fma.rn.{_TYPE[dtype]} ${i}, n, one, ${i + 3};"
        for i, bytes_ in enumerate((_FIRST, _SECOND))
    )
    return " ".join(("{ .reg .b32 t, n, one;", low, f"mov.b32 one, {_ONE[dtype]};", *pairs, "}"))


_NIBBLES = "0x0F0F0F0F"


def signed_bytes(dtype: str) -> str:
    """PTX that makes four numbers of `dtype`, $0 and $1, of four signed bytes, $2."""
    if dtype == "float16":
        middle = "xor.b32 t, $2, 0x80808080; mov.b32 one, 0x3C003C00; mov.b32 less, 0xE480E480;"
        pairs = (
            f"prmt.b32 n, t, 0x64646464, {bytes_}; fma.rn.f16x2 ${i}, n, one, less;"
            for i, bytes_ in enumerate((_FIRST, _SECOND))
        )
        return " ".join(("{ .reg .b32 t, n, one, less;", middle, *pairs, "}"))
    # The sign's bit is the last of the exponent: without it the number is 128 more than seven bits,
    # and alone it is 128 or 256.
    pairs = (
        f"prmt.b32 n, $2, 0x43434343, {bytes_}; and.b32 t, n, 0xFF7FFF7F; "
        f"and.b32 s, n, 0xFF80FF80; fma.rn.bf16x2 ${i}, s, less, t;"
        for i, bytes_ in enumerate((_FIRST, _SECOND))
    )
    return " ".join(("{ .reg .b32 t, n, s, less; mov.b32 less, 0xBF80BF80;", *pairs, "}"))


def e4m3_bytes(dtype: str) -> str:
    """PTX that makes four numbers of `dtype`, $0 and $1, of four of float8_e4m3fn, $2, that are not
    NaN."""
    if dtype == "float16":
        return (
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
            + " ".join(
                f"cvt.rn.f16x2.e4m3x2 ${i}, {half};" for i, half in enumerate(("low", "high"))
            )
            + " }"
        )
    # The exponent's four bits become the last of eight: what is less by 2 ** 120, subnormal numbers
    # included.
    pairs = (
        f"prmt.b32 n, $2, 0, {bytes_}; and.b32 s, n, 0x80008000; shr.b32 n, n, 4; "
        f"and.b32 n, n, 0x07F007F0; or.b32 n, n, s; fma.rn.bf16x2 ${i}, n, more, none;"
        for i, bytes_ in enumerate(("0x1404", "0x3424"))
    )
    start = "{ .reg .b32 n, s, more, none; mov.b32 more, 0x7B807B80; mov.b32 none, 0x80008000;"
    return " ".join((start, *pairs, "}"))


def _by_ptx(code: str, dtype: Any, *arrays: Array) -> Array:
    """Runs PTX of four elements each over arrays of one shape: bytes, and numbers of two bytes."""
    from jax.experimental.pallas import triton as plt

    given = ",".join("r" if a.dtype.itemsize == 1 else "r,r" for a in arrays)
    (found,) = plt.elementwise_inline_asm(
        code,
        args=arrays,
        constraints=f"=r,=r,{given}",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(arrays[0].shape, dtype)],
    )
    return found


def _read(form: MatrixForm, code: Array) -> Array:
    if form.format == "mxfp4":
        return _e2m1(code)
    table = FORMATS[form.format or ""].table
    return _looked_up(code, table, 8) if table else code


def _looked_up(code: Array, table: tuple[float, ...], bit: int) -> Array:
    """The entries of a table of 2 * bit numbers, which registers have no other way to."""
    low, high = (
        part if len(part) == 1 else _looked_up(code, part, bit // 2)
        for part in (table[:bit], table[bit:])
    )
    low, high = (jnp.float32(each[0]) if isinstance(each, tuple) else each for each in (low, high))
    return jnp.where((code & bit) != 0, high, low)


def _e2m1(code: Array) -> Array:
    """The numbers of four bits that MXFP4 has: sign, two bits of exponent, one of mantissa."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    # Twice the magnitude is a whole number.
    twice = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    magnitude = twice.astype(jnp.float32) * 0.5
    return jnp.where(code >= 8, -magnitude, magnitude)
