"""Sessions of rows: rows that run in step, pass by pass, beside other rows that do not."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int, Int32

from jaxshare.decoding.array_rows import placed
from jaxshare.layout import is_concrete


class Sessions(NamedTuple):
    """The sessions of R rows. A row of no session is one by itself.

    All rows are compared with all: for 256 of them that takes a CPU three microseconds, and one
    kernel. Sorted rows and sums by segments would take several, each of which has to be compiled and
    launched.

    Attributes:
      first: int32[R], the first row of each row's session; None where every row is by itself.
    """

    first: Array | None

    def total(self, counts: Int[Array, " R"]) -> Int[Array, " R"]:
        """The sum over each row's session."""
        return counts if self.first is None else _sum_where(_same(self.first), counts)

    def any(self, marked: Bool[Array, " R"]) -> Bool[Array, " R"]:
        """Marks all rows of the sessions that have a marked one."""
        if self.first is None:
            return marked
        return jnp.any(_same(self.first) & marked[:, None], axis=0)

    def before(self, marked: Bool[Array, " R"]) -> Int[Array, " R"]:
        """The marked rows of the same session that come before each row."""
        if self.first is None:
            return jnp.zeros(marked.shape, jnp.int32)
        row = jnp.arange(marked.shape[0])
        return _sum_where(_same(self.first) & (row[:, None] < row), marked)

    def first_that_fit(self, counts: Int[Array, " R"], room: int) -> Bool[Array, " R"]:
        """Marks the rows of the first sessions whose counts are at most `room` together."""
        if self.first is None:
            return jnp.cumsum(counts, dtype=jnp.int32) <= room
        return _sum_where(self.first[:, None] <= self.first, counts) <= room


def _same(first: Array) -> Array:
    """bool[R, R], whether two rows are of one session."""
    return first[:, None] == first


def _sum_where(related: Array, counts: Array) -> Array:
    """int32[R], the sum of the counts of the rows that are related to each: related[other, row]."""
    return jnp.sum(jnp.where(related, counts.astype(jnp.int32)[:, None], 0), axis=0)


def first_rows(ends: Int32[Array | np.ndarray, " R"]) -> Int32[Array | np.ndarray, " R"]:
    """The first row of each row's session in a new state: of all rows with an automaton that ends
    steps, or else the row itself."""
    if not is_concrete(ends):
        return jnp.where(ends > 0, 0, jnp.arange(ends.shape[0], dtype=jnp.int32))
    rows = np.arange(ends.shape[0], dtype=np.int32)
    return placed(np.where(np.asarray(ends) > 0, np.int32(0), rows))
