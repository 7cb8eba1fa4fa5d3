"""The kernel of block attention for Hopper and Blackwell GPUs, in Pallas on Mosaic GPU.

One persistent program a multiprocessor takes one work item (`jaxshare.pallas.work_items`). Of its
three warpgroups one fetches: queries of the next segment and tiles of keys and values, in bulk
copies, as many under way as shared memory holds. The two others compute, 64 queries each:

  * a wide segment, of more than 64 queries, is split between them by queries: both use each tile
    (Hydragen section 3.2). On Hopper they take turns to multiply, and the scores of a tile are under
    way before the values of the one before are mixed, so that one's products run under the other's
    exponentials, and under its own (FlashAttention-3, sections 3.1 and 3.2);
  * a narrow one, down to a single row's, is split by tiles: they alternate, and their results are
    merged at its end.

Where the cache approximates, tiles of codes are what is fetched, and they are converted before they
are used (`jaxshare.pallas.codes_mosaic_gpu`).

So one shape of program serves blocks that one row sees and blocks that a thousand see. Products have
64 rows throughout (`jaxshare.pallas.products_mosaic_gpu`): they are mostly padding for a private
block, but then memory, not the matrix units, sets the pace (benchmarks/roofline.md).
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxshare.pallas.codes_mosaic_gpu import (
    WIDEST_APART,
    Conversion,
    TileStream,
    scaled,
    wait_for_last,
)
from jaxshare.pallas.items_mosaic_gpu import WARPGROUP, ItemReads
from jaxshare.pallas.products_mosaic_gpu import WarpgroupProducts
from jaxshare.pallas.scores import capped
from jaxshare.pallas.tiles import MosaicTiles
from jaxshare.pallas.work_items import ROW_ALIGNMENT, Work, partial_row


class Barriers(NamedTuple):
    """The barriers of the kernel.

    Those named full and free are between the warpgroup that fetches, or converts codes, and the two
    that compute: a slot is full, or free again. The others are between those two: `given` and `taken`
    where one gets the other's results, and `turn`, one for each, where it is its turn to multiply.
    """

    query_full: Any
    query_free: Any
    key_full: Any
    value_full: Any
    key_free: Any
    value_free: Any
    given: Any
    taken: Any
    turn: Any


def attention_kernel(
    plgpu: Any,
    work: Work,
    tiles: MosaicTiles,
    arena: int,
    part: int,
    softcap: float,
    products: WarpgroupProducts,
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

    Refs in device memory: q [K, Q + span, D], k, v [K, tokens, D], limit [Q + span], item [P, 4],
    segment [S, 8], count [2], with a sliding window unseen [Q + span], of codes their scales
    [K, tokens], out [partial rows, padded D], lse [partial rows]. In shared memory: q [slots, 2,
    64, D], k, v [slots, tile, D], out [2, 64, part], stat [2, 2, 64], and the slots of codes of
    keys and values, if there are any.
    """
    *inputs, out_ref, lse_ref, q_smem, k_smem, v_smem, out_smem, stat_smem, barriers, codes = rest
    unseen_ref = inputs[: work.unseen is not None]
    size, dim, dtype = tiles.tile, k_ref.shape[2], q_ref.dtype
    wgmma = plgpu.Layout.WGMMA
    item, warpgroup = lax.axis_index("item"), lax.axis_index("warpgroup")
    fetched_tiles = numbers = (
        TileStream(k_ref, k_smem, barriers.key_full, barriers.key_free),
        TileStream(v_ref, v_smem, barriers.value_full, barriers.value_free),
    )
    if codes:
        fetched_tiles = tuple(
            each.stream(ref, scales)
            for each, ref, scales in zip(codes, (k_ref, v_ref), inputs[-2:], strict=True)
        )
    conversion = Conversion(plgpu, fetched_tiles, numbers)
    # The warpgroup that fetches converts, too.
    is_joint = bool(codes) and dim > WIDEST_APART
    # With 256 columns what overlaps takes more registers than there are.
    overlaps = tiles.overlap and not products.by_warps and not codes and dim < 256
    reads = ItemReads(
        item_ref,
        segment_ref,
        count_ref,
        item,
        tile=size,
        arena=arena,
        constants=not (products.by_warps or products.interpret),
    )

    def fetch() -> None:
        plgpu.set_max_registers(72 if is_joint else 24, action="decrease")

        def fetch_piece(number: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
            pieces, fetched = done
            now = reads.segment(number)
            slot = lax.rem(pieces, tiles.query_stages)

            @pl.when(pieces >= tiles.query_stages)
            def _() -> None:
                plgpu.barrier_wait(barriers.query_free.at[slot])

            def fetch_half(i: int) -> None:
                plgpu.copy_gmem_to_smem(
                    q_ref.at[now.head, pl.ds(now.query + i * WARPGROUP, WARPGROUP)],
                    q_smem.at[slot, i],
                    barriers.query_full.at[2 * slot + i],
                )

            fetch_half(0)
            pl.when(now.queries > WARPGROUP)(lambda: fetch_half(1))

            def fetch_tile(i: Array, fetched: Array) -> Array:
                if is_joint:

                    @pl.when(i - now.first >= tiles.code_stages)
                    def _() -> None:
                        conversion.tile(fetched - tiles.code_stages, fetched)

                for stream in fetched_tiles:
                    stream.fetch(plgpu, now.head, reads.window(now, i)[0], fetched)
                return fetched + 1

            end = lax.fori_loop(now.first, now.end, fetch_tile, fetched)
            if is_joint:
                # All of them: to wait for the next queries' slot is to wait for these tiles' use.
                left = jnp.maximum(fetched, end - tiles.code_stages)
                lax.fori_loop(left, end, conversion.tile, left)
            return pieces + 1, end

        pieces, fetched = lax.fori_loop(
            reads.first_segment, reads.end_segment, fetch_piece, (jnp.int32(0), jnp.int32(0))
        )
        wait_for_last(plgpu, pieces, barriers.query_free)
        wait_for_last(plgpu, fetched, *(stream.free for stream in fetched_tiles))

        if is_joint:
            wait_for_last(plgpu, fetched, *(stream.free for stream in numbers))

    def convert() -> None:
        plgpu.set_max_registers(72, action="decrease")
        conversion.all_tiles(reads)

    def compute() -> None:
        # of the 504, or with four warpgroups 512, that there are for all
        plgpu.set_max_registers(240 if not codes else 216 if is_joint else 208, action="increase")
        if overlaps:
            pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(barriers.turn.at[0]))

        def filled(value: float, *shape: int) -> Array:
            return plgpu.layout_cast(
                jnp.full(shape, value, jnp.float32), wgmma if len(shape) == 2 else wgmma.reduce(1)
            )

        def wide(x: Array, columns: int) -> Array:
            return lax.broadcast_in_dim(x, (WARPGROUP, columns), [0])

        def compute_piece(number: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
            pieces, used = done
            now = reads.segment(number)
            query_slot = lax.rem(pieces, tiles.query_stages)
            narrow = now.queries <= WARPGROUP
            half = jnp.where(narrow, 0, warpgroup)
            limit, *unseen = reads.bounds(
                plgpu,
                now,
                (limit_ref, *unseen_ref),
                half * WARPGROUP,
                WARPGROUP,
                wgmma.reduce(1),
            )
            plgpu.barrier_wait(barriers.query_full.at[2 * query_slot])
            # Both wait for both halves: a warpgroup that skipped a phase of a barrier would take
            # the next one for it.
            pl.when(~narrow)(lambda: plgpu.barrier_wait(barriers.query_full.at[2 * query_slot + 1]))

            def weigh(
                masked: bool, i: Array, scores: Array, top: Array, total: Array
            ) -> tuple[Array, ...]:
                """The new maximum and sum, the factor of what was mixed under the old maximum, and the
                weights of the i-th tile."""
                scores = capped(scores, softcap, few_registers=dim >= 256 or is_joint)
                if masked:
                    seen = reads.seen(plgpu, now, i, limit, unseen)
                    scores = jnp.where(seen, scores, -jnp.inf)
                new_top = jnp.maximum(top, jnp.max(scores, axis=1))
                under = jnp.where(new_top == -jnp.inf, 0.0, new_top) if masked else new_top
                keep = jnp.exp2(top - under)
                weights = jnp.exp2(scores - wide(under, size))
                return new_top, total * keep + jnp.sum(weights, axis=1), keep, weights

            # One by one: a tile's scores, its weights, and the mixing of its values.

            def take(masked: bool, i: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
                used, *softmax = state
                slot = lax.rem(used, tiles.stages)
                plgpu.barrier_wait(barriers.key_full.at[slot])

                def use(top: Array, total: Array, mixed: Array) -> tuple[Array, ...]:
                    scores = products.scores(q_smem.at[query_slot, half], k_smem.at[slot])
                    if codes:
                        scores = scaled(plgpu, scores, codes[0].scales, used)
                    plgpu.barrier_arrive(barriers.key_free.at[slot])
                    new_top, total, keep, weights = weigh(masked, i, scores, top, total)
                    if not codes:
                        weights = products.operand(weights, dtype)
                        plgpu.barrier_wait(barriers.value_full.at[slot])
                    else:
                        plgpu.barrier_wait(barriers.value_full.at[slot])
                        weights = scaled(plgpu, weights, codes[1].scales, used)
                        weights = products.operand(weights, dtype)
                    mixed = products.add(mixed * wide(keep, dim), weights, v_smem.at[slot])
                    plgpu.barrier_arrive(barriers.value_free.at[slot])
                    return new_top, total, mixed

                def skip(*softmax: Array) -> tuple[Array, ...]:
                    plgpu.barrier_arrive(barriers.key_free.at[slot])
                    plgpu.barrier_wait(barriers.value_full.at[slot])
                    plgpu.barrier_arrive(barriers.value_free.at[slot])
                    return softmax

                mine = ~narrow | (lax.rem(i - now.first, 2) == warpgroup)
                return used + 1, *lax.cond(mine, use, skip, *softmax)

            # Overlapping, where both use each tile: its weights are made while the values of the tile
            # before are mixed, and while the other warpgroup has its turn to multiply.

            def take_ahead(i: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
                used, top, total, mixed, weights = state
                slot, before = lax.rem(used, tiles.stages), lax.rem(used - 1, tiles.stages)
                plgpu.barrier_wait(barriers.turn.at[warpgroup])
                plgpu.barrier_wait(barriers.key_full.at[slot])
                plgpu.barrier_wait(barriers.value_full.at[before])

                def weigh_next(scores: Array, top: Array, total: Array) -> tuple[Array, ...]:
                    plgpu.barrier_arrive(barriers.key_free.at[slot])
                    return weigh(False, i, scores, top, total)

                mixed, (top, total, keep, weights) = products.overlapped(
                    (q_smem.at[query_slot, half], k_smem.at[slot]),
                    (mixed, weights, v_smem.at[before]),
                    (top, total),
                    issued=lambda: plgpu.barrier_arrive(barriers.turn.at[1 - warpgroup]),
                    weigh=weigh_next,
                )
                plgpu.barrier_arrive(barriers.value_free.at[before])
                return used + 1, top, total, mixed * wide(keep, dim), weights.astype(dtype)

            def overlapping(
                used: Array, top: Array, total: Array, mixed: Array
            ) -> tuple[Array, ...]:
                slot = lax.rem(used, tiles.stages)
                plgpu.barrier_wait(barriers.key_full.at[slot])
                scores = products.scores(q_smem.at[query_slot, half], k_smem.at[slot])
                plgpu.barrier_arrive(barriers.key_free.at[slot])
                top, total, _, weights = weigh(False, now.first, scores, top, total)
                used, top, total, mixed, weights = lax.fori_loop(
                    now.first + 1,
                    whole,
                    take_ahead,
                    (used + 1, top, total, mixed, weights.astype(dtype)),
                )
                slot = lax.rem(used - 1, tiles.stages)
                plgpu.barrier_wait(barriers.value_full.at[slot])
                mixed = products.add(mixed, weights, v_smem.at[slot])
                plgpu.barrier_arrive(barriers.value_free.at[slot])
                return used, top, total, mixed

            def one_by_one(*state: Array) -> tuple[Array, ...]:
                return lax.fori_loop(now.first, whole, functools.partial(take, False), state)

            state = (
                used,
                filled(-jnp.inf, WARPGROUP),
                filled(0.0, WARPGROUP),
                filled(0.0, WARPGROUP, dim),
            )
            # With 256 columns and `mma.sync` two loops take more registers than there are.
            whole = now.first
            if dim < 256 or not products.by_warps:
                whole = jnp.clip(now.full, now.first, jnp.maximum(now.end, now.first))
                take_whole = one_by_one
                if overlaps:
                    is_wide = ~narrow & (whole > now.first)
                    take_whole = functools.partial(lax.cond, is_wide, overlapping, one_by_one)
                state = take_whole(*state)
            used, top, total, mixed = lax.fori_loop(
                whole, now.end, functools.partial(take, True), state
            )
            plgpu.barrier_arrive(barriers.query_free.at[query_slot])
            # The previous piece must have left shared memory.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            gives, takes = narrow & (warpgroup == 1), narrow & (warpgroup == 0)

            @pl.when(gives)
            def _give() -> None:
                stat_smem[1, 0] = top
                stat_smem[1, 1] = total
                for i in range(0, dim, part):
                    out_smem[1] = mixed[:, i : i + part]
                    plgpu.barrier_arrive(barriers.given)
                    plgpu.barrier_wait(barriers.taken)

            here = jnp.where(gives, 0, jnp.clip(now.queries - half * WARPGROUP, 0, WARPGROUP))

            @pl.when(here > 0)
            def _store() -> None:
                row = pl.multiple_of(
                    partial_row(work, item, now.head, now.query + half * WARPGROUP), ROW_ALIGNMENT
                )
                eights = lax.div(here + ROW_ALIGNMENT - 1, ROW_ALIGNMENT)

                def merged(top: Array, total: Array) -> tuple[Array, ...]:
                    plgpu.barrier_wait(barriers.given)
                    their_top, their_total = (
                        plgpu.load(stat_smem.at[1, i], layout=wgmma.reduce(1), optimized=False)
                        for i in range(2)
                    )
                    highest = jnp.maximum(top, their_top)
                    under = jnp.where(highest == -jnp.inf, 0.0, highest)
                    mine, theirs = jnp.exp2(top - under), jnp.exp2(their_top - under)
                    return highest, total * mine + their_total * theirs, mine, theirs

                one = filled(1.0, WARPGROUP)
                highest, sum_, mine, theirs = lax.cond(
                    takes, merged, lambda top, total: (top, total, one, one), top, total
                )
                empty = sum_ == 0.0
                sum_ = jnp.where(empty, 1.0, sum_)
                stat_smem[warpgroup, 0] = jnp.where(
                    empty, -jnp.inf, highest + jnp.log(sum_) * math.log2(math.e)
                )
                mine, theirs = mine / sum_, theirs / sum_
                for i in range(0, dim, part):
                    if i:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                    def add(columns: Array, i: int = i) -> Array:
                        if i:
                            plgpu.barrier_wait(barriers.given)
                        columns = columns + plgpu.load(out_smem.at[1], layout=wgmma) * wide(
                            theirs, part
                        )
                        plgpu.barrier_arrive(barriers.taken)
                        return columns

                    out_smem[warpgroup] = lax.cond(
                        takes,
                        add,
                        lambda columns: columns,
                        mixed[:, i : i + part] * wide(mine, part),
                    )
                    plgpu.commit_smem()

                    def store_rows(n: Array, _: None, i: int = i) -> None:
                        n = pl.multiple_of(n * ROW_ALIGNMENT, ROW_ALIGNMENT)
                        eight, to = pl.ds(n, ROW_ALIGNMENT), pl.ds(row + n, ROW_ALIGNMENT)
                        plgpu.copy_smem_to_gmem(
                            out_smem.at[warpgroup, eight], out_ref.at[to, pl.ds(i, part)]
                        )
                        if i == 0:
                            plgpu.copy_smem_to_gmem(
                                stat_smem.at[warpgroup, 0, eight], lse_ref.at[to]
                            )

                    lax.fori_loop(0, eights, store_rows, None)

            return pieces + 1, used

        lax.fori_loop(
            reads.first_segment, reads.end_segment, compute_piece, (jnp.int32(0), jnp.int32(0))
        )
        plgpu.wait_smem_to_gmem(0)

    def feed() -> None:
        pl.when(warpgroup == 2)(fetch)
        if codes and not is_joint:
            pl.when(warpgroup == 3)(convert)

    # Not one after the other: what one of them has ready would take the other's registers.
    lax.cond(warpgroup < 2, compute, feed)
