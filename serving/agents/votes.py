"""Polls: functions or agents that see several states side by side, and vote for the best."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

from jaxshare.argument_checks import shown
from jaxshare.serving.agents.errors import AgentError
from jaxshare.serving.agents.judging import Judged
from jaxshare.serving.agents.states import Inquiry, State


class Poll:
    """Several votes on states, which give each its share of the votes as its score.

    Args:
      vote: a function or an agent; see `TreeOfThoughts`.
      states: in the order of the tree.
      votes: the number of times that it is asked.
      first: number of the first inquiry, where a poll before may have been about the same state.

    Attributes:
      open: the inquiries without an answer.
    """

    def __init__(self, vote: Any, states: Sequence[State], votes: int, first: int = 0):
        self._states, self._counts = states, [0] * len(states)
        self._failed: list[State] = []
        judged = [Judged.of(state) for state in states]
        read = functools.partial(indices, count=len(states))
        self.open = [
            Inquiry(states[0], first + number, vote, (judged,), "vote", read)
            for number in range(votes)
        ]

    @property
    def failed_state(self) -> State | None:
        """The state of the first failed vote, if no vote was counted."""
        if any(self._counts):
            return None
        return max(self._failed, key=lambda state: state.path[-1], default=None)

    def count(self, inquiry: Inquiry, voted: list[int], failed: State | None) -> None:
        """Counts the answer to an inquiry, and scores the states after the last one."""
        self.open = [each for each in self.open if each.path != inquiry.path]
        if failed is not None:
            self._failed.append(failed)
        else:
            for index in voted:
                self._counts[index] += 1
        if not self.open and (total := sum(self._counts)):
            for state, votes in zip(self._states, self._counts, strict=True):
                state.score = votes / total


def indices(voted: Any, count: int) -> list[int]:
    """The states that were voted for, by their indices, of which one alone needs no list.

    Raises:
      AgentError: that is no index of the `count` states, or no list of such.
    """
    listed = voted if isinstance(voted, list | tuple) else [voted]
    try:
        found = [operator.index(one) for one in listed if not isinstance(one, bool)]
    except TypeError:
        found = []
    if not found or len(found) < len(listed) or not all(0 <= index < count for index in found):
        raise AgentError(
            f"the vote is {shown(voted)}; give the index of one of the {count} states, from 0 on, or "
            "a list of such indices"
        )
    return found
