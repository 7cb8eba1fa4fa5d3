"""The rule by which a state that may be fired again is kept: as a copy, or by its record alone.

A copy costs time and memory by the number of objects that the agent holds. A record costs nothing:
the path has it anyway, and the agent is run again from the last copy above, or from its beginning.
So a state is copied if it holds little, or if the waits since the last copy pay for one. The rule
counts, and looks at no clock: a run makes the same choices at every speed.

Holding n objects, a path makes a copy in n / PER_WAIT waits at most, so a wait costs PER_WAIT
objects in the mean, in memory as well. To fire a state again costs one copy and those waits.
"""

import dataclasses

SMALL = 500
"""States of so many objects are copied at every wait."""
PER_WAIT = 20
"""Objects that a copy may have for each wait since the last copy."""


@dataclasses.dataclass(frozen=True, slots=True)
class Past:
    """The copies and the waits of a path, as the choice at its next state needs them.

    Attributes:
      copied: the number of waits up to the last state with a copy; None if there is none.
      next_try: the number of waits from which a copy is tried again.
      is_through: whether the agent has awaited a coroutine since the last copy; it is run again
        from its beginning then, since such a wait has waits of its own.
      is_bound: whether it has awaited asyncio, so that it cannot be run again from its beginning.
    """

    copied: int | None = None
    next_try: int = 0
    is_through: bool = False
    is_bound: bool = False

    def limit(self, waits: int, can_begin: bool) -> int | None:
        """The most objects that a copy after so many waits may have.

        Args:
          can_begin: whether the agent can be run again from its beginning, as far as its arguments
            are concerned.

        Returns:
          0 if no copy is tried; None for no limit, where a copy is the only way.
        """
        can_go_on = self.copied is not None and not self.is_through
        if not can_go_on and (self.is_bound or not can_begin):
            return None
        return 0 if waits < self.next_try else max(SMALL, PER_WAIT * (waits - (self.copied or 0)))

    def with_copy(self, waits: int, size: int) -> "Past":
        """After a copy of so many objects; the next one of that size is not tried before it pays."""
        pause = 0 if size <= SMALL else (size + size // 4) // PER_WAIT
        return Past(waits, waits + pause, is_bound=self.is_bound)

    def without_copy(self, waits: int) -> "Past":
        """After a copy that was given up; the next one is tried once it may have twice the size."""
        start = self.copied or 0
        pause = 2 * max(waits - start, SMALL // PER_WAIT)
        return dataclasses.replace(self, next_try=start + pause)

    def after(self, is_through: bool, is_bound: bool) -> "Past":
        """After a wait for a coroutine, or for asyncio; itself after any other."""
        if is_through <= self.is_through and is_bound <= self.is_bound:
            return self
        return dataclasses.replace(
            self, is_through=self.is_through or is_through, is_bound=self.is_bound or is_bound
        )


BEGINNING = Past()
"""The past of the first state of a run."""
