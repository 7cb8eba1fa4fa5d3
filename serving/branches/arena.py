"""Arena: one cache whose blocks come and go. The host hands out extents; the cache itself stays
where it is."""

import dataclasses
import heapq
from collections.abc import Sequence

import jax.numpy as jnp

from jaxshare import KVCache
from jaxshare.arena import ALIGNMENT
from jaxshare.models import LoadedModel
from jaxshare.serving.inputs import cache_dtype
from jaxshare.serving.kvcache.free_list import FreeList


def footprints(capacities: Sequence[int]) -> list[int]:
    """The most tokens of an arena that blocks of these capacities take when they are put side by
    side, in any order."""
    # Before a large block that comes after a small one, up to a tile is lost.
    gap = ALIGNMENT - 1 if capacities and min(capacities) < ALIGNMENT <= max(capacities) else 0
    return [size + (-size % ALIGNMENT + gap if size >= ALIGNMENT else 0) for size in capacities]


class Arena:
    """Blocks of one cache, taken and given back on the host.

    Attributes:
      cache: the cache. Whoever runs passes puts the new one back here. `settle` first: it carries
        out what was taken and given back.
      tokens: the size of the arena.
      slots: how many blocks there can be at a time; `grow` makes them more.
      busy: whether somebody is at work with the cache.
    """

    def __init__(self, model: LoadedModel, tokens: int, slots: int):
        self.tokens, self.slots, self.busy = tokens, slots, False
        self.cache = KVCache.empty(model.config, tokens, slots, cache_dtype(model), mesh=model.mesh)
        self._holes = FreeList(tokens)
        self._taken: dict[int, tuple[int, int]] = {}
        self._spare = [*range(slots)]  # a heap
        self._changed: set[int] = set()

    @property
    def free(self) -> int:
        """Tokens that no block has."""
        return self._holes.free

    @property
    def used_slots(self) -> int:
        """Blocks that are taken."""
        return len(self._taken)

    def grow(self, slots: int) -> None:
        """Makes room for so many blocks at a time, if there is not. Keys and values stay where they
        are; what takes the cache compiles anew, since it has longer tables of blocks."""
        if slots <= self.slots:
            return
        more, cache = slots - self.slots, self.cache
        tables = {
            name: jnp.pad(getattr(cache, name), (0, more))
            for name in ("offsets", "lengths", "capacities", "phases")
        }
        self.cache = dataclasses.replace(cache, **tables)
        for block in range(self.slots, slots):
            heapq.heappush(self._spare, block)
        self.slots = slots

    @property
    def largest(self) -> int:
        """Tokens of the largest hole."""
        return self._holes.largest

    def take(self, capacity: int, *, high: bool = False) -> int | None:
        """A new empty block, or None where no hole or no slot is left for it.

        Args:
          capacity: of the block, in tokens.
          high: put it as far up as it goes. What stays long and what comes and goes are best kept
            apart.
        """
        if len(self._taken) == self.slots or (at := self._holes.take(capacity, high=high)) is None:
            return None
        block = heapq.heappop(self._spare)
        self._taken[block] = at, capacity
        self._changed.add(block)
        return block

    def give_back(self, block: int) -> None:
        """Frees a block."""
        self._holes.give_back(*self._taken.pop(block))
        heapq.heappush(self._spare, block)
        self._changed.add(block)

    def settle(self) -> KVCache:
        """The cache with every block where it is now; those that are new are empty."""
        if self._changed:
            blocks = sorted(self._changed)
            self.cache = self.cache.place(
                blocks, *zip(*(self._taken.get(b, (0, 0)) for b in blocks), strict=True)
            )
            self._changed.clear()
        return self.cache
