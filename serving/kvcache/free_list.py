"""The free list: the unallocated runs of an arena."""

import bisect

from jaxshare.arena import alignment


class FreeList:
    """The free runs of an arena, not adjacent to each other and in order.

    Attributes:
      free: tokens of all of them.
    """

    def __init__(self, tokens: int):
        """Creates the free list of an arena of `tokens` tokens, all of it free."""
        self._runs = [(0, tokens)]
        self.free = tokens

    @property
    def largest(self) -> int:
        """Tokens of the largest free run."""
        return max((end - start for start, end in self._runs), default=0)

    def take(self, tokens: int, *, high: bool = False, aligned: bool = True) -> int | None:
        """Takes a run out of the free list; returns its offset, or None where no free run fits.

        Args:
          tokens: of the run.
          high: take the highest offset, not the lowest.
          aligned: only offsets that backends read best.
        """
        step = alignment(tokens) if aligned else 1
        for i in reversed(range(len(self._runs))) if high else range(len(self._runs)):
            start, end = self._runs[i]
            if end - start < tokens:  # most of thousands
                continue
            offset = (end - tokens) // step * step if high else start + -start % step
            if start <= offset and offset + tokens <= end:
                self._cut(i, offset, offset + tokens)
                return offset
        return None

    def take_at(self, offset: int, tokens: int) -> bool:
        """Takes the run at this offset, if a free run starts there and is as large."""
        i = bisect.bisect_left(self._runs, (offset,))
        if i == len(self._runs) or self._runs[i][0] != offset or self._runs[i][1] < offset + tokens:
            return False
        self._cut(i, offset, offset + tokens)
        return True

    def merge(self, tokens: int, within: int | None = None) -> tuple[int, int] | None:
        """Takes the shortest stretch of the arena whose free runs have `tokens` tokens together.

        The stretch (start, end) goes from one free run to another; None where there is none, or it
        is longer than `within`. The caller gives back what is still free of it.
        """
        best, first, free = None, 0, 0
        for last, (start, end) in enumerate(self._runs):
            free += end - start
            while free - self._size(first) >= tokens:
                free -= self._size(first)
                first += 1
            if free >= tokens and (best is None or end - self._runs[first][0] < best[0]):
                best = end - self._runs[first][0], first, last, free
        if best is None or (within is not None and best[0] > within):
            return None
        _, first, last, free = best
        stretch = self._runs[first][0], self._runs[last][1]
        self._runs[first : last + 1] = []
        self.free -= free
        return stretch

    def _size(self, i: int) -> int:
        return self._runs[i][1] - self._runs[i][0]

    def give_back(self, offset: int, tokens: int) -> None:
        """Frees a run."""
        if not tokens:
            return
        self.free += tokens
        start, end = offset, offset + tokens
        i = bisect.bisect(self._runs, (start, end))
        if i < len(self._runs) and self._runs[i][0] == end:
            end = self._runs.pop(i)[1]
        if i and self._runs[i - 1][1] == start:
            i -= 1
            start = self._runs.pop(i)[0]
        self._runs.insert(i, (start, end))

    def _cut(self, i: int, start: int, end: int) -> None:
        low, high = self._runs[i]
        self._runs[i : i + 1] = [run for run in ((low, start), (end, high)) if run[0] < run[1]]
        self.free -= end - start
