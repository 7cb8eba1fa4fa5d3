"""Products of a few rows, each of which goes over a matrix with the vector unit.

Rows of zeros, as those of a pass are that feed nothing, have results of zeros and cost next to
nothing.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from jaxshare.cpu.ir import BF16, BYTES, FORMATS, I32, I64, PTR, Code, Val
from jaxshare.cpu.mathematics import quarter_sums
from jaxshare.cpu.matrices.work import WORK, for_matrix_of, write_work
from jaxshare.cpu.runtime import Call, begin_task

OUTPUTS = 4
"""Outputs that are computed at once."""
PIECE_BYTES = 2**16
"""Bytes of a matrix that one piece of work reads."""
MAX_ROWS = 64
"""The most rows of a call."""
_WITHOUT_SIGNS = {8: 0x7FFFFFFFFFFFFFFF, 4: 0x7FFFFFFF7FFFFFFF, 2: 0x7FFF7FFF7FFF7FFF}
"""Eight bytes of numbers without their signs, by the bytes of a number."""


def write_few_rows(count: int, dtype: str, result: str, call: Call) -> None:
    """Writes a call with so many matrices of a dtype, and results of another."""
    code, kind = call.code, FORMATS[dtype]
    piece = code.max(code.constant(PIECE_BYTES // BYTES[kind] // OUTPUTS) // call.size(0, 1), 1)
    work, pieces = write_work(call, count, piece * OUTPUTS)
    w = WORK.read_all(code, work)
    WORK.write(code, work, packed=_write_order(code, kind, w.x, w.rows, w.width))
    call.parallel(_write_piece(call, count, kind, FORMATS[result]), work, pieces)


def _write_order(code: Code, kind: ir.Type, x: Val, rows: Val, width: Val) -> Val:
    """The numbers of all rows, those that are not zero first, and after `MAX_ROWS` how many these are."""
    order, size = code.array(I64, MAX_ROWS + 1), BYTES[kind]
    used, unused, whole = code.var(0), code.var(rows), width * size // 8
    # Rows that are no multiple of eight bytes count as used.
    words = code.select((whole * 8).equals(width * size), whole, 0)
    with code.loop(0, rows) as row:
        line, at = x + row * width * size, code.var(0)

        def is_zero(line: Val = line, at: Any = at) -> Val:
            word = code.load_int(line + code.min(at.get(), words - 1) * 8, I64)
            return (at.get() < words) & (word & _WITHOUT_SIGNS[size]).equals(0)

        with code.where(words > 0), code.loop_while(is_zero):
            at.set(at.get() + 1)
        is_unused = (words > 0) & at.get().equals(words)
        unused.set(code.select(is_unused, unused.get() - 1, unused.get()))
        code.store(row, order + code.select(is_unused, unused.get(), used.get()) * 8)
        used.set(code.select(is_unused, used.get(), used.get() + 1))
    code.store(used.get(), order + MAX_ROWS * 8)
    return order


def _write_piece(call: Call, count: int, kind: ir.Type, result: ir.Type) -> Code:
    """piece(work, i): some outputs of one of the matrices."""
    outputs = _write_outputs(call, kind, result)
    code = begin_task(call, "piece")
    work, index = code.args
    w = WORK.read_all(code, work)
    for matrix, first, number in for_matrix_of(code, work, count, index):
        kernel = matrix.kernel + first * w.width * BYTES[kind]
        y = matrix.y + first * BYTES[result]
        used = code.load_int(w.packed + MAX_ROWS * 8, I64)
        code.call(outputs, w.x, used, w.width, kernel, number, y, matrix.out, w.packed)
        with code.loop(used, w.rows) as place:
            row = code.load_int(w.packed + place * 8, I64)
            line = y + row * matrix.out * BYTES[result]
            code.external("memset", PTR, line, code.constant(0, I32), number * BYTES[result])
    code.give()
    return code


def _write_outputs(call: Call, kind: ir.Type, result: ir.Type) -> Code:
    """outputs(x, rows, width, kernel, count, y, stride, order): y [R, count] = x @ kernel.T for these
    rows, the first ones in the order."""
    types = [PTR, I64, I64, PTR, I64, PTR, I64, PTR]
    code = Code(call.module, call.machine, "outputs", types)
    x, rows, width, kernel, count, y, stride, order = code.args

    def for_all_rows(output: Val, outputs: int) -> None:
        def block(first: Val, taken: int) -> None:
            found = [code.load_int(order + (first + r) * 8, I64) for r in range(taken)]
            sums = dots(
                code,
                kind,
                [kernel + (output + o) * width * BYTES[kind] for o in range(outputs)],
                [x + row * width * BYTES[kind] for row in found],
                width,
            )
            for row, per_output in zip(found, sums, strict=True):
                place = y + (row * stride + output) * BYTES[result]
                code.store(code.narrowed(quarter_sums(per_output), result), place)

        for_row_blocks(code, rows, block)

    for_outputs(code, count, for_all_rows)
    code.give()
    return code


def for_outputs(code: Code, count: Val, body: Callable[[Val, int], None]) -> None:
    """Writes body(output, taken) for all outputs, as many at once as share the reading of rows."""
    whole = count // OUTPUTS * OUTPUTS
    with code.loop(0, whole, OUTPUTS) as output:
        body(output, OUTPUTS)
    with code.loop(whole, count) as output:
        body(output, 1)


def for_row_blocks(code: Code, rows: Val, block: Callable[[Val, int], None]) -> None:
    """Writes block(row, taken) for all rows, as many at once as registers hold sums for."""
    most = 4 if code.machine.registers >= 32 else 2
    many = rows // most * most
    with code.loop(0, many, most) as row:
        block(row, most)
    left = most // 2
    done = many
    while left:
        with code.where((rows & left).differs(0)):
            block(done, left)
        done = done + (rows & left)
        left //= 2


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
