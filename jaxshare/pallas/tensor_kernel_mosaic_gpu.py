"""The kernel of block attention for Blackwell GPUs that multiplies in their tensor memory.

It serves passes of many queries over an exact cache. tcgen05 multiplies 128 rows at once, one
instruction after the other, and leaves the results in tensor memory, of which a multiprocessor has
128 rows of 512 columns. Of the three warpgroups of an item two have 128 queries of a segment each.
Of the third one warp fetches, as in `jaxshare.pallas.kernel_mosaic_gpu`, and another multiplies:

  * it makes the scores of both for a tile; one warpgroup makes weights of its scores while the
    products of the other run, as in FlashAttention-4 (Hydragen section 3.2);
  * weights take the place of the scores that they are of, and the results stay in tensor memory
    until the end of a piece. A warpgroup scales them only where a maximum rises by more than
    `RISE`: until then weights are relative to a maximum before, which changes no result.

A thread has a query, and all of its scores of a tile. Results are stored 128 rows at a time,
straight from registers. Rows beyond a piece's queries are those of later pieces of the same item,
which overwrite them, or of none.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxshare.pallas.codes_mosaic_gpu import TileStream, layout_of, wait_for_last
from jaxshare.pallas.items_mosaic_gpu import ItemReads, SegmentTiles
from jaxshare.pallas.registers_mosaic_gpu import any_of_warp, store, wait_for_loads_of_warp
from jaxshare.pallas.scores import capped
from jaxshare.pallas.tiles import TENSOR_ROWS, MosaicTiles
from jaxshare.pallas.work_items import ROW_ALIGNMENT, Work, partial_row

ROWS = TENSOR_ROWS
SPAN = 2 * ROWS
"""Queries of a segment."""
RISE = 8.0
"""The base-2 logarithm of the most that a weight can be: half precision holds sums of these."""
REGISTERS: tuple[int, ...] = (232, 232, 40)
"""Of a thread of each warpgroup: of the 504 that three have."""
COLUMNS = 32
"""Of results that are in registers at once."""


class TensorMemory(NamedTuple):
    """The tensor memory, shared memory and barriers of the kernel.

    Barriers of two are one for each warpgroup that has queries. Full and free are between the warp that
    fetches and the one that multiplies, scores and weights between the latter and a warpgroup.

    Attributes:
      scores: tensor memory of each warpgroup, [128, tile] in float32, and in its place the weights,
        as many in the cache's dtype.
      results: the same, [128, D].
      queries: [slots, 2, 128, D].
      factors: of each query's result, [2, 128].
      query_full, query_free, scores_full, weights_full: barriers.
      mixed: the values of a tile have been added to the results.
      finished: and those of the last of a piece.
      stored: the second warpgroup has stored its results of a piece; two, in turn, since the first one
        may be a piece behind.
      keys, values: slots in shared memory [slots, tile, D], and their barriers full and free.
    """

    scores: tuple[Any, Any]
    results: tuple[Any, Any]
    queries: Any
    factors: Any
    query_full: Any
    query_free: Any
    scores_full: Any
    weights_full: Any
    mixed: Any
    finished: Any
    stored: Any
    keys: tuple[Any, Any, Any]
    values: tuple[Any, Any, Any]

    @classmethod
    def scratch(cls, plgpu: Any, tiles: MosaicTiles, dim: int, dtype: Any) -> "TensorMemory":
        """Creates them for `plgpu.kernel`; `dtype` is that of queries, keys and values."""
        swizzled = layout_of(plgpu, dim, dtype.itemsize)
        products = functools.partial(plgpu.Barrier, orders_tensor_core=True)

        def slots() -> tuple[Any, Any, Any]:
            return (
                plgpu.SMEM((tiles.stages, tiles.tile, dim), dtype, transforms=swizzled),
                plgpu.Barrier(num_barriers=tiles.stages),
                products(num_barriers=tiles.stages),
            )

        def scores() -> Any:
            shape = ROWS, tiles.tile
            weights = plgpu.TMEM(shape, dtype, packed=True)
            return plgpu.RefUnion(plgpu.TMEM(shape, jnp.float32), weights)

        def results() -> Any:
            return plgpu.TMEM((ROWS, dim), jnp.float32)

        return cls(
            (scores(), scores()),
            (results(), results()),
            plgpu.SMEM((tiles.query_stages, 2, ROWS, dim), dtype, transforms=swizzled),
            plgpu.SMEM((2, ROWS), jnp.float32),
            query_full=plgpu.Barrier(num_barriers=2 * tiles.query_stages),
            query_free=products(num_barriers=tiles.query_stages),
            scores_full=products(num_barriers=2),
            weights_full=products(num_barriers=2),
            mixed=products(num_barriers=2),
            finished=products(num_barriers=2),
            stored=plgpu.Barrier(num_barriers=2),
            keys=slots(),
            values=slots(),
        )


def tensor_kernel(
    plgpu: Any,
    work: Work,
    tiles: MosaicTiles,
    softcap: float,
    interpret: bool,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    limit_ref: Any,
    item_ref: Any,
    segment_ref: Any,
    count_ref: Any,
    *rest: Any,
) -> None:
    """The kernel of one item. plgpu is Pallas' Mosaic GPU module.

    Refs in device memory: q [K, Q + 256, D], k, v [K, tokens, D], limit [Q + 256], item [P, 4],
    segment [S, 8], count [2], with a sliding window unseen [Q + 256], out [partial rows, padded D],
    lse [partial rows]. Then `TensorMemory`.
    """
    *unseen_ref, out_ref, lse_ref, memory = rest
    size, dim, dtype = tiles.tile, k_ref.shape[2], q_ref.dtype
    scores_of, weights_of = zip(*memory.scores, strict=True)
    native = plgpu.Layout.TCGEN05_TMEM_NATIVE
    item, warpgroup = lax.axis_index("item"), lax.axis_index("warpgroup")
    keys = TileStream(k_ref, *memory.keys)
    values = TileStream(v_ref, *memory.values)
    reads = ItemReads(
        item_ref,
        segment_ref,
        count_ref,
        item,
        tile=size,
        arena=k_ref.shape[1],
        constants=False,
        hints=False,
    )

    def tile_slot(used: Array) -> Array:
        return lax.rem(used, tiles.stages)

    def query_slot(pieces: Array) -> Array:
        return lax.rem(pieces, tiles.query_stages)

    def is_read(now: SegmentTiles) -> Array:
        return now.end > now.first

    def is_wide(now: SegmentTiles) -> Array:
        return now.queries > ROWS

    def counted(now: SegmentTiles, pieces: Array, used: Array) -> tuple[Array, Array]:
        """Pieces and tiles after those of a segment."""
        tiles_read = jnp.maximum(now.end - now.first, 0)
        return pieces + is_read(now).astype(jnp.int32), used + tiles_read

    def fetch_piece(number: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        pieces, fetched = done
        now, slot = reads.segment(number), query_slot(pieces)

        @pl.when(is_read(now))
        def _() -> None:
            @pl.when(pieces >= tiles.query_stages)
            def _() -> None:
                plgpu.barrier_wait(memory.query_free.at[slot])

            def fetch_half(half: int) -> None:
                plgpu.copy_gmem_to_smem(
                    q_ref.at[now.head, pl.ds(now.query + half * ROWS, ROWS)],
                    memory.queries.at[slot, half],
                    memory.query_full.at[2 * slot + half],
                )

            fetch_half(0)
            pl.when(is_wide(now))(lambda: fetch_half(1))

        def fetch_tile(i: Array, fetched: Array) -> Array:
            for stream in (keys, values):
                stream.fetch(plgpu, now.head, reads.window(now, i)[0], fetched)
            return fetched + 1

        lax.fori_loop(now.first, now.end, fetch_tile, fetched)
        return counted(now, pieces, fetched)

    def fetch() -> None:
        pieces, fetched = lax.fori_loop(
            reads.first_segment, reads.end_segment, fetch_piece, (jnp.int32(0), jnp.int32(0))
        )
        wait_for_last(plgpu, pieces, memory.query_free)
        wait_for_last(plgpu, fetched, keys.free, values.free)

    def score(half: int, queries: Array, slot: Array) -> None:
        """The product of a warpgroup's queries and a tile's keys."""
        plgpu.tcgen05_mma(
            scores_of[half],
            memory.queries.at[queries, half],
            keys.slots.at[slot].transpose((1, 0)),
            memory.scores_full.at[half],
            accumulate=False,
        )

    def multiply_piece(number: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        pieces, used = done
        now, queries = reads.segment(number), query_slot(pieces)
        halves = ((0, True), (1, is_wide(now)))

        @pl.when(is_read(now))
        def _() -> None:
            for half, here in halves:

                @pl.when(here)
                def _(half: int = half) -> None:
                    plgpu.barrier_wait(memory.query_full.at[2 * queries + half])
                    if not half:
                        plgpu.barrier_wait(keys.full.at[tile_slot(used)])
                    score(half, queries, tile_slot(used))

            plgpu.tcgen05_commit_arrive(keys.free.at[tile_slot(used)])

        def mix_tile(i: Array, used: Array) -> Array:
            slot, following, more = tile_slot(used), tile_slot(used + 1), i + 1 < now.end
            plgpu.barrier_wait(values.full.at[slot])
            for half, here in halves:

                @pl.when(here)
                def _(half: int = half) -> None:
                    plgpu.barrier_wait(memory.weights_full.at[half])
                    plgpu.tcgen05_mma(
                        memory.results[half],
                        weights_of[half],
                        values.slots.at[slot],
                        memory.mixed.at[half],
                        accumulate=i > now.first,
                    )
                    # The scores that follow take the place of these weights: they wait for their use,
                    # with which the order of products of different results is defined.
                    if not half:
                        pl.when(more)(lambda: plgpu.barrier_wait(keys.full.at[following]))
                    plgpu.barrier_wait(memory.mixed.at[half])
                    pl.when(more)(lambda: score(half, queries, following))

            plgpu.tcgen05_commit_arrive(values.free.at[slot])
            pl.when(more)(lambda: plgpu.tcgen05_commit_arrive(keys.free.at[following]))
            return used + 1

        lax.fori_loop(now.first, now.end, mix_tile, used)

        @pl.when(is_read(now))
        def _() -> None:
            for half, here in halves:
                finished = memory.finished.at[half]
                pl.when(here)(functools.partial(plgpu.tcgen05_commit_arrive, finished))
            plgpu.tcgen05_commit_arrive(memory.query_free.at[queries])

        return counted(now, pieces, used)

    def multiply() -> None:
        lax.fori_loop(
            reads.first_segment, reads.end_segment, multiply_piece, (jnp.int32(0), jnp.int32(0))
        )

    def feed() -> None:
        plgpu.set_max_registers(REGISTERS[2], action="decrease")

        @plgpu.warp_map
        def _(warp: Array) -> None:
            pl.when(warp == 0)(fetch)
            pl.when(warp == 1)(multiply)

    def filled(value: float) -> Array:
        return plgpu.layout_cast(jnp.full(ROWS, value, jnp.float32), native.reduce(1))

    def wide(x: Array, columns: int, layout: Any = native) -> Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (ROWS, columns), [0]), layout)

    def parts_of_results(half: int) -> Iterator[tuple[Any, Any]]:
        """(columns, the part of the results)"""
        for first in range(0, dim, COLUMNS):
            columns = pl.ds(first, min(COLUMNS, dim - first))
            yield columns, memory.results[half].at[:, columns]

    def weigh(
        half: int,
        now: SegmentTiles,
        seen_by: tuple[Array, list[Array]],
        masked: bool,
        i: Array,
        state: tuple[Array, Array],
    ) -> tuple[Array, Array]:
        """Makes the weights of the i-th tile; returns the maximum that they are relative to, and their
        sum so far."""
        base, total = state
        plgpu.barrier_wait(memory.scores_full.at[half])
        scores = plgpu.async_load_tmem(scores_of[half], layout=native)
        plgpu.wait_load_tmem()
        scores = capped(scores, softcap, few_registers=size > 64)
        if masked:
            limit, unseen = seen_by
            seen = reads.seen(plgpu, now, i, limit, unseen, layout=native)
            scores = jnp.where(seen, scores, -jnp.inf)
        highest = jnp.max(scores, axis=1)
        rises = highest > base + RISE
        new_base = jnp.where(rises, highest, base)
        factor = jnp.where(rises, jnp.exp2(base - new_base), 1.0)

        # What was mixed before these scores were made is there: they came after it. Warps decide for
        # themselves, so that none may wait here for the others.
        @pl.when((i > now.first) & any_of_warp(plgpu, rises, native.reduce(1), interpret))
        def _() -> None:
            for columns, ref in parts_of_results(half):
                found = plgpu.async_load_tmem(ref, layout=native)
                wait_for_loads_of_warp(plgpu, interpret)
                plgpu.async_store_tmem(ref, found * wide(factor, columns.size))

        under = jnp.where(new_base == -jnp.inf, 0.0, new_base) if masked else new_base
        weights = jnp.exp2(scores - wide(under, size))
        plgpu.async_store_tmem(weights_of[half], weights.astype(dtype))
        plgpu.commit_tmem()
        plgpu.barrier_arrive(memory.weights_full.at[half])
        return new_base, total * factor + jnp.sum(weights, axis=1)

    def wait_for_stored(wides: Array) -> None:
        """Waits until the second warpgroup has stored its results of the last piece of both."""
        plgpu.barrier_wait(memory.stored.at[lax.rem(wides - 1, 2)])

    def store_piece(
        half: int, now: SegmentTiles, wides: Array, is_after: Array, base: Array, total: Array
    ) -> None:
        """Stores a piece's results.

        `wides`: pieces of both warpgroups before. `is_after`: the one just before was among them.
        """
        plgpu.barrier_wait(memory.finished.at[half])
        empty = total == 0.0
        total = jnp.where(empty, 1.0, total)
        memory.factors[half] = 1.0 / total
        plgpu.commit_smem()
        by_rows = plgpu.Layout.TCGEN05
        factor = plgpu.load(memory.factors.at[half], layout=by_rows.reduce(1), optimized=False)
        row = partial_row(work, item, now.head, now.query + half * ROWS)
        rows = pl.ds(pl.multiple_of(row, ROW_ALIGNMENT), ROWS)
        # Rows beyond the queries that the second warpgroup stored are those of this piece.
        if not half:
            pl.when(is_after)(lambda: wait_for_stored(wides))
        lse = jnp.where(empty, -jnp.inf, base + jnp.log(total) * math.log2(math.e))
        store(plgpu, lse_ref.at[rows], lse)
        for columns, ref in parts_of_results(half):
            found = plgpu.async_load_tmem(ref, layout=by_rows)
            store(plgpu, out_ref.at[rows, columns], found * wide(factor, columns.size, by_rows))
        plgpu.wait_load_tmem()
        if half:
            plgpu.barrier_arrive(memory.stored.at[lax.rem(wides, 2)])

    def compute_piece(half: int, number: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        (wides, is_after), now = done, reads.segment(number)

        @pl.when(is_read(now) & is_wide(now) if half else is_read(now))
        def _() -> None:
            limit, *unseen = reads.bounds(
                plgpu, now, (limit_ref, *unseen_ref), half * ROWS, ROWS, native.reduce(1)
            )
            take = functools.partial(weigh, half, now, (limit, unseen))
            whole = jnp.clip(now.full, now.first, now.end)
            state = filled(-jnp.inf), filled(0.0)
            state = lax.fori_loop(now.first, whole, functools.partial(take, False), state)
            state = lax.fori_loop(whole, now.end, functools.partial(take, True), state)
            store_piece(half, now, wides, is_after, *state)

        is_both = is_read(now) & is_wide(now)
        return wides + is_both.astype(jnp.int32), is_both | (is_after & ~is_read(now))

    def compute(half: int) -> None:
        plgpu.set_max_registers(REGISTERS[half], action="increase")
        wides, is_after = lax.fori_loop(
            reads.first_segment,
            reads.end_segment,
            functools.partial(compute_piece, half),
            (jnp.int32(0), jnp.bool_(False)),
        )
        if not half:
            pl.when(is_after)(lambda: wait_for_stored(wides))

    # Not one after the other: what one of them has ready would take the other's registers.
    roles = functools.partial(compute, 0), functools.partial(compute, 1), feed
    lax.switch(warpgroup, roles)
