"""Supervisors that run an agent several times: best of n, self-consistency, self-refinement."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxshare.serving.agents.budgets import Budget
from jaxshare.serving.agents.feedback import (
    Source,
    check_source,
    feedback_inquiry,
    with_feedback,
)
from jaxshare.serving.agents.states import (
    Inquiry,
    Paths,
    State,
    best,
    comparable_score,
)


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

    def refires(self, state: State) -> bool:
        return state.waiting is None  # all paths part at the start

    def judges(self, state: State) -> bool:
        return self.value is not None and state.finished

    def pending(self) -> Sequence[State]:
        return self._ready

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

    def __init__(self, n: int, value: Any, budget: Budget = Budget(), *, evaluations: int = 1):
        check_positive(evaluations=evaluations)
        super().__init__(n, value, budget)
        self.evaluations = evaluations

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
    """Runs the agent in rounds, each in the dialogue of all rounds before with feedback on each.

    The agent begins every round anew, so that its prompts and answers and the feedback on them
    alternate in the dialogue (Madaan et al., 2023, section 2 and algorithm 1). It ends once a round
    is good enough, or once the feedback says so.

    Args:
      feedback: on a finished state, before the next round: a function of the state, or an agent that
        is given its `Judged` view, gives the user's next message; a text is put to the model at the
        end of the dialogue, and the model's answer is the feedback. None, from a function or an
        agent, says that nothing is left to do.
      value: scores finished states, the best of which is the answer; without it the last one is.
      rounds: limit of rounds.
      enough: the score that ends it.
      until: a function of the feedback that is true if the feedback says that nothing is left to do.

    If a round or the feedback on one fails, that is a failed state in the run's tree, and the
    answer is that of the rounds before, if there are any.
    """

    def __init__(
        self,
        feedback: Source,
        value: Any = None,
        rounds: int = 3,
        enough: float = 1.0,
        budget: Budget = Budget(),
        *,
        until: Callable[[str], bool] | None = None,
        evaluations: int = 1,
    ):
        check_positive(rounds=rounds, evaluations=evaluations)
        check_source("feedback", feedback)
        self.feedback, self.value, self.rounds = feedback, value, rounds
        self.enough, self.budget, self.until = enough, budget, until
        self.evaluations = evaluations

    def start(self, root: State) -> None:
        self._root: State = root
        self._finished: list[State] = []
        self._inquiry: Inquiry | None = None
        self._ready.append(root)

    def refires(self, state: State) -> bool:
        return state.waiting is None  # every round begins anew

    def judges(self, state: State) -> bool:
        return self.value is not None and state.finished

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
                self._inquiry = feedback_inquiry(self.feedback, state, "feedback")

    def inquiries(self) -> Sequence[Inquiry]:
        return [self._inquiry] if self._inquiry else []

    def answered(self, inquiry: Inquiry, value: str | None, failed: State | None) -> None:
        self._inquiry = None
        if value is None or (self.until is not None and self.until(value)):
            return self.stop("")
        state = inquiry.about
        self._ready.append(
            State(
                state.agent,
                state.run,
                (*state.path, 0),
                state,
                with_feedback(self.feedback, state, value),
                frame=self._root.frame,
                context=self._root.context,
            )
        )

    def stop(self, reason: str) -> None:
        found = best(self._finished) if self.value is not None else self._finished[-1:]
        self.over, self.accepted = True, found[0] if found else None
