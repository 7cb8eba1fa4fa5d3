"""Block attention for Hopper GPUs, in Pallas on Mosaic GPU.

The operations around the kernels: that of `jaxshare.pallas.kernel_mosaic_gpu`, and for wide heads
that of `jaxshare.pallas.wide_kernel_mosaic_gpu`. The queries are rotated towards their block, scaled
and gathered into the order of the segments before, because bulk copies cannot gather; so the queries
of a block that many multiprocessors share are rotated once, not by each of them (Hogwild! section
3.4). Where a pass appends, too, one kernel does both (`jaxshare.pallas.append_triton`).
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxshare.arena import append_tokens
from jaxshare.attention.plan import Plan
from jaxshare.pallas.append_triton import append_and_gather
from jaxshare.pallas.chosen_tiles import choose_mosaic
from jaxshare.pallas.codes_mosaic_gpu import WIDEST_APART, CodeSlots, layout_of
from jaxshare.pallas.device import Device, current_device, lowers_triton
from jaxshare.pallas.head_dims import MAX_QUERY_HEADS, check_head_dim, shares_queries, store_columns
from jaxshare.pallas.items_mosaic_gpu import ALIGNMENT, WARPGROUP
from jaxshare.pallas.kernel_mosaic_gpu import Barriers, attention_kernel
from jaxshare.pallas.merge_mosaic_gpu import merge_pieces, padded_dim
from jaxshare.pallas.products_mosaic_gpu import (
    WIDEST,
    WIDEST_OF_CODES,
    WarpgroupProducts,
    multiplies_by_warps,
)
from jaxshare.pallas.scores import query_scale
from jaxshare.pallas.tensor_kernel_mosaic_gpu import SPAN, TensorMemory, tensor_kernel
from jaxshare.pallas.tiles import MosaicTiles, multiplies_in_tensor_memory
from jaxshare.pallas.wide_kernel_mosaic_gpu import WideMemory, wide_kernel
from jaxshare.pallas.work_items import Work, WorkForm, keep_work, work_of
from jaxshare.quantised import QuantisedTensor
from jaxshare.quantised_cache import Arena
from jaxshare.rope import rotate

_FAMILIES = (9, 10)
"""Compute capabilities, without what is behind their points, of GPUs with bulk copies and with as
much shared memory as the tiles take."""
SETUP_TILES = 1
"""Tiles that take as long as the start and the end of a segment."""


class _Launch(NamedTuple):
    """The work of a pass, the GPU and the tiles there, and the softcap of scores."""

    work: Work
    tiles: MosaicTiles
    device: Device
    softcap: float


def mosaic_gpu_attention(
    q: Float[Array, "R T H D"],
    keys: Arena,
    values: Arena,
    plan: Plan,
    scale: float,
    softcap: float = 0.0,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "R T H _"]:
    """Attention of queries over arenas that already hold this pass's keys.

    The queries are not rotated; the result has their dtype. Codes of quantised keys and values are
    exact in the cache's dtype, and their scales are factors of scores and weights.

    Raises:
      NotImplementedError: a device, dtype or shape that the kernel does not support.
    """
    device, tiles, form = _chosen(q, keys, values, plan)
    work = work_of(plan, form)
    queries = segment_queries(q, plan, work, query_scale(scale, softcap), keys.dtype)
    launch = _Launch(work, tiles, device, softcap)
    return _attended(q, queries, keys, values, plan, launch, sinks)


def appending_mosaic_gpu_attention(
    q: Float[Array, "R T H D"],
    k: Float[Array, "R T K D"],
    v: Float[Array, "R T K _"],
    keys: Arena,
    values: Arena,
    plan: Plan,
    scale: float,
    softcap: float = 0.0,
    sinks: Float[Array, " H"] | None = None,
) -> tuple[Float[Array, "R T H _"], Arena, Arena]:
    """Appends this pass's keys and values, and attends; returns attention and the arenas.

    Otherwise as `mosaic_gpu_attention`. One kernel writes the arenas and rotates the queries, where
    JAX has Triton.
    """
    device, tiles, form = _chosen(q, keys, values, plan)
    work, factor = work_of(plan, form), query_scale(scale, softcap)
    if lowers_triton(device):
        queries, keys, values = append_and_gather(q, k, v, keys, values, plan, work, factor, device)
    else:
        keys, values = append_tokens(keys, values, k, v, plan)
        queries = segment_queries(q, plan, work, factor, keys.dtype)
    launch = _Launch(work, tiles, device, softcap)
    return _attended(q, queries, keys, values, plan, launch, sinks), keys, values


def _attended(
    q: Array,
    queries: Array,
    keys: Arena,
    values: Arena,
    plan: Plan,
    launch: _Launch,
    sinks: Array | None,
) -> Array:
    """The attention of `q`, which `queries` has in the order of the segments."""
    (rows, width, heads, dim), latent = q.shape, not values.shape[2]
    keys, values = (
        jax.tree.map(lambda a: _padded(a, launch.tiles.tile), x) for x in (keys, values)
    )
    if latent:
        dim -= 2 * plan.query_cos.shape[-1]
    if launch.work.span == SPAN:  # which no other kernel has
        out, lse = _tensor_pieces(queries, keys, values, launch)
    elif shares_queries(q.shape[3], isinstance(keys, QuantisedTensor)):
        apart = None if latent else values
        out, lse = _wide_pieces(queries, keys, apart, dim, launch)
    else:
        out, lse = _pieces(queries, keys, values, launch)
    shape, axis = (rows, width, heads, dim), plan.token_sharding.axis
    return merge_pieces(out, lse, launch.work, shape, q.dtype, launch.device, axis, sinks)


def with_mosaic_gpu_work(q: jax.ShapeDtypeStruct, keys: Arena, values: Arena, plan: Plan) -> Plan:
    """The plan with what all layers of such queries have in common.

    Raises:
      NotImplementedError: as `mosaic_gpu_attention`.
    """
    return keep_work(plan, _chosen(q, keys, values, plan)[2])


def _chosen(
    q: Array | jax.ShapeDtypeStruct, keys: Arena, values: Arena, plan: Plan
) -> tuple[Device, MosaicTiles, WorkForm]:
    """The GPU to run on, and the tiles and the form of the work there."""
    device, (rows, width, heads, dim), kv_heads = current_device(), q.shape, keys.shape[0]
    group = heads // kv_heads
    device = _checked(device, keys, group)
    check_head_dim(dim, values.shape[2], 2 * plan.query_cos.shape[-1])
    queries = rows * width * group
    tiles = choose_mosaic(device, dim, group, queries, _numbers(keys).dtype)
    if queries <= WARPGROUP:  # no segment is wide
        tiles = dataclasses.replace(tiles, overlap=False)
    # Two warpgroups share the queries of wide heads, and have queries of their own else.
    codes = isinstance(keys, QuantisedTensor)
    is_wide = shares_queries(dim, codes)
    span = WARPGROUP if is_wide else 2 * WARPGROUP
    if multiplies_in_tensor_memory(device, dim, queries, codes=codes):
        span = SPAN
    items = device.multiprocessors
    form = WorkForm(group, kv_heads, span, tiles.tile, items, ALIGNMENT, SETUP_TILES)
    return device, tiles, form


def _checked(device: Device | None, keys: Arena, group: int) -> Device:
    if device is None:
        raise NotImplementedError(
            "it runs on NVIDIA GPUs of compute capability 9 and 10, and this is "
            f"{jax.default_backend()}"
        )
    if device.capability // 10 not in _FAMILIES:
        raise NotImplementedError(
            f"it runs on GPUs of compute capability 9 and 10, and {device.kind} has "
            f"{device.capability / 10}"
        )
    most = WIDEST_OF_CODES if isinstance(keys, QuantisedTensor) else WIDEST
    if multiplies_by_warps(device) and keys.shape[2] > most:
        raise NotImplementedError(
            f"on {device.kind} heads of {_numbers(keys).dtype} caches have at most {most} entries, "
            f"and these have {keys.shape[2]}"
        )
    if keys.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"the cache must be bfloat16 or float16, not {keys.dtype}")
    if group > MAX_QUERY_HEADS:
        raise NotImplementedError(
            f"{group} query heads share a kv head, but it takes at most {MAX_QUERY_HEADS}"
        )
    try:
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    except ImportError as error:
        raise NotImplementedError(
            f"this installation of JAX has no Mosaic GPU backend ({error})"
        ) from error
    return device


def segment_queries(
    q: Float[Array, "R T H D"], plan: Plan, work: Work, scale: float, dtype: jnp.dtype
) -> Float[Array, "K queries D"]:
    """The Q + span queries in the order of the segments.

    They are rotated towards their block and scaled; padding is finite.
    """
    rows, width, heads, dim = q.shape
    kv_heads = work.pieces.shape[0]
    by_head = (
        q.reshape(rows * width, kv_heads, heads // kv_heads, dim)
        .transpose(1, 0, 2, 3)
        .reshape(kv_heads, -1, dim)
    )
    known = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
    here = by_head.at[:, work.taken].get(**known).astype(jnp.float32)
    cos, sin = (
        # of pairs that there may be none of
        x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).at[work.turned].get(**known)
        for x in (plan.query_cos, plan.query_sin)
    )
    return (rotate(here, cos, sin) * scale).astype(dtype)


def _padded(arena: Array, tile: int) -> Array:
    """Pads an arena so that tiles fit in.

    Caches are made so; only tiny ones, and ones of odd sizes made by hand, are copied.
    """
    tokens = arena.shape[1]
    more = max(tile, tokens + -tokens % ALIGNMENT) - tokens
    return jnp.pad(arena, ((0, 0), (0, more), (0, 0))) if more else arena


def _pieces(queries: Array, keys: Arena, values: Arena, launch: _Launch) -> tuple[Array, Array]:
    """Partial results of all pieces, base 2.

    They are out float32[partial rows, padded dim] and lse float32[partial rows]. Rows of no query,
    and columns beyond D, are undefined.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    work, tiles, device, softcap = launch
    dim, dtype = keys.shape[2], queries.dtype
    of_codes = [a for a in (keys, values) if isinstance(a, QuantisedTensor)]
    part = store_columns(dim, bool(of_codes))
    swizzled, stored = (
        layout_of(plgpu, columns, size) for columns, size in ((dim, dtype.itemsize), (part, 4))
    )
    stages, query_stages = tiles.stages, tiles.query_stages
    products = WarpgroupProducts.of(plgpu, device)
    kernel = functools.partial(
        attention_kernel, plgpu, work, tiles, keys.shape[1], part, softcap, products
    )
    scratch = [
        plgpu.SMEM((query_stages, 2, WARPGROUP, dim), dtype, transforms=swizzled),
        plgpu.SMEM((stages, tiles.tile, dim), dtype, transforms=swizzled),
        plgpu.SMEM((stages, tiles.tile, dim), dtype, transforms=swizzled),
        plgpu.SMEM((2, WARPGROUP, part), jnp.float32, transforms=stored),
        plgpu.SMEM((2, 2, WARPGROUP), jnp.float32),
        Barriers(
            query_full=plgpu.Barrier(num_barriers=2 * query_stages),
            query_free=plgpu.Barrier(num_arrivals=2, num_barriers=query_stages),
            key_full=plgpu.Barrier(num_barriers=stages),
            value_full=plgpu.Barrier(num_barriers=stages),
            key_free=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            value_free=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            given=plgpu.Barrier(),
            taken=plgpu.Barrier(),
            turn=plgpu.Barrier(num_barriers=2),
        ),
        tuple(CodeSlots.scratch(plgpu, tiles, dim, a.codes.dtype) for a in of_codes),
    ]
    return _launched(
        kernel,
        (queries, _numbers(keys), _numbers(values)),
        padded_dim(dim),
        work,
        device,
        scratch,
        scales=[a.scales[..., 0] for a in of_codes],
        num_threads=4 if of_codes and dim <= WIDEST_APART else 3,
    )


def _wide_pieces(
    queries: Array, keys: Arena, values: Arena | None, value_dim: int, launch: _Launch
) -> tuple[Array, Array]:
    """Does as `_pieces`, by the kernel for wide heads. Without values they are the last `value_dim`
    entries of keys."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    work, tiles, device, softcap = launch
    arenas = [keys] if values is None else [keys, values]
    of_codes = [a for a in arenas if isinstance(a, QuantisedTensor)]
    kind = of_codes[0].codes.dtype if of_codes else None
    apart = values is not None
    return _launched(
        functools.partial(wide_kernel, plgpu, work, tiles, value_dim, softcap, device.interpret),
        (queries, *map(_numbers, arenas)),
        value_dim,
        work,
        device,
        [WideMemory.scratch(plgpu, tiles, keys.shape[2], queries.dtype, kind, apart)],
        scales=[a.scales[..., 0] for a in of_codes],
        num_threads=4 if of_codes else 3,
    )


def _tensor_pieces(
    queries: Array, keys: Arena, values: Arena, launch: _Launch
) -> tuple[Array, Array]:
    """Does as `_pieces`, by the kernel of tensor memory."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    work, tiles, device, softcap = launch
    dim = keys.shape[2]
    return _launched(
        functools.partial(tensor_kernel, plgpu, work, tiles, softcap, device.interpret),
        (queries, _numbers(keys), _numbers(values)),
        padded_dim(dim),
        work,
        device,
        [TensorMemory.scratch(plgpu, tiles, dim, queries.dtype)],
    )


def _numbers(arena: Arena) -> Array:
    """An arena's numbers, or its codes."""
    return arena.codes if isinstance(arena, QuantisedTensor) else arena


def _launched(
    kernel: Callable[..., None],
    arrays: tuple[Array, ...],
    columns: int,
    work: Work,
    device: Device,
    scratch: Sequence[Any],
    scales: Sequence[Array] = (),
    num_threads: int = 3,
) -> tuple[Array, Array]:
    """Runs a kernel over all items.

    Args:
      kernel: takes the arrays, those of the work, the two results and the scratch memory.
      arrays: queries, keys, and values if they are apart.
      columns: of the partial results.
      work, device: of the pass.
      scratch: the kernel's memory and barriers.
      scales: of codes, [K, tokens] of keys and of values; none of an exact cache.
      num_threads: warpgroups of an item.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    run = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((work.partial_rows, columns), jnp.float32),
            jax.ShapeDtypeStruct((work.partial_rows,), jnp.float32),
        ],
        scratch_types=scratch,
        grid=(work.items.shape[0],),
        grid_names=("item",),
        num_threads=num_threads,
        thread_name="warpgroup",
        kernel_name="block_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=plgpu.InterpretGPUParams() if device.interpret else None,
    )
    return run(
        *arrays,
        work.limits,
        work.items,
        work.segments.table,
        work.totals,
        *([] if work.unseen is None else [work.unseen]),
        *scales,
    )
