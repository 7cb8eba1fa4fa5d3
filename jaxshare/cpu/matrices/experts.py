"""Products of rows with the matrices of the experts that each was routed to.

A matrix that has rows is read once, in the order in which it is stored, for all of them; one that
has none is not read. The sum of a product has one order, whatever rows are beside it, so what a row
gets does not depend on them. XLA's own product of ragged groups computes all rows with all matrices
on a CPU.
"""

import functools
from collections.abc import Sequence

import jax
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32
from llvmlite import ir

from jaxshare.cpu.ir import BYTES, FORMATS, I32, I64, PTR, VOID, Code, Record, Val
from jaxshare.cpu.mathematics import quarter_sums
from jaxshare.cpu.matrices.few_rows import OUTPUTS, PIECE_BYTES, dots, for_outputs, for_row_blocks
from jaxshare.cpu.runtime import Call, begin_task, register, served_dtypes

_WORK = Record(
    ("width", "out", "share", "piece", "parts"), ("x", "slots", "ends", "active", "matrices")
)
"""The numbers of a row and of a result, slots of a row, outputs of a piece, pieces of a matrix; the
rows, slots by expert, the end of each expert's, experts that have any, and pairs of pointers to
matrices and results."""
_ROWS = 64
"""Slots that pass over a piece of a matrix before the next ones do: their rows fit into a cache."""


def cpu_expert_products(
    x: Float[Array, "N in"],
    expert: Int32[Array, "N K"],
    kernels: Sequence[Float[Array, "E out in"]],
    dtype: DTypeLike,
) -> tuple[Float[Array, "N K out"], ...]:
    """x[n] @ kernel[expert[n, k]].T for each kernel, in x's dtype; float32 sums, rounded to `dtype`.

    Results of slots whose expert is not one of 0 .. E - 1 are undefined, and take no time.

    Raises:
      NotImplementedError: a dtype without a kernel, or matrices that differ in shape or dtype.
    """
    given, result = served_dtypes(x.dtype, dtype)
    first = kernels[0]
    if any((each.shape, each.dtype) != (first.shape, x.dtype) for each in kernels):
        raise NotImplementedError("rows and matrices differ in dtype, or matrices in shape")
    count = len(kernels)
    name = f"experts.{count}.{given}.{result}"
    target = register(name, functools.partial(_write, count, given, result))
    shape = jax.ShapeDtypeStruct((*expert.shape, first.shape[1]), result)
    return tuple(jax.ffi.ffi_call(target, [shape] * count)(x, expert, *kernels))


def _write(count: int, dtype: str, result: str, call: Call) -> None:
    code, kind = call.code, FORMATS[dtype]
    experts, out, width = (call.size(2, axis) for axis in range(3))
    slots = call.size(1, 0) * call.size(1, 1)
    piece = code.max(code.constant(PIECE_BYTES // BYTES[kind] // OUTPUTS) // width, 1) * OUTPUTS
    parts = (out + (piece - 1)) // piece
    order = code.external("malloc", PTR, (slots + 2 * experts + 2) * 8)
    ends = order + slots * 8
    active = ends + (experts + 2) * 8
    used = _write_order(call, slots, experts, order, ends, active)
    work, matrices = (code.array(I64, n) for n in (_WORK.bytes // 8, 2 * count))
    for i in range(count):
        code.store(call.argument(2 + i), matrices + 16 * i)
        code.store(call.result(i), matrices + (16 * i + 8))
    _WORK.write(code, work, width=width, out=out, share=call.size(1, 1), piece=piece, parts=parts)
    _WORK.write(code, work, x=call.argument(0), slots=order, ends=ends, active=active)
    _WORK.write(code, work, matrices=matrices)
    task = _write_piece(call, count, kind, FORMATS[result])
    call.parallel(task, work, used * parts * count)
    code.external("free", VOID, order)


def _write_order(call: Call, slots: Val, experts: Val, order: Val, ends: Val, active: Val) -> Val:
    """Sorts slots by expert: those of e are order[ends[e]] to order[ends[e + 1]], exclusive.

    Returns:
      The number of experts that have any, which `active` lists.
    """
    code, chosen = call.code, call.argument(1)

    def count_up(place: Val) -> Val:
        number = code.load_int(place, I64)
        code.store(number + 1, place)
        return number

    def for_each_slot(shift: int, place_slot: bool) -> None:
        with code.loop(0, slots) as slot:
            expert = code.load_int(chosen + slot * 4, I32)
            with code.where((expert >= 0) & (expert < experts)):
                at = count_up(ends + (expert + shift) * 8)
                if place_slot:
                    code.store(slot, order + at * 8)

    with code.loop(0, experts + 2) as i:
        code.store(code.constant(0), ends + i * 8)
    for_each_slot(2, False)
    used, total = code.var(0), code.var(0)
    with code.loop(0, experts) as expert:
        place = ends + (expert + 2) * 8
        number = code.load_int(place, I64)
        with code.where(number > 0):
            code.store(expert, active + used.get() * 8)
            used.set(used.get() + 1)
        total.set(total.get() + number)
        code.store(total.get(), place)
    for_each_slot(1, True)
    return used.get()


def _write_piece(call: Call, count: int, kind: ir.Type, result: ir.Type) -> Code:
    """piece(work, i): some outputs of one matrix of one expert."""
    outputs = _write_outputs(call, kind, result)
    code = begin_task(call, "piece")
    work, index = code.args
    w = _WORK.read_all(code, work)
    expert = code.load_int(w.active + index // (w.parts * count) * 8, I64)
    pair = w.matrices + index // w.parts % count * 16
    first = index % w.parts * w.piece
    number = code.min(w.out - first, w.piece)
    kernel = code.load(pair, PTR) + (expert * w.out + first) * w.width * BYTES[kind]
    y = code.load(pair + 8, PTR) + first * BYTES[result]
    start = code.load_int(w.ends + expert * 8, I64)
    end = code.load_int(w.ends + (expert + 1) * 8, I64)
    with code.loop(start, end, _ROWS) as at:
        code.call(outputs, work, w.slots + at * 8, code.min(end - at, _ROWS), kernel, number, y)
    code.give()
    return code


def _write_outputs(call: Call, kind: ir.Type, result: ir.Type) -> Code:
    """outputs(work, slots, rows, kernel, count, y): y[slot] = x[row of slot] @ kernel.T."""
    code = Code(call.module, call.machine, "outputs", [PTR, PTR, I64, PTR, I64, PTR])
    work, slots, rows, kernel, count, y = code.args
    w = _WORK.read_all(code, work)

    def for_all_rows(output: Val, outputs: int) -> None:
        def block(row: Val, taken: int) -> None:
            found = [code.load_int(slots + (row + r) * 8, I64) for r in range(taken)]
            sums = dots(
                code,
                kind,
                [kernel + (output + o) * w.width * BYTES[kind] for o in range(outputs)],
                [w.x + slot // w.share * w.width * BYTES[kind] for slot in found],
                w.width,
            )
            for slot, per_output in zip(found, sums, strict=True):
                place = y + (slot * w.out + output) * BYTES[result]
                code.store(code.narrowed(quarter_sums(per_output), result), place)

        for_row_blocks(code, rows, block)

    for_outputs(code, count, for_all_rows)
    code.give()
    return code
