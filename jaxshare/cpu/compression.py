"""The largest logits of rows and the masses between them on a CPU, in one call.

A row is read from memory once, and then from the processor's cache: for the smallest logit that is
kept, as truncation finds it, and in the order of the tokens for what is kept and the masses.
"""

import operator

import jax
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxshare.cpu.ir import F32, F64, I32, I64, PTR, VOID, Code, Record, Val
from jaxshare.cpu.mathematics import exp, is_any, reduced
from jaxshare.cpu.runtime import Call, begin_task, register
from jaxshare.cpu.selection import (
    LOWEST,
    as_i64,
    doubled,
    for_vectors,
    keys_of,
    load_bits,
    write_count_threshold,
)
from jaxshare.cpu.truncation import BLOCK, write_candidates, write_maxima

_PIECE = 2**14
"""Numbers of a piece of the work, about: for fewer it takes longer to wake a thread."""
_RESULTS = ("tokens", "kept", "below", "rest", "rest_at_1")
_WORK = Record(("size", "k", "rows", "per_piece"), ("logits", "kept_at", *_RESULTS))


def cpu_largest_logits(
    logits: Float[Array, "R V"], kept_at: Float[Array, " R"], k: int
) -> tuple[Array, Array, Array, Array, Array]:
    """The k largest logits of each row, and the masses of the tokens before and beside them.

    Args:
      logits: float32.
      kept_at: float32, the temperature of the masses.
      k: at most V.

    Returns:
      The fields of `jaxshare.decoding.top_logits.TopLogits`: tokens int32[R, K], their logits and
      the masses below each float32[R, K], the mass of the rest and that at temperature 1 float32[R].
      Masses are float32, and their sums float64.

    Raises:
      NotImplementedError: logits that are not float32.
    """
    if logits.dtype != "float32":
        raise NotImplementedError(f"it has no kernel for {logits.dtype}")
    rows = logits.shape[0]
    shapes = [((rows, k), "int32"), *[((rows, k), "float32")] * 2, *[((rows,), "float32")] * 2]
    results = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    target = register("largest_logits", _write)
    tokens, kept, below, rest, rest_at_1 = jax.ffi.ffi_call(target, results)(
        logits, kept_at, np.zeros(k, np.int32)
    )
    return tokens, kept, below, rest, rest_at_1


def _write(call: Call) -> None:
    code, rows = call.code, call.size(0, 0)
    work = code.array(I64, _WORK.bytes // 8)
    size = call.size(0, 1)
    per_piece = code.max(code.constant(_PIECE) // size, 1)
    _WORK.write(code, work, size=size, k=call.size(2, 0), rows=rows, per_piece=per_piece)
    _WORK.write(code, work, logits=call.argument(0), kept_at=call.argument(1))
    _WORK.write(code, work, **{name: call.result(i) for i, name in enumerate(_RESULTS)})
    call.parallel(_write_piece(call), work, (rows + (per_piece - 1)) // per_piece)


def _write_piece(call: Call) -> Code:
    """piece(work, i): what is kept of some of the rows."""
    write_row, code = _write_row(call), begin_task(call, "piece")
    work, index = code.args
    w = _WORK.read_all(code, work)
    with code.loop(index * w.per_piece, code.min((index + 1) * w.per_piece, w.rows)) as row:
        code.call(write_row, work, row)
    code.give()
    return code


def _write_row(call: Call) -> Code:
    """row(work, i): what is kept of one row."""
    module, machine = call.module, call.machine
    maxima = write_maxima(module, machine)
    count_threshold = write_count_threshold(module, machine)
    candidates = write_candidates(module, machine)
    gather = _Gather(call).code
    code = begin_task(call, "row")
    work, row = code.args
    w = _WORK.read_all(code, work)
    lanes, size, k = machine.lanes, w.size, w.k
    numbers = w.logits + row * size * 4
    groups = (size + (BLOCK * lanes - 1)) // (BLOCK * lanes) * lanes
    highest = code.external("malloc", PTR, groups * 4 + (size + lanes) * 4)
    found = highest + groups * 4
    top = code.call(maxima, numbers, size, highest)
    taken, number = code.var(numbers), code.var(size)
    with code.where(k <= groups):
        bound = code.max(code.call(count_threshold, highest, groups, k), LOWEST)
        number.set(code.call(candidates, numbers, size, highest, bound, found))
        taken.set(found)
    least = code.call(count_threshold, taken.get(), number.get(), k)
    code.external("free", VOID, highest)
    largest = keys_of(code, code.narrowed_int(top, I32)).bitcast(F32)
    temperature = code.load(w.kept_at + row * 4, F32)
    rows = (getattr(w, name) + row * k * 4 for name in ("tokens", "kept", "below"))
    ones = (getattr(w, name) + row * 4 for name in ("rest", "rest_at_1"))
    code.call(gather, numbers, size, k, least, largest, temperature, *rows, *ones)
    code.give()
    return code


class _Gather:
    """The code of gather(numbers, n, k, least, top, temperature, tokens, kept, below, rest,
    rest_at_1): writes the tokens whose keys are above `least`, the first ones of those at it, and
    the masses of the others."""

    def __init__(self, call: Call):
        arguments = [PTR, I64, I64, I64, F32, F32, *[PTR] * 5]
        self.code = code = Code(call.module, call.machine, "gather", arguments)
        lanes = call.machine.lanes
        self._numbers, n, k, self._least, top, temperature, *places = code.args
        self._tokens, self._kept, self._below, rest, rest_at_1 = places
        self._top, self._temperature = code.splat(top, lanes), code.splat(temperature, lanes)
        self._pivot = code.splat(code.narrowed_int(self._least, I32), lanes)
        self._vectors = [code.array(kind, lanes) for kind in (I32, F32, F32)]
        # Of vectors without a kept token, for each lane; and of all tokens before the last one with.
        self._lanes = [code.var(code.zeros(lanes, F64)) for _ in range(2)]
        self._sums = [code.var(code.constant(0.0, F64)) for _ in range(2)]
        self._count, self._ties = code.var(0), code.var(k - self._count_above(n))
        is_odd = self._is_odd(n, top)
        for_vectors(code, n, self._add)
        self._fold()
        nan = code.constant(float("nan"), F32)
        for place, total in zip((rest, rest_at_1), self._sums, strict=True):
            mass = Val(code, code.b.fptrunc(total.get().value, F32))
            code.store(code.select(is_odd, nan, mass), place)
        with code.where(is_odd), code.loop(0, k) as i:
            code.store(nan, self._below + i * 4)
        code.give()

    def _count_above(self, n: Val) -> Val:
        code, lanes = self.code, self.code.machine.lanes
        total = code.var(code.zeros(lanes, I32))

        def count(at: Val, left: Val | None) -> None:
            keys = keys_of(code, load_bits(code, self._numbers + at * 4, left))
            is_above = keys > self._pivot
            if left is not None:  # what stands after the last number is none
                is_above = is_above & (keys >= LOWEST)
            total.set(total.get() + code.select(is_above, code.constant(1, keys.type), 0))

        for_vectors(code, n, count)
        return as_i64(code, reduced(total.get(), operator.add))

    def _is_odd(self, n: Val, top: Val) -> Val:
        """True if a number is a NaN, or the largest one infinite: then no mass is a number."""
        code, lanes = self.code, self.code.machine.lanes
        found = code.var(code.zeros(lanes, I32))

        def look(at: Val, left: Val | None) -> None:
            numbers = code.load(self._numbers + at * 4, F32, lanes, left)
            one = code.constant(1, found.get().type)
            found.set(code.select(numbers.equals(numbers), found.get(), one))

        for_vectors(code, n, look)
        return is_any(code, found.get() > 0) | code.intrinsic("fabs", top).equals(float("inf"))

    def _add(self, at: Val, left: Val | None) -> None:
        """Adds the masses of a vector, and keeps what is to be kept of it."""
        code, lanes = self.code, self.code.machine.lanes
        bits = load_bits(code, self._numbers + at * 4, left)
        keys = keys_of(code, bits)
        below = bits.bitcast(self._top.type) - self._top
        below = code.select(below < 0, below, 0.0)
        # A power of e below 0 alone; and what stands after the last number has no mass.
        masses = [
            code.select(keys >= LOWEST, exp(code, value), 0.0)
            for value in (below / self._temperature, below)
        ]
        is_kept = is_any(code, keys >= self._pivot)
        with code.where(Val(code, code.b.not_(is_kept.value))):
            for total, mass in zip(self._lanes, masses, strict=True):
                total.set(total.get() + doubled(code, mass))
        with code.where(is_kept):
            self._fold()
            for value, place in zip((bits, *masses), self._vectors, strict=True):
                code.store(value, place)
            with code.loop(0, left or lanes) as lane:
                self._take(at + lane, lane)

    def _fold(self) -> None:
        """Adds the sums of the lanes to those before."""
        code = self.code
        for total, lanes in zip(self._sums, self._lanes, strict=True):
            total.set(total.get() + reduced(lanes.get(), operator.add))
            lanes.set(code.zeros(code.machine.lanes, F64))

    def _take(self, token: Val, lane: Val) -> None:
        """Keeps one token, or adds its masses."""
        code = self.code
        bits, *masses = self._vectors
        number = code.load(bits + lane * 4, I32)
        key = as_i64(code, keys_of(code, number))
        is_tie = key.equals(self._least)
        is_kept = (key > self._least) | (is_tie & (self._ties.get() > 0))
        place = self._count.get() * 4
        with code.where(is_kept):
            code.store(code.narrowed_int(token, I32), self._tokens + place)
            code.store(number, self._kept + place)
            mass = Val(code, code.b.fptrunc(self._sums[0].get().value, F32))
            code.store(mass, self._below + place)
            self._count.set(self._count.get() + 1)
            self._ties.set(self._ties.get() - code.as_int(is_tie))
        for total, values in zip(self._sums, masses, strict=True):
            mass = doubled(code, code.load(values + lane * 4, F32))
            total.set(total.get() + code.select(is_kept, code.constant(0.0, F64), mass))
