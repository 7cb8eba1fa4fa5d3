"""Sessions of rows: rows that run in step, pass by pass, beside other rows that do not."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int, Int32

from jaxshare.decoding.array_rows import placed
from jaxshare.layout import is_concrete


class Sessions(NamedTuple):
    """The sessions of R rows, sorted once a dispatch. A row of no session is one by itself.

    Attributes:
      first: int32[R], the first row of each row's session.
      order: int32[R], the rows, those of a session one after the other.
      place: int32[R], where each row is in `order`; start: where its session starts there.
    """

    first: Array
    order: Array
    place: Array
    start: Array

    @classmethod
    def of(cls, first: Int32[Array, " R"]) -> "Sessions":
        """Sorts rows by the first row of their session."""
        order = jnp.argsort(first, stable=True).astype(jnp.int32)
        row = jnp.arange(first.shape[0], dtype=jnp.int32)
        place = jnp.zeros_like(row).at[order].set(row)
        return cls(first, order, place, place[first])

    def total(self, counts: Int[Array, " R"]) -> Int[Array, " R"]:
        """The sum over each row's session."""
        return jax.ops.segment_sum(counts, self.first, self.first.shape[0])[self.first]

    def any(self, marked: Bool[Array, " R"]) -> Bool[Array, " R"]:
        """Marks all rows of the sessions that have a marked one."""
        return self.total(marked.astype(jnp.int32)) > 0

    def before(self, marked: Bool[Array, " R"]) -> Int[Array, " R"]:
        """The marked rows of the same session that come before each row."""
        earlier = self._earlier(marked)
        return earlier[self.place] - earlier[self.start]

    def first_that_fit(self, counts: Int[Array, " R"], room: int) -> Bool[Array, " R"]:
        """Marks the rows of the first sessions whose counts are at most `room` together."""
        end = self._earlier(counts)[self.start] + self.total(counts)
        return end <= room

    def _earlier(self, counts: Array) -> Array:
        """int32[R], by place in `order`: the sum of what comes before it."""
        ordered = counts[self.order].astype(jnp.int32)
        return jnp.cumsum(ordered, dtype=jnp.int32) - ordered


def first_rows(ends: Int32[Array | np.ndarray, " R"]) -> Int32[Array | np.ndarray, " R"]:
    """The first row of each row's session in a new state: of all rows with an automaton that ends
    steps, or else the row itself."""
    if not is_concrete(ends):
        return jnp.where(ends > 0, 0, jnp.arange(ends.shape[0], dtype=jnp.int32))
    rows = np.arange(ends.shape[0], dtype=np.int32)
    return placed(np.where(np.asarray(ends) > 0, np.int32(0), rows))
