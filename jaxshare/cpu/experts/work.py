"""The pieces of work of a call: outputs of the matrices of the experts that have rows."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from jaxshare.cpu.ir import I32, I64, PTR, Code, Record, Val
from jaxshare.cpu.quantised.codes import Codes
from jaxshare.cpu.quantised.work import MATRIX, write_arrays, write_sums
from jaxshare.cpu.runtime import Call

WORK = Record(
    ("width", "out", "share", "piece", "parts", "used"),
    ("x", "slots", "ends", "active", "matrices", "packed", "blocks", "firsts"),
)
"""The numbers of a row and of a result, slots of a row, outputs of a piece, pieces of a matrix,
experts that have rows; the rows, slots by expert, the end of each expert's, experts that have any,
and the matrices. Of rows as tiles: the tiles, the first slot of each block and the one after its
last, and each expert's first block."""
Way = Codes | None
"""The way in which a matrix is quantised; None if it is not."""


def begin(
    call: Call, ways: Sequence[Way], kind: Any, line: int, piece: Val
) -> tuple[Val, list[Val]]:
    """Sorts the slots of a call by expert, and writes what its pieces of work share.

    Args:
      kind: of the rows, where their sums by group are needed.
      line: the bytes of a number of a plain matrix.
      piece: see `WORK`.

    Returns:
      The work, and what is to be freed.
    """
    code = call.code
    experts, out = (call.size(2, axis) for axis in range(2))
    width, slots = call.size(0, 1), call.size(1, 0) * call.size(1, 1)
    order = code.external("malloc", PTR, (slots + 2 * experts + 2) * 8)
    ends = order + slots * 8
    active = ends + (experts + 2) * 8
    used = _write_order(call, slots, experts, order, ends, active)
    work = code.array(I64, (WORK.bytes + len(ways) * MATRIX.bytes) // 8)
    parts = (out + (piece - 1)) // piece
    WORK.write(code, work, width=width, out=out, share=call.size(1, 1), piece=piece, parts=parts)
    WORK.write(code, work, x=call.argument(0), slots=order, ends=ends, active=active, used=used)
    WORK.write(code, work, matrices=work + WORK.bytes)
    argument, sums = 2, {}
    for i, way in enumerate(ways):
        place = work + (WORK.bytes + i * MATRIX.bytes)
        MATRIX.write(code, place, out=out, y=call.result(i))
        if way is None:
            MATRIX.write(code, place, line=width * line, codes=call.argument(argument))
            argument += 1
            continue
        groups = call.size(argument + 1, 2)
        MATRIX.write(code, place, line=call.size(argument, 2), groups=groups)
        write_arrays(call, way, place, argument)
        if way.is_shifted and kind is not None:
            if way.group not in sums:
                sums[way.group] = write_sums(call, way.group, groups, kind)
            MATRIX.write(code, place, sums=sums[way.group])
        argument += way.count
    return work, [order, *sums.values()]


def matrix_of(code: Code, place: Val, way: Way, expert: Val) -> SimpleNamespace:
    """The fields of a `MATRIX` as they are for one expert."""
    whole = MATRIX.read_all(code, place)
    found = vars(whole)
    lines = expert * whole.out
    found["codes"] = found["kernel"] = whole.codes + lines * whole.line
    if way is not None:
        for name in ("scales", "zeros", "offsets"):
            if getattr(way, name):
                found[name] = getattr(whole, name) + lines * whole.groups * way.size(name)
    return SimpleNamespace(**found)


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
