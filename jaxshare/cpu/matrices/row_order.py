"""The rows of a product: those of zeros, as the rows of a pass are that feed nothing, have results of
zeros, and cost next to nothing."""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from jaxshare.cpu.ir import BYTES, I32, I64, PTR, Code, Val
from jaxshare.cpu.matrices.work import WORK

OUTPUTS = 4
"""Outputs that are computed at once."""
MAX_ROWS = 64
"""The most rows of a call."""
_WITHOUT_SIGNS = {4: 0x7FFFFFFF7FFFFFFF, 2: 0x7FFF7FFF7FFF7FFF}
"""Eight bytes of numbers without their signs, by the bytes of a number."""


def write_row_order(code: Code, kind: ir.Type, work: Val) -> None:
    """Writes the order of a call's rows of this type, as `WORK.order`: the numbers of all rows, those
    that are not zero first, and after `MAX_ROWS` how many these are."""
    w = WORK.read_all(code, work)
    order, size = code.array(I64, MAX_ROWS + 1), BYTES[kind]
    used, unused, whole = code.var(0), code.var(w.rows), w.width * size // 8
    # Rows that are no multiple of eight bytes count as used.
    words = code.select((whole * 8).equals(w.width * size), whole, 0)
    with code.loop(0, w.rows) as row:
        line, at = w.x + row * w.width * size, code.var(0)

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
    WORK.write(code, work, order=order)


Products = Callable[[list[Val]], Sequence[Val]]
"""The products of some rows with some lines of a matrix: for each row a vector, or one number."""


def write_results(
    code: Code,
    w: Any,
    count: Val,
    place: Callable[[Val], Val],
    result: ir.Type,
    begin: Callable[[Val, int], Products],
) -> None:
    """Writes the results of all rows at some outputs; those of rows of zeros are zeros.

    Args:
      w: the fields of `WORK`.
      count: outputs.
      place: of the first of a row's results.
      result: their type.
      begin: called for an output and how many are computed at once from it on.
    """
    used = code.load_int(w.order + MAX_ROWS * 8, I64)

    def for_used_rows(output: Val, outputs: int) -> None:
        products = begin(output, outputs)

        def block(first: Val, taken: int) -> None:
            rows = [code.load_int(w.order + (first + r) * 8, I64) for r in range(taken)]
            for row, value in zip(rows, products(rows), strict=True):
                code.store(code.narrowed(value, result), place(row) + output * BYTES[result])

        for_row_blocks(code, used, block)

    for_outputs(code, count, for_used_rows)
    with code.loop(used, w.rows) as at:
        row = code.load_int(w.order + at * 8, I64)
        size = count * BYTES[result]
        code.external("memset", PTR, place(row), code.constant(0, I32), size)


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


def for_outputs(code: Code, count: Val, body: Callable[[Val, int], None]) -> None:
    """Writes body(output, taken) for all outputs, as many at once as share the reading of rows."""
    whole = count // OUTPUTS * OUTPUTS
    with code.loop(0, whole, OUTPUTS) as output:
        body(output, OUTPUTS)
    with code.loop(whole, count) as output:
        body(output, 1)
