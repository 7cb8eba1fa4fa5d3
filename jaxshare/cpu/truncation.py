"""Thresholds of top-k and top-p on a CPU, in one call: a row is read from memory once, and then from
the processor's cache.

The smallest logit that top-k leaves in is found among few candidates. A row is cut into groups, and
the k-th largest of the groups' maxima is at most as large as the k-th largest logit, so that only
what is at least as large is looked at. For top-p all masses are added up in bins by how far a logit
is below the largest one. One bin has the smallest logit that is left in, and only it is looked at.
"""

import jax
from jax import Array
from jaxtyping import Float, Int
from llvmlite import ir

from jaxshare.cpu.ir import F32, F64, I32, I64, PTR, VOID, Code, Machine, Record, Val
from jaxshare.cpu.mathematics import exp, reduced
from jaxshare.cpu.runtime import Call, begin_task, register
from jaxshare.cpu.selection import (
    LOWEST,
    NO_KEY,
    as_i64,
    doubled,
    for_vectors,
    is_any,
    keys_of,
    load_bits,
    write_count_threshold,
    write_mass_threshold,
)

_WORK = Record(("size",), ("scaled", "top_k", "top_p", "floor", "top"))
_BLOCK = 32
"""Vectors of a block; the numbers in the same lane of its vectors are a group."""
_BINS, _PER_NAT = 1024, 32
"""Bins of masses, and how many of them logits that differ by 1 are apart."""
_OF_MINUS_INFINITY = -0x7F800000
"""The key of -inf."""


def cpu_floor_and_top(
    scaled: Float[Array, "R V"], top_k: Int[Array, " R"], top_p: Float[Array, " R"]
) -> tuple[Array, Array]:
    """The smallest logit of each row that top_k and then top_p leave in, and the largest one.

    Args:
      scaled: float32 logits.
      top_k: int32, 0 for all tokens.
      top_p: float32, 1 for all tokens. Masses are float32, and their sums float64.

    Returns:
      Two arrays float32[R]; the first is -inf where nothing is cut.

    Raises:
      NotImplementedError: logits that are not float32.
    """
    if scaled.dtype != "float32":
        raise NotImplementedError(f"it has no kernel for {scaled.dtype}")
    target = register("truncation", _write)
    result = jax.ShapeDtypeStruct(scaled.shape[:1], scaled.dtype)
    floor, top = jax.ffi.ffi_call(target, [result] * 2)(scaled, top_k, top_p)
    return floor, top


def _write(call: Call) -> None:
    code, rows = call.code, call.size(0, 0)
    work = code.array(I64, _WORK.bytes // 8)
    _WORK.write(code, work, size=call.size(0, 1), scaled=call.argument(0))
    _WORK.write(code, work, top_k=call.argument(1), top_p=call.argument(2))
    _WORK.write(code, work, floor=call.result(0), top=call.result(1))
    call.parallel(_write_row(call), work, rows)


def _write_row(call: Call) -> Code:
    """row(work, i): the thresholds of one row."""
    module, machine = call.module, call.machine
    maxima = _write_maxima(module, machine)
    count_threshold = write_count_threshold(module, machine)
    candidates = _write_candidates(module, machine)
    nucleus = _Nucleus(call, write_mass_threshold(module, machine)).code
    code = begin_task(call, "row")
    work, row = code.args
    w = _WORK.read_all(code, work)
    lanes, size = machine.lanes, w.size
    numbers = w.scaled + row * size * 4
    k = code.load_int(w.top_k + row * 4)
    p = code.load(w.top_p + row * 4, F32)
    groups = (size + (_BLOCK * lanes - 1)) // (_BLOCK * lanes) * lanes
    room = (size + lanes) * 4  # a whole vector is written where numbers are appended
    bins = code.external("malloc", PTR, groups * 4 + room * 3 + (_BINS + 1) * 8)
    highest = bins + (_BINS + 1) * 8
    found = highest + groups * 4
    top = code.call(maxima, numbers, size, highest)
    floor, taken, number = code.var(LOWEST), code.var(numbers), code.var(size)
    with code.where((k > 0) & (k < size)):
        bound = code.var(LOWEST)
        with code.where(k <= groups):
            bound.set(code.max(code.call(count_threshold, highest, groups, k), LOWEST))
        number.set(code.call(candidates, numbers, size, highest, bound.get(), found))
        taken.set(found)
        floor.set(code.max(code.call(count_threshold, found, number.get(), k), LOWEST))
    with code.where(p < 1):
        given = taken.get(), number.get(), floor.get(), top, p
        floor.set(code.call(nucleus, *given, bins, found + room, found + room * 2))
    code.external("free", VOID, bins)
    for key, place in ((floor.get(), w.floor), (top, w.top)):
        key = code.narrowed_int(code.max(key, _OF_MINUS_INFINITY), I32)
        code.store(keys_of(code, key), place + row * 4)
    code.give()
    return code


def _write_maxima(module: ir.Module, machine: Machine) -> Code:
    """maxima(numbers, n, highest): the key of the largest number; writes those of all groups, as
    numbers."""
    code = Code(module, machine, "maxima", [PTR, I64, PTR], I64)
    numbers, n, highest = code.args
    lanes = machine.lanes
    lowest = code.constant(NO_KEY + 1, ir.VectorType(I32, lanes))
    top, place = code.var(lowest), code.var(highest)
    with code.loop(0, n, _BLOCK * lanes) as start:
        largest = code.var(lowest)

        def widen(at: Val, left: Val | None, start=start, largest=largest) -> None:
            keys = keys_of(code, load_bits(code, numbers + (start + at) * 4, left))
            largest.set(code.max(largest.get(), keys))

        for_vectors(code, code.min(n - start, _BLOCK * lanes), widen)
        code.store(keys_of(code, largest.get()), place.get())
        place.set(place.get() + lanes * 4)
        top.set(code.max(top.get(), largest.get()))
    code.give(as_i64(code, reduced(top.get(), code.max)))
    return code


def _write_candidates(module: ir.Module, machine: Machine) -> Code:
    """candidates(numbers, n, highest, bound, found): copies all numbers whose keys are at or above
    the bound to `found`; returns how many."""
    code = Code(module, machine, "candidates", [PTR, I64, PTR, I64, PTR], I64)
    numbers, n, highest, bound, found = code.args
    lanes = machine.lanes
    pivot = code.splat(code.narrowed_int(bound, I32), lanes)
    place, count = code.var(highest), code.var(0)
    with code.loop(0, n, _BLOCK * lanes) as start:

        def copy(at: Val, left: Val | None, start=start) -> None:
            source = numbers + (start + at) * 4
            chosen = keys_of(code, load_bits(code, source, left)) >= pivot
            with code.where(is_any(code, chosen)), code.loop(0, left or lanes) as lane:
                bits = code.load(source + lane * 4, I32)
                code.store(bits, found + count.get() * 4)
                is_chosen = as_i64(code, keys_of(code, bits)) >= bound
                count.set(count.get() + code.as_int(is_chosen))

        largest = keys_of(code, load_bits(code, place.get(), None))
        with code.where(is_any(code, largest >= pivot)):
            for_vectors(code, code.min(n - start, _BLOCK * lanes), copy)
        place.set(place.get() + lanes * 4)
    code.give(count.get())
    return code


class _Nucleus:
    """The code of nucleus(numbers, n, cutoff, top, p, bins, chosen, masses): the smallest key that
    top-p leaves in, of those at or above the cutoff.

    Bins are float64 [_BINS + 1]; the last one is for numbers below the cutoff. `chosen` and `masses`
    are for the numbers of one bin.
    """

    def __init__(self, call: Call, mass_threshold: Code):
        arguments = [PTR, I64, I64, I64, F32, PTR, PTR, PTR]
        self.code = Code(call.module, call.machine, "nucleus", arguments, I64)
        code, lanes = self.code, call.machine.lanes
        self._numbers, self._n, cutoff, top, p, self._bins, *arrays = code.args
        self._chosen, self._masses = arrays
        self._cutoff = code.splat(code.narrowed_int(cutoff, I32), lanes)
        top_bits = keys_of(code, code.narrowed_int(top, I32))
        self._top = code.splat(top_bits.bitcast(F32), lanes)
        self._bin_of, self._mass_of = code.array(I32, lanes), code.array(F32, lanes)
        with code.loop(0, _BINS + 1) as i:
            code.store(code.constant(0.0, F64), self._bins + i * 8)
        for_vectors(code, self._n, self._add)
        pivot, below = self._pivot(p)
        self._pivots = code.splat(code.narrowed_int(pivot, I32), lanes)
        self._count = code.var(0)
        for_vectors(code, self._n, self._choose)
        threshold = mass_threshold, self._chosen, self._masses, self._count.get(), below
        code.give(code.call(*threshold))

    def _loaded(self, at: Val, left: Val | None) -> tuple[Val, Val]:
        """The bins of a vector of numbers, and their masses relative to the largest number's."""
        code, lanes = self.code, self.code.machine.lanes
        bits = load_bits(code, self._numbers + at * 4, left)
        below = bits.bitcast(ir.VectorType(F32, lanes)) - self._top
        below = code.select(below.equals(below), below, 0.0)  # where both are infinite
        far = code.min(below * -float(_PER_NAT), _BINS - 1.0)
        bins = Val(code, code.b.fptosi(far.value, bits.type))
        return code.select(keys_of(code, bits) >= self._cutoff, bins, _BINS), exp(code, below)

    def _add(self, at: Val, left: Val | None) -> None:
        """Adds masses to their bins, in the order of the array."""
        code = self.code
        bins, masses = self._loaded(at, left)
        code.store(bins, self._bin_of)
        code.store(masses, self._mass_of)
        for lane in range(code.machine.lanes):
            place = self._bins + code.load_int(self._bin_of + lane * 4) * 8
            mass = doubled(code, code.load(self._mass_of + lane * 4, F32))
            code.store(code.load(place, F64) + mass, place)

    def _pivot(self, p: Val) -> tuple[Val, Val]:
        """The first bin up to which there is enough mass, and how much of it has to be in it."""
        code = self.code
        total = code.var(code.constant(0.0, F64))
        with code.loop(0, _BINS) as i:
            total.set(total.get() + code.load(self._bins + i * 8, F64))
        target = total.get() * doubled(code, p)
        before, pivot = code.var(code.constant(0.0, F64)), code.var(0)

        def after() -> Val:
            return before.get() + code.load(self._bins + pivot.get() * 8, F64)

        with code.loop_while(lambda: (pivot.get() < _BINS - 1) & (after() < target)):
            before.set(after())
            pivot.set(pivot.get() + 1)
        return pivot.get(), target - before.get()

    def _choose(self, at: Val, left: Val | None) -> None:
        """Appends the numbers that are in the pivot's bin."""
        code = self.code
        bins, masses = self._loaded(at, left)
        chosen = bins.equals(self._pivots)
        with code.where(is_any(code, chosen)):
            code.store(bins, self._bin_of)
            code.store(masses, self._mass_of)
            pivot = as_i64(code, self._pivots.element(0))
            with code.loop(0, left or code.machine.lanes) as lane:
                at_end = self._count.get() * 4
                bits = code.load(self._numbers + (at + lane) * 4, I32)
                code.store(bits, self._chosen + at_end)
                code.store(code.load(self._mass_of + lane * 4, F32), self._masses + at_end)
                is_chosen = code.load_int(self._bin_of + lane * 4).equals(pivot)
                self._count.set(self._count.get() + code.as_int(is_chosen))
