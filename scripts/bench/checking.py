"""Workers that check each other: how many errors that were put into a session they find and mend.

    python -m scripts.bench.checking                             # 200 problems, with two and four workers
    python -m scripts.bench.checking --quick                     # 8 problems
    python -m scripts.bench.checking --json --output FILE        # one JSON object

A problem of five sums asks workers to check what others answer. When they begin, another one
(Zoe, who writes no more) has answered two of its questions, one of them wrongly: one digit of the
answer is another, and of half of them a digit of a step as well. One worker has to notice, and
another one to give the right answer. The other side is the same session without the words that ask
for checks. Greedy. How to read the result is in benchmarks/README.md.
"""

import dataclasses
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from jaxshare import Sampler
from jaxshare.models import LoadedModel, load
from jaxshare.serving import Workers
from jaxshare.serving.evaluation.arithmetic import (
    QUESTIONS,
    SumsProblem,
    check,
    make_problem,
)
from jaxshare.serving.workers.layouts import worker_names
from scripts.bench.lib import Goal, Parser, finish, machine, own_command, table, versions
from scripts.train.checking import wrong_body
from scripts.train.paragraphs import FOUND

OTHER = "Zoe"
"""The name of the one that has answered before the workers begin."""
PASSES = 400
COUNTS = (2, 4)
MENDED, FALSE_ALARMS = 0.8, 0.02
"""Goals: the part of the errors that are found and mended, and of the right answers that are called
wrong at most."""


@dataclasses.dataclass(frozen=True)
class Injected:
    """A problem with two answers that are there from the begin.

    Attributes:
      problem: asks for checks; wrong, right: the numbers of the questions that were answered so.
      texts: the steps, in order.
    """

    problem: SumsProblem
    wrong: int
    right: int
    texts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Marks:
    """The result of one session.

    Attributes:
      found: a worker has said that the wrong answer is wrong, and what is right.
      mended: the last answer to that question in the text is right, by another worker than the
        one that has found it, and so is its place in the box.
      false_alarms: answers that were right and were called wrong; checks: of right answers.
      boxed: the part of the answers in the box that is right.
      passes: until the session ended.
    """

    found: bool
    mended: bool
    false_alarms: int
    checks: int
    boxed: float
    passes: int


def inject(seed: int) -> Injected:
    """The problem with this number, and what is put into its session. No lesson draws it."""
    rng = random.Random(f"checking/{seed}")
    problem = dataclasses.replace(make_problem(rng), checked=True)
    wrong, right = rng.sample(range(1, QUESTIONS + 1), 2)
    bodies = {wrong: wrong_body(problem, wrong, rng), right: problem.body(right)}
    order = rng.sample([wrong, right], 2)
    return Injected(problem, wrong, right, tuple(bodies[number].strip() for number in order))


def run(model: LoadedModel, injected: Injected, workers: int, *, checked: bool) -> Marks:
    """One session, from what was answered before to the box, and its marks."""
    problem = dataclasses.replace(injected.problem, checked=checked)
    session = Workers(
        model,
        problem.prompt(),
        names=worker_names(workers),
        budget=PASSES,
        sampler=Sampler(temperature=0.0),
        history_tokens=1024,
    )
    with session:
        for text in injected.texts:
            session.say(" " + text, OTHER)
        result = session.run()
    texts = {name: text for name, text in result.texts.items() if name in worker_names(workers)}
    return marks(injected, texts, result.passes)


def marks(injected: Injected, texts: Mapping[str, str], passes: int) -> Marks:
    """The marks of what each worker has written."""
    answers = injected.problem.answers
    finders, alarms, checks = set(), 0, 0
    for name, text in texts.items():
        for number, value, said in FOUND.findall(text):
            if int(number) == injected.wrong:
                if said != "right" and int(value) == answers[injected.wrong - 1]:
                    finders.add(name)
            else:
                checks += 1
                alarms += said != "right"
    menders = {
        name
        for name, text in texts.items()
        if f" is right. Answer {injected.wrong}: {answers[injected.wrong - 1]}." in text
    }
    boxes = [found for text in texts.values() if any(found := check(text, injected.problem))]
    best = boxes[0] if boxes else [False] * QUESTIONS
    return Marks(
        bool(finders),
        bool(finders and menders - finders and best[injected.wrong - 1]),
        alarms,
        checks,
        sum(best) / QUESTIONS,
        passes,
    )


@dataclasses.dataclass(frozen=True)
class Found:
    """The means over the sessions of one number of workers.

    Attributes:
      found, mended: parts of the wrong answers; false_alarms: part of the right answers that were
        checked.
      boxed: part of the boxed answers that are right; unasked: the same where nothing asks for
        checks.
      passes, passes_unasked: until the box, in the mean.
    """

    found: float
    mended: float
    false_alarms: float
    boxed: float
    unasked: float
    passes: float
    passes_unasked: float

    @classmethod
    def of(cls, asked: Sequence[Marks], unasked: Sequence[Marks]) -> "Found":
        """The means of paired sessions."""

        def mean(values: Sequence[float]) -> float:
            return sum(values) / len(values)

        return cls(
            mean([marks.found for marks in asked]),
            mean([marks.mended for marks in asked]),
            sum(marks.false_alarms for marks in asked)
            / max(1, sum(marks.checks for marks in asked)),
            mean([marks.boxed for marks in asked]),
            mean([marks.boxed for marks in unasked]),
            mean([marks.passes for marks in asked]),
            mean([marks.passes for marks in unasked]),
        )


def goals(found: Mapping[int, Found]) -> list[Goal]:
    """The goals for each number of workers."""
    return [
        goal
        for count, means in found.items()
        for goal in (
            Goal(f"{count} workers: errors found and mended", means.mended, MENDED),
            Goal(
                f"{count} workers: right answers called wrong",
                means.false_alarms,
                FALSE_ALARMS,
                True,
            ),
        )
    ]


def as_text(problems: int, found: Mapping[int, Found]) -> str:
    """The table of all numbers of workers."""
    rows = [
        [
            str(count),
            *(f"{100 * value:.1f}" for value in (means.found, means.mended, means.false_alarms)),
            f"{100 * means.boxed:.1f} ({100 * means.unasked:.1f})",
            f"{means.passes:.0f} ({means.passes_unasked:.0f})",
        ]
        for count, means in found.items()
    ]
    head = (
        f"{problems} problems of {QUESTIONS} questions, one answer right and one wrong at the begin"
    )
    columns = (
        "workers",
        "errors found, %",
        "and mended",
        "false alarms, %",
        "right in the box, % (not asked to check)",
        "passes (not asked)",
    )
    return f"{head}\n\n{table(columns, rows)}"


def parse(arguments: Sequence[str] | None) -> Any:
    parser = Parser(prog="scripts.bench.checking", description=__doc__.partition("\n")[0])
    parser.add_model()
    parser.add_argument("--problems", type=int, help="default 200, and 8 with --quick")
    parser.add_argument("--quick", action="store_true", help="a few problems")
    parser.reporting()
    options = parser.parse_args(arguments)
    options.problems = (
        (8 if options.quick else 200) if options.problems is None else options.problems
    )
    if options.problems < 1:
        parser.error(f"--problems is {options.problems}, but at least 1 is needed")
    parser.check_output(options.output)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    asked = own_command(__file__, arguments)
    where, model = machine(), load(options.model)
    injected = [inject(seed) for seed in range(options.problems)]
    found = {
        count: Found.of(
            *(
                [
                    run(model, each, count, checked=checked)
                    for each in tqdm(injected, f"{count} workers", file=sys.stderr)
                ]
                for checked in (True, False)
            )
        )
        for count in COUNTS
    }
    report = {
        "benchmark": "checking",
        "command": asked,
        "machine": where,
        "versions": versions(("jax", "flax")),
        "settings": {
            "model": options.model,
            "problems": options.problems,
            "workers": list(COUNTS),
            "passes": PASSES,
        },
        "results": {str(count): dataclasses.asdict(means) for count, means in found.items()},
    }
    text = as_text(options.problems, found)
    finish(report, text, goals(found), as_json=options.json, output=options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
