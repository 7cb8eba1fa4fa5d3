"""Growth: extents for steps that outgrow their blocks, at the end of the block they will move to.

That block has the capacity for all that will be moved to its end, and the growing step is a part of
that: so a step can go on up to the end of the context in memory that the session has anyway. Its
block is given a larger extent there, from the end downwards, and returns to its own place when the
step has moved.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxshare.arena import ALIGNMENT

Extent = tuple[int, int]
"""The offset and the capacity of a block."""


@dataclasses.dataclass(frozen=True)
class Writer:
    """A block in which steps are written.

    Attributes:
      block: its number; target: the block to whose end its steps move.
      needs: tokens that may be written to it before the next host sync.
      max_tokens: the most that it may ever have, because a row sees it without its target.
    """

    block: int
    target: int
    needs: int
    max_tokens: int


@dataclasses.dataclass(frozen=True)
class Growth:
    """The extents of a session's blocks as long as no step has outgrown its own.

    Attributes:
      offsets, capacities: int[B].
    """

    offsets: np.ndarray
    capacities: np.ndarray

    def at_home(self, block: int, capacities: np.ndarray) -> bool:
        """Returns whether a block has its first capacity, given int[B] capacities."""
        return bool(capacities[block] == self.capacities[block])

    def extents(
        self,
        writers: Sequence[Writer],
        offsets: np.ndarray,
        capacities: np.ndarray,
        lengths: np.ndarray,
        *,
        reserve: int = 0,
    ) -> dict[int, Extent]:
        """The new extents of blocks that must be relocated.

        With them every writer has the capacity that it needs, as far as there is any.

        Args:
          writers: the blocks in which steps are written, those of paused workers included.
          offsets, capacities, lengths: int[B], of the blocks now. All may be further on in the
            arena than at first, by the same distance.
          reserve: tokens to keep free in targets besides.
        """
        extents: dict[int, Extent] = {}
        for target in dict.fromkeys(writer.target for writer in writers):
            extents |= self._region(
                target,
                [w for w in writers if w.target == target],
                offsets,
                capacities,
                lengths,
                reserve,
            )
        return {
            block: extent
            for block, extent in extents.items()
            if extent != (offsets[block], capacities[block])
        }

    def _region(
        self,
        target: int,
        writers: Sequence[Writer],
        offsets: np.ndarray,
        capacities: np.ndarray,
        lengths: np.ndarray,
        reserve: int,
    ) -> Mapping[int, Extent]:
        """The extents of a target and of the blocks whose steps move to it; see `extents`."""
        start, end = int(offsets[target]), int(offsets[target] + self.capacities[target])
        shift, free = (
            start - int(self.offsets[target]),
            int(self.capacities[target] - lengths[target]),
        )
        min_tokens = {w.block: int(min(lengths[w.block] + w.needs, w.max_tokens)) for w in writers}
        at_home = {
            w.block: (int(self.offsets[w.block]) + shift, int(self.capacities[w.block]))
            for w in writers
        }
        away = sorted(
            (w.block for w in writers if not self.at_home(w.block, capacities)),
            key=lambda block: -offsets[block],
        )
        large = [block for block in away if lengths[block]]
        large += [
            block
            for block, tokens in min_tokens.items()
            if block not in away and tokens > self.capacities[block]
        ]
        # A step that starts to grow where nothing is free stays where it is, and is full there.
        while large and large[-1] not in away and sum(min_tokens[block] for block in large) > free:
            large.pop()
        waiting = reserve + sum(
            tokens for block, tokens in min_tokens.items() if block not in large
        )
        fits = large == away and all(min_tokens[block] <= capacities[block] for block in large)
        if fits and (not large or capacities[target] - lengths[target] >= waiting):
            return {}
        over = sum(min_tokens[block] for block in large) - free
        if over > 0:  # the context is used up: the rest is divided
            share = (free - int(sum(lengths[block] for block in large))) // len(large)
            min_tokens |= {
                block: min(min_tokens[block], int(lengths[block]) + share) for block in large
            }
        left = max(0, free - sum(min_tokens[block] for block in large) - waiting)
        # Half of what is left stays with the others, however often steps grow.
        bonus = left // (2 * len(large)) if large else 0
        extents, above = dict(at_home), end
        for block in large:
            capacity = min_tokens[block] + min(max(int(lengths[block]), ALIGNMENT), bonus)
            offset = above - capacity
            if offset % ALIGNMENT <= bonus:
                offset -= offset % ALIGNMENT
            extents[block], above = (offset, above - offset), offset
        return {**extents, target: (start, above - start)}
