"""The model of a chip and of kernels on it: the times of attention and of a decode step."""

import collections
import dataclasses
import functools
from collections.abc import Sequence

from jaxshare.pallas.block_attention_mosaic_gpu import SETUP_TILES
from jaxshare.pallas.device import H200 as ASSUMED_DEVICE
from jaxshare.pallas.tiles import built_in_mosaic
from scripts.bench.parts.attention.cases import Case

SPAN, WARPGROUP = 128, 64
"""Queries of a segment, and of a warpgroup, whose products have this many rows whether they are
queries or padding."""


AT_ONCE, MERGED_AT_ONCE = 8, 16
"""Pieces of one query that the merge reads together, and queries that one multiprocessor merges
together: 4 programs of 4 warpgroups."""


PLAN_LAUNCHES = {"4 workers": 32, "64 rows over a prefix": 33}
"""Kernels of the plan and the work items, as `python -m scripts.gpu.compile --parts plan` counts
them in what XLA compiles for an H200."""


LAYER_LAUNCHES, OUTSIDE_LAUNCHES, PRODUCTS = 10, 59, 4
"""Of a decode step with mosaic_gpu, a layer and outside of the layers, counted in the same way;
products of a layer among them."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """A GPU by its data sheet, and what is expected of it.

    Attributes:
      multiprocessors, clock: how many; Hz.
      memory, products: bytes/s and FLOP/s in bfloat16 by the data sheet.
      copies, rate: the parts of them that copies and large products should reach, the ceilings of
        bench_attention.py.
      level_2: bytes/s that all multiprocessors together get out of the level-2 cache.
      port: bytes of a clock that one multiprocessor gets.
      exponentials, lanes: of a clock and multiprocessor.
    """

    name: str = "NVIDIA H200"
    multiprocessors: int = 132
    clock: float = 1.75e9
    memory: float = 4.8e12
    products: float = 989e12
    copies: float = 0.90
    rate: float = 0.72
    level_2: float = 5.5e12
    port: float = 64.0
    exponentials: float = 16.0
    lanes: float = 128.0

    @property
    def copy_rate(self) -> float:
        return self.copies * self.memory

    @property
    def product_rate(self) -> float:
        return self.rate * self.products


@dataclasses.dataclass(frozen=True)
class Assumed:
    """The assumptions that only a measurement can replace.

    Times in seconds.

    Attributes:
      exposed: part of a softmax's time in which the matrix units wait, where two warpgroups take
        turns at them.
      piece: between the last tile of a piece and the first of the next one: results go out, new
        queries come in.
      ends: of the attention kernel: until the first tile is there, and from the last one until what
        was stored is visible.
      launch: from the end of a kernel to the begin of the next one that waits for it.
      latency: of a read that waits for another one, out of the level-2 cache, and of what is done
        with it.
      small: a kernel that does next to nothing, with its launch.
      weights: part of the rate of copies at which products with few rows read their weights.
      host: of a pass: the loop's condition.
    """

    exposed: float
    piece: float
    ends: float
    launch: float
    latency: float
    small: float
    weights: float
    host: float


H200 = Chip()


HOPEFUL = Assumed(
    exposed=0.25,
    piece=0.5e-6,
    ends=2e-6,
    launch=1e-6,
    latency=0.2e-6,
    small=1.3e-6,
    weights=0.95,
    host=10e-6,
)


CAREFUL = Assumed(
    exposed=0.6,
    piece=1.5e-6,
    ends=3e-6,
    launch=2e-6,
    latency=0.4e-6,
    small=1.5e-6,
    weights=0.8,
    host=30e-6,
)


INSTRUCTIONS = 8
"""Of a score in the softmax, beside its exponential."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """Queries of one block that read its tiles together, for one kv head."""

    block: int
    queries: int
    tiles: int


def segments(case: Case, tile: int) -> list[Segment]:
    """In the order of `jaxshare.pallas.work_items`: by block."""
    readers = collections.Counter(
        b for row, count in zip(case.rows, case.count, strict=True) if count for b in row
    )
    found, after = [], case.after
    for block in sorted(readers):
        queries = readers[block] * case.width * case.heads.group
        found += [
            Segment(block, min(SPAN, queries - at), -(-after[block] // tile))
            for at in range(0, queries, SPAN)
        ]
    return found


def cut(tiles: Sequence[int], items: int, setup: int = 0) -> list[list[tuple[int, int]]]:
    """Runs of tiles, laid end to end and cut into items of equal cost, of which each run has `setup`
    tiles more than it has, first: for each item its pieces, as (run, tiles of it)."""
    costs = [t + setup if t else 0 for t in tiles]
    share, rest = divmod(sum(costs), items)
    found, run, left = [], 0, costs[0]
    for item in range(items):
        room, pieces = share + (item < rest), []
        while room:
            if not left:
                run += 1
                left = costs[run]
                continue
            taken = min(room, left)
            # A part of the setup alone is no piece.
            if here := min(left, tiles[run]) - min(left - taken, tiles[run]):
                pieces.append((run, here))
            room, left = room - taken, left - taken
        found.append(pieces)
    return found


@dataclasses.dataclass(frozen=True)
class Attention:
    """One layer's attention with mosaic_gpu: three kernels, one after the other.

    Attributes:
      memory, level_2, item: what the attention kernel could be waiting for: device memory, the
        level-2 cache, and the slowest of its items.
      queries, kernel, merge, launches: the three kernels, and the gaps between them.
      tiles, pieces: how many.
    """

    memory: float
    level_2: float
    item: float
    queries: float
    kernel: float
    merge: float
    launches: float
    tiles: int
    pieces: int

    @property
    def seconds(self) -> float:
        return self.queries + self.kernel + self.merge + self.launches


@functools.cache
def attention(case: Case, chip: Chip, assumed: Assumed) -> Attention:
    """The time of one layer's attention in a pass."""
    heads, dim = case.heads, case.heads.head_dim
    rows, slots = len(case.rows), max(map(len, case.rows))
    tile = built_in_mosaic(ASSUMED_DEVICE, dim, rows * case.width * heads.group).tile
    of_head = segments(case, tile)
    every = of_head * heads.num_kv_heads
    items = cut([s.tiles for s in every], chip.multiprocessors, SETUP_TILES)

    tile_bytes, result = 2 * tile * dim * 2, 4 * (dim + 1)
    piece_bytes, slowest, pieces_of = 0, 0.0, collections.Counter()
    for pieces in items:
        taken, busy = 0, 0.0
        for run, tiles in pieces:
            query_bytes = (SPAN if every[run].queries > WARPGROUP else WARPGROUP) * dim * 2
            taken += tiles * tile_bytes + query_bytes
            busy += _piece(every[run].queries, tiles, tile, dim, chip, assumed)
            piece_bytes += query_bytes + every[run].queries * result
            pieces_of[run] += 1
        slowest = max(slowest, busy, taken / (chip.port * chip.clock))
    all_tiles = sum(s.tiles for s in every)
    memory = case.layer_bytes / chip.copy_rate
    level_2 = (all_tiles * tile_bytes + piece_bytes) / chip.level_2

    # The merge: of each listed block its place, its pieces, and then several of them at a time,
    # each waiting for the one before.
    most = [
        max(pieces_of[head * len(of_head) + s] for head in range(heads.num_kv_heads))
        for s in range(len(of_head))
    ]
    by_block: dict[int, int] = collections.defaultdict(int)
    for segment, pieces in zip(of_head, most, strict=True):
        by_block[segment.block] = max(by_block[segment.block], pieces)
    rounds = max(sum(2 + -(-by_block[b] // AT_ONCE) for b in row) for row in case.rows)
    merged = rows * case.width * heads.num_heads
    waves = -(-merged // (MERGED_AT_ONCE * chip.multiprocessors))
    written = sum(pieces * every[run].queries for run, pieces in pieces_of.items()) * result
    merge = max(waves * rounds * assumed.latency, written / chip.level_2)

    per_row = case.width * heads.group
    rotated = (rows * slots * (per_row + -per_row % 8) + SPAN) * heads.num_kv_heads * dim * 2
    return Attention(
        memory,
        level_2,
        slowest,
        queries=3 * assumed.latency + 2 * rotated / chip.level_2,
        kernel=max(memory, level_2, slowest) + assumed.ends,
        merge=merge,
        launches=3 * assumed.launch,
        tiles=all_tiles,
        pieces=sum(pieces_of.values()),
    )


def _piece(queries: int, tiles: int, tile: int, dim: int, chip: Chip, assumed: Assumed) -> float:
    """The seconds in which one multiprocessor computes `tiles` tiles of a segment whose data is
    there."""
    rows = SPAN if queries > WARPGROUP else WARPGROUP
    product = 4 * rows * tile * dim / (chip.product_rate / chip.multiprocessors)
    softmax = rows * tile * (1 / chip.exponentials + INSTRUCTIONS / chip.lanes) / chip.clock
    # One tile of a narrow segment is computed by one warpgroup, while the other has nothing to fill
    # the gaps with.
    exposed = assumed.exposed if rows == SPAN or tiles > 1 else 1.0
    return tiles * (product + exposed * softmax) + assumed.piece
