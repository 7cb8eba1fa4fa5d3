"""Scores, softmax and mixing of two to four queries with the matrix unit.

A segment is gone over in three steps: the scores of all keys, the softmax, the mixing of all values.
Keys and values are tiles as they lie, 16 tokens times 32 numbers, so that the first and the last step
are little more than reading memory in order, at the rate at which it comes.

Scores come out by token, and are turned around. A product adds up pairs of numbers that lie side by
side; so each weight is given twice, once for the first number of every pair and once for the second,
each time with a 0 for the other. What is mixed has the numbers of even and of odd places apart.
"""

import math
from typing import Any

from jaxshare.cpu.amx import TILE_BYTES, MatrixUnit
from jaxshare.cpu.attention.tiles import seen_of
from jaxshare.cpu.attention.unit import (
    BY_TURNS,
    NARROW,
    WHOLE,
    WIDE,
    InOrder,
    store_by_turns,
)
from jaxshare.cpu.attention.work import FEW, SEGMENT, WORK, Shape, rounded
from jaxshare.cpu.ir import BF16, F32, I8, I16, I32, I64, PTR, Code, Val, ir
from jaxshare.cpu.mathematics import exp2, reduced
from jaxshare.cpu.runtime import Call

_SIDE = 16
"""Rows of a tile of the unit, tokens of one, and float32 numbers of one of its rows."""
_TOTAL, _QUERIES, _KEYS = *NARROW, WHOLE[0]
"""Tiles of the unit for scores."""
*_MIXED, _WEIGHTS, _VALUES = WHOLE
"""Tiles of the unit for mixing."""
_WEIGHT_BYTES = 64 * 2 * FEW
"""Of the weights of 16 tokens: the first half of a tile. Its other rows, and those of what they mix,
have no meaning."""


def write_few_tiles(shape: Shape, call: Call) -> Code:
    """few_tiles(work, query, queries, keys, values, next_keys): takes a segment into the sums of 2
    to FEW queries. The last argument says where the keys of the next segment are."""
    code = Code(call.module, call.machine, "few_tiles", [PTR, I64, I64, PTR, PTR, PTR])
    work, query, queries, keys, values, next_keys = code.args
    w = WORK.read_all(code, work)
    pairs, scores = code.array(I32, shape.dim // 2 * FEW), code.array(F32, SEGMENT * FEW)
    weights = code.array(I8, SEGMENT // _SIDE * _WEIGHT_BYTES + TILE_BYTES)
    mixed = code.array(I8, shape.dim // WIDE * TILE_BYTES)
    _write_pairs(code, w.queries + query * (shape.dim * 2), queries, shape.dim, pairs)
    _, count = seen_of(code, w, query, queries)
    with code.where(count > 0):
        _score(shape, code, InOrder(shape, code, keys, count, values), pairs, scores)
        for i in range(FEW):
            with code.where(queries > i):
                _weigh(code, w, query + i, count, scores + i * 64, weights + i * 64)
        _mix(shape, code, InOrder(shape, code, values, count, next_keys), weights, mixed)
        with code.loop(0, queries) as i:
            for part in range(shape.dim // WIDE):
                place = mixed + i * 64 + part * TILE_BYTES
                even, odd = (code.load(place + at, F32, _SIDE) for at in (0, FEW * 64))
                target = w.mixed + ((query + i) * shape.dim + part * WIDE) * 4
                store_by_turns(code, even, odd, target)
    code.give()
    return code


def _write_pairs(code: Code, source: Val, queries: Val, dim: int, target: Val) -> None:
    """Writes queries [_, D] as pairs of numbers [D / 2, FEW]; those after the last are the last."""
    lines = [source + code.min(code.constant(i), queries - 1) * (dim * 2) for i in range(FEW)]
    for start in range(0, dim // 2, _SIDE):
        a, b, c, d = (code.load(line + start * 4, I32, _SIDE) for line in lines)
        for i, half in enumerate(BY_TURNS):
            ac, bd = a.shuffled(c, half), b.shuffled(d, half)
            for j, part in enumerate(BY_TURNS):
                place = target + (start * FEW + (2 * i + j) * _SIDE) * 4
                code.store(ac.shuffled(bd, part), place)


def _score(shape: Shape, code: Code, run: InOrder, pairs: Val, scores: Val) -> None:
    """The scores of all keys, by query in each block of 16 tokens: [blocks, FEW, 16]."""
    unit, last = MatrixUnit(code), code.array(BF16, WIDE * shape.dim)
    parts = range(shape.dim // WIDE)
    with code.loop(0, run.count, WIDE) as first:
        keys, ahead = run.whole(first, last), run.ahead(first)
        for block in range(2):
            unit.zero(_TOTAL)
            for part in parts:
                unit.load(_QUERIES, pairs + part * (_SIDE * FEW * 4), 4 * FEW)
                run.load(unit, _KEYS, keys, block, part)
                unit.multiply(_TOTAL, _KEYS, _QUERIES)
                run.fetch(ahead, block, part)
            unit.store(_TOTAL, scores + (first + block * _SIDE) * (4 * FEW), 4 * FEW)
    # Later, since the vector unit waits for what the matrix unit has just stored.
    with code.loop(0, rounded(run.count, WIDE), _SIDE) as first:
        _turn(code, scores + first * (4 * FEW))


def _turn(code: Code, scores: Val) -> None:
    """Turns the scores of 16 tokens [16, FEW] around."""
    two = [[i + FEW * token for i in pair for token in range(8)] for pair in ((0, 1), (2, 3))]
    one = [[*range(h, h + 8), *range(_SIDE + h, _SIDE + h + 8)] for h in (0, 8)]
    a, b, c, d = (code.load(scores + i * 64, F32, _SIDE) for i in range(FEW))
    for pair, order in enumerate(two):
        first, second = a.shuffled(b, order), c.shuffled(d, order)
        for i, half in enumerate(one):
            code.store(first.shuffled(second, half), scores + (2 * pair + i) * 64)


def _weigh(code: Code, w: Any, query: Val, count: Val, scores: Val, weights: Val) -> None:
    """The weights of a query, its largest score and the sum of its weights."""
    end = code.load_int(w.ends + query * 4)
    stop = rounded(count, WIDE)
    lowest = code.zeros(_SIDE) - math.inf

    def score(first: Val) -> Val:
        return code.load(scores + first * (4 * FEW), F32, _SIDE)

    highest = code.var(lowest)
    with code.loop(0, end // _SIDE * _SIDE, _SIDE) as first:
        highest.set(code.max(highest.get(), score(first)))
    with code.loop(end // _SIDE * _SIDE, stop, _SIDE) as first:
        seen = code.iota(_SIDE) < code.splat(end - first, _SIDE)
        code.store(code.select(seen, score(first), lowest), scores + first * (4 * FEW))
        highest.set(code.max(highest.get(), score(first)))
    top = reduced(highest.get(), code.max)
    under = code.splat(code.select(top > -math.inf, top, code.constant(0.0, F32)), _SIDE)
    total = code.var(code.zeros(_SIDE))
    with code.loop(0, stop, _SIDE) as first:
        weight = exp2(code, score(first) - under, is_short=True)
        total.set(total.get() + weight)
        bits = code.narrowed(weight, BF16).bitcast(ir.VectorType(I16, _SIDE))
        number = Val(code, code.b.zext(bits.value, ir.VectorType(I32, _SIDE)))
        place = weights + first // _SIDE * _WEIGHT_BYTES
        code.store(number, place)
        code.store(number << 16, place + FEW * 64)
    code.store(top, w.tops + query * 4)
    code.store(reduced(total.get(), lambda a, b: a + b), w.totals + query * 4)


def _mix(shape: Shape, code: Code, run: InOrder, weights: Val, mixed: Val) -> None:
    """Mixes values with their weights."""
    unit, last = MatrixUnit(code), code.array(BF16, WIDE * shape.dim)
    parts = range(shape.dim // WIDE)
    for start in range(0, len(parts), len(_MIXED)):
        chosen = [*zip(_MIXED, parts[start : start + len(_MIXED)], strict=False)]
        for tile, _ in chosen:
            unit.zero(tile)
        with code.loop(0, run.count, WIDE) as first:
            values, ahead = run.whole(first, last), run.ahead(first)
            for block in range(2):
                unit.load(_WEIGHTS, weights + (first // _SIDE + block) * _WEIGHT_BYTES, 64)
                for tile, part in chosen:
                    run.load(unit, _VALUES, values, block, part)
                    unit.multiply(tile, _WEIGHTS, _VALUES)
                    run.fetch(ahead, block, part)
        for tile, part in chosen:
            unit.store(tile, mixed + part * TILE_BYTES, 64)
