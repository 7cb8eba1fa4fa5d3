"""Products of some rows with quantised matrices by instructions for pairs of bfloat16.

A few lines of a matrix are dequantised once for all rows, into a core's first cache, and multiplied
as those of a plain matrix are.
"""

from collections.abc import Sequence

from jaxshare.cpu.ir import BF16, BYTES, FORMATS, I64, PTR, VOID, Code, Val, ir
from jaxshare.cpu.mathematics import quarter_sums
from jaxshare.cpu.matrices.few_rows import OUTPUTS, PIECE_BYTES, dots, for_outputs
from jaxshare.cpu.matrices.many_rows import DEPTH
from jaxshare.cpu.matrices.row_order import clear_other_rows, for_used_rows, write_row_order
from jaxshare.cpu.quantised.codes import Codes
from jaxshare.cpu.quantised.lines import Lines
from jaxshare.cpu.quantised.work import MATRIX, WORK, write_outputs_of, write_work
from jaxshare.cpu.runtime import Call


def write_some_rows(matrices: Sequence[Codes], dtype: str, result: str, call: Call) -> None:
    """Writes a call with matrices that are quantised in these ways, and results of a dtype."""
    assert FORMATS[dtype] == BF16
    code = call.code
    lines = code.constant(PIECE_BYTES // BYTES[BF16] // OUTPUTS) // call.size(0, 1)
    work, pieces, _ = write_work(call, matrices, code.max(lines, 1) * OUTPUTS, None)
    w = WORK.read_all(code, work)
    WORK.write(code, work, packed=write_row_order(code, BF16, w.x, w.rows, w.width))
    functions = {
        each: _write_outputs(call, each, FORMATS[result]) for each in dict.fromkeys(matrices)
    }
    call.parallel(write_outputs_of(call, matrices, functions), work, pieces)


def _write_outputs(call: Call, codes: Codes, result: ir.Type) -> Code:
    """outputs(work, matrix, first): the results of all rows at a piece of outputs."""
    code = Code(call.module, call.machine, f"outputs_{codes.name}", [PTR, PTR, I64])
    codes.check(code)
    work, place, first = code.args
    w, matrix = WORK.read_all(code, work), MATRIX.read_all(code, place)
    stride = (w.width + (DEPTH - 1)) // DEPTH * (DEPTH * BYTES[BF16])
    numbers = code.external("aligned_alloc", PTR, 64, stride * OUTPUTS)
    lines = Lines(code, codes, DEPTH * BYTES[BF16])

    def for_all_rows(output: Val, outputs: int) -> None:
        with code.loop(0, outputs) as o:
            inputs, ahead = (code.constant(0), w.width), matrix.line * outputs
            lines.write(matrix, first + output + o, inputs, numbers + o * stride, ahead)

        def block(rows: list[Val]) -> None:
            found = dots(
                code,
                BF16,
                [numbers + stride * o for o in range(outputs)],
                [w.x + row * w.width * BYTES[BF16] for row in rows],
                w.width,
                fetch=False,
            )
            for row, per_output in zip(rows, found, strict=True):
                value = code.narrowed(quarter_sums(per_output), result)
                code.store(value, place_of(row) + output * BYTES[result])

        for_used_rows(code, w.packed, block)

    def place_of(row: Val) -> Val:
        return matrix.y + (row * matrix.out + first) * BYTES[result]

    number = code.min(matrix.out - first, w.piece)
    for_outputs(code, number, for_all_rows)
    clear_other_rows(code, w.packed, w.rows, place_of, number * BYTES[result])
    code.external("free", VOID, numbers)
    code.give()
    return code
