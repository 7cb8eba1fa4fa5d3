"""Merging what the items found of each query, in Pallas on Mosaic GPU (Hydragen section 3.1)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxshare.attention.merge import merge_over
from jaxshare.pallas.device import Device
from jaxshare.pallas.work_items import Work, partial_row

_AT_ONCE = 8
"""Pieces read together: what hides the time that memory takes to answer."""
_LANES = 128
"""A warpgroup's threads; a row of partial results is that many columns, or a multiple."""


def padded_dim(dim: int) -> int:
    """Columns of the buffer of partial results."""
    return dim + -dim % _LANES


def merge_pieces(
    out: Array,
    lse: Array,
    work: Work,
    shape: tuple[int, int, int, int],
    dtype: jnp.dtype,
    device: Device,
    axis: str | None = None,
) -> Array:
    """Attention of each query over all of its blocks.

    Args:
      out, lse: float32[partial rows, padded D] and float32[partial rows], base 2, of the pieces.
      work: whose pieces they are.
      shape: R, T, H, D.
      dtype: of the result.
      device: what it runs on.
      axis: of the mesh, over which keys are spread.

    Returns:
      [R, T, H, D]; 0 for rows that see nothing.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, width, heads, dim = shape
    slots, columns = work.query.shape[1], padded_dim(dim)
    queries = rows * width * heads
    listed = jnp.stack(
        [work.query, work.segment, work.member, jnp.zeros_like(work.member)], axis=2
    ).reshape(rows * slots, 4)

    def kernel(
        out_ref: Any,
        lse_ref: Any,
        listed_ref: Any,
        piece_ref: Any,
        merged_ref: Any,
        *lse_out_ref: Any,
    ) -> None:
        """One query a warpgroup. listed [R * N, 4], piece [K, S, 2], merged [R * T * H, padded D],
        lse_out as merged, all columns alike."""
        number = jnp.minimum(lax.axis_index("four") * 4 + lax.axis_index("warpgroup"), queries - 1)
        head = lax.rem(number, heads)
        group = heads // piece_ref.shape[0]
        kv_head, row = lax.div(head, group), lax.div(number, width * heads)
        # among the row's queries of this kv head
        nth = lax.rem(lax.div(number, heads), width) * group + lax.rem(head, group)

        def add_block(slot: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            query, segment, member = (listed_ref[row * slots + slot, i] for i in range(3))
            segment = segment + lax.div(member + nth, work.span)
            first = piece_ref[kv_head, segment, 0]
            pieces = jnp.where(query >= 0, piece_ref[kv_head, segment, 1] - first, 0)

            def add_pieces(n: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
                top, total, mixed = state
                at, found = [], []
                for i in range(_AT_ONCE):
                    piece = jnp.minimum(n * _AT_ONCE + i, pieces - 1)
                    at.append(partial_row(work, first + piece, kv_head, query + nth))
                    found.append(jnp.where(n * _AT_ONCE + i < pieces, lse_ref[at[-1]], -jnp.inf))
                parts = [plgpu.load(out_ref.at[row], layout=strided, optimized=False) for row in at]
                highest = top
                for found_ in found:
                    highest = jnp.maximum(highest, found_)
                under = jnp.where(highest == -jnp.inf, 0.0, highest)
                keep = exp2(top - under)
                total, mixed = total * keep, mixed * keep
                for found_, part in zip(found, parts, strict=True):
                    weight = exp2(found_ - under)
                    total, mixed = total + weight, mixed + part * weight
                return highest, total, mixed

            return lax.fori_loop(0, lax.div(pieces + _AT_ONCE - 1, _AT_ONCE), add_pieces, state)

        def exp2(x: Array) -> Array:
            return jnp.exp2(plgpu.layout_cast(jnp.full((columns,), x, jnp.float32), strided))

        strided = plgpu.Layout.WG_STRIDED((columns,), vec_size=1)
        zero = plgpu.layout_cast(jnp.full((columns,), 0.0, jnp.float32), strided)
        top, total, mixed = lax.fori_loop(0, slots, add_block, (jnp.float32(-jnp.inf), zero, zero))
        merged_ref[number] = (mixed / jnp.where(total == 0.0, 1.0, total)).astype(rounded)
        for ref in lse_out_ref:
            ref[number] = jnp.log2(total) + top

    # What other devices are yet to be merged with is not rounded, and needs its log-sum-exp.
    rounded = jnp.float32 if axis else dtype
    merged, wide = (
        jax.ShapeDtypeStruct((queries, columns), rounded),
        jax.ShapeDtypeStruct((queries, columns), jnp.float32),
    )
    found = plgpu.kernel(
        kernel,
        out_type=[merged, wide] if axis else [merged],
        grid=(-(-queries // 4),),
        grid_names=("four",),
        num_threads=4,
        thread_name="warpgroup",
        kernel_name="merge_pieces",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if device.interpret else None,
    )(out, lse, listed, work.pieces)
    out = found[0][:, :dim].reshape(shape)
    return (
        merge_over(axis, out, found[1][:, 0].reshape(shape[:3]) * math.log(2)).astype(dtype)
        if axis
        else out
    )
