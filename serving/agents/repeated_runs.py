"""Supervisors that run an agent several times: best of n, self-consistency, self-refinement."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxshare.serving.agents.dialogue import Message
from jaxshare.serving.agents.states import Budget, Paths, State, best, comparable_score


def check_positive(**numbers: int | None) -> None:
    """Raises a ValueError for a number below 1."""
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name} is {number}; give a whole number from 1 on")


class _IndependentPaths(Paths):
    """Follows n paths from the start to the end, and chooses among the finished ones."""

    def __init__(self, n: int, value: Any, budget: Budget):
        check_positive(n=n)
        self.n, self.value, self.budget = n, value, budget

    def start(self, root: State) -> None:
        self._finished: list[State] = []
        self._num_open = self.n
        self._ready += [root] * self.n

    def judges(self, state: State) -> bool:
        return self.value is not None and state.finished

    def reached(self, state: State) -> None:
        if not state.ended:
            self._ready.append(state)
            return
        self._num_open -= 1
        if state.finished:
            self._finished.append(state)
        if not self._num_open:
            self.stop("")

    def stop(self, reason: str) -> None:
        finished = sorted(self._finished, key=lambda state: state.path)
        self.over, self.accepted = True, self.choose(finished) if finished else None

    def choose(self, finished: Sequence[State]) -> State:
        """The answer among finished states."""
        raise NotImplementedError


class BestOfN(_IndependentPaths):
    """Runs the agent n times; the answer is the run with the highest `value`."""

    def __init__(self, n: int, value: Any, budget: Budget = Budget()):
        super().__init__(n, value, budget)

    def choose(self, finished: Sequence[State]) -> State:
        return best(finished)[0]


class SelfConsistency(_IndependentPaths):
    """Runs the agent n times; the answer is the most frequent value (Wang et al., 2022).

    Args:
      key: the part of a returned value that is compared.
    """

    def __init__(
        self, n: int, key: Callable[[Any], Any] = lambda value: value, budget: Budget = Budget()
    ):
        super().__init__(n, None, budget)
        self.key = key

    def choose(self, finished: Sequence[State]) -> State:
        return majority(finished, self.key)


def majority(states: Sequence[State], key: Callable[[Any], Any]) -> State:
    """The first state with the most frequent value; of equally frequent values, the first one."""
    keys = [key(state.value) for state in states]
    return states[max(range(len(states)), key=lambda i: keys.count(keys[i]))]


class SelfRefine(Paths):
    """Runs the agent in rounds, each continuing the dialogue with feedback on the last round.

    Ends once a round is good enough (Madaan et al., 2023).

    Args:
      feedback: gives the user's message about a finished state, before the next round.
      value: scores finished states; the best is the answer.
      rounds: limit of rounds.
      enough: the score that ends it.
    """

    def __init__(
        self,
        feedback: Callable[[State], str],
        value: Any,
        rounds: int = 3,
        enough: float = 1.0,
        budget: Budget = Budget(),
    ):
        check_positive(rounds=rounds)
        self.feedback, self.value, self.rounds = feedback, value, rounds
        self.enough, self.budget = enough, budget

    def start(self, root: State) -> None:
        self._root: State = root
        self._finished: list[State] = []
        self._ready.append(root)

    def judges(self, state: State) -> bool:
        return state.finished

    def reached(self, state: State) -> None:
        if not state.ended:
            self._ready.append(state)
        elif state.error is not None:
            self.stop("")
            self.accepted = self.accepted or state
        else:
            self._finished.append(state)
            if comparable_score(state) >= self.enough or len(self._finished) == self.rounds:
                self.stop("")
            else:
                self._ready.append(self._next_round(state))

    def _next_round(self, state: State) -> State:
        """The agent's first state, in the dialogue of a finished one and with feedback on it."""
        dialogue = (*state.dialogue, Message("user", self.feedback(state)))
        return State(
            state.agent,
            state.run,
            (*state.path, 0),
            state,
            dialogue,
            frame=self._root.frame,
            context=self._root.context,
        )

    def stop(self, reason: str) -> None:
        self.over = True
        self.accepted = best(self._finished)[0] if self._finished else None
