"""Supervisors that scale an agent at test time: side by side, one after the other, and as trees
(Hive, sections 2.2 and 5.1.1).

What branches is what is random: states that wait for the model. All others are fired once. Where
two scores are equal, the state that stands earlier in the tree wins, so that a search is the same
every time, whichever of its firings is faster.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxshare.serving.agents.requests import Message
from jaxshare.serving.agents.states import Budget, Paths, State, Supervisor


def best(states: Iterable[State], count: int = 1) -> list[State]:
    """Those with the highest scores, best first; of equal ones those that stand earlier in the
    tree."""
    return sorted(states, key=lambda state: (-_score(state), state.path))[:count]


def _score(state: State) -> float:
    """A state's score; less than any number where it has none, or what is not a number."""
    return -math.inf if state.score is None or math.isnan(state.score) else state.score


def _check(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name} is {number}; give a whole number from 1 on")


class _Several(Paths):
    """n paths from the begin to the end."""

    def __init__(self, n: int, value: Any, budget: Budget):
        _check(n=n)
        self.n, self.value, self.budget = n, value, budget

    def start(self, root: State) -> None:
        self._found: list[State] = []
        self._open = self.n
        self._ready += [root] * self.n

    def judges(self, state: State) -> bool:
        return self.value is not None and state.finished

    def reached(self, state: State) -> None:
        if not state.ended:
            self._ready.append(state)
            return
        self._open -= 1
        if state.finished:
            self._found.append(state)
        if not self._open:
            self.stop("")

    def stop(self, reason: str) -> None:
        self.over, self.accepted = (
            True,
            self.chosen(sorted(self._found, key=lambda state: state.path)) if self._found else None,
        )

    def chosen(self, found: Sequence[State]) -> State:
        """The answer among finished states."""
        raise NotImplementedError


class BestOfN(_Several):
    """n runs of the agent, of which the one that `value` gives most is the answer."""

    def __init__(self, n: int, value: Any, budget: Budget = Budget()):
        super().__init__(n, value, budget)

    def chosen(self, found: Sequence[State]) -> State:
        return best(found)[0]


class SelfConsistency(_Several):
    """n runs of the agent, of which what most return is the answer (Wang et al., 2022).

    Args:
      key: what of a returned value is to be equal.
    """

    def __init__(
        self, n: int, key: Callable[[Any], Any] = lambda value: value, budget: Budget = Budget()
    ):
        super().__init__(n, None, budget)
        self.key = key

    def chosen(self, found: Sequence[State]) -> State:
        return majority(found, self.key)


def majority(found: Sequence[State], key: Callable[[Any], Any]) -> State:
    """The first of the states whose value is the most frequent one; of equally frequent ones, that
    which came up first."""
    keys = [key(state.value) for state in found]
    return found[max(range(len(found)), key=lambda i: keys.count(keys[i]))]


class SelfRefine(Paths):
    """Runs the agent, then again in the dialogue that it has had, continued by feedback, until it
    is good enough (Madaan et al., 2023).

    Args:
      feedback: what the user's message before the next round says of a finished state.
      value: judges finished states; the best is the answer.
      rounds: at most so many.
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
        _check(rounds=rounds)
        self.feedback, self.value, self.rounds, self.enough, self.budget = (
            feedback,
            value,
            rounds,
            enough,
            budget,
        )

    def start(self, root: State) -> None:
        self._root, self._found = root, []
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
            self._found.append(state)
            if _score(state) >= self.enough or len(self._found) == self.rounds:
                self.stop("")
            else:
                self._ready.append(self._again(state))

    def _again(self, state: State) -> State:
        """The agent's begin, in the dialogue of this state and with feedback on it."""
        dialogue = (*state.dialogue, Message("user", self.feedback(state)))
        return State(
            state.agent, state.run, (*state.path, 0), state, dialogue, frame=self._root.frame
        )

    def stop(self, reason: str) -> None:
        self.over, self.accepted = True, best(self._found)[0] if self._found else None


class _Levels(Paths):
    """Searches in which all paths of a level come to the next model call, or to an end, before the
    next level begins."""

    def start(self, root: State) -> None:
        self._found: list[State] = []  # finished
        self._level: list[State] = []  # what this level has come to
        self._open, self._depth = 1, 0
        self._ready.append(root)

    def judges(self, state: State) -> bool:
        return super().judges(state) and (self._depth > 0 or state.finished)

    def reached(self, state: State) -> None:
        self._open -= 1
        if state.error is None and self.keeps(state):
            self._level.append(state)
        if not self._open:
            level, self._level = self._level, []
            following = self.following(level)
            self._depth += 1
            self._open = len(following)
            self._ready += following
            if not following:
                self.stop("")

    def keeps(self, state: State) -> bool:
        """Whether a state is looked at at all."""
        return True

    def following(self, level: Sequence[State]) -> list[State]:
        """The firings of the next level, none to end."""
        raise NotImplementedError

    def stop(self, reason: str) -> None:
        # A budget may be used up in the midst of a level.
        found = best([*self._found, *(state for state in self._level if state.finished)])
        self.over, self.accepted = True, found[0] if found else None


class BeamSearch(_Levels):
    """The best `width` paths go on, each `branch` times; finished ones keep their place for as long
    as none is better.

    Args:
      value: judges what is between model calls, and what is finished.
    """

    def __init__(self, width: int, branch: int, value: Any, budget: Budget = Budget()):
        _check(width=width, branch=branch)
        self.width, self.branch, self.value, self.budget = width, branch, value, budget

    def following(self, level: Sequence[State]) -> list[State]:
        beam = best([*self._found, *level], self.width)
        self._found = [state for state in beam if state.finished]
        return [state for state in beam if not state.finished for _ in range(self.branch)]


class TreeOfThoughts(_Levels):
    """Searches the tree of what a model may say (Yao et al., 2023).

    Breadth first: every state of a level is fired `breadth` times, and the best `keep` of what
    comes of them are the next level; finished ones are put aside, and the best is the answer in the
    end. Depth first: the same, for one state at a time, the best of its children before the others;
    the first that is finished and good enough is the answer.

    Args:
      breadth: firings of a state.
      keep: of a level, or, depth first, of a state's children, so many go on.
      value: judges what is between model calls, and what is finished.
      depth: levels at most; None for no bound. What is not finished by then is dropped.
      depth_first: which of the two.
      prune: what scores less is dropped at once.
      enough: a finished state with such a score ends the search; None is the best score of all
        breadth first, and any score depth first.
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
        _check(breadth=breadth, keep=keep, depth=depth)
        self.breadth, self.keep, self.value, self.depth, self.depth_first = (
            breadth,
            keep,
            value,
            depth,
            depth_first,
        )
        self.prune, self.budget = prune, budget
        self.enough = enough if enough is not None else -math.inf if depth_first else math.inf

    def start(self, root: State) -> None:
        super().start(root)
        # depth first: states to be gone on from and their depth, the next one last
        self._stack: list[tuple[State, int]] = []

    def keeps(self, state: State) -> bool:
        return self._depth == 0 or _score(state) >= self.prune

    def following(self, level: Sequence[State]) -> list[State]:
        self._found += [state for state in level if state.finished]
        if any(_score(state) >= self.enough for state in self._found):
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
    """Several searches side by side, whose answers vote (Bi et al., 2024).

    Args:
      tree: the pattern of the searches, each of which begins with a firing of its own of the first
        state; its budget is not looked at.
      trees: how many.
      key: what of two answers is to be equal; None takes the answer with the best score instead.
    """

    def __init__(
        self,
        tree: Supervisor,
        trees: int,
        key: Callable[[Any], Any] | None = lambda value: value,
        budget: Budget = Budget(),
    ):
        _check(trees=trees)
        self.tree, self.trees, self.key, self.budget, self.value = (
            tree,
            trees,
            key,
            budget,
            tree.value,
        )

    def init(self, root: State) -> None:
        self.over, self.accepted = False, None
        self._root = root
        self._trees = [self.tree.begin() for _ in range(self.trees)]
        self._owner: dict[int, Supervisor] = {}  # of what the root's firings came to, by the firing
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
        found = [tree.accepted for tree in self._trees if tree.accepted and tree.accepted.finished]
        self.over = True
        self.accepted = (
            (majority(found, self.key) if self.key else best(found)[0]) if found else None
        )


class _TreeNode:
    """A state in a tree that is searched at random, and what came of it."""

    def __init__(self, state: State, parent: "_TreeNode | None"):
        self.state, self.parent = state, parent
        self.children: list[_TreeNode] = []
        self.visits, self.total = 0, 0.0


class MonteCarloTreeSearch(Paths):
    """Goes down the tree to where it promises most, fires there once, and lets all above learn what
    came of it (UCT, Kocsis and Szepesvari, 2006).

    Args:
      simulations: how often.
      breadth: children of a state at most; one that has so many is gone through, not fired.
      value: judges new states, or, with rollouts, the ends that they come to; from 0 to 1.
      exploration: c of mean + c * sqrt(ln(visits of the parent) / visits).
      rollout: a new state is gone on from, once each, to the end, and the end's score is what
        counts.
      enough: a finished state with such a score ends the search.
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
        _check(simulations=simulations, breadth=breadth)
        self.simulations, self.breadth, self.value, self.exploration = (
            simulations,
            breadth,
            value,
            exploration,
        )
        self.rollout, self.enough, self.budget = rollout, enough, budget

    def start(self, root: State) -> None:
        self._root: _TreeNode | None = None
        self._at: _TreeNode | None = None  # that was fired
        self._new: _TreeNode | None = None  # that came of it, with rollouts
        self._done = 0
        self._found: list[State] = []
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
            assert self._at
            if self._new is None:
                self._new = _TreeNode(state, self._at)
                self._at.children.append(self._new)
            if state.finished:
                self._found.append(state)
            if self.rollout and not state.ended:
                self._ready.append(state)
                return
            self._learn(self._new, 0.0 if state.error is not None else _score(state))
        self._simulate()

    def _learn(self, node: _TreeNode | None, score: float) -> None:
        self._done += 1
        self._new = None
        while node:
            node.visits += 1
            node.total += score
            node = node.parent

    def _simulate(self) -> None:
        """Goes down to the next state that is to be fired; ends that are come to on the way count
        again."""
        assert self._root
        while self._done < self.simulations and not any(
            _score(state) >= self.enough for state in self._found
        ):
            node = self._root
            while not node.state.ended and len(node.children) >= self.breadth:
                node = max(node.children, key=self._promise)
            if not node.state.ended:
                self._at = node
                self._ready.append(node.state)
                return
            self._learn(node, node.total / node.visits)
        self.stop("")

    def _promise(self, node: _TreeNode) -> float:
        assert node.parent
        return node.total / node.visits + self.exploration * math.sqrt(
            math.log(node.parent.visits) / node.visits
        )

    def stop(self, reason: str) -> None:
        self.over, self.accepted = True, best(self._found)[0] if self._found else None
