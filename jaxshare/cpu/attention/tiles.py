"""Scores, softmax and mixing of many queries with the vector unit."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxshare.cpu.attention.work import FEW, SEGMENT, WORK, Shape, rounded
from jaxshare.cpu.ir import BYTES, F32, I64, PTR, Code, Val
from jaxshare.cpu.mathematics import broadcast, exp2, folded, reduced, transposed
from jaxshare.cpu.runtime import Call

TILE = 64
"""Tokens of a tile."""
AT_ONCE = FEW
"""Queries that are multiplied together."""


def write_tiles(shape: Shape, call: Call) -> Code:
    """tiles(work, query, queries, keys, values, scales): takes the tiles of a segment into the sums
    of some queries, of which there are places up to a round number."""
    types = [PTR, I64, I64, PTR, PTR, *shape.scale_types]
    code = Code(call.module, call.machine, "tiles", types)
    padded = shape.padded(code.machine.lanes)
    # The keys of a tile are transposed, so that a vector has the scores of several tokens.
    columns, lines = code.array(F32, padded * TILE), code.array(F32, padded * TILE)

    def read(keys: Val, values: Val, count: Val) -> None:
        _transpose(shape, code, keys, count, columns)
        _widen(shape, code, values, count, lines)

    for_tiles(shape, code, _write_block(shape, call), padded * 4, (columns, lines), read)
    code.give()
    return code


def for_tiles(
    shape: Shape,
    code: Code,
    block: Code,
    query_bytes: int,
    tile: tuple[Val, Val],
    read: Callable[[Val, Val, Val], None],
) -> None:
    """Writes `tiles`, whose arguments `code` has.

    Args:
      shape: of the kernel.
      block: takes a tile into the sums of some queries.
      query_bytes: of a rotated query.
      tile: where the keys and values of a tile are put.
      read: puts them there: (keys, values, their number).
    """
    work, query, queries, keys, values, *scales = code.args
    w = WORK.read_all(code, work)
    padded = shape.padded(code.machine.lanes)
    lowest, highest = seen_of(code, w, query, queries)
    with code.loop(0, highest, TILE) as first:
        start = first * shape.token_bytes
        read(keys + start, values + start, code.min(highest - first, TILE))
        is_cut = code.as_int(lowest - first < TILE)
        with code.loop(0, rounded(queries, AT_ONCE), AT_ONCE) as i:
            at = query + i
            places = [w.queries + at * query_bytes, w.mixed + at * (padded * 4)]
            places += [each + at * 4 for each in (w.tops, w.totals, w.ends)]
            code.call(block, *places, *tile, first, is_cut, *(each + first * 4 for each in scales))


def seen_of(code: Code, w: Any, query: Val, queries: Val) -> tuple[Val, Val]:
    """The lowest and the highest end of what these queries see of a segment."""
    lowest, highest = code.var(SEGMENT), code.var(0)
    with code.loop(0, queries) as i:
        end = code.load_int(w.ends + (query + i) * 4)
        lowest.set(code.min(lowest.get(), end))
        highest.set(code.max(highest.get(), end))
    return lowest.get(), highest.get()


def _transpose(shape: Shape, code: Code, keys: Val, count: Val, target: Val) -> None:
    """Writes the keys [count, D] of a tile as float32 [D, TILE].

    Tokens after the last have the keys of the last: no query sees them.
    """
    lanes, kind, size = code.machine.lanes, shape.kind, BYTES[shape.kind]
    with code.loop(0, rounded(count, lanes), lanes) as token:
        rows = [keys + code.min(token + i, count - 1) * shape.token_bytes for i in range(lanes)]
        for d in range(0, shape.dim, lanes):
            left = shape.dim - d
            taken = None if left >= lanes else code.constant(left)
            loaded = [code.load(row + d * size, kind, lanes, taken) for row in rows]
            square = transposed([code.widened(each, kind) for each in loaded])
            for i, column in enumerate(square[: min(left, lanes)]):
                code.store(column, target + ((d + i) * TILE + token) * 4)


def _widen(shape: Shape, code: Code, values: Val, count: Val, target: Val) -> None:
    """Writes the values [count, D] of a tile as float32 [TILE, D], padded to whole vectors."""
    lanes, kind = code.machine.lanes, shape.kind
    padded = shape.padded(lanes)
    with code.loop(0, TILE) as token:
        source = values + code.min(token, count - 1) * shape.token_bytes
        for d in range(0, shape.dim, lanes):
            left = shape.dim - d
            taken = None if left >= lanes else code.constant(left)
            value = code.load(source + d * BYTES[kind], kind, lanes, taken)
            code.store(code.widened(value, kind), target + (token * padded + d) * 4)


def _write_block(shape: Shape, call: Call) -> Code:
    """block(queries, mixed, tops, totals, ends, columns, lines, first, is_cut, scales): takes a tile
    into the sums of some queries."""
    types = [*[PTR] * 7, I64, I64, *shape.scale_types]
    code = Code(call.module, call.machine, "block", types)
    queries, mixed, tops, totals, ends, columns, lines, first, is_cut, *of_tile = code.args
    lanes, padded = code.machine.lanes, shape.padded(code.machine.lanes)
    parts = range(0, TILE, lanes)
    # As many queries at once as there are registers for their scores.
    at_once = AT_ONCE if code.machine.registers >= 32 else 1
    weights, scales = code.array(F32, AT_ONCE * TILE), code.array(F32, AT_ONCE)
    for group in range(0, AT_ONCE, at_once):
        chosen = range(group, group + at_once)
        scores = {(i, p): code.var(code.zeros(lanes)) for i in chosen for p in parts}
        with code.loop(0, shape.dim) as d:
            column = {p: code.load(columns + (d * TILE + p) * 4, F32, lanes) for p in parts}
            for i in chosen:
                number = broadcast(code, queries + (d + i * padded) * 4)
                for p in parts:
                    scores[i, p].set(code.fma(number, column[p], scores[i, p].get()))
        with code.where(is_cut.differs(0)):
            for i in chosen:
                end = code.load_int(ends + i * 4) - first
                for p in parts:
                    seen = code.iota(lanes) + p < code.splat(end, lanes)
                    scores[i, p].set(code.select(seen, scores[i, p].get(), -math.inf))
        for i in chosen:
            found = [scores[i, p].get() for p in parts]
            is_short = shape.cache != "float32"
            sums = tops + i * 4, totals + i * 4
            power, keep = write_softmax(code, found, *sums, is_short, of_tile)
            for p, vector in zip(parts, power, strict=True):
                code.store(vector, weights + (i * TILE + p) * 4)
            code.store(keep, scales + i * 4)
    _mix(code, mixed, weights, scales, lines, padded)
    code.give()
    return code


def write_softmax(
    code: Code, scores: list[Val], top: Val, total: Val, is_short: bool, scales: Sequence[Val] = ()
) -> tuple[list[Val], Val]:
    """Takes scores into a query's running softmax, whose largest score and total are in memory.

    Args:
      code: of the function.
      scores: of the tokens of a tile.
      top, total: where those are.
      is_short: the weights are rounded.
      scales: where the scales of the tile's keys and values are, if these are codes.

    Returns:
      The weights, and the factor of what was mixed before.
    """
    lanes = code.machine.lanes

    def scaled(numbers: list[Val], place: Val) -> list[Val]:
        return [x * code.load(place + i * (lanes * 4), F32, lanes) for i, x in enumerate(numbers)]

    scores = scaled(scores, scales[0]) if scales else scores
    before = code.load(top, F32)
    largest = code.max(before, reduced(folded(scores, code.max), code.max))
    under = code.select(largest > -math.inf, largest, code.constant(0.0, F32))
    power = [exp2(code, x - code.splat(under, lanes), is_short=is_short) for x in scores]
    keep = exp2(code, code.splat(before - under, lanes), is_short=False).element(0)
    added = reduced(folded(power, lambda a, b: a + b), lambda a, b: a + b)
    code.store(code.load(total, F32) * keep + added, total)
    code.store(largest, top)
    return scaled(power, scales[1]) if scales else power, keep


def _mix(code: Code, mixed: Val, weights: Val, scales: Val, lines: Val, padded: int) -> None:
    """Scales the mixed values of some queries, and adds those of a tile with their weights."""
    lanes = code.machine.lanes
    at_once = 4 * lanes if code.machine.registers >= 32 else 2 * lanes
    for start in range(0, padded, at_once):
        parts = range(start, min(start + at_once, padded), lanes)
        sums = {}
        for i in range(AT_ONCE):
            keep = broadcast(code, scales + i * 4)
            for d in parts:
                before = code.load(mixed + (i * padded + d) * 4, F32, lanes)
                sums[i, d] = code.var(before * keep)
        with code.loop(0, TILE) as token:
            value = {d: code.load(lines + (token * padded + d) * 4, F32, lanes) for d in parts}
            for i in range(AT_ONCE):
                weight = broadcast(code, weights + (token + i * TILE) * 4)
                for d in parts:
                    sums[i, d].set(code.fma(weight, value[d], sums[i, d].get()))
        for (i, d), total in sums.items():
            code.store(total.get(), mixed + (i * padded + d) * 4)
