"""Supervisors that search an agent's states as a tree (Hive, sections 2.2 and 5.1.1).

Only states that wait for the model branch, since only they are random. All others are fired once.
If two scores are equal, the state that is earlier in the tree wins, so that a search gives the same
result every time, however fast its firings are.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxshare.serving.agents.repeated_runs import (
    BestOfN,
    SelfConsistency,
    SelfRefine,
    check_positive,
    majority,
)
from jaxshare.serving.agents.states import Budget, Paths, State, Supervisor, best, comparable_score

__all__ = [
    "BeamSearch",
    "BestOfN",
    "ForestOfThoughts",
    "MonteCarloTreeSearch",
    "SelfConsistency",
    "SelfRefine",
    "TreeOfThoughts",
]


class _LevelSearch(Paths):
    """A search by levels, each of which begins once the whole level before it is complete.

    A level is complete when all its paths have come to their next model call, or to an end.
    """

    def start(self, root: State) -> None:
        self._finished: list[State] = []
        self._level: list[State] = []  # states that this level has come to
        self._num_open, self._depth = 1, 0
        self._ready.append(root)

    def judges(self, state: State) -> bool:
        return super().judges(state) and (self._depth > 0 or state.finished)

    def reached(self, state: State) -> None:
        self._num_open -= 1
        if state.error is None and self.keeps(state):
            self._level.append(state)
        if not self._num_open:
            level, self._level = self._level, []
            firings = self.next_level(level)
            self._depth += 1
            self._num_open = len(firings)
            self._ready += firings
            if not firings:
                self.stop("")

    def keeps(self, state: State) -> bool:
        """True if a state is part of its level, False if it is dropped."""
        return True

    def next_level(self, level: Sequence[State]) -> list[State]:
        """The states to fire for the next level; none to end the search."""
        raise NotImplementedError

    def stop(self, reason: str) -> None:
        # A budget may be used up in the middle of a level.
        found = best([*self._finished, *(state for state in self._level if state.finished)])
        self.over, self.accepted = True, found[0] if found else None


class BeamSearch(_LevelSearch):
    """Continues the best `width` paths, each `branch` times.

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
        return [state for state in beam if not state.finished for _ in range(self.branch)]


class TreeOfThoughts(_LevelSearch):
    """Searches the tree of the model's possible answers (Yao et al., 2023).

    Breadth first: every state of a level is fired `breadth` times, and the best `keep` of the new
    states are the next level; finished states are put aside, and the best of them is the answer.
    Depth first: the same for one state at a time, the best of its children before the others; the
    first finished state that is good enough is the answer.

    Args:
      breadth: firings of a state.
      keep: number of states of a level that go on or, depth first, of a state's children.
      value: scores the states between model calls, and the finished ones.
      depth: limit of levels; None for no limit. Paths that are not finished by then are dropped.
      depth_first: depth first instead of breadth first.
      prune: states with a lower score are dropped at once.
      enough: score of a finished state that ends the search; None never ends it early breadth
        first, and accepts any score depth first.
    """

    def __init__(
        self,
        breadth: int,
        keep: int,
        value: Any,
        *,
        depth: int | None = None,
        depth_first: bool = False,
        prune: float = -math.inf,
        enough: float | None = None,
        budget: Budget = Budget(),
    ):
        check_positive(breadth=breadth, keep=keep, depth=depth)
        self.breadth, self.keep, self.value, self.budget = breadth, keep, value, budget
        self.depth, self.depth_first, self.prune = depth, depth_first, prune
        self.enough = enough if enough is not None else -math.inf if depth_first else math.inf

    def start(self, root: State) -> None:
        super().start(root)
        # Depth first: (state to continue, its depth), the next one last.
        self._stack: list[tuple[State, int]] = []

    def keeps(self, state: State) -> bool:
        return self._depth == 0 or comparable_score(state) >= self.prune

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
                    return [state] * self.breadth
            return []
        if self.depth is not None and self._depth >= self.depth:
            return []
        return [state for state in kept for _ in range(self.breadth)]


class ForestOfThoughts(Supervisor):
    """Runs several searches side by side, whose answers vote (Bi et al., 2024).

    Args:
      tree: the pattern of the searches, each of which fires the first state for itself; its budget
        is ignored.
      trees: number of searches.
      key: the part of an answer that is compared; None takes the answer with the best score
        instead.
    """

    def __init__(
        self,
        tree: Supervisor,
        trees: int,
        key: Callable[[Any], Any] | None = lambda value: value,
        budget: Budget = Budget(),
    ):
        check_positive(trees=trees)
        self.tree, self.trees, self.key = tree, trees, key
        self.budget, self.value = budget, tree.value

    def init(self, root: State) -> None:
        self.over, self.accepted = False, None
        self._root = root
        self._trees = [self.tree.begin() for _ in range(self.trees)]
        self._owner: dict[int, Supervisor] = {}  # of a state, by the root's firing that led to it
        for tree in self._trees:
            tree.init(root)

    def fire(self) -> list[State]:
        fired: list[State] = []
        for tree in self._trees:
            for state in () if tree.over else tree.fire():
                if state is self._root:
                    self._owner[self._root.fired + fired.count(state)] = tree
                fired.append(state)
        return fired

    def refires(self, state: State) -> bool:
        return state.waiting is None or self._tree_of(state).refires(state)

    def _tree_of(self, state: State) -> Supervisor:
        return self._owner[state.path[0]]

    def judges(self, state: State) -> bool:
        return self._tree_of(state).judges(state)

    def commit(self, state: State) -> None:
        tree = self._tree_of(state)
        if not tree.over:
            tree.commit(state)
        if all(tree.over for tree in self._trees):
            self.stop("")

    def wake(self, state: State) -> None:
        tree = self._tree_of(state)
        if not tree.over:
            tree.wake(state)

    def stop(self, reason: str) -> None:
        for tree in self._trees:
            if not tree.over:
                tree.stop(reason)
        answers = [
            tree.accepted for tree in self._trees if tree.accepted and tree.accepted.finished
        ]
        self.over, self.accepted = True, None
        if answers:
            self.accepted = majority(answers, self.key) if self.key else best(answers)[0]


class _TreeNode:
    """A state in the tree of a Monte Carlo search, with the sum of the scores below it."""

    def __init__(self, state: State, parent: "_TreeNode | None"):
        self.state, self.parent = state, parent
        self.children: list[_TreeNode] = []
        self.visits, self.total_score = 0, 0.0


class MonteCarloTreeSearch(Paths):
    """Searches by UCT: select a path, fire its end once, and back up the score of the new state.

    See Kocsis and Szepesvari (2006).

    Args:
      simulations: number of simulations.
      breadth: limit of a state's children; only a state with fewer is fired.
      value: scores new states or, with rollouts, the ends of their rollouts; from 0 to 1.
      exploration: c of mean + c * sqrt(ln(visits of the parent) / visits).
      rollout: continues a new state to its end, firing each state once, and counts the end's score.
      enough: score of a finished state that ends the search.
    """

    def __init__(
        self,
        simulations: int,
        breadth: int,
        value: Any,
        *,
        exploration: float = math.sqrt(2),
        rollout: bool = False,
        enough: float = math.inf,
        budget: Budget = Budget(),
    ):
        check_positive(simulations=simulations, breadth=breadth)
        self.simulations, self.breadth, self.value = simulations, breadth, value
        self.exploration, self.rollout = exploration, rollout
        self.enough, self.budget = enough, budget

    def start(self, root: State) -> None:
        self._root: _TreeNode | None = None
        self._fired: _TreeNode | None = None
        self._new: _TreeNode | None = None  # child of `_fired` whose rollout is under way
        self._num_simulated = 0
        self._finished: list[State] = []
        self._ready.append(root)

    def judges(self, state: State) -> bool:
        return (
            self._root is not None
            and super().judges(state)
            and (state.finished or not self.rollout)
        )

    def reached(self, state: State) -> None:
        if self._root is None:
            self._root = _TreeNode(state, None)
            if state.ended:
                self.over, self.accepted = True, state
                return
        else:
            assert self._fired
            if self._new is None:
                self._new = _TreeNode(state, self._fired)
                self._fired.children.append(self._new)
            if state.finished:
                self._finished.append(state)
            if self.rollout and not state.ended:
                self._ready.append(state)
                return
            self._back_up(self._new, 0.0 if state.error is not None else comparable_score(state))
        self._select()

    def _back_up(self, node: _TreeNode | None, score: float) -> None:
        """Adds a simulation's score to a node and all nodes above it."""
        self._num_simulated += 1
        self._new = None
        while node:
            node.visits += 1
            node.total_score += score
            node = node.parent

    def _select(self) -> None:
        """Descends to the next state to fire; an end reached on the way counts once more."""
        assert self._root
        while self._num_simulated < self.simulations and not any(
            comparable_score(state) >= self.enough for state in self._finished
        ):
            node = self._root
            while not node.state.ended and len(node.children) >= self.breadth:
                node = max(node.children, key=self._upper_bound)
            if not node.state.ended:
                self._fired = node
                self._ready.append(node.state)
                return
            self._back_up(node, node.total_score / node.visits)
        self.stop("")

    def _upper_bound(self, node: _TreeNode) -> float:
        assert node.parent
        return node.total_score / node.visits + self.exploration * math.sqrt(
            math.log(node.parent.visits) / node.visits
        )

    def stop(self, reason: str) -> None:
        self.over = True
        self.accepted = best(self._finished)[0] if self._finished else None
