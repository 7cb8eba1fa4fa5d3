"""The pool: the accelerator's memory for keys and values, in extents, and copies of extents in host
memory.

Each pass is given its blocks anew (`View`), so splitting, shrinking or extending an extent in
place are arithmetic on the host, and copy nothing.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jaxshare import KVCache, sharding
from jaxshare.arena import ALIGNMENT, ARENA, LARGE_TILE, Arenas, arena_size, put, take
from jaxshare.models import LoadedModel
from jaxshare.serving.errors import EngineError
from jaxshare.serving.inputs import cache_dtype, token_bytes
from jaxshare.serving.kvcache.free_list import FreeList
from jaxshare.sharding import STRIPE, CyclicSharding, on_each

_TOKENS_OF_A_ROW = 2048
"""Tokens of a row in a memory of the standard size, unless the model's context is shorter."""


def standard_tokens(model: LoadedModel, rows: int, max_bytes: int) -> int:
    """The standard size, in tokens, of memory for so many rows, within these bytes.

    A program is compiled for one size of the memory, so hosts of equally many rows take the same.
    """
    tokens = rows * min(_TOKENS_OF_A_ROW, model.config.max_positions)
    return min(arena_size(tokens), whole_tiles(max_bytes // token_bytes(model)))


def empty_arena(model: LoadedModel, tokens: int) -> KVCache:
    """An arena for so many tokens."""
    return KVCache.empty(
        model.config,
        tokens,
        1,
        cache_dtype(model),
        mesh=model.mesh,
        approximate=model.approximate_kv,
    )


@dataclasses.dataclass(slots=True, eq=False)
class Extent:
    """A run of the arena.

    Attributes:
      offset: its first place in the arena.
      capacity: tokens that fit.
      length: tokens that are cached in it.
      phase: the position to which its first key is rotated.
    """

    offset: int
    capacity: int
    length: int = 0
    phase: int = 0

    @property
    def end(self) -> int:
        """The exclusive end of its places."""
        return self.offset + self.capacity

    def precedes(self, other: "Extent") -> bool:
        """Returns whether the other one continues this one, so that both can be read as one."""
        return (
            self.length == self.capacity
            and self.end == other.offset
            and self.phase + self.length == other.phase
        )


@dataclasses.dataclass(frozen=True, eq=False)
class HostCopy:
    """Keys and values of an extent in host memory: for each layer [K, tokens, D], as the arenas
    have them."""

    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    phase: int

    @property
    def tokens(self) -> int:
        return self.keys[0].shape[1]

    def split(self, length: int) -> "tuple[HostCopy, HostCopy]":
        """The first `length` tokens, and the rest."""

        def part(tokens: slice, phase: int) -> HostCopy:
            # Arrays of its own, so that each part's memory is freed with that part.
            both = self.keys, self.values
            keys, values = jax.tree.map(lambda array: array[:, tokens].copy(), both)
            return HostCopy(keys, values, phase)

        return part(slice(length), self.phase), part(slice(length, None), self.phase + length)


class Pool:
    """One arena and its free list.

    Attributes:
      tokens: its capacity.
      bytes_per_token: of keys and values in all layers.
      cache: the arena. After a pass over a view of it the new one has to be stored here.

    Raises:
      EngineError: the device has no room for it.
    """

    def __init__(self, model: LoadedModel, tokens: int):
        self.tokens = tokens
        self.bytes_per_token = token_bytes(model)
        try:
            self.cache = empty_arena(model, tokens)
            jax.block_until_ready(self.cache.keys)  # a device says late that it is full
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise EngineError(
                f"the device has no room for {tokens * self.bytes_per_token} bytes of keys and "
                "values; lower kv_bytes, or end what else is on it"
            ) from error
        self._free_list = FreeList(tokens)

    @property
    def free(self) -> int:
        """Tokens that belong to no extent."""
        return self._free_list.free

    @property
    def largest(self) -> int:
        """Tokens of the largest free run."""
        return self._free_list.largest

    @property
    def is_lost(self) -> bool:
        """True if the arena was given to a pass that was interrupted."""
        return jax.tree.leaves(self.cache.keys)[0].is_deleted()

    def take(self, capacity: int, *, high: bool = False) -> Extent | None:
        """A new empty extent, or None where no free run is large enough.

        Args:
          capacity: in tokens.
          high: place it as far to the end as possible, which keeps extents that are soon given back
            apart from the others.
        """
        offset = self._free_list.take(capacity, high=high)
        if offset is None:
            offset = self._free_list.take(capacity, high=high, aligned=False)
        return None if offset is None else Extent(offset, capacity)

    def extend(self, extent: Extent, tokens: int) -> bool:
        """Extends an extent in place; False if the places after it are not free."""
        extended = self._free_list.take_at(extent.end, tokens)
        extent.capacity += tokens * extended
        return extended

    def shrink(self, extent: Extent) -> None:
        """Frees the unused capacity of an extent."""
        unused, extent.capacity = extent.capacity - extent.length, extent.length
        self._free_list.give_back(extent.end, unused)

    def give_back(self, extent: Extent) -> None:
        """Frees an extent."""
        self._free_list.give_back(extent.offset, extent.capacity)
        extent.capacity = extent.length = 0

    @staticmethod
    def split(extent: Extent, length: int) -> Extent:
        """Splits an extent without copying.

        Returns:
          An extent of its first `length` tokens; the extent itself becomes the rest.
        """
        head = Extent(extent.offset, length, length, extent.phase)
        extent.offset += length
        extent.capacity -= length
        extent.length -= length
        extent.phase += length
        return head

    def compact(self, extents: Iterable[Extent], tokens: int, within: int | None = None) -> bool:
        """Merges neighbouring free runs into one by moving the extents between them to the front.

        Keys keep the positions that they are rotated to.

        Args:
          extents: all that are allocated.
          tokens: of the free run.
          within: the most places to rewrite; None for any number.

        Returns:
          False if `tokens` are not free, or not within `within` places.
        """
        stretch = self._free_list.merge(tokens, within)
        if stretch is None:
            return False
        start, end = stretch
        width, window, _ = self._window(start, end - start)
        source, offset = np.arange(width), start
        for extent in sorted(
            (e for e in extents if start <= e.offset < end and e.capacity),
            key=lambda extent: extent.offset,
        ):
            source[offset - window : offset - window + extent.capacity] = np.arange(
                extent.offset - window, extent.end - window
            )
            extent.offset = offset
            offset += extent.capacity
        self._free_list.give_back(offset, end - offset)
        keys, values = _permute(
            (self.cache.keys, self.cache.values), source, window, self.cache.mesh
        )
        self.cache = dataclasses.replace(self.cache, keys=keys, values=values)
        return True

    def free_arrays(self) -> None:
        """Frees the accelerator's memory; the pool cannot be used afterwards."""
        for array in jax.tree.leaves((self.cache.keys, self.cache.values)):
            if not array.is_deleted():
                array.delete()

    # Views for passes.

    # Copies.

    def copy(self, extent: Extent) -> Arenas:
        """New arenas that start with the contents of an extent."""
        return _copy(
            (self.cache.keys, self.cache.values), extent.offset, extent.capacity, self.cache.mesh
        )

    def read(self, extent: Extent) -> HostCopy:
        """Copies the cached tokens of an extent to host memory."""
        width, start, first = self._window(extent.offset, extent.length)
        keys, values = _read((self.cache.keys, self.cache.values), start, width, self.cache.mesh)
        cached = slice(first, first + extent.length)
        keys, values = jax.tree.map(
            lambda a: np.array(a[:, cached]), jax.device_get((keys, values))
        )
        return HostCopy(keys, values, extent.phase)

    def write(self, extent: Extent, copy: HostCopy) -> None:
        """Writes a copy into an empty extent of its size."""
        extent.length, extent.phase = copy.tokens, copy.phase
        width, start, first = self._window(extent.offset, extent.length)
        after = width - first - copy.tokens
        keys, values = jax.tree.map(
            lambda a: np.pad(a, ((0, 0), (first, after), (0, 0))), (copy.keys, copy.values)
        )
        keys, values = _write(
            (self.cache.keys, self.cache.values),
            (keys, values),
            start,
            first,
            copy.tokens,
            self.cache.mesh,
        )
        self.cache = dataclasses.replace(self.cache, keys=keys, values=values)

    def _window(self, offset: int, tokens: int) -> tuple[int, int, int]:
        """A window that contains a run of the arena, of one of few sizes, so that programs are few.

        Returns:
          Its tokens, its offset in the arena, and the run's offset in it.
        """
        width = ALIGNMENT
        while width < tokens:
            width *= 4
        width = min(width, self.tokens)
        start = min(offset, self.tokens - width)
        return width, start, offset - start


# One device's part of each. An arena that is sharded by tokens is gathered over all devices.
# Windows have the same heads as the arenas.

_ARENA, _WINDOW, _NONE = (
    sharding.spec(ARENA),
    sharding.spec((ARENA[0], None, None)),
    PartitionSpec(),
)


@functools.partial(jax.jit, donate_argnames="arenas", static_argnames="mesh")
def _permute(arenas: Arenas, source: Array, start: Array, mesh: Mesh | None) -> Arenas:
    shards = CyclicSharding.over(mesh)

    def permuted(arena: Array) -> Array:
        window = jax.lax.dynamic_slice_in_dim(arena, start, len(source), axis=1)
        return jax.lax.dynamic_update_slice_in_dim(arena, window[:, source], start, axis=1)

    def local(arenas: Arenas, source: Array, start: Array) -> Arenas:
        if shards.axis is None:
            return jax.tree.map(permuted, arenas)
        return put(
            shards, arenas, start + jnp.arange(len(source)), take(shards, arenas, start + source)
        )

    return on_each(local, mesh, in_specs=(_ARENA, _NONE, _NONE), out_specs=_ARENA)(
        arenas, source, start
    )


@functools.partial(jax.jit, static_argnames=("width", "mesh"))
def _read(arenas: Arenas, start: Array, width: int, mesh: Mesh | None) -> Arenas:
    shards = CyclicSharding.over(mesh)

    def local(arenas: Arenas, start: Array) -> Arenas:
        if shards.axis is None:
            return jax.tree.map(
                lambda arena: jax.lax.dynamic_slice_in_dim(arena, start, width, axis=1), arenas
            )
        return take(shards, arenas, start + jnp.arange(width))

    return on_each(local, mesh, in_specs=(_ARENA, _NONE), out_specs=_WINDOW)(arenas, start)


@functools.partial(jax.jit, static_argnames=("width", "mesh"))
def _copy(arenas: Arenas, start: Array, width: int, mesh: Mesh | None) -> Arenas:
    shards, window = CyclicSharding.over(mesh), _read(arenas, start, width, mesh)
    if shards.axis is None:
        return window

    def local(window: Arenas) -> Arenas:
        size = -(-width // shards.period) * STRIPE
        empty = jax.tree.map(
            lambda arena: jnp.zeros((arena.shape[0], size, arena.shape[2]), arena.dtype), window
        )
        return put(shards, empty, jnp.arange(width), window)

    return on_each(local, mesh, in_specs=(_WINDOW,), out_specs=_ARENA)(window)


@functools.partial(jax.jit, donate_argnames="arenas", static_argnames="mesh")
def _write(
    arenas: Arenas, new: Arenas, start: Array, first: Array, count: Array, mesh: Mesh | None
) -> Arenas:
    shards = CyclicSharding.over(mesh)

    def local(arenas: Arenas, new: Arenas, start: Array, first: Array, count: Array) -> Arenas:
        place = jnp.arange(new[0][0].shape[1])
        real = (place >= first) & (place < first + count)
        if shards.axis is not None:
            return put(shards, arenas, jnp.where(real, start + place, -1), new)

        def written(arena: Array, part: Array) -> Array:
            window = jax.lax.dynamic_slice_in_dim(arena, start, part.shape[1], axis=1)
            return jax.lax.dynamic_update_slice_in_dim(
                arena, jnp.where(real[:, None], part, window), start, axis=1
            )

        return jax.tree.map(written, arenas, new)

    return on_each(local, mesh, in_specs=(_ARENA, _WINDOW, _NONE, _NONE, _NONE), out_specs=_ARENA)(
        arenas, new, start, first, count
    )


def whole_tiles(tokens: int) -> int:
    """The largest arena of at most `tokens` tokens that backends read well."""
    tile = LARGE_TILE if tokens >= 4 * LARGE_TILE else ALIGNMENT if tokens >= ALIGNMENT else 1
    return tokens - tokens % tile
