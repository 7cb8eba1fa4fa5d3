"""Thresholds of top-k and top-p on a CPU, in one call, and those of typical-p in another: a row is
read from memory once, and then from the processor's cache.

The smallest logit that top-k leaves in is found among few candidates. A row is cut into groups, and
the k-th largest of the groups' maxima is at most as large as the k-th largest logit, so that only
what is at least as large is looked at; all of the row where there are fewer groups than k.
"""

import jax
from jax import Array
from jaxtyping import Float, Int
from llvmlite import ir

from jaxshare.cpu.ir import F32, I32, I64, PTR, VOID, Code, Machine, Record, Val
from jaxshare.cpu.mathematics import is_any, reduced
from jaxshare.cpu.nucleus import (
    BINS_BYTES,
    Nucleus,
    TypicalNucleus,
    nearness,
    relative,
    write_mean,
)
from jaxshare.cpu.runtime import Call, begin_task, register
from jaxshare.cpu.selection import (
    LOWEST,
    NO_KEY,
    as_i64,
    for_vectors,
    keys_of,
    load_bits,
    write_count_threshold,
    write_mass_threshold,
)

_WORK = Record(("size",), ("scaled", "top_k", "top_p", "floor", "top"))
_TYPICAL_WORK_ARGUMENTS = ("scaled", "top", "floor", "typical_p")
_TYPICAL_WORK = Record(("size",), (*_TYPICAL_WORK_ARGUMENTS, "low", "high"))
BLOCK = 32
"""Vectors of a block; the numbers in the same lane of its vectors are a group."""
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
    _check(scaled)
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
    maxima = write_maxima(module, machine)
    count_threshold = write_count_threshold(module, machine)
    candidates = write_candidates(module, machine)
    nucleus = Nucleus(call, write_mass_threshold(module, machine)).code
    code = begin_task(call, "row")
    work, row = code.args
    w = _WORK.read_all(code, work)
    lanes, size = machine.lanes, w.size
    numbers = w.scaled + row * size * 4
    k = code.load_int(w.top_k + row * 4)
    p = code.load(w.top_p + row * 4, F32)
    groups = (size + (BLOCK * lanes - 1)) // (BLOCK * lanes) * lanes
    room = (size + lanes) * 4  # a whole vector is written where numbers are appended
    bins = code.external("malloc", PTR, groups * 4 + room * 3 + BINS_BYTES)
    highest = bins + BINS_BYTES
    found = highest + groups * 4
    top = code.call(maxima, numbers, size, highest)
    floor, taken, number = code.var(LOWEST), code.var(numbers), code.var(size)
    with code.where((k > 0) & (k < size)):
        with code.where(k <= groups):
            bound = code.max(code.call(count_threshold, highest, groups, k), LOWEST)
            number.set(code.call(candidates, numbers, size, highest, bound, found))
            taken.set(found)
        floor.set(code.max(code.call(count_threshold, taken.get(), number.get(), k), LOWEST))
    with code.where(p < 1):
        largest = keys_of(code, code.narrowed_int(top, I32)).bitcast(F32)
        given = taken.get(), number.get(), floor.get(), largest, code.constant(0.0, F32), p
        floor.set(code.call(nucleus, *given, bins, found + room, found + room * 2))
    code.external("free", VOID, bins)
    for key, place in ((floor.get(), w.floor), (top, w.top)):
        key = code.narrowed_int(code.max(key, _OF_MINUS_INFINITY), I32)
        code.store(keys_of(code, key), place + row * 4)
    code.give()
    return code


def write_maxima(module: ir.Module, machine: Machine) -> Code:
    """maxima(numbers, n, highest): the key of the largest number; writes those of all groups, as
    numbers."""
    code = Code(module, machine, "maxima", [PTR, I64, PTR], I64)
    numbers, n, highest = code.args
    lanes = machine.lanes
    lowest = code.constant(NO_KEY + 1, ir.VectorType(I32, lanes))
    top, place = code.var(lowest), code.var(highest)
    with code.loop(0, n, BLOCK * lanes) as start:
        largest = code.var(lowest)

        def widen(at: Val, left: Val | None, start=start, largest=largest) -> None:
            keys = keys_of(code, load_bits(code, numbers + (start + at) * 4, left))
            largest.set(code.max(largest.get(), keys))

        for_vectors(code, code.min(n - start, BLOCK * lanes), widen)
        code.store(keys_of(code, largest.get()), place.get())
        place.set(place.get() + lanes * 4)
        top.set(code.max(top.get(), largest.get()))
    code.give(as_i64(code, reduced(top.get(), code.max)))
    return code


def write_candidates(module: ir.Module, machine: Machine) -> Code:
    """candidates(numbers, n, highest, bound, found): copies all numbers whose keys are at or above
    the bound to `found`; returns how many."""
    code = Code(module, machine, "candidates", [PTR, I64, PTR, I64, PTR], I64)
    numbers, n, highest, bound, found = code.args
    lanes = machine.lanes
    pivot = code.splat(code.narrowed_int(bound, I32), lanes)
    place, count = code.var(highest), code.var(0)
    with code.loop(0, n, BLOCK * lanes) as start:

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
            for_vectors(code, code.min(n - start, BLOCK * lanes), copy)
        place.set(place.get() + lanes * 4)
    code.give(count.get())
    return code


def cpu_typical(
    scaled: Float[Array, "R V"],
    top: Float[Array, " R"],
    floor: Float[Array, " R"],
    typical_p: Float[Array, " R"],
) -> tuple[Array, Array]:
    """The smallest and the largest logit of each row that typical_p leaves in.

    Args:
      scaled: float32 logits.
      top: the largest logit.
      floor: the smallest logit that other cuts have left in.
      typical_p: float32, 1 for all tokens. Masses are float32, and their sums float64.

    Returns:
      Two arrays float32[R]: `floor` and inf where nothing is cut.

    Raises:
      NotImplementedError: logits that are not float32.
    """
    _check(scaled)
    target = register("typical", _write_typical)
    result = jax.ShapeDtypeStruct(scaled.shape[:1], scaled.dtype)
    low, high = jax.ffi.ffi_call(target, [result] * 2)(scaled, top, floor, typical_p)
    return low, high


def _write_typical(call: Call) -> None:
    code, rows = call.code, call.size(0, 0)
    work = code.array(I64, _TYPICAL_WORK.bytes // 8)
    arguments = {name: call.argument(i) for i, name in enumerate(_TYPICAL_WORK_ARGUMENTS)}
    _TYPICAL_WORK.write(code, work, size=call.size(0, 1), **arguments)
    _TYPICAL_WORK.write(code, work, low=call.result(0), high=call.result(1))
    call.parallel(_write_typical_row(call), work, rows)


def _write_typical_row(call: Call) -> Code:
    """row(work, i): the bounds of one row."""
    threshold = write_mass_threshold(call.module, call.machine)
    nucleus, mean = TypicalNucleus(call, threshold).code, write_mean(call)
    extent = _write_extent(call)
    code = begin_task(call, "row")
    work, row = code.args
    w = _TYPICAL_WORK.read_all(code, work)
    at, numbers = row * 4, w.scaled + row * w.size * 4
    top, p = code.load(w.top + at, F32), code.load(w.typical_p + at, F32)
    floor = code.load(w.floor + at, I32)
    code.store(floor, w.low + at)
    code.store(code.constant(float("inf"), F32), w.high + at)
    with code.where(p < 1):
        room = (w.size + code.machine.lanes) * 4
        bins = code.external("malloc", PTR, room * 2 + BINS_BYTES)
        chosen = bins + BINS_BYTES
        cutoff = code.max(as_i64(code, keys_of(code, floor)), LOWEST)
        middle = code.call(mean, numbers, w.size, cutoff, top)
        given = numbers, w.size, cutoff, top, middle, p, bins, chosen, chosen + room
        least = code.call(nucleus, *given)
        code.external("free", VOID, bins)
        given = numbers, w.size, cutoff, top, middle, least
        code.call(extent, *given, w.low + at, w.high + at)
    code.give()
    return code


def _write_extent(call: Call) -> Code:
    """extent(numbers, n, cutoff, top, mean, least, low, high): writes the smallest and the largest
    of the numbers whose keys are at or above the cutoff, and those of their nearness at or above
    `least`."""
    arguments = [PTR, I64, I64, F32, F32, I64, PTR, PTR]
    code = Code(call.module, call.machine, "extent", arguments)
    numbers, n, cutoff, top, mean, least, *places = code.args
    lanes = call.machine.lanes
    cutoffs, leasts = (code.splat(code.narrowed_int(each, I32), lanes) for each in (cutoff, least))
    tops, means = code.splat(top, lanes), code.splat(mean, lanes)
    kind = ir.VectorType(I32, lanes)
    low, high = code.var(code.constant(2**31 - 1, kind)), code.var(code.constant(NO_KEY, kind))

    def widen(at: Val, left: Val | None) -> None:
        bits = load_bits(code, numbers + at * 4, left)
        keys = keys_of(code, bits)
        near = nearness(code, relative(code, bits.bitcast(tops.type), tops), means)
        is_kept = (keys >= cutoffs) & (keys_of(code, near.bitcast(kind)) >= leasts)
        low.set(code.min(low.get(), code.select(is_kept, keys, low.get())))
        high.set(code.max(high.get(), code.select(is_kept, keys, high.get())))

    for_vectors(code, n, widen)
    ends = reduced(low.get(), code.min), reduced(high.get(), code.max)
    for key, place in zip(ends, places, strict=True):
        code.store(keys_of(code, key), place)
    code.give()
    return code


def _check(scaled: Array) -> None:
    if scaled.dtype != "float32":
        raise NotImplementedError(f"it has no kernel for {scaled.dtype}")
