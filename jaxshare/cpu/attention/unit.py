"""The tiles of the matrix unit in attention, and the rows that they are loaded from.

To give tiles their shapes takes as long as a short segment's products, so that each thread does it
once.
"""

import dataclasses

from jaxshare.cpu.amx import ROW_BYTES, ROWS, TILE_BYTES, MatrixUnit
from jaxshare.cpu.attention.work import FEW, Shape
from jaxshare.cpu.ir import I16, Code, Machine, Val
from jaxshare.cpu.mathematics import by_turns
from jaxshare.cpu.runtime import Call

WIDE = ROW_BYTES // 2
"""Numbers of bfloat16 of a row of a tile, and tokens that are read at once where they are read in
order."""
WHOLE, NARROW = range(6), (6, 7)
"""Tiles of 16 rows of 64 bytes, and of 16 rows of FEW float32 numbers."""
BY_TURNS = [by_turns(range(half, half + ROWS // 2), ROWS) for half in (0, ROWS // 2)]
"""The numbers of two vectors by turns, as two vectors."""
_SECOND_CACHE = 2
_AHEAD_BYTES = 8192
"""How far ahead of what is read memory is fetched: less comes late, more leaves the cache again."""


def write_unit(call: Call) -> tuple[Code, Code]:
    """The functions for `Call.parallel` that give a thread its tiles, and take them away."""
    shapes = [(ROWS, ROW_BYTES)] * len(WHOLE) + [(ROWS, 4 * FEW)] * len(NARROW)
    begin, end = (Code(call.module, call.machine, name, []) for name in ("configure", "release"))
    MatrixUnit(begin).configure(shapes)
    MatrixUnit(end).release()
    begin.give()
    end.give()
    return begin, end


def serves(shape: Shape, machine: Machine) -> bool:
    """Returns whether the matrix unit takes keys as they lie: whole tiles of bfloat16."""
    return shape.uses_tiles(machine) and shape.dim % WIDE == 0 and not shape.codes


def whole(shape: Shape, code: Code, source: Val, count: Val, tokens: int, copy: Val) -> Val:
    """Where the keys or values of so many tokens are, row by row: as they lie, or copied where there
    are fewer, or where a row is no whole number of rows of tiles.

    Tokens after the last are the last: no query sees them.
    """
    line = shape.padded(WIDE) * 2
    is_copied = count < tokens if line == shape.token_bytes else count > 0
    with code.where(is_copied), code.loop(0, tokens) as token:
        row = source + code.min(token, count - 1) * shape.token_bytes
        for d in range(0, shape.dim, WIDE):
            left = shape.dim - d
            taken = None if left >= WIDE else code.constant(left)
            code.store(code.load(row + d * 2, I16, WIDE, taken), copy + token * line + d * 2)
    return code.select(is_copied, copy, source)


def fetch(code: Code, place: Val, lines: int) -> None:
    """Has lines of memory brought to the second cache: a processor that looks ahead by itself stops
    at the end of each page."""
    for line in range(lines):
        code.prefetch(place + line * ROW_BYTES, _SECOND_CACHE)


def store_by_turns(code: Code, even: Val, odd: Val, place: Val) -> None:
    """Stores the numbers of two vectors by turns."""
    for i, order in enumerate(BY_TURNS):
        code.store(even.shuffled(odd, order), place + i * ROW_BYTES)


@dataclasses.dataclass(frozen=True)
class InOrder:
    """Keys or values that are read in order, 32 tokens at once.

    Attributes:
      shape, code: of the kernel.
      start: where they are.
      count: the tokens.
      after: what is read after them.
    """

    shape: Shape
    code: Code
    start: Val
    count: Val
    after: Val

    def whole(self, first: Val, last: Val) -> Val:
        """Where 32 tokens from `first` on are: those after the last token are the last, which is
        there. Where there are such, all are copied to `last`."""
        source = self.start + first * self.shape.token_bytes
        return whole(self.shape, self.code, source, self.count - first, WIDE, last)

    def ahead(self, first: Val) -> Val:
        """Where the 32 tokens are that are to be fetched while those from `first` on are read."""
        code, size = self.code, self.shape.token_bytes
        ahead = first + code.min(self.count, max(_AHEAD_BYTES // size, 1))
        beyond = ahead - self.count
        here = self.start + ahead * size
        return code.select(beyond < 0, here, self.after + beyond * size)

    def fetch(self, ahead: Val, block: int, part: int) -> None:
        """Has as many lines brought to the second cache as one of the tiles has that `load` takes."""
        parts = self.shape.dim // WIDE
        fetch(self.code, ahead + (block * parts + part) * TILE_BYTES, ROWS)

    def load(self, unit: MatrixUnit, tile: int, rows: Val, block: int, part: int) -> None:
        """Loads a tile of 32 tokens that begin at `rows`: 16 of them, and 32 numbers of each."""
        line = self.shape.token_bytes
        unit.load(tile, rows + (block * ROWS * line + part * ROW_BYTES), line)
