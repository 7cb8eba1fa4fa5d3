"""Plan: what one forward pass does to the blocks, made once inside jit and used by every layer.

Starts, positions, rotations, visible lengths and the tiles to read follow from the cache's lengths, the layout and how many
new tokens each row brings (design: Hogwild! sections 3.4 and appendix B, Hydragen section 3).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxshare.cache import Fault, KVCache
from jaxshare.layout import Layout
from jaxshare.rope import Rope


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """One pass over a cache. R rows, N listed blocks of a row, T new tokens of a row, B blocks, P rotated pairs.

    A row that brings no token sees nothing and costs nothing; what attention returns for it is finite and means nothing,
    as it does for the padding behind a row's last real token.

    Attributes:
      blocks: int32[R, N], as in the layout.
      count: int32[R], real new tokens of each row; what would overflow the written block is taken off.
      positions: int32[R, T] of the new tokens, each in its own row's order.
      starts: int32[R, N], where each listed block begins in its row's order.
      visible: int32[R, N], tokens of each listed block that the row's first new token sees.
      own: bool[R, N], the block the row writes: new token t sees t more of it than the first does.
      offsets, phases: int32[B], of the cache.
      before, lengths: int32[B], block lengths before and after this pass's appends.
      write_at: int32[R], arena index of each row's first new token.
      key_cos, key_sin: float32[R, T, P], rotation of new keys to their index in their block.
      query_cos, query_sin: float32[R, N, T, P], rotation of new queries towards each listed block.
      shared: blocks that two rows or more see, as tiles that all rows read together.
      private: blocks that one row sees, as tiles that it reads alone.
      faults: int32[], `Fault` flags.
      rope: of the cache (static).
    """

    blocks: Array
    count: Array
    positions: Array
    starts: Array
    visible: Array
    own: Array
    offsets: Array
    phases: Array
    before: Array
    lengths: Array
    write_at: Array
    key_cos: Array
    key_sin: Array
    query_cos: Array
    query_sin: Array
    shared: "Tiles"
    private: "Tiles"
    faults: Array
    rope: Rope = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Work items: lists of tiles, cut from a list of runs, each tile from a single run.

    Attributes:
      ends: int32[X], running count of tiles after each run; run x is the tiles ends[x-1] to ends[x] - 1.
      size: tokens of a tile (static).
    """

    ends: Array
    size: int = dataclasses.field(metadata={"static": True})

    @property
    def count(self) -> Array:
        """int32[]: how many tiles there are."""
        return self.ends[-1]

    def find(self, item: Array) -> tuple[Array, Array]:
        """The run of each tile and its first token within the run. `item` may be any int32 array; past the end it clips."""
        run = jnp.minimum(jnp.searchsorted(self.ends, item, side="right", method="compare_all"), self.ends.shape[0] - 1)
        run = run.astype(jnp.int32)
        first = jnp.where(run > 0, self.ends[run - 1], 0)
        return run, (item - first) * self.size


def make_plan(cache: KVCache, layout: Layout, count: Array, width: int, *, shared_tile: int = 256, private_tile: int = 64) -> Plan:
    """Plans a pass of `width` tokens a row.

    Args:
      cache: as it stands before the pass.
      layout: what each row sees and writes.
      count: int32[R], real tokens of each row, the rest of `width` being padding on the right.
      width: T.
      shared_tile, private_tile: tokens of a tile of shared and of private blocks.
    """
    rows = layout.num_rows
    blocks, listed = layout.blocks, layout.blocks >= 0
    block = jnp.clip(blocks, 0, cache.num_blocks - 1)
    written = layout.written
    target = jnp.clip(written, 0, cache.num_blocks - 1)

    wanted = jnp.where(written >= 0, jnp.clip(count, 0, width), 0)
    room = jnp.maximum(cache.capacities[target] - cache.lengths[target], 0)
    count = jnp.minimum(wanted, room)
    lengths = cache.lengths.at[target].add(count)

    # A row that brings nothing sees nothing, so finished rows cost no attention.
    sees = listed & (count > 0)[:, None]
    own = sees & (jnp.arange(blocks.shape[1])[None] == layout.listed[:, None] - 1)
    after = jnp.where(listed, lengths[block], 0)
    starts = jnp.cumsum(after, axis=1) - after
    before = cache.lengths[target]
    own_start = jnp.take_along_axis(starts, jnp.maximum(layout.listed - 1, 0)[:, None], axis=1)[:, 0]
    step = jnp.arange(width)[None]
    positions = (own_start + before)[:, None] + step
    visible = jnp.where(own, before[:, None] + 1, after) * sees

    key_cos, key_sin = cache.rope.cos_sin((cache.phases[target] + before)[:, None] + step)
    turn = positions[:, None] - starts[:, :, None] + cache.phases[block][:, :, None]
    query_cos, query_sin = cache.rope.cos_sin(turn)

    fan_in = jnp.zeros(cache.num_blocks, jnp.int32).at[block].add((sees & (after > 0)).astype(jnp.int32))
    shared = jnp.where(fan_in > 1, -(-lengths // shared_tile), 0)
    private = jnp.where(sees & (fan_in[block] == 1), -(-after // private_tile), 0)

    return Plan(
        blocks=blocks, count=count, positions=positions, starts=starts, visible=visible, own=own,
        offsets=cache.offsets, phases=cache.phases, before=cache.lengths, lengths=lengths,
        write_at=cache.offsets[target] + before, key_cos=key_cos, key_sin=key_sin, query_cos=query_cos, query_sin=query_sin,
        shared=Tiles(jnp.cumsum(shared), shared_tile), private=Tiles(jnp.cumsum(private.reshape(-1)), private_tile),
        faults=_faults(cache, blocks, written, wanted, count, rows), rope=cache.rope)


def _faults(cache: KVCache, blocks: Array, written: Array, wanted: Array, count: Array, rows: int) -> Array:
    width = blocks.shape[1]
    pairs = (blocks[:, :, None] == blocks[:, None, :]) & (blocks >= 0)[:, :, None]
    writers = (written[:, None] == written[None, :]) & (written >= 0)[:, None]
    found = {
        Fault.OVERFLOW: jnp.any(wanted > count),
        Fault.UNKNOWN_BLOCK: jnp.any(blocks >= cache.num_blocks),
        Fault.REPEATED_BLOCK: jnp.any(pairs & ~jnp.eye(width, dtype=bool)),
        Fault.TWO_WRITERS: jnp.any(writers & ~jnp.eye(rows, dtype=bool)),
    }
    return sum((jnp.where(there, fault.value, 0) for fault, there in found.items()), jnp.zeros((), jnp.int32))
