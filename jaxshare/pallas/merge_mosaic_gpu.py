"""Merges the partial results of each query, in Pallas on Mosaic GPU (Hydragen section 3.1)."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jaxshare.attention.merge import merge_over, sinks_here
from jaxshare.pallas.device import Device
from jaxshare.pallas.work_items import Work, partial_row

_PIECES_AT_ONCE = 8
"""Pieces that are read together, to hide the latency of memory."""
_LANES = 128
"""Threads of a warpgroup; a row of partial results has that many columns, or a multiple."""


def padded_dim(dim: int) -> int:
    """Columns of the buffer of partial results."""
    return dim + -dim % _LANES


def merge_pieces(
    out: Float[Array, "partial columns"],
    lse: Float[Array, " partial"],
    work: Work,
    shape: tuple[int, int, int, int],
    dtype: jnp.dtype,
    device: Device,
    axis: str | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "R T H D"]:
    """Attention of each query over all of its blocks; 0 for rows that see nothing.

    Args:
      out, lse: float32, of the pieces: attention with `padded_dim` columns, and log-sum-exp to base
        2, both in the rows that `partial_row` gives.
      work: the work items that the pieces are from.
      shape: R, T, H, D.
      dtype: of the result.
      device: the GPU that the kernel runs on.
      axis: of the mesh, over which keys are sharded.
      sinks: for each head a score beside those of all keys, whose value is 0.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, width, heads, dim = shape
    queries, columns = rows * width * heads, padded_dim(dim)
    listed = jnp.stack(
        [work.query, work.segment, work.member, jnp.zeros_like(work.member)], axis=2
    ).reshape(-1, 4)
    # A result that is merged with other devices' is not rounded, and needs its log-sum-exp.
    rounded = jnp.float32 if axis else dtype
    merged = jax.ShapeDtypeStruct((queries, columns), rounded)
    lse_out = jax.ShapeDtypeStruct((queries, columns), jnp.float32)
    results = plgpu.kernel(
        functools.partial(_merge_kernel, plgpu, work, shape, rounded, sinks is not None),
        out_type=[merged, lse_out] if axis else [merged],
        grid=(-(-queries // 4),),
        grid_names=("four",),
        num_threads=4,
        thread_name="warpgroup",
        kernel_name="merge_pieces",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if device.interpret else None,
    )(
        out,
        lse,
        listed,
        work.pieces,
        *([] if sinks is None else [sinks_here(sinks, axis) * math.log2(math.e)]),
    )
    out = results[0][:, :dim].reshape(shape)
    if axis is None:
        return out
    lse = results[1][:, 0].reshape(shape[:3]) * math.log(2)
    return merge_over(axis, out, lse).astype(dtype)


def _merge_kernel(
    plgpu: Any,
    work: Work,
    shape: tuple[int, int, int, int],
    dtype: jax.typing.DTypeLike,
    has_sinks: bool,
    out_ref: Any,
    lse_ref: Any,
    listed_ref: Any,
    piece_ref: Any,
    *rest: Any,
) -> None:
    """Merges one query a warpgroup.

    plgpu is Pallas' Mosaic GPU module; of `work` only the static fields are used.

    Refs: listed [R * N, 4], piece [K, S, 2], sink [H] if there are any, to base 2, merged [R * T *
    H, padded D] of `dtype`, lse_out as merged, all columns alike.
    """
    sink_ref, (merged_ref, *lse_out_ref) = rest[:has_sinks], rest[has_sinks:]
    rows, width, heads, dim = shape
    slots, columns = listed_ref.shape[0] // rows, padded_dim(dim)
    queries = rows * width * heads
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
            lines, lses = [], []
            for i in range(_PIECES_AT_ONCE):
                index = n * _PIECES_AT_ONCE + i
                piece = jnp.minimum(index, pieces - 1)
                lines.append(partial_row(work, first + piece, kv_head, query + nth))
                lses.append(jnp.where(index < pieces, lse_ref[lines[-1]], -jnp.inf))
            parts = [plgpu.load(out_ref.at[i], layout=strided, optimized=False) for i in lines]
            highest = top
            for lse in lses:
                highest = jnp.maximum(highest, lse)
            under = jnp.where(highest == -jnp.inf, 0.0, highest)
            keep = exp2(top - under)
            total, mixed = total * keep, mixed * keep
            for lse, part in zip(lses, parts, strict=True):
                weight = exp2(lse - under)
                total, mixed = total + weight, mixed + part * weight
            return highest, total, mixed

        chunks = lax.div(pieces + _PIECES_AT_ONCE - 1, _PIECES_AT_ONCE)
        return lax.fori_loop(0, chunks, add_pieces, state)

    def exp2(x: Array) -> Array:
        return jnp.exp2(plgpu.layout_cast(jnp.full((columns,), x, jnp.float32), strided))

    strided = plgpu.Layout.WG_STRIDED((columns,), vec_size=1)
    zero = plgpu.layout_cast(jnp.full((columns,), 0.0, jnp.float32), strided)
    state = jnp.float32(-jnp.inf), zero, zero
    for ref in sink_ref:
        sink = ref[head]
        state = sink, exp2(jnp.where(sink == -jnp.inf, sink, 0.0)), zero
    top, total, mixed = lax.fori_loop(0, slots, add_block, state)
    merged_ref[number] = (mixed / jnp.where(total == 0.0, 1.0, total)).astype(dtype)
    for ref in lse_out_ref:
        ref[number] = jnp.log2(total) + top
