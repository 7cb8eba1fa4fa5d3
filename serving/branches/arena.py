"""Arena: one cache whose blocks are taken and given back.

The host hands out extents; keys and values stay where they are.
"""

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
    """The maximum number of arena tokens for each of these blocks, packed in any order."""
    # Before a large block that follows a small one, up to a tile is lost to alignment.
    gap = ALIGNMENT - 1 if capacities and min(capacities) < ALIGNMENT <= max(capacities) else 0
    return [size + (-size % ALIGNMENT + gap if size >= ALIGNMENT else 0) for size in capacities]


class Arena:
    """Blocks of one cache, taken and given back on the host.

    Attributes:
      cache: the cache; assign the new one after each pass. Call `settle` before a pass: it applies
        what was taken and given back.
      tokens: the size of the arena.
      slots: the maximum number of blocks at a time; `grow` raises it.
      busy: True while a call uses the cache.
    """

    def __init__(self, model: LoadedModel, tokens: int, slots: int):
        self.tokens, self.slots, self.busy = tokens, slots, False
        self.cache = KVCache.empty(model.config, tokens, slots, cache_dtype(model), mesh=model.mesh)
        self._free_list = FreeList(tokens)
        self._taken: dict[int, tuple[int, int]] = {}
        self._free_slots = [*range(slots)]  # a heap
        self._changed: set[int] = set()

    @property
    def free(self) -> int:
        """The number of tokens that no block has."""
        return self._free_list.free

    @property
    def used_slots(self) -> int:
        """The number of blocks that are taken."""
        return len(self._taken)

    def grow(self, slots: int) -> None:
        """Raises the maximum number of blocks to `slots`, if it is below.

        Keys and values stay where they are. Programs that take the cache compile anew, since its
        tables of blocks are longer.
        """
        if slots <= self.slots:
            return
        more, cache = slots - self.slots, self.cache
        tables = {
            name: jnp.pad(getattr(cache, name), (0, more))
            for name in ("offsets", "lengths", "capacities", "phases")
        }
        self.cache = dataclasses.replace(cache, **tables)
        for block in range(self.slots, slots):
            heapq.heappush(self._free_slots, block)
        self.slots = slots

    @property
    def largest(self) -> int:
        """The number of tokens of the largest free run."""
        return self._free_list.largest

    def take(self, capacity: int, *, high: bool = False) -> int | None:
        """Takes a new empty block; None where no free run or no slot is left for it.

        Args:
          capacity: of the block, in tokens.
          high: place it at the highest offset possible, not the lowest. This keeps short-lived
            blocks apart from long-lived ones.
        """
        if len(self._taken) == self.slots:
            return None
        offset = self._free_list.take(capacity, high=high)
        if offset is None:
            return None
        block = heapq.heappop(self._free_slots)
        self._taken[block] = offset, capacity
        self._changed.add(block)
        return block

    def give_back(self, block: int) -> None:
        """Frees a block."""
        self._free_list.give_back(*self._taken.pop(block))
        heapq.heappush(self._free_slots, block)
        self._changed.add(block)

    def settle(self) -> KVCache:
        """The cache with the extents of all blocks up to date; new blocks are empty."""
        if self._changed:
            blocks = sorted(self._changed)
            self.cache = self.cache.place(
                blocks, *zip(*(self._taken.get(b, (0, 0)) for b in blocks), strict=True)
            )
            self._changed.clear()
        return self.cache
