"""The programs of a decode loop that run while few of its rows are in use."""

import collections
from collections.abc import Hashable

import jax

from jaxshare.layout import bucket

_MISSED = 32
"""Dispatches with a larger program than their rows need, until a smaller one is worth the compiler's
time: one or two seconds of a core, and so many dispatches of 20 milliseconds take 0.6."""


def row_counts(num_rows: int) -> tuple[int, ...]:
    """The rows of the programs of an engine with so many rows: powers of two from an eighth, or four,
    to what is well below all, and all."""
    counts = [least := min(num_rows, max(4, bucket(num_rows) // 8))]
    while (more := 2 * counts[-1]) <= 3 * num_rows // 4:
        counts.append(more)
    return tuple(counts) if least == num_rows else (*counts, num_rows)


class RowPrograms:
    """Chooses the program of each dispatch by the rows in use.

    A pass costs a CPU what the rows of its program cost, in use or not: twelve rows of an engine for 64
    write 1.5 times as fast in a program of sixteen.

    Args:
      num_rows: of the loop.
      fewer: whether programs of fewer rows may run.
    """

    def __init__(self, num_rows: int, *, fewer: bool):
        self._counts = row_counts(num_rows) if fewer else (num_rows,)
        self._at_once = {num_rows}  # for which requests wait where it is not compiled yet
        self._compiled = collections.defaultdict[Hashable, set[int]](set)
        self._shapes: Hashable = None
        self._missed = collections.Counter[int]()  # with these shapes
        self._asked = set[tuple[Hashable, int]]()

    def warm_up(self) -> None:
        """Lets the smallest program run from now on."""
        self._at_once.add(self._counts[0])

    def there(self, shapes: Hashable) -> list[int]:
        """The rows of the programs that may run with these shapes, ascending."""
        return sorted(self._compiled[shapes] | self._at_once)

    def add(self, shapes: Hashable, num_rows: int) -> None:
        """Lets another program run, which was compiled, in any thread."""
        self._compiled[shapes].add(num_rows)

    def choose(self, shapes: Hashable, used: int) -> int:
        """The rows of the program to run for the first `used` rows."""
        if shapes != self._shapes:
            self._shapes, self._missed = shapes, collections.Counter()
        best = next(count for count in self._counts if count >= used)
        chosen = next(count for count in self.there(shapes) if count >= used)
        if best < chosen and (shapes, best) not in self._asked:
            self._missed[best] += 1
        return chosen

    def take_wanted(self) -> int | None:
        """The rows of a program that is not there and would pay, once; None without. On a GPU a pass
        takes little longer with all rows."""
        count, missed = max(self._missed.items(), key=lambda each: each[1], default=(0, 0))
        if missed < _MISSED or jax.default_backend() != "cpu":
            return None
        del self._missed[count]
        self._asked.add((self._shapes, count))
        return count
