"""Scores, softmax and mixing of a group of 16 queries with the matrix unit, or of more in short
segments.

A segment is gone over in three steps: the scores of all keys, the softmax, the mixing of all values.
Keys and values are tiles as they lie, 16 tokens times 32 numbers, and each step has the memory
fetched that the next one reads: the queries of one group take hardly longer than reading memory in
order.

Scores come out by token, a vector having those of 16 queries. Weights are turned around, so that a
tile has 16 tokens of 16 queries, and each takes the place of two numbers, of which the second is 0: a
product then adds up the first number of every pair that lies side by side. Read from two bytes
before, the same tile adds up the second ones.
"""

import math
from collections.abc import Callable

from jaxshare.cpu.amx import ROWS, TILE_BYTES, MatrixUnit
from jaxshare.cpu.attention.tiles import seen_of
from jaxshare.cpu.attention.unit import WHOLE, WIDE, InOrder, fetch, store_by_turns
from jaxshare.cpu.attention.work import SEGMENT, WORK, Shape, rounded
from jaxshare.cpu.ir import BF16, F32, I8, I16, I32, I64, PTR, Code, Val, ir
from jaxshare.cpu.mathematics import exp2, folded, transposed
from jaxshare.cpu.runtime import Call

_TOTALS, _KEYS, _QUERIES = WHOLE[0:2], WHOLE[2:4], WHOLE[4:6]
"""Tiles of the unit for scores."""
_MIXED, _VALUES, _WEIGHTS = WHOLE[0:4], WHOLE[4], WHOLE[5]
"""Tiles of the unit for mixing."""
_MOST = SEGMENT * ROWS
"""Scores that there is room for: those of one group and a whole segment, or of several groups and
fewer tokens. More are faster where tiles of a segment are gone over one after the other."""


def fits(queries: Val, tokens: Val) -> Val:
    """Returns whether there is room for the scores of so many queries."""
    return rounded(queries, ROWS) * rounded(tokens, WIDE) <= _MOST


def write_group_tiles(shape: Shape, call: Call) -> Code:
    """group_tiles(work, query, queries, keys, values, next_keys): takes a segment into the sums of
    groups of queries, turned around. The last argument says where the keys of the next segment are."""
    code = Code(call.module, call.machine, "group_tiles", [PTR, I64, I64, PTR, PTR, PTR])
    work, query, queries, keys, values, next_keys = code.args
    w = WORK.read_all(code, work)
    all_scores = code.array(I8, (_MOST // ROWS + SEGMENT // WIDE) * 64)
    groups = rounded(queries, ROWS) // ROWS
    weigh, mix = _write_weigh(shape, call), _write_mix(shape, call)
    _, count = seen_of(code, w, query, queries)

    def scores_of(group: Val) -> Val:
        return all_scores + (group * (rounded(count, WIDE) + 1) + 1) * 64  # after a line of zeros

    with code.where(count > 0):
        turned = w.queries + query * (shape.dim * 2)
        _score(shape, code, InOrder(shape, code, keys, count, values), turned, groups, scores_of)
        with code.loop(0, groups) as group:
            ahead = code.select(group.equals(0), values, next_keys)
            code.call(weigh, work, query + group * ROWS, count, scores_of(group), ahead)
        with code.loop(0, groups) as group:
            mixed = w.mixed + (query + group * ROWS) * (shape.dim * 4)
            code.call(mix, values, count, next_keys, scores_of(group), mixed)
    code.give()
    return code


def _score(
    shape: Shape,
    code: Code,
    run: InOrder,
    turned: Val,
    groups: Val,
    scores_of: Callable[[Val], Val],
) -> None:
    """The scores of all keys [tokens, 16] of each group."""
    unit, last = MatrixUnit(code), code.array(BF16, WIDE * shape.dim)
    parts = range(shape.dim // WIDE)
    with code.loop(0, run.count, WIDE) as first:
        keys, ahead = run.whole(first, last), run.ahead(first)
        for block in range(2):
            for part in parts:
                run.fetch(ahead, block, part)
            with code.loop(0, groups) as group:
                queries = turned + group * (ROWS * shape.dim * 2)
                unit.zero(_TOTALS[block])
                for part in parts:
                    a, b = _KEYS[part % 2], _QUERIES[part % 2]
                    unit.load(b, queries + part * TILE_BYTES, 64)
                    run.load(unit, a, keys, block, part)
                    unit.multiply(_TOTALS[block], a, b)
                unit.store(_TOTALS[block], scores_of(group) + (first + block * ROWS) * 64, 64)


def _write_weigh(shape: Shape, call: Call) -> Code:
    """weigh(work, query, count, scores, ahead): turns scores of 16 queries to weights, and writes their
    largest scores and the sums of their weights. Memory is fetched from `ahead` on, as much as a
    segment's keys are."""
    code = Code(call.module, call.machine, "group_weigh", [PTR, I64, I64, PTR, PTR])
    work, query, count, scores, ahead = code.args
    w = WORK.read_all(code, work)
    end = code.load(w.ends + query * 4, I32, ROWS)
    lowest, _ = seen_of(code, w, query, code.constant(ROWS))
    stop = rounded(count, WIDE)
    whole = code.min(lowest // ROWS * ROWS, stop)

    def score(token: Val) -> Val:
        return code.load(scores + token * 64, F32, ROWS)

    highest = [code.var(code.zeros(ROWS) - math.inf) for _ in range(4)]
    with code.loop(0, whole, ROWS) as first:
        for i in range(ROWS):
            of = highest[i % 4]
            of.set(code.max(score(first + i), of.get()))
    with code.loop(whole, stop) as token:
        seen = code.splat(code.narrowed_int(token, I32), ROWS) < end
        number = code.select(seen, score(token), -math.inf)
        code.store(number, scores + token * 64)
        highest[0].set(code.max(number, highest[0].get()))
    top = folded([each.get() for each in highest], code.max)
    base = code.select(top > -math.inf, top, 0.0)
    total = code.var(code.zeros(ROWS))
    code.store(code.zeros(ROWS), scores + (-64))
    with code.loop(0, stop, ROWS) as first:
        weights = []
        for i in range(ROWS):
            fetch(code, ahead + (first + i) * shape.token_bytes, shape.token_bytes // 64)
            weights.append(exp2(code, score(first + i) - base, is_short=True))
        total.set(total.get() + folded(weights, lambda a, b: a + b))
        rows = []
        for weight in weights:
            bits = code.narrowed(weight, BF16).bitcast(ir.VectorType(I16, ROWS))
            rows.append(Val(code, code.b.zext(bits.value, ir.VectorType(I32, ROWS))))
        for i, row in enumerate(transposed(rows)):
            code.store(row, scores + first * 64 + i * 64)
    code.store(top, w.tops + query * 4)
    code.store(total.get(), w.totals + query * 4)
    code.give()
    return code


def _write_mix(shape: Shape, call: Call) -> Code:
    """mix(values, count, next_keys, weights, mixed): mixes values with the weights of 16 queries."""
    code = Code(call.module, call.machine, "group_mix", [PTR, I64, PTR, PTR, PTR])
    values, count, next_keys, weights, mixed = code.args
    run = InOrder(shape, code, values, count, next_keys)
    unit, last = MatrixUnit(code), code.array(BF16, WIDE * shape.dim)
    sums = code.array(I8, len(_MIXED) * TILE_BYTES)
    parts = range(shape.dim // WIDE)
    for start in range(0, len(parts), 2):
        chosen = parts[start : start + 2]
        for tile in _MIXED:
            unit.zero(tile)
        with code.loop(0, run.count, WIDE) as first:
            lines, ahead = run.whole(first, last), run.ahead(first)
            for block in range(2):
                tile = weights + (first + block * ROWS) * 64
                held = None
                for i, part in enumerate(chosen):
                    run.load(unit, _VALUES, lines, block, part)
                    for odd in (1, 0) if held else (0, 1):
                        if odd != held:
                            unit.load(_WEIGHTS, tile + -2 * odd, 64)
                        unit.multiply(_MIXED[2 * i + odd], _WEIGHTS, _VALUES)
                        held = odd
                    run.fetch(ahead, block, part)
        for i, part in enumerate(chosen):
            for odd in range(2):
                unit.store(_MIXED[2 * i + odd], sums + odd * TILE_BYTES, 64)
            with code.loop(0, ROWS) as query:
                even, odd = (
                    code.load(sums + at * TILE_BYTES + query * 64, F32, ROWS) for at in (0, 1)
                )
                target = mixed + (query * shape.dim + part * WIDE) * 4
                store_by_turns(code, even, odd, target)
    code.give()
    return code
