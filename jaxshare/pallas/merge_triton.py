"""Merges the partial results of each query in the Triton backend.

They are from `jaxshare.pallas.block_attention_triton`. Of the `Work.partial_rows` rows of partial
results only those of real pieces are written. So each query looks up, for every block that it sees,
the pieces of its segment, and takes those rows alone into a softmax over their log-sum-exps
(Hydragen section 3.1).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jaxshare.attention.merge import merge_over, sinks_here
from jaxshare.pallas.work_items import Work, partial_row

_SLOTS_AT_ONCE = 32
_LANES = 16
"""Partial results that a program takes at once, of all its queries."""


def merge_pieces(
    mixed: Float[Array, "partial D"],
    lse: Float[Array, " partial"],
    work: Work,
    shape: tuple[int, int, int, int],
    dtype: jnp.dtype,
    *,
    multiprocessors: int,
    interpret: bool,
    axis: str | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "R T H D"]:
    """Attention of each query over all it sees, from its pieces; 0 for a query that sees nothing.

    Args:
      mixed: float32, attention over the keys of a piece, in the rows that `partial_row` gives.
      lse: float32, to base 2; -inf where a piece has no key that the query sees.
      work: the work items that the pieces are from.
      shape: R, T, H, D.
      dtype: of the result.
      multiprocessors: of the GPU, so that few queries are spread over all of them.
      interpret: interpret the kernel, on the CPU.
      axis: of the mesh, over which keys are sharded.
      sinks: for each head a score beside those of all keys, whose value is 0.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    rows, width, heads, dim = shape
    total = rows * width * heads
    queries = 1
    while queries < 8 and total >= 2 * queries * 8 * multiprocessors:
        queries *= 2
    kernel = functools.partial(
        _kernel,
        work,
        shape=shape,
        queries=queries,
        lanes=_LANES // queries,
        has_sinks=sinks is not None,
    )
    more = [] if sinks is None else [sinks_here(sinks, axis)]
    # A result that is merged with other devices' is not rounded, and needs its log-sum-exp.
    merged = jax.ShapeDtypeStruct((total, dim), jnp.float32 if axis else dtype)
    results = pl.pallas_call(
        kernel,
        out_shape=[merged, jax.ShapeDtypeStruct((total,), jnp.float32)] if axis else [merged],
        grid=(-(-total // queries),),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="merge_pieces",
    )(mixed, lse, work.listed, work.pieces, *more)
    out = results[0].reshape(shape)
    if axis is None:
        return out
    return merge_over(axis, out, results[1].reshape(shape[:3]) * math.log(2)).astype(dtype)


def _kernel(
    work: Work,
    mixed_ref: Any,
    lse_ref: Any,
    listed_ref: Any,
    pieces_ref: Any,
    *rest: Any,
    shape: tuple[int, int, int, int],
    queries: int,
    lanes: int,
    has_sinks: bool,
) -> None:
    """Merges M = `queries` neighbouring queries, L = `lanes` pieces of each at once.

    Refs: mixed float32[partial_rows, D]; lse float32[partial_rows]; listed int32[R, N, 4]; pieces
    int32[K, S, 2]; sinks [H], if there are any; out [R * T * H, D]; optional
    lse_out float32[R * T * H], to base 2. Of `work` only the static fields are used.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    sinks_ref, (out_ref, *lse_out_ref) = rest[:has_sinks], rest[has_sinks:]
    rows, width, heads, dim = shape
    listed = listed_ref.shape[1]
    group = heads // pieces_ref.shape[0]
    index = pl.program_id(0) * queries + jnp.arange(queries)
    real = index < rows * width * heads
    row, head = index // (width * heads), index % heads
    kv_head, member = head // group, index // heads % width * group + head % group
    column = jnp.arange(pl.next_power_of_2(dim))
    slots = min(pl.next_power_of_2(listed), _SLOTS_AT_ONCE)

    def blocks(chunk: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Adds the pieces of the next few listed blocks, concatenated, each query's own."""
        slot = (chunk * slots + jnp.arange(slots))[None]  # [1, N']
        listing = real[:, None] & (slot < listed)  # [M, N']
        query = plt.load(listed_ref.at[row[:, None], slot, 0], mask=listing, other=-1)
        sees = listing & (query >= 0)
        before = plt.load(listed_ref.at[row[:, None], slot, 2], mask=sees, other=0)
        segment = (
            plt.load(listed_ref.at[row[:, None], slot, 1], mask=sees, other=0)
            + (before + member[:, None]) // work.span
        )
        first = plt.load(pieces_ref.at[kv_head[:, None], segment, 0], mask=sees, other=0)
        number = plt.load(pieces_ref.at[kv_head[:, None], segment, 1], mask=sees, other=0) - first
        ends = jnp.cumsum(number, axis=1)
        starts = ends - number
        count = jnp.sum(number, axis=1)  # [M]
        # Each block's row if its pieces started at lane 0; neighbouring pieces of a segment are
        # `span` rows apart.
        row_at_0 = (
            partial_row(work, first, kv_head[:, None], query + member[:, None]) - starts * work.span
        )

        def pieces(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, out = carry
            lane = (step * lanes + jnp.arange(lanes))[None]  # [1, L]
            there = lane < count[:, None]  # [M, L]
            # [M, L, N']
            mine = (starts[:, None] <= lane[..., None]) & (lane[..., None] < ends[:, None])
            line = jnp.sum(jnp.where(mine, row_at_0[:, None], 0), axis=2) + lane * work.span
            lse = plt.load(lse_ref.at[line], mask=there, other=-jnp.inf)
            inside = there[..., None] & (column < dim)[None, None]
            part = plt.load(
                mixed_ref.at[line[..., None], column[None, None]], mask=inside, other=0.0
            )
            higher = jnp.maximum(top, jnp.max(lse, axis=1))
            under = jnp.where(higher == -jnp.inf, 0.0, higher)
            weight, keep = jnp.exp2(lse - under[:, None]), jnp.exp2(top - under)
            return (
                higher,
                total * keep + jnp.sum(weight, axis=1),
                out * keep[:, None] + jnp.sum(part * weight[..., None], axis=1),
            )

        return lax.fori_loop(0, (jnp.max(count) + lanes - 1) // lanes, pieces, carry)

    top, total = jnp.full(queries, -jnp.inf), jnp.zeros(queries)
    for ref in sinks_ref:
        top = plt.load(ref.at[head]).astype(jnp.float32) * math.log2(math.e)
        total = jnp.where(top == -jnp.inf, 0.0, 1.0)
    start = top, total, jnp.zeros((queries, column.size))
    top, total, out = lax.fori_loop(0, -(-listed // slots), blocks, start)
    for ref in lse_out_ref:
        plt.store(ref.at[index], top + jnp.log2(total), mask=real)
    out = out / jnp.where(total == 0, 1.0, total)[:, None]
    plt.store(
        out_ref.at[index[:, None], column[None]],
        out.astype(out_ref.dtype),
        mask=real[:, None] & (column < dim)[None],
    )
