"""Products of many rows with bfloat16 matrices by the matrix unit.

A tile of a matrix is loaded as it lies, 16 of its lines; the rows are written once in the order that
the unit takes. So what is computed is [out, R], and transposed as it is stored.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxshare.cpu.amx import MatrixUnit
from jaxshare.cpu.ir import BF16, BYTES, F32, FORMATS, I32, PTR, VOID, Code, Val, ir
from jaxshare.cpu.mathematics import folded, transposed
from jaxshare.cpu.matrices.work import WORK, for_matrix_of, write_work
from jaxshare.cpu.runtime import Call, begin_task

SIDE = 16
"""Rows of a tile, and numbers of one of its rows of float32."""
_DEPTH = 32
"""Numbers of one of its rows of bfloat16."""
_BYTES = 1024
_PIECE = 4 * SIDE
"""Outputs of a piece of work."""
_ROW_BLOCKS = 16
"""Blocks of rows that a piece of work takes: what fits into a core's cache beside the matrix."""
# Tiles of the unit: the first four are sums.
_SUMS, _A, _B = 4, (4, 5), (6, 7)


def write_many_rows(count: int, dtype: str, result: str, call: Call) -> None:
    """Writes a call with so many matrices, and results of a dtype."""
    assert FORMATS[dtype] == BF16
    code = call.code
    work, pieces = write_work(call, count, code.constant(_PIECE))
    w = WORK.read_all(code, work)
    blocks = _blocks(w.rows)
    packed = code.external("aligned_alloc", PTR, 64, blocks * _parts(w.width) * _BYTES)
    WORK.write(code, work, packed=packed)
    call.parallel(_write_packing(call), work, blocks)
    groups = (blocks + (_ROW_BLOCKS - 1)) // _ROW_BLOCKS
    call.parallel(_write_piece(call, count, FORMATS[result]), work, pieces * groups)
    code.external("free", VOID, packed)


def _blocks(rows: Val) -> Val:
    return (rows + (SIDE - 1)) // SIDE


def _parts(width: Val) -> Val:
    return (width + (_DEPTH - 1)) // _DEPTH


def _write_packing(call: Call) -> Code:
    """packing(work, i): writes a block of rows as tiles [in / 32], in each of which the pairs of
    numbers of 16 rows are side by side. Rows after the last are copies of it."""
    code = begin_task(call, "packing")
    work, block = code.args
    w = WORK.read_all(code, work)
    lines = ir.VectorType(I32, SIDE)
    rows = [w.x + code.min(block * SIDE + i, w.rows - 1) * w.width * 2 for i in range(SIDE)]
    whole, parts = w.width // _DEPTH, _parts(w.width)

    def pack(part: Val, taken: Val | None) -> None:
        loaded = [code.load(row + part * (_DEPTH * 2), BF16, _DEPTH, taken) for row in rows]
        place = w.packed + (block * parts + part) * _BYTES
        for i, line in enumerate(transposed([each.bitcast(lines) for each in loaded])):
            code.store(line, place + i * 64)

    with code.loop(0, whole) as part:
        pack(part, None)
    with code.where(whole < parts):
        pack(whole, w.width - whole * _DEPTH)
    code.give()
    return code


def _write_piece(call: Call, count: int, result: ir.Type) -> Code:
    """piece(work, i): some outputs of one of the matrices, for some blocks of rows."""
    code = begin_task(call, "piece")
    work, index = code.args
    w = WORK.read_all(code, work)
    blocks = _blocks(w.rows)
    groups = (blocks + (_ROW_BLOCKS - 1)) // _ROW_BLOCKS
    start = index % groups * _ROW_BLOCKS
    stop = code.min(start + _ROW_BLOCKS, blocks)
    product = _Product(code, w, result)
    for matrix, first, number in for_matrix_of(code, work, count, index // groups):
        with code.loop(0, code.select(blocks.equals(1), number, 0), SIDE) as at:
            product.write_one(matrix, first + at)
        pairs = code.loop(0, code.select(blocks > 1, number, 0), 2 * SIDE)
        with pairs as at, code.loop(start, stop, 2) as block:
            outputs = [first + at + i * SIDE for i in range(2)]
            product.write_four(matrix, outputs, [block, code.min(block + 1, stop - 1)])
    product.unit.release()
    code.give()
    return code


class _Product:
    """The code of products of tiles.

    Attributes:
      unit: which it has configured.
    """

    def __init__(self, code: Code, w: Any, result: ir.Type):
        self._code, self._w, self._result = code, w, result
        self._rest = code.array(BF16, _BYTES // 2)  # of the lines of a matrix
        self._sums = code.array(F32, _SUMS * _BYTES // 4)
        for at in range(0, _BYTES, 64):
            code.store(code.zeros(SIDE), self._rest + at)
        self.unit = MatrixUnit(code)

    def write_one(self, matrix: Any, output: Val) -> None:
        """Writes the results of the only block of rows at 16 outputs that begin here, or earlier where
        the matrix ends before; these are computed twice.

        Four sums take turns, so that none waits for itself, and the lines of the matrix are read in
        long runs.
        """
        code, unit, w = self._code, self.unit, self._w
        output = code.min(output, matrix.out - SIDE)
        line = matrix.kernel + output * w.width * 2
        whole, parts = w.width // _DEPTH, _parts(w.width)
        for total in range(_SUMS):
            unit.zero(total)

        def multiply(total: int, part: Val, load: Callable[[int, Val], None]) -> None:
            tile = total % 2
            unit.load(_B[tile], w.packed + part * _BYTES, 64)
            load(_A[tile], line + part * 64)
            unit.multiply(total, _A[tile], _B[tile])

        in_turn = whole // _SUMS * _SUMS
        with code.loop(0, in_turn, _SUMS) as part:
            for i in range(_SUMS):
                multiply(i, part + i, self._load_and_prefetch)
        with code.loop(in_turn, whole) as part:
            multiply(0, part, self._load_and_prefetch)
        with code.where(whole < parts):
            multiply(1, whole, self._load_rest)
        self._store([*range(_SUMS)], matrix, output, code.constant(0))

    def _load_and_prefetch(self, tile: int, line: Val, ahead: int = SIDE) -> None:
        """Loads 16 lines of a matrix, while those that come next are brought to the second cache."""
        code, stride = self._code, self._w.width * 2
        self.unit.load(tile, line, stride)
        for i in range(SIDE):
            code.prefetch(line + stride * (i + ahead), 2)

    def write_four(self, matrix: Any, outputs: Sequence[Val], blocks: Sequence[Val]) -> None:
        """Writes the results of two blocks of rows at twice 16 outputs; see `write_one`."""
        code, unit, w = self._code, self.unit, self._w
        outputs = [code.min(output, matrix.out - SIDE) for output in outputs]
        lines = [matrix.kernel + output * w.width * 2 for output in outputs]
        whole, parts = w.width // _DEPTH, _parts(w.width)
        packed = [w.packed + block * parts * _BYTES for block in blocks]

        def multiply(part: Val, load: Callable[[int, Val], None]) -> None:
            for b, place in enumerate(packed):
                unit.load(_B[b], place + part * _BYTES, 64)
            for a, line in enumerate(lines):
                load(_A[a], line + part * 64)
                for b in range(len(packed)):
                    unit.multiply(a * len(packed) + b, _A[a], _B[b])

        for total in range(_SUMS):
            unit.zero(total)
        with code.loop(0, whole) as part:
            multiply(part, lambda tile, line: self._load_and_prefetch(tile, line, 2 * SIDE))
        with code.where(whole < parts):
            multiply(whole, self._load_rest)
        for a, output in enumerate(outputs):
            for b, block in enumerate(blocks):
                self._store([a * len(blocks) + b], matrix, output, block)

    def _load_rest(self, tile: int, line: Val) -> None:
        """Loads what is left of 16 lines of a matrix after the last whole tile."""
        code, width = self._code, self._w.width
        with code.loop(0, SIDE) as i:
            left = code.load(line + i * width * 2, BF16, _DEPTH, width % _DEPTH)
            code.store(left, self._rest + i * 64)
        self.unit.load(tile, self._rest, 64)

    def _store(self, tiles: Sequence[int], matrix: Any, output: Val, block: Val) -> None:
        """Stores the sum of tiles [16 outputs, 16 rows] as results [R, out]."""
        code, rows = self._code, self._w.rows
        for i, tile in enumerate(tiles):
            self.unit.store(tile, self._sums + i * _BYTES, 64)
        lines = [
            folded(
                [
                    code.load(self._sums + (t * _BYTES + i * 64), F32, SIDE)
                    for t in range(len(tiles))
                ],
                lambda a, b: a + b,
            )
            for i in range(SIDE)
        ]
        for i, line in enumerate(transposed(lines)):
            row = block * SIDE + i
            with code.where(row < rows):
                place = matrix.y + (row * matrix.out + output) * BYTES[self._result]
                code.store(code.narrowed(line, self._result), place)
