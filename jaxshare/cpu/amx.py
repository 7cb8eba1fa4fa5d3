"""Intel's matrix unit: tiles of 16 x 64 bytes, and products of them in one instruction."""

import ctypes
import functools
import platform
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from jaxshare.cpu.ir import I8, I16, VOID, Code, Val

FEATURES = frozenset({"amx-tile", "amx-bf16"})
NUM_TILES, ROWS, ROW_BYTES = 8, 16, 64
TILE_BYTES = ROWS * ROW_BYTES
"""Of a whole tile."""
_WHOLE = ((ROWS, ROW_BYTES),) * NUM_TILES
_REQUEST, _TILE_DATA = 0x1023, 18
_PRCTL = 158


@functools.cache
def allow() -> bool:
    """Asks the system for the matrix unit's registers, which a process has only then."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(_PRCTL, _REQUEST, _TILE_DATA) == 0


class MatrixUnit:
    """The instructions of the unit, for some code that is written. A thread has tiles from
    `configure` to `release`.

    A product takes a tile of `a` [16, 32], row by row, and one of `b` [32, 16] whose pairs of rows
    are side by side: [16, 16 x 2], all bfloat16; it is added to a tile of float32 [16, 16].
    """

    def __init__(self, code: Code):
        self._code = code

    def configure(self, shapes: Sequence[tuple[int, int]] = _WHOLE) -> None:
        """Gives the thread its tiles.

        Args:
          shapes: the rows of each tile, and the bytes of a row; default all.
        """
        code = self._code
        config = code.array(I8, 64)
        for at in range(0, 64, 8):
            code.store(code.constant(1 if at == 0 else 0), config + at)
        for tile, (rows, row_bytes) in enumerate(shapes):
            code.store(code.constant(rows, I8), config + (48 + tile))
            code.store(code.constant(row_bytes, I16), config + (16 + 2 * tile))
        code.external("llvm.x86.ldtilecfg", VOID, config)

    def zero(self, tile: int) -> None:
        self._run("tilezero", tile)

    def load(self, tile: int, place: Val, stride: Any) -> None:
        """Loads a tile whose rows are so many bytes apart."""
        self._run("tileloadd64", tile, place, self._code.constant(stride))

    def store(self, tile: int, place: Val, stride: Any) -> None:
        self._run("tilestored64", tile, place, self._code.constant(stride))

    def multiply(self, total: int, a: int, b: int) -> None:
        """Adds the product of two tiles to a third."""
        self._run("tdpbf16ps", total, _number(self._code, a), _number(self._code, b))

    def release(self) -> None:
        self._code.external("llvm.x86.tilerelease", VOID)

    def _run(self, name: str, tile: int, *values: Val) -> None:
        self._code.external(f"llvm.x86.{name}", VOID, _number(self._code, tile), *values)


def _number(code: Code, tile: int) -> Val:
    return Val(code, ir.Constant(I8, tile))
