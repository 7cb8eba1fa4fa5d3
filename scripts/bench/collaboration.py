"""The forward passes that workers with a shared cache save on unseen problems, and why.

    python -m scripts.bench.collaboration                           # the full measurement: 200 problems, an hour and a half on two cores
    python -m scripts.bench.collaboration --quick                   # a few problems, one and two workers
    python -m scripts.bench.collaboration --json --output FILE      # one JSON object

Accuracy against the budget of forward passes (Hogwild! Inference, section 4.1), as `jaxshare
evaluate` measures it: workers against one, against baselines with as many rows, and against
themselves with a part taken away. Each case is one evaluation in a folder of --out, and what is
there already is not run again. How to read the result is in benchmarks/README.md.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxshare.serving.evaluation import Point, plot
from jaxshare.serving.evaluation.arithmetic_forms import FORMS
from scripts.bench.lib import Goal, Parser, finish, machine, own_command, table, versions
from scripts.bench.parts.collaboration import by_form, going_on
from scripts.papers.hogwild_cases import (
    ABLATIONS,
    ASKED,
    BASELINES,
    ENCODED,
    TEMPERATURE,
    UNASKED,
    Evaluations,
    result_of,
)

OF_TWO, OF_FOUR = 0.52, 0.3
"""Goals: passes to 90% of two and of four workers, times those of one."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One evaluation.

    Attributes:
      what: in a few words, for tables.
      workers: numbers of them.
      more: arguments of `jaxshare evaluate`.
      task, questions: of the problems.
      most, step: the largest budget, and the distance of two.
    """

    what: str
    workers: tuple[int, ...]
    more: tuple[str, ...] = ()
    task: str = "sums"
    questions: str = "5"
    most: int = 208
    step: int = 16

    @property
    def budgets(self) -> tuple[int, ...]:
        return tuple(range(16, self.most + 1, self.step))


BASE, TYPED, DEPENDENT = "workers", "typed", "dependent"
RIGHT = 0.98
"""Goal: what part of the questions is right in the end in the worst of the forms in which a person
types sums."""
GOES_ON = {1: 0.95, 2: 0.9, 4: 0.9}
"""Goals by number of workers: what part of the questions that use another answer is right in the
end."""
_DIFFERING = ("--temperature", str(TEMPERATURE))
_OTHERS = {
    "self-consistency": Case(
        "self-consistency", (2, 4), (*BASELINES["self-consistency"], *_DIFFERING)
    ),
    "vote": Case("self-consistency by vote", (2, 4), (*BASELINES["vote"], *_DIFFERING)),
    "skeleton": Case("Skeleton-of-Thought", (2, 4), BASELINES["skeleton"]),
}
"""The baselines."""
CASES = {
    BASE: Case("combined layout", (1, 2, 4, 6), ABLATIONS[UNASKED], most=256, step=8),
    **_OTHERS,
    "contiguous": Case("contiguous layout", (4,), ABLATIONS["contiguous"]),
    "interleaved": Case("interleaved: no instant sight", (4,), ABLATIONS["interleaved"]),
    "asked": Case("asked whether redundant", (4,), ("--ask-every", str(ASKED))),
    ENCODED: Case("steps encoded anew", (2, 4), ABLATIONS[ENCODED]),
    "five to ten": Case(
        "five to ten questions", (1, 2, 4, 6), ABLATIONS[UNASKED], questions="5-10", most=480
    ),
    TYPED: Case(
        "sums as a person types them",
        (1, 2, 4),
        ABLATIONS[UNASKED],
        task="sums-typed",
        questions="1-10",
        most=480,
        step=48,
    ),
    DEPENDENT: Case(
        "dependent questions",
        (1, 2, 4),
        ABLATIONS[UNASKED],
        task="sums-dependent",
        most=304,
        step=32,
    ),
}
QUICK = {
    BASE: dataclasses.replace(CASES[BASE], workers=(1, 2), step=24),
    "vote": dataclasses.replace(CASES["vote"], workers=(2,), step=48),
    ENCODED: dataclasses.replace(CASES[ENCODED], workers=(2,), step=48),
}


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a case.

    Attributes:
      points: accuracy by number of workers and budget.
      passes_to_90: by number of workers.
      forms: accuracy at the last budget by number of workers and form, where problems have one.
      going_on: that of questions that use another answer, by number of workers, where there are any.
    """

    points: tuple[Point, ...]
    passes_to_90: Mapping[int, float | None]
    forms: Mapping[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    going_on: Mapping[int, float] = dataclasses.field(default_factory=dict)

    def accuracy(self, workers: int) -> dict[int, float]:
        """By budget."""
        return {point.budget: point.accuracy for point in self.points if point.workers == workers}


def evaluate(
    evaluations: Evaluations, case: Case, model: str, problems: int, folder: Path
) -> Found:
    """Runs a case, or what is left of it."""
    asked = [
        model,
        "--task",
        case.task,
        "--questions",
        case.questions,
        "--samples",
        str(problems),
        "--workers",
        ",".join(map(str, case.workers)),
        "--budgets",
        ",".join(map(str, case.budgets)),
        *case.more,
        "--resume",
        "--out",
        str(folder),
    ]
    if code := evaluations.evaluate(asked):
        raise RuntimeError(f"`jaxshare evaluate {' '.join(asked)}` ended with code {code}")
    result = result_of(folder)
    return Found(
        tuple(Point(**point) for point in result["points"]),
        {int(count): passes for count, passes in result["passes_to_90"].items()},
        by_form(folder) if case.task == "sums-typed" else {},
        going_on(folder, int(case.questions)) if case.task == "sums-dependent" else {},
    )


def goals(found: Mapping[str, Found]) -> list[Goal]:
    """The goals of the cases that were run."""
    base = found.get(BASE, Found((), {}))
    wanted = [
        share(base, count, goal, "five questions") for count, goal in ((2, OF_TWO), (4, OF_FOUR))
    ]
    if "five to ten" in found:
        wanted += [
            share(found["five to ten"], count, goal, "five to ten questions")
            for count, goal in ((2, OF_TWO), (4, OF_FOUR))
        ]
    if TYPED in found:
        wanted += [
            Goal(
                f"{count} worker{'s' * (count > 1)}: part of the questions that is right in the "
                "worst form of typing",
                min(forms.values()),
                RIGHT,
            )
            for count, forms in found[TYPED].forms.items()
        ]
    if DEPENDENT in found:
        wanted += [
            Goal(
                f"{count} worker{'s' * (count > 1)}: part of the questions that use another answer "
                "that is right",
                part,
                GOES_ON[count],
            )
            for count, part in found[DEPENDENT].going_on.items()
        ]
    for name, case in _OTHERS.items():
        if name in found:
            wanted += [
                Goal(
                    f"{count} workers: points of accuracy above {case.what} at the worst budget",
                    lead(base, found[name], count),
                    0,
                )
                for count in (2, 4)
            ]
    if {BASE, ENCODED} <= found.keys():
        wanted.append(
            Goal(
                "rotated or encoded anew: budgets at which the 95% intervals lie apart",
                apart(base, found[ENCODED]),
                0,
                True,
            )
        )
    last = {count: max(line.items())[1] for count in (4, 6) if (line := base.accuracy(count))}
    wanted.append(
        Goal(
            "6 workers: points of accuracy above 4 at the largest budget",
            100 * (last[6] - last[4]) if len(last) == 2 else None,
            0,
        )
    )
    return wanted


def share(found: Found, count: int, goal: float, what: str) -> Goal:
    """Passes to 90% of several workers, times those of one."""
    one, several = (found.passes_to_90.get(n) for n in (1, count))
    return Goal(
        f"{count} workers: passes to 90%, times those of one; {what}",
        several / one if one and several else None,
        goal,
        True,
    )


def lead(ours: Found, theirs: Found, count: int) -> float | None:
    """Points of accuracy above the others at the budget where that is least, the smallest budget
    left out."""
    mine, other = ours.accuracy(count), theirs.accuracy(count)
    common = sorted(mine.keys() & other.keys())[1:]
    return min((100 * (mine[budget] - other[budget]) for budget in common), default=None)


def apart(one: Found, other: Found) -> int:
    """Numbers of workers and budgets at which the intervals do not touch."""
    there = {(point.workers, point.budget): point for point in other.points}
    return sum(
        point.low > twin.high or twin.low > point.high
        for point in one.points
        if (twin := there.get((point.workers, point.budget)))
    )


def as_text(report: Mapping[str, Any], found: Mapping[str, Found]) -> str:
    """Tables: all cases, and accuracy against budgets."""
    counts = sorted({point.workers for case in found.values() for point in case.points})
    rows = [
        [CASES[name].what, *(_passes(case, count) for count in counts)]
        for name, case in found.items()
    ]
    parts = [
        table(("passes to 90%", *(f"{count} row{'s' * (count > 1)}" for count in counts)), rows)
    ]
    budgets = range(32, max(case.most for case in CASES.values() if _of_five(case)) + 1, 32)
    lines = [
        [
            f"{CASES[name].what}, {count}",
            *(f"{100 * line[b]:.1f}" if b in line else "" for b in budgets),
        ]
        for name, case in found.items()
        if _of_five(CASES[name])
        for count in counts
        if (line := case.accuracy(count))
    ]
    parts.append(table(("accuracy, %, after passes", *map(str, budgets)), lines))
    if DEPENDENT in found:
        marks = found[DEPENDENT].going_on.items()
        parts.append(
            "questions that use another answer, right in the end: "
            + ", ".join(
                f"{100 * part:.1f}% with {count} row{'s' * (count > 1)}" for count, part in marks
            )
        )
    if TYPED in found:
        by = found[TYPED].forms
        parts.append(
            table(
                (
                    "right in the end, %, by form",
                    *(f"{count} row{'s' * (count > 1)}" for count in by),
                ),
                [[form, *(f"{100 * forms[form]:.1f}" for forms in by.values())] for form in FORMS],
            )
        )
    head = f"{report['settings']['problems']} problems that the model has not seen, greedily but for streams that are to differ"
    return "\n\n".join([head, *parts])


def draw(found: Mapping[str, Found], folder: Path) -> None:
    """Pictures like figure 3 of the paper."""

    def lines(name: str, count: int) -> list[Point]:
        return (
            [point for point in found[name].points if point.workers == count]
            if name in found
            else []
        )

    folder.mkdir(parents=True, exist_ok=True)
    for name, title in ((BASE, "five questions"), ("five to ten", "five to ten questions")):
        if name in found:
            of = {
                f"{count} worker{'s' * (count > 1)}": line
                for count in CASES[name].workers
                if (line := lines(name, count))
            }
            plot.accuracy_picture(of, f"{title}, shared cache").savefig(
                folder / f"collaboration-{name.replace(' ', '-')}.png", dpi=130
            )
    baselines = {case.what: line for name, case in _OTHERS.items() if (line := lines(name, 4))}
    if baselines and (workers := lines(BASE, 4)):
        plot.accuracy_picture(
            {"4 workers": workers, **baselines}, "five questions, four rows each"
        ).savefig(folder / "collaboration-baselines.png", dpi=130)


def parse(arguments: Sequence[str] | None) -> Any:
    parser = Parser(prog="scripts.bench.collaboration", description=__doc__.partition("\n")[0])
    parser.add_model()
    parser.add_argument("--problems", type=int, help="default 200, and 4 with --quick")
    parser.add_argument(
        "--only", metavar="CASE,CASE,...", help=f"some of the cases: {', '.join(CASES)}"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("build/collaboration"),
        help="all texts (default %(default)s)",
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw pictures there")
    parser.add_argument("--quick", action="store_true", help="a few problems, one and two workers")
    parser.reporting()
    options = parser.parse_args(arguments)
    options.only = (
        None if options.only is None else parser.some_of("--only", options.only, [*CASES])
    )
    options.problems = (
        (4 if options.quick else 200) if options.problems is None else options.problems
    )
    if options.problems < 1:
        parser.error(f"--problems is {options.problems}, but at least 1 is needed")
    if options.only and options.quick:
        parser.error("--only chooses cases of the full measurement; leave out --quick")
    parser.check_output(options.output)
    parser.check_folder("--out", options.out)
    parser.check_folder("--plots", options.plots)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    asked = own_command(__file__, arguments)
    where = machine()
    cases = QUICK if options.quick else {name: CASES[name] for name in options.only or CASES}
    folder = options.out / f"{'quick-' if options.quick else ''}{options.problems}"
    evaluations = Evaluations()
    found = {
        name: evaluate(
            evaluations, case, options.model, options.problems, folder / name.replace(" ", "-")
        )
        for name, case in tqdm(cases.items(), "cases", file=sys.stderr)
    }
    report = {
        "benchmark": "collaboration",
        "command": asked,
        "machine": where,
        "versions": versions(("jax", "flax")),
        "settings": {
            "model": options.model,
            "problems": options.problems,
            "quick": options.quick,
            "cases": {name: dataclasses.asdict(case) for name, case in cases.items()},
        },
        "results": {
            name: {
                "passes_to_90": case.passes_to_90,
                "points": [dataclasses.asdict(point) for point in case.points],
                **({"forms": case.forms} if case.forms else {}),
                **({"going_on": case.going_on} if case.going_on else {}),
            }
            for name, case in found.items()
        },
    }
    finish(
        report, as_text(report, found), goals(found), as_json=options.json, output=options.output
    )
    if options.plots:
        draw(found, options.plots)
    return 0


def _of_five(case: Case) -> bool:
    return (case.task, case.questions) == ("sums", "5")


def _passes(case: Found, count: int) -> str:
    if count not in case.passes_to_90:
        return ""
    passes = case.passes_to_90[count]
    return "never" if passes is None else f"{passes:.0f}"


if __name__ == "__main__":
    sys.exit(main())
