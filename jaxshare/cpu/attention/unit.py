"""The tiles of the matrix unit in attention, and the rows that they are loaded from.

To give tiles their shapes takes as long as a short segment's products, so that each thread does it
once.
"""

from jaxshare.cpu.amx import ROW_BYTES, ROWS, MatrixUnit
from jaxshare.cpu.attention.work import FEW, Shape
from jaxshare.cpu.ir import I16, Code, Val
from jaxshare.cpu.runtime import Call

WHOLE, NARROW = range(6), (6, 7)
"""Tiles of 16 rows of 64 bytes, and of 16 rows of FEW float32 numbers."""

_SECOND_CACHE = 2


def write_unit(call: Call) -> tuple[Code, Code]:
    """The functions for `Call.parallel` that give a thread its tiles, and take them away."""
    shapes = [(ROWS, ROW_BYTES)] * len(WHOLE) + [(ROWS, 4 * FEW)] * len(NARROW)
    begin, end = (Code(call.module, call.machine, name, []) for name in ("configure", "release"))
    MatrixUnit(begin).configure(shapes)
    MatrixUnit(end).release()
    begin.give()
    end.give()
    return begin, end


def whole(shape: Shape, code: Code, source: Val, count: Val, tokens: int, copy: Val) -> Val:
    """Where the keys or values of so many tokens are, row by row: as they lie, or copied where there
    are fewer, or where a row is no whole number of rows of tiles.

    Tokens after the last are the last: no query sees them.
    """
    lanes = ROW_BYTES // 2
    line = shape.padded(lanes) * 2
    is_copied = count < tokens if line == shape.token_bytes else count > 0
    with code.where(is_copied), code.loop(0, tokens) as token:
        row = source + code.min(token, count - 1) * shape.token_bytes
        for d in range(0, shape.dim, lanes):
            left = shape.dim - d
            taken = None if left >= lanes else code.constant(left)
            code.store(code.load(row + d * 2, I16, lanes, taken), copy + token * line + d * 2)
    return code.select(is_copied, copy, source)


def fetch(code: Code, place: Val, lines: int) -> None:
    """Has lines of memory brought to the second cache: a processor that looks ahead by itself stops
    at the end of each page."""
    for line in range(lines):
        code.prefetch(place + line * ROW_BYTES, _SECOND_CACHE)
