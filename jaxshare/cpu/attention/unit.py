"""The tiles of the matrix unit, as a thread has them while it does pieces of attention: to give them
their shapes takes as long as a short segment's products, so that each thread does it once."""

from jaxshare.cpu.amx import ROW_BYTES, ROWS, MatrixUnit
from jaxshare.cpu.attention.work import FEW
from jaxshare.cpu.ir import Code
from jaxshare.cpu.runtime import Call

WHOLE, NARROW = range(6), (6, 7)
"""Tiles of 16 rows of 64 bytes, and of 16 rows of FEW float32 numbers."""

TILE_BYTES = ROWS * ROW_BYTES
"""Of a whole tile."""


def write_unit(call: Call) -> tuple[Code, Code]:
    """The functions for `Call.parallel` that give a thread its tiles, and take them away."""
    shapes = [(ROWS, ROW_BYTES)] * len(WHOLE) + [(ROWS, 4 * FEW)] * len(NARROW)
    begin, end = (Code(call.module, call.machine, name, []) for name in ("configure", "release"))
    MatrixUnit(begin).configure(shapes)
    MatrixUnit(end).release()
    begin.give()
    end.give()
    return begin, end
