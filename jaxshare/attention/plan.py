"""Plan: what one forward pass does to the blocks, made once inside jit and used by every layer.

Starts, positions, rotations, visible lengths and the tiles to read follow from the cache's lengths,
the layout and how many new tokens each row brings (design: Hogwild! sections 3.4 and appendix B,
Hydragen section 3).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float32, Int32

from jaxshare.attention.pass_checks import check_pass
from jaxshare.attention.tiling import (
    Reads,
    Tiles,
    Tiling,
    group_tiles,
    private_tiles,
    shared_tiles,
)
from jaxshare.cache import KVCache
from jaxshare.faults import Fault
from jaxshare.layout import Layout
from jaxshare.rope import Rope
from jaxshare.sharding import CyclicSharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """One pass over a cache. R rows, N listed blocks of a row, T new tokens of a row, B blocks, P
    rotated pairs.

    A row that brings no token sees nothing and costs nothing; what attention returns for it is
    finite and means nothing, as it does for the padding after a row's last real token.

    Attributes:
      blocks: as in the layout.
      count: real new tokens of each row, less those that would overflow the written block.
      ahead: new tokens of the written block that other rows bring before them.
      positions: of the new tokens, each in its own row's order.
      starts: where each listed block starts in its row's order.
      visible: tokens of each listed block that the row's first new token sees.
      own: the block the row writes: new token t sees t more of it than the first does.
      phases: of the cache.
      before, lengths: block lengths before and after this pass's appends.
      offsets, local_lengths: where in the arenas each block's tokens are after the appends, and
        how many: those that this device keeps.
      seen: how many of those each new token sees, the first ones.
      unseen: how many of those it does not see, because they are outside its window; None where
        there is no window.
      write_at: arena index of each row's first new token, counted over all devices.
      write_to: the index in this device's arenas of each new token; their size where it keeps none,
        and for padding.
      key_cos, key_sin: rotation of new keys to their index in their block.
      query_cos, query_sin: rotation of new queries towards each listed block.
      shared: blocks that more rows see than the largest group has, as tiles that all rows read
        together.
      grouped: for each group of the layout, the other blocks that two rows or more see, as tiles
        that those rows read together.
      private: blocks that one row sees, as tiles that it reads alone.
      faults: `Fault` flags.
      rope: of the layers that this is the plan of (static).
      token_sharding: of the cache (static).
      window: tokens that a token sees, itself included, by their positions in its row's order; 0
        for all (static).
      work: what a backend makes of the plan for all layers (`jaxshare.attention.api.with_work`), by
        the numbers that it depends on; where it is missing each layer makes its own.
    """

    blocks: Int32[Array, "R N"]
    count: Int32[Array, " R"]
    ahead: Int32[Array, " R"]
    positions: Int32[Array, "R T"]
    starts: Int32[Array, "R N"]
    visible: Int32[Array, "R N"]
    own: Bool[Array, "R N"]
    phases: Int32[Array, " B"]
    before: Int32[Array, " B"]
    lengths: Int32[Array, " B"]
    offsets: Int32[Array, " B"]
    local_lengths: Int32[Array, " B"]
    seen: Int32[Array, "R N T"]
    unseen: Int32[Array, "R N T"] | None
    write_at: Int32[Array, " R"]
    write_to: Int32[Array, "R T"]
    key_cos: Float32[Array, "R T P"]
    key_sin: Float32[Array, "R T P"]
    query_cos: Float32[Array, "R N T P"]
    query_sin: Float32[Array, "R N T P"]
    shared: Tiles
    grouped: tuple[Tiles, ...]
    private: Tiles
    faults: Int32[Array, ""]
    rope: Rope = dataclasses.field(metadata={"static": True})
    token_sharding: CyclicSharding = dataclasses.field(metadata={"static": True})
    window: int = dataclasses.field(default=0, metadata={"static": True})
    work: Mapping[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def read_tokens(self) -> Int32[Array, ""]:
        """Cached tokens that this device reads in each layer; a block that several rows read
        together counts once."""
        return sum((tiles.tokens for tiles in (*self.grouped, self.private)), self.shared.tokens)


def make_plan(
    cache: KVCache,
    layout: Layout,
    count: Int32[Array, " R"],
    width: int,
    *,
    rope: Rope | None = None,
    window: int = 0,
    shared_tiling: Tiling | None = None,
    group_tiling: Tiling | None = None,
    private_tiling: Tiling | None = None,
) -> Plan:
    """Plans a pass of `width` tokens a row. For a cache that is spread over a mesh, the plan is of
    the device that runs this.

    Args:
      cache: before the pass.
      layout: what each row sees and writes.
      count: real tokens of each row, the rest of `width` being padding on the right.
      width: T.
      rope: of the layers that this is the plan of; default the cache's.
      window: as in the attributes.
      shared_tiling, group_tiling, private_tiling: how to cut blocks that all rows, a group and one
        row read; default by the shape.

    Raises:
      ValueError: see `check_pass`, outside of jit.
    """
    check_pass(cache, layout, count, width)
    rope = cache.rope if rope is None else rope
    tilings = shared_tiling, group_tiling, private_tiling
    return _planned(cache, layout, count, width, rope, window, tilings)


# Outside of jit a plan is one program, too, in place of a hundred of single operations.
@functools.partial(jax.jit, static_argnames=("width", "rope", "window", "tilings"), inline=True)
def _planned(
    cache: KVCache,
    layout: Layout,
    count: Array,
    width: int,
    rope: Rope,
    window: int,
    tilings: tuple[Tiling | None, Tiling | None, Tiling | None],
) -> Plan:
    shared_tiling, group_tiling, private_tiling = tilings
    block = jnp.clip(layout.blocks, 0, cache.num_blocks - 1)
    appended = _appended(cache, layout, count, width, rope)
    order = _row_order(cache, layout, block, appended, width, rope)
    reads = _local_reads(cache, layout, block, appended, order, window)
    pairs = zip((1, *layout.groups), layout.groups, strict=False)
    return Plan(
        blocks=layout.blocks,
        phases=cache.phases,
        before=cache.lengths,
        offsets=reads.offsets,
        local_lengths=reads.lengths,
        seen=reads.seen,
        unseen=reads.unseen,
        shared=shared_tiles(reads, layout.groups[-1] if layout.groups else 1, shared_tiling),
        grouped=tuple(group_tiles(reads, less, group, group_tiling) for less, group in pairs),
        private=private_tiles(reads, private_tiling),
        rope=rope,
        token_sharding=cache.token_sharding,
        window=window,
        **appended._asdict(),
        **order._asdict(),
    )


class _Appended(NamedTuple):
    """The attributes of a plan that say what is appended."""

    count: Array
    ahead: Array
    lengths: Array
    write_at: Array
    write_to: Array
    key_cos: Array
    key_sin: Array
    faults: Array


def _appended(cache: KVCache, layout: Layout, count: Array, width: int, rope: Rope) -> _Appended:
    written = layout.written
    target = jnp.clip(written, 0, cache.num_blocks - 1)
    ahead = jnp.zeros_like(target) if layout.ahead is None else layout.ahead
    before = cache.lengths[target] + ahead
    needed = jnp.where(written >= 0, jnp.clip(count, 0, width), 0)
    count = jnp.minimum(needed, jnp.maximum(cache.capacities[target] - before, 0))
    step, sharded = jnp.arange(width), cache.token_sharding
    key_cos, key_sin = rope.cos_sin((cache.phases[target] + before)[:, None] + step)
    write_at = cache.offsets[target] + before
    index = write_at[:, None] + step
    is_kept = (step < count[:, None]) & sharded.is_local(index)
    return _Appended(
        count=count,
        ahead=ahead,
        lengths=cache.lengths.at[target].add(count),
        write_at=write_at,
        write_to=jnp.where(is_kept, sharded.local_count(index), cache.keys[0].shape[1]),
        key_cos=key_cos,
        key_sin=key_sin,
        faults=_faults(cache, layout, written, needed > count),
    )


class _RowOrder(NamedTuple):
    """The attributes of a plan that say where listed blocks and new tokens are in each row's
    order."""

    positions: Array
    starts: Array
    visible: Array
    own: Array
    query_cos: Array
    query_sin: Array


def _row_order(
    cache: KVCache, layout: Layout, block: Array, appended: _Appended, width: int, rope: Rope
) -> _RowOrder:
    sees, after = _sees(layout, appended), _lengths_after(layout, block, appended)
    last = jnp.maximum(layout.listed - 1, 0)[:, None]
    own = sees & (jnp.arange(layout.blocks.shape[1])[None] == layout.listed[:, None] - 1)
    starts = jnp.cumsum(after, axis=1) - after
    before = cache.lengths[jnp.clip(layout.written, 0, cache.num_blocks - 1)] + appended.ahead
    own_start = jnp.take_along_axis(starts, last, axis=1)[:, 0]
    positions = (own_start + before)[:, None] + jnp.arange(width)
    rotation = positions[:, None] - starts[:, :, None] + cache.phases[block][:, :, None]
    query_cos, query_sin = rope.cos_sin(rotation)
    return _RowOrder(
        positions=positions,
        starts=starts,
        visible=jnp.where(sees, jnp.where(own, before[:, None] + 1, after), 0),
        own=own,
        query_cos=query_cos,
        query_sin=query_sin,
    )


def _local_reads(
    cache: KVCache,
    layout: Layout,
    block: Array,
    appended: _Appended,
    order: _RowOrder,
    window: int,
) -> Reads:
    """The reads of the tokens that this device keeps: one run of every block, in order."""
    after = _lengths_after(layout, block, appended)
    reads = _sees(layout, appended) & (after > 0)
    step = jnp.arange(order.positions.shape[1])
    # [R, N, T]; padding sees no further
    seen = jnp.minimum(
        order.visible[..., None] + jnp.where(order.own[..., None], step, 0), after[..., None]
    )
    sharded = cache.token_sharding
    offsets = sharded.local_count(cache.offsets)

    def local(tokens: Array) -> Array:
        """How many of the first tokens of each listed block this device keeps."""
        return (
            sharded.local_count(cache.offsets[block][..., None] + tokens)
            - (offsets[block][..., None])
        )

    unseen = None
    if window:
        outside = order.positions[:, None] - (window - 1) - order.starts[..., None]
        unseen = jnp.clip(outside, 0, seen)
        reads &= unseen[..., 0] < seen[..., 0]  # later tokens of the row see less of a block
        unseen = local(unseen)
    return Reads(
        blocks=layout.blocks,
        block=block,
        reads=reads,
        fan_in=jnp.zeros(cache.num_blocks, jnp.int32).at[block].add(reads.astype(jnp.int32)),
        offsets=offsets,
        lengths=sharded.local_count(cache.offsets + appended.lengths) - offsets,
        seen=local(seen),
        unseen=unseen,
        arena=cache.keys[0].shape[1],
    )


def _sees(layout: Layout, appended: _Appended) -> Array:
    """bool[R, N]: the blocks that a row sees. A row that brings nothing sees nothing, so finished
    rows cost no attention."""
    return (layout.blocks >= 0) & (appended.count > 0)[:, None]


def _lengths_after(layout: Layout, block: Array, appended: _Appended) -> Array:
    """int32[R, N]: the length of each listed block after the appends."""
    return jnp.where(layout.blocks >= 0, appended.lengths[block], 0)


def _faults(cache: KVCache, layout: Layout, written: Array, overflows: Array) -> Array:
    blocks, (rows, width) = layout.blocks, layout.blocks.shape
    pairs = (blocks[:, :, None] == blocks[:, None, :]) & (blocks >= 0)[:, :, None]
    writers = (written[:, None] == written[None, :]) & (written >= 0)[:, None]
    found = {
        Fault.OVERFLOW: jnp.any(overflows),
        Fault.UNKNOWN_BLOCK: jnp.any(blocks >= cache.num_blocks),
        Fault.REPEATED_BLOCK: jnp.any(pairs & ~jnp.eye(width, dtype=bool)),
        Fault.TWO_WRITERS: jnp.any(writers & ~jnp.eye(rows, dtype=bool)) & (layout.ahead is None),
    }
    return sum(
        (jnp.where(occurs, fault.value, 0) for fault, occurs in found.items()),
        jnp.zeros((), jnp.int32),
    )
