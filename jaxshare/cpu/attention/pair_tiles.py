"""Scores, softmax and mixing of many queries with the vector unit, which multiplies pairs of bfloat16.

The numbers of a pair lie side by side: of two dimensions of a key, and of the values of two tokens.
"""

import math

from jaxshare.cpu.attention.tiles import AT_ONCE, TILE, for_tiles, write_softmax
from jaxshare.cpu.attention.work import Shape
from jaxshare.cpu.ir import BF16, F32, I16, I32, I64, PTR, Code, Val, ir
from jaxshare.cpu.mathematics import by_turns, transposed
from jaxshare.cpu.runtime import Call

_SIDE = 16
"""Lines of a square of pairs, and pairs of a line."""
_PAIRS_BYTES = 1024
"""Of a square of pairs."""
_PAIRS = ir.VectorType(BF16, 2 * _SIDE)


def write_pair_tiles(shape: Shape, call: Call) -> Code:
    """tiles(work, query, queries, keys, values, scales): takes the tiles of a segment into the sums
    of some queries, of which there are places up to a round number."""
    types = [PTR, I64, I64, PTR, PTR, *shape.scale_types]
    code = Code(call.module, call.machine, "pair_tiles", types)
    wide, padded = shape.padded(2 * _SIDE), shape.padded(_SIDE)
    columns, lines = code.array(BF16, wide * TILE), code.array(BF16, padded * TILE)

    def read(keys: Val, values: Val, count: Val) -> None:
        write_key_pairs(shape, code, keys, count, columns)
        write_value_pairs(shape, code, values, count, lines)

    for_tiles(shape, code, _write_block(shape, call), wide * 2, (columns, lines), read)
    code.give()
    return code


def _write_block(shape: Shape, call: Call) -> Code:
    """block(queries, mixed, tops, totals, ends, columns, lines, first, is_cut, scales): takes a tile
    into the sums of some queries."""
    types = [*[PTR] * 7, I64, I64, *shape.scale_types]
    code = Code(call.module, call.machine, "pair_block", types)
    queries, mixed, tops, totals, ends, columns, lines, first, is_cut, *scales = code.args
    wide, padded = shape.padded(2 * _SIDE), shape.padded(_SIDE)
    weights, keeps = code.array(BF16, AT_ONCE * TILE), []
    parts = range(TILE // _SIDE)
    scores = {(i, p): code.var(code.zeros(_SIDE)) for i in range(AT_ONCE) for p in parts}
    for square in range(wide // (2 * _SIDE)):
        with code.loop(0, _SIDE) as line:
            place = columns + (square * len(parts) * _PAIRS_BYTES) + line * 64
            column = [_pairs(code, place + p * _PAIRS_BYTES) for p in parts]
            for i in range(AT_ONCE):
                pair = _pair(code, queries + (i * wide * 2 + square * 64) + line * 4)
                for p in parts:
                    scores[i, p].set(code.dot_bf16(scores[i, p].get(), pair, column[p]))
    with code.where(is_cut.differs(0)):
        for i in range(AT_ONCE):
            end = code.load_int(ends + i * 4) - first
            for p in parts:
                seen = code.iota(_SIDE) + p * _SIDE < code.splat(end, _SIDE)
                scores[i, p].set(code.select(seen, scores[i, p].get(), -math.inf))
    for i in range(AT_ONCE):
        found = [scores[i, p].get() for p in parts]
        power, keep = write_softmax(code, found, tops + i * 4, totals + i * 4, True, scales)
        for p, vector in enumerate(power):
            target = weights + (i * TILE + p * _SIDE) * 2
            code.store(code.narrowed(vector, BF16), target)
        keeps.append(code.splat(keep, _SIDE))
    columns_of_values = padded // _SIDE
    for start in range(0, columns_of_values, 4):
        chosen = range(start, min(start + 4, columns_of_values))
        places = {
            (i, d): mixed + (i * padded + d * _SIDE) * 4 for i in range(AT_ONCE) for d in chosen
        }
        sums = {
            at: code.var(code.load(place, F32, _SIDE) * keeps[at[0]])
            for at, place in places.items()
        }
        for square in range(TILE // (2 * _SIDE)):
            with code.loop(0, _SIDE) as line:
                place = lines + (square * columns_of_values * _PAIRS_BYTES) + line * 64
                value = {d: _pairs(code, place + d * _PAIRS_BYTES) for d in chosen}
                for i in range(AT_ONCE):
                    pair = _pair(code, weights + (i * TILE * 2 + square * 64) + line * 4)
                    for d in chosen:
                        sums[i, d].set(code.dot_bf16(sums[i, d].get(), pair, value[d]))
        for at, total in sums.items():
            code.store(total.get(), places[at])
    code.give()
    return code


def _pairs(code: Code, place: Val) -> Val:
    """A line of pairs."""
    return code.load(place, I32, _SIDE).bitcast(_PAIRS)


def _pair(code: Code, place: Val) -> Val:
    """A pair in all places of a line."""
    return code.splat(code.load(place, I32), _SIDE).bitcast(_PAIRS)


def write_key_pairs(shape: Shape, code: Code, keys: Val, count: Val, target: Val) -> None:
    """Writes the keys of a tile as squares [D / 32, TILE / 16]: in each, the pairs of numbers of 16
    tokens side by side.

    Tokens after the last have the keys of the last: no query sees them.
    """
    pairs = ir.VectorType(I32, _SIDE)
    with code.loop(0, TILE // _SIDE) as block:
        token = block * _SIDE
        rows = [keys + code.min(token + i, count - 1) * shape.token_bytes for i in range(_SIDE)]
        for part, d in enumerate(range(0, shape.dim, 2 * _SIDE)):
            left = shape.dim - d
            taken = None if left >= 2 * _SIDE else code.constant(left)
            loaded = [code.load(row + d * 2, BF16, 2 * _SIDE, taken) for row in rows]
            place = target + (block + part * (TILE // _SIDE)) * _PAIRS_BYTES
            for i, line in enumerate(transposed([each.bitcast(pairs) for each in loaded])):
                code.store(line, place + i * 64)


def write_value_pairs(shape: Shape, code: Code, values: Val, count: Val, target: Val) -> None:
    """Writes the values of a tile as squares [TILE / 32, D / 16]: in each, the values of
    pairs of tokens side by side."""
    columns = shape.padded(_SIDE) // _SIDE
    order = by_turns(range(_SIDE), _SIDE)
    with code.loop(0, TILE // 2) as pair:
        rows = [values + code.min(pair * 2 + i, count - 1) * shape.token_bytes for i in range(2)]
        place = target + pair // _SIDE * (columns * _PAIRS_BYTES) + pair % _SIDE * 64
        for column, d in enumerate(range(0, shape.dim, _SIDE)):
            left = shape.dim - d
            taken = None if left >= _SIDE else code.constant(left)
            upper, lower = (code.load(row + d * 2, I16, _SIDE, taken) for row in rows)
            code.store(upper.shuffled(lower, order), place + column * _PAIRS_BYTES)
