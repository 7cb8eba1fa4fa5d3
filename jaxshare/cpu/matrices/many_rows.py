"""Products of many rows with bfloat16 matrices by the matrix unit.

A tile of a matrix is loaded as it lies, 16 of its lines; the rows are written once in the order that
the unit takes. So what is computed is [out, R], and transposed as it is stored.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxshare.cpu.amx import TILE_BYTES, MatrixUnit
from jaxshare.cpu.ir import BF16, BYTES, F32, FORMATS, I32, PTR, VOID, Code, Val, ir
from jaxshare.cpu.mathematics import folded, transposed
from jaxshare.cpu.matrices.work import WORK, for_matrix_of, write_work
from jaxshare.cpu.runtime import Call, begin_task

SIDE = 16
"""Rows of a tile, and numbers of one of its rows of float32."""
DEPTH = 32
"""Numbers of one of its rows of bfloat16."""
PIECE = 4 * SIDE
"""Outputs of a piece of work."""
ROW_BLOCKS = 16
"""Blocks of rows that a piece of work takes: what fits into a core's cache beside the matrix."""
# Tiles of the unit: the first four are sums.
SUMS, TILES_A, TILES_B = 4, (4, 5), (6, 7)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows as tiles, and where their results go.

    Attributes:
      packed: the tiles of the first block of rows.
      count: the rows.
      place: where the results of a row begin.
    """

    packed: Val
    count: Val
    place: Callable[[Val], Val]


def write_many_rows(count: int, dtype: str, result: str, call: Call) -> None:
    """Writes a call with so many matrices, and results of a dtype."""
    assert FORMATS[dtype] == BF16
    code = call.code
    work, pieces = write_work(call, count, code.constant(PIECE))
    packed = write_packed(call, work)
    groups = block_groups(WORK.read(code, work, "rows"))
    call.parallel(_write_piece(call, count, FORMATS[result]), work, pieces * groups)
    code.external("free", VOID, packed)


def blocks_of(rows: Val) -> Val:
    """The blocks that so many rows are in."""
    return (rows + (SIDE - 1)) // SIDE


def block_groups(rows: Val) -> Val:
    """The pieces of work that the blocks of so many rows are cut into."""
    return (blocks_of(rows) + (ROW_BLOCKS - 1)) // ROW_BLOCKS


def parts_of(width: Val) -> Val:
    """The tiles of a line."""
    return (width + (DEPTH - 1)) // DEPTH


def write_packed(call: Call, work: Val) -> Val:
    """Writes the rows of a call as tiles, to memory that is to be freed."""
    code = call.code
    w = WORK.read_all(code, work)
    blocks = blocks_of(w.rows)
    packed = code.external("aligned_alloc", PTR, 64, blocks * parts_of(w.width) * TILE_BYTES)
    WORK.write(code, work, packed=packed)
    call.parallel(_write_packing(call), work, blocks)
    return packed


def _write_packing(call: Call) -> Code:
    """packing(work, i): writes a block of rows. Those after the last are copies of it."""
    code = begin_task(call, "packing")
    work, block = code.args
    w = WORK.read_all(code, work)
    rows = [w.x + code.min(block * SIDE + i, w.rows - 1) * w.width * 2 for i in range(SIDE)]
    pack_block(code, rows, w.packed + block * parts_of(w.width) * TILE_BYTES, w.width)
    code.give()
    return code


def pack_block(code: Code, rows: Sequence[Val], place: Val, width: Val) -> None:
    """Writes 16 rows as tiles [in / 32], in each of which the pairs of numbers of all rows are side
    by side."""
    lines = ir.VectorType(I32, SIDE)
    whole, parts = width // DEPTH, parts_of(width)

    def pack(part: Val, taken: Val | None) -> None:
        loaded = [code.load(row + part * (DEPTH * 2), BF16, DEPTH, taken) for row in rows]
        for i, line in enumerate(transposed([each.bitcast(lines) for each in loaded])):
            code.store(line, place + part * TILE_BYTES + i * 64)

    with code.loop(0, whole) as part:
        pack(part, None)
    with code.where(whole < parts):
        pack(whole, width - whole * DEPTH)


def _write_piece(call: Call, count: int, result: ir.Type) -> Code:
    """piece(work, i): some outputs of one of the matrices, for some blocks of rows."""
    code = begin_task(call, "piece")
    work, index = code.args
    w = WORK.read_all(code, work)
    groups = block_groups(w.rows)
    start = index % groups * ROW_BLOCKS
    stop = code.min(start + ROW_BLOCKS, blocks_of(w.rows))
    product = TileProduct(code, w.width, result)
    for matrix, first, number in for_matrix_of(code, work, count, index // groups):

        def place(row: Val, matrix: Any = matrix) -> Val:
            return matrix.y + row * matrix.out * BYTES[result]

        product.write(matrix, (first, number), Rows(w.packed, w.rows, place), (start, stop))
    product.unit.release()
    code.give()
    return code


class TileProduct:
    """The code of products of tiles.

    Args:
      same_order: that of all sums is the same, however many rows there are.

    Attributes:
      unit: which it has configured.
    """

    def __init__(self, code: Code, width: Val, result: ir.Type, *, same_order: bool = False):
        self._code, self._width, self._result = code, width, result
        self._same_order = same_order
        self._rest = code.array(BF16, TILE_BYTES // 2)  # of the lines of a matrix
        self._sums = code.array(F32, SUMS * TILE_BYTES // 4)
        for at in range(0, TILE_BYTES, 64):
            code.store(code.zeros(SIDE), self._rest + at)
        self.unit = MatrixUnit(code)
        self.unit.configure()

    def write(
        self, matrix: Any, outputs: tuple[Val, Val], rows: Rows, blocks: tuple[Val, Val]
    ) -> None:
        """Writes the results of some blocks of rows at some outputs.

        Args:
          matrix: has `out`, and the numbers as `kernel`.
          outputs: the first, and how many.
          rows: all there are.
          blocks: the first, and the one after the last.
        """
        code, (first, number), (start, stop) = self._code, outputs, blocks
        single = self._is_single(rows)
        with code.loop(0, code.select(single, number, 0), SIDE) as at:
            self._write_one(matrix, first + at, rows)
        pairs = code.loop(0, code.select(single, 0, number), 2 * SIDE)
        with pairs as at, code.loop(start, stop, 2) as block:
            two = [first + at + i * SIDE for i in range(2)]
            self._write_four(matrix, two, rows, [block, code.min(block + 1, stop - 1)])

    def _is_single(self, rows: Rows) -> Val:
        """True if one block of rows is all there is, whose sums may then have an order of their own."""
        return blocks_of(rows.count).equals(0 if self._same_order else 1)

    def _write_one(self, matrix: Any, output: Val, rows: Rows) -> None:
        """Writes the results of the only block of rows at 16 outputs that begin here, or earlier where
        the matrix ends before; these are computed twice.

        Four sums take turns, so that none waits for itself, and the lines of the matrix are read in
        long runs.
        """
        code, unit, width = self._code, self.unit, self._width
        output = code.min(output, matrix.out - SIDE)
        line = matrix.kernel + output * width * 2
        whole, parts = width // DEPTH, parts_of(width)
        for total in range(SUMS):
            unit.zero(total)

        def multiply(total: int, part: Val, load: Callable[[int, Val], None]) -> None:
            tile = total % 2
            unit.load(TILES_B[tile], rows.packed + part * TILE_BYTES, 64)
            load(TILES_A[tile], line + part * 64)
            unit.multiply(total, TILES_A[tile], TILES_B[tile])

        in_turn = whole // SUMS * SUMS
        with code.loop(0, in_turn, SUMS) as part:
            for i in range(SUMS):
                multiply(i, part + i, self._load_and_prefetch)
        with code.loop(in_turn, whole) as part:
            multiply(0, part, self._load_and_prefetch)
        with code.where(whole < parts):
            multiply(1, whole, self._load_rest)
        self._store([*range(SUMS)], rows, output, code.constant(0))

    def _load_and_prefetch(self, tile: int, line: Val, ahead: int = SIDE) -> None:
        """Loads 16 lines of a matrix, while those that come next are brought to the second cache."""
        code, stride = self._code, self._width * 2
        self.unit.load(tile, line, stride)
        for i in range(SIDE):
            code.prefetch(line + stride * (i + ahead), 2)

    def _write_four(
        self, matrix: Any, outputs: Sequence[Val], rows: Rows, blocks: Sequence[Val]
    ) -> None:
        """Writes the results of two blocks of rows at twice 16 outputs; see `_write_one`."""
        code, unit, width = self._code, self.unit, self._width
        outputs = [code.min(output, matrix.out - SIDE) for output in outputs]
        lines = [matrix.kernel + output * width * 2 for output in outputs]
        whole, parts = width // DEPTH, parts_of(width)
        packed = [rows.packed + block * parts * TILE_BYTES for block in blocks]

        def multiply(part: Val, load: Callable[[int, Val], None]) -> None:
            for b, place in enumerate(packed):
                unit.load(TILES_B[b], place + part * TILE_BYTES, 64)
            for a, line in enumerate(lines):
                load(TILES_A[a], line + part * 64)
                for b in range(len(packed)):
                    unit.multiply(a * len(packed) + b, TILES_A[a], TILES_B[b])

        for total in range(SUMS):
            unit.zero(total)
        with code.loop(0, whole) as part:
            multiply(part, lambda tile, line: self._load_and_prefetch(tile, line, 2 * SIDE))
        with code.where(whole < parts):
            multiply(whole, self._load_rest)
        for a, output in enumerate(outputs):
            for b, block in enumerate(blocks):
                self._store([a * len(blocks) + b], rows, output, block)

    def _load_rest(self, tile: int, line: Val) -> None:
        """Loads what is left of 16 lines of a matrix after the last whole tile."""
        code, width = self._code, self._width
        with code.loop(0, SIDE) as i:
            left = code.load(line + i * width * 2, BF16, DEPTH, width % DEPTH)
            code.store(left, self._rest + i * 64)
        self.unit.load(tile, self._rest, 64)

    def _store(self, tiles: Sequence[int], rows: Rows, output: Val, block: Val) -> None:
        """Stores the sum of tiles [16 outputs, 16 rows] as results of rows."""
        for i, tile in enumerate(tiles):
            self.unit.store(tile, self._sums + i * TILE_BYTES, 64)
        places = [self._sums + i * TILE_BYTES for i in range(len(tiles))]
        store_sums(self._code, places, self._result, rows, output, block)


def store_sums(
    code: Code, tiles: Sequence[Val], result: ir.Type, rows: Rows, output: Val, block: Val
) -> None:
    """Stores the sum of tiles [16 outputs, 16 rows] in memory as results of rows."""
    lines = [
        folded([code.load(tile + i * 64, F32, SIDE) for tile in tiles], lambda a, b: a + b)
        for i in range(SIDE)
    ]
    for i, line in enumerate(transposed(lines)):
        row = block * SIDE + i
        with code.where(row < rows.count):
            place = rows.place(row) + output * BYTES[result]
            code.store(code.narrowed(line, result), place)
