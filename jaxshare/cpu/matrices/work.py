"""The pieces of work of a call: outputs of several matrices."""

from collections.abc import Iterator
from typing import Any

from jaxshare.cpu.ir import I64, Code, Record, Val
from jaxshare.cpu.runtime import Call

WORK = Record(("rows", "width", "piece"), ("x", "packed", "order"))
"""What all pieces of work share: R, in, the outputs of a piece, the rows, and where a kernel has them
a copy of the rows as tiles, and the order in which it takes them (`row_order`). The matrices follow."""
MATRIX = Record(("out", "start", "end"), ("kernel", "y"))
"""A matrix: its outputs, its pieces of work from start to end, its numbers and its results."""


def write_work(call: Call, count: int, piece: Val) -> tuple[Val, Val]:
    """Cuts the outputs of a call's matrices, its arguments 1 to `count`, into pieces.

    Returns:
      The work, and the number of pieces.
    """
    code = call.code
    work = code.array(I64, (WORK.bytes + count * MATRIX.bytes) // 8)
    x, rows, width = call.argument(0), call.size(0, 0), call.size(0, 1)
    WORK.write(code, work, rows=rows, width=width, piece=piece, x=x)
    start = code.constant(0)
    for i in range(count):
        out = call.size(1 + i, 0)
        end = start + (out + piece - 1) // piece
        place = work + (WORK.bytes + i * MATRIX.bytes)
        kernel, y = call.argument(1 + i), call.result(i)
        MATRIX.write(code, place, out=out, start=start, end=end, kernel=kernel, y=y)
        start = end
    return work, start


def for_matrix_of(code: Code, work: Val, count: int, index: Val) -> Iterator[tuple[Any, Val, Val]]:
    """Code that runs for the matrix of a piece: gives it, the piece's first output and its outputs."""
    piece = WORK.read(code, work, "piece")
    for i in range(count):
        matrix = MATRIX.read_all(code, work + (WORK.bytes + i * MATRIX.bytes))
        with code.where((index >= matrix.start) & (index < matrix.end)):
            first = (index - matrix.start) * piece
            yield matrix, first, code.min(matrix.out - first, piece)
