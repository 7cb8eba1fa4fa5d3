"""Products of a few rows, each of which goes over a matrix with the vector unit."""

from llvmlite import ir

from jaxshare.cpu.ir import BF16, BYTES, FORMATS, I64, PTR, Code, Val
from jaxshare.cpu.mathematics import quarter_sums
from jaxshare.cpu.matrices.row_order import OUTPUTS, Products, write_results, write_row_order
from jaxshare.cpu.matrices.work import WORK, for_matrix_of, write_work
from jaxshare.cpu.runtime import Call, begin_task

PIECE_BYTES = 2**16
"""Bytes of a matrix that one piece of work reads."""


def write_few_rows(count: int, dtype: str, result: str, call: Call) -> None:
    """Writes a call with so many matrices of a dtype, and results of another."""
    code, kind = call.code, FORMATS[dtype]
    piece = code.max(code.constant(PIECE_BYTES // BYTES[kind] // OUTPUTS) // call.size(0, 1), 1)
    work, pieces = write_work(call, count, piece * OUTPUTS)
    write_row_order(code, kind, work)
    call.parallel(_write_piece(call, count, kind, FORMATS[result]), work, pieces)


def _write_piece(call: Call, count: int, kind: ir.Type, result: ir.Type) -> Code:
    """piece(work, i): some outputs of one of the matrices."""
    outputs = _write_outputs(call, kind, result)
    code = begin_task(call, "piece")
    work, index = code.args
    w = WORK.read_all(code, work)
    for matrix, first, number in for_matrix_of(code, work, count, index):
        kernel = matrix.kernel + first * w.width * BYTES[kind]
        y = matrix.y + first * BYTES[result]
        code.call(outputs, work, kernel, number, y, matrix.out)
    code.give()
    return code


def _write_outputs(call: Call, kind: ir.Type, result: ir.Type) -> Code:
    """outputs(work, kernel, count, y, stride): y [rows, count] = x @ kernel.T."""
    code = Code(call.module, call.machine, "outputs", [PTR, PTR, I64, PTR, I64])
    work, kernel, count, y, stride = code.args
    w = WORK.read_all(code, work)

    def begin(output: Val, outputs: int) -> Products:
        lines = [kernel + (output + o) * w.width * BYTES[kind] for o in range(outputs)]

        def products(rows: list[Val]) -> list[Val]:
            inputs = [w.x + row * w.width * BYTES[kind] for row in rows]
            return [quarter_sums(each) for each in dots(code, kind, lines, inputs, w.width)]

        return products

    write_results(code, w, count, lambda row: y + row * stride * BYTES[result], result, begin)
    code.give()
    return code


def dots(
    code: Code,
    kind: ir.Type,
    kernels: list[Val],
    rows: list[Val],
    width: Val,
    *,
    fetch: bool = True,
) -> list[list[Val]]:
    """The products of each row with each line of a matrix: vectors that are still to be summed.

    With `fetch` the lines that come next are brought to the caches. Processors drop requests where
    many are open, so that asking again with each block of rows pays where a matrix comes from memory.
    """
    machine = code.machine
    pairs = kind == BF16 and machine.dots_bf16
    lanes = machine.lanes * (2 if pairs else 1)
    sums = [[code.var(code.zeros(machine.lanes)) for _ in kernels] for _ in rows]
    ahead = width * len(kernels)  # to the lines that come next

    def step(at: Val, count: Val | None) -> None:
        def loaded(pointers: list[Val]) -> list[Val]:
            found = [code.load(each + at * BYTES[kind], kind, lanes, count) for each in pointers]
            return found if pairs else [code.widened(each, kind) for each in found]

        for line in kernels if fetch else ():
            code.prefetch(line + (at + ahead) * BYTES[kind])
        lines = loaded(kernels)
        for row, totals in zip(loaded(rows), sums, strict=True):
            for line, total in zip(lines, totals, strict=True):
                if pairs:
                    total.set(code.dot_bf16(total.get(), line, row))
                else:
                    total.set(code.fma(line, row, total.get()))

    whole = width // lanes * lanes
    with code.loop(0, whole, lanes) as at:
        step(at, None)
    with code.where(whole < width):
        step(whole, width - whole)
    return [[total.get() for total in totals] for totals in sums]
