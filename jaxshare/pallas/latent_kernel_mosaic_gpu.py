"""The kernel of block attention over latents for Hopper GPUs, in Pallas on Mosaic GPU.

Values are a part of keys (multi-head latent attention), so a tile of keys is all that is fetched. A
result of 64 queries by 512 columns takes more registers than one warpgroup has. Two warpgroups have
the same 64 queries and half of the columns each. The first makes the scores and weights of a tile,
once, and hands the weights to the other through shared memory; while it makes those of the next
tile, the other multiplies these with its half. A third warpgroup fetches, as in
`jaxshare.pallas.kernel_mosaic_gpu`.

Results are stored 64 rows at a time, straight from registers: shared memory is full. Rows beyond a
piece's queries are those of later pieces of the same item, which overwrite them, or of none.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxshare.pallas.items_mosaic_gpu import WARPGROUP, ItemReads, SegmentTiles
from jaxshare.pallas.scores import capped
from jaxshare.pallas.tiles import MosaicTiles
from jaxshare.pallas.work_items import ROW_ALIGNMENT, Work, partial_row


class LatentBarriers(NamedTuple):
    """The barriers of the kernel.

    Those named full and free are between who fills a buffer and who reads it: the fetching
    warpgroup and the two that compute for queries and keys, and between those two for weights.
    """

    query_full: Any
    query_free: Any
    key_full: Any
    key_free: Any
    weights_full: Any
    weights_free: Any


def latent_kernel(
    plgpu: Any,
    work: Work,
    tiles: MosaicTiles,
    value_dim: int,
    softcap: float,
    interpret: bool,
    q_ref: Any,
    k_ref: Any,
    limit_ref: Any,
    item_ref: Any,
    segment_ref: Any,
    count_ref: Any,
    *rest: Any,
) -> None:
    """The kernel of one item. plgpu is Pallas' Mosaic GPU module.

    Refs in device memory: q [K, Q + 64, D], k [K, tokens, D], limit [Q + 64], item [P, 4], segment
    [S, 8], count [2], with a sliding window unseen [Q + 64], out [partial rows, V], lse [partial
    rows]. In shared memory: q [slots, 64, D], k [slots, tile, D], weights [64, tile], and a factor
    of each query's result, [64]. Values are the last V entries of keys.
    """
    *unseen_ref, out_ref, lse_ref, q_smem, k_smem, weights_smem, factor_smem, barriers = rest
    dim, half = k_ref.shape[2], value_dim // 2
    wgmma = plgpu.Layout.WGMMA
    item, warpgroup = lax.axis_index("item"), lax.axis_index("warpgroup")
    reads = ItemReads(item_ref, segment_ref, count_ref, item, tile=tiles.tile, arena=k_ref.shape[1])

    def over_pieces(piece: Callable[..., Any], *start: Any) -> Any:
        return lax.fori_loop(reads.first_segment, reads.end_segment, piece, start)

    def query_slot(pieces: Array) -> Array:
        return lax.rem(pieces, tiles.query_stages)

    def key_slot(used: Array) -> Array:
        return lax.rem(used, tiles.stages)

    def filled(value: float, *shape: int) -> Array:
        return plgpu.layout_cast(
            jnp.full(shape, value, jnp.float32), wgmma if len(shape) == 2 else wgmma.reduce(1)
        )

    def wide(x: Array, columns: int) -> Array:
        return lax.broadcast_in_dim(x, (WARPGROUP, columns), [0])

    def rows_of(now: SegmentTiles) -> Any:
        row = partial_row(work, item, now.head, now.query)
        return pl.ds(pl.multiple_of(row, ROW_ALIGNMENT), WARPGROUP)

    def mix(mixed: Array, factor: Array, slot: Array, part: int) -> Array:
        """Scales half of the results, and adds the values of a tile by their weights."""
        v = k_smem.at[slot, :, pl.ds(dim - value_dim + part * half, half)]
        mixed = mixed * wide(factor, half)
        if interpret:  # INTERPRETER_LACKS
            return mixed + jnp.dot(weights_smem[...], v[...], preferred_element_type=jnp.float32)
        return pl.run_state(lambda ref: plgpu.wgmma(ref, weights_smem, v))(plgpu.ACC.init(mixed))

    @pl.when(warpgroup == 2)
    def _fetch() -> None:
        plgpu.set_max_registers(24, action="decrease")

        def fetch_piece(number: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
            pieces, fetched = done
            now, slot = reads.segment(number), query_slot(pieces)

            @pl.when(pieces >= tiles.query_stages)
            def _() -> None:
                plgpu.barrier_wait(barriers.query_free.at[slot])

            plgpu.copy_gmem_to_smem(
                q_ref.at[now.head, pl.ds(now.query, WARPGROUP)],
                q_smem.at[slot],
                barriers.query_full.at[slot],
            )

            def fetch_tile(i: Array, fetched: Array) -> Array:
                slot = key_slot(fetched)

                @pl.when(fetched >= tiles.stages)
                def _() -> None:
                    plgpu.barrier_wait(barriers.key_free.at[slot])

                plgpu.copy_gmem_to_smem(
                    k_ref.at[now.head, pl.ds(reads.window(now, i)[0], tiles.tile)],
                    k_smem.at[slot],
                    barriers.key_full.at[slot],
                )
                return fetched + 1

            return pieces + 1, lax.fori_loop(now.first, now.end, fetch_tile, fetched)

        pieces, fetched = over_pieces(fetch_piece, jnp.int32(0), jnp.int32(0))
        # A waiter must see every phase of a barrier, the last ones too.
        for used, free in ((pieces, barriers.query_free), (fetched, barriers.key_free)):
            for slot in range(free.shape[0]):

                @pl.when(used > slot)
                def _(free: Any = free.at[slot]) -> None:
                    plgpu.barrier_wait(free)

    @pl.when(warpgroup == 0)
    def _score() -> None:
        plgpu.set_max_registers(240, action="increase")

        def hand_over(factor: Array, given: Array, weights: Array | None = None) -> None:
            """Gives the other warpgroup a factor of its results and a tile's weights."""

            @pl.when(given > 0)
            def _() -> None:
                plgpu.barrier_wait(barriers.weights_free)

            factor_smem[...] = factor
            if weights is not None:
                weights_smem[...] = weights
            plgpu.commit_smem()
            plgpu.barrier_arrive(barriers.weights_full)

        def score_piece(number: Array, done: tuple[Array, ...]) -> tuple[Array, ...]:
            pieces, used, given = done
            now, slot_of_queries = reads.segment(number), query_slot(pieces)
            # counted from the start of the first tile
            limit, *unseen = (
                now.lead
                + plgpu.load(
                    ref.at[pl.ds(now.query, WARPGROUP)], layout=wgmma.reduce(1), optimized=False
                )
                for ref in (limit_ref, *unseen_ref)
            )
            plgpu.barrier_wait(barriers.query_full.at[slot_of_queries])

            def take(i: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
                used, given, top, total, mixed = state
                slot = key_slot(used)
                plgpu.barrier_wait(barriers.key_full.at[slot])

                def multiply(ref: Any) -> Array:
                    plgpu.wgmma(ref, q_smem.at[slot_of_queries], k_smem.at[slot].transpose((1, 0)))
                    return ref[...]

                scores = pl.run_scoped(multiply, plgpu.ACC((WARPGROUP, tiles.tile), jnp.float32))
                scores = capped(scores, softcap, few_registers=True)
                seen = reads.seen(plgpu, now, i, limit, unseen)
                scores = jnp.where(seen, scores, -jnp.inf)
                new_top = jnp.maximum(top, jnp.max(scores, axis=1))
                under = jnp.where(new_top == -jnp.inf, 0.0, new_top)
                keep = jnp.exp2(top - under)
                weights = jnp.exp2(scores - wide(under, tiles.tile))
                total = total * keep + jnp.sum(weights, axis=1)
                hand_over(keep, given, weights.astype(k_ref.dtype))
                mixed = mix(mixed, keep, slot, 0)
                plgpu.barrier_arrive(barriers.key_free.at[slot])
                return used + 1, given + 1, new_top, total, mixed

            used, given, top, total, mixed = lax.fori_loop(
                now.first,
                now.end,
                take,
                (
                    used,
                    given,
                    filled(-jnp.inf, WARPGROUP),
                    filled(0.0, WARPGROUP),
                    filled(0.0, WARPGROUP, half),
                ),
            )
            plgpu.barrier_arrive(barriers.query_free.at[slot_of_queries])
            empty = total == 0.0
            total = jnp.where(empty, 1.0, total)
            factor = 1.0 / total
            hand_over(factor, given)
            rows = rows_of(now)
            lse = jnp.where(empty, -jnp.inf, top + jnp.log(total) * math.log2(math.e))
            plgpu.store(lse_ref.at[rows], lse, optimized=False)
            plgpu.store(
                out_ref.at[rows, pl.ds(0, half)], mixed * wide(factor, half), optimized=False
            )
            return pieces + 1, used, given + 1

        *_, given = over_pieces(score_piece, jnp.int32(0), jnp.int32(0), jnp.int32(0))
        pl.when(given > 0)(lambda: plgpu.barrier_wait(barriers.weights_free))

    @pl.when(warpgroup == 1)
    def _mix() -> None:
        plgpu.set_max_registers(240, action="increase")

        def taken() -> Array:
            plgpu.barrier_wait(barriers.weights_full)
            return plgpu.load(factor_smem, layout=wgmma.reduce(1), optimized=False)

        def mix_piece(number: Array, done: tuple[Array]) -> tuple[Array]:
            now = reads.segment(number)

            def take(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
                used, mixed = state
                slot = key_slot(used)
                plgpu.barrier_wait(barriers.key_full.at[slot])
                mixed = mix(mixed, taken(), slot, 1)
                plgpu.barrier_arrive(barriers.weights_free)
                plgpu.barrier_arrive(barriers.key_free.at[slot])
                return used + 1, mixed

            used, mixed = lax.fori_loop(
                now.first, now.end, take, (*done, filled(0.0, WARPGROUP, half))
            )
            mixed = mixed * wide(taken(), half)
            plgpu.barrier_arrive(barriers.weights_free)
            plgpu.store(out_ref.at[rows_of(now), pl.ds(half, half)], mixed, optimized=False)
            return (used,)

        over_pieces(mix_piece, jnp.int32(0))
