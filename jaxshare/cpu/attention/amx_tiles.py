"""Scores, softmax and mixing of many queries with the matrix unit."""

import math

from jaxshare.cpu.amx import MatrixUnit
from jaxshare.cpu.attention.pair_tiles import (
    PAIRS_BYTES,
    write_key_pairs,
    write_value_pairs,
)
from jaxshare.cpu.attention.tiles import TILE, seen_of, weigh_row
from jaxshare.cpu.attention.work import WORK, Shape, rounded
from jaxshare.cpu.ir import BF16, F32, I64, PTR, Code, Val
from jaxshare.cpu.runtime import Call

_SIDE = 16
"""Rows of a tile of the unit, and float32 numbers of one of its rows."""
_TOTALS, _A, _B = range(4), 4, 5
"""Tiles of the unit."""


def write_amx_tiles(shape: Shape, call: Call) -> Code:
    """tiles(work, query, queries, keys, values, scales): takes the tiles of a segment into the sums
    of some queries, of which there are places up to a multiple of 16."""
    types = [PTR, I64, I64, PTR, PTR, *shape.scale_types]
    code = Code(call.module, call.machine, "amx_tiles", types)
    work, query, queries, keys, values, *scales = code.args
    w = WORK.read_all(code, work)
    wide, padded = shape.padded(2 * _SIDE), shape.padded(_SIDE)
    columns, lines = code.array(BF16, wide * TILE), code.array(BF16, padded * TILE)
    scores, weights = code.array(F32, _SIDE * TILE), code.array(BF16, _SIDE * TILE)
    unit = MatrixUnit(code)
    lowest, highest = seen_of(code, w, query, queries)
    with code.loop(0, highest, TILE) as first:
        count = code.min(highest - first, TILE)
        write_key_pairs(shape, code, keys + first * shape.token_bytes, count, columns)
        write_value_pairs(shape, code, values + first * shape.token_bytes, count, lines)
        is_cut = lowest - first < TILE
        with code.loop(0, rounded(queries, _SIDE), _SIDE) as i:
            at = query + i
            _score(shape, unit, w.queries + at * (wide * 2), columns, scores)
            mixed = w.mixed + at * (padded * 4)
            with code.loop(0, _SIDE) as row:
                place = scores + row * (TILE * 4)
                parts = [code.load(place + p * 4, F32, _SIDE) for p in range(0, TILE, _SIDE)]
                found = [code.var(part) for part in parts]
                with code.where(is_cut):
                    end = code.load_int(w.ends + (at + row) * 4) - first
                    for p, part in enumerate(found):
                        seen = code.iota(_SIDE) + p * _SIDE < code.splat(end, _SIDE)
                        part.set(code.select(seen, part.get(), -math.inf))
                numbers = [part.get() for part in found]
                sums = w.tops + (at + row) * 4, w.totals + (at + row) * 4
                places = weights + row * (TILE * 2), mixed + row * (padded * 4)
                of_tile = [each + first * 4 for each in scales]
                weigh_row(code, numbers, sums, *places, padded, of_tile)
            _mix(shape, unit, weights, lines, mixed)
    unit.release()
    code.give()
    return code


def _score(shape: Shape, unit: MatrixUnit, queries: Val, columns: Val, scores: Val) -> None:
    """The scores [16, TILE] of 16 queries."""
    wide = shape.padded(2 * _SIDE)
    for total in _TOTALS:
        unit.zero(total)
    for part in range(wide // (2 * _SIDE)):
        unit.load(_A, queries + part * 64, wide * 2)
        for total in _TOTALS:
            unit.load(_B, columns + (part * len(_TOTALS) + total) * PAIRS_BYTES, 64)
            unit.multiply(total, _A, _B)
    for total in _TOTALS:
        unit.store(total, scores + total * 64, TILE * 4)


def _mix(shape: Shape, unit: MatrixUnit, weights: Val, lines: Val, mixed: Val) -> None:
    """Adds the values of a tile with their weights to what 16 queries have mixed."""
    padded = shape.padded(_SIDE)
    columns = padded // _SIDE
    for start in range(0, columns, len(_TOTALS)):
        chosen = range(start, min(start + len(_TOTALS), columns))
        for d in chosen:
            unit.load(d - start, mixed + d * 64, padded * 4)
        for part in range(TILE // (2 * _SIDE)):
            unit.load(_A, weights + part * 64, TILE * 2)
            for d in chosen:
                unit.load(_B, lines + (part * columns + d) * PAIRS_BYTES, 64)
                unit.multiply(d - start, _A, _B)
        for d in chosen:
            unit.store(d - start, mixed + d * 64, padded * 4)
