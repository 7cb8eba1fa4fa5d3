"""One piece of work: the queries of some rows go over a segment of a block."""

import dataclasses
import math
from typing import Any

from jaxshare.cpu.amx import ROWS, TILE_BYTES
from jaxshare.cpu.attention.amx_tiles import write_amx_tiles
from jaxshare.cpu.attention.codes import widened_segment
from jaxshare.cpu.attention.few_queries import write_few
from jaxshare.cpu.attention.few_tiles import write_few_tiles
from jaxshare.cpu.attention.group_tiles import fits, write_group_tiles
from jaxshare.cpu.attention.pair_tiles import write_pair_tiles
from jaxshare.cpu.attention.tiles import write_tiles
from jaxshare.cpu.attention.unit import serves
from jaxshare.cpu.attention.work import (
    FEW,
    ITEM,
    SEGMENT,
    WORK,
    Shape,
    places_of,
)
from jaxshare.cpu.ir import BYTES, F32, I32, I64, PTR, VOID, Code, Val
from jaxshare.cpu.mathematics import transposed
from jaxshare.cpu.runtime import Call, begin_task

_LOG2_E = math.log2(math.e)


def write_piece(shape: Shape, call: Call) -> Code:
    """piece(work, i): the segment of one piece of work, for one kv head."""
    pairs, tiles = shape.dots_pairs(call.machine), shape.uses_tiles(call.machine)
    write_many = write_amx_tiles if tiles else write_pair_tiles if pairs else write_tiles
    on_tiles = serves(shape, call.machine)
    most = 1 if on_tiles else FEW
    few, many = write_few(shape, call, most), write_many(shape, call)
    prepare = write_queries(shape, call, pairs)
    prepare_many = write_queries(shape, call, True, turns=True) if tiles else prepare
    code = begin_task(call, "piece")
    work, index = code.args
    w = WORK.read_all(code, work)
    item = ITEM.read_all(code, w.items + index // w.kv_heads * ITEM.bytes)
    kv_head = index % w.kv_heads
    query = kv_head * w.num_queries + item.query
    count = item.readers * w.width * w.group
    prepared = kv_head, query, item.first, item.reader, item.readers

    def run(condition: Val, first: Code, read: Code, *more: Val) -> None:
        with code.where(condition):
            code.call(first, work, *prepared)
            if not shape.codes:
                code.call(read, work, query, count, *_places(shape, code, w, item, kv_head), *more)
                return
            start = _start(code, w, item, kv_head)
            segment = widened_segment(shape, code, w, start, item.tokens)
            code.call(read, work, query, count, *segment)
            code.external("free", VOID, segment[0])

    run(count <= most, prepare, few)
    is_many = count > FEW
    if on_tiles:
        after = code.min(index + 1, w.num_items * w.kv_heads - 1)
        following = ITEM.read_all(code, w.items + after // w.kv_heads * ITEM.bytes)
        next_keys, _ = _places(shape, code, w, following, after % w.kv_heads)
        some = (count > most) & (count <= FEW)
        prepare_some = prepare if pairs else write_queries(shape, call, True)
        run(some, prepare_some, write_few_tiles(shape, call), next_keys)
        is_group = fits(count, item.tokens)
        run(is_many & is_group, prepare_many, write_group_tiles(shape, call), next_keys)
        is_many = is_many & is_group.equals(0)
    run(is_many, prepare_many, many)
    code.give()
    return code


def _places(shape: Shape, code: Code, w: Any, item: Any, kv_head: Val) -> tuple[Val, Val]:
    """Where the keys and the values of a segment begin, for one kv head."""
    start = _start(code, w, item, kv_head)
    return w.keys + start * shape.token_bytes, w.values + start * shape.token_bytes


def _start(code: Code, w: Any, item: Any, kv_head: Val) -> Val:
    """The first token of a segment, for one kv head, counted over all of the arena's."""
    return kv_head * w.tokens + code.load_int(w.offsets + item.block * 4) + item.first


def write_queries(shape: Shape, call: Call, rounds: bool, *, turns: bool = False) -> Code:
    """queries(work, kv_head, query, first, reader, readers): rotates the queries of a piece, and
    empties their sums. Queries of places after the last are 0, and see all, so that no tile is cut
    for them.

    Args:
      shape, call: of the kernel.
      rounds: write queries as bfloat16.
      turns: write them turned around, 16 by 16, as the matrix unit takes them.
    """
    name = "turned_queries" if turns else "rounded_queries" if rounds else "queries"
    code = Code(call.module, call.machine, name, [PTR, I64, I64, I64, I64, I64])
    work, kv_head, query, first, reader, readers = code.args
    w = WORK.read_all(code, work)
    size = code.machine.lanes * (2 if rounds else 1)
    target = _Target(shape, code, 2 if rounds else 4, shape.padded(size))
    at = code.var(query)
    with code.loop(0, readers) as i:
        pair = code.load(w.order + (reader + i) * 8, I64)
        row = pair // w.slots
        with code.loop(0, w.width) as t:
            token = pair * w.width + t
            end = code.load_int(w.seen + token * 4) - first
            angles = [each + token * (shape.pairs * 4) for each in (w.cos, w.sin)]
            with code.loop(0, w.group) as g:
                head = (row * w.width + t) * w.heads + kv_head * w.group + g
                source = w.q + head * (shape.dim * BYTES[shape.query_kind])
                target.clear(w, at.get())
                target.rotate(source, w, at.get(), *angles)
                _empty(shape, code, w, at.get(), code.max(code.min(end, SEGMENT), 0))
                at.set(at.get() + 1)
    count = at.get() - query
    with code.loop(count, places_of(shape, code, count)) as i:
        target.clear(w, query + i)
        _empty(shape, code, w, query + i, code.constant(SEGMENT))
    if turns:
        turn, size = _write_turn(call, target.padded * 2 // 64), ROWS * target.padded * 2
        with code.loop(0, (count + (ROWS - 1)) // ROWS) as group:
            code.call(turn, w.queries + query * (target.padded * 2) + group * size)
    code.give()
    return code


def _write_turn(call: Call, parts: int) -> Code:
    """turn_queries(numbers): turns 16 rows of `parts` times 16 numbers of 32 bits around, each part
    becoming a square."""
    code = Code(call.module, call.machine, "turn_queries", [PTR])
    (numbers,) = code.args
    temporary = code.array(I32, parts * ROWS * ROWS)
    with code.loop(0, parts) as part:
        rows = [numbers + part * 64 + i * (parts * 64) for i in range(ROWS)]
        square = [code.load(row, I32, ROWS) for row in rows]
        for i, line in enumerate(transposed(square)):
            code.store(line, temporary + part * TILE_BYTES + i * 64)
    with code.loop(0, parts * TILE_BYTES, 64) as at:
        code.store(code.load(temporary + at, I32, ROWS), numbers + at)
    code.give()
    return code


def _empty(shape: Shape, code: Code, w: Any, query: Val, end: Val) -> None:
    """Nothing is summed yet for a query that sees the tokens of the segment before `end`."""
    lanes = code.machine.lanes
    padded = shape.padded(lanes)
    code.store(code.constant(-math.inf, F32), w.tops + query * 4)
    code.store(code.constant(0.0, F32), w.totals + query * 4)
    code.store(code.narrowed_int(end, I32), w.ends + query * 4)
    for d in range(0, padded, lanes):
        code.store(code.zeros(lanes), w.mixed + (query * padded + d) * 4)


@dataclasses.dataclass(frozen=True)
class _Target:
    """Where rotated queries are written: `padded` numbers of `size` bytes each."""

    shape: Shape
    code: Code
    size: int
    padded: int

    def _place(self, w: Any, query: Val, d: int) -> Val:
        return w.queries + (query * self.padded + d) * self.size

    def clear(self, w: Any, query: Val) -> None:
        """Writes zeros where a query has numbers after its last."""
        code, lanes = self.code, self.code.machine.lanes
        for d in range(0, self.padded, lanes):
            self._store(code.zeros(lanes), self._place(w, query, d), None)

    def rotate(self, source: Val, w: Any, query: Val, cos: Val, sin: Val) -> None:
        """Rotates a query, and scales it so that its scores are powers of two."""
        shape, code, lanes = self.shape, self.code, self.code.machine.lanes
        kind, size = shape.query_kind, BYTES[shape.query_kind]
        scale = code.splat(code.constant(shape.scale * _LOG2_E, F32), lanes)

        def count(left: int) -> Val | None:
            return None if left >= lanes else code.constant(left)

        def load(at: int, left: int) -> Val:
            number = code.load(source + at * size, kind, lanes, count(left))
            return code.widened(number, kind) * scale

        for p in range(0, shape.pairs, lanes):
            left = shape.pairs - p
            c, s = (code.load(each + p * 4, F32, lanes, count(left)) for each in (cos, sin))
            a, b = load(p, left), load(shape.pairs + p, left)
            self._store(a * c - b * s, self._place(w, query, p), count(left))
            self._store(b * c + a * s, self._place(w, query, shape.pairs + p), count(left))
        for d in range(2 * shape.pairs, shape.dim, lanes):
            left = shape.dim - d
            self._store(load(d, left), self._place(w, query, d), count(left))

    def _store(self, value: Val, place: Val, count: Val | None) -> None:
        kind = self.shape.kind if self.size == 2 else F32
        self.code.store(self.code.narrowed(value, kind), place, count)
