"""Thresholds of arrays in memory, for kernels: the largest number with enough at or above it.

Numbers are float32, compared by their keys: int32 in the same order, in which -0 and 0 are equal.
"""

import operator
from collections.abc import Callable

from llvmlite import ir

from jaxshare.cpu.ir import F32, F64, I32, I64, PTR, Code, Machine, Val
from jaxshare.cpu.mathematics import reduced

NO_KEY = -(2**31)
"""Below the key of every number."""
LOWEST = NO_KEY + 2
"""The smallest key of a number; that of `FILL` is below it."""
FILL = -1
"""The bits of what stands after the last number of an array, up to a whole vector."""


def keys_of(code: Code, bits: Val) -> Val:
    """The keys of float32 numbers, given as their bits; and the bits again, given as the keys."""
    return code.select(bits < 0, code.constant(NO_KEY, bits.type) - bits, bits)


def load_bits(code: Code, place: Val, count: Val | None) -> Val:
    """A vector of numbers as their bits; with `count` only the first ones, and `FILL` after them."""
    lanes = code.machine.lanes
    bits = code.load(place, I32, lanes, count)
    if count is None:
        return bits
    is_number = code.iota(lanes) < code.splat(count, lanes)
    return code.select(is_number, bits, FILL)


def for_vectors(code: Code, count: Val, body: Callable[[Val, Val | None], None]) -> None:
    """Writes body(place, left) for all vectors of an array; `left` is how many numbers the last one
    has, if it is not a whole one."""
    lanes = code.machine.lanes
    whole = count // lanes * lanes
    with code.loop(0, whole, lanes) as at:
        body(at, None)
    with code.where(whole < count):
        body(whole, count - whole)


def write_count_threshold(module: ir.Module, machine: Machine) -> Code:
    """count_threshold(numbers, n, k): the largest key that k numbers or more are at or above.

    It is the smallest of all numbers' keys where there are fewer than k.
    """
    code = Code(module, machine, "count_threshold", [PTR, I64, I64], I64)
    numbers, n, k = code.args
    lanes = machine.lanes
    load_keys = _load_keys(code, numbers)

    def is_reached(middle: Val) -> Val:
        pivot = code.splat(code.narrowed_int(middle, I32), lanes)
        total = code.var(code.zeros(lanes, I32))

        def count(at: Val, left: Val | None) -> None:
            one = code.select(load_keys(at, left) >= pivot, code.constant(1, pivot.type), 0)
            total.set(total.get() + one)

        for_vectors(code, n, count)
        return as_i64(code, reduced(total.get(), operator.add)) >= k

    code.give(_bisected(code, n, load_keys, is_reached))
    return code


def write_mass_threshold(module: ir.Module, machine: Machine) -> Code:
    """mass_threshold(numbers, masses, n, target): the largest key such that the masses of the
    numbers at or above it sum to the target, a float64, or more.

    It is the smallest of all numbers' keys where no sum does. Sums are of float64, one for each lane
    of a vector in the order of the array, and then of these.
    """
    code = Code(module, machine, "mass_threshold", [PTR, PTR, I64, F64], I64)
    numbers, masses, n, target = code.args
    lanes = machine.lanes
    load_keys = _load_keys(code, numbers)

    def is_reached(middle: Val) -> Val:
        pivot = code.splat(code.narrowed_int(middle, I32), lanes)
        total = code.var(code.zeros(lanes, F64))

        def add(at: Val, left: Val | None) -> None:
            mass = code.load(masses + at * 4, F32, lanes, left)
            mass = code.select(load_keys(at, left) >= pivot, mass, 0.0)
            total.set(total.get() + doubled(code, mass))

        for_vectors(code, n, add)
        return reduced(total.get(), operator.add) >= target

    code.give(_bisected(code, n, load_keys, is_reached))
    return code


def _load_keys(code: Code, numbers: Val) -> Callable[[Val, Val | None], Val]:
    """Loads the keys of a vector of an array's numbers, for `for_vectors`."""
    return lambda at, left: keys_of(code, load_bits(code, numbers + at * 4, left))


def _bisected(
    code: Code,
    n: Val,
    load_keys: Callable[[Val, Val | None], Val],
    is_reached: Callable[[Val], Val],
) -> Val:
    """The largest key for which `is_reached` holds, between the smallest and the largest one."""
    low, high = _range(code, n, load_keys)
    reached, not_reached = code.var(low), code.var(high + 1)
    with code.loop_while(lambda: reached.get() + 1 < not_reached.get()):
        middle = (reached.get() + not_reached.get()) // 2
        enough = is_reached(middle)
        reached.set(code.select(enough, middle, reached.get()))
        not_reached.set(code.select(enough, not_reached.get(), middle))
    return reached.get()


def _range(code: Code, n: Val, load_keys: Callable[[Val, Val | None], Val]) -> tuple[Val, Val]:
    """The smallest and the largest key of an array."""
    lanes = code.machine.lanes
    kind = ir.VectorType(I32, lanes)
    low = code.var(code.constant(2**31 - 1, kind))
    high = code.var(code.constant(NO_KEY, kind))

    def widen(at: Val, left: Val | None) -> None:
        keys = load_keys(at, left)
        known = keys
        if left is not None:  # the fill is not one of the numbers
            known = code.select(keys >= LOWEST, keys, low.get())
        low.set(code.min(low.get(), known))
        high.set(code.max(high.get(), keys))

    for_vectors(code, n, widen)
    return (
        as_i64(code, reduced(low.get(), code.min)),
        as_i64(code, reduced(high.get(), code.max)),
    )


def doubled(code: Code, value: Val) -> Val:
    """A vector of float32, or a single one, as float64."""
    kind = ir.VectorType(F64, value.type.count) if isinstance(value.type, ir.VectorType) else F64
    return Val(code, code.b.fpext(value.value, kind))


def as_i64(code: Code, value: Val) -> Val:
    """An int32 as an int64."""
    return Val(code, code.b.sext(value.value, I64))
