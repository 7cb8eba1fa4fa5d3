"""Exponentials, reductions and transpositions of vectors, for kernels."""

import math
from collections.abc import Callable, Iterable, Sequence

from llvmlite import ir

from jaxshare.cpu.ir import BF16, F32, I16, I32, Code, Val

_SMALLEST = -126.0
"""The exponents of float32; below them a power of two is 0 here."""
_CUBIC = (0.07814557, 0.22617357, 0.69555686, 1.0)
"""2 ** r for 0 <= r < 1 to 1e-4, which is less than what 16 bits round to."""
_TAYLOR = tuple(math.log(2) ** k / math.factorial(k) for k in range(7, -1, -1))
"""2 ** r for -0.5 <= r <= 0.5 to 1e-8."""
_NATURAL = tuple(1 / math.factorial(k) for k in range(7, -1, -1))
"""e ** r for 2 |r| <= log(2) to 1e-8."""
_SCALES = frozenset({"avx512f", "avx512dq"})
_TO_NEAREST, _TO_FLOOR, _CURRENT_ROUNDING = 8, 9, 4
"""Of the instruction that takes the remainder, without exceptions; and of its last argument."""
_LOG_2 = 0.693145751953125, 1.42860682030941723e-6
"""log(2) in two parts; a whole number below 2**8 times the first is exact."""


def exp2(code: Code, x: Val, *, is_short: bool) -> Val:
    """2 ** x of a vector for x < 127, exact to float32, or to 16 bits where it is short; 0 below 2 **
    -126, or, with AVX-512, where float32 ends. A NaN stays one."""
    if code.machine.features >= _SCALES:
        return _exp2_scaled(code, x, is_short)
    clipped = code.max(code.constant(_SMALLEST, x.type), x)
    whole = code.intrinsic("floor" if is_short else "rint", clipped)
    power = _polynomial(code, _CUBIC if is_short else _TAYLOR, clipped - whole)
    return code.select(x < _SMALLEST, code.constant(0.0, x.type), _scaled(code, power, whole))


def _exp2_scaled(code: Code, x: Val, is_short: bool) -> Val:
    """The same by AVX-512, which takes powers of two and their remainders in one instruction each."""
    name = "llvm.x86.avx512.mask.{}.ps.512"
    every, how = code.constant(-1, I16), code.constant(_CURRENT_ROUNDING, I32)
    mode = code.constant(_TO_FLOOR if is_short else _TO_NEAREST, I32)
    rest = code.external(name.format("reduce"), x.type, x, mode, x, every, how)
    power = _polynomial(code, _CUBIC if is_short else _TAYLOR, rest)
    whole = x if is_short else x - rest
    return code.external(name.format("scalef"), x.type, power, whole, power, every, how)


def exp(code: Code, x: Val) -> Val:
    """e ** x for x <= 0, exact to float32; 0 below 2 ** -126."""
    smallest = _SMALLEST * math.log(2)
    clipped = code.max(x, smallest)
    whole = code.intrinsic("rint", clipped * (1 / math.log(2)))
    rest = clipped
    for part in _LOG_2:
        rest = code.fma(whole, code.constant(-part, x.type), rest)
    power = _polynomial(code, _NATURAL, rest)
    return code.select(x < smallest, code.constant(0.0, x.type), _scaled(code, power, whole))


def _polynomial(code: Code, coefficients: Sequence[float], x: Val) -> Val:
    first, *others = coefficients
    total = code.constant(first, x.type)
    for coefficient in others:
        total = code.fma(total, x, code.constant(coefficient, x.type))
    return total


def _scaled(code: Code, number: Val, whole: Val) -> Val:
    """A number times a power of two, whose exponent is a float."""
    integers = ir.VectorType(I32, whole.type.count)
    exponent = (Val(code, code.b.fptosi(whole.value, integers)) + 127) << 23
    return number * exponent.bitcast(whole.type)


def folded(vectors: Sequence[Val], combine: Callable[[Val, Val], Val]) -> Val:
    """One vector that combines several."""
    left = [*vectors]
    while len(left) > 1:
        left = [*map(combine, left[::2], left[1::2]), *left[len(left) & ~1 :]]
    return left[0]


def reduced(vector: Val, combine: Callable[[Val, Val], Val]) -> Val:
    """One number that combines those of a vector."""
    while (count := vector.type.count) > 1:
        if count == 2:
            return combine(vector.element(0), vector.element(1))
        half = count // 2
        parts = (vector.shuffled(vector, range(s, s + half)) for s in (0, half))
        vector = combine(*parts)
    return vector.element(0)


def is_any(code: Code, mask: Val) -> Val:
    """True if one of a vector of bools is."""
    return mask.bitcast(ir.IntType(mask.type.count)).differs(0)


def pairs_bf16(code: Code, a: Val, b: Val) -> Val:
    """The numbers of two vectors by turns, rounded to bfloat16 by AVX-512."""
    count = a.type.count
    name = f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * count}"
    both = code.external(name, ir.VectorType(BF16, 2 * count), b, a)
    return both.shuffled(both, by_turns(range(count), count))


def by_turns(lanes: Iterable[int], apart: int) -> list[int]:
    """An order for `Val.shuffled`: each of these lanes, and the one that is so many further."""
    return [lane + i for lane in lanes for i in (0, apart)]


def transposed(rows: Sequence[Val]) -> list[Val]:
    """The columns of a square of numbers, given as its rows."""
    size, rows = len(rows), [*rows]
    step = 1
    while step < size:
        new = [*rows]
        for i in range(size):
            if not i & step:
                # In each run of 2 * step lanes, the upper half of row i changes with the lower half
                # of row i + step.
                lanes = [*range(size)]
                low = [lane if not lane & step else size + lane - step for lane in lanes]
                high = [lane + step if not lane & step else size + lane for lane in lanes]
                new[i] = rows[i].shuffled(rows[i + step], low)
                new[i + step] = rows[i].shuffled(rows[i + step], high)
        rows, step = new, 2 * step
    return rows


class LaneSums:
    """The sum of the numbers of each of several vectors, as one vector: as many as one has lanes.

    They are combined as they come, so that few wait in registers.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Val]] = []

    def add(self, vector: Val) -> None:
        """Takes the next vector."""
        step, lanes = 1, range(vector.type.count)
        while self._waiting and self._waiting[-1][0] == step:
            before = self._waiting.pop()[1]
            # Lane by lane, half of the lanes of one vector beside half of those of another.
            low = [lane if not lane & step else len(lanes) + lane - step for lane in lanes]
            high = [lane + step if not lane & step else len(lanes) + lane for lane in lanes]
            vector = before.shuffled(vector, low) + before.shuffled(vector, high)
            step *= 2
        self._waiting.append((step, vector))

    @property
    def total(self) -> Val:
        """The sums, after all vectors."""
        [(_, total)] = self._waiting
        return total


def quarter_sums(vectors: Sequence[Val]) -> Val:
    """The sum of each of four vectors, as a vector; or that of one, as a number."""
    if len(vectors) == 1:
        return reduced(vectors[0], lambda a, b: a + b)
    a, b, c, d = (_folded_to(each, 4) for each in vectors)
    ab, cd = (
        left.shuffled(right, (0, 4, 1, 5)) + left.shuffled(right, (2, 6, 3, 7))
        for left, right in ((a, b), (c, d))
    )  # each a vector of a, b, a, b
    return ab.shuffled(cd, (0, 1, 4, 5)) + ab.shuffled(cd, (2, 3, 6, 7))


def _folded_to(vector: Val, lanes: int) -> Val:
    while (count := vector.type.count) > lanes:
        half = count // 2
        vector = vector.shuffled(vector, range(half)) + vector.shuffled(vector, range(half, count))
    return vector


def broadcast(code: Code, pointer: Val) -> Val:
    """A float32 in memory, in all lanes."""
    return code.splat(code.load(pointer, F32), code.machine.lanes)
