"""Scores: marks of answers, accuracy by budget with its uncertainty, and passes to an accuracy."""

import collections
import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxshare.argument_checks import as_float, as_integer
from jaxshare.serving.evaluation.checkers.cases import run_cases
from jaxshare.serving.evaluation.checkers.mathematics import Mathematician
from jaxshare.serving.evaluation.checkers.sandbox import Limits, Verdict, run_tests
from jaxshare.serving.evaluation.data_sets.mathematics import listed_answers
from jaxshare.serving.evaluation.problems import Problem
from jaxshare.serving.evaluation.runs import Run, label

_Z95 = statistics.NormalDist().inv_cdf(0.975)
_COMMA = re.compile(r"\s*,\s*")
_COMMA_OF_LIST = re.compile(r"\s*,\s+|\s*,(?!\d{3}(?!\d))\s*|(?<!\d),\s*")
"""A comma that is not between the thousands of a number."""
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_AND = re.compile(r",?\s*(?:\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)\s*")
_LATEX = re.compile(r"\\(?:mathrm|mathbf|text|operatorname|left|right|quad)|\\[ ,;:!]|[{}$~\s]")
"""The parts of LaTeX that set a unit and mean nothing."""


@dataclasses.dataclass(frozen=True)
class Score:
    """One answer of one run, marked.

    Attributes:
      workers, problem, number: of the run; budget: of forward passes.
      value: the answer, or None.
      right: for each question of the problem, True for a right answer.
      written: the answer was written in time, and not requested early.
      error: the error of a program or its tests.
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
    """Marks answers. The same answer to the same problem is checked once."""

    def __init__(
        self, problems: Iterable[Problem], mathematician: Mathematician, limits: Limits = Limits()
    ):
        self._problems = {problem.id: problem for problem in problems}
        self._mathematician, self._limits = mathematician, limits
        self._verdicts: dict[tuple[str, str], Verdict] = {}

    def score(self, run: Run) -> list[Score]:
        """Marks a run, once for each budget."""
        problem, scores = self._problems[run.problem], []
        for budget, answer in run.result["answers"].items():
            value = answer["value"]
            right, error = (
                self._program(problem, value)
                if problem.is_program
                else (self._right(problem, value), None)
            )
            scores.append(
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
        return scores

    def _right(self, problem: Problem, value: str | None) -> tuple[bool, ...]:
        if problem.any_order:
            return (self._all_listed(problem, value),)
        if value is not None and (problem.tolerances or problem.unit):
            [reference], [tolerance] = problem.answers, problem.tolerances or (None,)
            return (self._same(reference, value, tolerance, problem.unit),)
        return right_answers(
            problem.answers, value, str.__eq__ if problem.exact else self._mathematician.same
        )

    def _all_listed(self, problem: Problem, value: str | None) -> bool:
        """True if a list has all answers of a problem and no others, in any order."""
        tolerances = problem.tolerances or (None,) * len(problem.answers)
        given = _listed(value, len(tolerances))
        if len(given) != len(tolerances):
            return False
        return all_matched(
            [
                [self._same(reference, part, tolerance, problem.unit) for part in given]
                for reference, tolerance in zip(problem.answers, tolerances, strict=True)
            ]
        )

    def _same(self, reference: str, answer: str, tolerance: float | None, unit: str | None) -> bool:
        """True if an answer is the reference, with or without the unit at its end."""
        answers = dict.fromkeys((answer, without_unit(answer, unit)))
        return any(self._mathematician.same(reference, each, tolerance) for each in answers)

    def _program(
        self, problem: Problem, program: str | None
    ) -> tuple[tuple[bool, ...], str | None]:
        if program is None:
            return (False,), "there is no program"
        key = problem.id, program
        if key not in self._verdicts:
            self._verdicts[key] = judged(problem, program, self._limits)
        return (self._verdicts[key].passed,), self._verdicts[key].error


def judged(problem: Problem, program: str, limits: Limits = Limits()) -> Verdict:
    """The verdict of a problem's tests or cases on a program.

    Args:
      problem: whose answer is a program.
      program: Python code, which runs in the sandbox.
      limits: of it.
    """
    if problem.cases is not None:
        return run_cases(
            program,
            problem.cases.read(),
            limits,
            function=problem.cases.function,
            preamble=problem.preamble,
        )
    return run_tests(program, problem.tests or "", limits, preamble=problem.preamble)


def right_answers(
    references: Sequence[str], value: str | None, same: Callable[[str, str], bool]
) -> tuple[bool, ...]:
    """Marks each of the answers in a box.

    Args:
      references: the right answers, in order.
      value: the content of the box: an answer for each reference, with commas between them. Missing
        answers are wrong. With too many, the answers cannot be matched with the references, and all
        are wrong.
      same: (reference, answer) -> True if they are the same.
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


def all_matched(equal: Sequence[Sequence[bool]]) -> bool:
    """True if each reference can have an answer of its own.

    Args:
      equal: for each reference and each answer, whether they are the same. Within a tolerance an
        answer may be the same as several references.
    """
    taken: dict[int, int] = {}

    def give(reference: int, tried: set[int]) -> bool:
        for answer, same in enumerate(equal[reference]):
            if same and answer not in tried:
                tried.add(answer)
                if answer not in taken or give(taken[answer], tried):
                    taken[answer] = reference
                    return True
        return False

    return all(give(reference, set()) for reference in range(len(equal)))


def without_unit(answer: str, unit: str | None) -> str:
    """An answer without the unit at its end, however it is written in LaTeX."""
    if unit is None or not (plain := _LATEX.sub("", unit)):
        return answer
    for i in range(1, len(answer)):
        before = answer[:i]
        if before.count("{") == before.count("}") and _LATEX.sub("", answer[i:]) == plain:
            return before.strip() or answer
    return answer


def _listed(value: str | None, count: int) -> list[str]:
    """The answers in a list, of which there should be so many."""
    text = _AND.sub(",", (value or "").replace("{,}", ","))
    inner = text.strip().strip("$").strip()
    if inner.startswith("\\{") and inner.endswith("\\}"):
        text = inner[2:-2]
    parts = listed_answers(text)
    return parts if len(parts) <= count else listed_answers(_THOUSANDS.sub("", text))


def _entries(text: str, count: int) -> list[str]:
    """The entries of a list with commas.

    A comma may separate thousands where all commas together would make too many entries, or where
    others are followed by a space.
    """
    parts = _COMMA.split(text)
    if len(parts) == count or (len(parts) < count and not re.search(r",\s", text)):
        return parts
    return [part.replace(",", "") for part in _COMMA_OF_LIST.split(text)]


@dataclasses.dataclass(frozen=True)
class Point:
    """The accuracy of one number of workers at one budget.

    Attributes:
      workers, budget: the two numbers.
      accuracy: the mean over problems of the part of their questions that is right, over seeds
        first.
      low, high: its 95% interval; see `wilson`.
      written: the part of the runs whose answer was written in time.
      problems, runs: their numbers.
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
    """Computes accuracy by number of workers and budget, in ascending order."""
    groups: dict[tuple[int, int], list[Score]] = collections.defaultdict(list)
    for score in scores:
        groups[score.workers, score.budget].append(score)
    points = []
    for (workers, budget), group in sorted(groups.items()):
        by_problem: dict[str, list[float]] = collections.defaultdict(list)
        for score in group:
            by_problem[score.problem].append(score.part)
        accuracy = statistics.fmean(statistics.fmean(parts) for parts in by_problem.values())
        low, high = wilson(accuracy, len(by_problem))
        points.append(
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
    return points


def lines(method: str, points: Iterable[Point]) -> dict[str, list[Point]]:
    """The points of each number of workers, by the label of their line in a legend."""
    by_workers: dict[int, list[Point]] = collections.defaultdict(list)
    for point in points:
        by_workers[point.workers].append(point)
    return {label(method, count): line for count, line in sorted(by_workers.items())}


def wilson(accuracy: float, problems: int) -> tuple[float, float]:
    """Wilson's score interval of 95% (Wilson, 1927) for a mean over problems.

    A problem that is right in part, over several questions or seeds, still counts as one: problems
    are the random sample, and questions of one problem are not independent. A mean of values from 0
    to 1 varies at most as a mean of zeros and ones does, so there the interval is too wide rather
    than too narrow.

    Args:
      accuracy: the mean, 0 to 1.
      problems: their number, at least 1.

    Raises:
      ValueError, TypeError: they are others.
    """
    accuracy = as_float("accuracy", accuracy, 0, 1)
    problems = as_integer("problems", problems, 1)
    z2 = _Z95**2 / problems
    middle, half = accuracy + z2 / 2, math.sqrt(z2 * (accuracy * (1 - accuracy) + z2 / 4))
    return max(0.0, (middle - half) / (1 + z2)), min(1.0, (middle + half) / (1 + z2))


def passes_to(points: Iterable[Point], accuracy: float) -> dict[int, float | None]:
    """The forward passes until each number of workers reaches an accuracy for the first time.

    Budgets are interpolated linearly. Where the smallest budget is enough, the result is that
    budget, and an upper bound (`at_smallest_budget`); where none is enough, None.
    """
    by_workers: dict[int, list[Point]] = collections.defaultdict(list)
    for point in sorted(points, key=lambda point: point.budget):
        by_workers[point.workers].append(point)
    return {workers: _first(line, accuracy) for workers, line in sorted(by_workers.items())}


def at_smallest_budget(points: Iterable[Point], accuracy: float) -> list[int]:
    """The numbers of workers whose smallest budget is enough, so that `passes_to` is a bound."""
    smallest: dict[int, Point] = {}
    for point in points:
        least = smallest.setdefault(point.workers, point)
        smallest[point.workers] = min(least, point, key=lambda each: each.budget)
    return sorted(n for n, point in smallest.items() if point.accuracy >= accuracy)


def _first(line: Sequence[Point], accuracy: float) -> float | None:
    if line[0].accuracy >= accuracy:
        return float(line[0].budget)
    for left, right in itertools.pairwise(line):
        if right.accuracy >= accuracy:
            return left.budget + (right.budget - left.budget) * (accuracy - left.accuracy) / (
                right.accuracy - left.accuracy
            )
    return None


def cell(point: Point) -> str:
    """An accuracy in percent with its interval: "83.3 (67-93)"."""
    return f"{100 * point.accuracy:.1f} ({100 * point.low:.0f}-{100 * point.high:.0f})"


def table(points: Sequence[Point], method: str = "workers") -> str:
    """A table of accuracy in percent with its interval.

    It has a row per budget and a column per number of workers, or of streams of another method.
    """
    workers, budgets = (
        sorted({getattr(point, name) for point in points}) for name in ("workers", "budget")
    )
    cells: Mapping[tuple[int, int], str] = {(p.workers, p.budget): cell(p) for p in points}
    header = ["passes", *(label(method, count) for count in workers)]
    rows = [
        [str(budget), *(cells.get((count, budget), "") for count in workers)] for budget in budgets
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [header, *rows]
    )
