"""Re-encoding: all that a trace has fed, computed in one parallel pass that can be differentiated.

Hogwild! Inference, section 3.4 and appendix B ("Fine-tuning and re-encoding considerations"): each
query is rotated by the difference between its position and the start of a block, and sees a number
of the block's first tokens. The keys of a block are laid out once for each of their placements,
rotated to their index there, in tiles of one block; a query sees the placements of a tile that
were there in its pass. Queries come in chunks, and tiles one after the other, with the online
softmax between them, so that no array has the size of queries times keys.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int, Int32

from jaxshare.arena import Arenas, put
from jaxshare.cache import KVCache
from jaxshare.quantised_cache import Arena, as_stored, make_finite
from jaxshare.rope import Rope, rotate
from jaxshare.sharding import on_each
from jaxshare.softcap import soft_capped
from jaxshare.trace.trace import NOT_ENDED, Trace

CHUNK = 128
"""Queries that are computed together; batches are whole numbers of chunks."""
TILE = 128
"""Placements of a tile."""
_LOWEST = -1e30
"""Below every score, and finite, so that differences of it are."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TraceBatch:
    """Traces of one shape, as arrays. N traces, T tokens, B blocks, J tiles of S placements.

    Attributes:
      tokens: as in `Trace`; 0 after the last.
      passes: the pass of each token.
      rotations: each token's position less the start of each block: how far its query is rotated.
      seen: how many tokens of each block each token sees, the first ones; 0 for padding.
      tile_blocks: the block of each tile.
      placement_tokens, placement_indices, placement_starts, placement_ends: as in `Trace`; one that
        ends at 0 is padding.
    """

    tokens: Int32[Array, "N T"]
    passes: Int32[Array, "N T"]
    rotations: Int32[Array, "N T B"]
    seen: Int32[Array, "N T B"]
    tile_blocks: Int32[Array, "N J"]
    placement_tokens: Int32[Array, "N J S"]
    placement_indices: Int32[Array, "N J S"]
    placement_starts: Int32[Array, "N J S"]
    placement_ends: Int32[Array, "N J S"]

    @classmethod
    def of(
        cls,
        traces: Sequence[Trace],
        *,
        tokens: int | None = None,
        tiles: int | None = None,
        blocks: int | None = None,
    ) -> Self:
        """Makes a batch of traces. Batches of the same numbers share a program.

        Args:
          traces: at least one.
          tokens: T; default what the longest needs. Rounded up to whole chunks.
          tiles: J; default what is needed, in a multiple of 4. The placements of each block take
            whole tiles.
          blocks: B; default what is needed, in a multiple of 4.

        Raises:
          ValueError: no traces, or one that needs more than a given number.
        """
        if not traces:
            raise ValueError("there are no traces; give at least one")
        tiled = [_tiles(trace) for trace in traces]
        num_tokens = _padded_size("tokens", tokens, CHUNK, [t.num_tokens for t in traces])
        num_tokens += -num_tokens % CHUNK
        num_tiles = _padded_size("tiles", tiles, 4, [len(b) for b, _ in tiled])
        num_blocks = _padded_size("blocks", blocks, 4, [t.num_blocks for t in traces])
        placements = (
            _padded([columns[i] for _, columns in tiled], num_tiles, TILE) for i in range(4)
        )
        rotations = [t.positions[:, None] - t.starts[t.row_pass] for t in traces]
        return cls(
            _padded([t.tokens for t in traces], num_tokens),
            _padded([t.passes[t.row_pass] for t in traces], num_tokens),
            _padded(rotations, num_tokens, num_blocks),
            _padded([t.seen for t in traces], num_tokens, num_blocks),
            _padded([b for b, _ in tiled], num_tiles),
            *placements,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """N, T."""
        traces, tokens = self.tokens.shape
        return traces, tokens


def _padded_size(name: str, given: int | None, multiple: int, needed: Sequence[int]) -> int:
    """The given size, or the largest that is needed, rounded up to a multiple."""
    if given is None:
        size = max(1, *needed)
        return size + -size % multiple
    if given < max(needed):
        raise ValueError(
            f"{name} is {given}, but trace {int(np.argmax(needed))} has {max(needed)}; "
            "give at least as many"
        )
    return max(1, given)


def _padded(arrays: Sequence[np.ndarray], *shape: int) -> Array:
    """The arrays side by side, each padded with 0 to a shape."""
    whole = np.zeros((len(arrays), *shape), np.int32)
    for n, array in enumerate(arrays):
        whole[n][tuple(map(slice, array.shape))] = array
    return jax.device_put(whole)


def trace_attention(
    q: Float[Array, "..."],
    k: Float[Array, "..."],
    v: Float[Array, "..."],
    batch: TraceBatch,
    rope: Rope,
    *,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "N T H _"]:
    """Attention of all tokens of traces at once, each over what it saw, where that was then.
    Differentiable in q, k and v.

    The backward pass computes chunks and tiles again, so its memory, too, grows with T alone.

    Args:
      q: [N, T, H, D], k, v: [N, T, K, D], not rotated; H is a multiple of K. Values may have a
        last dim of 0: a token's value is then its key without the rotated entries.
      batch: of the traces.
      rope: of queries and keys.
      window: tokens that a token sees, itself included, by their places; 0 for all.
      scale, softcap, sinks: as in `jaxshare.attention.block_attention`.

    Returns:
      Attention in q's dtype, with the last dim of the values; 0 for padding.

    Raises:
      ValueError: shapes that do not fit the batch.
    """
    _check_shapes(q, k, v, batch)
    v = v if v.shape[3] else k[..., rope.rotary_dim :]
    # Values that are not finite must not reach tokens that do not see them, as in a cache.
    k, v = make_finite(k), make_finite(v)
    tables = rope.cos_sin(batch.placement_indices)
    tiles = _Tile(
        keys=rotate(_laid_out(k, batch), *(table[..., None, :] for table in tables)),
        values=_laid_out(v, batch),
        block=batch.tile_blocks,
        indices=batch.placement_indices,
        starts=batch.placement_starts,
        ends=batch.placement_ends,
    )
    tiles = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tiles)
    chunks = jax.tree.map(
        lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:]), 1, 0),
        _Chunk(q, batch.passes, batch.rotations, batch.seen),
    )
    form = _TraceForm(rope, window, q.shape[3] ** -0.5 if scale is None else scale, softcap)
    out = jax.lax.map(jax.checkpoint(lambda chunk: _attend(chunk, tiles, form, sinks)), chunks)
    return jnp.moveaxis(out, 0, 1).reshape(*q.shape[:3], v.shape[3])


def _check_shapes(q: Array, k: Array, v: Array, batch: TraceBatch) -> None:
    if (
        q.shape[:2] != batch.shape
        or k.shape[:3] != v.shape[:3]
        or v.shape[3:] not in ((0,), k.shape[3:])
        or k.shape[:2] != batch.shape
        or q.shape[2] % k.shape[2]
        or q.shape[1] % CHUNK
    ):
        raise ValueError(
            f"q must be [N, T, H, D] and k and v [N, T, K, D] (or v with a last dim of 0) with "
            f"N, T = {batch.shape}, T a multiple of {CHUNK} and K dividing H; got {q.shape}, "
            f"{k.shape} and {v.shape}"
        )


class _Chunk(NamedTuple):
    """C queries of each trace: q [N, C, H, D], passes [N, C], rotations and seen [N, C, B]."""

    q: Array
    passes: Array
    rotations: Array
    seen: Array


class _Tile(NamedTuple):
    """S placements of one block of each trace: keys (rotated) and values [N, S, K, _], block [N],
    indices, starts and ends [N, S]."""

    keys: Array
    values: Array
    block: Array
    indices: Array
    starts: Array
    ends: Array


class _TraceForm(NamedTuple):
    """Arguments of `trace_attention` that are no arrays."""

    rope: Rope
    window: int
    scale: float
    softcap: float


def _attend(chunk: _Chunk, tiles: _Tile, form: _TraceForm, sinks: Array | None) -> Array:
    """[N, C, H, D]: attention of a chunk over all tiles, given with a first dimension more."""

    @jax.checkpoint
    def add(carry: tuple[Array, Array, Array], tile: _Tile):
        # [N, C, 1]
        rotation, limit = (
            jnp.take_along_axis(x, tile.block[:, None, None], axis=2)
            for x in (chunk.rotations, chunk.seen)
        )
        when = chunk.passes[..., None]
        present = (tile.starts[:, None] <= when) & (when < tile.ends[:, None])
        visible = (tile.indices[:, None] < limit) & present  # [N, C, S]
        if form.window:
            visible &= rotation - tile.indices[:, None] < form.window
        # Most tiles are of another time than the chunk.
        return jax.lax.cond(
            jnp.any(visible),
            lambda: _added(carry, chunk.q, tile, rotation, visible, form),
            lambda: carry,
        ), None

    traces, width, heads, _ = chunk.q.shape
    kv_heads, dim = tiles.values.shape[-2:]
    empty = traces, kv_heads, heads // kv_heads, width
    start = jnp.full(empty, _LOWEST), jnp.zeros(empty), jnp.zeros((*empty, dim))
    (top, total, mixed), _ = jax.lax.scan(add, start, tiles)
    if sinks is not None:  # one more key, whose value is 0
        score = sinks.reshape(kv_heads, -1, 1).astype(top.dtype)
        high = jax.lax.stop_gradient(jnp.maximum(top, score))
        keep = jnp.exp(top - high)
        total, mixed = total * keep + jnp.exp(score - high), mixed * keep[..., None]
    out = mixed / jnp.where(total == 0, 1.0, total)[..., None]
    return jnp.moveaxis(out, 3, 1).reshape(traces, width, heads, dim).astype(chunk.q.dtype)


def _added(
    carry: tuple[Array, Array, Array],
    q: Array,
    tile: _Tile,
    rotation: Array,
    visible: Array,
    form: _TraceForm,
) -> tuple[Array, Array, Array]:
    """The online softmax (top, total, mixed) with one tile more."""
    top, total, mixed = carry
    keys, values = tile.keys, tile.values
    cos, sin = form.rope.cos_sin(rotation)  # [N, C, 1, P]
    # [N, C, K, G, D]
    rotated = rotate(q, cos, sin).reshape(*q.shape[:2], keys.shape[2], -1, q.shape[3])
    sees = visible[:, None, None]
    scores = _product("nckgd,nskd->nkgcs", rotated, keys) * form.scale
    scores = soft_capped(scores, form.softcap)
    scores = jnp.where(sees, scores, _LOWEST)
    # The largest score cancels out of the result, so no gradient goes through it.
    high = jax.lax.stop_gradient(jnp.maximum(top, jnp.max(scores, axis=-1)))
    weights = jnp.where(sees, jnp.exp(scores - high[..., None]), 0.0)
    keep = jnp.exp(top - high)
    return (
        high,
        total * keep + jnp.sum(weights, axis=-1),
        mixed * keep[..., None]
        + _product("nkgcs,nskd->nkgcd", weights.astype(values.dtype), values),
    )


def _product(equation: str, a: Array, b: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)


def _laid_out(x: Array, batch: TraceBatch) -> Array:
    """The rows [N, J, S, K, D] of placements from [N, T, K, D] of tokens."""
    return jax.vmap(lambda x, tokens: x[tokens])(x, batch.placement_tokens)


def fill(
    cache: KVCache,
    keys: Sequence[Float[Array, "T K D"]],
    values: Sequence[Float[Array, "T K _"]],
    tokens: Int[Array, " X"],
    indices: Int[Array, " X"],
    offsets: Int[Array, " X"],
    lengths: Int[Array, " B"],
) -> KVCache:
    """The cache at the end of a trace. Pure, for use under jit.

    Args:
      cache: empty, with capacity for it.
      keys, values: of each layer, keys not rotated.
      tokens: the tokens that blocks have at the end.
      indices, offsets: where each of them is, in its block and in the arena; a negative offset is
        padding.
      lengths: tokens in each block.
    """
    tables = {
        rope: tuple(table[:, None] for table in rope.cos_sin(indices)) for rope in {*cache.ropes}
    }

    def heads_first(x: Array, arena: Arena) -> Arena:
        return as_stored(x.swapaxes(0, 1), arena)

    new = (
        tuple(
            heads_first(rotate(k[tokens], *tables[rope]), a)
            for k, a, rope in zip(keys, cache.keys, cache.ropes, strict=True)
        ),
        tuple(heads_first(v[tokens], a) for v, a in zip(values, cache.values, strict=True)),
    )
    arenas: Arenas = cache.keys, cache.values
    specs, none = (cache.specs.keys, cache.specs.values), PartitionSpec()
    by_head = jax.tree.map(
        lambda spec: PartitionSpec(*spec[:1]), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    filled = on_each(
        lambda arenas, offsets, new: put(cache.token_sharding, arenas, offsets, new),
        cache.mesh,
        in_specs=(specs, none, by_head),
        out_specs=specs,
    )(arenas, offsets, new)
    return dataclasses.replace(cache, keys=filled[0], values=filled[1], lengths=lengths)


def final_placements(
    trace: Trace,
) -> tuple[Int32[np.ndarray, " X"], Int32[np.ndarray, " X"], Int32[np.ndarray, " X"]]:
    """The tokens that blocks have at the end of a trace, their blocks, and their indices there."""
    left = trace.placement_ends == NOT_ENDED
    return trace.placement_tokens[left], trace.placement_blocks[left], trace.placement_indices[left]


def _tiles(trace: Trace) -> tuple[np.ndarray, list[np.ndarray]]:
    """Placements in tiles of one block each, in the order of time: blocks int32[J], and tokens,
    indices, starts and ends int32[J, S]."""
    columns = (
        trace.placement_tokens,
        trace.placement_indices,
        trace.placement_starts,
        trace.placement_ends,
    )
    blocks, tiles = [], []
    for block in np.unique(trace.placement_blocks):
        of_block = np.flatnonzero(trace.placement_blocks == block)
        order = np.lexsort((trace.placement_indices[of_block], trace.placement_starts[of_block]))
        placements = np.stack([column[of_block[order]] for column in columns])
        padding = -len(of_block) % TILE
        tiles.append(np.pad(placements, ((0, 0), (0, padding))).reshape(4, -1, TILE))
        blocks += [block] * tiles[-1].shape[1]
    empty = np.zeros((4, 0, TILE), np.int32)
    return np.asarray(blocks, np.int32), [*np.concatenate([*tiles, empty], axis=1)]
