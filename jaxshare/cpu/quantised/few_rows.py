"""Products of a few rows with quantised matrices: codes become numbers in registers.

The numbers are those of the codes, and the sum of each group is multiplied with its scale, so that
a scale costs one instruction a group. What zeros and offsets take away is the sum of the row's
inputs in the group times them, which is computed once for all outputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from jaxshare.cpu.ir import BF16, BYTES, F32, FORMATS, I8, I64, PTR, VOID, Code, Val
from jaxshare.cpu.mathematics import folded, quarter_sums
from jaxshare.cpu.matrices.few_rows import PIECE_BYTES
from jaxshare.cpu.matrices.row_order import OUTPUTS, Products, write_row_order
from jaxshare.cpu.quantised.codes import Codes
from jaxshare.cpu.quantised.work import MATRIX, WORK, write_outputs_of, write_piece, write_work
from jaxshare.cpu.runtime import Call

_LINE = 64
"""Bytes that come from memory together."""


def write_few_rows(matrices: Sequence[Codes], dtype: str, result: str, call: Call) -> None:
    """Writes a call with matrices of these ways, rows of a dtype, and results of another."""
    code, kind = call.code, FORMATS[dtype]
    most = max(each.bits for each in matrices)
    lines = code.constant(PIECE_BYTES * 8 // most // OUTPUTS) // call.size(0, 1)
    work, pieces, sums = write_work(call, matrices, code.max(lines, 1) * OUTPUTS, kind)
    write_row_order(code, kind, work)
    functions = {
        each: _write_outputs(call, each, kind, FORMATS[result]) for each in dict.fromkeys(matrices)
    }
    call.parallel(write_outputs_of(call, matrices, functions), work, pieces)
    for each in sums:
        code.external("free", VOID, each)


def _write_outputs(call: Call, codes: Codes, kind: ir.Type, result: ir.Type) -> Code:
    """outputs(work, matrix, first): the results of all rows at a piece of outputs."""
    name = f"outputs_{codes.name}"
    code = Code(call.module, call.machine, name, [PTR, PTR, I64])
    work, place, first = code.args
    w, matrix = WORK.read_all(code, work), MATRIX.read_all(code, place)
    dots = Dots(code, codes, kind, matrix, w.width)

    def begin(output: Val, outputs: int) -> Products:
        def products(rows: list[Val]) -> list[Val]:
            inputs = [w.x + row * w.width * BYTES[kind] for row in rows]
            sums = [matrix.sums + row * matrix.groups * 4 for row in rows]
            return dots.write([first + output + o for o in range(outputs)], inputs, sums)

        return products

    write_piece(code, w, matrix, first, result, begin)
    code.give()
    return code


class Dots:
    """The code of the products of some rows with some lines of a quantised matrix.

    Args:
      kind: of the rows.
      matrix: the fields of a `MATRIX`.
      width: the inputs of a row.
    """

    def __init__(self, code: Code, codes: Codes, kind: ir.Type, matrix: Any, width: Val):
        self._code, self._codes, self._kind = code, codes, kind
        self._matrix, self._width = matrix, width
        lanes, halves = code.machine.lanes, codes.bits == 4
        half = codes.group // 2
        self._pairs = codes.is_exact and kind == BF16 and code.machine.dots_bf16 and half % 16 == 0
        self._bytes = (32 if half % 32 == 0 else 16) if self._pairs else lanes
        """The bytes of codes of a step."""
        self._sums = self._bytes // 2 if self._pairs else lanes
        self._parts = 2 if halves else 1
        self._size = half if halves else codes.group
        """The bytes of a group; 0 for all of a row."""

    def write(self, outputs: Sequence[Val], rows: Sequence[Val], sums: Sequence[Val]) -> list[Val]:
        """The products of each row with the lines of these outputs, as a vector; one as a number.

        Args:
          rows: where the inputs of each row are.
          sums: where the sums of each row's inputs by group are, if there are zeros or offsets.
        """
        code, m, codes = self._code, self._matrix, self._codes
        pairs = [(row, line) for row in range(len(rows)) for line in range(len(outputs))]
        totals = [code.var(code.zeros(self._sums)) for _ in pairs]
        lines = [m.codes + output * m.line for output in outputs]
        scales = [m.scales + output * m.groups * codes.size("scales") for output in outputs]

        def add_group(group: Val) -> None:
            at = group * self._size
            found = self._group([line + at for line in lines], rows, group)
            size = codes.size("scales")
            each_scale = [
                code.splat(codes.scale(code, scale + group * size), self._sums) for scale in scales
            ]
            for (_, line), total, part in zip(pairs, totals, found, strict=True):
                total.set(code.fma(part, each_scale[line], total.get()))

        if self._size:
            with code.loop(0, m.groups) as group:
                add_group(group)
        else:
            add_group(code.constant(0))
        results = [total.get() for total in totals]
        if codes.factor != 1.0:
            results = [each * codes.factor for each in results]
        if codes.is_shifted:
            less = self._shifts(outputs, sums)
            results = [total - each for total, each in zip(results, less, strict=True)]
        count = len(outputs)
        return [quarter_sums(results[r * count : (r + 1) * count]) for r in range(len(rows))]

    def _group(self, lines: Sequence[Val], rows: Sequence[Val], group: Val) -> list[Val]:
        """The sums of a group's products, by row and line, whose codes begin here."""
        code, step = self._code, self._bytes
        totals = [code.var(code.zeros(self._sums)) for _ in range(len(rows) * len(lines))]
        first = group * (self._size * self._parts)
        half = self._size if self._parts == 2 else 0

        def add(at: Any, count: Any, fetch: bool) -> None:
            self._step(lines, rows, totals, (first, half, at), count, fetch)

        def run(start: Val, stop: Val) -> None:
            """Steps in blocks of what comes from memory together."""
            blocks = start + (stop - start) // _LINE * _LINE
            with code.loop(start, blocks, _LINE) as at:
                for i in range(0, _LINE, step):
                    add(at + i, None, i == 0)
            whole = blocks + (stop - blocks) // step * step
            with code.loop(blocks, whole, step) as at:
                add(at, None, True)
            with code.where(whole < stop):
                add(whole, stop - whole, True)

        if 0 < self._size <= 4 * _LINE:  # straight code
            for at in range(0, self._size, step):
                left = self._size - at
                add(
                    code.constant(at), code.constant(left) if left < step else None, at % _LINE == 0
                )
        else:
            run(code.constant(0), code.constant(self._size) if self._size else self._width)
        return [total.get() for total in totals]

    def _step(
        self,
        lines: Sequence[Val],
        rows: Sequence[Val],
        totals: Sequence[Any],
        place: tuple[Val, int, Any],
        count: Val | None,
        fetch: bool,
    ) -> None:
        """Adds the products of some bytes of codes, all of a vector or the first `count`."""
        code, kind, step = self._code, self._kind, self._bytes
        first, half, at = place
        if fetch:
            ahead = self._matrix.line * len(lines)  # to the lines that come next
            for line in lines:
                code.prefetch(line + at + ahead)
        inputs = []
        for row in rows:
            starts = [row + (first + at + i * half) * BYTES[kind] for i in range(self._parts)]
            found = [code.load(each, kind, step, count) for each in starts]
            inputs.append(found if self._pairs else [code.widened(each, kind) for each in found])
        for i, line in enumerate(lines):
            codes = code.load(line + at, I8, step, count)
            numbers = (self._codes.pairs if self._pairs else self._codes.numbers)(code, codes)
            for r, given in enumerate(inputs):
                total = totals[r * len(lines) + i]
                for number, x in zip(numbers, given, strict=True):
                    if self._pairs:
                        total.set(code.dot_bf16(total.get(), number, x))
                    else:
                        total.set(code.fma(number, x, total.get()))

    def _shifts(self, outputs: Sequence[Val], sums: Sequence[Val]) -> list[Val]:
        """The vectors, by row and line, whose sums zeros and offsets take away."""
        code, m, codes, lanes = self._code, self._matrix, self._codes, self._sums
        totals = [[code.var(code.zeros(lanes)) for _ in outputs] for _ in sums]

        def add(group: Val, count: Val | None) -> None:
            given = [code.load(each + group * 4, F32, lanes, count) for each in sums]
            for i, output in enumerate(outputs):
                at = output * m.groups + group

                def loaded(name: str, read: Callable[..., Val], at: Val = at) -> Val:
                    return read(code, getattr(m, name) + at * codes.size(name), lanes, count)

                parts = []
                if codes.zeros:
                    parts.append(loaded("zeros", codes.zero) * loaded("scales", codes.scale))
                if codes.offsets:
                    parts.append(loaded("offsets", codes.offset))
                shift = folded(parts, lambda a, b: a + b)
                for r, each in enumerate(given):
                    totals[r][i].set(code.fma(shift, each, totals[r][i].get()))

        whole = m.groups // lanes * lanes
        with code.loop(0, whole, lanes) as group:
            add(group, None)
        with code.where(whole < m.groups):
            add(whole, m.groups - whole)
        return [total.get() for row in totals for total in row]
