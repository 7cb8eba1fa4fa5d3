"""Holes: which runs of an arena nobody has."""

import bisect

from jaxshare.arena import alignment


class FreeList:
    """The free runs of an arena, apart from each other and in order.

    Attributes:
      free: tokens of all of them.
    """

    def __init__(self, tokens: int):
        """An arena of so many tokens, all of it free."""
        self._runs = [(0, tokens)]
        self.free = tokens

    @property
    def largest(self) -> int:
        """Tokens of the largest hole."""
        return max((end - begin for begin, end in self._runs), default=0)

    def take(self, tokens: int, *, high: bool = False, aligned: bool = True) -> int | None:
        """Where a run of so many tokens begins that is free no more; None where no hole is left for
        it.

        Args:
          tokens: of the run.
          high: as far up as it goes.
          aligned: only where backends read it best.
        """
        step = alignment(tokens) if aligned else 1
        for i in reversed(range(len(self._runs))) if high else range(len(self._runs)):
            begin, end = self._runs[i]
            at = (end - tokens) // step * step if high else begin + -begin % step
            if begin <= at and at + tokens <= end:
                self._cut(i, at, at + tokens)
                return at
        return None

    def take_at(self, begin: int, tokens: int) -> bool:
        """Takes the run that begins there, if a hole does and is as large."""
        i = bisect.bisect_left(self._runs, (begin,))
        if i == len(self._runs) or self._runs[i][0] != begin or self._runs[i][1] < begin + tokens:
            return False
        self._cut(i, begin, begin + tokens)
        return True

    def merge(self, tokens: int, within: int | None = None) -> tuple[int, int] | None:
        """Takes the shortest stretch of the arena, from one hole to another, whose holes have so
        many tokens together; None where none has, or where it is longer than `within`. The caller
        gives back what is still free of it."""
        best, first, free = None, 0, 0
        for last, (begin, end) in enumerate(self._runs):
            free += end - begin
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

    def give_back(self, begin: int, tokens: int) -> None:
        """Frees a run."""
        if not tokens:
            return
        self.free += tokens
        end = begin + tokens
        i = bisect.bisect(self._runs, (begin, end))
        if i < len(self._runs) and self._runs[i][0] == end:
            end = self._runs.pop(i)[1]
        if i and self._runs[i - 1][1] == begin:
            i -= 1
            begin = self._runs.pop(i)[0]
        self._runs.insert(i, (begin, end))

    def _cut(self, i: int, begin: int, end: int) -> None:
        low, high = self._runs[i]
        self._runs[i : i + 1] = [run for run in ((low, begin), (end, high)) if run[0] < run[1]]
        self.free -= end - begin
