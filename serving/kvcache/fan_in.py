"""Fan-in groups: how many rows read a block together where not all rows do (Hydragen section 3.3).

The sizes of groups are shapes of the decode loop's program. So they are powers of two, at most two
of them, and stay as they are for as long as they serve the blocks that rows share.
"""

import statistics
from collections.abc import Sequence

import numpy as np

from jaxshare.layout import bucket

_MIN_ROWS = 32
"""With fewer rows a product over all of them costs little more than one over those that read."""
_MIN_TILES, _TILE = 8, 128
"""Tiles of blocks of small fan-in from which on another program pays, and tokens of a tile. A block
of few tokens is read as a tile, too."""


class FanInGroups:
    """The groups of a scheduler's layouts.

    Args:
      num_rows: rows of the decode loop.
      sizes: the groups to begin with.

    Attributes:
      sizes: of the groups, ascending; `Layout.groups`.
    """

    def __init__(self, num_rows: int, sizes: tuple[int, ...] = ()):
        self._num_rows, self.sizes, self._is_first = num_rows, sizes, True

    def update(
        self, fan_ins: Sequence[int], tokens: Sequence[int], *, lasting: bool = False
    ) -> tuple[int, ...]:
        """Chooses the groups for blocks of these fan-ins and sizes.

        Blocks that the groups so far serve, and few blocks of few tokens, change nothing; but for
        the first program any are worth it that rows will go on to share.

        Args:
          fan_ins, tokens: of the blocks.
          lasting: rows go on to share them, as those of a session do, and write more.
        """
        rows, tiles = np.asarray(fan_ins, np.int64), -(-np.asarray(tokens, np.int64) // _TILE)
        few = (rows > 1) & (rows <= self._num_rows // 2)
        served = np.zeros_like(few)
        for group in self.sizes:  # one up to four times as large reads a block well
            served |= (rows <= group) & (4 * rows > group)
        least = 1 if lasting and self._is_first else _MIN_TILES
        self._is_first &= not len(rows)
        if self._num_rows >= _MIN_ROWS and int(tiles[few & ~served].sum()) >= least:
            self.sizes = self._with(rows[few & ~served].tolist(), rows[few].tolist())
        return self.sizes

    def _with(self, unserved: Sequence[int], few: Sequence[int]) -> tuple[int, ...]:
        """The groups with some for other fan-ins. Those so far stay where there is room, as their
        blocks come again: kinds of work that take turns would compile a program for each turn."""
        sizes = {*self.sizes, *group_sizes(unserved, self._num_rows)}
        return tuple(sorted(sizes)) if len(sizes) <= 2 else group_sizes(few, self._num_rows)

    def keep(self) -> None:
        """Keeps the groups until others pay, as a program has been compiled with these."""
        self._is_first = False


def group_sizes(fan_ins: Sequence[int], num_rows: int) -> tuple[int, ...]:
    """The sizes of groups for these fan-ins.

    One holds the largest that is well below all rows, and one those far below that. There are none
    where a product over all rows costs little more.
    """
    if num_rows < _MIN_ROWS:
        return ()
    few = [fan_in for fan_in in fan_ins if 1 < fan_in <= num_rows // 2]
    if not few:
        return ()
    largest = bucket(max(few))
    small = [fan_in for fan_in in few if fan_in <= largest // 4]
    return tuple(sorted({largest, *([bucket(statistics.median_high(small))] if small else [])}))
