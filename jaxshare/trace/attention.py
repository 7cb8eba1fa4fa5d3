"""Re-encoding: all that a trace has fed, computed in one parallel pass that can be differentiated.

Hogwild! Inference, section 3.4 and appendix B ("Fine-tuning and re-encoding considerations"): each
query is rotated to its position less the begin of a block, and sees so many tokens of it. The keys
of a block are laid out once for each of their stays, rotated to the place where they stood, in
tiles of one block; a query sees of a tile what stood there in its pass. Queries come in chunks, and
tiles one after the other, with the online softmax between them, so that nothing has the size of
queries times keys.
"""

import dataclasses
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from jaxshare.arena import Arenas, make_finite, put
from jaxshare.cache import KVCache
from jaxshare.rope import Rope, rotate
from jaxshare.sharding import on_each
from jaxshare.trace.trace import STANDS, Trace

CHUNK = 128
"""Queries that are computed together; batches are whole numbers of them."""
TILE = 128
"""Stays of a tile."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TraceBatch:
    """Traces of one shape, as arrays. N traces, T tokens, B blocks, J tiles of S stays.

    Attributes:
      tokens: int32[N, T], as in `Trace`; 0 behind the last.
      passes: int32[N, T], the pass of each.
      turns: int32[N, T, B], each token's position less the begin of each block: how far its query
        is rotated.
      seen: int32[N, T, B], how many tokens of each block it sees, the first ones; 0 for padding.
      tile_blocks: int32[N, J], the block of each tile.
      stay_tokens, stay_indices, stay_begins, stay_ends: int32[N, J, S], as in `Trace`; one that
        ends at 0 is padding.
    """

    tokens: Array
    passes: Array
    turns: Array
    seen: Array
    tile_blocks: Array
    stay_tokens: Array
    stay_indices: Array
    stay_begins: Array
    stay_ends: Array

    @classmethod
    def of(
        cls,
        traces: Sequence[Trace],
        *,
        tokens: int | None = None,
        tiles: int | None = None,
        blocks: int | None = None,
    ) -> Self:
        """A batch of traces. Batches of the same numbers share a program.

        Args:
          traces: at least one.
          tokens: T, for all that they may come to hold; default what the longest needs. Rounded up
            to whole chunks.
          tiles: J; default what is needed, in a multiple of 4. Of each block the stays take whole
            tiles.
          blocks: B; default what is needed, in a multiple of 4.

        Raises:
          ValueError: no traces, or one that needs more than it is given.
        """
        if not traces:
            raise ValueError("there are no traces; give at least one")
        cut = [_tiles(trace) for trace in traces]
        shapes = {
            "tokens": (tokens, CHUNK, [t.num_tokens for t in traces]),
            "tiles": (tiles, 4, [len(b) for b, _ in cut]),
            "blocks": (blocks, 4, [t.num_blocks for t in traces]),
        }
        sizes = {}
        for name, (given, multiple, needed) in shapes.items():
            if given is not None and given < max(needed):
                raise ValueError(
                    f"{name} is {given}, but trace {int(np.argmax(needed))} has {max(needed)}; "
                    "give at least as many"
                )
            size = max(1, max(needed) if given is None else given)
            sizes[name] = (
                size if given is not None and name != "tokens" else size + -size % multiple
            )
        width, many, wide = (sizes[name] for name in ("tokens", "tiles", "blocks"))

        def padded(arrays: Sequence[np.ndarray], *shape: int) -> Array:
            whole = np.zeros((len(arrays), *shape), np.int32)
            for n, array in enumerate(arrays):
                whole[n][tuple(map(slice, array.shape))] = array
            return jnp.asarray(whole)

        stays = (padded([stays[i] for _, stays in cut], many, TILE) for i in range(4))
        return cls(
            padded([t.tokens for t in traces], width),
            padded([t.passes[t.views] for t in traces], width),
            padded([t.positions[:, None] - t.starts[t.views] for t in traces], width, wide),
            padded([t.seen for t in traces], width, wide),
            padded([b for b, _ in cut], many),
            *stays,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """N, T."""
        many, width = self.tokens.shape
        return many, width


def trace_attention(q: Array, k: Array, v: Array, batch: TraceBatch, rope: Rope) -> Array:
    """Attention of all tokens of traces at once, each over what it saw where it stood then.
    Differentiable in q, k and v.

    The backward pass computes chunks and tiles anew, so its memory, too, grows with T alone.

    Args:
      q: [N, T, H, D], k, v: [N, T, K, D], not rotated; H is a multiple of K.
      batch: of the traces.
      rope: of queries and keys.

    Returns:
      [N, T, H, D] in q's dtype; 0 for padding.

    Raises:
      ValueError: shapes that do not fit the batch.
    """
    many, width, heads, dim = q.shape
    if (
        (many, width) != batch.shape
        or k.shape != v.shape
        or k.shape[:2] != batch.shape
        or heads % k.shape[2]
        or width % CHUNK
    ):
        raise ValueError(
            f"q must be [N, T, H, D] and k and v [N, T, K, D] with N, T = {batch.shape}, T a "
            f"multiple of {CHUNK} and K dividing H; got {q.shape}, {k.shape} and {v.shape}"
        )
    # What is not finite must not reach those that do not see it, as in a cache.
    k, v = make_finite(k), make_finite(v)
    keys = rotate(
        _laid_out(k, batch), *(table[..., None, :] for table in rope.cos_sin(batch.stay_indices))
    )
    tiles = jax.tree.map(
        lambda x: jnp.moveaxis(x, 1, 0),
        (
            keys,
            _laid_out(v, batch),
            batch.tile_blocks,
            batch.stay_indices,
            batch.stay_begins,
            batch.stay_ends,
        ),
    )

    @jax.checkpoint
    def attend(chunk: tuple[Array, Array, Array, Array]) -> Array:
        q, passes, turns, seen = chunk  # [N, C, ...]

        @jax.checkpoint
        def over_tile(carry: tuple[Array, Array, Array], tile: tuple[Array, ...]):
            keys, values, blocks, indices, begins, ends = tile  # [N, S, ...], blocks [N]
            # [N, C, 1]
            turn, limit = (
                jnp.take_along_axis(x, blocks[:, None, None], axis=2) for x in (turns, seen)
            )
            when = passes[..., None]
            # [N, C, S]
            visible = (
                (indices[:, None] < limit) & (begins[:, None] <= when) & (when < ends[:, None])
            )
            # Most tiles are of another time than the chunk.
            return jax.lax.cond(
                jnp.any(visible),
                lambda: _added(carry, q, keys, values, turn, visible, rope),
                lambda: carry,
            ), None

        empty = many, k.shape[2], heads // k.shape[2], CHUNK
        start = jnp.full(empty, _LOWEST), jnp.zeros(empty), jnp.zeros((*empty, dim))
        (_, total, mixed), _ = jax.lax.scan(over_tile, start, tiles)
        out = mixed / jnp.where(total == 0, 1.0, total)[..., None]
        return jnp.moveaxis(out, 3, 1).reshape(q.shape).astype(q.dtype)

    queries = q, batch.passes, batch.turns, batch.seen
    out = jax.lax.map(
        attend,
        jax.tree.map(
            lambda x: jnp.moveaxis(x.reshape(many, -1, CHUNK, *x.shape[2:]), 1, 0), queries
        ),
    )
    return jnp.moveaxis(out, 0, 1).reshape(q.shape)


_LOWEST = -1e30
"""Below every score, and finite, so that differences of it are."""


def _added(
    carry: tuple[Array, Array, Array],
    q: Array,
    keys: Array,
    values: Array,
    turn: Array,
    visible: Array,
    rope: Rope,
) -> tuple[Array, Array, Array]:
    """The online softmax (top, total, mixed) with one tile more."""
    top, total, mixed = carry
    cos, sin = rope.cos_sin(turn)  # [N, C, 1, P]
    # [N, C, K, G, D]
    turned = rotate(q, cos, sin).reshape(*q.shape[:2], keys.shape[2], -1, q.shape[3])
    sees = visible[:, None, None]
    scores = jnp.where(
        sees, _product("nckgd,nskd->nkgcs", turned, keys) * q.shape[3] ** -0.5, _LOWEST
    )
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


def _product(what: str, a: Array, b: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(what, a, b, precision=precision, preferred_element_type=jnp.float32)


def _laid_out(x: Array, batch: TraceBatch) -> Array:
    """[N, T, K, D] of tokens -> [N, J, S, K, D] of stays."""
    return jax.vmap(lambda x, tokens: x[tokens])(x, batch.stay_tokens)


def fill(
    cache: KVCache,
    keys: Sequence[Array],
    values: Sequence[Array],
    tokens: Array,
    indices: Array,
    places: Array,
    lengths: Array,
) -> KVCache:
    """A cache as a trace has left it. Pure, for use under jit.

    Args:
      cache: empty, with room.
      keys, values: of each layer [T, K, D], keys not rotated.
      tokens: int32[X], the tokens that stand in blocks; indices: int32[X], their places there;
        places: int32[X], in the arena, negative for padding.
      lengths: int32[B], tokens in each block.
    """
    cos, sin = (table[:, None] for table in cache.rope.cos_sin(indices))

    def heads_first(x: Array, dtype: jnp.dtype) -> Array:
        return make_finite(x.astype(dtype)).swapaxes(0, 1)

    new = (
        tuple(
            heads_first(rotate(k[tokens], cos, sin), a.dtype)
            for k, a in zip(keys, cache.keys, strict=True)
        ),
        tuple(heads_first(v[tokens], a.dtype) for v, a in zip(values, cache.values, strict=True)),
    )
    arenas: Arenas = cache.keys, cache.values
    specs, none = (cache.specs.keys, cache.specs.values), PartitionSpec()
    by_head = jax.tree.map(
        lambda spec: PartitionSpec(*spec[:1]), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    filled = on_each(
        lambda arenas, places, new: put(cache.token_sharding, arenas, places, new),
        cache.mesh,
        in_specs=(specs, none, by_head),
        out_specs=specs,
    )(arenas, places, new)
    return dataclasses.replace(cache, keys=filled[0], values=filled[1], lengths=lengths)


def standing(trace: Trace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens that stand in blocks at the end of a trace, their blocks, and their places there:
    int32[X] each."""
    left = trace.stay_ends == STANDS
    return trace.stay_tokens[left], trace.stay_blocks[left], trace.stay_indices[left]


def _tiles(trace: Trace) -> tuple[np.ndarray, list[np.ndarray]]:
    """Stays in tiles of one block each, in the order of time: blocks int32[J], and tokens, indices,
    begins and ends int32[J, S]."""
    columns = trace.stay_tokens, trace.stay_indices, trace.stay_begins, trace.stay_ends
    blocks, tiles = [], []
    for block in np.unique(trace.stay_blocks):
        of_block = np.flatnonzero(trace.stay_blocks == block)
        of_block = of_block[np.lexsort((trace.stay_indices[of_block], trace.stay_begins[of_block]))]
        stays = np.stack([column[of_block] for column in columns])
        stays = np.pad(stays, ((0, 0), (0, -len(of_block) % TILE))).reshape(4, -1, TILE)
        blocks += [block] * stays.shape[1]
        tiles.append(stays)
    return np.asarray(blocks, np.int32), [
        *np.concatenate([*tiles, np.zeros((4, 0, TILE), np.int32)], axis=1)
    ]
