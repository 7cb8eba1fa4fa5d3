"""Lines of quantised matrices as numbers of bfloat16 in memory.

Numbers are scaled, and rounded to bfloat16 as XLA's product with a dequantised matrix has them.
"""

import dataclasses
from typing import Any

from jaxshare.cpu.ir import BF16, F32, I8, Code, Val, ir
from jaxshare.cpu.matrices.many_rows import DEPTH, SIDE
from jaxshare.cpu.quantised.codes import Codes

INPUTS = 16 * DEPTH
"""Numbers of a line that are written at once, at most, where they have groups."""


def serves(codes: Codes) -> bool:
    """Returns whether groups are such that parts of lines can be written one after the other."""
    group = codes.group
    return not group or (group % DEPTH == 0 and (INPUTS % group == 0 or group % INPUTS == 0))


@dataclasses.dataclass(frozen=True)
class _Group:
    """The single numbers of float32 that the numbers of a group are made with."""

    scale: Val
    zero: Val | None
    offset: Val | None


class Lines:
    """The code that writes lines of a quantised matrix.

    Args:
      step: the bytes from 32 numbers of a line to the next ones, 64 if they follow each other.
    """

    def __init__(self, code: Code, codes: Codes, step: int):
        self._code, self._codes, self._step = code, codes, step

    def write(
        self, matrix: Any, output: Val, inputs: tuple[Val, Val], place: Val, ahead: Val
    ) -> None:
        """Writes some inputs of a line.

        Args:
          matrix: the fields of a `MATRIX`.
          output: the number of the line.
          inputs: the first, and how many. The last 32 numbers are written whole, with zeros.
          place: where the first is written.
          ahead: bytes of codes from this line to the one that is to be prefetched.
        """
        code, codes, (first, count) = self._code, self._codes, inputs
        line, groups = matrix.codes + output * matrix.line, output * matrix.groups
        if not codes.group:
            self._write_bytes(self._group(matrix, groups), line + first, place, count, ahead)
            return
        size = min(codes.group, INPUTS)
        with code.loop(0, count, size) as at:
            group = self._group(matrix, groups + (first + at) // codes.group)
            start = line + (first + at) * codes.bits // 8
            there = place + at * (self._step // DEPTH)
            if codes.bits == 8:
                self._write_bytes(group, start, there, code.constant(size), ahead)
            else:
                self._write_halves(group, start, there, ahead)

    def _group(self, matrix: Any, at: Val) -> _Group:
        code, codes = self._code, self._codes
        scale = codes.scale(code, matrix.scales + at * codes.size("scales"))
        if codes.factor != 1.0 and not codes.is_shifted:
            scale = scale * codes.factor
        zero = offset = None
        if codes.zeros:
            zero = codes.zero(code, matrix.zeros + at * codes.size("zeros"))
        if codes.offsets:
            offset = codes.offset(code, matrix.offsets + at * codes.size("offsets"))
        return _Group(scale, zero, offset)

    def _write_bytes(self, group: _Group, codes: Val, place: Val, count: Val, ahead: Val) -> None:
        """Writes the numbers of codes of a byte each."""
        code = self._code

        def step(at: Val, left: Val | None) -> None:
            code.prefetch(codes + at + ahead, 2)
            for i in range(2):
                rest = None if left is None else left - i * SIDE
                (numbers,) = self._codes.numbers(
                    code, code.load(codes + at + i * SIDE, I8, SIDE, rest)
                )
                code.store(
                    self._scaled(numbers, group), place + at * (self._step // DEPTH) + i * 32
                )

        whole = count // DEPTH * DEPTH
        with code.loop(0, whole, DEPTH) as at:
            step(at, None)
        with code.where(whole < count):
            step(whole, count - whole)

    def _write_halves(self, group: _Group, codes: Val, place: Val, ahead: Val) -> None:
        """Writes the numbers of a group of codes of four bits, from a table of them."""
        code, half = self._code, self._codes.group // 2
        lanes = DEPTH if half % DEPTH == 0 else SIDE
        table = self._scaled(
            Val(code, ir.Constant(ir.VectorType(F32, SIDE), self._codes.table)), group
        )
        if lanes == DEPTH:
            bits = table.bitcast(ir.VectorType(ir.IntType(16), SIDE))
            table = bits.shuffled(bits, [*range(SIDE)] * 2)
        for at in range(0, min(half, INPUTS // 2), lanes):
            if at % 64 == 0:
                code.prefetch(codes + at + ahead, 2)
            numbers = self._codes.pairs(code, code.load(codes + at, I8, lanes), table)
            for i, each in enumerate(numbers):
                position = at + i * half
                code.store(each, place + position // DEPTH * self._step + position % DEPTH * 2)

    def _scaled(self, numbers: Val, group: _Group) -> Val:
        """The numbers of a group as they are when they are dequantised, in bfloat16."""
        code, lanes = self._code, numbers.type.count
        if self._codes.is_shifted and self._codes.factor != 1.0:
            numbers = numbers * self._codes.factor
        if group.zero is not None:
            numbers = numbers - code.splat(group.zero, lanes)
        numbers = numbers * code.splat(group.scale, lanes)
        if group.offset is not None:
            numbers = numbers - code.splat(group.offset, lanes)
        return code.narrowed(numbers, BF16)
