"""Searches of an agent's states by levels: beams, and Tree of Thoughts (Yao et al., 2023)."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from jaxshare.serving.agents.budgets import Budget
from jaxshare.serving.agents.repeated_runs import check_positive
from jaxshare.serving.agents.states import (
    Inquiry,
    Paths,
    State,
    best,
    comparable_score,
)
from jaxshare.serving.agents.votes import Poll


class LevelSearch(Paths):
    """A search by levels, each of which begins once the whole level before it is complete.

    A level is complete when all its paths have come to their next thought: to a model call, to a
    choice, or to an end. A choice among what the model has just proposed is on the way there, and
    all its options are gone on with.
    """

    def start(self, root: State) -> None:
        self._finished: list[State] = []
        self._level: list[State] = []  # states that this level has come to
        self._num_open, self._depth = 1, 0
        self._ready.append(root)

    def judges(self, state: State) -> bool:
        return super().judges(state) and (self._depth > 0 or state.finished)

    def pending(self) -> Sequence[State]:
        return [*self._ready, *(state for state in self._level if not state.ended)]

    def reached(self, state: State) -> None:
        if state.is_proposal and not state.ended:
            firings = self.proposals(state)
            self._num_open += firings - 1
            self._ready += [state] * firings
            return
        self._num_open -= 1
        if state.error is None and self.keeps(state):
            self._level.append(state)
        if not self._num_open:
            self.complete(sorted(self._level, key=lambda state: state.path))

    def proposals(self, state: State) -> int:
        """The number of proposals of a model call that are gone on with."""
        return state.firings(1)

    def keeps(self, state: State) -> bool:
        """True if a state is part of its level, False if it is dropped."""
        return True

    def complete(self, level: Sequence[State]) -> None:
        """Goes on from a complete level, whose states are in the order of the tree."""
        self._level = []
        firings = self.next_level(level)
        self._depth += 1
        self._num_open = len(firings)
        self._ready += firings
        if not firings:
            self.stop("")

    def next_level(self, level: Sequence[State]) -> list[State]:
        """The states to fire for the next level; none to end the search."""
        raise NotImplementedError

    def stop(self, reason: str) -> None:
        # A budget may be used up in the middle of a level.
        found = best([*self._finished, *(state for state in self._level if state.finished)])
        self.over, self.accepted = True, found[0] if found else None


class BeamSearch(LevelSearch):
    """Continues the best `width` paths, each `branch` times, and choices by all their options.

    Finished paths keep their place in the beam for as long as no better path takes it.

    Args:
      value: scores the states between model calls, and the finished ones.
    """

    def __init__(self, width: int, branch: int, value: Any, budget: Budget = Budget()):
        check_positive(width=width, branch=branch)
        self.width, self.branch, self.value, self.budget = width, branch, value, budget

    def next_level(self, level: Sequence[State]) -> list[State]:
        beam = best([*self._finished, *level], self.width)
        self._finished = [state for state in beam if state.finished]
        return [
            state for state in beam if not state.finished for _ in range(state.firings(self.branch))
        ]


class TreeOfThoughts(LevelSearch):
    """Searches the tree of the model's thoughts (Yao et al., 2023, sections 3 and algorithms 1, 2).

    Breadth first: every state of a level is fired, and the best `keep` of the new states are the
    next level; finished states are put aside, and the best of them is the answer. Depth first: the
    same for one state at a time, the best of its children before the others; the first finished
    state that is good enough is the answer.

    Thoughts are generated in one of two ways. "sample": a state is fired `breadth` times, each an
    answer of its own. "propose": it is fired once, the agent awaits `choose` on what that answer
    proposes, and the first `breadth` proposals are a branch each. Choices that do not follow an
    answer are thoughts of their own, in both ways with all their options.

    States are evaluated in one of two ways: by `value`, each for itself, or by `vote`, side by side.
    Without either they are kept in the order of the tree.

    Args:
      breadth: thoughts of a state.
      keep: number of states of a level that go on or, depth first, of a state's children.
      value: scores the states between model calls, and the finished ones; see `Supervisor`.
      vote: a function or an agent that is given the `Judged` states of a level, in the order of the
        tree, at least two. It gives the index of the best, or a list with an index for each of
        several votes. A state's score is its share of the votes that were counted. Finished states
        of several levels have not met in one vote, so there is another one among them at the end.
      evaluations: the number of times that each state is scored, or a level voted on. A vote that
        fails is not counted; if all fail, the search ends by what it had found before.
      generate: "sample" or "propose".
      depth: limit of levels; None for no limit. Paths that are not finished by then are dropped.
      depth_first: depth first instead of breadth first.
      prune: states with a lower score are dropped.
      enough: score of a finished state that ends the search; None never ends it early breadth
        first, and accepts any score depth first.
    """

    def __init__(
        self,
        breadth: int,
        keep: int,
        value: Any = None,
        *,
        vote: Any = None,
        evaluations: int = 1,
        generate: Literal["sample", "propose"] = "sample",
        depth: int | None = None,
        depth_first: bool = False,
        prune: float = -math.inf,
        enough: float | None = None,
        budget: Budget = Budget(),
    ):
        check_positive(breadth=breadth, keep=keep, depth=depth, evaluations=evaluations)
        if value is not None and vote is not None:
            raise ValueError("value and vote both evaluate states; give one of them")
        if generate not in ("sample", "propose"):
            raise ValueError(f"generate is {generate!r}; give 'sample' or 'propose'")
        self.breadth, self.keep, self.value, self.budget = breadth, keep, value, budget
        self.vote, self.evaluations, self.generate = vote, evaluations, generate
        self.depth, self.depth_first, self.prune = depth, depth_first, prune
        self.enough = enough if enough is not None else -math.inf if depth_first else math.inf

    def start(self, root: State) -> None:
        super().start(root)
        # Depth first: (state to continue, its depth), the next one last.
        self._stack: list[tuple[State, int]] = []
        self._poll: Poll | None = None
        self._is_last_poll = False
        self._num_groups = 0  # with finished states, which have met in one vote each

    def proposals(self, state: State) -> int:
        count = state.firings(1)
        return count if self.generate == "sample" else min(count, self.breadth)

    def pending(self) -> Sequence[State]:
        return [*super().pending(), *(state for state, _ in self._stack)]

    def keeps(self, state: State) -> bool:
        return self.vote is not None or self._is_good(state)

    def _is_good(self, state: State) -> bool:
        return self._depth == 0 or comparable_score(state) >= self.prune

    def complete(self, level: Sequence[State]) -> None:
        if self.vote is None:
            return super().complete(level)
        self._level = [*level]
        if self._depth == 0 or len(level) < 2:
            for state in level if self._depth else ():
                state.score = 1.0
            return self._go_on()
        self._poll = Poll(self.vote, level, self.evaluations)

    def _go_on(self) -> None:
        """Goes on from a level whose votes are counted."""
        level = [state for state in self._level if self._is_good(state)]
        self._num_groups += any(state.finished for state in level)
        super().complete(level)

    def next_level(self, level: Sequence[State]) -> list[State]:
        self._finished += [state for state in level if state.finished]
        if any(comparable_score(state) >= self.enough for state in self._finished):
            return []
        kept = best([state for state in level if not state.finished], self.keep)
        if self.depth_first:
            self._stack += [(state, self._depth) for state in reversed(kept)]
            while self._stack:
                state, self._depth = self._stack.pop()
                if self.depth is None or self._depth < self.depth:
                    return self._firings(state)
            return []
        if self.depth is not None and self._depth >= self.depth:
            return []
        return [firing for state in kept for firing in self._firings(state)]

    def _firings(self, state: State) -> list[State]:
        return [state] * state.firings(self.breadth if self.generate == "sample" else 1)

    def inquiries(self) -> Sequence[Inquiry]:
        return self._poll.open if self._poll else ()

    def answered(self, inquiry: Inquiry, value: Any, failed: State | None) -> None:
        poll = self._poll
        assert poll is not None
        poll.count(inquiry, value, failed)
        if poll.open:
            return
        self._poll = None
        if poll.failed_state is not None:
            self._level = []
            super().stop("")
            self.accepted = self.accepted or poll.failed_state
        elif self._is_last_poll:
            super().stop("")
        else:
            self._go_on()

    def stop(self, reason: str) -> None:
        is_good = any(comparable_score(state) >= self.enough for state in self._finished)
        if reason or self.vote is None or self._num_groups < 2 or is_good:
            return super().stop(reason)
        self._is_last_poll = True
        finished = sorted(self._finished, key=lambda state: state.path)
        self._poll = Poll(self.vote, finished, self.evaluations, self.evaluations)
