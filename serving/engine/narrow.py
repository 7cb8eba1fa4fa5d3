"""Narrowing: when most rows of a decode state have ended, the rest goes on in a smaller state.

A pass costs what its rows cost, live or not. For small states the program for fewer rows takes
longer to compile than it saves.
"""

from collections.abc import Sequence

from jaxshare.layout import bucket
from jaxshare.serving.engine.running_request import RunningRequest

_NARROW_ABOVE = 256
"""States with at most this many rows keep them."""
_MIN_RATIO = 4
"""Rows of a state to live rows, at least, before it is narrowed."""
_MIN_PASSES = 64
"""Passes that must be left for a program of its own to pay."""


def kept_rows(rows: Sequence[RunningRequest | None]) -> list[int]:
    """The rows to go on with, those in use first; none where narrowing does not pay.

    Args:
      rows: of the state; no others are to come.
    """
    live = [row for row in rows if row]
    left = max((row.request.remaining for row in live), default=0)
    size = _narrowed_size(len(rows), len(live), left)
    if not size or not all(row.decoding for row in live):
        return []
    ended = [i for i, row in enumerate(rows) if row is None]
    return [row.index for row in live] + ended[: size - len(live)]


def _narrowed_size(num_rows: int, num_live: int, passes_left: int) -> int:
    """The number of rows to go on with, or 0 where narrowing does not pay.

    Args:
      num_rows: rows of the state.
      num_live: rows that still sample; no others are to come.
      passes_left: the largest number of passes that one of them may still take.
    """
    if num_rows <= _NARROW_ABOVE or not num_live or _MIN_RATIO * num_live > num_rows:
        return 0
    return bucket(num_live) if passes_left >= _MIN_PASSES else 0
