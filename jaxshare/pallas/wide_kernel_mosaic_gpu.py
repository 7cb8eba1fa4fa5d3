"""The kernel of block attention for Hopper GPUs whose two warpgroups share the queries.

It serves heads whose results, of 64 queries, take too many registers of one warpgroup: latents, 512
columns of them that are a part of keys (multi-head latent attention), and codes with 256 columns.
Two warpgroups have the same 64 queries and a part of the columns each. The first makes the scores
and weights of a tile, once, and hands the weights to the other through shared memory; while it makes
those of the next tile, the other multiplies these with its part. A third warpgroup fetches, as in
`jaxshare.pallas.kernel_mosaic_gpu`.

Where the cache approximates a fourth converts (`jaxshare.pallas.codes_mosaic_gpu`). It takes
registers, so that the first has 128 columns and the second all others, in place of half each. Beside
the queries one converted tile of latents fits shared memory. It is converted in parts of its
columns, so that scores of the first ones are summed while the next are converted.

Results are stored 64 rows at a time, straight from registers: shared memory is full. Rows beyond a
piece's queries are those of later pieces of the same item, which overwrite them, or of none.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxshare.pallas.codes_mosaic_gpu import (
    CodeSlots,
    Conversion,
    TileStream,
    layout_of,
    scaled,
    wait_for_last,
)
from jaxshare.pallas.items_mosaic_gpu import WARPGROUP, ItemReads, SegmentTiles
from jaxshare.pallas.registers_mosaic_gpu import store
from jaxshare.pallas.scores import capped
from jaxshare.pallas.tiles import MosaicTiles
from jaxshare.pallas.work_items import ROW_ALIGNMENT, Work, partial_row

REGISTERS: tuple[int, ...] = (240, 240, 24)
"""Of a thread of each warpgroup: of the 504 that three have."""
REGISTERS_OF_CODES = {256: (232, 152, 40, 88), 512: (192, 224, 32, 64)}
"""The same where the cache approximates, by columns of results: of the 512 that four have, and as
few for each as it does not spill with."""

Results = tuple[Array, ...]
"""Of 64 queries, columns of equal parts, [64, columns of a part]."""


class NumberSlots(NamedTuple):
    """Shared memory, [slots, tile, D], and barriers of keys or values that wgmma reads, as those of
    `TileStream`."""

    slots: Any
    full: Any
    free: Any


class WideMemory(NamedTuple):
    """The shared memory and barriers of the kernel.

    Barriers named full and free are between the warpgroup that fills a buffer and those that read it:
    the one that fetches, or converts, and the two that compute for queries, keys and values, and
    between these two for weights.

    Attributes:
      queries: [slots, 64, D].
      weights: [64, tile].
      factors: of each query's result, [64].
      query_full, query_free, weights_full, weights_free: barriers.
      numbers: of keys, and of values where they are apart.
      codes: the same where the cache approximates, else none.
    """

    queries: Any
    weights: Any
    factors: Any
    query_full: Any
    query_free: Any
    weights_full: Any
    weights_free: Any
    numbers: tuple[NumberSlots, ...]
    codes: tuple[CodeSlots, ...]

    @classmethod
    def scratch(
        cls, plgpu: Any, tiles: MosaicTiles, dim: int, dtype: Any, codes: Any, apart: bool
    ) -> "WideMemory":
        """Creates them for `plgpu.kernel`.

        Args:
          plgpu: Pallas' Mosaic GPU module.
          tiles: of the kernel.
          dim: entries of a key.
          dtype: of queries, and of what wgmma reads.
          codes: the dtype of codes, or None.
          apart: values are not a part of keys.
        """
        of_keys, of_weights = (
            layout_of(plgpu, columns, dtype.itemsize) for columns in (dim, tiles.tile)
        )

        def numbers(readers: int) -> NumberSlots:
            return NumberSlots(
                plgpu.SMEM((tiles.stages, tiles.tile, dim), dtype, transforms=of_keys),
                full=plgpu.Barrier(
                    num_barriers=tiles.stages * (1 if codes is None else _parts(dim))
                ),
                free=plgpu.Barrier(num_arrivals=readers, num_barriers=tiles.stages),
            )

        # Values have two readers, and keys that are not values one.
        of_numbers = (numbers(1), numbers(2)) if apart else (numbers(2),)
        return cls(
            plgpu.SMEM((tiles.query_stages, WARPGROUP, dim), dtype, transforms=of_keys),
            plgpu.SMEM((WARPGROUP, tiles.tile), dtype, transforms=of_weights),
            plgpu.SMEM((WARPGROUP,), jnp.float32),
            query_full=plgpu.Barrier(num_barriers=tiles.query_stages),
            query_free=plgpu.Barrier(num_barriers=tiles.query_stages),
            weights_full=plgpu.Barrier(),
            weights_free=plgpu.Barrier(),
            numbers=of_numbers,
            codes=()
            if codes is None
            else tuple(CodeSlots.scratch(plgpu, tiles, dim, codes) for _ in of_numbers),
        )


def _parts(dim: int) -> int:
    """The parts in which columns of codes are converted: of latents three, of 192 columns."""
    return 3 if dim % 192 == 0 else 1


def wide_kernel(
    plgpu: Any,
    work: Work,
    tiles: MosaicTiles,
    value_dim: int,
    softcap: float,
    interpret: bool,
    q_ref: Any,
    k_ref: Any,
    *rest: Any,
) -> None:
    """The kernel of one item. plgpu is Pallas' Mosaic GPU module.

    Refs in device memory: q [K, Q + 64, D], k [K, tokens, D], v where values are apart, limit [Q +
    64], item [P, 4], segment [S, 8], count [2], with a sliding window unseen [Q + 64], of codes the
    scales [K, tokens] of keys, and of values, out [partial rows, V], lse [partial rows]. Then
    `WideMemory`. Values are the last V entries of keys, or apart.
    """
    *inputs, out_ref, lse_ref, memory = rest
    first = len(memory.numbers) + 3
    *v_ref, limit_ref, item_ref, segment_ref, count_ref = inputs[:first]
    after = first + (work.unseen is not None)
    unseen_ref, scale_refs = inputs[first:after], inputs[after:]
    q_smem, dim = memory.queries, k_ref.shape[2]
    numbers = tuple(
        TileStream(ref, *each) for ref, each in zip((k_ref, *v_ref), memory.numbers, strict=True)
    )
    keys, values = numbers[0], numbers[-1]
    fetched_tiles = (
        tuple(
            each.stream(ref, scales)
            for each, ref, scales in zip(memory.codes, (k_ref, *v_ref), scale_refs, strict=True)
        )
        if memory.codes
        else numbers
    )
    # ptxas refuses a product of 128 registers where a thread of four warpgroups starts with 128.
    width = 128 if memory.codes else value_dim // 2
    registers = REGISTERS_OF_CODES[value_dim] if memory.codes else REGISTERS
    wgmma = plgpu.Layout.WGMMA
    item, warpgroup = lax.axis_index("item"), lax.axis_index("warpgroup")
    reads = ItemReads(
        item_ref,
        segment_ref,
        count_ref,
        item,
        tile=tiles.tile,
        arena=k_ref.shape[1],
        constants=not interpret,
    )

    def over_pieces(piece: Callable[..., Any], *start: Any) -> Any:
        return lax.fori_loop(reads.first_segment, reads.end_segment, piece, start)

    def query_slot(pieces: Array) -> Array:
        return lax.rem(pieces, tiles.query_stages)

    def tile_slot(used: Array) -> Array:
        return lax.rem(used, tiles.stages)

    def filled(value: float, *shape: int) -> Array:
        return plgpu.layout_cast(
            jnp.full(shape, value, jnp.float32), wgmma if len(shape) == 2 else wgmma.reduce(1)
        )

    def wide(x: Array, columns: int) -> Array:
        return lax.broadcast_in_dim(x, (WARPGROUP, columns), [0])

    def nothing(parts: int) -> Results:
        return tuple(filled(0.0, WARPGROUP, width) for _ in range(parts))

    def rows_of(now: SegmentTiles) -> Any:
        row = partial_row(work, item, now.head, now.query)
        return pl.ds(pl.multiple_of(row, ROW_ALIGNMENT), WARPGROUP)

    def wait_for(stream: TileStream, slot: Array) -> None:
        for full, _ in stream.parts(slot):
            plgpu.barrier_wait(full)

    def mix(mixed: Results, factor: Array, slot: Array, first: int) -> Results:
        """Scales parts of the results, from the first on, and adds the values of a tile by their
        weights."""
        v = [
            values.slots.at[slot, :, pl.ds(dim - value_dim + (first + i) * width, width)]
            for i in range(len(mixed))
        ]
        mixed = tuple(each * wide(factor, width) for each in mixed)
        if interpret:  # INTERPRETER_LACKS
            weights = memory.weights[...]
            mixed = tuple(
                each + jnp.dot(weights, ref[...], preferred_element_type=jnp.float32)
                for each, ref in zip(mixed, v, strict=True)
            )
            plgpu.commit_smem()  # as wgmma reads
        else:

            def multiply(refs: Any) -> None:
                for ref, columns in zip(refs, v, strict=True):
                    plgpu.wgmma(ref, memory.weights, columns)

            mixed = pl.run_state(multiply)(tuple(map(plgpu.ACC.init, mixed)))
        plgpu.barrier_arrive(values.free.at[slot])
        return mixed

    def store_results(now: SegmentTiles, mixed: Results, factor: Array, first: int) -> None:
        """Stores parts of the results, from the first on, scaled."""
        for i, each in enumerate(mixed):
            columns = pl.ds((first + i) * width, width)
            store(plgpu, out_ref.at[rows_of(now), columns], each * wide(factor, width))

    @pl.when(warpgroup == 2)
    def _fetch() -> None:
        plgpu.set_max_registers(registers[2], action="decrease")

        def fetch_piece(number: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
            pieces, fetched = done
            now, slot = reads.segment(number), query_slot(pieces)

            @pl.when(pieces >= tiles.query_stages)
            def _() -> None:
                plgpu.barrier_wait(memory.query_free.at[slot])

            plgpu.copy_gmem_to_smem(
                q_ref.at[now.head, pl.ds(now.query, WARPGROUP)],
                q_smem.at[slot],
                memory.query_full.at[slot],
            )

            def fetch_tile(i: Array, fetched: Array) -> Array:
                for stream in fetched_tiles:
                    stream.fetch(plgpu, now.head, reads.window(now, i)[0], fetched)
                return fetched + 1

            return pieces + 1, lax.fori_loop(now.first, now.end, fetch_tile, fetched)

        pieces, fetched = over_pieces(fetch_piece, jnp.int32(0), jnp.int32(0))
        wait_for_last(plgpu, pieces, memory.query_free)
        wait_for_last(plgpu, fetched, *(stream.free for stream in fetched_tiles))

    if memory.codes:

        @pl.when(warpgroup == 3)
        def _convert() -> None:
            plgpu.set_max_registers(registers[3], action="decrease")
            Conversion(plgpu, fetched_tiles, numbers).all_tiles(reads)

    @pl.when(warpgroup == 0)
    def _score() -> None:
        plgpu.set_max_registers(registers[0], action="increase")

        def hand_over(factor: Array, given: Array, weights: Array | None = None) -> None:
            """Gives the other warpgroup a factor of its results and a tile's weights."""

            @pl.when(given > 0)
            def _() -> None:
                plgpu.barrier_wait(memory.weights_free)

            memory.factors[...] = factor
            if weights is not None:
                memory.weights[...] = weights
            plgpu.commit_smem()
            plgpu.barrier_arrive(memory.weights_full)

        def score_piece(number: Array, done: tuple[Array, ...]) -> tuple[Array, ...]:
            pieces, used, given = done
            now, slot_of_queries = reads.segment(number), query_slot(pieces)
            limit, *unseen = reads.bounds(
                plgpu, now, (limit_ref, *unseen_ref), 0, WARPGROUP, wgmma.reduce(1)
            )
            plgpu.barrier_wait(memory.query_full.at[slot_of_queries])

            def take(i: Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
                used, given, top, total, mixed = state
                slot = tile_slot(used)

                def multiply(ref: Any) -> Array:
                    for full, columns in keys.parts(slot):
                        plgpu.barrier_wait(full)
                        plgpu.wgmma(
                            ref,
                            q_smem.at[slot_of_queries, :, columns],
                            keys.slots.at[slot, :, columns].transpose((1, 0)),
                        )
                    return ref[...]

                scores = pl.run_scoped(multiply, plgpu.ACC((WARPGROUP, tiles.tile), jnp.float32))
                if memory.codes:
                    scores = scaled(plgpu, scores, memory.codes[0].scales, used)
                if keys is not values:
                    plgpu.barrier_arrive(keys.free.at[slot])
                scores = capped(scores, softcap, few_registers=width >= 256)
                seen = reads.seen(plgpu, now, i, limit, unseen)
                scores = jnp.where(seen, scores, -jnp.inf)
                new_top = jnp.maximum(top, jnp.max(scores, axis=1))
                under = jnp.where(new_top == -jnp.inf, 0.0, new_top)
                keep = jnp.exp2(top - under)
                weights = jnp.exp2(scores - wide(under, tiles.tile))
                total = total * keep + jnp.sum(weights, axis=1)
                if keys is not values:
                    wait_for(values, slot)
                if memory.codes:
                    weights = scaled(plgpu, weights, memory.codes[-1].scales, used)
                hand_over(keep, given, weights.astype(q_ref.dtype))
                mixed = mix(mixed, keep, slot, 0)
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
                    nothing(1),
                ),
            )
            plgpu.barrier_arrive(memory.query_free.at[slot_of_queries])
            empty = total == 0.0
            total = jnp.where(empty, 1.0, total)
            factor = 1.0 / total
            hand_over(factor, given)
            lse = jnp.where(empty, -jnp.inf, top + jnp.log(total) * math.log2(math.e))
            store(plgpu, lse_ref.at[rows_of(now)], lse)
            store_results(now, mixed, factor, 0)
            return pieces + 1, used, given + 1

        *_, given = over_pieces(score_piece, jnp.int32(0), jnp.int32(0), jnp.int32(0))
        pl.when(given > 0)(lambda: plgpu.barrier_wait(memory.weights_free))

    @pl.when(warpgroup == 1)
    def _mix() -> None:
        plgpu.set_max_registers(registers[1], action="increase")

        def taken() -> Array:
            plgpu.barrier_wait(memory.weights_full)
            return plgpu.load(memory.factors, layout=wgmma.reduce(1), optimized=False)

        def mix_piece(number: Array, done: tuple[Array]) -> tuple[Array]:
            now = reads.segment(number)

            def take(_: Array, state: tuple[Array, Results]) -> tuple[Array, Results]:
                used, mixed = state
                slot = tile_slot(used)
                wait_for(values, slot)
                mixed = mix(mixed, taken(), slot, 1)
                plgpu.barrier_arrive(memory.weights_free)
                return used + 1, mixed

            used, mixed = lax.fori_loop(
                now.first, now.end, take, (*done, nothing(value_dim // width - 1))
            )
            factor = taken()
            plgpu.barrier_arrive(memory.weights_free)
            store_results(now, mixed, factor, 1)
            return (used,)

        over_pieces(mix_piece, jnp.int32(0))
