"""Block attention in plain XLA: for CPUs, TPUs and any GPU.

Two loops whose trip counts follow the real lengths, each over groups of tiles, one batched product
a group: for blocks that several rows see, with the queries of all rows (Hydragen section 3.2); for
blocks that one row sees, whatever row each tile belongs to. Where tiles of a kind fill much of the
arena, all of it is read in one product, without gathering. Both keep a running softmax; the two
results are merged by log-sum-exp.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32

from jaxshare.attention.expansion import HeadMakers
from jaxshare.attention.merge import Partial, merge, merge_over, sink_part
from jaxshare.attention.plan import Plan
from jaxshare.attention.tiling import Tiles
from jaxshare.quantised import QuantisedTensor
from jaxshare.quantised_cache import Arena
from jaxshare.softcap import soft_capped

_Score = Callable[[Array, Arena], Array]
"""(queries, keys) -> scores, the softcap applied."""
_LOG2_E = 1.4426950408889634
_MAX_QUERIES_AT_ONCE = 32
"""Queries of an item up to which all of an arena may be read in one product: the scores of more
would take too much memory."""
_FEW_ITERATIONS = 2
"""Iterations that a whole arena takes, below which it is always gathered: compiling a product over
all of it, too, would take longer than that saves."""
_MANY_ROWS, _ROWS_PER_READER = 256, 16
"""From this many rows on, and from this many times the rows that an iteration reads for, an
iteration changes the state of those rows alone. With fewer, going over all rows is faster; with
more, iterations over all rows would make a pass quadratic in them."""


def xla_attention(
    q: Float[Array, "R T H D"],
    keys: Arena,
    values: Arena,
    plan: Plan,
    scale: float,
    softcap: float = 0.0,
    sinks: Float[Array, " H"] | None = None,
    makers: HeadMakers | None = None,
) -> Float[Array, "R T H _"]:
    """Attention of queries that are not rotated over arenas that hold this pass's keys and values
    already, in q's dtype.

    With `makers` each tile of keys is read as the keys and values that they make of it, once for all
    queries of the tile.
    """
    # Where values are a part of keys, whole keys are weighted and the sums of rotated entries left
    # out at the end: that costs less than a copy of a part of every key.
    first = 0 if values.shape[2] or makers else 2 * plan.query_cos.shape[-1]
    arenas = _Arenas(keys, values if values.shape[2] else keys, makers)
    rows, width, heads, dim = q.shape
    kv_heads = arenas.kv_heads
    grouped = (q.astype(jnp.float32) * scale).reshape(rows, width, kv_heads, heads // kv_heads, dim)
    queries = _RotatedQueries.of(plan, grouped.transpose(2, 0, 1, 3, 4))
    score = functools.partial(_scores, softcap=softcap)
    parts = [_shared(queries, arenas, plan.shared, score)]
    for tiles in (*plan.grouped, plan.private):
        parts.append(_grouped(queries, arenas, tiles, score))
    if sinks is not None:
        parts.append(
            sink_part(sinks.reshape(kv_heads, 1, 1, -1), *parts[0], plan.token_sharding.axis)
        )
    out = merge_over(plan.token_sharding.axis, *merge(*parts))  # [K, R, T, G, D]
    out = out.transpose(1, 2, 0, 3, 4).reshape(*q.shape[:3], -1)
    return out[..., first:].astype(q.dtype)


@dataclasses.dataclass(frozen=True)
class _Arenas:
    """A layer's keys and values [K, tokens, D], and what makes those of heads of them, if anything
    does."""

    keys: Arena
    values: Arena
    makers: HeadMakers | None

    @property
    def kv_heads(self) -> int:
        """Heads of the keys that queries meet."""
        return self.keys.shape[0] if self.makers is None else self.makers.keys.shape[0]

    @property
    def value_dim(self) -> int:
        """Entries of the values that are mixed."""
        return self.values.shape[2] if self.makers is None else self.makers.values.shape[1]

    def windows(self, items: Tiles) -> tuple[Arena, Arena]:
        """The keys and values of the windows of W items, [K * W, size, _] both."""
        keys = _windows(self.keys, items)
        if self.makers is not None:
            is_quantised = isinstance(keys, QuantisedTensor)
            return self.makers.expand(jnp.asarray(keys.dequantised()) if is_quantised else keys)
        return keys, _windows(self.values, items)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _RotatedQueries:
    """Queries of R rows, grouped by kv head, and the factors that rotate them towards each of N
    listed blocks in one expression: q * cos + swapped * sin."""

    q: Float32[Array, "K R T G D"]
    swapped: Float32[Array, "K R T G D"]
    cos: Float32[Array, "R N T D"]
    sin: Float32[Array, "R N T D"]

    @classmethod
    def of(cls, plan: Plan, q: Array) -> "_RotatedQueries":
        half = plan.query_cos.shape[-1]
        rest = q.shape[-1] - 2 * half
        swapped = jnp.concatenate(
            [-q[..., half : 2 * half], q[..., :half], jnp.zeros_like(q[..., 2 * half :])], axis=-1
        )
        one = jnp.ones((*plan.query_cos.shape[:-1], rest))
        cos = jnp.concatenate([plan.query_cos, plan.query_cos, one], axis=-1)
        sin = jnp.concatenate([plan.query_sin, plan.query_sin, 0 * one], axis=-1)
        return cls(q, swapped, cos, sin)

    def towards(self, row: Array | slice, lister: Array, slot: Array, dtype: jnp.dtype) -> Array:
        """Queries of `row` rotated towards the block that row `lister` lists at `slot`: [K,
        *lister.shape, T, G, D]."""
        cos, sin = self.cos[lister, slot][..., None, :], self.sin[lister, slot][..., None, :]
        return (self.q[:, row] * cos + self.swapped[:, row] * sin).astype(dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _OnlineSoftmax:
    """A softmax in progress: the largest score so far, and the sums of exponentials and of weighted
    values relative to it."""

    top: Array
    total: Array
    mixed: Array

    @classmethod
    def start(cls, shape: tuple[int, ...], dim: int) -> "_OnlineSoftmax":
        return cls(jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, dim)))

    def finish(self) -> Partial:
        empty = self.total == 0
        out = self.mixed / jnp.where(empty, 1.0, self.total)[..., None]
        return out, jnp.where(
            empty, -jnp.inf, self.top + jnp.log(jnp.where(empty, 1.0, self.total))
        )


def _shared(queries: _RotatedQueries, arenas: _Arenas, tiles: Tiles, score: _Score) -> Partial:
    """(out [K, R, T, G, V], lse [K, R, T, G]) over the tiles that all rows read together."""
    kv_heads, rows, width, group, dim = queries.q.shape
    flat = rows * width * group

    def add(running: _OnlineSoftmax, items: Tiles, k: Arena, v: Arena) -> _OnlineSoftmax:
        """Takes W items with their windows k, v [K * W, size, D] into all rows."""
        shape = (kv_heads, items.start.shape[0], flat)
        query = jax.vmap(
            lambda slot: queries.towards(slice(None), jnp.arange(rows), slot, arenas.keys.dtype),
            out_axes=1,
        )(items.slot)
        scores = score(query.reshape(-1, flat, dim), k).reshape(*shape, -1)
        first, last = _ends(items, group)
        if width == 1 and shape[1] == 1 and items.begin is None:
            # All rows that see the item see the same tokens of it, so one bias serves all of them,
            # and the others get a weight of 0.
            sees = (last > items.first[:, None])[0]
            scores = scores + _bias(items.first, jnp.max(last, axis=1), scores.shape[-1])[:, None]
            top = jnp.maximum(running.top, jnp.where(sees, _over_items(scores, jnp.max), -jnp.inf))
            under = jnp.where(sees, _finite(top), jnp.inf)
        else:
            scores = _masked(scores, first, last)
            top = jnp.maximum(running.top, _over_items(scores, jnp.max))
            under = _finite(top)
        weights = _weights(scores - under[:, None, :, None], v)
        weights = jax.lax.optimization_barrier(weights) if shape[1] > 1 else weights
        keep = jnp.exp(running.top - _finite(top))
        mixed = jnp.sum(
            _mixture(weights.reshape(-1, *scores.shape[2:]), v).reshape(*shape, -1), axis=1
        )
        total = _over_items(weights, functools.partial(jnp.sum, dtype=jnp.float32))
        return _OnlineSoftmax(
            top, running.total * keep + total, running.mixed * keep[..., None] + mixed
        )

    start = _OnlineSoftmax.start((kv_heads, flat), arenas.value_dim)
    out, lse = _take_all(add, start, arenas, tiles).finish()
    shape = queries.q.shape[:-1]
    return out.reshape(*shape, -1), lse.reshape(shape)


def _grouped(queries: _RotatedQueries, arenas: _Arenas, tiles: Tiles, score: _Score) -> Partial:
    """(out [K, R, T, G, V], lse [K, R, T, G]) over the tiles that a few rows each, or one, read."""
    kv_heads, rows, width, group, dim = queries.q.shape
    readers = tiles.row.shape[1]
    few = rows >= max(_MANY_ROWS, _ROWS_PER_READER * tiles.at_once * readers)

    def add(running: _OnlineSoftmax, items: Tiles, k: Arena, v: Arena) -> _OnlineSoftmax:
        """Takes W items with their windows k, v [K * W, size, D] into the rows that read them."""
        row, slot = items.row, items.slot  # [W, Q]
        shape = (kv_heads, row.shape[0], readers * width * group)
        query = queries.towards(row, row, slot, arenas.keys.dtype)  # [K, W, Q, T, G, D]
        scores = score(query.reshape(-1, shape[2], dim), k).reshape(*shape, -1)
        scores = _masked(scores, *_ends(items, group))
        row = row.reshape(-1)

        def by_reader(x: Array) -> Array:
            """[K, W, Q * T * G, ...] -> [W * Q, K, T * G, ...]."""
            return jnp.moveaxis(
                x.reshape(kv_heads, row.shape[0], width * group, *x.shape[3:]), 0, 1
            )

        highest = by_reader(jnp.max(scores, axis=-1))
        if few:
            # Read before it is written, or all of it would be copied.
            before, highest = jax.lax.optimization_barrier((running.top[row], highest))
            top = running.top.at[row].max(highest)
        else:
            before = running.top
            top = jnp.maximum(before, jax.ops.segment_max(highest, row, rows))  # [R, K, T * G]
        under = _finite(top[row]).swapaxes(0, 1).reshape(shape)
        weights = _weights(scores - under[..., None], v)
        mixed = by_reader(_mixture(weights.reshape(-1, *scores.shape[2:]), v).reshape(*shape, -1))
        total = by_reader(jnp.sum(weights, axis=-1, dtype=jnp.float32))
        if few:
            # A row that reads several of these items is scaled to the same value each time, and
            # then adds the part of each of them.
            keep = jnp.exp(before - _finite(top[row]))
            return _OnlineSoftmax(
                top,
                running.total.at[row].set(running.total[row] * keep).at[row].add(total),
                running.mixed.at[row].set(running.mixed[row] * keep[..., None]).at[row].add(mixed),
            )
        keep = jnp.exp(before - _finite(top))
        return _OnlineSoftmax(
            top,
            running.total * keep + jax.ops.segment_sum(total, row, rows),
            running.mixed * keep[..., None] + jax.ops.segment_sum(mixed, row, rows),
        )

    start = _OnlineSoftmax.start((rows, kv_heads, width * group), arenas.value_dim)
    out, lse = _take_all(add, start, arenas, tiles).finish()
    shape = (rows, kv_heads, width, group)
    return out.reshape(*shape, -1).swapaxes(0, 1), lse.reshape(shape).swapaxes(0, 1)


def _take_all(
    add: Callable[[_OnlineSoftmax, Tiles, Arena, Arena], _OnlineSoftmax],
    running: _OnlineSoftmax,
    arenas: _Arenas,
    tiles: Tiles,
) -> _OnlineSoftmax:
    """Adds all items: a few at a time, gathered; or, where they fill much of the arena, all in one
    product over the arena itself."""
    at_once, arena, dim = tiles.at_once, *arenas.keys.shape[1:]

    def gathered(running: _OnlineSoftmax) -> _OnlineSoftmax:
        def body(i: Array, running: _OnlineSoftmax) -> _OnlineSoftmax:
            items = _select(tiles, lambda x: jax.lax.dynamic_slice_in_dim(x, i * at_once, at_once))
            return add(running, items, *arenas.windows(items))

        return jax.lax.fori_loop(0, -(-tiles.count // at_once), body, running)

    def whole(running: _OnlineSoftmax) -> _OnlineSoftmax:
        # The arena is reshaped to a list of windows: nothing is gathered. The starts of the items
        # give the item of each window.
        windows = arena // tiles.size
        item = (
            jnp.full(windows, tiles.start.shape[0] - 1)
            .at[jnp.where(real, tiles.start // tiles.size, windows)]
            .set(jnp.arange(real.shape[0]), mode="drop")
        )
        k, v = (a.reshape(-1, tiles.size, dim) for a in (arenas.keys, arenas.values))  # pyright: ignore
        return add(running, _select(tiles, lambda x: x[item]), k, v)

    if isinstance(arenas.keys, QuantisedTensor):  # or all codes would be converted at once
        return gathered(running)
    many = tiles.last.shape[1] * tiles.last.shape[2] > _MAX_QUERIES_AT_ONCE
    few = arena < _FEW_ITERATIONS * at_once * tiles.size
    if at_once == 1 or many or few or arena % tiles.size or arenas.makers is not None:
        return gathered(running)
    real = jnp.arange(tiles.start.shape[0]) < tiles.count
    aligned = jnp.all(~real | ((tiles.start % tiles.size == 0) & (tiles.first == 0)))
    fills = 2 * tiles.count * tiles.size >= arena
    return jax.lax.cond(aligned & fills, whole, gathered, running)


def _over_items(x: Array, reduce: Callable[..., Array]) -> Array:
    """Reduces [K, W, Q, size] to [K, Q]. In two steps, because XLA vectorises a reduction on the
    CPU if it leaves the last axis."""
    if x.shape[1] == 1:
        return reduce(x, axis=(1, 3))
    return reduce(jax.lax.optimization_barrier(reduce(x, axis=1)), axis=-1)


def _select(tiles: Tiles, select: Callable[[Array], Array]) -> Tiles:
    """Those of the items that `select` takes of an array of all of them."""
    names = "start", "first", "row", "slot", "last", "begin"
    taken = {name: jax.tree.map(select, getattr(tiles, name)) for name in names}
    return dataclasses.replace(tiles, **taken)


def _windows(arena: Arena, items: Tiles) -> Arena:
    """The windows of W items, [K * W, size, D]."""

    def windows(a: Array) -> Array:
        window = jax.vmap(
            lambda start: jax.lax.dynamic_slice_in_dim(a, start, items.size, axis=1), out_axes=1
        )
        return window(items.start).reshape(-1, items.size, a.shape[2])

    return jax.tree.map(windows, arena)


def _bias(first: Array, last: Array, size: int) -> Array:
    """The bias [W, size]: 0 where first [W] <= token < last [W], else -inf."""
    token = jnp.arange(size)
    return jnp.where((token >= first[:, None]) & (token < last[:, None]), 0.0, -jnp.inf)


def _ends(items: Tiles, group: int) -> tuple[Array, Array]:
    """The first token that each query of W items sees, [W, 1] or [W, Q], and the end [W, Q]."""

    def by_query(x: Array) -> Array:
        return jnp.broadcast_to(x[..., None], (*x.shape, group)).reshape(x.shape[0], -1)

    first = items.first[:, None] if items.begin is None else by_query(items.begin)
    return first, by_query(items.last)


def _masked(scores: Array, first: Array, last: Array) -> Array:
    """The scores [K, W, Q, size] where first [W, 1 or Q] <= token < last [W, Q], else -inf."""
    # One unsigned comparison for both ends. The barrier keeps the gathers that made `last` out of
    # the wide loop.
    first, last = jax.lax.optimization_barrier((first, last))
    token = (jnp.arange(scores.shape[-1]) - first[..., None]).astype(jnp.uint32)
    seen = jnp.maximum(last - first, 0).astype(jnp.uint32)
    return jnp.where(token < seen[..., None], scores, -jnp.inf)


def _weights(x: Array, v: Arena) -> Array:
    """Computes exp(x) for x <= 0, rounded to the dtype of the values; 0 for -inf.

    Of quantised values in float32: they are rounded when they are scaled (`_mixture`).
    """
    dtype = v.dtype

    def short(x: Array) -> Array:
        # On a CPU the exponential costs as much as a product. A result that is rounded to 11 bits
        # or fewer needs no more than a cubic: 2**n goes into the exponent's bits, and 2**r with
        # 0 <= r < 1 has a relative error of 1e-4 at most. Below 2**-126 it is 0.
        x = jnp.maximum(x * _LOG2_E, -127.0)
        n = jnp.floor(x)
        r = x - n
        part = 1.0 + r * (0.69555686 + r * (0.22617357 + r * 0.07814557))
        return jax.lax.bitcast_convert_type((n.astype(jnp.int32) + 127) << 23, jnp.float32) * part

    if dtype == jnp.float32:
        return jnp.exp(x)
    weights = jax.lax.platform_dependent(x, cpu=short, default=jnp.exp)
    return weights if isinstance(v, QuantisedTensor) else weights.astype(dtype)


# Codes of eight bits are exact in every dtype of queries, and their scales are factors of scores
# and of weights: no key or value is dequantised.


def _scores(query: Array, k: Arena, *, softcap: float) -> Array:
    """The scores [n, q, size] of queries [n, q, D] and keys [n, size, D]."""
    if isinstance(k, QuantisedTensor):
        products = _product(query, k.codes.astype(query.dtype), 2)
        return soft_capped(products * k.scales.swapaxes(1, 2), softcap)
    return soft_capped(_product(query, k, 2), softcap)


def _mixture(weights: Array, v: Arena) -> Array:
    """The sums [n, q, D] of values [n, size, D] with their weights [n, q, size]."""
    if isinstance(v, QuantisedTensor):
        scaled = (weights * v.scales.swapaxes(1, 2)).astype(v.dtype)
        return _product(scaled, v.codes.astype(v.dtype), 1)
    return _product(weights, v, 1)


def _product(a: Array, b: Array, contract: int) -> Array:
    """The batched product of a [n, q, x] with b, contracting b's axis `contract`; float32 results,
    exact products for float32 input."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a,
        b,
        (((2,), (contract,)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _finite(top: Array) -> Array:
    """The number to subtract from scores: 0 where nothing was seen yet."""
    return jnp.where(jnp.isneginf(top), 0.0, top)
