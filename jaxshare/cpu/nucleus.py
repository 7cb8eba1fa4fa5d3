"""The tokens with a share of the mass, for kernels: the likeliest ones, or the most typical ones.

Masses are added up in bins by how far a number is from the most wanted one. One bin has the last
number that is needed, and only that bin is looked at closely.
"""

import operator

from llvmlite import ir

from jaxshare.cpu.ir import F32, F64, I32, I64, PTR, Code, Val
from jaxshare.cpu.mathematics import exp, is_any, reduced
from jaxshare.cpu.runtime import Call
from jaxshare.cpu.selection import doubled, for_vectors, keys_of, load_bits

_BINS, _PER_NAT = 1024, 32
"""Bins of masses, and how many of them numbers that differ by 1 are apart."""
BINS_BYTES = (_BINS + 1) * 8
"""Bytes of the masses of all bins; the last bin is for numbers below the cutoff."""


class Nucleus:
    """The code of nucleus(numbers, n, cutoff, top, mean, p, bins, chosen, masses): the smallest key
    of the likeliest numbers that together have the share p of the mass.

    Only numbers whose keys are at or above the cutoff count. `top` is the largest number. `bins`
    has BINS_BYTES; `chosen` and `masses` have room for all numbers and a vector more. `mean` is not
    used.
    """

    name = "nucleus"

    def __init__(self, call: Call, mass_threshold: Code):
        arguments = [PTR, I64, I64, F32, F32, F32, PTR, PTR, PTR]
        self.code = Code(call.module, call.machine, self.name, arguments, I64)
        code, lanes = self.code, call.machine.lanes
        self._numbers, self._n, cutoff, top, mean, self._p, *arrays = code.args
        self._bins, self._chosen, self._masses = arrays
        self._cutoff = code.splat(code.narrowed_int(cutoff, I32), lanes)
        self._top, self._mean = code.splat(top, lanes), code.splat(mean, lanes)
        self._vectors = [code.array(kind, lanes) for kind in (I32, F32, I32)]
        self._count = code.var(0)
        self._write(mass_threshold)

    def _wanted(self, bits: Val, below: Val) -> tuple[Val, Val]:
        """By what numbers are wanted, as bits of float32, and how much less than the most wanted.

        Args:
          bits: a vector of numbers.
          below: the numbers less the largest one.
        """
        return bits, below

    def _write(self, mass_threshold: Code) -> None:
        code = self.code
        with code.loop(0, _BINS + 1) as i:
            code.store(code.constant(0.0, F64), self._bins + i * 8)
        for_vectors(code, self._n, self._add)
        pivot, missing = self._pivot()

        def choose(at: Val, left: Val | None) -> None:
            self._choose(at, left, pivot)

        for_vectors(code, self._n, choose)
        arrays = self._chosen, self._masses, self._count.get()
        code.give(code.call(mass_threshold, *arrays, missing))

    def _spread(self, at: Val, left: Val | None) -> Val:
        """Writes for a vector of numbers their bins, their masses relative to the largest one's and
        by what they are wanted; returns the bins."""
        code, lanes = self.code, self.code.machine.lanes
        bits = load_bits(code, self._numbers + at * 4, left)
        below = relative(code, bits.bitcast(ir.VectorType(F32, lanes)), self._top)
        wanted, distance = self._wanted(bits, below)
        far = code.min(distance * -float(_PER_NAT), _BINS - 1.0)
        bins = Val(code, code.b.fptosi(far.value, bits.type))
        bins = code.select(keys_of(code, bits) >= self._cutoff, bins, _BINS)
        for value, place in zip((bins, exp(code, below), wanted), self._vectors, strict=True):
            code.store(value, place)
        return bins

    def _add(self, at: Val, left: Val | None) -> None:
        """Adds masses to their bins, in the order of the array."""
        code = self.code
        self._spread(at, left)
        bins, masses, _ = self._vectors
        for lane in range(code.machine.lanes):
            place = self._bins + code.load_int(bins + lane * 4) * 8
            mass = doubled(code, code.load(masses + lane * 4, F32))
            code.store(code.load(place, F64) + mass, place)

    def _pivot(self) -> tuple[Val, Val]:
        """The first bin up to which there is enough mass, and how much of that has to be in it."""
        code = self.code
        total = code.var(code.constant(0.0, F64))
        with code.loop(0, _BINS) as i:
            total.set(total.get() + code.load(self._bins + i * 8, F64))
        target = total.get() * doubled(code, self._p)
        before, pivot = code.var(code.constant(0.0, F64)), code.var(0)

        def after() -> Val:
            return before.get() + code.load(self._bins + pivot.get() * 8, F64)

        with code.loop_while(lambda: (pivot.get() < _BINS - 1) & (after() < target)):
            before.set(after())
            pivot.set(pivot.get() + 1)
        return pivot.get(), target - before.get()

    def _choose(self, at: Val, left: Val | None, pivot: Val) -> None:
        """Appends what is in the pivot's bin to the chosen."""
        code, lanes = self.code, self.code.machine.lanes
        is_in = self._spread(at, left).equals(code.splat(code.narrowed_int(pivot, I32), lanes))
        bins, masses, wanted = self._vectors
        with code.where(is_any(code, is_in)), code.loop(0, lanes) as lane:
            end = self._count.get() * 4
            code.store(code.load(wanted + lane * 4, I32), self._chosen + end)
            code.store(code.load(masses + lane * 4, F32), self._masses + end)
            is_chosen = code.load_int(bins + lane * 4).equals(pivot)
            self._count.set(self._count.get() + code.as_int(is_chosen))


class TypicalNucleus(Nucleus):
    """The code of typical(...), with the arguments of `Nucleus`: the smallest key of the nearness of
    the most typical numbers that together have the share p of the mass.

    `mean` is that of the numbers less the largest one.
    """

    name = "typical"

    def _wanted(self, bits: Val, below: Val) -> tuple[Val, Val]:
        near = nearness(self.code, below, self._mean)
        return near.bitcast(bits.type), near


def relative(code: Code, numbers: Val, top: Val) -> Val:
    """Numbers less the largest one."""
    below = numbers - top
    return code.select(below.equals(below), below, 0.0)  # where both are infinite


def nearness(code: Code, below: Val, mean: Val) -> Val:
    """The distance of numbers from their mean, as a negative number.

    It is how far a token's surprise is from the entropy, since both are less than -log of the
    largest number's probability by the number and by the mean.
    """
    return code.intrinsic("fabs", below - mean) * -1.0


def write_mean(call: Call) -> Code:
    """mean(numbers, n, cutoff, top): the mean of the numbers less the largest one, weighed by their
    masses, of those whose keys are at or above the cutoff. Sums are of float64."""
    code = Code(call.module, call.machine, "mean", [PTR, I64, I64, F32], F32)
    numbers, n, cutoff, top = code.args
    lanes = call.machine.lanes
    least, tops = code.splat(code.narrowed_int(cutoff, I32), lanes), code.splat(top, lanes)
    total, moment = (code.var(code.zeros(lanes, F64)) for _ in range(2))

    def add(at: Val, left: Val | None) -> None:
        bits = load_bits(code, numbers + at * 4, left)
        below = relative(code, bits.bitcast(ir.VectorType(F32, lanes)), tops)
        mass = code.select(keys_of(code, bits) >= least, exp(code, below), 0.0)
        product = doubled(code, mass) * doubled(code, below)
        total.set(total.get() + doubled(code, mass))
        moment.set(moment.get() + code.select(mass > 0, product, 0.0))  # 0 times infinity

    for_vectors(code, n, add)
    sums = [reduced(each.get(), operator.add) for each in (moment, total)]
    code.give(Val(code, code.b.fptrunc((sums[0] / sums[1]).value, F32)))
    return code
