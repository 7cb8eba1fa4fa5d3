"""The pieces of work of a call: which rows read which segments of which blocks."""

import dataclasses
from typing import Any

from jaxshare.cpu.amx import FEATURES as AMX
from jaxshare.cpu.ir import BF16, BYTES, FORMATS, I64, PTR, Code, Machine, Record, Val, ir
from jaxshare.cpu.runtime import Call

SEGMENT = 1024
"""Tokens of a segment, the longest run of a block that a piece of work reads."""
_QUERIES = 256
"""Queries of a piece of work, unless one row has more."""
FEW = 4
"""Queries up to which keys and values are read as they lie."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The constants that the code of a kernel has.

    Attributes:
      dim: D.
      pairs: P.
      query, cache: the dtypes of queries and results, and of keys and values.
      scale: of the scores.
      codes: the format of keys and values that are quantised, or "". Their codes are then converted
        to `cache`, a segment at a time, and their scales go with them.
    """

    dim: int
    pairs: int
    query: str
    cache: str
    scale: float
    codes: str = ""

    @property
    def name(self) -> str:
        name = f"{self.dim}.{self.pairs}.{self.query}.{self.cache}.{self.scale.hex()}"
        return name + f".{self.codes}" * bool(self.codes)

    @property
    def scale_types(self) -> list[ir.Type]:
        """The types of the arguments that say where the scales of keys and values are."""
        return [PTR, PTR] if self.codes else []

    @property
    def query_kind(self) -> ir.Type:
        return FORMATS[self.query]

    @property
    def kind(self) -> ir.Type:
        """The format of keys and values."""
        return FORMATS[self.cache]

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys, or values, for one kv head."""
        return self.dim * BYTES[self.kind]

    def padded(self, lanes: int) -> int:
        """D, rounded up to whole vectors."""
        return self.dim + -self.dim % lanes

    def dots_pairs(self, machine: Machine) -> bool:
        """Returns whether the vector unit multiplies pairs of numbers."""
        return self.kind == BF16 and machine.dots_bf16

    def uses_tiles(self, machine: Machine) -> bool:
        """Returns whether many queries are multiplied by the matrix unit."""
        return self.kind == BF16 and machine.features >= AMX


WORK = Record(
    ("rows", "width", "heads", "kv_heads", "group", "slots", "tokens", "num_items", "num_queries"),
    (
        *("q", "keys", "values", "seen", "offsets", "cos", "sin", "out", "lse"),
        *("key_scales", "value_scales"),
        # Listed blocks in the order of the blocks, and what is needed of each of them to merge.
        *("order", "pairs", "items"),
        # For each kv head and query: the rotated query, the largest score, the sum of the weights,
        # the mixed values, and the end of what it sees of its segment.
        *("queries", "tops", "totals", "mixed", "ends"),
    ),
)
"""What all pieces of work of a call share."""
PAIR = Record(("item", "step", "position", "segments"))
"""A block that a row lists: the piece of work with its first segment, the pieces between one segment
and the next, its place among the readers of a piece, and its segments, 0 if it reads nothing."""
ITEM = Record(("block", "first", "tokens", "reader", "readers", "query"))
"""A piece of work: a block, the first token of the segment and their number, the first of its
readers in `order` and their number, and the number of its first query."""
_READERS = Record(("count", "start", "longest"))
"""Of a block: its readers, where they start in `order`, and the most tokens that one of them sees."""


def places_of(shape: Shape, code: Code, queries: Val) -> Val:
    """The number of places that the queries of a piece of work have: where they are not few, as many
    as are multiplied at once, or several times as many."""
    return code.select(queries > FEW, rounded(queries, _at_once(shape, code.machine)), queries)


def _at_once(shape: Shape, machine: Machine) -> int:
    return 16 if shape.uses_tiles(machine) else FEW


def rounded(value: Val, to: int) -> Val:
    return (value + (to - 1)) // to * to


def write_lists(shape: Shape, call: Call, work: Val, blocks: Val, num_blocks: Val) -> list[Val]:
    """Lists the pieces of work, and how many queries they have; returns what is to be freed.

    Args:
      shape, call: of the kernel.
      work: WORK, whose arguments and sizes are set.
      blocks: int32 [R, N], the blocks that rows list.
      num_blocks: B.
    """
    code = call.code
    w = WORK.read_all(code, work)
    pairs = w.rows * w.slots
    order, found, readers = (
        code.external("malloc", PTR, size)
        for size in (pairs * 8, pairs * PAIR.bytes, num_blocks * _READERS.bytes + 8)
    )
    WORK.write(code, work, order=order, pairs=found)
    count = code.call(_write_readers(call), work, blocks, num_blocks, readers)
    items = code.external("malloc", PTR, count * ITEM.bytes + 8)
    WORK.write(code, work, items=items, num_items=count)
    queries = code.call(_write_items(shape, call), work, num_blocks, readers)
    WORK.write(code, work, num_queries=queries)
    return [order, found, readers, items]


def _write_readers(call: Call) -> Code:
    """readers(work, blocks, num_blocks, readers): sorts what rows list by the blocks; returns the
    number of pieces of work."""
    code = Code(call.module, call.machine, "readers", [PTR, PTR, I64, PTR], I64)
    work, blocks, num_blocks, readers = code.args
    w = WORK.read_all(code, work)
    pairs = w.rows * w.slots

    def of_block(block: Val) -> Val:
        return readers + block * _READERS.bytes

    with code.loop(0, num_blocks) as block:
        _READERS.write(code, of_block(block), count=0, longest=0)
    with code.loop(0, pairs) as pair:
        block = code.load_int(blocks + pair * 4)
        # A row's last token sees the most.
        seen = code.load_int(w.seen + (pair * w.width + w.width - 1) * 4)
        listed = w.pairs + pair * PAIR.bytes
        PAIR.write(code, listed, segments=0)
        with code.where((block >= 0) & (block < num_blocks) & (seen > 0)):
            found = _READERS.read_all(code, of_block(block))
            PAIR.write(code, listed, segments=_segments(seen), position=found.count)
            longest = code.max(found.longest, seen)
            _READERS.write(code, of_block(block), count=found.count + 1, longest=longest)
    place, items = code.var(0), code.var(0)
    with code.loop(0, num_blocks) as block:
        found = _READERS.read_all(code, of_block(block))
        _READERS.write(code, of_block(block), start=place.get())
        place.set(place.get() + found.count)
        items.set(items.get() + _segments(found.longest) * _groups(code, w, found.count))
    with code.loop(0, pairs) as pair:
        listed = PAIR.read_all(code, w.pairs + pair * PAIR.bytes)
        with code.where(listed.segments > 0):
            block = code.load_int(blocks + pair * 4)
            start = _READERS.read(code, of_block(block), "start")
            code.store(pair, w.order + (start + listed.position) * 8)
    code.give(items.get())
    return code


def _write_items(shape: Shape, call: Call) -> Code:
    """items(work, num_blocks, readers): lists the pieces of work; returns the number of queries."""
    code = Code(call.module, call.machine, "items", [PTR, I64, PTR], I64)
    work, num_blocks, readers = code.args
    w = WORK.read_all(code, work)
    per_item, at_once = _readers_of_an_item(code, w), _at_once(shape, code.machine)
    item, query = code.var(0), code.var(0)
    with code.loop(0, num_blocks) as block:
        found = _READERS.read_all(code, readers + block * _READERS.bytes)
        groups = _groups(code, w, found.count)
        with code.loop(0, found.count) as i:
            pair = w.pairs + code.load(w.order + (found.start + i) * 8, I64) * PAIR.bytes
            PAIR.write(code, pair, item=item.get() + i // per_item, step=groups)
            PAIR.write(code, pair, position=i % per_item)
        with code.loop(0, _segments(found.longest)) as segment, code.loop(0, groups) as group:
            count = code.min(found.count - group * per_item, per_item)
            queries = count * w.width * w.group
            with code.where(queries > FEW):  # a vector of their sums begins with a line of a cache
                query.set(rounded(query.get(), at_once))
            ITEM.write(
                code,
                w.items + item.get() * ITEM.bytes,
                block=block,
                first=segment * SEGMENT,
                tokens=code.min(found.longest - segment * SEGMENT, SEGMENT),
                reader=found.start + group * per_item,
                readers=count,
                query=query.get(),
            )
            item.set(item.get() + 1)
            query.set(query.get() + places_of(shape, code, queries))
    code.give(rounded(query.get(), at_once))
    return code


def _segments(tokens: Val) -> Val:
    return (tokens + (SEGMENT - 1)) // SEGMENT


def _readers_of_an_item(code: Code, w: Any) -> Val:
    return code.max(code.constant(_QUERIES) // (w.width * w.group), 1)


def _groups(code: Code, w: Any, readers: Val) -> Val:
    """The pieces of work that share a segment."""
    per_item = _readers_of_an_item(code, w)
    return (readers + per_item - 1) // per_item
