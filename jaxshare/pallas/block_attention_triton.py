"""Block attention in a kernel that JAX lowers through Triton: for NVIDIA GPUs from Ampere on.

A program processes one item of the pass (`jaxshare.pallas.work_items`): it walks the item's
segments, rotates each one's queries towards its block as it loads them (Hogwild! section 3.4), and
adds the segment's tiles to a running softmax. It stores partial results for each segment, which
`jaxshare.pallas.merge_triton` merges. Where values are a part of keys (multi-head latent attention)
a tile is loaded once for both.

JAX has deprecated this way to a GPU. Nothing else depends on it, and a JAX without it fails only
when this backend is called.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jaxshare.attention.plan import Plan
from jaxshare.pallas.chosen_tiles import choose_triton
from jaxshare.pallas.device import Device, check_triton, current_device
from jaxshare.pallas.head_dims import MAX_QUERY_HEADS, check_head_dim
from jaxshare.pallas.merge_triton import merge_pieces
from jaxshare.pallas.scores import capped, query_scale
from jaxshare.pallas.tiles import TritonTiles
from jaxshare.pallas.work_items import Work, WorkForm, keep_work, partial_row, work_of
from jaxshare.quantised import QuantisedTensor
from jaxshare.quantised_cache import Arena, approximation

_DTYPES = (jnp.bfloat16, jnp.float16)
_MIN_CAPABILITY = 80
_MIN_CAPABILITY_OF_FP8 = 89


def triton_attention(
    q: Float[Array, "R T H D"],
    keys: Arena,
    values: Arena,
    plan: Plan,
    scale: float,
    softcap: float = 0.0,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "R T H _"]:
    """Attention of queries over arenas that already hold this pass's keys.

    The queries come not rotated; the result has their dtype. They are rotated in float32 and
    rounded to the cache's dtype; scores, weights and sums are float32, weights rounded to the
    cache's dtype for their product with the values. Codes of quantised keys and values are exact in
    that dtype, and their scales are factors of scores and weights.

    Raises:
      NotImplementedError: no such GPU, head dim, group or dtype, or a JAX without Triton.
    """
    device, tiles, form = _chosen(q, keys, values, plan)
    rows, width, heads, _ = q.shape
    work = work_of(plan, form)
    mixed, lse = _pieces(q, keys, values, plan, work, scale, softcap, tiles, device.interpret)
    return merge_pieces(
        mixed,
        lse,
        work,
        (rows, width, heads, mixed.shape[1]),
        q.dtype,
        multiprocessors=device.multiprocessors,
        interpret=device.interpret,
        axis=plan.token_sharding.axis,
        sinks=sinks,
    )


def with_triton_work(q: jax.ShapeDtypeStruct, keys: Arena, values: Arena, plan: Plan) -> Plan:
    """The plan with what all layers of such queries have in common. Raises as `triton_attention`."""
    return keep_work(plan, _chosen(q, keys, values, plan)[2])


def _chosen(
    q: Array | jax.ShapeDtypeStruct, keys: Arena, values: Arena, plan: Plan
) -> tuple[Device, TritonTiles, WorkForm]:
    """The GPU to run on, and the tiles and the form of the work there."""
    device = _supported_device(q, keys, values, plan)
    rows, width, heads, dim = q.shape
    group = heads // keys.shape[0]
    dtype = keys.codes.dtype if isinstance(keys, QuantisedTensor) else keys.dtype
    tiles = choose_triton(device, dim, group, rows * width * group, dtype)
    num_items = device.multiprocessors * tiles.items_per_multiprocessor
    return device, tiles, WorkForm(group, keys.shape[0], tiles.span, tiles.tile, num_items)


def _supported_device(
    q: Array | jax.ShapeDtypeStruct, keys: Arena, values: Arena, plan: Plan
) -> Device:
    """The GPU to run on.

    Raises:
      NotImplementedError: see `triton_attention`.
    """
    device = current_device()
    if device is None or device.capability < _MIN_CAPABILITY:
        here = (
            jax.default_backend()
            if device is None
            else f"{device.kind} of {device.capability // 10}.{device.capability % 10}"
        )
        raise NotImplementedError(
            f"it runs on NVIDIA GPUs from compute capability 8.0; this is {here}"
        )
    if keys.dtype not in _DTYPES:
        raise NotImplementedError(f"its caches are bfloat16 or float16; this one is {keys.dtype}")
    if values.dtype != keys.dtype:
        raise NotImplementedError(
            f"keys and values must be of one dtype; these are {keys.dtype} and {values.dtype}"
        )
    if approximation(keys) == "fp8" and device.capability < _MIN_CAPABILITY_OF_FP8:
        raise NotImplementedError("it converts fp8 on GPUs from compute capability 8.9")
    check_head_dim(q.shape[3], values.shape[2], 2 * plan.query_cos.shape[-1])
    if (group := q.shape[2] // keys.shape[0]) > MAX_QUERY_HEADS:
        raise NotImplementedError(
            f"it takes up to {MAX_QUERY_HEADS} query heads for each kv head; here are {group}"
        )
    check_triton()
    return device


def _pieces(
    q: Array,
    keys: Arena,
    values: Arena,
    plan: Plan,
    work: Work,
    scale: float,
    softcap: float,
    tiles: TritonTiles,
    interpret: bool,
) -> tuple[Array, Array]:
    """Partial results of all items, base 2.

    They are attention float32[partial_rows, V] over the keys of a piece, and its log-sum-exp
    float32[partial_rows]. Only rows of real pieces are written.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    rows, width, heads, dim = q.shape
    pairs = plan.query_cos.shape[-1]
    # A kernel takes no empty arrays: without rotation it gets two that it does not read.
    tables = [
        x.reshape(-1, pairs) if pairs else jnp.zeros((1, 1))
        for x in (plan.query_cos, plan.query_sin)
    ]
    # Nor does it take values that have no entries.
    kept = [keys, values] if values.shape[2] else [keys]
    arenas = [each.codes if isinstance(each, QuantisedTensor) else each for each in kept]
    scales = [each.scales[..., 0] for each in kept if isinstance(each, QuantisedTensor)]
    value_dim = values.shape[2] or dim - 2 * pairs
    return pl.pallas_call(
        functools.partial(
            _kernel,
            work,
            latent=not values.shape[2],
            width=width,
            listed=plan.blocks.shape[1],
            pairs=pairs,
            scale=query_scale(scale, softcap),
            softcap=softcap,
            dtype=keys.dtype,
        ),
        out_shape=(
            jax.ShapeDtypeStruct((work.partial_rows, value_dim), jnp.float32),
            jax.ShapeDtypeStruct((work.partial_rows,), jnp.float32),
        ),
        grid=(work.items.shape[0],),
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="block_attention",
    )(
        q.reshape(rows * width, heads, dim),
        *tables,
        *arenas,
        work.items,
        work.totals,
        work.segments.table,
        work.source,
        work.limits,
        *([] if work.unseen is None else [work.unseen]),
        *scales,
    )


def _kernel(
    work: Work,
    q_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    keys_ref: Any,
    *refs: Any,
    latent: bool,
    width: int,
    listed: int,
    pairs: int,
    scale: float,
    softcap: float,
    dtype: Any,
) -> None:
    """Processes one item.

    Refs: q [R * T, H, D]; cos, sin float32[R * N * T, P]; keys, values [K, tokens, D]; items
    int32[items, 4]; totals int32[2]; segments int32[S, 8]; source, limits int32[Q + span],
    with a sliding window also unseen; of quantised keys and values also their scales
    float32[K, tokens]; mixed float32[partial_rows, V]; lse float32[partial_rows]. Of `work` only the
    static fields are used. `scale` is that of `query_scale`, `dtype` that of products. `latent`:
    there are no values; they are the keys' entries from 2 P on.

    Heads whose D is no power of two are cut into parts that are: Triton has no other shapes. Loads
    go through arrays of indices, whose masks keep them inside their array.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    values_ref, rest = (keys_ref, refs) if latent else (refs[0], refs[1:])
    items_ref, totals_ref, segments_ref, source_ref, limits_ref, *rest = rest
    *more, mixed_ref, lse_ref = rest
    unseen_ref = more[: work.unseen is not None]
    scales_ref = more[len(unseen_ref) :]
    span, tile = work.span, work.tile
    group = q_ref.shape[1] // keys_ref.shape[0]
    dim = q_ref.shape[2]
    first_value = 2 * pairs if latent else 0
    runs = [*_runs(0, first_value), *_runs(first_value, dim)]
    value_runs = [run for run in runs if run.start >= first_value]
    item = pl.program_id(0)
    first_tile, end_tile, first_segment, end_segment = (items_ref[item, i] for i in range(4))
    count, total = totals_ref[0], totals_ref[1]

    def segment(number: Array, _: None) -> None:
        head = number // count
        index = number - head * count
        # Without a window nothing is read in another order.
        query, queries, start, lead, tiles, full, before, *turn = (
            segments_ref[index, i] for i in range(8 if unseen_ref else 7)
        )
        before = head * total + before
        first, end = jnp.maximum(first_tile - before, 0), jnp.minimum(end_tile - before, tiles)

        lane = jnp.arange(span)
        source = plt.load(source_ref.at[query + lane])
        real = (lane < queries) & (source >= 0)
        source = jnp.where(real, source, 0)
        limit, *unseen = (
            jnp.where(real, plt.load(ref.at[query + lane]) + (lead if unseen_ref else 0), 0)
            for ref in (limits_ref, *unseen_ref)
        )
        longest = jnp.max(limit)
        token = source // (listed * width * group) * width + source // group % width
        rotation = source // group

        def rotated(run: _ColumnRun) -> Array:
            """The queries [span, D'], rotated towards the block.

            Entry i < P is rotated with i + P, and i + P with i; entries from 2P on are unchanged.
            """
            column = run.column
            member = head * group + source[:, None] % group
            inside = real[:, None] & (column < run.end)[None]
            x = plt.load(
                q_ref.at[token[:, None], member, column[None]], mask=inside, other=0.0
            ).astype(jnp.float32)
            if run.start < 2 * pairs:
                rotates, is_first = column < 2 * pairs, column < pairs
                partner = jnp.where(is_first, column + pairs, column - pairs)
                angle = rotation[:, None], jnp.where(is_first, column, partner)[None]
                turned = real[:, None] & rotates[None]
                cos = plt.load(cos_ref.at[angle], mask=turned, other=1.0)
                sin = plt.load(sin_ref.at[angle], mask=turned, other=0.0)
                y = plt.load(
                    q_ref.at[token[:, None], member, partner[None]], mask=turned, other=0.0
                ).astype(jnp.float32)
                x = x * cos + y * jnp.where(is_first[None], -sin, sin)
            return (x * scale).astype(dtype)

        turned = [rotated(run) for run in runs]

        def take(masked: bool, j: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            """Adds one tile to the running softmax. `masked`: some query does not see all of it."""
            top, weight, *mixed = carry
            for first_read in turn:
                j = j + first_read
                j = jnp.where(j >= tiles, j - tiles, j)
            index = j * tile + jnp.arange(tile)

            def parts(ref: Any) -> list[Array]:
                found = []
                for run in runs:
                    # Entries after the longest limit are undefined, and may be outside the arena.
                    masks = [(index < longest)[:, None]] * masked + [
                        (run.column < run.end)[None]
                    ] * run.padded
                    mask: Any = (
                        {
                            "mask": functools.reduce(jnp.logical_and, masks),
                            "other": jnp.zeros((), ref.dtype),
                        }
                        if masks
                        else {}
                    )
                    part = plt.load(
                        ref.at[head, (start + index)[:, None], run.column[None]], **mask
                    )
                    found.append(part if part.dtype == dtype else _widened(part, dtype))
                return found

            def scaled(x: Array, number: int) -> Array:
                """Numbers [span, tile] times the scales of the tile's keys (0) or values (-1)."""
                if not scales_ref:
                    return x
                mask = {"mask": index < longest, "other": 1.0} if masked else {}
                return x * plt.load(scales_ref[number].at[head, start + index], **mask)[None]

            k = parts(keys_ref)
            scores = scaled(functools.reduce(jnp.add, map(_scores, turned, k)), 0)
            scores = capped(scores, softcap)
            if masked:
                seen = index[None] < limit[:, None]
                for begin in unseen:
                    seen = seen & (index[None] >= begin[:, None])
                scores = jnp.where(seen, scores, -jnp.inf)
            higher = jnp.maximum(top, jnp.max(scores, axis=1))
            under = jnp.where(higher == -jnp.inf, 0.0, higher) if masked else higher
            keep = jnp.exp2(top - under)
            weights = jnp.exp2(scores - under[:, None])
            of_values = scaled(weights, -1).astype(dtype)
            mixed = [
                m * keep[:, None] + _mixed(of_values, v)
                for m, v in zip(
                    mixed, k[-len(mixed) :] if latent else parts(values_ref), strict=True
                )
            ]
            return higher, weight * keep + jnp.sum(weights, axis=1), *mixed

        state = (
            jnp.full(span, -jnp.inf),
            jnp.zeros(span),
            *(jnp.zeros((span, run.column.size)) for run in value_runs),
        )
        middle = jnp.clip(full, first, jnp.maximum(first, end))
        state = lax.fori_loop(first, middle, functools.partial(take, False), state)
        top, weight, *mixed = lax.fori_loop(middle, end, functools.partial(take, True), state)

        row = partial_row(work, item, head, query + lane)
        stored = lane < queries
        some = jnp.where(weight == 0, 1.0, weight)
        plt.store(
            lse_ref.at[row], jnp.where(weight == 0, -jnp.inf, top + jnp.log2(some)), mask=stored
        )
        for run, m in zip(value_runs, mixed, strict=True):
            plt.store(
                mixed_ref.at[row[:, None], (run.column - first_value)[None]],
                m / some[:, None],
                mask=stored[:, None] & (run.column < run.end)[None],
            )

    lax.fori_loop(first_segment, end_segment, segment, None)


class _ColumnRun(NamedTuple):
    """Neighbouring columns of a head.

    The first's number, all their numbers, the end of those that there are (exclusive), and whether
    some are after it.
    """

    start: int
    column: Array
    end: int
    padded: bool


def _runs(start: int, end: int) -> list[_ColumnRun]:
    """The columns from `start` to `end` in runs whose sizes are powers of two, the largest first.

    80 is 64 and 32, half of those padding. None is narrower than 32: where a product has no more
    columns than it has rows, Triton has all warps compute all of it if rows are few.
    """
    runs = []
    while start < end:
        size = min(max(1 << ((end - start).bit_length() - 1), 32), 256)
        runs.append(_ColumnRun(start, start + jnp.arange(size), end, start + size > end))
        start += size
    return runs


def _widened(codes: Array, dtype: Any) -> Array:
    """Codes as numbers, which the dtype has exactly."""
    return codes.astype(jnp.float32).astype(dtype)


def _scores(q: Array, k: Array) -> Array:
    """[span, D'] by [tile, D'] -> float32[span, tile]."""
    return lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _mixed(weights: Array, v: Array) -> Array:
    """[span, tile] by [tile, D'] -> float32[span, D']."""
    return lax.dot_general(weights, v, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
