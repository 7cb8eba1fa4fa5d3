"""The segments of a pass, and their cuts into items of equal cost."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """The segments of a pass, S at most; those from `Work.count` on have no tiles.

    A segment's tiles are the same for every kv head.

    Attributes:
      table: int32[S, 8], the properties below in this order: a row is one aligned read of 32
        bytes.
    """

    table: Array

    @property
    def query(self) -> Int[Array | np.ndarray, " S"]:
        """The index of the first of its queries among all queries of the pass (`Work.source`)."""
        return self.table[:, 0]

    @property
    def queries(self) -> Int[Array | np.ndarray, " S"]:
        """The number of its queries, at most the span."""
        return self.table[:, 1]

    @property
    def start(self) -> Int[Array | np.ndarray, " S"]:
        """The arena index of its first tile.

        That is the first token of its block that any of its queries sees, rounded down to the
        alignment.
        """
        return self.table[:, 2]

    @property
    def lead(self) -> Int[Array | np.ndarray, " S"]:
        """The block's first token, counted from `start`: tokens of the first tile that precede the
        block. With a sliding window it is negative where the first tile starts inside the block."""
        return self.table[:, 3]

    @property
    def tiles(self) -> Int[Array | np.ndarray, " S"]:
        """The number of tiles it reads."""
        return self.table[:, 4]

    @property
    def full(self) -> Int[Array | np.ndarray, " S"]:
        """The number of its first tiles of which all of its queries see all tokens.

        First in the order of reading; in the others each query has its limit.
        """
        return self.table[:, 5]

    @property
    def tiles_before(self) -> Int[Array | np.ndarray, " S"]:
        """Tiles of all segments before it."""
        return self.table[:, 6]

    @property
    def turn(self) -> Int[Array | np.ndarray, " S"]:
        """The number of its first tiles in the order of tokens, which are read last: those that hold
        tokens before the block, or tokens that are outside some query's sliding window."""
        return self.table[:, 7]


class ItemCuts(NamedTuple):
    """The cuts of all segments of all kv heads, one after the other, into items of equal cost, which
    is counted in tiles.

    Attributes:
      before: int32[S], the cost of all segments before each, of a kv head.
      setup: int32[S], of the start and the end of each.
      whole: int32[], of all segments of a kv head.
      share, rest: int32[], of an item; the first `rest` have one more.
      kv_heads, num_items: the numbers of them.
    """

    before: Array
    setup: Array
    whole: Array
    share: Array
    rest: Array
    kv_heads: int
    num_items: int

    @classmethod
    def of(cls, segments: Segments, setup: int, kv_heads: int, num_items: int) -> "ItemCuts":
        tiles = jnp.asarray(segments.tiles)
        of_each = jnp.where(tiles > 0, setup, 0)
        before = jnp.asarray(segments.tiles_before) + sum_before(of_each)
        whole = before[-1] + of_each[-1] + tiles[-1]
        of_all = whole * kv_heads
        share, rest = lax.div(of_all, num_items), lax.rem(of_all, num_items)
        return cls(before, of_each, whole, share, rest, kv_heads, num_items)

    def tiles(self, segments: Segments, total: Array) -> Array:
        """The first tile of each item and, at last, the end of all, int32[P + 1], counted over the
        kv heads."""
        item = jnp.arange(self.num_items + 1)
        cut = item * self.share + jnp.minimum(item, self.rest)
        head = lax.div(cut, jnp.maximum(self.whole, 1))
        # The setup comes first: a cut inside it is one before the segment.
        inside = (cut - head * self.whole)[:, None] - self.before - self.setup
        return head * total + jnp.sum(jnp.clip(inside, 0, segments.tiles), axis=1, dtype=jnp.int32)

    def item(self, cost: Array) -> Array:
        """The item that has what follows so much cost, counted over the kv heads."""
        long = self.rest * (self.share + 1)
        return jnp.where(
            cost < long,
            lax.div(cost, self.share + 1),
            self.rest + lax.div(cost - long, jnp.maximum(self.share, 1)),
        )


def ceil_div(x: Array, by: int) -> Array:
    """x / by, rounded up, of integers that are not negative. The operators // and % of arrays, which
    round down negative ones too, are nine instructions each, in every kernel that they are fused
    into."""
    return lax.div(x + (by - 1), by)


def sum_before(x: Array) -> Array:
    """The exclusive sum along one axis, as two small sums in place of a chain of them."""
    run = 64
    padded = jnp.pad(x, (0, -x.shape[0] % run)).reshape(-1, run)
    within = jnp.sum(
        jnp.where(jnp.arange(run)[:, None] > jnp.arange(run), padded[:, None], 0), axis=2
    )
    whole = jnp.sum(padded, axis=1)
    runs = jnp.arange(whole.shape[0])
    before = jnp.sum(jnp.where(runs[:, None] > runs, whole[None], 0), axis=1)
    return (within + before[:, None]).reshape(-1)[: x.shape[0]]
