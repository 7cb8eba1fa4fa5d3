"""Scores, softmax and mixing of a few queries, which read keys and values as they lie."""

import math

from jaxshare.cpu.attention.tiles import seen_of, write_softmax
from jaxshare.cpu.attention.work import FEW, WORK, Shape
from jaxshare.cpu.ir import BYTES, F32, I64, PTR, Code, Val
from jaxshare.cpu.mathematics import broadcast, sums_of
from jaxshare.cpu.runtime import Call


def write_few(shape: Shape, call: Call) -> Code:
    """few(work, query, queries, keys, values): takes a segment into the sums of 1 to FEW queries."""
    code = Code(call.module, call.machine, "few", [PTR, I64, I64, PTR, PTR])
    work, query, queries, keys, values = code.args
    w = WORK.read_all(code, work)
    lanes = code.machine.lanes
    padded = shape.padded(lanes)
    _, highest = seen_of(code, w, query, queries)
    for number in range(1, FEW + 1):
        tile = _write_tile(shape, call, number)
        with code.where(queries.equals(number)), code.loop(0, highest, lanes) as first:
            start = first * shape.token_bytes
            places = [w.queries + query * (padded * 4), w.mixed + query * (padded * 4)]
            places += [each + query * 4 for each in (w.tops, w.totals, w.ends)]
            count = code.min(highest - first, lanes)
            code.call(tile, *places, keys + start, values + start, first, count)
    code.give()
    return code


def _write_tile(shape: Shape, call: Call, number: int) -> Code:
    """few_tile(queries, mixed, tops, totals, ends, keys, values, first, count): takes the tokens of
    one vector into the sums of so many queries."""
    code = Code(call.module, call.machine, f"few_tile_{number}", [*[PTR] * 7, I64, I64])
    queries, mixed, tops, totals, ends, keys, values, first, count = code.args
    lanes, size = code.machine.lanes, BYTES[shape.kind]
    padded = shape.padded(lanes)
    parts = range(0, padded, lanes)
    # Tokens after the last are read as the last, which is there; no query sees them.
    tokens = [code.min(code.constant(i), count - 1) * shape.token_bytes for i in range(lanes)]

    def line(source: Val, d: int) -> Val:
        left = shape.dim - d
        taken = None if left >= lanes else code.constant(left)
        return code.widened(code.load(source + d * size, shape.kind, lanes, taken), shape.kind)

    products: list[list[Val]] = [[] for _ in range(number)]
    query = {
        (i, d): code.load(queries + (i * padded + d) * 4, F32, lanes)
        for i in range(number)
        for d in parts
    }
    for token in tokens:
        sums: list[Val | None] = [None] * number
        for d in parts:
            key = line(keys + token, d)
            for i in range(number):
                before = sums[i]
                product = (
                    query[i, d] * key if before is None else code.fma(query[i, d], key, before)
                )
                sums[i] = product
        for i, each in enumerate(sums):
            assert each is not None
            products[i].append(each)
    weights, keeps = code.array(F32, number * lanes), []
    for i in range(number):
        end = code.load_int(ends + i * 4) - first
        seen = code.iota(lanes) < code.splat(end, lanes)
        scores = code.select(seen, sums_of(products[i]), -math.inf)
        is_short = shape.cache != "float32"
        power, keep = write_softmax(code, [scores], tops + i * 4, totals + i * 4, is_short)
        code.store(power[0], weights + i * lanes * 4)
        keeps.append(code.splat(keep, lanes))
    for d in parts:
        places = [mixed + (i * padded + d) * 4 for i in range(number)]
        mixtures = [code.load(p, F32, lanes) * k for p, k in zip(places, keeps, strict=True)]
        for at, token in enumerate(tokens):
            value = line(values + token, d)
            for i in range(number):
                weight = broadcast(code, weights + (i * lanes + at) * 4)
                mixtures[i] = code.fma(weight, value, mixtures[i])
        for place, mixture in zip(places, mixtures, strict=True):
            code.store(mixture, place)
    code.give()
    return code
