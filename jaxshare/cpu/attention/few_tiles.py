"""Scores, softmax and mixing of two to four queries with the matrix unit.

Keys are tiles as they lie: 16 tokens times 32 numbers. So scores come out by token, and are turned
around. Of values the numbers of two tokens are put side by side, quarters of vectors in another
order; what is mixed has that order until the end.
"""

import math
from collections.abc import Sequence

from jaxshare.cpu.amx import MatrixUnit
from jaxshare.cpu.attention.tiles import TILE, seen_of, weigh_row
from jaxshare.cpu.attention.work import FEW, WORK, Shape
from jaxshare.cpu.ir import BF16, F32, I16, I32, I64, PTR, Code, Machine, Val
from jaxshare.cpu.runtime import Call

_SIDE = 16
"""Rows of a tile of the unit, and float32 numbers of one of its rows."""
_WIDE = 2 * _SIDE
"""Numbers of bfloat16 of a row of a tile of the unit."""
_SCORES, _KEYS, _QUERIES, _MIXED, _WEIGHTS, _VALUES = (0, 1), 2, 3, (4, 5), 6, 7
"""Tiles of the unit."""
_SHAPES = [(_SIDE, 4 * FEW), (_SIDE, 4 * FEW), (_SIDE, 64), (_SIDE, 4 * FEW)]
_SHAPES += [(FEW, 64), (FEW, 64), (FEW, 64), (_SIDE, 64)]
"""Their rows, and the bytes of a row."""
_SQUARE = 64 * _SIDE
"""Bytes of the tile with the values of 32 tokens."""
_BY_TURNS = [lane for q in range(0, _WIDE, 8) for i in range(q, q + 4) for lane in (i, _WIDE + i)]
"""The numbers of two tokens side by side: the first half of each quarter of their vectors."""
_IN_ORDER = [4 * quarter + i for quarter in (0, 4, 1, 5, 2, 6, 3, 7) for i in range(4)]
"""Two vectors of such halves as the numbers were."""


def serves(shape: Shape, machine: Machine) -> bool:
    """Returns whether the matrix unit takes keys as they lie: whole tiles of bfloat16."""
    return shape.uses_tiles(machine) and shape.dim % _WIDE == 0 and not shape.codes


def write_few_tiles(shape: Shape, call: Call) -> Code:
    """few_tiles(work, query, queries, keys, values, ahead...): takes a segment into the sums of 2
    to FEW queries. The last arguments are the keys, values and tokens of the next segment."""
    code = Code(call.module, call.machine, "few_tiles", [PTR, I64, I64, PTR, PTR, PTR, PTR, I64])
    work, query, queries, keys, values, *segment_ahead = code.args
    w = WORK.read_all(code, work)
    dim = shape.dim
    pairs, last = code.array(I32, dim // 2 * FEW), code.array(BF16, TILE * dim)
    by_token, scores = code.array(F32, TILE * FEW), code.array(F32, FEW * TILE)
    squares, mixed = code.array(BF16, TILE * dim), code.array(F32, FEW * dim)
    weights = code.array(BF16, FEW * TILE)
    for place, size in ((mixed, FEW * dim * 4), (weights, FEW * TILE * 2)):
        for at in range(0, size, 64):
            code.store(code.zeros(_SIDE), place + at)
    _write_pairs(code, w.queries + query * (dim * 2), queries, dim, pairs)
    unit = MatrixUnit(code, _SHAPES)
    _, highest = seen_of(code, w, query, queries)
    with code.loop(0, highest, TILE) as first:
        count, start = code.min(highest - first, TILE), first * shape.token_bytes
        with code.where(count < TILE):
            _copy(shape, code, keys + start, count, last)
        source = code.select(count < TILE, last, keys + start)
        _score(shape, unit, source, pairs, by_token)
        _turn(code, by_token, scores)
        next_start, left = start + TILE * shape.token_bytes, highest - first - TILE
        tile_ahead = keys + next_start, values + next_start, left
        pairs_ahead = zip(tile_ahead, segment_ahead, strict=True)
        ahead = [code.select(left > 0, a, b) for a, b in pairs_ahead]
        _write_squares(shape, code, values + start, count, ahead, squares)
        with code.loop(0, queries) as i:
            end = code.load_int(w.ends + (query + i) * 4) - first
            found = []
            for p in range(0, TILE, _SIDE):
                seen = code.iota(_SIDE) + p < code.splat(code.min(end, count), _SIDE)
                score = code.load(scores + (i * TILE + p) * 4, F32, _SIDE)
                found.append(code.select(seen, score, -math.inf))
            sums = w.tops + (query + i) * 4, w.totals + (query + i) * 4
            places = weights + i * (TILE * 2), mixed + i * (dim * 4)
            weigh_row(code, found, sums, *places, dim)
        _mix(shape, unit, weights, squares, mixed)
    unit.release()
    with code.loop(0, queries) as i:
        for d in range(0, dim, _WIDE):
            halves = [code.load(mixed + (i * dim + d + h) * 4, F32, _SIDE) for h in (0, _SIDE)]
            for h in (0, _SIDE):
                line = halves[0].shuffled(halves[1], _IN_ORDER[h : h + _SIDE])
                code.store(line, w.mixed + ((query + i) * dim + d + h) * 4)
    code.give()
    return code


def _write_pairs(code: Code, source: Val, queries: Val, dim: int, target: Val) -> None:
    """Writes queries [_, D] as pairs of numbers [D / 2, FEW]; those after the last are the last."""
    with code.loop(0, FEW) as i:
        line = source + code.min(i, queries - 1) * (dim * 2)
        with code.loop(0, dim // 2) as pair:
            code.store(code.load(line + pair * 4, I32), target + (pair * FEW + i) * 4)


def _copy(shape: Shape, code: Code, keys: Val, count: Val, target: Val) -> None:
    """Copies the keys of a tile; those after the last are the last, and no query sees them."""
    with code.loop(0, TILE) as token:
        source = keys + code.min(token, count - 1) * shape.token_bytes
        for d in range(0, shape.dim, _WIDE):
            line = code.load(source + d * 2, I16, _WIDE)
            code.store(line, target + token * shape.token_bytes + d * 2)


def _score(shape: Shape, unit: MatrixUnit, keys: Val, pairs: Val, scores: Val) -> None:
    """The scores [TILE, FEW] of the keys of a tile."""
    for half in range(0, TILE, _SIDE * len(_SCORES)):
        for total in _SCORES:
            unit.zero(total)
        for part in range(shape.dim // _WIDE):
            unit.load(_QUERIES, pairs + part * (_SIDE * FEW * 4), 4 * FEW)
            for total in _SCORES:
                token = half + total * _SIDE
                place = keys + (token * shape.token_bytes + part * 64)
                unit.load(_KEYS, place, shape.token_bytes)
                unit.multiply(total, _KEYS, _QUERIES)
        for total in _SCORES:
            unit.store(total, scores + (half + total * _SIDE) * (FEW * 4), FEW * 4)


def _turn(code: Code, by_token: Val, scores: Val) -> None:
    """Turns scores [TILE, FEW] around."""
    two = [[i + FEW * token for i in pair for token in range(8)] for pair in ((0, 1), (2, 3))]
    one = [[*range(h, h + 8), *range(_SIDE + h, _SIDE + h + 8)] for h in (0, 8)]
    for start in range(0, TILE, _SIDE):
        places = [by_token + (start + t) * (FEW * 4) for t in range(0, _SIDE, _SIDE // FEW)]
        a, b, c, d = (code.load(place, F32, _SIDE) for place in places)
        for pair, order in enumerate(two):
            first, second = a.shuffled(b, order), c.shuffled(d, order)
            for i, half in enumerate(one):
                place = scores + ((2 * pair + i) * TILE + start) * 4
                code.store(first.shuffled(second, half), place)


def _write_squares(
    shape: Shape, code: Code, values: Val, count: Val, ahead: Sequence[Val], target: Val
) -> None:
    """Writes the values of a tile as tiles of the unit [TILE / 32, D / 16], and has the next keys
    and values brought to the caches."""
    columns = shape.dim // _SIDE
    with code.loop(0, TILE // 2) as pair:
        rows = [values + code.min(pair * 2 + i, count - 1) * shape.token_bytes for i in range(2)]
        *places, tokens = ahead
        with code.where(pair * 2 < tokens):
            for place in places:
                for line in range(0, 2 * shape.token_bytes, 64):
                    code.prefetch(place + pair * (2 * shape.token_bytes) + line)
        place = target + pair // _SIDE * (columns * _SQUARE) + pair % _SIDE * 64
        for column, d in enumerate(range(0, shape.dim, _WIDE)):
            first, second = (code.load(row + d * 2, I16, _WIDE) for row in rows)
            for half in range(2):
                line = first.shuffled(second, [lane + 4 * half for lane in _BY_TURNS])
                code.store(line, place + (2 * column + half) * _SQUARE)


def _mix(shape: Shape, unit: MatrixUnit, weights: Val, squares: Val, mixed: Val) -> None:
    """Adds the values of a tile with their weights to what the queries have mixed."""
    columns = shape.dim // _SIDE
    for start in range(0, columns, len(_MIXED)):
        for i, tile in enumerate(_MIXED):
            unit.load(tile, mixed + (start + i) * 64, shape.dim * 4)
        for part in range(TILE // _WIDE):
            unit.load(_WEIGHTS, weights + part * 64, TILE * 2)
            for i, tile in enumerate(_MIXED):
                unit.load(_VALUES, squares + (part * columns + start + i) * _SQUARE, 64)
                unit.multiply(tile, _WEIGHTS, _VALUES)
        for i, tile in enumerate(_MIXED):
            unit.store(tile, mixed + (start + i) * 64, shape.dim * 4)
