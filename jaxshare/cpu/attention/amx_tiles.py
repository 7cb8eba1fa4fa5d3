"""Scores, softmax and mixing of many queries with the matrix unit.

A vector has the numbers of 16 queries: scores are [tokens, queries], and what is mixed is [D,
queries]. So the largest score of a query, its sum and its weights need nothing across a vector, and
weights are operands of the unit as they come. What queries have mixed is turned around after a
segment.

16 queries are scored, those before them weighed, and values are mixed for those before these, so that
none waits for what another unit is about to write.
"""

import math

from jaxshare.cpu.amx import TILE_BYTES, MatrixUnit
from jaxshare.cpu.attention.tiles import TILE, seen_of
from jaxshare.cpu.attention.unit import WHOLE, WIDE, fetch, whole
from jaxshare.cpu.attention.work import WORK, Shape, rounded
from jaxshare.cpu.ir import BF16, F32, I16, I32, I64, PTR, Code, Val, ir
from jaxshare.cpu.mathematics import by_turns, exp2, folded, is_any, pairs_bf16, transposed
from jaxshare.cpu.runtime import Call

_SIDE = 16
"""Rows of a tile of the unit, float32 numbers of one of its rows, and queries of a group."""
_TOTALS, _A, _B = WHOLE[0:2], WHOLE[2:4], WHOLE[4:6]
"""Tiles of the unit."""
_SCORE_BYTES, _WEIGHT_BYTES = TILE * 64, TILE * 32
"""Of the scores of a tile, and of the weights."""
_AT_ONCE = 8
"""Tokens whose weights are computed at once."""
_BESIDE = [
    by_turns([lane + i for lane in range(4 * half, WIDE, 8) for i in range(4)], WIDE)
    for half in range(2)
]
"""4 of each 8 numbers of two vectors of bfloat16, side by side."""
_IN_ORDER = [
    [lane + i for lane in (8 * half, 8 * half + 4) for i in (0, _SIDE) for i in range(i, i + 4)]
    for half in range(2)
]
"""32 numbers in their order, of two vectors that have 4 of each 8."""
_AHEAD, _LINES = 1.5, 8
"""How many tiles ahead memory is fetched, and how many lines of it in a row. Half of it is asked for
twice, once well ahead and once shortly before: fetching one tile ahead, or each line once and two
tiles ahead, was a tenth slower."""
_LAZY = 8.0
"""How much larger a score can be than what weights are relative to, as a power of two, before they
are made relative to it. Weights are below 2 ** 8 then, and what was mixed is seldom scaled."""


def write_amx_tiles(shape: Shape, call: Call) -> Code:
    """tiles(work, query, queries, keys, values, scales): takes the tiles of a segment into the sums
    of some queries, turned around, of which there are places up to a multiple of 16."""
    types = [PTR, I64, I64, PTR, PTR, *shape.scale_types]
    code = Code(call.module, call.machine, "amx_tiles", types)
    work, query, queries, keys, values, *scales = code.args
    w = WORK.read_all(code, work)
    wide, padded = shape.padded(WIDE), shape.padded(_SIDE)
    copies, columns = code.array(BF16, 2 * TILE * wide), code.array(BF16, padded * TILE)
    scores, weights = code.array(F32, 2 * TILE * _SIDE), code.array(BF16, 2 * TILE * _SIDE)
    count = rounded(queries, _SIDE) // _SIDE
    turned, mixed = w.queries + query * (wide * 2), w.mixed + query * (padded * 4)
    sums = [each + query * 4 for each in (w.tops, w.totals, w.ends)]
    weigh = _write_weigh(shape, call)
    _, highest = seen_of(code, w, query, queries)
    start = code.var(0)  # the first group that sees a tile

    def highest_of(group: Val) -> Val:
        return seen_of(code, w, query + group * _SIDE, code.constant(_SIDE))[1]

    ahead_bytes = code.constant(int(_AHEAD * TILE * shape.token_bytes))
    share = rounded(ahead_bytes // (count + 2), _LINES * 64)
    unit = MatrixUnit(code)
    with code.loop(0, highest, TILE) as first:
        here, tile_bytes = code.min(highest - first, TILE), TILE * wide * 2
        keys_here, values_here = (each + first * shape.token_bytes for each in (keys, values))
        rows = whole(shape, code, keys_here, here, TILE, copies)
        lines = whole(shape, code, values_here, here, TILE, copies + tile_bytes)
        _write_columns(shape, code, lines, columns)
        with code.loop_while(lambda: highest_of(start.get()) <= first):
            start.set(start.get() + 1)
        # The unit works for the next group and for the last one while this one is weighed.
        with code.loop(start.get(), count + 2) as scored:
            weighed, last, turn_of = scored - 1, scored - 2, scored & 1
            for source in (keys_here, values_here):
                ahead = source + (TILE * shape.token_bytes) + scored * share
                with code.loop(0, share, _LINES * 64) as at:
                    fetch(code, ahead + at, _LINES)
            with code.where(scored < count):
                place = turned + scored * (_SIDE * wide * 2)
                _score(shape, unit, place, rows, scores + turn_of * _SCORE_BYTES)
            with code.where(last >= start.get()):
                place = mixed + last * (_SIDE * padded * 4)
                _mix(shape, unit, weights + turn_of * _WEIGHT_BYTES, columns, place)
            with code.where((weighed >= start.get()) & (weighed < count)):
                places = [each + weighed * 64 for each in sums]
                places += [scores + (1 - turn_of) * _SCORE_BYTES]
                places += [weights + (1 - turn_of) * _WEIGHT_BYTES]
                places += [mixed + weighed * (_SIDE * padded * 4)]
                code.call(weigh, *places, first, *(each + first * 4 for each in scales))
    back = _write_turn_back(call, padded // _SIDE)
    with code.loop(0, count) as group:
        code.call(back, mixed + group * (_SIDE * padded * 4))
    code.give()
    return code


def _score(shape: Shape, unit: MatrixUnit, queries: Val, rows: Val, scores: Val) -> None:
    """The scores [TILE, 16] of 16 queries."""
    count, line = shape.padded(WIDE) // WIDE, shape.padded(WIDE) * 2
    held = range(count) if count <= len(_B) else ()
    for part in held:
        unit.load(_B[part], queries + part * TILE_BYTES, 64)
    for total in range(TILE // _SIDE):
        number = _TOTALS[total % 2]
        unit.zero(number)
        for part in range(count):
            a, b = _A[part % 2], _B[part % len(_B)]
            if not held:
                unit.load(b, queries + part * TILE_BYTES, 64)
            place = rows + (total * _SIDE * line + part * 64)
            unit.load(a, place, line)
            unit.multiply(number, a, b)
        unit.store(number, scores + total * TILE_BYTES, 64)


def _mix(shape: Shape, unit: MatrixUnit, weights: Val, columns: Val, mixed: Val) -> None:
    """Adds the values of a tile with their weights to what 16 queries have mixed, [D, 16]."""
    count, parts = shape.padded(_SIDE) // _SIDE, range(TILE // WIDE)
    for part in parts:
        unit.load(_B[part], weights + part * TILE_BYTES, 64)
    for d in range(count):
        number = _TOTALS[d % 2]
        unit.load(number, mixed + d * TILE_BYTES, 64)
        for part in parts:
            unit.load(_A[part], columns + (part * count + d) * TILE_BYTES, 64)
            unit.multiply(number, _A[part], _B[part])
        unit.store(number, mixed + d * TILE_BYTES, 64)


def _write_weigh(shape: Shape, call: Call) -> Code:
    """weigh(tops, totals, ends, scores, weights, mixed, first, scales): takes the scores of a tile
    [TILE, 16] into the softmax of 16 queries; writes their weights [TILE / 2, 16, 2] as bfloat16, and
    scales what they have mixed, where it must be."""
    code = Code(call.module, call.machine, "amx_weigh", [*[PTR] * 6, I64, *shape.scale_types])
    tops, totals, ends, scores, weights, mixed, first, *scales = code.args

    def score(token: int) -> Val:
        number = code.load(scores + token * 64, F32, _SIDE)
        return (
            number * code.splat(code.load(scales[0] + token * 4, F32), _SIDE) if scales else number
        )

    end, last = code.load(ends, I32, _SIDE), code.narrowed_int(first + TILE, I32)
    with code.where(is_any(code, end < code.splat(last, _SIDE))), code.loop(0, TILE) as token:
        seen = code.splat(code.narrowed_int(first + token, I32), _SIDE) < end
        place = scores + token * 64
        code.store(code.select(seen, code.load(place, F32, _SIDE), -math.inf), place)
    highest = [score(i) for i in range(4)]
    for token in range(4, TILE):
        highest[token % 4] = code.max(score(token), highest[token % 4])
    largest = folded(highest, code.max)
    before = code.load(tops, F32, _SIDE)
    top = code.select(largest > before + _LAZY, largest, before)
    base = code.select(top > -math.inf, top, 0.0)
    keep = exp2(code, before - base, is_short=False)
    total = [code.load(totals, F32, _SIDE) * keep, code.zeros(_SIDE)]
    for start in range(0, TILE, _AT_ONCE):
        tokens = range(start, start + _AT_ONCE)
        power = [exp2(code, score(token) - base, is_short=True) for token in tokens]
        for half in range(2):
            total[half] = total[half] + folded(power[half::2], lambda a, b: a + b)
        if scales:
            factors = [code.load(scales[1] + token * 4, F32) for token in tokens]
            power = [p * code.splat(f, _SIDE) for p, f in zip(power, factors, strict=True)]
        for i in range(0, _AT_ONCE, 2):
            code.store(pairs_bf16(code, power[i], power[i + 1]), weights + (start + i) * 32)
    code.store(total[0] + total[1], totals)
    code.store(top, tops)
    with code.where(is_any(code, keep < 1.0)), code.loop(0, shape.padded(_SIDE)) as d:
        code.store(code.load(mixed + d * 64, F32, _SIDE) * keep, mixed + d * 64)
    code.give()
    return code


def _write_turn_back(call: Call, squares: int) -> Code:
    """turn_back(mixed): turns what 16 queries have mixed, [D, 16] in the order of `_write_columns`,
    into rows."""
    code = Code(call.module, call.machine, "turn_back", [PTR])
    (mixed,) = code.args
    temporary, line = code.array(I32, squares * _SIDE * _SIDE), squares * 64
    with code.loop(0, squares) as square:
        numbers = [
            code.load(mixed + square * TILE_BYTES + i * 64, I32, _SIDE) for i in range(_SIDE)
        ]
        for i, row in enumerate(transposed(numbers)):
            code.store(row, temporary + square * 64 + i * line)
    with code.loop(0, _SIDE * line, line) as row:
        for square in range(squares):
            pair = [square] if square | 1 == squares else [square & ~1, square | 1]
            number, *more = (code.load(temporary + row + each * 64, I32, _SIDE) for each in pair)
            if more:
                number = number.shuffled(more[0], _IN_ORDER[square & 1])
            code.store(number, mixed + row + square * 64)
    code.give()
    return code


def _write_columns(shape: Shape, code: Code, rows: Val, target: Val) -> None:
    """Writes the values of a tile as tiles of the unit [TILE / 32, D / 16], which have those of 32
    tokens for 16 dimensions each.

    Of 32 dimensions a tile has those that one instruction puts beside each other for two tokens: 4
    of each 8.
    """
    squares, line = shape.padded(_SIDE) // _SIDE, shape.padded(WIDE) * 2
    with code.loop(0, TILE // WIDE) as block:
        source, place = rows + block * (WIDE * line), target + block * (squares * TILE_BYTES)
        for square in range(squares):
            numbers, at, order = WIDE, (square & ~1) * 32, _BESIDE[square & 1]
            if square | 1 == squares:
                numbers, at, order = _SIDE, square * 32, by_turns(range(_SIDE), _SIDE)
            pairs = []
            for token in range(0, WIDE, 2):
                a, b = (
                    code.load(source + (each * line + at), I16, numbers)
                    for each in (token, token + 1)
                )
                pairs.append(a.shuffled(b, order).bitcast(ir.VectorType(I32, _SIDE)))
            for i, column in enumerate(transposed(pairs)):
                code.store(column, place + square * TILE_BYTES + i * 64)
