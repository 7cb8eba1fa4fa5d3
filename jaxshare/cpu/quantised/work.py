"""The pieces of work of a call: outputs of several quantised matrices."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import ir

from jaxshare.cpu.ir import BYTES, I64, PTR, Code, Record, Val
from jaxshare.cpu.mathematics import reduced
from jaxshare.cpu.matrices.row_order import Products, write_results
from jaxshare.cpu.matrices.work import WORK
from jaxshare.cpu.quantised.codes import Codes
from jaxshare.cpu.runtime import Call, begin_task

MATRIX = Record(
    ("out", "start", "end", "line", "groups"),
    ("codes", "scales", "zeros", "offsets", "sums", "y"),
)
"""A matrix: its outputs, its pieces of work from start to end, the bytes of a line of codes, groups
of a line, its arrays, the sums of the rows' inputs by group, and its results."""


def write_work(
    call: Call, matrices: Sequence[Codes], piece: Val, kind: ir.Type | None
) -> tuple[Val, Val, list[Val]]:
    """Cuts the outputs of a call's matrices, whose arrays follow the rows, into pieces.

    Args:
      kind: of the rows, where their sums by group are needed.

    Returns:
      The work, the number of pieces, and what is to be freed.
    """
    code, argument = call.code, 1
    work = code.array(I64, (WORK.bytes + len(matrices) * MATRIX.bytes) // 8)
    x, rows, width = call.argument(0), call.size(0, 0), call.size(0, 1)
    WORK.write(code, work, rows=rows, width=width, piece=piece, x=x)
    start, sums = code.constant(0), {}
    for i, each in enumerate(matrices):
        out, line = call.size(argument, 0), call.size(argument, 1)
        groups = call.size(argument + 1, 1)
        end = start + (out + piece - 1) // piece
        place = work + (WORK.bytes + i * MATRIX.bytes)
        MATRIX.write(code, place, out=out, start=start, end=end, line=line, groups=groups)
        write_arrays(call, each, place, argument)
        MATRIX.write(code, place, y=call.result(i))
        if each.is_shifted and kind is not None:
            if each.group not in sums:
                sums[each.group] = write_sums(call, each.group, groups, kind)
            MATRIX.write(code, place, sums=sums[each.group])
        start, argument = end, argument + each.count
    return work, start, [*sums.values()]


def write_outputs_of(
    call: Call, matrices: Sequence[Codes], functions: Mapping[Codes, Code]
) -> Code:
    """piece(work, i): some outputs of one of the matrices, by the function outputs(work, matrix, first)
    of the way in which it is quantised."""
    code = begin_task(call, "piece")
    work, index = code.args
    piece = WORK.read(code, work, "piece")
    for i, each in enumerate(matrices):
        place = work + (WORK.bytes + i * MATRIX.bytes)
        start, end = (MATRIX.read(code, place, name) for name in ("start", "end"))
        with code.where((index >= start) & (index < end)):
            code.call(functions[each], work, place, (index - start) * piece)
    code.give()
    return code


def write_piece(
    code: Code,
    w: Any,
    matrix: Any,
    first: Val,
    result: ir.Type,
    begin: Callable[[Val, int], Products],
) -> None:
    """Writes the results of all rows at a piece of a matrix's outputs, from `first` on; `begin` as
    `write_results` has it."""

    def place(row: Val) -> Val:
        return matrix.y + (row * matrix.out + first) * BYTES[result]

    write_results(code, w, code.min(matrix.out - first, w.piece), place, result, begin)


def write_arrays(call: Call, codes: Codes, place: Val, argument: int) -> None:
    """Writes where the arrays of a matrix are, whose first is this argument."""
    names = ["codes", "scales", *(n for n in ("zeros", "offsets") if getattr(codes, n))]
    for i, name in enumerate(names):
        MATRIX.write(call.code, place, **{name: call.argument(argument + i)})


def write_sums(call: Call, group: int, groups: Val, kind: ir.Type) -> Val:
    """Writes the sums [R, G] of the rows' inputs by group, to memory that is to be freed."""
    code, lanes = call.code, call.machine.lanes
    x, rows, width = call.argument(0), call.size(0, 0), call.size(0, 1)
    size = code.constant(group) if group else width
    sums = code.external("malloc", PTR, rows * groups * 4 + 4)
    with code.loop(0, rows * groups) as at:
        start, total = x + at * size * BYTES[kind], code.var(code.zeros(lanes))
        whole = size // lanes * lanes
        with code.loop(0, whole, lanes) as i:
            some = code.load(start + i * BYTES[kind], kind, lanes)
            total.set(total.get() + code.widened(some, kind))
        with code.where(whole < size):
            some = code.load(start + whole * BYTES[kind], kind, lanes, size - whole)
            total.set(total.get() + code.widened(some, kind))
        code.store(reduced(total.get(), lambda a, b: a + b), sums + at * 4)
    return sums
