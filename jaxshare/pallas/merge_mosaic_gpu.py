"""Merges the partial results of each query, in Pallas on Mosaic GPU (Hydragen section 3.1)."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float

from jaxshare.attention.merge import merge_over, sinks_here
from jaxshare.pallas.device import Device
from jaxshare.pallas.work_items import Work, partial_row

_LINES_AT_ONCE = 8
"""Partial results that are read together, to hide the latency of memory: pieces of one query, or of
several."""
_WARPGROUPS = 16
"""Of a multiprocessor at once. Where there are more queries than these have, each takes several."""
State = tuple[Array, Array, Array]
"""Of a query: the highest log-sum-exp, and by it the sum of weights and the weighted sum."""
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
    per_row = width * heads // work.pieces.shape[0]
    at_once = _queries_at_once(queries // (device.multiprocessors * _WARPGROUPS), per_row)
    # A result that is merged with other devices' is not rounded, and needs its log-sum-exp.
    rounded = jnp.float32 if axis else dtype
    merged = jax.ShapeDtypeStruct((queries, columns), rounded)
    lse_out = jax.ShapeDtypeStruct((queries, columns), jnp.float32)
    results = plgpu.kernel(
        functools.partial(_merge_kernel, plgpu, work, shape, rounded, sinks is not None, at_once),
        out_type=[merged, lse_out] if axis else [merged],
        grid=(-(-queries // (4 * at_once)),),
        grid_names=("four",),
        num_threads=4,
        thread_name="warpgroup",
        kernel_name="merge_pieces",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if device.interpret else None,
    )(
        out,
        lse,
        work.listed.reshape(-1, 4),
        work.pieces,
        *([] if sinks is None else [sinks_here(sinks, axis)]),
    )
    out = results[0][:, :dim].reshape(shape)
    if axis is None:
        return out
    lse = results[1][:, 0].reshape(shape[:3]) * math.log(2)
    return merge_over(axis, out, lse).astype(dtype)


def _queries_at_once(rounds: int, per_row: int) -> int:
    """The queries of a warpgroup, of `per_row` of a row and a kv head, so that few rounds are left
    of those that one each would take."""
    return next(n for n in (4, 2, 1) if n == 1 or (rounds >= n // 2 and per_row % n == 0))


def _merge_kernel(
    plgpu: Any,
    work: Work,
    shape: tuple[int, int, int, int],
    dtype: jax.typing.DTypeLike,
    has_sinks: bool,
    at_once: int,
    out_ref: Any,
    lse_ref: Any,
    listed_ref: Any,
    piece_ref: Any,
    *rest: Any,
) -> None:
    """Merges some queries of a row and a kv head a warpgroup, which are in one segment of each block.

    plgpu is Pallas' Mosaic GPU module; of `work` only the static fields are used.

    Refs: listed [R * N, 4], piece [K, S, 2], sink [H] if there are any, merged [R * T *
    H, padded D] of `dtype`, lse_out as merged, all columns alike.
    """
    sink_ref, (merged_ref, *lse_out_ref) = rest[:has_sinks], rest[has_sinks:]
    rows, width, heads, dim = shape
    slots, columns = listed_ref.shape[0] // rows, padded_dim(dim)
    kv_heads = piece_ref.shape[0]
    group = heads // kv_heads
    together = width * group // at_once  # of a row and a kv head
    number = lax.axis_index("four") * 4 + lax.axis_index("warpgroup")
    count = rows * kv_heads * together
    is_over, number = number >= count, jnp.minimum(number, count - 1)
    row, rest_of_row = lax.div(number, kv_heads * together), lax.rem(number, kv_heads * together)
    kv_head, first_query = lax.div(rest_of_row, together), lax.rem(rest_of_row, together) * at_once
    pieces_at_once = max(1, _LINES_AT_ONCE // at_once)

    def add_block(slot: Array, states: tuple[State, ...]) -> tuple[State, ...]:
        query, segment, member = (listed_ref[row * slots + slot, i] for i in range(3))
        segment = segment + lax.div(member + first_query, work.span)
        first = piece_ref[kv_head, segment, 0]
        pieces = jnp.where(query >= 0, piece_ref[kv_head, segment, 1] - first, 0)

        def add_pieces(n: Array, states: tuple[State, ...]) -> tuple[State, ...]:
            loaded = []  # of each piece and query
            for i in range(pieces_at_once):
                index = n * pieces_at_once + i
                piece = jnp.minimum(index, pieces - 1)
                line = partial_row(work, first + piece, kv_head, query + first_query)
                loaded.append([])
                for j in range(at_once):
                    lse = jnp.where(index < pieces, lse_ref[line + j], -jnp.inf)
                    part = plgpu.load(out_ref.at[line + j], layout=strided, optimized=False)
                    loaded[-1].append((lse, part))
            return tuple(
                added(state, [of_piece[j] for of_piece in loaded]) for j, state in enumerate(states)
            )

        chunks = lax.div(pieces + pieces_at_once - 1, pieces_at_once)
        return lax.fori_loop(0, chunks, add_pieces, states)

    def added(state: State, parts: Sequence[tuple[Array, Array]]) -> State:
        top, total, mixed = state
        highest = functools.reduce(jnp.maximum, [lse for lse, _ in parts], top)
        under = jnp.where(highest == -jnp.inf, 0.0, highest)
        keep = exp2(top - under)
        total, mixed = total * keep, mixed * keep
        for lse, part in parts:
            weight = exp2(lse - under)
            total, mixed = total + weight, mixed + part * weight
        return highest, total, mixed

    def exp2(x: Array) -> Array:
        return jnp.exp2(plgpu.layout_cast(jnp.full((columns,), x, jnp.float32), strided))

    def place(query: Array) -> Array:
        """The number of a query of the row and the kv head in the result."""
        head = kv_head * group + lax.rem(query, group)
        return (row * width + lax.div(query, group)) * heads + head

    strided = plgpu.Layout.WG_STRIDED((columns,), vec_size=1)
    zero = plgpu.layout_cast(jnp.full((columns,), 0.0, jnp.float32), strided)
    places = [place(first_query + i) for i in range(at_once)]
    states: list[State] = [(jnp.float32(-jnp.inf), zero, zero)] * at_once
    for ref in sink_ref:
        loaded = (ref[lax.rem(to, heads)] for to in places)
        sinks = [sink.astype(jnp.float32) * math.log2(math.e) for sink in loaded]
        states = [(sink, exp2(jnp.where(sink == -jnp.inf, sink, 0.0)), zero) for sink in sinks]
    merged = lax.fori_loop(0, slots, add_block, tuple(states))

    @pl.when(~is_over)
    def _store() -> None:
        for to, (top, total, mixed) in zip(places, merged, strict=True):
            merged_ref[to] = (mixed / jnp.where(total == 0.0, 1.0, total)).astype(dtype)
            for ref in lse_out_ref:
                ref[to] = jnp.log2(total) + top
