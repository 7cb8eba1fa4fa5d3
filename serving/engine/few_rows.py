"""Few rows: which dispatches run a program of the first rows alone.

A pass costs what the rows of its program cost, in use or not. So an engine for many rows has a
second program for few of them, which serves a single user, and the tail of many, faster.
"""

from jaxshare.layout import bucket

_MIN_ROWS, _RATIO = 4, 8
"""Rows of the small program, at least, and rows of the whole one to those."""
_MIN_PASSES = 512
"""Passes that the small program could have run before it is compiled, unless it is warmed up."""


class FewRows:
    """Chooses the program of a dispatch by what was run before, so that several processes choose
    alike.

    Args:
      num_rows: of the decode state.

    Attributes:
      size: rows of the small program; `num_rows` where there is none.
    """

    def __init__(self, num_rows: int):
        self.size = min(num_rows, max(_MIN_ROWS, bucket(num_rows) // _RATIO))
        self._num_rows, self._passes = num_rows, 0

    def rows(self, in_use: int) -> int:
        """The rows of the next dispatch's program, of which the first `in_use` may take part."""
        return self.size if in_use <= self.size and self._passes >= _MIN_PASSES else self._num_rows

    def ran(self, in_use: int, passes: int) -> None:
        """Counts passes of a dispatch."""
        if in_use <= self.size:
            self._passes += passes

    def warm_up(self) -> None:
        """Chooses the small program from now on, as it is compiled."""
        self._passes = _MIN_PASSES
