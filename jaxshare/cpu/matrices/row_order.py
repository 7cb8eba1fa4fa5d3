"""The rows of a product: those of zeros, as the rows of a pass are that feed nothing, have results of
zeros, and cost next to nothing."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from jaxshare.cpu.ir import BYTES, I32, I64, PTR, Code, Val

MAX_ROWS = 64
"""The most rows of a call."""
_WITHOUT_SIGNS = {4: 0x7FFFFFFF7FFFFFFF, 2: 0x7FFF7FFF7FFF7FFF}
"""Eight bytes of numbers without their signs, by the bytes of a number."""


def write_row_order(code: Code, kind: ir.Type, x: Val, rows: Val, width: Val) -> Val:
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


def for_used_rows(code: Code, order: Val, block: Callable[[list[Val]], None]) -> None:
    """Writes block(rows) for the rows that are not zero, as `for_row_blocks` does."""

    def of_order(first: Val, taken: int) -> None:
        block([code.load_int(order + (first + r) * 8, I64) for r in range(taken)])

    for_row_blocks(code, code.load_int(order + MAX_ROWS * 8, I64), of_order)


def clear_other_rows(
    code: Code, order: Val, rows: Val, place: Callable[[Val], Val], size: Val
) -> None:
    """Writes zeros as the results of all other rows: so many bytes from the place of a row on."""
    with code.loop(code.load_int(order + MAX_ROWS * 8, I64), rows) as at:
        row = code.load_int(order + at * 8, I64)
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
