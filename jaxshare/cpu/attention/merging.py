"""The merge of what pieces of work have left of each row, by log-sum-exp (Hydragen section 3.1)."""

import math
from collections.abc import Callable

from jaxshare.cpu.attention.work import ITEM, PAIR, WORK, Shape
from jaxshare.cpu.ir import BYTES, F32, Code, Val
from jaxshare.cpu.mathematics import exp2
from jaxshare.cpu.runtime import Call, begin_task

PER_PIECE = 256
"""Heads of rows that a piece of work merges."""


def write_merge(shape: Shape, has_lse: bool, call: Call) -> Code:
    """merge(work, i): the results of some rows' heads."""
    code = begin_task(call, "merge")
    work, index = code.args
    w = WORK.read_all(code, work)
    lanes = code.machine.lanes
    kind = F32 if has_lse else shape.query_kind
    padded, zero = shape.padded(lanes), code.constant(0.0, F32)
    per_piece = code.max(code.constant(PER_PIECE) // w.heads, 1)
    start = index * per_piece

    def each_part(row: Val, t: Val, head: Val, use: Callable[[Val], None]) -> None:
        """Uses the number of each query that a row's head has had in a piece of work."""
        kv_head, g = head // w.group, head % w.group
        with code.loop(0, w.slots) as slot:
            pair = PAIR.read_all(code, w.pairs + (row * w.slots + slot) * PAIR.bytes)
            with code.loop(0, pair.segments) as segment:
                item = w.items + (pair.item + segment * pair.step) * ITEM.bytes
                query = ITEM.read(code, item, "query") + kv_head * w.num_queries
                use(query + (pair.position * w.width + t) * w.group + g)

    with code.loop(start, code.min(start + per_piece, w.rows * w.width)) as token:
        row, t = token // w.width, token % w.width
        with code.loop(0, w.heads) as head:
            top, total = code.var(code.constant(-math.inf, F32)), code.var(zero)
            sums = [code.var(code.zeros(lanes)) for _ in range(0, padded, lanes)]

            def find_top(query: Val) -> None:
                top.set(code.max(top.get(), code.load(w.tops + query * 4, F32)))

            def add(query: Val) -> None:
                here = code.load(w.totals + query * 4, F32)
                with code.where(here.differs(0.0)):  # it has seen something
                    away = code.load(w.tops + query * 4, F32) - top.get()
                    weight = exp2(code, code.splat(away, lanes), is_short=False)
                    total.set(total.get() + weight.element(0) * here)
                    for i, each in enumerate(sums):
                        place = w.mixed + (query * padded + i * lanes) * 4
                        each.set(code.fma(weight, code.load(place, F32, lanes), each.get()))

            each_part(row, t, head, find_top)
            each_part(row, t, head, add)
            is_none, one = total.get().equals(0.0), code.constant(1.0, F32)
            share = code.splat(one / code.select(is_none, one, total.get()), lanes)
            number = token * w.heads + head
            out = w.out + number * (shape.dim * BYTES[kind])
            for i, each in enumerate(sums):
                left = shape.dim - i * lanes
                taken = None if left >= lanes else code.constant(left)
                value = code.narrowed(each.get() * share, kind)
                code.store(value, out + i * lanes * BYTES[kind], taken)
            if has_lse:
                log = code.intrinsic("log2", total.get()) + top.get()
                natural = code.select(is_none, -math.inf, log * math.log(2))
                code.store(natural, w.lse + number * 4)
    code.give()
    return code
