"""Growth: room for steps that outgrow their blocks, at the end of the block that they will move to.

That block has room for all that will be moved behind it, and the growing step is a part of that: so
a step can go on up to the end of the context in the memory that the session has anyway. Its block
is given a larger extent there, from the end downwards, and comes back to its own place when the
step has moved.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxshare.arena import ALIGNMENT

Extent = tuple[int, int]
"""Offset and capacity."""


@dataclasses.dataclass(frozen=True)
class Writer:
    """A block in which steps are written.

    Attributes:
      block: its number; target: the block to whose end its steps move.
      needs: tokens that may be written to it before the host looks in again.
      most: tokens that it may ever have, because a row sees it that does not see its target.
    """

    block: int
    target: int
    needs: int
    most: int


@dataclasses.dataclass(frozen=True)
class Growth:
    """Where the blocks of a session lie as long as no step is longer than expected.

    Attributes:
      offsets, capacities: int[B].
    """

    offsets: np.ndarray
    capacities: np.ndarray

    def at_home(self, block: int, capacities: np.ndarray) -> bool:
        """Whether a block has the room that it began with, among int[B] capacities."""
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
        """The blocks that must lie elsewhere, so that every writer has the room that it needs as
        far as there is any.

        Args:
          writers: the blocks in which steps are written, those of workers that rest included.
          offsets, capacities, lengths: int[B], of the blocks now. All may lie further on in the
            arena than at first, by the same distance.
          reserve: tokens that targets are to have room for besides.
        """
        found: dict[int, Extent] = {}
        for target in dict.fromkeys(writer.target for writer in writers):
            found |= self._region(
                target,
                [w for w in writers if w.target == target],
                offsets,
                capacities,
                lengths,
                reserve,
            )
        return {
            block: extent
            for block, extent in found.items()
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
        start, end = int(offsets[target]), int(offsets[target] + self.capacities[target])
        shift, free = (
            start - int(self.offsets[target]),
            int(self.capacities[target] - lengths[target]),
        )
        least = {w.block: int(min(lengths[w.block] + w.needs, w.most)) for w in writers}
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
            for block, tokens in least.items()
            if block not in away and tokens > self.capacities[block]
        ]
        # A step that begins to grow where there is no room for it stays where it is, and is full
        # there.
        while large and large[-1] not in away and sum(least[block] for block in large) > free:
            large.pop()
        waiting = reserve + sum(tokens for block, tokens in least.items() if block not in large)
        fits = large == away and all(least[block] <= capacities[block] for block in large)
        if fits and (not large or capacities[target] - lengths[target] >= waiting):
            return {}
        over = sum(least[block] for block in large) - free
        if over > 0:  # the context is used up: what is left is shared out
            share = (free - int(sum(lengths[block] for block in large))) // len(large)
            least |= {block: min(least[block], int(lengths[block]) + share) for block in large}
        spare = max(0, free - sum(least[block] for block in large) - waiting)
        found, at = dict(at_home), end
        for block in large:
            # Half of what is left stays with the others, however often steps grow.
            room = least[block] + min(
                max(int(lengths[block]), ALIGNMENT), spare // (2 * len(large))
            )
            offset = at - room
            if offset % ALIGNMENT <= spare // (2 * len(large)):
                offset -= offset % ALIGNMENT
            found[block], at = (offset, at - offset), offset
        return {**found, target: (start, at - start)}
