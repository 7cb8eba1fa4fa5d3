"""Scores, softmax and mixing of a few queries, which read keys and values as they lie."""

import math
from collections.abc import Sequence

from jaxshare.cpu.attention.tiles import TILE, seen_of, write_softmax
from jaxshare.cpu.attention.work import WORK, Shape
from jaxshare.cpu.ir import BF16, BYTES, F32, I16, I32, I64, PTR, Code, Val, Var, ir
from jaxshare.cpu.mathematics import LaneSums, broadcast, by_turns
from jaxshare.cpu.runtime import Call

_LINE_BYTES = 64
"""Of a line of a processor's caches."""


def write_few(shape: Shape, call: Call, most: int) -> Code:
    """few(work, query, queries, keys, values, scales): takes a segment into the sums of 1 to `most`
    queries."""
    types = [PTR, I64, I64, PTR, PTR, *shape.scale_types]
    code = Code(call.module, call.machine, "few", types)
    work, query, queries, keys, values, *scales = code.args
    w = WORK.read_all(code, work)
    lanes = code.machine.lanes
    rounds = shape.dots_pairs(code.machine)
    line = shape.padded(2 * lanes) * 2 if rounds else shape.padded(lanes) * 4
    _, highest = seen_of(code, w, query, queries)
    for number in range(1, most + 1):
        tile = _write_tile(shape, call, number)
        with code.where(queries.equals(number)), code.loop(0, highest, TILE) as first:
            start = first * shape.token_bytes
            places = [w.queries + query * line, w.mixed + query * (shape.padded(lanes) * 4)]
            places += [each + query * 4 for each in (w.tops, w.totals, w.ends)]
            count = code.min(highest - first, TILE)
            at = [each + first * 4 for each in scales]
            code.call(tile, *places, keys + start, values + start, first, count, *at)
    code.give()
    return code


def _write_tile(shape: Shape, call: Call, number: int) -> Code:
    """few_tile(queries, mixed, tops, totals, ends, keys, values, first, count, scales): takes the
    tokens of a tile into the sums of so many queries."""
    types = [*[PTR] * 7, I64, I64, *shape.scale_types]
    code = Code(call.module, call.machine, f"few_tile_{number}", types)
    queries, mixed, tops, totals, ends, keys, values, first, count, *scales = code.args
    lanes = code.machine.lanes
    tile = (_PairTile if shape.dots_pairs(code.machine) else _FewTile)(shape, code, number)
    scores, weights = (code.array(F32, number * TILE) for _ in range(2))

    def tokens(source: Val, start: Val) -> list[Val]:
        # Those after the last are read as the last, which is there; no query sees them.
        places = [code.min(start + i, count - 1) for i in range(lanes)]
        return [source + place * shape.token_bytes for place in places]

    query = tile.load_queries(queries)
    with code.loop(0, count, lanes) as start:
        for i, products in enumerate(tile.scores(query, tokens(keys, start))):
            code.store(products, scores + (start + i * TILE) * 4)
    keeps = []
    for i in range(number):
        end = code.load_int(ends + i * 4) - first
        found = []
        for p in range(0, TILE, lanes):
            seen = code.iota(lanes) + p < code.splat(code.min(end, count), lanes)
            products = code.load(scores + (i * TILE + p) * 4, F32, lanes)
            found.append(code.select(seen, products, -math.inf))
        is_short = shape.cache != "float32"
        power, keep = write_softmax(code, found, tops + i * 4, totals + i * 4, is_short, scales)
        for p, part in enumerate(power):
            tile.store_weights(part, weights, i * TILE + p * lanes)
        keeps.append(code.splat(keep, lanes))
    mixtures = tile.load_mixed(mixed, keeps)
    with code.loop(0, count, lanes) as start:
        tile.mix(mixtures, weights, start, tokens(values, start))
    tile.store_mixed(mixtures, mixed)
    code.give()
    return code


class _FewTile:
    """The products of a tile, in float32."""

    def __init__(self, shape: Shape, code: Code, number: int):
        self.shape, self.code, self.number = shape, code, number
        self.lanes = code.machine.lanes
        self.parts = range(0, shape.padded(self.lanes), self.lanes)

    def load_queries(self, queries: Val) -> list[list[Val]]:
        """The vectors of each query."""
        return self._vectors(queries, F32, self.parts)

    def scores(self, query: list[list[Val]], keys: Sequence[Val]) -> list[Val]:
        """The products of each query with all keys."""
        totals = [LaneSums() for _ in range(self.number)]
        for key in keys:
            self._fetch_ahead(key)
            line = [self._line(key, d) for d in self.parts]
            for total, numbers in zip(totals, query, strict=True):
                product = numbers[0] * line[0]
                for a, b in zip(numbers[1:], line[1:], strict=True):
                    product = self.code.fma(a, b, product)
                total.add(product)
        return [total.total for total in totals]

    def store_weights(self, weights: Val, place: Val, at: int) -> None:
        """Stores weights for `mix`."""
        self.code.store(weights, place + at * 4)

    def load_mixed(self, mixed: Val, keeps: Sequence[Val]) -> list[list[Var]]:
        """The mixed values of the queries, scaled."""
        vectors = self._vectors(mixed, F32, self.parts)
        return [
            [self.code.var(vector * keep) for vector in line]
            for line, keep in zip(vectors, keeps, strict=True)
        ]

    def mix(
        self, mixtures: list[list[Var]], weights: Val, start: Val, values: Sequence[Val]
    ) -> None:
        """Adds values with their weights."""
        for at, token in enumerate(values):
            self._fetch_ahead(token)
            line = [self._line(token, d) for d in self.parts]
            for i, mixture in enumerate(mixtures):
                weight = broadcast(self.code, weights + (start + i * TILE + at) * 4)
                for mixed, numbers in zip(mixture, line, strict=True):
                    mixed.set(self.code.fma(weight, numbers, mixed.get()))

    def store_mixed(self, mixtures: list[list[Var]], mixed: Val) -> None:
        """Stores the mixed values of the queries."""
        for i, mixture in enumerate(mixtures):
            for d, part in zip(self.parts, mixture, strict=True):
                self.code.store(part.get(), mixed + (i * len(self.parts) * self.lanes + d) * 4)

    def _vectors(self, source: Val, kind: ir.Type, parts: range) -> list[list[Val]]:
        size, lanes = len(parts) * parts.step, parts.step
        return [
            [self.code.load(source + (i * size + d) * BYTES[kind], kind, lanes) for d in parts]
            for i in range(self.number)
        ]

    def _fetch_ahead(self, token: Val) -> None:
        """Has the same token of the next tile brought to the caches: a processor that looks ahead by
        itself does not look as far."""
        ahead = token + TILE * self.shape.token_bytes
        for line in range(0, self.shape.token_bytes, _LINE_BYTES):
            self.code.prefetch(ahead + line)

    def _line(self, source: Val, d: int) -> Val:
        """Numbers of a key or a value."""
        kind, taken = self.shape.kind, self._taken(d, self.lanes)
        line = self.code.load(source + d * BYTES[kind], kind, self.lanes, taken)
        return self.code.widened(line, kind)

    def _taken(self, d: int, lanes: int) -> Val | None:
        left = self.shape.dim - d
        return None if left >= lanes else self.code.constant(left)


class _PairTile(_FewTile):
    """The products of a tile, of pairs of bfloat16 with float32 sums."""

    def __init__(self, shape: Shape, code: Code, number: int):
        super().__init__(shape, code, number)
        self._wide = 2 * self.lanes
        self._wide_parts = range(0, shape.padded(self._wide), self._wide)

    def load_queries(self, queries: Val) -> list[list[Val]]:
        return self._vectors(queries, BF16, self._wide_parts)

    def scores(self, query: list[list[Val]], keys: Sequence[Val]) -> list[Val]:
        code, wide = self.code, self._wide
        totals = [LaneSums() for _ in range(self.number)]
        for key in keys:
            self._fetch_ahead(key)
            line = [
                code.load(key + d * 2, BF16, wide, self._taken(d, wide)) for d in self._wide_parts
            ]
            for total, numbers in zip(totals, query, strict=True):
                product = code.zeros(self.lanes)
                for a, b in zip(numbers, line, strict=True):
                    product = code.dot_bf16(product, a, b)
                total.add(product)
        return [total.total for total in totals]

    def store_weights(self, weights: Val, place: Val, at: int) -> None:
        self.code.store(self.code.narrowed(weights, BF16), place + at * 2)

    def mix(
        self, mixtures: list[list[Var]], weights: Val, start: Val, values: Sequence[Val]
    ) -> None:
        """Adds values with their weights.

        The numbers of two tokens are put side by side, as are their weights.
        """
        code, lanes, wide = self.code, self.lanes, self._wide
        pairs = ir.VectorType(BF16, wide)
        order = by_turns(range(lanes), wide)
        halves = (order, [lane + lanes for lane in order])
        for at in range(0, lanes, 2):
            beside = []
            for token in values[at : at + 2]:
                self._fetch_ahead(token)
            for d in self._wide_parts:
                first, second = (
                    code.load(token + d * 2, I16, wide, self._taken(d, wide))
                    for token in values[at : at + 2]
                )
                beside += [first.shuffled(second, half).bitcast(pairs) for half in halves]
            for i, mixture in enumerate(mixtures):
                weight = code.load(weights + (start + i * TILE + at) * 2, I32)
                both = code.splat(weight, lanes).bitcast(pairs)
                # Numbers after the last part are none.
                for mixed, numbers in zip(mixture, beside, strict=False):
                    mixed.set(code.dot_bf16(mixed.get(), both, numbers))
