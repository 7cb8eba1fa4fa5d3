"""Pool: the accelerator's memory for keys and values, handed out in extents by the host, and copies
of extents in host memory.

What a pass reads is told to it anew each time (`Pool.view`), so cutting an extent in two, giving a
part back or letting it grow in place are arithmetic on the host, and copy nothing.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jaxshare import KVCache, sharding
from jaxshare.arena import ALIGNMENT, ARENA, LARGE_TILE, Arenas, put, take
from jaxshare.models import LoadedModel
from jaxshare.serving.inputs import cache_dtype, token_bytes
from jaxshare.serving.kvcache.free_list import FreeList
from jaxshare.sharding import STRIPE, CyclicSharding, on_each


@dataclasses.dataclass(slots=True, eq=False)
class Extent:
    """A run of the arena.

    Attributes:
      offset: where it begins.
      capacity: tokens that fit.
      length: tokens that are in it.
      phase: the position to which its first key is rotated.
    """

    offset: int
    capacity: int
    length: int = 0
    phase: int = 0

    @property
    def end(self) -> int:
        """One behind its last place."""
        return self.offset + self.capacity

    def goes_on_in(self, other: "Extent") -> bool:
        """Whether the other one is the rest of what this once was, so that both can be read as
        one."""
        return (
            self.length == self.capacity
            and self.end == other.offset
            and self.phase + self.length == other.phase
        )


@dataclasses.dataclass(frozen=True, eq=False)
class HostCopy:
    """Keys and values of an extent in host memory: for each layer [K, tokens, D]."""

    keys: tuple[np.ndarray, ...]
    values: tuple[np.ndarray, ...]
    phase: int

    @property
    def tokens(self) -> int:
        return self.keys[0].shape[1]

    def fork(self, at: int) -> "tuple[HostCopy, HostCopy]":
        """The first `at` tokens, and the rest."""

        def part(of: slice, phase: int) -> HostCopy:
            # Arrays of its own, so that each part's memory is free when that part goes.
            return HostCopy(
                tuple(k[:, of].copy() for k in self.keys),
                tuple(v[:, of].copy() for v in self.values),
                phase,
            )

        return part(slice(at), self.phase), part(slice(at, None), self.phase + at)


class Pool:
    """One arena, and who has what of it.

    Attributes:
      tokens: that it holds.
      bytes_a_token: of keys and values in all layers.
      cache: the arena. Whoever runs a pass over a `view` of it puts the new one back here.
    """

    def __init__(self, model: LoadedModel, tokens: int):
        self.tokens = tokens
        self.bytes_a_token = token_bytes(model)
        self.cache = KVCache.empty(model.config, tokens, 1, cache_dtype(model), mesh=model.mesh)
        self._holes = FreeList(tokens)

    @property
    def free(self) -> int:
        """Tokens that no extent has."""
        return self._holes.free

    def take(self, capacity: int) -> Extent | None:
        """A new empty extent, or None where no hole is left for it."""
        at = self._holes.take(capacity)
        if at is None:
            at = self._holes.take(capacity, aligned=False)
        return None if at is None else Extent(at, capacity)

    def grow(self, extent: Extent, by: int) -> bool:
        """Gives an extent more room where it is, if what lies behind it is free."""
        grown = self._holes.take_at(extent.end, by)
        extent.capacity += by * grown
        return grown

    def trim(self, extent: Extent) -> None:
        """Gives back what an extent has not used."""
        spare, extent.capacity = extent.capacity - extent.length, extent.length
        self._holes.give_back(extent.end, spare)

    def give_back(self, extent: Extent) -> None:
        """Frees an extent."""
        self._holes.give_back(extent.offset, extent.capacity)
        extent.capacity = extent.length = 0

    @staticmethod
    def fork(extent: Extent, at: int) -> Extent:
        """Cuts an extent in two and copies nothing: what is returned has its first `at` tokens, and
        the extent itself is the rest."""
        head = Extent(extent.offset, at, at, extent.phase)
        extent.offset, extent.capacity, extent.length = (
            extent.offset + at,
            extent.capacity - at,
            extent.length - at,
        )
        extent.phase += at
        return head

    def pack(self, extents: Iterable[Extent], wanted: int, within: int | None = None) -> bool:
        """Makes one hole of so many tokens out of neighbouring ones: moves what lies between them
        to their front. False if they are not free, or not `within` so many places. Keys are rotated
        to where they were, wherever they lie.

        Args:
          extents: all that are taken.
          wanted: tokens of the hole.
        """
        window = self._holes.merge(wanted, within)
        if window is None:
            return False
        begin, end = window
        width, start, _ = self._window(begin, end - begin)
        source, at = np.arange(width), begin
        for extent in sorted(
            (e for e in extents if begin <= e.offset < end and e.capacity),
            key=lambda extent: extent.offset,
        ):
            source[at - start : at - start + extent.capacity] = np.arange(
                extent.offset - start, extent.end - start
            )
            extent.offset = at
            at += extent.capacity
        self._holes.give_back(at, end - at)
        keys, values = _pick((self.cache.keys, self.cache.values), source, start, self.cache.mesh)
        self.cache = dataclasses.replace(self.cache, keys=keys, values=values)
        return True

    # What passes see.

    def view(self, spans: Sequence[Extent], slots: int) -> KVCache:
        """The arena with these extents as its blocks 0, 1, 2...; the other slots are free."""
        table = np.zeros((4, slots), np.int32)
        for slot, span in enumerate(spans):
            table[:, slot] = span.offset, span.length, span.capacity, span.phase
        offsets, lengths, capacities, phases = jax.device_put(tuple(table))
        return dataclasses.replace(
            self.cache, offsets=offsets, lengths=lengths, capacities=capacities, phases=phases
        )

    # Copies.

    def copy(self, extent: Extent) -> Arenas:
        """Arenas of their own with what lies in an extent, at their begin."""
        return _copied(
            (self.cache.keys, self.cache.values), extent.offset, extent.capacity, self.cache.mesh
        )

    def read(self, extent: Extent) -> HostCopy:
        """A copy of what is in an extent."""
        width, start, first = self._window(extent.offset, extent.length)
        keys, values = _read((self.cache.keys, self.cache.values), start, width, self.cache.mesh)
        there = slice(first, first + extent.length)
        keys, values = (
            tuple(np.array(a[:, there]) for a in jax.device_get(arrays))
            for arrays in (keys, values)
        )
        return HostCopy(keys, values, extent.phase)

    def write(self, extent: Extent, copy: HostCopy) -> None:
        """Puts a copy into an empty extent of its size."""
        extent.length, extent.phase = copy.tokens, copy.phase
        width, start, first = self._window(extent.offset, extent.length)
        behind = width - first - copy.tokens
        keys, values = (
            tuple(np.pad(a, ((0, 0), (first, behind), (0, 0))) for a in arrays)
            for arrays in (copy.keys, copy.values)
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

    def _window(self, begin: int, tokens: int) -> tuple[int, int, int]:
        """(tokens of a window that holds a run, one of few sizes; where it begins in the arena;
        where the run does in it)."""
        width = ALIGNMENT
        while width < tokens:
            width *= 4
        width = min(width, self.tokens)
        start = min(begin, self.tokens - width)
        return width, start, begin - start


# One device's part of each: what is spread over devices by tokens goes by way of all of them.
# Windows have the same heads as the arenas.

_ARENA, _WINDOW, _NONE = (
    sharding.spec(ARENA),
    sharding.spec((ARENA[0], None, None)),
    PartitionSpec(),
)


@functools.partial(jax.jit, donate_argnames="arenas", static_argnames="mesh")
def _pick(arenas: Arenas, source: Array, start: Array, mesh: Mesh | None) -> Arenas:
    stripes = CyclicSharding.over(mesh)

    def picked(arena: Array) -> Array:
        window = jax.lax.dynamic_slice_in_dim(arena, start, len(source), axis=1)
        return jax.lax.dynamic_update_slice_in_dim(arena, window[:, source], start, axis=1)

    def local(arenas: Arenas, source: Array, start: Array) -> Arenas:
        if stripes.axis is None:
            return jax.tree.map(picked, arenas)
        return put(
            stripes, arenas, start + jnp.arange(len(source)), take(stripes, arenas, start + source)
        )

    return on_each(local, mesh, in_specs=(_ARENA, _NONE, _NONE), out_specs=_ARENA)(
        arenas, source, start
    )


@functools.partial(jax.jit, static_argnames=("width", "mesh"))
def _read(arenas: Arenas, start: Array, width: int, mesh: Mesh | None) -> Arenas:
    stripes = CyclicSharding.over(mesh)

    def local(arenas: Arenas, start: Array) -> Arenas:
        if stripes.axis is None:
            return jax.tree.map(
                lambda arena: jax.lax.dynamic_slice_in_dim(arena, start, width, axis=1), arenas
            )
        return take(stripes, arenas, start + jnp.arange(width))

    return on_each(local, mesh, in_specs=(_ARENA, _NONE), out_specs=_WINDOW)(arenas, start)


@functools.partial(jax.jit, static_argnames=("width", "mesh"))
def _copied(arenas: Arenas, start: Array, width: int, mesh: Mesh | None) -> Arenas:
    stripes, window = CyclicSharding.over(mesh), _read(arenas, start, width, mesh)
    if stripes.axis is None:
        return window

    def local(window: Arenas) -> Arenas:
        size = -(-width // stripes.period) * STRIPE
        empty = jax.tree.map(
            lambda arena: jnp.zeros((arena.shape[0], size, arena.shape[2]), arena.dtype), window
        )
        return put(stripes, empty, jnp.arange(width), window)

    return on_each(local, mesh, in_specs=(_WINDOW,), out_specs=_ARENA)(window)


@functools.partial(jax.jit, donate_argnames="arenas", static_argnames="mesh")
def _write(
    arenas: Arenas, new: Arenas, start: Array, first: Array, count: Array, mesh: Mesh | None
) -> Arenas:
    stripes = CyclicSharding.over(mesh)

    def local(arenas: Arenas, new: Arenas, start: Array, first: Array, count: Array) -> Arenas:
        place = jnp.arange(new[0][0].shape[1])
        there = (place >= first) & (place < first + count)
        if stripes.axis is not None:
            return put(stripes, arenas, jnp.where(there, start + place, -1), new)

        def written(arena: Array, piece: Array) -> Array:
            window = jax.lax.dynamic_slice_in_dim(arena, start, piece.shape[1], axis=1)
            return jax.lax.dynamic_update_slice_in_dim(
                arena, jnp.where(there[:, None], piece, window), start, axis=1
            )

        return jax.tree.map(written, arenas, new)

    return on_each(local, mesh, in_specs=(_ARENA, _WINDOW, _NONE, _NONE, _NONE), out_specs=_ARENA)(
        arenas, new, start, first, count
    )


def whole_tiles(tokens: int) -> int:
    """The largest arena of so many tokens at most that backends read well."""
    tile = LARGE_TILE if tokens >= 4 * LARGE_TILE else ALIGNMENT if tokens >= ALIGNMENT else 1
    return tokens - tokens % tile
