"""Forest of Thoughts: several searches side by side that come to one answer (Bi et al., 2024)."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxshare.serving.agents.budgets import Budget
from jaxshare.serving.agents.feedback import (
    Source,
    check_source,
    feedback_inquiry,
    with_feedback,
)
from jaxshare.serving.agents.judging import Judged
from jaxshare.serving.agents.repeated_runs import check_positive, majority
from jaxshare.serving.agents.states import (
    Inquiry,
    State,
    Supervisor,
    best,
    comparable_score,
)
from jaxshare.serving.agents.votes import indices


@dataclasses.dataclass
class _Correction:
    """A thought that is being corrected.

    Attributes:
      thoughts: the one that the tree has come to, and the corrected ones.
      left: the number of corrections that are allowed still.
    """

    thoughts: list[State]
    left: int


class ForestOfThoughts(Supervisor):
    """Runs several searches side by side, which decide together (Bi et al., 2024, section 3).

    Sparse activation: within a tree only the best states go on, as its own arguments say. A tree
    that comes to no answer, for all its states were pruned or failed, has no say; and of the trees
    only `active` go on after their first thoughts, those with the best scores.

    Dynamic self-correction: a thought with a score below `below` is given feedback, and the model
    call that has led to it is made once more, in the dialogue with the thought and the feedback, up
    to `corrections` times. The tree goes on with the best of these thoughts. A call in another
    dialogue than the agent's own (`llm(..., dialogue=...)`) is left as it is.

    Consensus: the answer of more than half of the trees, the first of them. Where there is none, an
    expert that sees the answers decides; without an expert, or if it fails, the most frequent
    answer, and of equally frequent ones the first.

    Args:
      tree: the pattern of the searches, each of which fires the first state for itself; its budget
        is ignored.
      trees: number of searches.
      key: the part of an answer that is compared; None takes the answer with the best score
        instead.
      active: number of trees that go on once all have scored thoughts; None for all.
      correct: gives feedback on a thought: see `SelfRefine`. None from a function or an agent leaves
        the thought as it is. Without it, nothing is corrected.
      below: the score of thoughts that are good enough.
      corrections: limit for each thought.
      expert: a function or an agent that is given the `Judged` answers of the trees, in order, and
        gives the index of the one to take.
      early: ends all as soon as more than half of the trees have the same answer.
    """

    def __init__(
        self,
        tree: Supervisor,
        trees: int,
        key: Callable[[Any], Any] | None = lambda value: value,
        budget: Budget = Budget(),
        *,
        active: int | None = None,
        correct: Source | None = None,
        below: float = 0.5,
        corrections: int = 1,
        expert: Any = None,
        early: bool = False,
    ):
        check_positive(trees=trees, active=active, corrections=corrections)
        if correct is not None:
            check_source("correct", correct)
        if key is None and (expert is not None or early):
            raise ValueError(
                "key is None, so the best score decides; leave expert and early out, or give a key"
            )
        self.tree, self.trees, self.key, self.budget = tree, trees, key, budget
        self.active, self.correct, self.below = active, correct, below
        self.corrections, self.expert, self.early = corrections, expert, early
        self.value, self.evaluations = tree.value, tree.evaluations

    def init(self, root: State) -> None:
        self.over, self.accepted = False, None
        self._root = root
        self._trees = [self.tree.begin() for _ in range(self.trees)]
        self._owner: dict[int, int] = {}  # tree of a state, by the root's firing that led to it
        self._ready: list[State] = []  # states of corrections
        self._corrections: dict[tuple[int, ...], _Correction] = {}
        self._own: list[Inquiry] = []
        # While it is open which trees stay active, what each would go on from.
        self._held: dict[int, list[State]] | None = None if self.active is None else {}
        self._best_scores: dict[int, float] = {}
        self._inactive: set[int] = set()
        self._answers: list[State] = []
        for tree in self._trees:
            tree.init(root)

    # Sparse activation.

    def fire(self) -> list[State]:
        fired, self._ready = self._ready, []
        for number, tree in enumerate(self._trees):
            for state in () if tree.over else tree.fire():
                if state is self._root:
                    self._owner[self._root.fired + fired.count(state)] = number
                if self._held is not None and state.score is not None:
                    self._held.setdefault(number, []).append(state)
                else:
                    fired.append(state)
        if self._held and all(
            tree.over or number in self._held for number, tree in enumerate(self._trees)
        ):
            fired += self._activate(self._held)
            self._held = None
        return fired

    def _activate(self, held: dict[int, list[State]]) -> list[State]:
        """Ends all trees but the best ones; returns the states that those go on from."""
        candidates = [
            number for number, tree in enumerate(self._trees) if number in held or tree.accepted
        ]
        candidates.sort(key=lambda number: -self._best_scores[number])
        self._inactive = set(candidates[self.active :])
        for number in self._inactive:
            self._trees[number].over = True
        return [
            state
            for number, states in held.items()
            if number not in self._inactive
            for state in states
        ]

    def pending(self) -> list[State] | None:
        states = [*self._ready, *(state for each in (self._held or {}).values() for state in each)]
        states += [thought for each in self._corrections.values() for thought in each.thoughts]
        for tree in self._trees:
            if not tree.over:
                more = tree.pending()
                if more is None:
                    return None
                states += more
        return states

    # States of the trees.

    def _number_of(self, state: State) -> int:
        return self._owner[state.path[0]]

    def refires(self, state: State) -> bool:
        is_corrected = self.correct is not None and state.asks_model
        tree = self._trees[self._number_of(state)] if state.waiting is not None else None
        return tree is None or is_corrected or tree.refires(state)

    def judges(self, state: State) -> bool:
        return self._trees[self._number_of(state)].judges(state)

    def commit(self, state: State) -> None:
        number = self._number_of(state)
        if self._trees[number].over:
            return
        if state.score is not None:
            score = max(comparable_score(state), self._best_scores.get(number, -float("inf")))
            self._best_scores[number] = score
        correction = self._correction_of(state)
        if correction is None:
            if state.score is None or self.correct is None:
                return self._pass_on(state)
            correction = _Correction([], self.corrections)
        elif not state.ended and state.score is None:
            if not state.sleeping:
                self._ready.append(state)
            return
        correction.thoughts.append(state)
        self._check(correction)

    def wake(self, state: State) -> None:
        if self._correction_of(state):
            self._ready.append(state)
        elif not (tree := self._trees[self._number_of(state)]).over:
            tree.wake(state)

    def _pass_on(self, state: State) -> None:
        """Gives a state to its tree."""
        tree = self._trees[self._number_of(state)]
        if not tree.over:
            tree.commit(state)
        self._check_end()

    # Dynamic self-correction.

    def _correction_of(self, state: State) -> _Correction | None:
        """The correction that a state is a part of."""
        if not self._corrections:
            return None
        paths = (state.path[:length] for length in range(len(state.path), 0, -1))
        return next((self._corrections[path] for path in paths if path in self._corrections), None)

    def _check(self, correction: _Correction) -> None:
        """Has the last thought of a correction corrected, or passes the best one on."""
        assert self.correct is not None
        last = correction.thoughts[-1]
        if (
            correction.left
            and last.error is None
            and comparable_score(last) < self.below
            and _model_call_before(last) is not None
        ):
            correction.left -= 1
            self._corrections[last.path] = correction
            self._own.append(feedback_inquiry(self.correct, last, "correction"))
        else:
            self._end_correction(correction)

    def _end_correction(self, correction: _Correction) -> None:
        for thought in correction.thoughts:
            self._corrections.pop(thought.path, None)
        whole = [thought for thought in correction.thoughts if thought.error is None]
        self._pass_on(best(whole or correction.thoughts)[0])

    def _corrected(self, inquiry: Inquiry, text: str | None) -> None:
        """Makes a thought's model call once more, with feedback on the thought."""
        thought = inquiry.about
        correction = self._corrections[thought.path]
        if text is None:
            return self._end_correction(correction)
        call = _model_call_before(thought)
        assert call is not None and self.correct is not None
        self._ready.append(
            dataclasses.replace(
                call,
                path=(*thought.path, -1),
                parent=thought,
                dialogue=with_feedback(self.correct, thought, text),
                stands_for=call.stands_for or call,
                course=None,
                children=None,
                arrived=None,
                score=None,
                fired=0,
            )
        )

    # Consensus.

    def _voters(self) -> list[State]:
        """The answers of the active trees that have one, in order."""
        return [
            tree.accepted
            for number, tree in enumerate(self._trees)
            if number not in self._inactive and tree.over
            if tree.accepted and tree.accepted.finished
        ]

    def _check_end(self) -> None:
        if self.over or self._answers:
            return
        answers = self._voters()
        is_over = all(tree.over for tree in self._trees)
        if self.early and not is_over:
            num_active = self.trees - len(self._inactive)
            is_over = self._consensus(answers, num_active) is not None
        if not is_over:
            return
        if self.expert is None or not answers or self._consensus(answers, len(answers)):
            return self.stop("")
        self._answers = answers
        judged = [Judged.of(answer) for answer in answers]
        read = functools.partial(indices, count=len(answers))
        self._own.append(Inquiry(answers[0], 0, self.expert, (judged,), "decision", read))

    def _consensus(self, answers: Sequence[State], voters: int) -> State | None:
        """The first answer that more than half of the voters have given, or None."""
        if self.key is None or not answers:
            return None
        found = majority(answers, self.key)
        key = self.key(found.value)
        same = sum(self.key(answer.value) == key for answer in answers)
        return found if same > voters / 2 else None

    def inquiries(self) -> list[Inquiry]:
        found = [*self._own]
        for tree in self._trees:
            if not tree.over:
                found += tree.inquiries()
        return found

    def answered(self, inquiry: Inquiry, value: Any, failed: State | None) -> None:
        own = [each for each in self._own if each.path == inquiry.path]
        if not own:
            tree = self._trees[self._number_of(inquiry.about)]
            if not tree.over:
                tree.answered(inquiry, value, failed)
            return self._check_end()
        self._own.remove(own[0])
        if inquiry.role == "correction":
            return self._corrected(inquiry, value)
        self.stop("")
        if failed is None:
            self.accepted = self._answers[value[0]]

    def stop(self, reason: str) -> None:
        for tree in self._trees:
            if not tree.over:
                tree.stop(reason or "the answer is known")
        answers = self._voters()
        self.over, self.accepted = True, None
        if answers:
            self.accepted = majority(answers, self.key) if self.key else best(answers)[0]


def _model_call_before(state: State) -> State | None:
    """The nearest state above one that waits for the model in its own dialogue, or None."""
    above = state.parent
    while above is not None and not above.asks_model:
        above = above.parent
    return None if getattr(above and above.waiting, "place", None) is not None else above
