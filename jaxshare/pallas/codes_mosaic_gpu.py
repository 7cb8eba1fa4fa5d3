"""Tiles of codes in the kernel of block attention for Hopper GPUs, where the cache approximates.

Codes of eight bits and their scales are what is fetched. The second operand of wgmma lies in shared
memory and has the queries' dtype, so each tile is converted there, once for both warpgroups that
compute: codes are exact in that dtype. A fourth warpgroup does so, or, where its registers are
needed, the one that fetches. The scales stay apart, as factors of a tile's scores and weights. They
lie in a ring as long as both kinds of slots together: a tile is fetched when the slot of its codes
is free, so that the tile which had it has been converted into the slot of an older one, and that
one's scales have been read.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jaxshare.pallas.items_mosaic_gpu import WARPGROUP, ItemReads
from jaxshare.pallas.tiles import MosaicTiles

WIDEST_APART = 128
"""The widest head dim whose results, of 64 queries a warpgroup, leave registers for a fourth one."""


class TileStream(NamedTuple):
    """Keys or values on their way from memory.

    Attributes:
      source: in device memory, [K, tokens, D].
      slots: in shared memory, [slots, tile, D].
      full, free: barriers of the slots; for each slot one that it is free, and one, or several, that
        as many equal parts of its columns are full.
      scales: of codes, in device memory, [K, tokens]; else None, and so is `scale_slots`.
      scale_slots: in shared memory, [ring, tile].
    """

    source: Any
    slots: Any
    full: Any
    free: Any
    scales: Any = None
    scale_slots: Any = None

    def fetch(self, plgpu: Any, head: Array, start: Array, number: Array) -> None:
        """Starts copying the tile that begins at `start`, the `number`-th of the item, when its
        slot is free."""
        count, size, _ = self.slots.shape
        slot, tokens = lax.rem(number, count), pl.ds(start, size)

        @pl.when(number >= count)
        def _() -> None:
            plgpu.barrier_wait(self.free.at[slot])

        full = self.full.at[slot]
        plgpu.copy_gmem_to_smem(self.source.at[head, tokens], self.slots.at[slot], full)
        if self.scales is not None:
            to = self.scale_slots.at[lax.rem(number, self.scale_slots.shape[0])]
            plgpu.copy_gmem_to_smem(self.scales.at[head, tokens], to, full)

    def parts(self, slot: Array) -> list[tuple[Any, Any]]:
        """(the barrier that is full with it, its columns) of each part of a slot."""
        count = self.full.shape[0] // self.slots.shape[0]
        columns = self.slots.shape[2] // count
        return [(self.full.at[slot * count + i], pl.ds(i * columns, columns)) for i in range(count)]


class CodeSlots(NamedTuple):
    """The further shared memory and barriers for keys, or values, that are codes.

    Codes are [slots, tile, D], scales [ring, tile]. Full and free are between the warpgroups that
    fetch and convert.
    """

    codes: Any
    scales: Any
    full: Any
    free: Any

    @classmethod
    def scratch(cls, plgpu: Any, tiles: MosaicTiles, dim: int, dtype: Any) -> "CodeSlots":
        """Creates them for `plgpu.kernel`; `dtype` is that of the codes."""
        transforms = layout_of(plgpu, code_columns(plgpu, dim), dtype.itemsize)
        return cls(
            plgpu.SMEM((tiles.code_stages, tiles.tile, dim), dtype, transforms=transforms),
            plgpu.SMEM((tiles.code_stages + tiles.stages, tiles.tile), jnp.float32),
            # Codes and scales arrive at one barrier.
            full=plgpu.Barrier(num_arrivals=2, num_barriers=tiles.code_stages),
            free=plgpu.Barrier(num_barriers=tiles.code_stages),
        )

    def stream(self, codes: Any, scales: Any) -> TileStream:
        """Codes and scales from device memory to these slots."""
        return TileStream(codes, self.codes, self.full, self.free, scales, self.scales)


class Conversion(NamedTuple):
    """Codes on their way, and the slots that their numbers go to, of which source and scales are
    not used: of keys and values, or of keys alone. plgpu is Pallas' Mosaic GPU module."""

    plgpu: Any
    codes: tuple[TileStream, ...]
    numbers: tuple[TileStream, ...]

    def all_tiles(self, reads: ItemReads) -> None:
        """Converts all tiles of an item, in their order, as a warpgroup's only work."""

        def convert_piece(number: Array, done: Array) -> Array:
            now = reads.segment(number)
            tiles = jnp.maximum(now.end - now.first, 0)
            return lax.fori_loop(done, done + tiles, self.tile, done)

        done = lax.fori_loop(reads.first_segment, reads.end_segment, convert_piece, jnp.int32(0))
        wait_for_last(self.plgpu, done, *(each.free for each in self.numbers))

    def tile(self, number: Array, _: Array) -> Array:
        """Converts the `number`-th tile of an item, and returns how many are converted then."""
        for source, to in zip(self.codes, self.numbers, strict=True):
            taken, slot = (lax.rem(number, each.slots.shape[0]) for each in (source, to))
            self.plgpu.barrier_wait(source.full.at[taken])

            @pl.when(number >= to.slots.shape[0])
            def _(free: Any = to.free.at[slot]) -> None:
                self.plgpu.barrier_wait(free)

            for full, columns in to.parts(slot):
                part = slice(None), columns
                _convert(self.plgpu, source.slots.at[taken, *part], to.slots.at[slot, *part])
                self.plgpu.commit_smem()
                self.plgpu.barrier_arrive(full)
            self.plgpu.barrier_arrive(source.free.at[taken])
        return number + 1


def wait_for_last(plgpu: Any, used: Array, *barriers: Any) -> None:
    """Waits until the last uses of all slots are over, after so many: a waiter must see every phase
    of a barrier."""
    for free in barriers:
        for slot in range(free.shape[0]):

            @pl.when(used > slot)
            def _(free: Any = free.at[slot]) -> None:
                plgpu.barrier_wait(free)


def scaled(plgpu: Any, x: Array, slots: Any, number: Array) -> Array:
    """Numbers [64, tile] times the scales of the `number`-th tile's keys or values; `slots` are
    those of scales."""
    scales = plgpu.load(
        slots.at[lax.rem(number, slots.shape[0])],
        layout=plgpu.Layout.WGMMA.reduce(0),
        optimized=False,
    )
    return x * lax.broadcast_in_dim(scales, x.shape, [1])


def layout_of(plgpu: Any, columns: int, itemsize: int) -> tuple[Any, ...]:
    """The tiling and swizzling of shared memory that wgmma and bulk copies need; rows of 16 bytes
    lie one after the other."""
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))
    return (tiling, plgpu.SwizzleTransform(swizzle)) if swizzle > 16 else (tiling,)


def code_columns(plgpu: Any, dim: int) -> int:
    """The columns of codes in one pattern of their swizzling, and that are converted at once: at
    most 64, so that few are in registers."""
    return min(plgpu.find_swizzle(dim * 8), 64)  # in bytes, and so in codes


def _convert(plgpu: Any, codes: Any, to: Any) -> None:
    """Converts a tile [tile, D] in parts."""
    size, dim = codes.shape
    columns = code_columns(plgpu, dim)
    for row in range(0, size, WARPGROUP):
        for column in range(0, dim, columns):
            part = pl.ds(row, WARPGROUP), pl.ds(column, columns)
            read = plgpu.load(codes.at[part], layout=plgpu.Layout.WGMMA_UPCAST_2X)
            to[part] = widened(read, to.dtype)


def widened(codes: Array, dtype: Any) -> Array:
    """Codes as numbers, which the dtype has exactly. A GPU converts fp8 to float16, and that to
    float32; to bfloat16 only with a newer ptxas."""
    if codes.dtype == jnp.int8 or dtype == jnp.float16:
        return codes.astype(dtype)
    return codes.astype(jnp.float32).astype(dtype)
