"""Monte Carlo tree search of an agent's states (Kocsis and Szepesvari, 2006)."""

import math
from typing import Any

from jaxshare.serving.agents.budgets import Budget
from jaxshare.serving.agents.repeated_runs import check_positive
from jaxshare.serving.agents.states import Paths, State, best, comparable_score


class _TreeNode:
    """A state in the tree of a Monte Carlo search, with the sum of the scores below it.

    Attributes:
      state: None while its simulation is under way.
      children: in the order in which they were selected; `first` is the firing of the first one,
        which is not that of a rollout.
      virtual: the number of simulations under way through it, each a visit with a score of 0.
    """

    def __init__(self, parent: "_TreeNode | None"):
        self.state: State | None = None
        self.parent = parent
        self.children: list[_TreeNode] = []
        self.visits, self.total_score, self.virtual = 0, 0.0, 0
        self.first = 0

    @property
    def count(self) -> int:
        """Visits, with those under way."""
        return self.visits + self.virtual


class _Simulation:
    """A simulation under way: the nodes that it adds, the last of which is scored.

    Attributes:
      path: of the first state that it comes to.
      result: the score to back up, once there; and `finished`, the state at its end if it is one.
    """

    def __init__(self, path: tuple[int, ...], node: _TreeNode):
        self.path = path
        self.nodes, self.states = [node], list[State]()
        self.result: float | None = None
        self.finished: State | None = None


class MonteCarloTreeSearch(Paths):
    """Searches by UCT: select a path, fire its end once, and back up the score of the new state.

    Selection descends to the child with the highest
    mean + exploration * sqrt(ln(visits of the parent) / visits), as long as a state has as many
    children as it may have. An answer that the agent chooses from (`choose`) is gone on from by one
    of its options in the same simulation; each option is one of its children.

    Several simulations may run at once. Each then counts as a visit with a score of 0 for the nodes
    on its path until it is backed up, a virtual loss that leads the others elsewhere (Chaslot et
    al., 2008, section 3.3). Simulations are backed up in the order in which they were selected, and
    what one of them decides is used from then on: so the tree depends on the seed and on `parallel`,
    and not on which answer is faster. If `parallel` is above 1, what a budget cuts off does depend
    on that, and so does the number of calls, not the answer, where `enough` ends the search.

    Args:
      simulations: number of simulations.
      breadth: limit of a state's children; only a state with fewer is fired.
      value: scores new states or, with rollouts, the ends of their rollouts; from 0 to 1.
      exploration: the constant of UCT.
      rollout: continues a new state to its end, firing each state once, and counts the end's score.
      enough: score of a finished state that ends the search.
      parallel: limit of simulations under way.
      evaluations: see `Supervisor`.
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
        parallel: int = 1,
        evaluations: int = 1,
        budget: Budget = Budget(),
    ):
        check_positive(
            simulations=simulations, breadth=breadth, parallel=parallel, evaluations=evaluations
        )
        self.simulations, self.breadth, self.value = simulations, breadth, value
        self.exploration, self.rollout = exploration, rollout
        self.enough, self.parallel, self.evaluations = enough, parallel, evaluations
        self.budget = budget

    def start(self, root: State) -> None:
        self._root: _TreeNode | None = None
        # Simulations under way, in the order of their selection; and by the path of the first
        # state that each has fired to.
        self._under_way: list[_Simulation] = []
        self._by_path: dict[tuple[int, ...], _Simulation] = {}
        self._num_selected = 0
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
            self._root = _TreeNode(None)
            self._root.state = state
            if state.ended:
                self.over, self.accepted = True, state
                return
            return self._select()
        simulation = self._simulation(state)
        if len(simulation.states) < len(simulation.nodes):
            simulation.states.append(state)
            if state.is_proposal and not state.ended:
                simulation.nodes.append(_TreeNode(simulation.nodes[-1]))
                self._ready.append(state)
                return
        if self.rollout and not state.ended:
            self._ready.append(state)
            return
        if state.finished:
            simulation.finished = state
        simulation.result = 0.0 if state.error is not None else comparable_score(state)
        self._back_up_in_order()

    def _simulation(self, state: State) -> _Simulation:
        """The simulation that a state belongs to."""
        for length in range(len(state.path), 0, -1):
            if found := self._by_path.get(state.path[:length]):
                return found
        raise AssertionError(f"{state!r} belongs to no simulation")

    def _back_up_in_order(self) -> None:
        while self._under_way and self._under_way[0].result is not None and not self.over:
            simulation = self._under_way.pop(0)
            del self._by_path[simulation.path]
            node = simulation.nodes[0].parent
            while node:
                node.virtual -= 1
                node = node.parent
            for new, state in zip(simulation.nodes, simulation.states, strict=True):
                new.state, new.virtual = state, 0
                if new is not simulation.nodes[0] and new.parent is not None:
                    new.parent.children.append(new)
            for new in simulation.nodes:
                new.first = new.state.fired - len(new.children) if new.state else 0
            if simulation.finished:
                self._finished.append(simulation.finished)
            self._add(simulation.nodes[-1], simulation.result or 0.0)
            self._select()

    def _add(self, node: _TreeNode | None, score: float) -> None:
        """Adds a simulation's score to a node and all nodes above it."""
        while node:
            node.visits += 1
            node.total_score += score
            node = node.parent

    def _select(self) -> None:
        """Begins simulations; an end reached on the way counts once more."""
        while not self._is_over():
            if self._num_selected == self.simulations or len(self._under_way) == self.parallel:
                return
            node = self._descend()
            if node is None:
                return
            self._num_selected += 1
            assert node.state is not None
            if node.state.ended:
                self._add(node, node.total_score / node.visits)
            else:
                self._begin(node)
        self.stop("")

    def _is_over(self) -> bool:
        if any(comparable_score(state) >= self.enough for state in self._finished):
            return True
        return self._num_selected == self.simulations and not self._under_way

    def _descend(self) -> _TreeNode | None:
        """The node whose state is to be fired, or an end; None until a simulation is backed up."""
        node = self._root
        while node is not None and node.state is not None and not node.state.ended:
            if len(node.children) < node.state.firings(self.breadth):
                return node
            known = [child for child in node.children if child.state is not None]
            node = max(known, key=self._upper_bound, default=None)
        return node

    def _begin(self, parent: _TreeNode) -> None:
        """Fires a node's state for a new child."""
        assert parent.state is not None
        node = _TreeNode(parent)
        firing = parent.first + len(parent.children)
        simulation = _Simulation((*parent.state.path, firing), node)
        self._under_way.append(simulation)
        self._by_path[simulation.path] = simulation
        parent.children.append(node)
        self._ready.append(parent.state)
        above: _TreeNode | None = parent
        while above:
            above.virtual += 1
            above = above.parent

    def _upper_bound(self, node: _TreeNode) -> float:
        assert node.parent
        return node.total_score / node.count + self.exploration * math.sqrt(
            math.log(node.parent.count) / node.count
        )

    def stop(self, reason: str) -> None:
        found = [*self._finished]
        if reason:  # else what is faster would decide
            found += [each.finished for each in self._under_way if each.finished]
        self.over, self.accepted = True, best(found)[0] if found else None
