"""Products of some rows with quantised matrices by instructions for pairs of bfloat16.

A few lines of a matrix are dequantised once for all rows, into a core's first cache, and multiplied
as those of a plain matrix are.
"""

from collections.abc import Sequence

from jaxshare.cpu.ir import BF16, BYTES, FORMATS, I64, PTR, VOID, Code, Val, ir
from jaxshare.cpu.mathematics import quarter_sums
from jaxshare.cpu.matrices.few_rows import PIECE_BYTES, dots
from jaxshare.cpu.matrices.many_rows import DEPTH
from jaxshare.cpu.matrices.row_order import OUTPUTS, Products, write_row_order
from jaxshare.cpu.quantised.codes import Codes
from jaxshare.cpu.quantised.lines import Lines
from jaxshare.cpu.quantised.work import MATRIX, WORK, write_outputs_of, write_piece, write_work
from jaxshare.cpu.runtime import Call


def write_some_rows(matrices: Sequence[Codes], dtype: str, result: str, call: Call) -> None:
    """Writes a call with matrices that are quantised in these ways, and results of a dtype."""
    assert FORMATS[dtype] == BF16
    code = call.code
    lines = code.constant(PIECE_BYTES // BYTES[BF16] // OUTPUTS) // call.size(0, 1)
    work, pieces, _ = write_work(call, matrices, code.max(lines, 1) * OUTPUTS, None)
    write_row_order(code, BF16, work)
    functions = {
        each: _write_outputs(call, each, FORMATS[result]) for each in dict.fromkeys(matrices)
    }
    call.parallel(write_outputs_of(call, matrices, functions), work, pieces)


def _write_outputs(call: Call, codes: Codes, result: ir.Type) -> Code:
    """outputs(work, matrix, first): the results of all rows at a piece of outputs."""
    code = Code(call.module, call.machine, f"outputs_{codes.name}", [PTR, PTR, I64])
    work, place, first = code.args
    w, matrix = WORK.read_all(code, work), MATRIX.read_all(code, place)
    stride = (w.width + (DEPTH - 1)) // DEPTH * (DEPTH * BYTES[BF16])
    numbers = code.external("aligned_alloc", PTR, 64, stride * OUTPUTS)
    lines = Lines(code, codes, DEPTH * BYTES[BF16])

    def begin(output: Val, outputs: int) -> Products:
        with code.loop(0, outputs) as o:
            inputs, ahead = (code.constant(0), w.width), matrix.line * outputs
            lines.write(matrix, first + output + o, inputs, numbers + o * stride, ahead)

        def products(rows: list[Val]) -> list[Val]:
            dequantised = [numbers + stride * o for o in range(outputs)]
            inputs = [w.x + row * w.width * BYTES[BF16] for row in rows]
            found = dots(code, BF16, dequantised, inputs, w.width, fetch=False)
            return [quarter_sums(per_output) for per_output in found]

        return products

    write_piece(code, w, matrix, first, result, begin)
    code.external("free", VOID, numbers)
    code.give()
    return code
