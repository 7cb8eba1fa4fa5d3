"""Products with the matrices of experts that each have a few rows, by the vector unit.

A matrix that has rows is read once, in the order in which it is stored, for all of them. The sum of
a product has one order, whatever rows are beside it.
"""

from collections.abc import Sequence

from jaxshare.cpu.experts.work import WORK, Way, begin, matrix_of
from jaxshare.cpu.ir import BYTES, FORMATS, I64, PTR, VOID, Code, Val, ir
from jaxshare.cpu.mathematics import quarter_sums
from jaxshare.cpu.matrices.few_rows import PIECE_BYTES, dots
from jaxshare.cpu.matrices.row_order import OUTPUTS, for_outputs, for_row_blocks
from jaxshare.cpu.quantised.few_rows import Dots
from jaxshare.cpu.quantised.work import MATRIX
from jaxshare.cpu.runtime import Call, begin_task

_ROWS = 64
"""Slots that pass over a piece of a matrix before the next ones do: their rows fit into a cache."""


def write_few_rows(ways: Sequence[Way], dtype: str, result: str, call: Call) -> None:
    """Writes a call with matrices of these ways, rows of a dtype, and results of another."""
    code, kind = call.code, FORMATS[dtype]
    bits = max(8 * BYTES[kind] if way is None else way.bits for way in ways)
    lines = code.constant(PIECE_BYTES * 8 // bits // OUTPUTS) // code.max(call.size(0, 1), 1)
    piece = code.max(lines, 1) * OUTPUTS
    work, allocated = begin(call, ways, kind, BYTES[kind], piece)
    w = WORK.read_all(code, work)
    task = _write_piece(call, ways, kind, FORMATS[result])
    call.parallel(task, work, w.used * w.parts * len(ways))
    for each in allocated:
        code.external("free", VOID, each)


def _write_piece(call: Call, ways: Sequence[Way], kind: ir.Type, result: ir.Type) -> Code:
    """piece(work, i): some outputs of one matrix of one expert."""
    functions = {way: _write_outputs(call, way, kind, result) for way in dict.fromkeys(ways)}
    code = begin_task(call, "piece")
    work, index = code.args
    w = WORK.read_all(code, work)
    expert = code.load_int(w.active + index // (w.parts * len(ways)) * 8, I64)
    matrix, first = index // w.parts % len(ways), index % w.parts * w.piece
    start = code.load_int(w.ends + expert * 8, I64)
    end = code.load_int(w.ends + (expert + 1) * 8, I64)
    for i, way in enumerate(ways):
        place = w.matrices + i * MATRIX.bytes
        with code.where(matrix.equals(i)), code.loop(start, end, _ROWS) as at:
            taken = code.min(end - at, _ROWS)
            code.call(functions[way], work, place, expert, first, w.slots + at * 8, taken)
    code.give()
    return code


def _write_outputs(call: Call, way: Way, kind: ir.Type, result: ir.Type) -> Code:
    """outputs(work, matrix, expert, first, slots, rows): y[slot] = x[row of slot] @ kernel.T at a
    piece of outputs."""
    name = f"outputs_{way.name if way else ''}"
    code = Code(call.module, call.machine, name, [PTR, PTR, I64, I64, PTR, I64])
    work, place, expert, first, slots, rows = code.args
    w, matrix = WORK.read_all(code, work), matrix_of(code, place, way, expert)
    packed = None if way is None else Dots(code, way, kind, matrix, w.width)

    def products(outputs: list[Val], given: list[Val]) -> list[Val]:
        taken = [w.x + row * w.width * BYTES[kind] for row in given]
        if packed is not None:
            sums = [matrix.sums + row * matrix.groups * 4 for row in given]
            return packed.write(outputs, taken, sums)
        lines = [matrix.codes + output * matrix.line for output in outputs]
        return [quarter_sums(each) for each in dots(code, kind, lines, taken, w.width)]

    def for_all_rows(output: Val, outputs: int) -> None:
        def block(row: Val, taken: int) -> None:
            found = [code.load_int(slots + (row + r) * 8, I64) for r in range(taken)]
            values = products(
                [first + output + o for o in range(outputs)], [slot // w.share for slot in found]
            )
            for slot, value in zip(found, values, strict=True):
                at = matrix.y + (slot * w.out + first + output) * BYTES[result]
                code.store(code.narrowed(value, result), at)

        for_row_blocks(code, rows, block)

    for_outputs(code, code.min(w.out - first, w.piece), for_all_rows)
    code.give()
    return code
