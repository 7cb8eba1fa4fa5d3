"""Blocks of quantised numbers, as GGUF files have them, as quantised tensors.

Source: ggml-common.h and ggml-quants.c of llama.cpp, and gguf.quants, which computes the same.

Axis letters: L blocks, B bytes, G groups of a block, C bytes of a block's codes.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped, UInt8

from jaxshare.quantised import QuantisedTensor, packed_codes

_AT_ONCE = 2**20
"""Bytes of blocks that are taken apart at once, so that what is computed on the way stays small."""


class _Parts(NamedTuple):
    """The contents of blocks, in the words of `QuantisedTensor`."""

    codes: Shaped[np.ndarray, "L C"]
    scales: Float[np.ndarray, "L G"]
    offsets: Float[np.ndarray, "L G"] | None = None


@dataclasses.dataclass(frozen=True)
class BlockKind:
    """A kind of blocks.

    Attributes:
      size: bytes of a block.
      numbers: of a block.
      format: of the codes (`jaxshare.quantised.FORMATS`).
      read: takes blocks [L, size] apart.
      has_zeros: codes begin at zero, though the format's middle is another.
    """

    size: int
    numbers: int
    format: str
    read: Callable[[UInt8[np.ndarray, "L B"]], _Parts]
    has_zeros: bool = False


def quantised_blocks(
    kind: str, blocks: UInt8[np.ndarray, "*_ O B"], dtype: np.dtype
) -> QuantisedTensor:
    """Returns the rows of blocks as a tensor with the same numbers, computed in float32 as llama.cpp
    does.

    Args:
      kind: a name in `BLOCK_KINDS`.
      blocks: the bytes of each row.
      dtype: of the tensor.
    """
    form, rows = BLOCK_KINDS[kind], blocks.shape[:-1]
    flat = blocks.reshape(-1, form.size)
    many = max(1, _AT_ONCE // form.size)
    wholes: list[np.ndarray | None] = []
    for start in range(0, len(flat), many):
        parts = _without_zero_scales(form, form.read(flat[start : start + many]))
        if not wholes:
            wholes = [
                None if one is None else np.empty((len(flat), *one.shape[1:]), one.dtype)
                for one in parts
            ]
        for whole, one in zip(wholes, parts, strict=True):
            if whole is not None:
                whole[start : start + many] = one
    codes, scales, offsets = (one if one is None else one.reshape(*rows, -1) for one in wholes)
    assert codes is not None and scales is not None
    zeros = np.zeros(scales.shape, np.int8) if form.has_zeros else None
    return QuantisedTensor(codes, scales, zeros, offsets, format=form.format, dtype=dtype)


def _without_zero_scales(form: BlockKind, parts: _Parts) -> _Parts:
    """Groups whose scale is zero, as those of rows that were never trained, with a scale of one and
    the codes of zero: a scale of zero is a sign of damage elsewhere."""
    none = parts.scales == 0
    if none.any():
        codes, scales = parts.codes.copy(), parts.scales.copy()
        scales[none] = 1
        zero = 0x88 if form.format == "int4" and not form.has_zeros else 0
        codes.reshape(*scales.shape, -1)[none] = zero
        return parts._replace(codes=codes, scales=scales)
    return parts


def _halves(blocks: UInt8[np.ndarray, "L _"], start: int) -> Float[np.ndarray, "L 1"]:
    """The float16 at a byte of each block."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)


def _nibbles(values: UInt8[np.ndarray, "L B"], width: int) -> UInt8[np.ndarray, "L _"]:
    """The low bits of each `width` bytes, and then their high bits."""
    runs = values.reshape(len(values), values.shape[1] // width, 1, width)
    both = runs >> np.asarray([0, 4], np.uint8)[:, None] & np.uint8(15)
    return both.reshape(len(values), -1)


def _bits(values: UInt8[np.ndarray, "L 4"]) -> UInt8[np.ndarray, "L 32"]:
    return np.unpackbits(values, axis=1, bitorder="little")


def _q4_0(blocks: np.ndarray) -> _Parts:
    return _Parts(blocks[:, 2:], _halves(blocks, 0))


def _q4_1(blocks: np.ndarray) -> _Parts:
    return _Parts(blocks[:, 4:], _halves(blocks, 0), -_halves(blocks, 2))


def _q5_0(blocks: np.ndarray) -> _Parts:
    codes = _nibbles(blocks[:, 6:], 16) | _bits(blocks[:, 2:6]) << 4
    return _Parts(codes.astype(np.int8) - np.int8(16), _halves(blocks, 0))


def _q5_1(blocks: np.ndarray) -> _Parts:
    codes = _nibbles(blocks[:, 8:], 16) | _bits(blocks[:, 4:8]) << 4
    return _Parts(codes.astype(np.int8), _halves(blocks, 0), -_halves(blocks, 2))


def _q8_0(blocks: np.ndarray) -> _Parts:
    return _Parts(blocks[:, 2:].view(np.int8), _halves(blocks, 0))


def _scales_of_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scales and offsets of the eight groups of blocks that begin with d, dmin and twelve bytes
    of six-bit numbers: four of the first kind, four of the second, and the rest of both."""
    d, dmin = (_halves(blocks, start).astype(np.float32) for start in (0, 2))
    first, second, rest = (blocks[:, start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], axis=1)
    least = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], axis=1)
    return d * scales.astype(np.float32), dmin * least.astype(np.float32)


def _q4_k(blocks: np.ndarray) -> _Parts:
    codes = _nibbles(blocks[:, 16:], 32)
    return _Parts(packed_codes(codes, 32), *_scales_of_k(blocks))


def _q5_k(blocks: np.ndarray) -> _Parts:
    # Bit g of byte i is the highest of number i of group g.
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    codes = _nibbles(blocks[:, 48:], 32) | high.reshape(len(blocks), -1) << 4
    return _Parts(codes.astype(np.int8), *_scales_of_k(blocks))


def _q6_k(blocks: np.ndarray) -> _Parts:
    low = _nibbles(blocks[:, :128], 64)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = pairs >> np.asarray([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)
    codes = low | high.reshape(len(blocks), -1) << 4
    d, scales = _halves(blocks, 208).astype(np.float32), blocks[:, 192:208].view(np.int8)
    return _Parts(codes.astype(np.int8) - np.int8(32), d * scales.astype(np.float32))


def _mxfp4(blocks: np.ndarray) -> _Parts:
    return _Parts(blocks[:, 1:], blocks[:, :1].view(ml_dtypes.float8_e8m0fnu))


BLOCK_KINDS = {
    "Q4_0": BlockKind(18, 32, "int4", _q4_0),
    "Q4_1": BlockKind(20, 32, "int4", _q4_1, has_zeros=True),
    "Q5_0": BlockKind(22, 32, "int8", _q5_0),
    "Q5_1": BlockKind(24, 32, "int8", _q5_1),
    "Q8_0": BlockKind(34, 32, "int8", _q8_0),
    "Q4_K": BlockKind(144, 256, "int4", _q4_k, has_zeros=True),
    "Q5_K": BlockKind(176, 256, "int8", _q5_k),
    "Q6_K": BlockKind(210, 256, "int8", _q6_k),
    "MXFP4": BlockKind(17, 32, "mxfp4", _mxfp4),
}
"""The kinds of blocks that are read, by the names that llama.cpp has for them."""
