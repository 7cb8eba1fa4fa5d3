"""Products of many rows with quantised matrices by the matrix unit.

Numbers are dequantised once for all rows, as tiles of bfloat16 in a core's first cache: scaled, and
rounded to bfloat16 as XLA's product with a dequantised matrix has them. The rest is as in
`jaxshare.cpu.matrices.many_rows`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxshare.cpu.amx import TILE_BYTES, MatrixUnit
from jaxshare.cpu.ir import BF16, BYTES, F32, FORMATS, I64, PTR, VOID, Code, Val, ir
from jaxshare.cpu.matrices.many_rows import (
    DEPTH,
    PIECE,
    ROW_BLOCKS,
    SIDE,
    SUMS,
    TILES_A,
    TILES_B,
    Rows,
    block_groups,
    blocks_of,
    parts_of,
    store_sums,
    write_packed,
)
from jaxshare.cpu.quantised.codes import Codes
from jaxshare.cpu.quantised.lines import INPUTS, Lines
from jaxshare.cpu.quantised.work import MATRIX, WORK, write_work
from jaxshare.cpu.runtime import Call, begin_task

_PARTS = INPUTS // DEPTH
"""Tiles of a line that are dequantised at once."""


def write_many_rows(matrices: Sequence[Codes], dtype: str, result: str, call: Call) -> None:
    """Writes a call with matrices that are quantised in these ways, and results of a dtype."""
    assert FORMATS[dtype] == BF16
    code = call.code
    work, pieces, _ = write_work(call, matrices, code.constant(PIECE), None)
    packed = write_packed(call, work)
    groups = block_groups(WORK.read(code, work, "rows"))
    call.parallel(_write_piece(call, matrices, FORMATS[result]), work, pieces * groups)
    code.external("free", VOID, packed)


def _write_piece(call: Call, matrices: Sequence[Codes], result: ir.Type) -> Code:
    """piece(work, i): some outputs of one of the matrices, for some blocks of rows."""
    functions = {each: _write_outputs(call, each, result) for each in dict.fromkeys(matrices)}
    code = begin_task(call, "piece")
    work, index = code.args
    w = WORK.read_all(code, work)
    groups = block_groups(w.rows)
    at, block = index // groups, index % groups * ROW_BLOCKS
    for i, each in enumerate(matrices):
        place = work + (WORK.bytes + i * MATRIX.bytes)
        start, end = (MATRIX.read(code, place, name) for name in ("start", "end"))
        with code.where((at >= start) & (at < end)):
            code.call(functions[each], work, place, (at - start) * w.piece, block)
    code.give()
    return code


def _write_outputs(call: Call, codes: Codes, result: ir.Type) -> Code:
    """outputs(work, matrix, first, block): results of some blocks of rows at a piece of outputs."""
    name = f"outputs_{codes.name}"
    code = Code(call.module, call.machine, name, [PTR, PTR, I64, I64])
    work, place, first, block = code.args
    w, matrix = WORK.read_all(code, work), MATRIX.read_all(code, place)
    rows = Rows(w.packed, w.rows, lambda row: matrix.y + row * matrix.out * BYTES[result])
    number = code.min(matrix.out - first, w.piece)
    strips = Strips(code, codes, w.width, result)
    stop = code.min(block + ROW_BLOCKS, blocks_of(w.rows))
    strips.write(matrix, (first, number), rows, (block, stop))
    strips.unit.release()
    code.give()
    return code


class Strips:
    """The code of products of tiles with a quantised matrix; see `TileProduct`, whose place it takes.

    Twice 16 lines of a matrix are dequantised some tiles at a time; the sums of all blocks of rows
    are in memory meanwhile.

    Attributes:
      unit: which it has configured.
    """

    def __init__(
        self, code: Code, codes: Codes, width: Val, result: ir.Type, *, same_order: bool = False
    ):
        self._same_order = same_order
        self._code, self._width, self._result = code, width, result
        self._lines = Lines(code, codes, TILE_BYTES)
        self._tiles = code.array(BF16, 2 * _PARTS * TILE_BYTES // 2)
        self._sums = code.array(F32, ROW_BLOCKS * 2 * TILE_BYTES // 4)
        # What is not written after the last numbers of a line is multiplied with zeros.
        self._clear(self._tiles, 2 * _PARTS)
        self.unit = MatrixUnit(code)
        self.unit.configure()

    def write(
        self, matrix: Any, outputs: tuple[Val, Val], rows: Rows, blocks: tuple[Val, Val]
    ) -> None:
        """Writes the results of some blocks of rows at some outputs; see `TileProduct.write`."""
        code, (first, number), (start, stop) = self._code, outputs, blocks
        single = blocks_of(rows.count).equals(0 if self._same_order else 1)
        parts = parts_of(self._width)
        packed = rows.packed + start * parts * TILE_BYTES
        count = code.select(
            single, code.constant(2), stop - start
        )  # a single one has twice the sums
        with code.loop(0, number, 2 * SIDE) as at:
            two = [code.min(first + at + i * SIDE, matrix.out - SIDE) for i in range(2)]
            self._clear(self._sums, (count + 1) // 2 * SUMS)
            with code.loop(0, parts, _PARTS) as part:
                taken = code.min(parts - part, _PARTS)
                for i, output in enumerate(two):
                    self._dequantise(matrix, output, part, self._tiles + i * _PARTS * TILE_BYTES)
                place = packed + part * TILE_BYTES
                with code.loop(0, code.as_int(single)):
                    self._multiply_one(place, taken)
                with code.loop(0, code.select(single, 0, count), 2) as block:
                    others = [block, code.min(block + 1, count - 1)]
                    places = [place + each * parts * TILE_BYTES for each in others]
                    self._multiply_four(places, self._sums + block * 2 * TILE_BYTES, taken)
            for i, output in enumerate(two):
                tiles = [self._sums + (t + i) * TILE_BYTES for t in (0, 2)]
                with code.where(single):
                    store_sums(code, tiles, self._result, rows, output, start)
                with code.loop(0, code.select(single, 0, count)) as block:
                    tile = tiles[0] + block * 2 * TILE_BYTES
                    store_sums(code, [tile], self._result, rows, output, start + block)

    def _clear(self, place: Val, tiles: Any) -> None:
        with self._code.loop(0, self._code.constant(tiles) * (TILE_BYTES // 64)) as i:
            self._code.store(self._code.zeros(16), place + i * 64)

    def _multiply_four(self, blocks: Sequence[Val], sums: Val, count: Val) -> None:
        """Adds products with two blocks of rows to four sums: of block 0 at each 16 outputs, and of
        block 1."""
        unit = self.unit

        def multiply(part: Val) -> None:
            for b, place in enumerate(blocks):
                unit.load(TILES_B[b], place + part * TILE_BYTES, 64)
            for a in range(2):
                unit.load(TILES_A[a], self._tiles + (part + a * _PARTS) * TILE_BYTES, 64)
                for b in range(2):
                    unit.multiply(2 * b + a, TILES_A[a], TILES_B[b])

        self._with_sums(sums, lambda: self._for_parts(count, 1, multiply))

    def _multiply_one(self, block: Val, count: Val) -> None:
        """Adds products with a block of rows to two sums at each 16 outputs, which take turns."""
        unit = self.unit

        def multiply(part: Val, turn: int = 0) -> None:
            unit.load(TILES_B[turn], block + part * TILE_BYTES, 64)
            for a in range(2):
                unit.load(TILES_A[a], self._tiles + (part + a * _PARTS) * TILE_BYTES, 64)
                unit.multiply(2 * turn + a, TILES_A[a], TILES_B[turn])

        def in_turn() -> None:
            code = self._code
            with code.loop(0, count // 2) as i:
                for turn in range(2):
                    multiply(i * 2 + turn, turn)
            with code.loop(count // 2 * 2, count) as part:
                multiply(part)

        self._with_sums(self._sums, in_turn)

    def _for_parts(self, count: Val, step: int, body: Callable[[Val], None]) -> None:
        with self._code.loop(0, count, step) as part:
            body(part)

    def _with_sums(self, place: Val, body: Callable[[], None]) -> None:
        for total in range(SUMS):
            self.unit.load(total, place + total * TILE_BYTES, 64)
        body()
        for total in range(SUMS):
            self.unit.store(total, place + total * TILE_BYTES, 64)

    def _dequantise(self, matrix: Any, output: Val, part: Val, tiles: Val) -> None:
        """Writes tiles of 16 lines, from one of their parts on."""
        code = self._code
        inputs = code.min(self._width - part * DEPTH, INPUTS)
        first = part * DEPTH
        ahead = matrix.line * (2 * SIDE)  # to the lines that come next
        with code.loop(0, SIDE) as i:
            self._lines.write(matrix, output + i, (first, inputs), tiles + i * 64, ahead)
