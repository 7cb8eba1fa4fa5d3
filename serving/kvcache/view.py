"""Views: the blocks of a pass, and the rows that see them."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from jaxshare import KVCache
from jaxshare.decoding.array_rows import arrays_on_host, placed
from jaxshare.layout import Layout, bucket
from jaxshare.serving.kvcache.fan_in import FanInGroups
from jaxshare.serving.kvcache.pool import Extent


class Prefilled(Protocol):
    """Tokens that passes feed to an extent: a node of the prefix tree, or a text of a session."""

    @property
    def tokens(self) -> np.ndarray:
        """All of them, int32."""
        ...

    @property
    def extent(self) -> Extent | None:
        """Their place."""
        ...

    @property
    def num_cached(self) -> int:
        """Those whose keys and values are cached."""
        ...

    @property
    def ref_count(self) -> int:
        """The rows that see them, as far as it is known."""
        ...


@dataclasses.dataclass(frozen=True)
class View:
    """The blocks of a pass.

    Attributes:
      table: int32[4, B], of the blocks: offset, length, capacity and phase.
      blocks: for each row the blocks that it sees.
      own: for each row in use its own block, and the tokens in that.
      width: blocks that a row can list.
      groups: of the layout.
      first: for each session the number of its first block.
    """

    table: np.ndarray
    blocks: list[list[int]]
    own: dict[int, tuple[int, int]]
    width: int
    groups: tuple[int, ...]
    first: list[int]

    def over(self, cache: KVCache) -> KVCache:
        """A cache whose arena these blocks are in, with these blocks."""
        offsets, lengths, capacities, phases = placed(tuple(self.table))
        return dataclasses.replace(
            cache, offsets=offsets, lengths=lengths, capacities=capacities, phases=phases
        )

    def widened(self, tokens: Mapping[int, int]) -> "View":
        """The same with room for so many more tokens in some blocks."""
        table = self.table.copy()  # a dispatch under way may still read the other one
        for block, more in tokens.items():
            table[2, block] += more
        return dataclasses.replace(self, table=table)

    @property
    def layout(self) -> Layout:
        """The blocks as a layout."""
        return Layout(placed(self.listed), self.groups)

    def inputs(self, cache: KVCache) -> tuple[KVCache, Layout]:
        """A cache whose arena these blocks are in, and the layout, for a program that takes them next:
        their numbers are on the host, which takes a tenth of the time of placing them first."""
        with arrays_on_host():
            return self.over(cache), self.layout

    @functools.cached_property
    def listed(self) -> np.ndarray:
        """The blocks as int32[R, N]."""
        listed = np.full((len(self.blocks), self.width), -1, np.int32)
        for row, blocks in enumerate(self.blocks):
            listed[row, : len(blocks)] = blocks
        return listed


@dataclasses.dataclass(frozen=True)
class SessionBlocks:
    """The blocks of a session, which keep their numbers, one after the other.

    Attributes:
      extents: of the blocks.
      listed: for each row the blocks that it sees.
    """

    extents: Sequence[Extent]
    listed: Sequence[Sequence[int]]


class ViewBuilder:
    """Builds the views of passes of one kind. Their sizes only grow, so that few programs serve
    all of them.

    Args:
      num_rows: R.
      groups: chooses fan-in groups; None for passes that are too few of a kind to pay for them.
      width: blocks that a row can list, at first.
    """

    def __init__(self, num_rows: int, groups: FanInGroups | None = None, *, width: int = 8):
        self._num_rows, self._groups = num_rows, groups
        self._width, self._slots = width, 8 * num_rows

    def build(
        self,
        rows: Mapping[int, Sequence[Extent]],
        sessions: Sequence[SessionBlocks] = (),
    ) -> View:
        """The view of a pass.

        Args:
          rows: for some rows the extents that they see, of which they write the last.
          sessions: those whose rows take part besides.
        """
        slots: dict[tuple[int, int, int], int] = {}
        extents: list[Extent] = []
        blocks: list[list[int]] = [[] for _ in range(self._num_rows)]
        for row, listed in rows.items():
            for extent in listed:
                key = extent.offset, extent.capacity, extent.length
                if key not in slots:
                    slots[key] = len(extents)
                    extents.append(extent)
                blocks[row].append(slots[key])
        own = {row: (blocks[row][-1], extents[blocks[row][-1]].length) for row in rows}
        fan_ins = collections.Counter(itertools.chain.from_iterable(blocks))
        first: list[int] = []
        for session in sessions:
            first.append(len(extents))
            extents += session.extents
            fan_ins.update(first[-1] + b for b in itertools.chain.from_iterable(session.listed))
        self._width = max(self._width, bucket(max(map(len, blocks))))
        self._slots = max(self._slots, bucket(len(extents)))
        groups: tuple[int, ...] = ()
        if self._groups:
            groups = self._groups.update(
                [fan_ins[slot] for slot in range(len(extents))],
                [extent.length for extent in extents],
                lasting=bool(sessions),
            )
        table = _table(extents, self._slots)
        return View(table, blocks, own, self._width, groups, first)

    def keep_groups(self) -> None:
        """Keeps the fan-in groups until others pay; see `FanInGroups.keep`."""
        if self._groups:
            self._groups.keep()


def _table(extents: Sequence[Extent], slots: int) -> np.ndarray:
    """These extents as blocks 0, 1, 2...; the other slots are unused."""
    table = np.zeros((4, slots), np.int32)
    for slot, extent in enumerate(extents):
        table[:, slot] = extent.offset, extent.length, extent.capacity, extent.phase
    return table


def spans(path: Sequence[Prefilled]) -> list[Extent]:
    """The blocks that a row sees which writes the last of these nodes.

    Neighbours with equal `ref_count` are merged: all rows that see one of them see both.
    """
    spans: list[Extent] = []
    ref_count = -1
    for each in path:
        assert each.extent is not None
        if spans and ref_count == each.ref_count and spans[-1].precedes(each.extent):
            spans[-1].capacity += each.extent.capacity
            spans[-1].length += each.extent.length
        else:
            spans.append(dataclasses.replace(each.extent))
        ref_count = each.ref_count
    return spans
