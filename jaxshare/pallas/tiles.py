"""Tile configurations of the GPU kernels: a small table by shape, and those worth measuring.

`jaxshare.pallas.chosen_tiles` chooses those of a call.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxshare.deprecated import renamed
from jaxshare.layout import bucket
from jaxshare.pallas.device import Device
from jaxshare.pallas.head_dims import LATENT_DIMS, shares_queries, store_columns
from jaxshare.quantised_cache import SCALE_BYTES


@dataclasses.dataclass(frozen=True)
class MosaicTiles:
    """The tiles of the mosaic_gpu backend.

    Attributes:
      tile: tokens of a tile of keys and values, a multiple of 64.
      stages: tiles under way between memory and multiprocessor.
      query_stages: query tiles under way, 1 or 2.
      code_stages: where the cache approximates, tiles of its codes under way; `stages` is then the
        tiles that these become.
      overlap: whether the products of segments of more than 64 queries overlap with exponentials,
        where they can: on Hopper, over an exact cache, with heads of up to 192.
    """

    tile: int
    stages: int
    query_stages: int
    code_stages: int = 1
    overlap: bool = True

    def __post_init__(self) -> None:
        _check(self, tile=self.tile % 64 == 0, query_stages=self.query_stages in (1, 2))


@dataclasses.dataclass(frozen=True)
class TritonTiles:
    """The tiles of the triton backend.

    Attributes:
      span: queries of a tile, a power of two from 16.
      tile: tokens of a tile of keys and values, a power of two from 16.
      num_warps, num_stages: as in Triton.
      items_per_multiprocessor: work items for each multiprocessor.
    """

    span: int
    tile: int
    num_warps: int
    num_stages: int
    items_per_multiprocessor: int = 2

    def __post_init__(self) -> None:
        _check(
            self,
            span=self.span >= 16 and _is_power(self.span),
            tile=self.tile >= 16 and _is_power(self.tile),
            num_warps=_is_power(self.num_warps),
        )


KernelConfig = MosaicTiles | TritonTiles

KINDS: dict[str, type[MosaicTiles] | type[TritonTiles]] = {
    "mosaic_gpu": MosaicTiles,
    "triton": TritonTiles,
}
"""The type of tiles of each backend, by its name in `jaxshare.attention.api.BACKENDS`."""


def _check(tiles: KernelConfig, **valid: bool) -> None:
    for field in dataclasses.fields(tiles):
        value, least = getattr(tiles, field.name), int(field.type is int)
        if type(value) is not field.type or value < least or not valid.get(field.name, True):
            raise ValueError(
                f"{field.name} of {type(tiles).__name__} cannot be {value!r}; its documentation "
                "says what it can be"
            )


def _is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


_KIB = 1024
_SPAN = 128
"""Queries of a tile of the mosaic_gpu kernel: two warpgroups of 64."""
_ITEMSIZE = 2
"""Bytes of an entry of the caches that the kernels serve: bfloat16 or float16."""
_SHARED_MEMORY = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""KiB of shared memory that one program may have, by compute capability (CUDA programming guide,
technical specifications)."""


def shared_memory(device: Device) -> int:
    """Bytes of shared memory that one program on the device may have.

    Of an unknown device the smallest number in the table.
    """
    return _SHARED_MEMORY.get(device.capability, min(_SHARED_MEMORY.values())) * _KIB


def mosaic_bytes(tiles: MosaicTiles, head_dim: int, *, codes: bool = False) -> int:
    """Bytes of shared memory that the mosaic_gpu kernel takes; `codes`: the cache approximates.

    A little more than exact for its barriers and statistics.
    """
    span, arrays = _SPAN, 1 if head_dim in LATENT_DIMS else 2
    beside = _SPAN * store_columns(head_dim, codes) * 4  # results
    if shares_queries(head_dim, codes):
        span, beside = _SPAN // 2, _SPAN // 2 * tiles.tile * _ITEMSIZE  # weights
    scales = tiles.code_stages + tiles.stages
    return (
        (tiles.query_stages * span + tiles.stages * arrays * tiles.tile) * head_dim * _ITEMSIZE
        + codes * arrays * tiles.tile * (tiles.code_stages * head_dim + scales * SCALE_BYTES)
        + beside
        + 2 * _KIB
    )


def tensor_bytes(tiles: MosaicTiles, head_dim: int) -> int:
    """Bytes of shared memory that the kernel of tensor memory takes.

    A little more than exact for its barriers, statistics and the address of tensor memory.
    """
    lines = tiles.query_stages * 2 * TENSOR_ROWS + 2 * tiles.stages * tiles.tile
    return lines * head_dim * _ITEMSIZE + 2 * _KIB


def triton_bytes(tiles: TritonTiles, head_dim: int) -> int:
    """Bytes of shared memory that the Triton kernel takes at most.

    Keys and values of every stage, and the queries. Values that are a part of keys take no more.
    """
    arrays, columns = (1, head_dim) if head_dim in LATENT_DIMS else (2, bucket(head_dim))
    return (tiles.num_stages * arrays * tiles.tile + tiles.span) * columns * _ITEMSIZE + 2 * _KIB


def candidates_mosaic(device: Device, head_dim: int, queries: int) -> list[MosaicTiles]:
    """The mosaic_gpu tiles worth measuring for a call of `queries` queries.

    Their scores and results fit two warpgroups' registers, or tensor memory; each has the most stages
    that fit, or the next fewer. One of each size does not overlap products.
    """
    candidates: list[MosaicTiles] = []
    for tile in (64, 128) if head_dim <= 128 else (64,):
        for query_stages in (1, 2):
            sizes = (MosaicTiles(tile, stages, query_stages) for stages in (2, 3, 4, 5, 6, 8))
            candidates += [each for each in sizes if fits(each, device, head_dim, queries)][:-3:-1]
        if head_dim < 256 and not multiplies_in_tensor_memory(device, head_dim, queries):
            candidates.append(dataclasses.replace(candidates[-1], overlap=False))
    return candidates


def candidates_triton(device: Device, head_dim: int, queries: int) -> list[TritonTiles]:
    """The Triton tiles worth measuring for a call of `queries` queries.

    Spans up to all of the queries, in tiles that fit the device's shared memory.
    """
    spans = [
        span
        for span in (16, 32, 64, 128)
        if span <= max(16, bucket(queries)) and span <= _most_queries(head_dim)
    ]
    candidates: list[TritonTiles] = []
    for span in spans:
        for tile in (128, 64, 32, 16):
            for warps in _warps(head_dim, span):
                fit = [
                    tiles
                    for stages in (2, 3)
                    if fits(
                        tiles := TritonTiles(span, tile, warps, stages), device, head_dim, queries
                    )
                ]
                candidates += [_filled(tiles, device, head_dim) for tiles in fit]
            if tile <= 64 and any(c.span == span and c.num_stages == 3 for c in candidates):
                break  # smaller ones are for devices where three stages of these do not fit
    return candidates


def _warps(head_dim: int, span: int) -> tuple[int, ...]:
    """The numbers of warps worth measuring. Results of wide heads take eight warps' registers."""
    if head_dim in LATENT_DIMS:
        return (4, 8) if span == 16 else (8,)
    return {16: (4,), 32: (4,), 64: (4, 8), 128: (8,)}[span]


def _most_queries(head_dim: int) -> int:
    """The widest span whose results fit registers: for an H200, 64 queries of latents spill."""
    return 32 if head_dim in LATENT_DIMS else 128 if head_dim <= 128 else 64


def fits(
    tiles: KernelConfig, device: Device, head_dim: int, queries: int, *, codes: bool = False
) -> bool:
    """True where tiles fit the device's memory in a call of `queries` queries; `codes`: the cache
    approximates."""
    if isinstance(tiles, TritonTiles):
        needed = triton_bytes(tiles, head_dim)
    elif multiplies_in_tensor_memory(device, head_dim, queries, codes=codes):
        if 2 * (tiles.tile + head_dim) > _TENSOR_COLUMNS:
            return False
        needed = tensor_bytes(tiles, head_dim)
    else:
        needed = mosaic_bytes(tiles, head_dim, codes=codes)
    return needed <= shared_memory(device)


def _filled(tiles: TritonTiles, device: Device, head_dim: int) -> TritonTiles:
    """The tiles with as many items for each multiprocessor as it can hold at once.

    The limits are its shared memory, and 16 warps with 128 registers a thread.
    """
    at_once = min(shared_memory(device) // triton_bytes(tiles, head_dim), 16 // tiles.num_warps)
    return dataclasses.replace(tiles, items_per_multiprocessor=max(1, at_once))


MANY_QUERIES = 2048
"""From this number of queries on, the products of blocks that many rows see take most of the time;
below, reading the cache does."""

MOSAIC_TABLE = {
    64: (MosaicTiles(64, 6, 2), MosaicTiles(128, 4, 2)),
    80: (MosaicTiles(64, 4, 2), MosaicTiles(128, 3, 2)),
    96: (MosaicTiles(64, 4, 2), MosaicTiles(128, 2, 2)),
    128: (MosaicTiles(64, 4, 2), MosaicTiles(128, 2, 2)),
    192: (MosaicTiles(64, 3, 1), MosaicTiles(64, 3, 1)),
    256: (MosaicTiles(64, 2, 1), MosaicTiles(64, 2, 1)),
    576: (MosaicTiles(64, 2, 1), MosaicTiles(64, 2, 1)),
}
"""By head dim, for few queries and for many. Chosen because they compile for an H200 without
spilling registers, with enough bytes under way to hide its memory's latency; not measured on one
yet. G and the dtype are not keys: G is in the number of queries, and both dtypes have two bytes."""

CODES_TABLE = {
    64: (MosaicTiles(64, 3, 2, 6), MosaicTiles(128, 2, 2, 3)),
    80: (MosaicTiles(64, 3, 2, 4), MosaicTiles(128, 2, 2, 2)),
    96: (MosaicTiles(64, 2, 2, 4), MosaicTiles(64, 2, 2, 4)),
    128: (MosaicTiles(64, 2, 2, 3), MosaicTiles(64, 2, 2, 3)),
    192: (MosaicTiles(64, 2, 1, 2), MosaicTiles(64, 2, 1, 2)),
    256: (MosaicTiles(64, 1, 2, 2), MosaicTiles(64, 1, 2, 2)),
    576: (MosaicTiles(64, 1, 1, 2), MosaicTiles(64, 1, 1, 2)),
}
"""The same where the cache approximates; `stages` are then of converted tiles. One is enough for
heads of 256: keys are converted while values are used, and the other way round. Of latents no more
than one fits."""

TENSOR_TABLE = {
    64: MosaicTiles(128, 4, 2),
    80: MosaicTiles(128, 3, 2),
    96: MosaicTiles(128, 2, 2),
    128: MosaicTiles(128, 2, 1),
    192: MosaicTiles(64, 2, 1),
}
"""By head dim, for many queries, of the kernel that multiplies in tensor memory, where 2 * (tile +
head dim) columns are at most all there are. Not measured either."""
TENSOR_ROWS = 128
"""Queries of a warpgroup of that kernel: the rows of tensor memory."""
_TENSOR_COLUMNS = 512


def multiplies_in_tensor_memory(
    device: Device, head_dim: int, queries: int, *, codes: bool = False
) -> bool:
    """True where mosaic_gpu multiplies in tensor memory (tcgen05): many queries over an exact cache
    on Blackwell's data centre GPUs; `codes`: the cache approximates."""
    served = head_dim in TENSOR_TABLE and not codes
    return device.capability // 10 == 10 and served and queries >= MANY_QUERIES


TRITON_TABLE = {
    64: ((64, 3), (64, 2)),
    80: ((64, 3), (64, 2), (32, 2)),
    96: ((64, 3), (64, 2), (32, 2)),
    128: ((64, 3), (64, 2), (32, 2)),
    192: ((64, 2), (32, 3), (32, 2)),
    256: ((64, 2), (32, 3), (32, 2)),
    576: ((64, 2), (32, 2), (16, 2)),
}
"""By head dim, pairs of tile and stages, of which the first that fits the device is used. Not
measured yet either."""


def built_in_mosaic(
    device: Device, head_dim: int, queries: int, *, codes: bool = False
) -> MosaicTiles:
    """The tiles in the table for a call of `queries` queries; `codes`: the cache approximates.

    Raises:
      NotImplementedError: a head dim that is not in it.
    """
    table = CODES_TABLE if codes else MOSAIC_TABLE
    _check_dim(head_dim, table)
    if multiplies_in_tensor_memory(device, head_dim, queries, codes=codes):
        return TENSOR_TABLE[head_dim]
    few, many = table[head_dim]
    return many if queries >= MANY_QUERIES else few


def built_in_triton(
    device: Device, head_dim: int, queries: int, *, codes: bool = False
) -> TritonTiles:
    """The tiles in the table that fit the device's shared memory. Raises as `built_in_mosaic`."""
    _check_dim(head_dim, TRITON_TABLE)
    # A span wider than a block's queries is padding, and up to 64 a kernel that waits for memory
    # has time for it.
    span = 128 if queries >= MANY_QUERIES else min(max(16, bucket(queries)), 64)
    span = min(span, 32 if codes and head_dim > 128 else _most_queries(head_dim))
    warps = _warps(head_dim, span)[-1 if head_dim > 128 and span > 16 else 0]
    # Larger tiles of codes of wide heads, and wider spans, spill registers.
    pairs = TRITON_TABLE[head_dim][1 if codes and head_dim > 128 else 0 :]
    options = [TritonTiles(span, tile, warps, stages) for tile, stages in pairs]
    return _filled(
        next(tiles for tiles in options if fits(tiles, device, head_dim, queries)), device, head_dim
    )


def _check_dim(head_dim: int, table: Mapping[int, Any]) -> None:
    if head_dim not in table:
        raise NotImplementedError(
            f"the head dim is {head_dim}, but there are tiles for {', '.join(map(str, table))} only"
        )


_MOVED = (
    "VERSION",
    "Key",
    "Measured",
    "choose_mosaic",
    "choose_triton",
    "decode_tiles",
    "encode_tiles",
    "read_tiles",
    "tiles_file",
    "use_tiles",
)
__getattr__ = renamed(__name__, {name: f"jaxshare.pallas.chosen_tiles.{name}" for name in _MOVED})
