"""From texts to numbers: what is right, accuracy by budget with its uncertainty, and how many
passes it takes to get somewhere."""

import collections
import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxshare.serving.evaluation.mathematics import Mathematician
from jaxshare.serving.evaluation.runs import Run
from jaxshare.serving.evaluation.sandbox import Limits, Verdict, run_tests
from jaxshare.serving.evaluation.tasks import Problem

_Z95 = statistics.NormalDist().inv_cdf(0.975)
_COMMA = re.compile(r"\s*,\s*")
_COMMA_OF_LIST = re.compile(r"\s*,\s+|\s*,(?!\d{3}(?!\d))\s*|(?<!\d),\s*")
"""A comma that is not between the thousands of a number."""


@dataclasses.dataclass(frozen=True)
class Score:
    """One answer of one run, marked.

    Attributes:
      workers, problem, number: of the run; budget: of forward passes.
      value: the answer, or None.
      right: for each question of the problem whether it is right.
      written: the answer was written in time, and not asked for.
      error: what the tests of a program have said.
    """

    workers: int
    problem: str
    number: int
    budget: int
    value: str | None
    right: tuple[bool, ...]
    written: bool
    error: str | None = None

    @property
    def part(self) -> float:
        """The part of the questions that is right: 0.8 for 4 of 5 (section 4.1)."""
        return sum(self.right) / len(self.right)


class Scorer:
    """Marks answers. The same answer to the same problem is looked at once."""

    def __init__(
        self, problems: Iterable[Problem], mathematician: Mathematician, limits: Limits = Limits()
    ):
        self._problems = {problem.id: problem for problem in problems}
        self._mathematician, self._limits = mathematician, limits
        self._verdicts: dict[tuple[str, str], Verdict] = {}

    def score(self, run: Run) -> list[Score]:
        """One for each budget."""
        problem, found = self._problems[run.problem], []
        for budget, answer in run.result["answers"].items():
            value = answer["value"]
            right, error = (
                self._program(problem, value)
                if problem.tests is not None
                else (self._right(problem, value), None)
            )
            found.append(
                Score(
                    run.workers,
                    run.problem,
                    run.number,
                    int(budget),
                    value,
                    right,
                    value is not None and not answer["extra_passes"],
                    error,
                )
            )
        return found

    def _right(self, problem: Problem, value: str | None) -> tuple[bool, ...]:
        return right_answers(
            problem.answers, value, str.__eq__ if problem.exact else self._mathematician.same
        )

    def _program(
        self, problem: Problem, program: str | None
    ) -> tuple[tuple[bool, ...], str | None]:
        if program is None or problem.tests is None:
            return (False,), "there is no program"
        key = problem.id, program
        if key not in self._verdicts:
            self._verdicts[key] = run_tests(program, problem.tests, self._limits)
        return (self._verdicts[key].passed,), self._verdicts[key].error


def right_answers(
    references: Sequence[str], value: str | None, same: Callable[[str, str], bool]
) -> tuple[bool, ...]:
    """Whether each of the answers in a box is right.

    Args:
      references: what is right, in order.
      value: what stands in the box: with several references as many answers with commas between
        them. Too few: those that are missing are wrong. Too many: nobody can tell which is which,
        and all are wrong.
      same: (reference, answer) -> whether they are the same.
    """
    if value is None or not value.strip():
        return (False,) * len(references)
    if len(references) == 1:
        return (same(references[0], value.strip()),)
    parts = _entries(value.strip().replace("{,}", ","), len(references))
    if len(parts) > len(references):
        return (False,) * len(references)
    parts += [""] * (len(references) - len(parts))
    return tuple(
        bool(part) and same(reference, part)
        for reference, part in zip(references, parts, strict=True)
    )


def _entries(text: str, wanted: int) -> list[str]:
    """Of a list with commas. A comma may be one between thousands where all commas together make
    too many entries, or where others have a space behind them."""
    parts = _COMMA.split(text)
    if len(parts) == wanted or (len(parts) < wanted and not re.search(r",\s", text)):
        return parts
    return [part.replace(",", "") for part in _COMMA_OF_LIST.split(text)]


@dataclasses.dataclass(frozen=True)
class Point:
    """Accuracy of one number of workers at one budget.

    Attributes:
      workers, budget: of them.
      accuracy: the mean over problems of the part of their questions that is right, over seeds
        first.
      low, high: its 95% interval; see `wilson`.
      written: the part of the runs whose answer was written in time.
      problems, runs: how many there are.
    """

    workers: int
    budget: int
    accuracy: float
    low: float
    high: float
    written: float
    problems: int
    runs: int


def points(scores: Iterable[Score]) -> list[Point]:
    """Accuracy by number of workers and budget, in ascending order."""
    groups: dict[tuple[int, int], list[Score]] = collections.defaultdict(list)
    for score in scores:
        groups[score.workers, score.budget].append(score)
    found = []
    for (workers, budget), group in sorted(groups.items()):
        by_problem: dict[str, list[float]] = collections.defaultdict(list)
        for score in group:
            by_problem[score.problem].append(score.part)
        accuracy = statistics.fmean(statistics.fmean(parts) for parts in by_problem.values())
        low, high = wilson(accuracy, len(by_problem))
        found.append(
            Point(
                workers,
                budget,
                accuracy,
                low,
                high,
                statistics.fmean(score.written for score in group),
                len(by_problem),
                len(group),
            )
        )
    return found


def wilson(accuracy: float, problems: int) -> tuple[float, float]:
    """Wilson's score interval of 95% (Wilson, 1927) for a mean over problems.

    A problem that is right in part, over several questions or seeds, counts as one all the same:
    what is drawn at random are problems, and questions of one are not independent. A mean of values
    from 0 to 1 varies at most as one of noughts and ones does, so the interval is too wide there
    rather than too narrow.

    Args:
      accuracy: the mean, 0 to 1.
      problems: how many, at least 1.
    """
    z2 = _Z95**2 / problems
    middle, half = accuracy + z2 / 2, math.sqrt(z2 * (accuracy * (1 - accuracy) + z2 / 4))
    return max(0.0, (middle - half) / (1 + z2)), min(1.0, (middle + half) / (1 + z2))


def passes_to(found: Iterable[Point], accuracy: float) -> dict[int, float | None]:
    """For each number of workers the forward passes after which it is this accurate for the first
    time.

    Between two budgets a straight line is drawn. Where the smallest budget is enough already, it is
    that one; None where no budget is.
    """
    by_workers: dict[int, list[Point]] = collections.defaultdict(list)
    for point in sorted(found, key=lambda point: point.budget):
        by_workers[point.workers].append(point)
    return {workers: _first(line, accuracy) for workers, line in sorted(by_workers.items())}


def _first(line: Sequence[Point], accuracy: float) -> float | None:
    if line[0].accuracy >= accuracy:
        return float(line[0].budget)
    for left, right in itertools.pairwise(line):
        if right.accuracy >= accuracy:
            return left.budget + (right.budget - left.budget) * (accuracy - left.accuracy) / (
                right.accuracy - left.accuracy
            )
    return None


def table(found: Sequence[Point]) -> str:
    """Accuracy in percent with its interval, a row for each budget and a column for each number of
    workers."""
    workers, budgets = (
        sorted({getattr(point, name) for point in found}) for name in ("workers", "budget")
    )
    cells: Mapping[tuple[int, int], str] = {
        (p.workers, p.budget): f"{100 * p.accuracy:.1f} ({100 * p.low:.0f}-{100 * p.high:.0f})"
        for p in found
    }
    header = ["passes", *(f"{count} worker{'s' * (count > 1)}" for count in workers)]
    rows = [
        [str(budget), *(cells.get((count, budget), "") for count in workers)] for budget in budgets
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [header, *rows]
    )
